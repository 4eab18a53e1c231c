"""Cross-attention as an alignment: whether a head looks at the source token that the decoder copies."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from tinyformer.analysis.context import AnalysisContext, Trained, require_positive
from tinyformer.data import TextTokenizer
from tinyformer.errors import ArgumentError, require_at_least
from tinyformer.measures.capture import capture_pair, head_label, map_names
from tinyformer.measures.inputs import TokenPair, pairs_of
from tinyformer.measures.words import words_of
from tinyformer.nn import EncoderDecoder
from tinyformer.report.charts import head_grid
from tinyformer.report.result import AnalysisResult, naming_ablated

Copied = list[tuple[int, int]]
"""For each copied token, the row of cross-attention that predicts it and its position in the source."""


@dataclass(eq=False)
class CrossAlignment:
    """The share of targets for which each head of the cross-attention attends most to the token that is copied.

    Bahdanau et al. 2014 (arXiv 1409.0473, figure 3) inspect alignments by eye; here they are counted. A word of the
    target, such as a number or a name, counts as copied if it occurs once in the target and once in the source, in as
    many tokens; then the source token of each of its tokens is known. A head hits a copied token if the row that
    predicts it has its largest weight on that source token. The best head is chosen on one half of the pairs and tested
    on the other, for the trained and the untrained network.
    """

    num_windows: int = 200  # half of the pairs choose the head
    min_length: int = 2  # characters of a copied word
    needs_gradient = False

    def __post_init__(self) -> None:
        require_at_least(2, {"num_windows": 200}, num_windows=self.num_windows)
        require_positive(self, "min_length")

    def __call__(self, model: Trained, folder: Path = Path()) -> AnalysisResult:
        context = model.sample(self.num_windows)
        if not isinstance(context.network, EncoderDecoder):
            reason = "analyses the cross-attention of models that were trained with task=seq2seq"
            raise ArgumentError("analysis", "alignment", reason, {"analysis": "heads"})
        cross = context.network.cross_attentions()
        pairs = [
            (pair, copied)
            for batch in context.batches
            for pair in pairs_of(batch)
            if (copied := copied_tokens(pair, context.tokenizer, self.min_length))
        ]
        halves = pairs[::2], pairs[1::2]
        if not halves[1]:
            reason = f"needs at least two pairs with a copied word, and the sample has {len(pairs)}"
            raise ArgumentError("num_windows", self.num_windows, reason, {"num_windows": 10 * self.num_windows})
        columns, rows = ["model", "layer", "head", "choosing", "tested", "chosen"], []
        ablated, best, hits = [], {}, {}
        heads = [(number, name) for number, layer in enumerate(cross) for name in map_names(layer)]
        for model_name, network in context.networks().items():
            assert isinstance(network, EncoderDecoder)
            choosing, tested = (_hits(context, network, half) for half in halves)
            flags = [flag for layer in network.cross_attentions() for flag in layer.ablated_maps()]
            ablated += flags
            chosen = int(torch.cat(choosing).masked_fill(torch.tensor(flags), -1).argmax())
            hits[model_name] = [of_layer.tolist() for of_layer in tested]
            best[model_name] = (*heads[chosen], float(torch.cat(tested)[chosen]))
            shares = zip(heads, torch.cat(choosing).tolist(), torch.cat(tested).tolist(), strict=True)
            rows += [[model_name, *head, *of_head, index == chosen] for index, (head, *of_head) in enumerate(shares)]
        counts = [sum(len(copied) for _, copied in half) for half in halves]
        return AnalysisResult(
            scalars={f"analysis/{name}/copied_tokens_hit": share for name, (*_, share) in best.items()},
            lines={
                "alignment": f"share of copied tokens that the best head hits, chosen on {counts[0]} of "
                f"{len(halves[0])} pairs, tested on {counts[1]} of {len(halves[1])} others",
                **{
                    f"  {name}": f"{share:.1%} by cross layer {layer} head {head_label(head)}"
                    for name, (layer, head, share) in best.items()
                },
            },
            tables={"alignment": naming_ablated(columns, rows, ablated)},
            figures={
                "alignment": head_grid(
                    hits["trained"],
                    [[head_label(head) for head in map_names(layer)] for layer in cross],
                    f"Copied tokens that heads of the cross-attention hit, of {counts[1]}",
                    label="share of copied tokens",
                    ablated=[layer.ablated_maps() for layer in cross],
                )
            },
        )


def copied_tokens(pair: TokenPair, tokenizer: TextTokenizer, min_length: int = 2) -> Copied:
    """The tokens of the words that a target copies from its source, see `CrossAlignment`."""
    places, rows = (_once(ids[0].tolist(), tokenizer) for ids in (pair.source, pair.predicted))
    copied: Copied = []
    for name, own in rows.items():
        source = places.get(name, [])
        if len(own) == len(source) and len(name) >= min_length and any(map(str.isalnum, name)):
            copied += zip(own, source, strict=True)
    return copied


def _once(ids: Sequence[int], tokenizer: TextTokenizer) -> dict[str, list[int]]:
    """The positions of the tokens of each word that occurs once, without white space and `eos`."""
    words = words_of(ids, tokenizer)
    is_text = [token not in tokenizer.special_ids and bool(tokenizer.decode([token]).strip()) for token in ids]
    counts = Counter(words.names)
    return {
        name: [place for place in words.tokens(index) if is_text[place]]
        for index, name in enumerate(words.names)
        if counts[name] == 1
    }


def _hits(
    context: AnalysisContext, network: EncoderDecoder, pairs: Sequence[tuple[TokenPair, Copied]]
) -> list[Float[Tensor, " maps"]]:
    """For each map of each layer, the share of copied tokens that it hits."""
    found = []
    for pair, copied in pairs:
        with context.precision():
            layers = capture_pair(network, pair)["cross"].layers
        rows, places = (torch.tensor(side) for side in zip(*copied, strict=True))
        found.append([layer.weights[0].cpu()[:, rows].argmax(dim=-1) == places for layer in layers])
    return [torch.cat(of_layer, dim=-1).double().mean(dim=-1) for of_layer in zip(*found, strict=True)]
