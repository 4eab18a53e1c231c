"""Baselines for translation: copying the source, the most frequent target, a dictionary, and a language model.

    python benchmarks/translation.py verses_es_en [lm/checkpoints/last.ckpt]

`verses_es_en` is a folder with train.tsv, validation.tsv and test.tsv, whose columns are `source` and `target`. The
dictionary is IBM model 1 (Brown et al. 1993) as `nltk` trains it, in five rounds on the first 10,000 training pairs:
each word of the source becomes the word that is most probable given it. A checkpoint of `experiment=translate_lm_cpu`
translates by continuing each source and a line break, with the beam search of encoder–decoders. Prints the test BLEU
and chrF of each, after a minute, and a few more for a checkpoint.
"""

import re
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import cast

import torch
from jaxtyping import Float, Int
from nltk.translate import AlignedSent, IBMModel1
from torch import Tensor

import tinyformer
from tinyformer.data import PairTokens, TextFiles
from tinyformer.generation.generation import Beam, beam_search
from tinyformer.model.model import Model
from tinyformer.nn import AttentionMask, Cache, Context, Transformer
from tinyformer.tasks.text_metrics import text_metrics

NUM_PAIRS, NUM_ROUNDS = 10_000, 5
MAX_TOKENS = 128
"""Maximum number of tokens of a source and of a target, as in `experiment=translate_cpu`; for a language model with a
shorter context, half of that."""
MAX_HYPOTHESES = 128


def words(text: str) -> list[str]:
    """The words and punctuation marks of a text."""
    return re.findall(r"\w+|[^\w\s]", text)


class Continuing:
    """A causal language model with the interface of an encoder–decoder: the context of a target is the text before it.

    Args:
        network: the model.
    """

    def __init__(self, network: Transformer) -> None:
        self.network, self.decoder, self.training = network, network.encoder, network.training

    def eval(self) -> None:
        """Evaluation mode."""
        self.network.eval()

    def train(self, mode: bool = True) -> None:
        """Training mode, or evaluation mode."""
        self.network.train(mode)

    def encode(self, source: Int[Tensor, "batch seq"], mask: AttentionMask) -> Context:
        """The tokens themselves, which all have one length."""
        return Context(source, mask)

    def decode(
        self, tokens: Int[Tensor, "batch seq"], context: Context, cache: Cache | None = None
    ) -> Float[Tensor, "batch 1 vocab_size"]:
        """The logits of the next token; in place of the token that begins a target there is the text before it."""
        if cache is None or not cache.length:
            tokens = torch.cat([context.vectors, tokens[:, 1:]], dim=1)
        return self.network.readout(self.network.encoder(tokens, AttentionMask(causal=True), cache)[:, -1:])


def translate(model: Model, sources: Sequence[str], beam: Beam, use_cache: bool = True) -> list[str]:
    """The translations by a causal language model of documents of two lines; sources of one length go together."""
    tokenizer, network = model.tokenizer, Continuing(cast(Transformer, model.network))
    end, line_break = tokenizer.eos_id, tokenizer.encode("\n")
    most = min(MAX_TOKENS, model.network.max_seq_len // 2)
    prompts = [[end, *ids[: most - 2], *line_break] for ids in tokenizer.encode_batch(sources)]
    rows_of: dict[int, list[int]] = defaultdict(list)
    for row, prompt in enumerate(prompts):
        rows_of[len(prompt)].append(row)
    outputs: dict[int, str] = {}
    for length, alike in rows_of.items():
        for rows in torch.tensor(alike).split(MAX_HYPOTHESES // beam.beams):
            source = torch.tensor([prompts[row] for row in rows])
            lengths = torch.full_like(rows, length)
            found = beam_search(network, source, lengths, PairTokens(end, end, (end,)), beam, most, use_cache)
            outputs |= zip(rows.tolist(), map(tokenizer.decode, found), strict=True)
    return [outputs[row] for row in range(len(sources))]


def main() -> None:
    """Print the scores."""
    splits = TextFiles(sys.argv[1]).load("pairs")
    train, test = splits["train"], splits["test"]
    pairs = zip(train["text"][:NUM_PAIRS], train["pair"][:NUM_PAIRS], strict=True)
    model = IBMModel1([AlignedSent(words(target), words(source)) for source, target in pairs], NUM_ROUNDS)
    table: dict[str, Counter[str]] = {}
    for target, of_sources in model.translation_table.items():
        for source, probability in of_sources.items():
            if source is not None:
                table.setdefault(source, Counter())[target] = probability
    best = {source: targets.most_common(1)[0][0] for source, targets in table.items()}
    outputs = {
        "copying the source": test["text"],
        "most frequent target": [Counter(train["pair"]).most_common(1)[0][0]] * len(test),
        "IBM model 1": [" ".join(best.get(word, word) for word in words(text)) for text in test["text"]],
    }
    if checkpoint := sys.argv[2:]:
        model = tinyformer.load(checkpoint[0])
        assert isinstance(model, Model)
        for beams in (1, 4):
            outputs[f"language model, beam {beams}"] = translate(model, test["text"], Beam(beams))
    for name, texts in outputs.items():
        metrics = text_metrics(texts, test["pair"])
        print(f"{name:<23} BLEU {metrics['bleu']:.1f}, chrF {metrics['chrf']:.1f}")


if __name__ == "__main__":
    main()
