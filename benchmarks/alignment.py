"""Where cross-attention looks while a date is copied, before and after training.

    python train.py experiment=dates_cpu hydra.run.dir=dates
    python benchmarks/alignment.py dates/checkpoints/best.ckpt

The year and the day of an ISO date are copied from the source, digit by digit, so it is known which token of the source
each of these digits comes from. For each head of the cross-attention: the share of copied digits in whose row the
largest weight is on that token. The head is chosen on validation pairs, for the trained and for the untrained network
by itself, and tested on ten test pairs; both are those of the run, which has not seen their dates nor their formats.
Prints both shares, and the pairs.
"""

import re
import sys
from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float

import tinyformer
from tinyformer.analysis import TokenPair, capture_pair
from tinyformer.checkpoint import load_checkpoint
from tinyformer.data import Dates, PairTokens, TextTokenizer
from tinyformer.nn import EncoderDecoder
from tinyformer.seq2seq_model import Seq2SeqModel

NUM_CHOOSING, NUM_TESTED = 100, 10

Copied = list[tuple[int, int]]
"""The places of copied characters in a target, and in its source."""


def copied_digits(source: str, target: str) -> Copied:
    """The digits of year and day that a target copies."""
    year, day = target[:4], str(int(target[-2:]))
    found = []
    for digits, end in ((year, 4), (day, 10)):
        (place,) = re.finditer(rf"(?<!\d){digits}(?!\d)", source)
        found += [(end - len(digits) + i, place.start() + i) for i in range(len(digits))]
    return found


def token_pair(tokenizer: TextTokenizer, source: str, target: str) -> TokenPair:
    """A pair as the network reads it; its tokens are characters."""
    source_ids, ids = tokenizer.encode_batch([source, target])
    return TokenPair.of(source_ids, ids, PairTokens(tokenizer.eos_id, tokenizer.eos_id), len(source_ids) + len(ids) + 1)


def hits(
    network: EncoderDecoder, tokenizer: TextTokenizer, pairs: Sequence[tuple[str, str]]
) -> Float[torch.Tensor, "layers heads"]:
    """For each head, the share of copied digits whose row has its largest weight on the digit that is copied."""
    found = []
    for source, target in pairs:
        maps = capture_pair(network, token_pair(tokenizer, source, target))["cross"]
        rows, columns = zip(*copied_digits(source, target), strict=True)
        places = torch.stack([weights[0, :, rows, :].argmax(dim=-1) for weights in maps])
        found.append((places == torch.tensor(columns)).float())
    return torch.cat(found, dim=-1).mean(dim=-1)


def split_pairs(split: str, seed: int) -> Iterator[tuple[str, str]]:
    """The pairs of a split of the run with this seed, in whose source year and day are different numbers."""
    for row in Dates(seed=seed).load_pairs()[split]:
        if str(int(row["pair"][-2:])) != row["pair"][:4]:
            yield row["text"], row["pair"]


def main() -> None:
    """Print the shares, and what the model makes of the tested pairs."""
    model = tinyformer.load(sys.argv[1])
    assert isinstance(model, Seq2SeqModel)
    seed = load_checkpoint(sys.argv[1]).stored["values"]["seed"]
    choosing = list(split_pairs("validation", seed))[:NUM_CHOOSING]
    tested = list(split_pairs("test", seed))[:NUM_TESTED]
    torch.manual_seed(0)
    untrained = tinyformer.load(sys.argv[1]).network
    for module in untrained.modules():
        if isinstance(module, torch.nn.Linear | torch.nn.Embedding):
            torch.nn.init.normal_(module.weight, std=0.02)
    for name, network in {"untrained": untrained, "trained": model.network}.items():
        of_heads = hits(network, model.tokenizer, choosing)
        layer, head = divmod(int(of_heads.argmax()), of_heads.shape[1])
        share = float(hits(network, model.tokenizer, tested)[layer, head])
        chosen = f"head {head} of layer {layer}, {of_heads.max():.1%} on {len(choosing)} validation pairs"
        print(f"{name:<10} {share:.1%} of the copied digits of {len(tested)} test pairs ({chosen})")
    for source, target in tested:
        print(f"{source:<36} {target}   {model.generate(source, beams=1)[0]}")


if __name__ == "__main__":
    main()
