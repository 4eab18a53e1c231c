"""The folder of a run: what it may contain before Hydra writes into it, and who writes there."""

import contextlib
import os
import re
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from tinyformer.config.errors import ConfigError, report
from tinyformer.config.keys import format_value
from tinyformer.files import relative_path


class FolderGuard(Callback):
    """Ends the program if the folder that Hydra is about to write into is used, or contains links of a stranger.

    Hydra turns an error in a callback into a warning, so this one reports it and exits.
    """

    replaced: ClassVar[dict[Path, bytes]] = {}  # by Hydra, before a job can refuse the command

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        self._check("hydra.run.dir", config)

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        self._check("hydra.sweep.dir", config)

    def _check(self, key: str, config: DictConfig) -> None:
        folder = Path(config.hydra[key.split(".")[1]].dir)
        try:
            refuse_foreign_files(folder, key)
            if config.get("resume") is None:
                require_unused(relative_path(folder), key)
        except ConfigError as error:
            raise SystemExit(report(error, "train")) from error
        if is_first_process():
            files = (path for path in (folder / "multirun.yaml", *folder.rglob(".hydra/*")) if path.is_file())
            self.replaced.update({path.absolute(): path.read_bytes() for path in files})

    @classmethod
    def put_back(cls) -> None:
        """Put back what Hydra has replaced for a command that was refused."""
        for path, contents in cls.replaced.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(contents)
        cls.replaced.clear()


def refuse_foreign_files(folder: Path, key: str = "resume") -> None:
    """Refuse the folder at a key with anything in it that a run does not make, such as links, which lead anywhere."""

    def problem(path: Path, what: str) -> ConfigError:
        return ConfigError(f"{key}={folder}: {path} {what}; remove it.")

    def tell(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            raise problem(Path(error.filename), "cannot be listed") from error

    walk = os.walk(folder, onerror=tell)
    for path in sorted(Path(parent, name) for parent, folders, files in walk for name in folders + files):
        try:
            mode = path.lstat().st_mode
        except FileNotFoundError:  # another process, which the lock reports later, has moved its temporary file
            continue
        if stat.S_ISLNK(mode) and not _is_link_of_wandb(path, folder):
            raise problem(path, "is a symbolic link, which a run does not make")
        if path.name.startswith("hpc_ckpt"):  # which Lightning would read by itself in a job of Slurm
            raise problem(path, "is a checkpoint that a run does not make")
        if not stat.S_ISLNK(mode) and not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise problem(path, "is neither a file nor a folder")


def _is_link_of_wandb(path: Path, folder: Path) -> bool:
    """Whether wandb makes such a link: to its newest run in a folder, or to a log of that run."""
    if path.match("wandb/*/logs/debug-core.log"):  # in the user's cache; no later run writes there
        return True
    is_known = path.name == "latest-run" or re.fullmatch(r"debug[\w-]*\.log", path.name)
    return path.parent.name == "wandb" and bool(is_known) and path.resolve().is_relative_to(folder.resolve())


def require_unused(folder: str | Path, key: str = "hydra.run.dir") -> None:
    """Refuse to write into the folder of another run or sweep; the sentence begins with the key."""
    path, own, other = Path(folder), format_value(str(folder)), format_value(f"{folder}-2")
    is_sweep = (path / "multirun.yaml").is_file() and any(map(has_checkpoint, path.glob("*/")))
    if is_first_process() and (is_sweep or has_checkpoint(path)):
        what = f"a sweep; -m resume={own}" if is_sweep else f"a run; resume={own}"
        raise ConfigError(f"{key}={own}: this folder contains {what} continues it, and {key}={other} starts another.")


def is_first_process() -> bool:
    """Whether this process writes files and prints: the first of several."""
    # torchrun sets RANK, in jobs of Slurm, too; Lightning, where it starts the processes itself, sets the last two.
    names = ("RANK",) if "RANK" in os.environ else ("SLURM_PROCID", "LOCAL_RANK", "NODE_RANK")
    return all(int(os.environ.get(name, "0")) == 0 for name in names)


def has_checkpoint(run: Path) -> bool:
    """Whether a folder contains a run that can be resumed."""
    return any((run / "checkpoints" / f"{name}.ckpt").is_file() for name in ("last", "previous", "best"))


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a run folder, or refuse; only the first process of a run on several devices takes it."""
    if not is_first_process():
        yield
        return
    name, other = (format_value(relative_path(folder) + end) for end in ("", "-2"))
    problem = "another process is training in this folder"
    # Not in the folder, which a refused run leaves as it was.
    path = folder.absolute().with_name(f".{folder.name}.lock")
    with held(path, f"hydra.run.dir={name}: {problem}; hydra.run.dir={other} starts another run."):
        yield


@contextlib.contextmanager
def held(path: Path, sentence: str) -> Iterator[None]:
    """Hold the lock of a file, which the system releases when the process ends, however it ends.

    If another process holds it, the sentence is the message of a `ConfigError`.
    """
    if path.is_symlink():
        raise ConfigError(f"{path} is a symbolic link, which a run does not make; remove it.")
    import filelock  # which takes time to import, and is not needed for --help

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


def remove_unused(folder: Path) -> None:
    """Remove the folder of a refused run, unless it contains more than Hydra's files."""
    # Another process of the same run may have removed it.
    if not folder.is_dir() or [path.name for path in folder.iterdir()] != [".hydra"]:
        return
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):  # a parent with other runs is not empty
        for parent in folder.parents:
            if not parent.is_relative_to(Path.cwd()) or parent == Path.cwd():
                break
            parent.rmdir()
