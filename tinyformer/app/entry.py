"""From the command line to a job: Hydra, with its errors and exit codes made useful."""

import contextlib
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from tinyformer.app.config import register_resolvers
from tinyformer.app.errors import USER_MISTAKE, config_keys, report


def run_program(
    job: Callable[[DictConfig], None],
    config_dir: Path,
    config_name: str,
    prepare: Callable[[Sequence[str]], Sequence[str]] = lambda arguments: arguments,
) -> int:
    """Compose a config from the command line, run a job with it, and tell errors well.

    Nothing heavy is imported before the config is composed, so `--help` and misspelt keys answer at once.

    Args:
        job: what to do with the config.
        config_dir: where the config files are.
        config_name: the primary one.
        prepare: may rewrite the arguments before Hydra sees them.

    Returns:
        The exit code: 0, 1 for a bug, 2 for a mistake of the user.
    """
    with_traceback = os.environ.get("HYDRA_FULL_ERROR") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"  # makes Hydra raise its errors instead of printing them
    failed: list[int] = []

    def guarded(config: DictConfig) -> None:
        # Told here and now: Hydra would keep the error of a sweep's job until all its jobs have ended.
        try:
            with config_keys(config):
                job(config)
        except Exception as error:
            failed.append(report(error, config_dir, config_name, with_traceback))
            hydra_config = HydraConfig.get()
            # Of a sweep's jobs the numbers count, and what is noted of each is compared.
            if failed[-1] == USER_MISTAKE and hydra_config.mode == RunMode.RUN:
                _remove_unused(Path(hydra_config.runtime.output_dir))

    try:
        register_resolvers(config_dir)
        sys.argv[1:] = prepare(sys.argv[1:])
        hydra.main(version_base=None, config_path=str(config_dir), config_name=config_name)(guarded)()
    except Exception as error:
        return report(error, config_dir, config_name, with_traceback)
    return max(failed, default=0)


def _remove_unused(folder: Path) -> None:
    """Take away the folder of a run that was refused, unless it holds more than what Hydra noted in it."""
    # Of several processes that refuse the same, another may have been here.
    if not folder.is_dir() or [path.name for path in folder.iterdir()] != [".hydra"]:
        return
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):  # where a parent holds other runs
        for parent in folder.parents:
            if not parent.is_relative_to(Path.cwd()) or parent == Path.cwd():
                break
            parent.rmdir()
