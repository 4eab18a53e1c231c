"""Checkpoints: self-contained files of weights, config, tokenizer and training state, none of which is trusted.

A checkpoint is Lightning's, and also holds the run's unresolved config, its tokenizer and the state of the random
number generators. It is read with `weights_only=True`, so that no code in it runs, and its config may only name classes
of this package.
"""

import importlib
import random
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tinyformer.errors import ArgumentError
from tinyformer.files import atomic_write

KEY = "tinyformer"
NETWORK_PREFIX, READOUT_PREFIX = "network.", "readout."
EMBEDDING = "encoder.token_embedding.weight"


class UntrustedTargetError(ArgumentError):
    """A stored config names something to call that is not trusted.

    Args:
        path: the checkpoint.
        location: the dotted key in the config, such as "norm._target_".
        target: what it names.
    """

    def __init__(self, path: Path, location: str, target: Any) -> None:
        problem = f"would call {target!r} ({location}), which is not a class of tinyformer and could run any code"
        super().__init__("path", str(path), f"{problem}; if you trust it, name it in `trusted`")
        self.location, self.target = location, target


@dataclass(frozen=True)
class Checkpoint:
    """The contents of a checkpoint.

    Args:
        path: the file.
        weights: the network's weights by name.
        config: the run's unresolved config as plain containers.
        tokenizer: the text of `tokenizer.json`; None for a model without a tokenizer.
        facts: `precision`, `data_fingerprint` and `train/num_tokens` of the run.
        step: optimizer steps taken.
    """

    path: Path
    weights: dict[str, Tensor]
    config: dict[str, Any]
    tokenizer: str | None
    facts: dict[str, Any]
    step: int


