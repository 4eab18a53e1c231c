"""Launchers of the processes of a run: torchrun, Slurm and others."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from typing import Any

from lightning.pytorch.plugins.environments import (
    ClusterEnvironment,
    LightningEnvironment,
    LSFEnvironment,
    MPIEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)

from tinyformer.config.compose import CommandLine

CLUSTERS = (TorchElasticEnvironment, SLURMEnvironment, LSFEnvironment, MPIEnvironment)


def is_in_cluster() -> bool:
    """Return True if torchrun, Slurm or another launcher started this process."""
    return "NODE_RANK" in os.environ or any(cluster.detect() for cluster in CLUSTERS)


def with_environment(plugins: Sequence[Any], is_alone: bool) -> list[Any]:
    """Plugins of Lightning's trainer, with one that says what starts the processes of the run.

    A trainer that `is_alone` has no others. Lightning's own for Slurm would save checkpoints of its own at a signal.
    """
    if any(isinstance(plugin, ClusterEnvironment) for plugin in plugins):
        return list(plugins)
    if is_alone:
        return [*plugins, LightningEnvironment()]
    is_slurm = SLURMEnvironment.detect() and not TorchElasticEnvironment.detect()
    return [*plugins, *([SLURMEnvironment(auto_requeue=False)] if is_slurm else [])]


def is_requeued(signal_number: int, invocation: CommandLine) -> bool:
    """Return True if Slurm is to requeue the job: SIGUSR1 has stopped it, and its command has `resume=auto`."""
    return "SLURM_JOB_ID" in os.environ and signal_number == signal.SIGUSR1 and "resume=auto" in invocation.overrides


def requeue() -> None:
    """Ask Slurm to start this job again, or this task of an array of jobs; it ends the processes that still run."""
    names = ("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID")
    task = "_".join(os.environ[name] for name in names) if all(name in os.environ for name in names) else None
    with contextlib.suppress(FileNotFoundError):  # a container without Slurm's programs
        subprocess.run(["scontrol", "requeue", task or os.environ["SLURM_JOB_ID"]], check=False)
