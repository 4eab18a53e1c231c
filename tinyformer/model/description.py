"""A trained model in a few lines."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tinyformer.nn import BaseAttention, Network, RelativePosition
from tinyformer.tasks import Task


class Origin(NamedTuple):
    """Where the weights of a model come from.

    Attributes:
        checkpoint: the file.
        step: optimizer steps taken.
        trusted: further classes that the checkpoint may use.
    """

    checkpoint: Path
    step: int
    trusted: Sequence[str] = ()

    def __str__(self) -> str:
        """The file within the folder of its run, and the step: "run/last.ckpt, step 144"."""
        *folders, name = self.checkpoint.parts
        run = [folder for folder in folders if folder != "checkpoints"][-1:]
        return f"{'/'.join([*run, name])}, step {self.step:,}"


def describe(name: str, network: Network, task: Task, origin: Origin | None) -> str:
    """The task, the sizes, the attention and the parameters of a model, and its checkpoint, if it has one."""
    layers = [f"{len(stack.layers)} of width {stack.token_embedding.embedding_dim}" for stack in network.stacks()]
    if len(layers) > 1:
        layers = [f"encoder {layers[0]}", f"decoder {layers[1]}"]
    kinds: dict[str, None] = {}
    for layer, (*kind, _) in zip(network.attentions(), network.layer_addresses(), strict=True):
        kinds.setdefault(" ".join([*map(str, kind), _attention(layer)]))
    pruned = len(network.pruned_heads())
    positions = {type(stack.position).__name__: None for stack in network.stacks() if stack.position}
    lines = {
        "task": type(task).__name__,
        "layers": ", ".join(layers),
        "attention": "; ".join(kinds),
        "position": ", ".join(positions),
        "pruned": f"{pruned} heads" if pruned else "",
        "vocabulary": f"{network.vocab_size:,} tokens",
        "context": f"{network.max_seq_len:,} tokens",
        "parameters": f"{network.num_parameters():,}",
        "checkpoint": str(origin or ""),
    }
    width = max(map(len, lines))
    return "\n".join([name, *(f"  {name:{width}}  {text}" for name, text in lines.items() if text)])


def _attention(layer: BaseAttention) -> str:
    """The attention of a layer: its class, its heads, its window and its relative position."""
    heads = layer.num_heads + len(layer.head_map.pruned)
    shared = f" on {layer.num_kv_heads} key/value heads" if layer.num_kv_heads < layer.num_heads else ""
    window = f", window {layer.window}" if layer.window else ""
    position = f", {type(layer.position).__name__}" if type(layer.position) is not RelativePosition else ""
    return f"{type(layer).__name__}, {heads} heads{shared}{window}{position}"
