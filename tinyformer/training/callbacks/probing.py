"""The fixed inputs of telemetry: what is measured, and what is plotted."""

from dataclasses import dataclass
from typing import cast

import lightning as L
import torch

from tinyformer import measures, report
from tinyformer.data import DataModule, Pairs, PairSplit
from tinyformer.data.module import count
from tinyformer.generation.beam_search import Beam
from tinyformer.nn import EncoderDecoder, Transformer
from tinyformer.training.module import TrainingModule


@dataclass(frozen=True)
class Sizes:
    """The amounts that are measured and plotted; see `AttentionTelemetry`."""

    num_windows: int
    num_rows: int
    num_sequences: int
    period: int
    probe_text: str | None
    num_tokens: int


class TextProbing:
    """Measures and plots the heads of a transformer, on windows of a split and on repeated random tokens."""

    def __init__(self, data: DataModule, split: str, sizes: Sizes) -> None:
        self.sizes = sizes
        self.windows = measures.of_one_length(data.sample(split, sizes.num_windows))
        shown, text = slice(min(sizes.num_tokens, data.seq_len)), sizes.probe_text
        ids = data.tokenizer.read([text])[0][shown] if text else data.splits[split].ids[shown].tolist()
        self.probe, self.axes = torch.tensor([ids]), measures.axes_of({"": (ids, ids)}, data.tokenizer)
        self.probes: measures.Probes | None = None
        self.num_keys = self.windows["inputs"].shape[1]  # of a measured map, at most

    def measure(self, trainer: L.Trainer, module: TrainingModule, costly: bool) -> measures.HeadMeasures:
        if self.probes is None:
            windows, tokenizer = trainer.strategy.batch_to_device(self.windows), module.data.tokenizer
            numbers = tokenizer.vocab_size, module.data.seq_len, self.sizes.num_sequences, self.sizes.period
            self.probes = measures.make_probes(module.task, [windows], tokenizer, *numbers)
        context, rows = trainer.precision_plugin.forward_context(), self.sizes.num_rows
        return measures.measure_heads(cast(Transformer, module.network), self.probes, rows, context, costly)

    def pictures(self, trainer: L.Trainer, module: TrainingModule) -> dict[str, report.Picture]:
        """The attention maps of the probe text, by the name of their file."""
        tokens = trainer.strategy.batch_to_device(self.probe)
        mask = module.task.mask({"inputs": tokens})
        with trainer.precision_plugin.forward_context():
            maps = measures.capture_weights(cast(Transformer, module.network), tokens, mask)
        title = f"attention maps after {count(module.step, 'step')}"
        return {"step": report.maps_by_kind({"": maps}, self.axes, title)[""]}


class PairProbing:
    """Measures and plots the three kinds of attention of an encoder–decoder, on pairs of a split."""

    def __init__(self, data: DataModule, split: str, sizes: Sizes) -> None:
        pairs = cast(PairSplit, data.splits[split])
        self.sizes, self.tokenizer, self.tokens = sizes, data.tokenizer, pairs.tokens
        self.pairs = [pair for batch in data.sample(split, sizes.num_windows) for pair in measures.pairs_of(batch)]
        self.num_keys = max(max(pair.source.shape[1], pair.target.shape[1]) for pair in self.pairs)
        longest = pairs.lengths.max(axis=1)
        # The first pair that fits, or else the shortest.
        fits = longest <= sizes.num_tokens
        (self.shown,) = measures.pairs_of(Pairs(pairs)[int(fits.argmax() if fits.any() else longest.argmin())])

    def measure(self, trainer: L.Trainer, module: TrainingModule, costly: bool) -> measures.HeadMeasures:
        """The measures of every head, cross-attention included; always with the costly ones."""
        network, pairs = cast(EncoderDecoder, module.network), [pair.to(module.device) for pair in self.pairs]
        return measures.measure_pairs(network, pairs, trainer.precision_plugin.forward_context())

    def pictures(self, trainer: L.Trainer, module: TrainingModule) -> dict[str, report.Picture]:
        """The attention maps of each kind for one pair, by the name of their file.

        The target of a probe text is what greedy search finds.
        """
        network, text = cast(EncoderDecoder, module.network), self.sizes.probe_text
        with trainer.precision_plugin.forward_context():
            if text is None:
                pair = self.shown.to(module.device)
            else:
                (source,) = self.tokenizer.read([text], around=False)
                pair = measures.decoded_pair(network, source, self.tokens, Beam(1), self.sizes.num_tokens)
            captured = measures.capture_pair(network, pair)
        axes = measures.axes_of(pair.ids_by_kind(), self.tokenizer)
        return report.maps_by_kind(captured, axes, f"attention maps after {count(module.step, 'step')}")
