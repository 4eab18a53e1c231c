"""From the command line to a job: Hydra, with short errors and exit codes."""

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from tinyformer.config.compose import Invocation
from tinyformer.config.conf import config_dir, register_resolvers
from tinyformer.config.errors import USER_MISTAKE, config_keys, report
from tinyformer.config.folder import FolderGuard, is_first_process, locked
from tinyformer.config.keys import readable
from tinyformer.config.process import argv, close_output, escape_output, guard_imports, named_lines

Job: TypeAlias = Callable[[DictConfig, Path, Invocation], Any]  # what a program does with a config, in a folder


class JobFailed(Exception):  # noqa: N818 - the error was reported already
    """A job of a sweep failed in another process, which has reported it; the argument is its exit code."""


def run_program(
    job: Job,
    config_name: str,
    command: str,
    rewrite: Callable[[Sequence[str]], Sequence[str]] = lambda arguments: arguments,
    num_words: int = 0,
) -> int:
    """Compose a config from the command line, run a job with it, and report errors; returns the exit code.

    Nothing heavy is imported before the config is composed, so that `--help` and misspelt keys are answered at once.

    Args:
        job: what the program does.
        config_name: the primary config.
        command: the program as the user called it, such as "tinyformer train", for hints.
        rewrite: may rewrite the overrides before Hydra reads them.
        num_words: how many words of `sys.argv` after the first choose the program, such as `train`.
    """
    directory = config_dir()
    with_traceback = os.environ.get("HYDRA_FULL_ERROR") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"  # makes Hydra raise its errors instead of printing them
    guard_imports()
    escape_output()
    exit_codes: list[int] = []
    process = os.getpid()
    script, words, arguments = sys.argv[:1], sys.argv[1 : 1 + num_words], sys.argv[1 + num_words :]

    def run_job(config: DictConfig) -> None:
        context = HydraConfig.get()
        invocation = Invocation.of_job(context, command)
        folder = Path(context.runtime.output_dir)
        is_side_by_side = os.getpid() != process
        own_folder = locked(folder) if invocation.is_sweep else contextlib.nullcontext()  # that of a run is claimed
        with named_lines(f"[{context.job.num}]") if is_side_by_side else contextlib.nullcontext():
            if invocation.is_sweep and is_first:
                print(" ".join(invocation.overrides), end="  ", flush=True)  # the line ends with the result
            # Reported here: Hydra would hold back the error of a job until all jobs of the sweep have ended.
            try:
                # Lightning starts the other processes of a run with this command line, and with this environment.
                os.environ["HYDRA_FULL_ERROR"] = str(int(with_traceback))
                with config_keys(config), argv([*script, *words, *arguments]), own_folder:
                    job(config, folder, invocation)
            except BrokenPipeError:
                exit_codes.append(close_output())
            except Exception as error:
                if invocation.is_sweep:
                    print(flush=True)
                exit_codes.append(report(error, config_name, with_traceback))
            finally:
                os.environ["HYDRA_FULL_ERROR"] = "1"
        if exit_codes and is_side_by_side:
            raise JobFailed(exit_codes[-1])

    try:
        register_resolvers(command)
        is_first, is_sweep = is_first_process(), any(argument in ("-m", "--multirun") for argument in arguments)
        arguments = list(rewrite(readable(arguments, is_sweep)))
        with argv([*script, *arguments]):
            hydra.main(version_base=None, config_path=str(directory), config_name=config_name)(run_job)()
    except BrokenPipeError:
        return close_output()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except JobFailed as failure:
        exit_codes.append(failure.args[0])
    except Exception as error:
        exit_codes.append(report(error, config_name, with_traceback))
    finally:
        # A sweep keeps the folders of refused jobs: their numbers count, and `compare` reads their overrides.
        FolderGuard.release(is_refused=USER_MISTAKE in exit_codes)
    return max(exit_codes, default=0)