def load_checkpoint(path: str | Path) -> Checkpoint:
    """Read a checkpoint onto the CPU.

    Raises:
        ArgumentError: the file does not exist, is damaged, or was not written by tinyformer.
    """
    path = Path(path)
    if not path.is_file():
        raise _not_a_file(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about pickles that torch did not write, which are refused
            raw = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file can raise anything
        reason = (
            "cannot be read: the file is cut short, damaged, or not a checkpoint; a run writes "
            "RUN/checkpoints/last.ckpt, and best.ckpt beside it, which may be intact"
        )
        raise ArgumentError("path", str(path), reason) from error
    if not _is_complete(raw):
        reason = "was not written by tinyformer; a run writes RUN/checkpoints/last.ckpt"
        raise ArgumentError("path", str(path), reason)
    weights = {
        name.removeprefix(NETWORK_PREFIX): tensor
        for name, tensor in raw["state_dict"].items()
        if name.startswith(NETWORK_PREFIX)
    }
    ours = raw[KEY]
    return Checkpoint(path, weights, ours["config"], ours["tokenizer"], ours["facts"], raw["global_step"])


def _not_a_file(path: Path) -> ArgumentError:
    if not path.is_dir():
        return ArgumentError("path", str(path), "does not exist; a run writes RUN/checkpoints/last.ckpt")
    if (path / "config.json").is_file():
        command = f"`python -m tinyformer.convert hf {path} imported.ckpt`"
        return ArgumentError("path", str(path), f"is a Hugging Face folder; {command} makes a checkpoint of it")
    checkpoints = sorted(path.glob("**/*.ckpt"), key=lambda file: file.stat().st_mtime)
    if not checkpoints:
        return ArgumentError("path", str(path), "is a folder; a run writes RUN/checkpoints/last.ckpt")
    return ArgumentError("path", str(path), "is a folder", {"path": str(checkpoints[-1])})


def _is_complete(raw: Any) -> bool:
    """Whether the contents of a file are those of a run's checkpoint."""
    if not isinstance(raw, dict) or not {KEY, "state_dict", "global_step"} <= raw.keys():
        return False
    return isinstance(raw[KEY], dict) and {"config", "tokenizer", "facts"} <= raw[KEY].keys()


def save_network(path: Path, network: torch.nn.Module, checkpoint: Checkpoint, config: dict[str, Any]) -> None:
    """Write a network that was derived from a checkpoint's network, atomically.

    Args:
        path: the file.
        network: its weights are stored.
        checkpoint: the original, which provides tokenizer, facts and step.
        config: the unresolved config of the network, as plain containers.
    """
    weights = {f"{NETWORK_PREFIX}{name}": tensor.cpu() for name, tensor in network.state_dict().items()}
    contents = {"config": config, "tokenizer": checkpoint.tokenizer, "facts": checkpoint.facts}
    with atomic_write(path) as temporary:
        torch.save({"state_dict": weights, "global_step": checkpoint.step, KEY: contents}, temporary)


def load_weights(network: torch.nn.Module, checkpoint: Checkpoint) -> None:
    """Load a checkpoint's weights into a network.

    Raises:
        ArgumentError: see `require_fitting`.
    """
    require_fitting(network, checkpoint)
    network.load_state_dict(checkpoint.weights)


def require_fitting(network: torch.nn.Module, checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint whose weights do not fit a network.

    Raises:
        ArgumentError: names or shapes differ; the reason names the first difference.
    """
    own, stored = network.state_dict(), checkpoint.weights
    changed = [
        f"{name} has shape {list(stored[name].shape)} there and {list(own[name].shape)} here"
        for name in own
        if name in stored and own[name].shape != stored[name].shape
    ]
    missing = [f"it lacks {name}" for name in sorted(own.keys() - stored.keys())]
    extra = [f"it also has {name}" for name in sorted(stored.keys() - own.keys())]
    if differences := [*changed, *missing, *extra]:
        reason = f"does not fit this model: {differences[0]}; model, attention, position, block and tokenizer must be "
        raise ArgumentError("checkpoint", str(checkpoint.path), f"{reason}those of its run")


def start_from(network: torch.nn.Module, checkpoint: Checkpoint, task: Mapping[str, Any]) -> None:
    """Load a checkpoint's weights into a network for the same or another task.

    For another kind of readout or other class labels, the network's readout keeps its initialisation. So do rows of the
    embedding for tokens that the checkpoint lacks, such as `<mask>`.

    Args:
        network: the network.
        checkpoint: the checkpoint to start from.
        task: the `task` node of the network's config.

    Raises:
        ArgumentError: the encoders differ; see `require_fitting`.
    """
    own, weights, stored_task = network.state_dict(), dict(checkpoint.weights), checkpoint.config["task"]
    stored_readout = (stored_task["readout"]["_target_"], stored_task["labels"])
    if stored_readout != (task["readout"]["_target_"], task["labels"]):
        weights = {name: tensor for name, tensor in weights.items() if not name.startswith(READOUT_PREFIX)}
        weights |= {name: tensor for name, tensor in own.items() if name.startswith(READOUT_PREFIX)}
    embedding = own[EMBEDDING]
    for name, tensor in own.items():
        is_vocabulary = tensor.shape == embedding.shape and name in weights
        if is_vocabulary and weights[name].shape[1:] == tensor.shape[1:]:
            is_tied = tensor.data_ptr() == embedding.data_ptr()
            known = weights[EMBEDDING if is_tied else name]
            weights[name] = torch.cat([known, tensor[len(known) :].cpu()])
    load_weights(network, replace(checkpoint, weights=weights))


def require_trusted(config: Any, path: Path, trusted: frozenset[str] = frozenset(), location: str = "") -> None:
    """Refuse a stored config that would call anything but a class of this package.

    The class's own `__module__` decides: a name such as `tinyformer.checkpoint.torch.load` only looks like ours.

    Args:
        config: a node of the config, as plain containers.
        path: the checkpoint, for the error.
        trusted: further targets, which the user has named.
        location: the dotted key of the node.

    Raises:
        UntrustedTargetError: the config names something else to call.
        ArgumentError: the config contains an interpolation that could create a node.
    """
    if isinstance(config, str) and _computes(config):
        reason = (
            f"contains {config[:200]!r} ({location}), which could create a node that calls anything; in a checkpoint "
            "only ${NODE.KEY}, ${default_num_kv_heads:…} and ${oc.env:…} are allowed"
        )
        raise ArgumentError("path", str(path), reason)
    if isinstance(config, dict):
        target = config.get("_target_")
        is_trusted = isinstance(target, str) and (target in trusted or is_our_class(target))
        if target is not None and not is_trusted:
            raise UntrustedTargetError(path, _join(location, "_target_"), target)
        children = list(config.items())
    else:
        children = list(enumerate(config)) if isinstance(config, list | tuple) else []
    for name, value in children:
        require_trusted(value, path, trusted, _join(location, name))


def _join(location: str, name: Any) -> str:
    return f"{location}.{name}" if location else str(name)


def _computes(text: str) -> bool:
    """Whether a text contains an interpolation that could create a node: `${oc.create:{_target_:os.system}}` does."""
    plain = re.compile(r"\$\{(?:(?:default_num_kv_heads|oc\.env):)?[^${}:]*\}")
    while (rest := plain.sub("_", text)) != text:  # innermost first
        text = rest
    return "${" in text


def is_our_class(target: str) -> bool:
    """Whether a target is the dotted name of a class of this package."""
    if not target.startswith("tinyformer."):
        return False
    module_name, _, name = target.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except ImportError:
        return False
    value = getattr(module, name, None)
    return isinstance(value, type) and value.__module__.startswith("tinyformer.")


def random_state() -> dict[str, Any]:
    """The states of all random number generators, as plain numbers and tensors."""
    version, keys, position, has_gauss, gauss = np.random.get_state()
    python_version, python_keys, python_gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": [version, np.asarray(keys).tolist(), position, has_gauss, gauss],
        "python": [python_version, list(python_keys), python_gauss],
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Restore the states of all random number generators."""
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    name, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((name, np.asarray(keys, dtype=np.uint32), position, has_gauss, gauss))
    python_version, python_keys, python_gauss = state["python"]
    random.setstate((python_version, tuple(python_keys), python_gauss))
