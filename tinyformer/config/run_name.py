"""The folder of a run, which its processes have in common."""

import os
from datetime import datetime


def name_of_run(resume: str | None = None) -> str:
    """The folder of a run below `outputs`: when it starts, or its job of Slurm; the same in all of its processes.

    With torchrun it is the time at which the first of all processes starts, even if they are started again.
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
    """Return true if the job of a run names its folder, so that all of its processes know it."""
    return is_in_torchrun() or _is_named_by_slurm(resume)


def _is_named_by_slurm(resume: str | None) -> bool:
    return is_in_slurm() and (resume == "auto" or int(os.environ.get("SLURM_NTASKS", "1")) > 1)


def is_in_slurm() -> bool:
    """Return True if `srun` has started this process in a job, rather than a shell in which commands are typed."""
    # The script of a job, in which several commands may follow one another, has no step.
    return "SLURM_STEP_ID" in os.environ and os.environ.get("SLURM_JOB_NAME") not in ("bash", "interactive")


def is_in_torchrun() -> bool:
    """Return True if torchrun has started this process; its agent keeps a store while processes are started again."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
