"""Loading of checkpoints and snapshots.

A checkpoint is Lightning's checkpoint in a safetensors file, see `format`. It also holds the overrides of the run's
config, the tokenizer and the states of the random number generators. `config.admission` checks the overrides.
"""

import bisect
import copy
import os
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tinyformer.checkpoint.format import FORMAT, KEY, is_archive, read_raw, write_raw
from tinyformer.checkpoint.paths import find_checkpoint
from tinyformer.errors import ArgumentError, relative_path

PARTS = {"overrides": dict, "tokenizer": str | None, "facts": dict}
"""The entries that tinyformer adds to Lightning's checkpoint, with their types."""

FACTS: dict[str, Any] = {"precision": str | int, "data_fingerprint": str | None, "content": str | None}
FACTS |= {"train/num_tokens": int | None, "is_compiled": bool, "backends": str | None, "inherited": int}
FACTS |= {"model_type": str}  # of an imported model

LAST, PREVIOUS, BEST, SNAPSHOTS = "last.ckpt", "previous.ckpt", "best.ckpt", "snapshots"
"""The files of a run's checkpoints: at the last validation or interruption, the checkpoint before that one, and at the
best validation; and the folder of the run's snapshots."""

NETWORK_PREFIX, READOUT_PREFIX = "network.", "readout."
OWN_PREFIXES = tuple(f"{stack}.{part}." for stack in ("encoder", "decoder") for part in ("layers", "position"))
"""Prefixes in the names of weights: of all weights in a file; and within the network, of the readout, which depends on
the task, and of the weights that do not depend on the vocabulary."""

TRAINED_ON = f"{KEY}.trained_on"
"""The name of the tensor of `Checkpoint.trained_on`."""

EMBEDDING = "encoder.token_embedding.weight"

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # of weights


@dataclass(frozen=True)
class Checkpoint:
    """The contents of a checkpoint."""

    path: Path
    weights: dict[str, Tensor]  # of the network
    overrides: dict[str, Any]  # overrides of the run's config by key, which are not trusted; see `config.admission`
    tokenizer: str | None  # the text of `tokenizer.json`; None for a model without a tokenizer
    facts: dict[str, Any]  # about its run, by the names in `FACTS`
    step: int  # optimizer steps taken
    trained_on: Tensor | None = None  # the fingerprints of `run.data.known_text`, as int64


def load_raw(path: Path, prefixes: str | tuple[str, ...] = "") -> dict[str, Any]:
    """The contents of a checkpoint, see `read_raw`; an `ArgumentError` is raised if `path` is no intact checkpoint."""
    if not os.path.isfile(path):  # `Path.is_file` raises an error for a name that is too long
        raise _not_a_file(path)
    try:
        raw = read_raw(path, prefixes)
    except Exception as error:  # a damaged file can raise anything
        reason = (
            "cannot be read: the file is cut short, damaged, or not a checkpoint; a run writes "
            "RUN/checkpoints/last.ckpt; best.ckpt next to it may be intact"
        )
        if is_archive(path):
            reason = "is a PyTorch archive; checkpoints before format 2 can no longer be read, so train the model again"
        raise ArgumentError("path", str(path), reason) from error
    if problem := _malformation(raw):
        raise ArgumentError("path", str(path), problem)
    return raw


def load_checkpoint(path: str | Path, prefixes: str | tuple[str, ...] = (NETWORK_PREFIX, TRAINED_ON)) -> Checkpoint:
    """Load a checkpoint onto the CPU; `path` is a file, the folder of a run or "last", see `find_checkpoint`.

    Tensors whose names begin with none of the prefixes, such as an optimizer's, are not loaded.
    """
    path = find_checkpoint(path)
    raw = load_raw(path, prefixes)
    weights = {
        name.removeprefix(NETWORK_PREFIX): tensor
        for name, tensor in raw["state_dict"].items()
        if name.startswith(NETWORK_PREFIX)
    }
    if problem := _unusable_weight(weights):
        raise ArgumentError("path", str(path), problem)
    ours, step = raw[KEY], raw["global_step"]
    return Checkpoint(path, weights, ours["overrides"], ours["tokenizer"], ours["facts"], step, ours.get("trained_on"))


def load_newest(folder: Path) -> Checkpoint:
    """Load the newest intact checkpoint in a run's `checkpoints`; if all fail, raise the error of `last.ckpt`."""
    intact, errors = [], []
    for name in (LAST, PREVIOUS, BEST):
        try:
            intact.append(load_checkpoint(folder / name, prefixes=""))  # the state of training, too
        except ArgumentError as error:
            errors.append(error)
        else:
            if name == LAST:
                break
    if not intact:
        raise errors[0]
    return max(intact, key=lambda checkpoint: checkpoint.step)


