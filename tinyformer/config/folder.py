"""The folder of a run: what it may contain before Hydra writes into it, and which process writes there."""

import contextlib
import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from omegaconf import DictConfig

from tinyformer.config.conf import format_value, quoted
from tinyformer.config.errors import ConfigError
from tinyformer.errors import relative_path


def name_of_run(resume: str | None = None) -> str:
    """The name of a run's folder below `outputs`: the start time or Slurm job, equal in all processes of the run.

    With torchrun, the start time is the first process's, and stays the same if torchrun restarts the processes.
    """
    now, environment = datetime.now().strftime("%Y-%m-%d/%H-%M-%S"), os.environ
    if _is_named_by_slurm(resume):
        return f"slurm-{environment['SLURM_JOB_ID']}.{environment['SLURM_STEP_ID']}"
    if is_in_torchrun():
        from torch.distributed import TCPStore

        store = TCPStore(environment["MASTER_ADDR"], int(environment["MASTER_PORT"]), is_master=False)
        return store.compare_set("tinyformer/run", "", now).decode()
    return now


def is_named_by_job(resume: str | None) -> bool:
    """Return True if a Slurm job or torchrun determines the name of a run's folder for all of its processes."""
    return is_in_torchrun() or _is_named_by_slurm(resume)


def _is_named_by_slurm(resume: str | None) -> bool:
    return is_in_slurm() and (resume == "auto" or int(os.environ.get("SLURM_NTASKS", "1")) > 1)


def is_in_slurm() -> bool:
    """Return True if `srun` has started this process, unless it has started a shell in which commands are typed."""
    # The script of a job has no step; it may run several commands one after another.
    return "SLURM_STEP_ID" in os.environ and os.environ.get("SLURM_JOB_NAME") not in ("bash", "interactive")


