"""Every head's map of a text, to be looked at: a page to click through, a picture, and a table of measures."""

from pathlib import Path
from typing import cast

import torch

from tinyformer.analysis.atlas import write_atlas
from tinyformer.analysis.importance import head_importance
from tinyformer.analysis.measures import MEASURES, PATTERNS, repeated_tokens
from tinyformer.analysis.plots import head_maps
from tinyformer.analysis.probe import HeadMeasures, Probe, capture_weights, measure_heads
from tinyformer.analysis.subject import Findings, Subject, at_least_one, by_layer, fullest
from tinyformer.batch import Batch, tensors

NUM_TOKENS = 48
"""Of a text, where no number is given and the model sees as many."""

PICTURE_TOKENS = 24
"""As many as can be told apart beside the heads of a whole model."""

NUM_REPEATED, PERIOD = 8, 32
"""Sequences of random tokens that are said twice, and how many tokens of each."""


class HeadMaps:
    """The exact maps of a text: `atlas.html` and a picture; measures and importance over windows: `maps.csv`.

    Args:
        text: whose maps; the beginning of the evaluated split unless given.
        num_tokens: of it that are shown; 48, or as many as the model sees, unless given.
        num_windows: of the evaluated split, over which measures and importance are taken.
        importance: whether to take it, which needs gradients.
        rows: queries of each window that the measures are of, as in `capture_attention`.

    Raises:
        ValueError: a number is too small or too large, or the text is empty.
    """

    def __init__(
        self,
        text: str | None = None,
        num_tokens: int | None = None,
        num_windows: int = 16,
        importance: bool = True,
        rows: int = 256,
    ) -> None:
        if num_tokens is not None:
            at_least_one("num_tokens", num_tokens, NUM_TOKENS)
        self.text, self.num_tokens, self.rows = text, num_tokens, at_least_one("rows", rows, 256)
        self.num_windows, self.needs_gradient = at_least_one("num_windows", num_windows, 16), importance

    def __call__(self, subject: Subject, folder: Path) -> Findings:
        text = None if self.text is None else subject.encode(self.text)
        tokens = self._tokens(subject, text)
        probe = torch.tensor([tokens], device=subject.batches[0]["inputs"].device)
        with subject.precision():
            captured = capture_weights(subject.network, probe, subject.mask({"inputs": probe}))
        maps, labels, measures = [weights[0] for weights in captured], subject.labels(tokens), self._measures(subject)
        names = [[name.removeprefix("0") for name in layer] for layer in measures.names]  # for people: 3, not 03
        atlas = write_atlas(folder / "atlas.html", maps, labels, measures.values, names, descriptions=self._meanings())
        table, shown = measures.table(), slice(0, PICTURE_TOKENS)
        of_all = f" (analysis.text has {len(text):,})" if text and len(text) > len(tokens) else ""
        return Findings(
            lines={"atlas": f"{len(table[1])} maps of {len(tokens)} tokens{of_all}; open {atlas.name} in a browser"},
            tables={"maps": table},
            figures={"maps": head_maps([m[:, shown, shown] for m in maps], labels[shown], "attention", names)},
            files=[atlas],
        )

    def _tokens(self, subject: Subject, text: list[int] | None) -> list[int]:
        """Those that are shown, of a text or of the split.

        Raises:
            ValueError: there is none, or there are more than the model sees.
        """
        context = subject.network.encoder.max_seq_len
        num_tokens = min(NUM_TOKENS, context) if self.num_tokens is None else self.num_tokens
        if num_tokens > context:
            raise ValueError(
                f"analysis.num_tokens={num_tokens}: the model sees {context}; analysis.num_tokens={context} works."
            )
        if text == []:
            raise ValueError("analysis.text is empty; 'analysis.text=A cat.' works, and null is the split's beginning.")
        return (subject.batches[0]["inputs"][0].tolist() if text is None else text)[:num_tokens]

    def _measures(self, subject: Subject) -> HeadMeasures:
        """Of each map: measures of the windows, patterns of repeated random tokens, and its head's importance."""
        batches = [tensors(batch) for batch in subject.batches]
        joined = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
        windows = fullest(cast(Batch, joined), self.num_windows)
        probes, encoder = [Probe(windows["inputs"], subject.mask(windows), MEASURES)], subject.network.encoder
        period = min(PERIOD, encoder.max_seq_len // 2)
        if period:
            tokens = repeated_tokens(encoder.vocab_size, NUM_REPEATED, period).to(windows["inputs"].device)
            probes.append(Probe(tokens, subject.mask({"inputs": tokens}), PATTERNS))
        measured = measure_heads(subject.network, probes, self.rows, subject.precision())
        if not self.needs_gradient:
            return measured
        importance = by_layer(subject.layers, head_importance(subject))
        # A head's importance is that of each of its softmaxes.
        repeated = [
            [value for value in values for _ in range(layer.num_softmaxes)]
            for layer, values in zip(subject.layers, importance, strict=True)
        ]
        return HeadMeasures(measured.names, {**measured.values, "importance": repeated})

    def _meanings(self) -> dict[str, str]:
        meanings = {name: measure.meaning for name, measure in (MEASURES | PATTERNS).items()}
        return {**meanings, "importance": "mean |gradient of the loss in the head's gate|, nats per token"}
