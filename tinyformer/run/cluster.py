"""What starts the processes of a run outside of it: torchrun, Slurm and others."""

import os
import signal
import subprocess

from lightning.pytorch.plugins.environments import (
    LSFEnvironment,
    MPIEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)

from tinyformer.config.compose import Invocation

CLUSTERS = (TorchElasticEnvironment, SLURMEnvironment, LSFEnvironment, MPIEnvironment)


def is_in_cluster() -> bool:
    """Whether a launcher outside this run starts its processes; otherwise it would wait for the other nodes forever."""
    return "NODE_RANK" in os.environ or any(cluster.detect() for cluster in CLUSTERS)


def own_environments() -> list[SLURMEnvironment]:
    """Lightning's plugin for a job of Slurm, without a handler of its own, which would save another checkpoint."""
    is_slurm = SLURMEnvironment.detect() and not TorchElasticEnvironment.detect()
    return [SLURMEnvironment(auto_requeue=False)] if is_slurm else []


def is_requeued(signal_number: int, invocation: Invocation) -> bool:
    """Let Slurm start the job again that SIGUSR1 has stopped, if its command has `resume=auto`; whether it does."""
    job = os.environ.get("SLURM_JOB_ID")
    if job is None or signal_number != signal.SIGUSR1 or "resume=auto" not in invocation.overrides:
        return False
    return subprocess.run(["scontrol", "requeue", job], check=False).returncode == 0
