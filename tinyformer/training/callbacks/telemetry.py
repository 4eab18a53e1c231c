"""Every head, exactly, while a fused kernel trains."""

from pathlib import Path
from typing import cast

import lightning as L
import torch
from jaxtyping import Int
from lightning.pytorch.loggers import WandbLogger
from torch import Tensor

from tinyformer.analysis import MEASURES, CapturedMaps, capture_attention, head_maps, measure_layers, save_png
from tinyformer.nn import AttentionMask, Transformer
from tinyformer.tasks import Batch
from tinyformer.training.module import TrainingModule


class AttentionTelemetry(L.Callback):
    """At each validation, the measures of each head on fixed text and a picture of all heads.

    The pictures go to `attention/step_000100.png` in the run's folder, and to Weights & Biases.

    Args:
        num_windows: of the evaluated split, over which the measures are averaged.
        probe_text: the text of the picture; the beginning of the split unless given.
        num_tokens: of it that are shown.
    """

    def __init__(self, num_windows: int = 8, probe_text: str | None = None, num_tokens: int = 24) -> None:
        for name, value in (("num_windows", num_windows), ("num_tokens", num_tokens)):
            if value < 1:
                raise ValueError(f"callbacks.attention.{name}={value}: at least one, callbacks.attention.{name}=8.")
        if probe_text == "":
            raise ValueError("callbacks.attention.probe_text is empty; 'callbacks.attention.probe_text=A cat.' works.")
        self.num_windows, self.probe_text, self.num_tokens = num_windows, probe_text, num_tokens
        self.paths: list[Path] = []

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Take the windows and the probe from the run's text."""
        assert isinstance(pl_module, TrainingModule)
        data, split = pl_module.data, pl_module.evaluated
        batch = next(iter(data.evaluation_dataloader(split)))
        self.batch = cast(Batch, {name: rows[: self.num_windows] for name, rows in batch.items()})
        ids = data.tokenizer.encode(self.probe_text) if self.probe_text else data.splits[split].ids.tolist()
        ids = ids[: min(self.num_tokens, data.seq_len)]
        self.probe, self.labels = torch.tensor([ids]), data.tokenizer.labels(ids)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Measure, draw and log."""
        if trainer.sanity_checking or not trainer.is_global_zero:
            return
        assert isinstance(pl_module, TrainingModule)
        network, step = pl_module.network, pl_module.step
        task, batch = pl_module.task, trainer.strategy.batch_to_device(self.batch)
        with trainer.precision_plugin.forward_context():
            scalars = head_measures(network, batch["inputs"], task.mask(batch))
            maps = attention_maps(network, self.probe, task.mask({"inputs": self.probe, "targets": self.probe}))
        figure = head_maps([layer[0] for layer in maps], self.labels, f"attention after {step} steps")
        self.paths.append(save_png(figure, Path(trainer.default_root_dir) / "attention" / f"step_{step:06d}.png"))
        for logger in trainer.loggers:
            logger.log_metrics(scalars, step=step)
            if isinstance(logger, WandbLogger):
                logger.log_image("attention/maps", [str(self.paths[-1])], step=step)


def attention_maps(network: Transformer, tokens: Int[Tensor, "batch seq"], mask: AttentionMask) -> CapturedMaps:
    """The exact weights of each layer, `batch maps seq seq`, with the model in evaluation mode."""
    was_training = network.training
    network.eval()
    with capture_attention(network) as maps, torch.no_grad():
        network(tokens.to(next(network.parameters()).device), mask)
    network.train(was_training)
    return maps


def head_measures(network: Transformer, tokens: Int[Tensor, "batch seq"], mask: AttentionMask) -> dict[str, float]:
    """Each measure of each head, as `attention/layer_00/head_00/entropy`."""
    maps, scalars = attention_maps(network, tokens, mask), {}
    names = [layer.map_names for layer in network.attentions()]
    for measure, layers in measure_layers(MEASURES, maps, tokens).items():
        for layer, heads in enumerate(layers):
            for head, value in zip(names[layer], heads, strict=True):
                scalars[f"attention/layer_{layer:02d}/head_{head}/{measure}"] = value
    return scalars
