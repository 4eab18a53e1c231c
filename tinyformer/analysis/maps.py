"""Every head's map of a text, to be looked at: a page to click through, a picture, and a table of measures."""

import math
from pathlib import Path

import torch

from tinyformer.analysis.atlas import write_atlas
from tinyformer.analysis.capture import CapturedMaps, capture_attention
from tinyformer.analysis.importance import head_importance
from tinyformer.analysis.measures import MEASURES, PATTERNS, measure_layers, repeated_tokens
from tinyformer.analysis.plots import head_maps
from tinyformer.analysis.subject import Findings, Subject, at_least_one

NUM_TOKENS = 48
"""Of a text, where no number is given and the model sees as many."""

PICTURE_TOKENS = 24
"""As many as can be told apart beside the heads of a whole model."""


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
        layers, text = subject.layers, None if self.text is None else subject.encode(self.text)
        tokens = self._tokens(subject, text)
        probe = torch.tensor([tokens], device=subject.batches[0]["inputs"].device)
        maps = [weights[0] for weights in _capture(subject, probe, subject.mask({"inputs": probe, "targets": probe}))]
        labels, names = subject.labels(tokens), [layer.map_names for layer in layers]
        measures = self._measures(subject)
        meanings = {name: measure.meaning for name, measure in (MEASURES | PATTERNS).items()}
        if self.needs_gradient:
            # A head's importance is that of each of its softmaxes.
            remaining = iter(head_importance(subject))
            measures["importance"] = [
                [value for _ in range(layer.num_heads) for value in [next(remaining)] * layer.num_softmaxes]
                for layer in layers
            ]
            meanings["importance"] = "mean |gradient of the loss in the head's gate|, nats per token"
        atlas = write_atlas(folder / "atlas.html", maps, labels, measures, names, descriptions=meanings)
        rows = [
            [layer, name, *(_or_none(values[layer][index]) for values in measures.values())]
            for layer, heads in enumerate(names)
            for index, name in enumerate(heads)
        ]
        shown = slice(0, PICTURE_TOKENS)
        of_all = f" (analysis.text has {len(text):,})" if text and len(text) > len(tokens) else ""
        return Findings(
            lines={"atlas": f"{len(rows)} maps of {len(tokens)} tokens{of_all}; open {atlas.name} in a browser"},
            tables={"maps": (["layer", "head", *measures], rows)},
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

    def _measures(self, subject: Subject) -> dict[str, list[list[float]]]:
        """Of each map: the measures of the windows, and the patterns of repeated random tokens."""
        windows = torch.cat([batch["inputs"] for batch in subject.batches])
        mask = subject.mask({name: torch.cat([b[name] for b in subject.batches]) for name in subject.batches[0]})
        encoder = subject.network.encoder
        repeated = repeated_tokens(encoder.vocab_size, 8, max(1, min(32, encoder.max_seq_len // 2))).to(windows.device)
        pattern_mask = subject.mask({"inputs": repeated, "targets": repeated})
        return {
            **measure_layers(MEASURES, _capture(subject, windows, mask, self.rows), windows),
            **measure_layers(PATTERNS, _capture(subject, repeated, pattern_mask), repeated),
        }


@torch.no_grad()
def _capture(subject: Subject, tokens: torch.Tensor, mask: object, rows: int | None = None) -> CapturedMaps:
    with capture_attention(subject.network, rows) as maps, subject.precision():
        subject.network.encoder(tokens, mask)
    return maps


def _or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None