def is_in_torchrun() -> bool:
    """Return True if torchrun has started this process and keeps a store that outlives restarts of the processes."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


@dataclass(frozen=True)
class Claim:
    """A locked folder, and the state of the folder before Hydra wrote into it."""

    folder: Path
    lock: contextlib.ExitStack  # closing it releases the folder
    created: Sequence[Path] = ()  # folders that the claim made, innermost first
    changed: Mapping[str, int] = field(default_factory=dict)  # modification times by name; see `_changed`
    of_hydra: Mapping[Path, bytes] = field(default_factory=dict)  # contents of Hydra's files before it replaces them

    def withdraw(self) -> None:
        """Restore Hydra's files and remove the folders that the claim made, unless the job has written something.

        An earlier `multirun.yaml` is always restored, so that `resume` does not repeat overrides that were refused.
        """
        if not is_first_process():
            return
        is_unchanged = _changed(self.folder) == self.changed
        for path in _files_of_hydra(self.folder):
            if path in self.of_hydra and (is_unchanged or path.name == "multirun.yaml"):
                path.write_bytes(self.of_hydra[path])
            elif is_unchanged:
                path.unlink()
        with contextlib.suppress(OSError):  # a folder that contains something is not removed
            (self.folder / ".hydra").rmdir()
        with contextlib.suppress(OSError):
            for path in self.created[:1]:
                path.rmdir()
            self.lock.close()  # the file of the lock is in the parent
            for path in self.created[1:]:
                path.rmdir()


def _files_of_hydra(folder: Path) -> list[Path]:
    return [path for path in (folder / "multirun.yaml", *folder.glob(".hydra/*")) if path.is_file()]


def _changed(folder: Path) -> dict[str, int]:
    """The modification times in ns of the entries of a folder, by name, without the entries that Hydra writes."""
    names = {".hydra", "multirun.yaml"}
    return {path.name: path.lstat().st_mtime_ns for path in folder.iterdir() if path.name not in names}


def claim_folder(config: DictConfig, key: str) -> Claim:
    """Make and lock the folder that a key such as "hydra.run.dir" names; a `ConfigError` if that is not possible.

    A folder that is named by the time gets a suffix, such as `-2`, if it exists. If a run has several processes, only
    the first process locks the folder.
    """
    node = config.hydra[key.split(".")[1]]
    folder, typed, resume = Path(node.dir), config.hydra.overrides.hydra, config.get("resume")
    refuse_foreign_files(folder, key)
    if not is_first_process():
        return Claim(folder, contextlib.ExitStack())
    created = [parent for parent in folder.parents if not parent.exists()]
    is_typed = any(word.lstrip("+").startswith(f"{key}=") for word in typed)
    if not is_typed and not is_named_by_job(resume):
        folder = _make_next(folder)
        created = [folder, *created]
        node.dir = str(folder)
        typed.append(f"{key}={quoted(node.dir)}")  # the config of each job is composed with it
    with contextlib.ExitStack() as lock:
        lock.enter_context(locked(folder, key))
        if resume is None:
            require_unused(relative_path(folder), key)
        if not folder.exists():
            folder.mkdir(parents=True)
            created = [folder, *created]
        # Absolute, since a job may change the current folder.
        folder, created = folder.absolute(), [path.absolute() for path in created]
        of_hydra = {path: path.read_bytes() for path in _files_of_hydra(folder)}
        return Claim(folder, lock.pop_all(), created, _changed(folder), of_hydra)


def _make_next(folder: Path) -> Path:
    """Make the first of FOLDER, FOLDER-2, FOLDER-3, … that does not exist; no two processes make the same folder."""
    for path in itertools.chain([folder], (folder.with_name(f"{folder.name}-{n}") for n in itertools.count(2))):
        with contextlib.suppress(FileExistsError):
            path.mkdir(parents=True)
            break
    return path


def refuse_foreign_files(folder: Path, key: str = "resume") -> None:
    """Refuse the folder at a key if it has unexpected files, such as symlinks."""
    for path in sorted(Path(parent, name) for parent, folders, files in os.walk(folder) for name in folders + files):
        if path.is_symlink() and not _is_link_of_wandb(path, folder):
            raise ConfigError(f"{key}={folder}: {path} is a symbolic link, which a run does not make; remove it.")
        if path.name.startswith("hpc_ckpt"):  # Lightning would load it by itself in a job of Slurm
            raise ConfigError(f"{key}={folder}: {path} is a checkpoint that a run does not make; remove it.")


def _is_link_of_wandb(path: Path, folder: Path) -> bool:
    """Return True if `path` is a link of wandb, which leads to the newest run in the folder or to a log."""
    if path.match("wandb/*/logs/debug-core.log"):  # in the user's cache; no later run writes there
        return True
    is_known = path.name == "latest-run" or re.fullmatch(r"debug[\w-]*\.log", path.name)
    return path.parent.name == "wandb" and bool(is_known) and path.resolve().is_relative_to(folder.resolve())


def require_unused(folder: str | Path, key: str = "hydra.run.dir") -> None:
    """Refuse to write into the folder of another run or sweep; the error begins with `key`."""
    path, own, other = Path(folder), format_value(str(folder)), format_value(f"{folder}-2")
    is_sweep = (path / "multirun.yaml").is_file() and any(map(has_checkpoint, path.glob("*/")))
    if is_first_process() and (is_sweep or has_checkpoint(path)):
        what, resume = ("sweep", "-m resume") if is_sweep else ("run", "resume")
        works = f"{resume}={own} continues it, and {key}={other} starts another"
        raise ConfigError(f"{key}={own}: this folder contains a {what}; {works}.")


SET_WITH = {"RANK": "MASTER_ADDR", "LOCAL_RANK": "MASTER_ADDR", "NODE_RANK": "MASTER_ADDR"}
SET_WITH |= {"SLURM_PROCID": "SLURM_NTASKS", "WORLD_SIZE": "WORLD_SIZE"}
"""Environment variables that number the processes of a run, each with a variable that the launcher sets with it."""


def is_first_process() -> bool:
    """Return True if this process is the first of its run; only the first writes files and prints."""
    return process_number() is None


def process_number() -> str | None:
    """The environment variable that numbers this process, such as "RANK=1"; None in the first process of a run.

    A variable that no launcher has set for this run is refused: with it, no process would be the first.
    """
    found = {name: os.environ[name] for name in SET_WITH if name in os.environ}
    for name, value in found.items():
        if int(value) and SET_WITH[name] not in os.environ:
            reason = f"{SET_WITH[name]} is not set, so no process is the first"
            raise ConfigError(f"{name}={value}: {reason}; unset {name}, which torchrun, Slurm or trainer=ddp sets.")
    # torchrun sets RANK, also in jobs of Slurm. Lightning sets the last two if it starts the processes itself.
    names = ("RANK",) if "RANK" in found else ("SLURM_PROCID", "LOCAL_RANK", "NODE_RANK")
    return next((f"{name}={found[name]}" for name in names if int(found.get(name, "0"))), None)


def has_checkpoint(run: Path) -> bool:
    """Return True if a folder contains a run that can be resumed."""
    return any((run / "checkpoints" / f"{name}.ckpt").is_file() for name in ("last", "previous", "best"))


@contextlib.contextmanager
def locked(folder: Path, key: str = "hydra.run.dir") -> Iterator[None]:
    """Hold the lock of a folder, or raise a `ConfigError`; only the first process of a run locks."""
    if not is_first_process():
        yield
        return
    name, other = (format_value(relative_path(folder) + end) for end in ("", "-2"))
    path = folder.resolve()  # a symbolic link to the folder has the same lock
    # The lock lies next to the folder, since a refused run leaves the folder unchanged.
    problem = "another program is writing into this folder; wait until it has ended, or use"
    with held(path.with_name(f".{path.name}.lock"), f"{key}={name}: {problem} {key}={other}."):
        yield


@contextlib.contextmanager
def held(path: Path, sentence: str) -> Iterator[None]:
    """Hold the lock of a file; the operating system releases the lock when the process ends, even if it is killed.

    If another process holds the lock, a `ConfigError` is raised whose message is `sentence`.
    """
    if path.is_symlink():
        raise ConfigError(f"{path} is a symbolic link, which a run does not make; remove it.")
    import filelock  # which takes time to import, and is not needed for --help

    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()  # raises if no file can be made; filelock would report another process
    lock = filelock.FileLock(path, blocking=False)
    try:
        lock.acquire()
    except filelock.Timeout as error:
        raise ConfigError(sentence) from error
    try:
        yield
    finally:
        Path(lock.lock_file).unlink(missing_ok=True)
        lock.release()
