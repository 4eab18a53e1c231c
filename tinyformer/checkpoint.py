"""One self-contained file in and out; nothing in it is trusted.

A checkpoint is Lightning's, with the run's unresolved config, its tokenizer and the state of the random number
generators beside the weights. It is read with `weights_only=True`, so no code in it runs, and its config may name
classes of this package only.
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

from tinyformer.nn.score import SCORES

KEY = "tinyformer"
NETWORK_PREFIX, READOUT_PREFIX = "network.", "readout."
EMBEDDING = "encoder.token_embedding.weight"

CALLED = ("_target_", "score")
"""Keys of a config whose text names what is called; a `score` without a dot is a name of ours."""


@dataclass(frozen=True)
class Checkpoint:
    """What a file holds.

    Args:
        path: the file.
        weights: of the network, by name.
        config: of the run, unresolved, as plain containers.
        tokenizer: `tokenizer.json` as text; None where the model came without one.
        facts: about the run: `precision`, `data_fingerprint`, `train/num_tokens`.
        step: optimizer steps made.
    """

    path: Path
    weights: dict[str, Tensor]
    config: dict[str, Any]
    tokenizer: str | None
    facts: dict[str, Any]
    step: int


def load_checkpoint(path: str | Path, key: str = "checkpoint") -> Checkpoint:
    """Read a checkpoint onto the CPU.

    Args:
        path: the file.
        key: the config key that named it, for errors.

    Raises:
        ValueError: it is missing, cut short, or none of ours.
    """
    path = Path(path)
    if not path.is_file():
        near = sorted(path.glob("**/*.ckpt"), key=lambda file: file.stat().st_mtime) if path.is_dir() else []
        hint = f"{key}={near[-1]} works" if near else "a run writes it to RUN/checkpoints/last.ckpt"
        if (path / "config.json").is_file():
            hint = f"`python -m tinyformer.convert hf {path} imported.ckpt` makes one of a Hugging Face folder"
        raise ValueError(f"{key}={path} is no file; {hint}.")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about pickles that torch did not write: they are refused
            raw = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file raises whatever its bytes lead to
        raise ValueError(
            f"{key}={path} cannot be read: it is cut short, damaged, or no checkpoint; a run writes "
            "RUN/checkpoints/last.ckpt, and best.ckpt beside it, which may be whole."
        ) from error
    if not _is_complete(raw):
        raise ValueError(f"{key}={path} was not written by tinyformer; a run writes RUN/checkpoints/last.ckpt.")
    weights = {
        name.removeprefix(NETWORK_PREFIX): tensor
        for name, tensor in raw["state_dict"].items()
        if name.startswith(NETWORK_PREFIX)
    }
    ours = raw[KEY]
    return Checkpoint(path, weights, ours["config"], ours["tokenizer"], ours["facts"], raw["global_step"])


def _is_complete(raw: Any) -> bool:
    """Whether a file's contents are what a run writes."""
    if not isinstance(raw, dict) or not {KEY, "state_dict", "global_step"} <= raw.keys():
        return False
    return isinstance(raw[KEY], dict) and {"config", "tokenizer", "facts"} <= raw[KEY].keys()


def save_network(path: Path, network: torch.nn.Module, checkpoint: Checkpoint, config: dict[str, Any]) -> None:
    """Write a network that was made from a checkpoint's, whole or not at all.

    Args:
        path: the file.
        network: of which the weights are stored.
        checkpoint: where it came from, which gives the tokenizer, the facts and the step.
        config: of the network, unresolved, as plain containers.
    """
    weights = {f"{NETWORK_PREFIX}{name}": tensor.cpu() for name, tensor in network.state_dict().items()}
    contents = {"config": config, "tokenizer": checkpoint.tokenizer, "facts": checkpoint.facts}
    temporary = path.with_suffix(".ckpt.partial")
    torch.save({"state_dict": weights, "global_step": checkpoint.step, KEY: contents}, temporary)
    temporary.replace(path)


def load_weights(network: torch.nn.Module, checkpoint: Checkpoint, key: str = "checkpoint") -> None:
    """Put a checkpoint's weights into a network.

    Raises:
        ValueError: see `require_fitting`.
    """
    require_fitting(network, checkpoint, key)
    network.load_state_dict(checkpoint.weights)


def require_fitting(network: torch.nn.Module, checkpoint: Checkpoint, key: str = "checkpoint") -> None:
    """Refuse a checkpoint whose weights are not a network's.

    Raises:
        ValueError: their names or shapes differ; the sentence names the first that does.
    """
    own = network.state_dict()
    missing = sorted(own.keys() - checkpoint.weights.keys())
    extra = sorted(checkpoint.weights.keys() - own.keys())
    changed = [
        f"{name} is {list(checkpoint.weights[name].shape)} there and {list(own[name].shape)} here"
        for name in own
        if name in checkpoint.weights and own[name].shape != checkpoint.weights[name].shape
    ]
    if missing or extra or changed:
        reason = (changed or [f"it has no {name}" for name in missing] or [f"it has {name} besides" for name in extra])[
            0
        ]
        raise ValueError(
            f"{key}={checkpoint.path} does not fit this model: {reason}. "
            "Give the same model, attention, position, block and tokenizer as its run."
        )


