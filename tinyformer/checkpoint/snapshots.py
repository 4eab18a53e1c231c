"""The snapshots of a run: its weights at some of its steps, each a checkpoint of its own without training state."""

import bisect
import re
from pathlib import Path
from typing import Any

from tinyformer.checkpoint.file import SNAPSHOTS, Checkpoint, load_checkpoint
from tinyformer.checkpoint.paths import find_checkpoint
from tinyformer.errors import ArgumentError
from tinyformer.files import relative_path


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
    """The checkpoint at a path, or a snapshot of its run, see `at_step`; the one that is known is not read again."""
    found = at_step(path, step)
    return known if known is not None and known.path == found else load_checkpoint(found)


def at_step(path: str | Path, step: Any) -> Path:
    """The snapshot at a step of the run that `path` belongs to, see `snapshots_of`; the last one for "all".

    Without a step it is that of `find_checkpoint`, as it is where nothing is there, which is an error when it is read.
    """
    path = find_checkpoint(path)
    if step is None or not path.exists():
        return path
    snapshots = snapshots_of(path)
    if not snapshots:
        reason = "has no snapshots, which its training writes with callbacks.snapshots.every_n_steps=100"
        raise ArgumentError("step", step, f"the run of {relative_path(path)} {reason}")
    steps = list(snapshots)
    if step == "all":
        return snapshots[steps[-1]]
    if not isinstance(step, int):
        raise ArgumentError("step", step, "must be a number of optimizer steps, or all", {"step": steps[-1]})
    if step not in snapshots:
        place = bisect.bisect(steps, step)
        near = steps[max(place - 1, 0) : place + 1]
        reason = f"is none of the {len(steps)} steps with a snapshot; the nearest: {', '.join(map(str, near))}"
        raise ArgumentError("step", step, reason, {"step": min(near, key=lambda other: abs(other - step))})
    return snapshots[step]