def _not_a_file(path: Path) -> ArgumentError:
    if not os.path.isdir(path):
        return ArgumentError("path", str(path), "does not exist; a run writes RUN/checkpoints/last.ckpt")
    if (path / "config.json").is_file():
        command = f"`tinyformer convert hf {path} imported.ckpt`"
        return ArgumentError("path", str(path), f"is a Hugging Face folder; {command} makes a checkpoint of it")
    order = {file: (file.parent.name != SNAPSHOTS, file.stat().st_mtime) for file in path.glob("**/*.ckpt")}
    checkpoints = sorted(order, key=order.__getitem__)
    if not checkpoints:
        return ArgumentError("path", str(path), "is a folder; a run writes RUN/checkpoints/last.ckpt")
    return ArgumentError("path", str(path), "is a folder", {"path": str(checkpoints[-1])})


def _malformation(raw: Any) -> str | None:
    """The reason why the contents of a file are not a valid checkpoint; None if they are."""
    foreign = "was not written by tinyformer; a run writes RUN/checkpoints/last.ckpt"
    if not isinstance(ours := raw.get(KEY), dict) or "format" not in ours:
        return foreign
    if (version := ours["format"]) != FORMAT:
        return f"is of format {_shown(version)}, but this version of tinyformer reads only {FORMAT}"
    if not {"state_dict", "global_step"} <= raw.keys() or not PARTS.keys() <= ours.keys():
        return foreign
    step, state = raw["global_step"], raw["state_dict"]
    if type(step) is not int or not 0 <= step < 2**63:
        return f"is malformed: its global_step is {_shown(step)}, not a number of steps"
    for name, kind in PARTS.items():
        if not isinstance(ours[name], kind):
            return f"is malformed: its {name} is a {type(ours[name]).__name__}"
    for name, part in {"state_dict": state, "overrides": ours["overrides"]}.items():
        if not isinstance(part, dict) or not all(isinstance(key, str) for key in part):
            return f"is malformed: its {name} is not a mapping from names"
    rows = ours.get("trained_on")
    if rows is not None and not (isinstance(rows, Tensor) and rows.dtype == torch.int64 and rows.ndim == 1):
        return "is malformed: its trained_on is not a list of fingerprints"
    for name, fact_kind in FACTS.items():
        if name in ours["facts"] and not isinstance(ours["facts"][name], fact_kind):
            return f"is malformed: its fact {name} is a {type(ours['facts'][name]).__name__}"
        if not re.fullmatch(r"[\w-]*", str(ours["facts"].get(name, "")), re.ASCII):
            return f"is malformed: its fact {name} is {_shown(ours['facts'][name])}"
    return None


def _shown(value: Any) -> str:
    """An arbitrary value as text of bounded length."""
    return repr(value)[:50] if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"


def _unusable_weight(weights: Mapping[str, Any]) -> str | None:
    """A description of the first invalid weight of a network; None if all weights are valid."""
    for name, weight in weights.items():
        kind = weight.dtype if isinstance(weight, Tensor) else type(weight).__name__
        if kind not in DTYPES:
            return f"is malformed: its weight {name[:200]} is not a tensor of real numbers ({kind})"
    return None


def save_network(path: Path, network: torch.nn.Module, checkpoint: Checkpoint, overrides: dict[str, Any]) -> None:
    """Atomically write `checkpoint` to a file, but with the weights of `network` and with the given `overrides`.

    `overrides` are the overrides of the network's config, by key; see `config.stored.describe_config`.
    """
    weights = {f"{NETWORK_PREFIX}{name}": tensor.cpu() for name, tensor in network.state_dict().items()}
    contents = {"format": FORMAT, "overrides": overrides, "tokenizer": checkpoint.tokenizer, "facts": checkpoint.facts}
    contents["trained_on"] = checkpoint.trained_on
    write_raw(path, {"state_dict": weights, "global_step": checkpoint.step, KEY: contents})


def load_weights(network: torch.nn.Module, checkpoint: Checkpoint) -> None:
    """Load a checkpoint's weights into a network; an `ArgumentError` is raised if they do not fit."""
    require_fitting(network, checkpoint)
    network.load_state_dict(checkpoint.weights)


def copy_with(network: torch.nn.Module, checkpoint: Checkpoint) -> Any:
    """A copy of a network, in its dtype and on its device, with a checkpoint's weights; see `load_weights`."""
    copied = copy.deepcopy(network)
    load_weights(copied, checkpoint)
    return copied


