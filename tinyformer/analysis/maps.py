"""Attention maps of a text: an interactive page, a picture and a table of measures."""

from pathlib import Path
from typing import cast

import torch

from tinyformer.analysis.atlas import write_atlas
from tinyformer.analysis.importance import MEANING, head_importance
from tinyformer.analysis.measures import MEANINGS
from tinyformer.analysis.plots import head_maps
from tinyformer.analysis.probe import HeadMeasures, capture_weights, make_probes, measure_heads
from tinyformer.analysis.subject import Findings, Subject, by_layer, fullest
from tinyformer.batch import Batch, tensors
from tinyformer.errors import ArgumentError, require_at_least

NUM_TOKENS = 48
"""Default number of tokens; fewer where the context is shorter."""

PICTURE_TOKENS = 24
"""Number of tokens in the picture, whose labels must stay legible beside all heads of a model."""

NUM_SEQUENCES, PERIOD = 8, 32
"""Number of sequences of repeated random tokens, and number of random tokens in each."""


class HeadMaps:
    """The exact attention maps of a text (`atlas.html`, `maps.png`), and measures and importance of heads (`maps.csv`).

    Args:
        text: the text; the beginning of the evaluated split by default.
        num_tokens: number of tokens shown; by default 48, or the context length if that is smaller.
        num_windows: number of windows of the evaluated split over which measures and importance are computed.
        importance: whether to compute importance, which needs gradients.
        rows: number of queries of each window that are measured, see `capture_attention`.

    Raises:
        ArgumentError: a number is too small or too large, or the text is empty.
    """

    def __init__(
        self,
        text: str | None = None,
        num_tokens: int | None = None,
        num_windows: int = 16,
        importance: bool = True,
        rows: int = 256,
    ) -> None:
        works = {"num_tokens": NUM_TOKENS, "num_windows": 16, "rows": 256}
        require_at_least(1, works, num_tokens=num_tokens, num_windows=num_windows, rows=rows)
        self.text, self.num_tokens, self.rows = text, num_tokens, rows
        self.num_windows, self.needs_gradient = num_windows, importance

    def __call__(self, subject: Subject, folder: Path) -> Findings:
        text = None if self.text is None else subject.tokenizer.encode(self.text)
        tokens = self._shown_tokens(subject, text)
        shown = torch.tensor([tokens], device=subject.batches[0]["inputs"].device)
        with subject.precision():
            captured = capture_weights(subject.network, shown, subject.task.mask({"inputs": shown}))
        maps, measures = [weights[0] for weights in captured], self._measures(subject)
        token_strings = subject.tokenizer.token_strings(tokens)
        names = [[name.removeprefix("0") for name in layer] for layer in measures.names]  # for people: 3, not 03
        descriptions = MEANINGS | {"importance": f"{MEANING}, nats per {subject.task.unit}"}
        atlas = write_atlas(
            folder / "atlas.html", maps, token_strings, measures.values, names, descriptions=descriptions
        )
        table, first = measures.table(), slice(0, PICTURE_TOKENS)
        of_text = f" of the text's {len(text):,}" if text and len(text) > len(tokens) else ""
        picture = head_maps([weights[:, first, first] for weights in maps], token_strings[first], "attention", names)
        return Findings(
            lines={"atlas": f"{len(table[1])} maps of {len(tokens)}{of_text} tokens; open {atlas.name} in a browser"},
            tables={"maps": table},
            figures={"maps": picture},
            files=[atlas],
        )

    def _shown_tokens(self, subject: Subject, text: list[int] | None) -> list[int]:
        """The first tokens of the text, or of the split.

        Raises:
            ArgumentError: there are none, or more than the model's context holds.
        """
        context = subject.network.encoder.max_seq_len
        num_tokens = min(NUM_TOKENS, context) if self.num_tokens is None else self.num_tokens
        if num_tokens > context:
            reason = f"must be at most {context}, the context length of the model"
            raise ArgumentError("num_tokens", num_tokens, reason, {"num_tokens": context})
        if text == []:
            raise ArgumentError("text", self.text, "must not be empty", {"text": "A cat."})
        return (subject.batches[0]["inputs"][0].tolist() if text is None else text)[:num_tokens]

    def _measures(self, subject: Subject) -> HeadMeasures:
        """`MEASURES` of windows, `PATTERNS` of repeated random tokens, and importance."""
        encoder = subject.network.encoder
        batches = [tensors(batch) for batch in subject.batches]
        joined = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
        windows = fullest(cast(Batch, joined), self.num_windows)
        probes = make_probes(subject.task, windows, encoder.vocab_size, encoder.max_seq_len, NUM_SEQUENCES, PERIOD)
        measures = measure_heads(subject.network, probes, self.rows, subject.precision())
        if not self.needs_gradient:
            return measures
        importance = by_layer(subject.layers, head_importance(subject))
        # A differential head has two maps and one importance.
        repeated = [
            [value for value in values for _ in range(layer.num_softmaxes)]
            for layer, values in zip(subject.layers, importance, strict=True)
        ]
        return HeadMeasures(measures.names, {**measures.values, "importance": repeated}, measures.layers)