def start_from(network: torch.nn.Module, checkpoint: Checkpoint, task: Mapping[str, Any]) -> None:
    """Put a checkpoint's weights into a network for this or another task, whose readout then stays as it is.

    A vocabulary that has become larger since, by the token that stands for a hidden one, keeps what it has besides.

    Args:
        network: the network.
        checkpoint: to start from.
        task: of the network, as in its config.

    Raises:
        ValueError: the encoders differ; see `load_weights`.
    """
    own, theirs, stored = network.state_dict(), dict(checkpoint.weights), checkpoint.config["task"]
    if (stored["readout"]["_target_"], stored["labels"]) != (task["readout"]["_target_"], task["labels"]):
        theirs = {name: tensor for name, tensor in theirs.items() if not name.startswith(READOUT_PREFIX)}
        theirs |= {name: tensor for name, tensor in own.items() if name.startswith(READOUT_PREFIX)}
    embedding = own[EMBEDDING]
    for name, tensor in own.items():
        of_vocabulary = tensor.shape == embedding.shape and name in theirs
        if of_vocabulary and theirs[name].shape[1:] == tensor.shape[1:]:
            is_tied = tensor.data_ptr() == embedding.data_ptr()
            before = theirs[EMBEDDING if is_tied else name]
            theirs[name] = torch.cat([before, tensor[len(before) :].cpu()])
    load_weights(network, replace(checkpoint, weights=theirs), "init_from")


def require_trusted(
    config: Any,
    path: Path,
    allowed: frozenset[str] = frozenset(),
    remedy: str = "name it on the command line, as NODE.{key}={target}",
) -> None:
    """Refuse a stored config that would call anything but a class of this package.

    The class's own `__module__` decides: a name such as `tinyformer.checkpoint.torch.load` begins like one of ours.

    Args:
        config: plain containers.
        path: the file, for the error.
        allowed: further targets, which the user named.
        remedy: how to name one, for the error.

    Raises:
        ValueError: it names something else.
    """
    if isinstance(config, str) and _computes(config):
        raise ValueError(
            f"checkpoint={path} wants to compute {config[:200]!r}, which could make a node that calls anything; of a "
            "stored config only ${key}, ${default_num_kv_heads:…} and ${oc.env:…} are resolved."
        )
    if isinstance(config, list | tuple):
        for value in config:
            require_trusted(value, path, allowed, remedy)
    if isinstance(config, dict):
        for key in CALLED:
            target = config.get(key)
            if target is None or _is_trusted(target, key, allowed):
                continue
            raise ValueError(
                f"checkpoint={path} wants to call {target!r}, which is no class of tinyformer. If you trust it, "
                f"{remedy.format(key=key, target=target)}."
            )
        for value in config.values():
            require_trusted(value, path, allowed, remedy)


def _is_trusted(target: Any, key: str, allowed: frozenset[str]) -> bool:
    if not isinstance(target, str):
        return key != "_target_"  # a node of its own, which is looked into
    return target in allowed or _is_our_class(target) or (key == "score" and target in SCORES)


def _computes(text: str) -> bool:
    """Whether a text holds an interpolation that could make a node: `${oc.create:{_target_:os.system}}` does."""
    plain = re.compile(r"\$\{(?:(?:default_num_kv_heads|oc\.env):)?[^${}:]*\}")
    while (inner := plain.sub("_", text)) != text:  # the innermost first
        text = inner
    return "${" in text


def _is_our_class(target: Any) -> bool:
    if not isinstance(target, str) or not target.startswith("tinyformer."):
        return False
    module_name, _, name = target.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except ImportError:
        return False
    found = getattr(module, name, None)
    return isinstance(found, type) and found.__module__.startswith("tinyformer.")


def random_state() -> dict[str, Any]:
    """The state of every random number generator, as plain numbers and tensors."""
    version, keys, position, has_gauss, gauss = np.random.get_state()
    python_version, python_keys, python_gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": [version, np.asarray(keys).tolist(), position, has_gauss, gauss],
        "python": [python_version, list(python_keys), python_gauss],
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Set every random number generator to a saved state."""
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    name, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((name, np.asarray(keys, dtype=np.uint32), position, has_gauss, gauss))
    python_version, python_keys, python_gauss = state["python"]
    random.setstate((python_version, tuple(python_keys), python_gauss))