def require_fitting(network: torch.nn.Module, checkpoint: Checkpoint, within: str | tuple[str, ...] = "") -> None:
    """Raise an `ArgumentError` if the weights of a network (even on "meta") and a checkpoint differ in name or shape.

    Only weights whose names start with `within` (a prefix or several) are compared.
    """
    expected, stored = (
        {name: weight for name, weight in weights.items() if name.startswith(within)}
        for weights in (network.state_dict(), checkpoint.weights)
    )
    changed = [
        f"{name} has shape {list(stored[name].shape)}, but in the model {list(expected[name].shape)}"
        for name in expected
        if name in stored and expected[name].shape != stored[name].shape
    ]
    missing = [f"it lacks {name}" for name in sorted(expected.keys() - stored.keys())]
    extra = [f"it also has {name}" for name in sorted(stored.keys() - expected.keys())]
    if differences := [*changed, *missing, *extra]:
        reason = f"does not fit this model: {differences[0]}; model, attention, position, block and tokenizer must be "
        raise ArgumentError("checkpoint", str(checkpoint.path), f"{reason}the same as in the checkpoint's run")


def start_from(network: torch.nn.Module, checkpoint: Checkpoint, with_readout: bool = True) -> None:
    """Load a checkpoint's weights into a network, even if the network is for another task.

    Rows of the embedding for tokens that the checkpoint lacks, such as `<mask>`, keep their initialisation. Without
    `with_readout`, the readout keeps its initialisation, too.
    """
    initial, weights = network.state_dict(), dict(checkpoint.weights)
    if not with_readout:
        weights = {name: tensor for name, tensor in weights.items() if not name.startswith(READOUT_PREFIX)}
        weights |= {name: tensor for name, tensor in initial.items() if name.startswith(READOUT_PREFIX)}
    embedding = initial[EMBEDDING]
    for name, tensor in initial.items():
        is_vocabulary = tensor.shape == embedding.shape and name in weights
        if is_vocabulary and weights[name].shape[1:] == tensor.shape[1:]:
            is_tied = tensor.data_ptr() == embedding.data_ptr()
            known = weights.get(EMBEDDING, weights[name]) if is_tied else weights[name]
            weights[name] = torch.cat([known, tensor[len(known) :].cpu()])
    load_weights(network, replace(checkpoint, weights=weights))


def random_state() -> dict[str, Any]:
    """The states of all random number generators (PyTorch, CUDA, NumPy, Python), as plain numbers and tensors."""
    version, keys, position, has_gauss, gauss = np.random.get_state()
    python_version, python_keys, python_gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": [version, np.asarray(keys).tolist(), position, has_gauss, gauss],
        "python": [python_version, list(python_keys), python_gauss],
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Restore the states that `random_state` returned; those of CUDA only if the number of GPUs is the same."""
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    name, keys, position, has_gauss, gauss = state["numpy"]
    if not 0 <= position <= len(keys):  # NumPy reads at this index without a check
        raise ValueError(f"the random state's position is {position}")
    np.random.set_state((name, np.asarray(keys, dtype=np.uint32), position, has_gauss, gauss))
    python_version, python_keys, python_gauss = state["python"]
    random.setstate((python_version, tuple(python_keys), python_gauss))


def snapshot_path(run: Path, step: int) -> Path:
    """The file of a snapshot in the folder of a run."""
    return run / SNAPSHOTS / f"step_{step:06d}.ckpt"


def snapshots_of(path: Path) -> dict[int, Path]:
    """The snapshots of a run by step, in ascending order; `path` is the run's folder or one of its checkpoints."""
    path = path.resolve()
    run = path if path.is_dir() else path.parent.parent
    names = {file: re.fullmatch(r"step_(\d+)\.ckpt", file.name) for file in (run / SNAPSHOTS).glob("step_*.ckpt")}
    return dict(sorted((int(name[1]), file) for file, name in names.items() if name))


def load_step(path: str | Path, step: Any, known: Checkpoint | None = None) -> Checkpoint:
    """Load the file `at_step(path, step)`; if `known` was loaded from this file, return `known` instead."""
    found = at_step(path, step)
    return known if known is not None and known.path == found else load_checkpoint(found)


def at_step(path: str | Path, step: Any) -> Path:
    """The path of a run's snapshot at a step; for "all", the path of the run's last snapshot.

    The run is that of the checkpoint `find_checkpoint(path)`; without a step, or without this file, return its path.
    """
    path = find_checkpoint(path)
    if step is None or not path.exists():
        return path
    snapshots = snapshots_of(path)
    if not snapshots:
        reason = "has no snapshots; a run writes some if it is started with callbacks.snapshots.every_n_steps=100"
        raise ArgumentError("step", step, f"the run of {relative_path(path)} {reason}")
    steps = list(snapshots)
    if step == "all":
        return snapshots[steps[-1]]
    if not isinstance(step, int):
        raise ArgumentError("step", step, "must be a number of optimizer steps, or all", {"step": steps[-1]})
    if step not in snapshots:
        place = bisect.bisect(steps, step)
        near = steps[max(place - 1, 0) : place + 1]
        reason = f"is not one of the {len(steps)} steps with a snapshot; the nearest: {', '.join(map(str, near))}"
        raise ArgumentError("step", step, reason, {"step": min(near, key=lambda other: abs(other - step))})
    return snapshots[step]
