"""Attention maps of a text, or of a pair of texts: an interactive page, a picture and a table of measures."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, cast

import torch
from torch import Tensor

from tinyformer.analysis.importance import head_importance
from tinyformer.analysis.measures.events import head_labels
from tinyformer.analysis.measures.measures import MEASURES, PATTERNS, measure_layers
from tinyformer.analysis.measures.padding import queries_by_kind, without_padding
from tinyformer.analysis.measures.pair_probe import (
    Axes,
    TokenPair,
    axes_of_pair,
    capture_pair,
    decoded_pair,
    measure_pairs,
    pairs_of,
    sides_of,
)
from tinyformer.analysis.measures.probe import (
    HeadMeasures,
    ablated_maps,
    capture_weights,
    head_label,
    make_probes,
    measure_heads,
)
from tinyformer.analysis.pictures.atlas import write_atlas
from tinyformer.analysis.pictures.plots import head_maps
from tinyformer.analysis.scales import EXPLANATIONS
from tinyformer.analysis.subject import Findings, Subject, Trained, by_layer
from tinyformer.data import PairTokens
from tinyformer.errors import ArgumentError, require_at_least
from tinyformer.nn import EncoderDecoder, Transformer
from tinyformer.tasks import Seq2Seq

NUM_TOKENS = 48
"""Default number of tokens; fewer where the context is shorter."""

PICTURE_TOKENS = 24
"""Number of tokens in the picture, few enough for legible labels in maps of all heads."""

NUM_SEQUENCES, PERIOD = 8, 32
"""Number of sequences of repeated random tokens, and number of random tokens in each."""


class Shown(NamedTuple):
    """What is shown, and what is measured.

    Attributes:
        maps: the weights of each layer.
        axes: the tokens of the maps, by the kind of attention; the kind is "" where there is only one.
        measures: the measures of each head.
        extent: the number of tokens that are shown, in words.
    """

    maps: list[Tensor]
    axes: Mapping[str, Axes]
    measures: HeadMeasures
    extent: str


class HeadMaps:
    """The exact attention maps of a text (`atlas.html`, `maps.png`), and measures and importance of heads (`maps.csv`).

    For an encoder–decoder, the maps of a source and its target (`atlas.html`, `cross_maps.png` and so on).

    Args:
        text: the text, which the model reads as in `TextTokenizer.read`; two texts for a classifier of pairs; or the
            source. By default, the first window of the sample, or its first pair with at most `num_tokens` tokens on
            each side.
        target: the target of the source; by default what the model decodes.
        num_tokens: number of tokens shown, for a pair on each side; by default 48, or the context length if that is
            smaller.
        num_windows: number of windows, examples or pairs, drawn at random from the evaluated split, over which measures
            and importance are computed where there is no text. The measures of a text are its own.
        importance: whether to compute importance, which needs gradients; not that of a text, which has no targets.
        rows: number of queries of each window that are measured, see `capture_attention`; in a pair, all are.

    Raises:
        ArgumentError: a number is too small or too large, a text is empty, or there is a target without a source.
    """

    def __init__(
        self,
        text: str | Sequence[str] | None = None,
        target: str | None = None,
        num_tokens: int | None = None,
        num_windows: int = 16,
        importance: bool = True,
        rows: int = 256,
    ) -> None:
        works = {"num_tokens": NUM_TOKENS, "num_windows": 16, "rows": 256}
        require_at_least(1, works, num_tokens=num_tokens, num_windows=num_windows, rows=rows)
        if target is not None and text is None:
            raise ArgumentError("target", target, "needs `text`, the source that it belongs to", {"target": None})
        self.text, self.target, self.num_tokens, self.rows = text, target, num_tokens, rows
        self.num_windows, self.needs_gradient = num_windows, importance and text is None

    def __call__(self, model: Trained, folder: Path = Path()) -> Findings:
        subject = model.sample(self.num_windows)
        shown = (self._pair if isinstance(subject.network, EncoderDecoder) else self._one_text)(subject)
        measures = self._with_importance(subject, shown.measures)
        names = [list(map(head_label, layer)) for layer in measures.names]
        ablated = ablated_maps(subject.network)
        tokens = shown.axes[""].queries if "" in shown.axes else shown.axes
        atlas = write_atlas(
            folder / "atlas.html",
            shown.maps,
            tokens,
            measures.values,
            names,
            descriptions=EXPLANATIONS,
            addresses=subject.addresses,
            facts=subject.facts_of_text(self.text) if self.text else {**subject.facts, "loss": self._loss(subject)},
            labels=head_labels(measures.values),
            ablated=ablated,
        )
        plural = "s" * (shown.extent != "1")
        table, first, pictures = measures.table(), slice(0, PICTURE_TOKENS), {}
        for kind, axes in shown.axes.items():
            of_kind = [index for index, address in enumerate(subject.addresses) if kind in ("", address[0])]
            pictures[f"{kind}_maps".removeprefix("_")] = head_maps(
                [shown.maps[index][:, first, first] for index in of_kind],
                axes.queries[first],
                f"{kind} attention maps".strip().capitalize(),
                [names[index] for index in of_kind],
                axes.keys[first],
                sides_of(kind),
                [ablated[index] for index in of_kind],
            )
        return Findings(
            lines={"atlas": f"{len(table[1])} maps of {shown.extent} token{plural}; open {atlas.name} in a browser"},
            tables={"maps": table},
            figures={**pictures},
            files=[atlas],
            facts=None if self.text is None else subject.facts_of_text(self.text),
        )

    def _one_text(self, subject: Subject) -> Shown:
        """The maps of a text.

        Raises:
            ArgumentError: there are no tokens, or more than the model's context holds, or there is a target.
        """
        if self.target is not None:
            reason = "a model of one text has no target; one that is trained with task=seq2seq has"
            raise ArgumentError("target", self.target, reason, {"target": None})
        num_tokens, text = self._length(subject), None if self.text is None else subject.tokens_of(self.text)
        first, is_token = subject.batches[0]["inputs"][0], queries_by_kind(subject.batches[0])[""][0]
        tokens = (first[is_token].tolist() if text is None else text)[:num_tokens]
        shown = torch.tensor([tokens], device=first.device)
        with subject.precision():
            captured = capture_weights(cast(Transformer, subject.network), shown, subject.task.mask({"inputs": shown}))
        strings = subject.tokenizer.token_strings(tokens)
        axes = {"": Axes(strings, strings)}
        if text is None:
            measures = self._measures(subject)
        else:
            measures = HeadMeasures.of(subject.network, measure_layers(MEASURES | PATTERNS, captured, shown))
        return Shown([weights[0] for weights in captured], axes, measures, _extent(tokens, text))

    def _loss(self, subject: Subject) -> str:
        """The loss of the windows or pairs that are measured, in words."""
        losses = subject.losses()
        return f"{losses.mean:.4f} nats per {subject.task.unit}, over {len(losses.nats)} {subject.row}s"

    def _measures(self, subject: Subject) -> HeadMeasures:
        """`MEASURES` on windows, and `PATTERNS` on repeated random tokens."""
        encoder = subject.network.encoder
        windows = without_padding(subject.batches)
        probes = make_probes(subject.task, windows, encoder.vocab_size, encoder.max_seq_len, NUM_SEQUENCES, PERIOD)
        return measure_heads(cast(Transformer, subject.network), probes, self.rows, subject.precision())

    def _pair(self, subject: Subject) -> Shown:
        """The maps of a source and its target.

        Raises:
            ArgumentError: a text is empty, or there are more tokens than the model's context holds.
        """
        network = cast(EncoderDecoder, subject.network)
        pairs = [pair for batch in subject.batches for pair in pairs_of(batch)]
        num_tokens, task = self._length(subject), cast(Seq2Seq, subject.task)
        tokens = task.special_tokens.around(subject.tokenizer)
        text = None if self.text is None else subject.tokens_of(self.text, around=False)
        target = None if self.target is None else subject.tokens_of(self.target, around=False, argument="target")
        with subject.precision():
            if text is None:
                pair = _first_that_fits(pairs, num_tokens, tokens)
            elif target is None:
                pair = decoded_pair(network, text, tokens, task.beam, num_tokens)
            else:
                pair = TokenPair.of(text, target, tokens, num_tokens).to(pairs[0].source.device)
            captured = capture_pair(network, pair)
        maps = [weights[0] for of_kind in captured.values() for weights in of_kind]
        measures = measure_pairs(network, pairs if text is None else [pair], subject.precision())
        extents = [
            _extent(ids[0].tolist(), None if given is None else tokens.predicted(given))
            for ids, given in ((pair.source, text), (pair.target, target))
        ]
        extent = "{} source and {} target".format(*extents)
        axes = axes_of_pair(pair, subject.tokenizer)
        return Shown(maps, {kind: axes[kind] for kind in captured}, measures, extent)

    def _length(self, subject: Subject) -> int:
        """The largest number of tokens to show.

        Raises:
            ArgumentError: it is more than the model's context holds.
        """
        context = subject.network.max_seq_len
        num_tokens = min(NUM_TOKENS, context) if self.num_tokens is None else self.num_tokens
        if num_tokens > context:
            reason = f"must be at most {context}, the context length of the model"
            raise ArgumentError("num_tokens", num_tokens, reason, {"num_tokens": context})
        return num_tokens

    def _with_importance(self, subject: Subject, measures: HeadMeasures) -> HeadMeasures:
        """The measures, with importance unless it is turned off."""
        if not self.needs_gradient:
            return measures
        importance = by_layer(subject.layers, head_importance(subject))
        # A differential head has two maps and one importance.
        repeated = [
            [
                math.nan if is_ablated else value
                for value, is_ablated in zip(values, layer.ablated(), strict=True)
                for _ in range(layer.num_softmaxes)
            ]
            for layer, values in zip(subject.layers, importance, strict=True)
        ]
        return replace(measures, values={**measures.values, "importance": repeated})


def _extent(tokens: Sequence[int], text: Sequence[int] | None) -> str:
    """The number of tokens that are shown, with that of the whole text if it is cut."""
    return f"{len(tokens)} of the text's {len(text):,}" if text and len(text) > len(tokens) else str(len(tokens))


def _first_that_fits(pairs: Sequence[TokenPair], num_tokens: int, tokens: PairTokens) -> TokenPair:
    """The first pair with at most `num_tokens` on each side; if there is none, the first pair, cut."""
    fitting = (pair for pair in pairs if max(pair.source.shape[1], pair.target.shape[1]) <= num_tokens)
    if (pair := next(fitting, None)) is not None:
        return pair
    source, target = (tokens.without_bos(ids[0, :-1].tolist()) for ids in (pairs[0].source, pairs[0].predicted))
    return TokenPair.of(source, target, tokens, num_tokens).to(pairs[0].source.device)
