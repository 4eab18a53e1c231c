"""The folder of a run, which its processes have in common."""

import os
from datetime import datetime


def name_of_run(resume: str | None = None) -> str:
    """The folder of a run below `outputs`: when it started, or its job of Slurm; the same in all of its processes.

    With `resume=auto`, it is also the same when torchrun or Slurm starts the processes again.
    """
    now, environment = datetime.now().strftime("%Y-%m-%d/%H-%M-%S"), os.environ
    if "SLURM_PROCID" in environment and (resume == "auto" or int(environment.get("SLURM_NTASKS", "1")) > 1):
        return f"slurm-{environment['SLURM_JOB_ID']}.{environment.get('SLURM_STEP_ID', '0')}"
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # of torchrun, whose agent outlives its processes
        from torch.distributed import TCPStore

        store = TCPStore(environment["MASTER_ADDR"], int(environment["MASTER_PORT"]), is_master=False)
        return store.compare_set("tinyformer/run", "", now).decode()
    return now


def has_name() -> bool:
    """Whether a run has the same name when its processes are started again: in a job of Slurm, or by torchrun."""
    return "SLURM_PROCID" in os.environ or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
