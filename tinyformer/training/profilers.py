"""Where the time of a run goes: Lightning's profilers, which write into the run's folder."""

import os
from collections.abc import Callable
from pathlib import Path

from lightning.pytorch.profilers import AdvancedProfiler, Profiler, PyTorchProfiler, SimpleProfiler
from torch.profiler import profile, schedule

FILENAME = "profile"


class StepTrace(PyTorchProfiler):
    """Traces three steps, after one that is not looked at and one to warm up: a trace of all would fill the memory.

    Steps are those of training where there are any, else of validation. Lightning's own counts both, and where they
    alternate it traces neither whole.

    Args:
        folder: where the table and `trace.json` go; chrome://tracing and ui.perfetto.dev show the latter.
    """

    def __init__(self, folder: Path) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it tells stderr whenever it starts and stops

        def export(trace: profile) -> None:
            trace.export_chrome_trace(str(folder / "trace.json"))

        few = schedule(wait=1, warmup=1, active=3, repeat=1)
        super().__init__(
            folder,
            FILENAME,
            schedule=few,
            on_trace_ready=export,
            record_module_names=False,  # they come by hooks, which a compiled network does not call
            row_limit=40,
            acc_events=True,  # without which torch 2.11 warns that it drops the events of other cycles
        )

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        """Say which steps count."""
        super().setup(stage, local_rank, log_dir)
        self.STEP_FUNCTIONS = {"training_step" if stage == "fit" else "validation_step"}


PROFILERS: dict[str, Callable[[Path], Profiler]] = {
    "simple": lambda folder: SimpleProfiler(folder, FILENAME),
    "advanced": lambda folder: AdvancedProfiler(folder, FILENAME),
    "torch": StepTrace,
}
"""By the name that `trainer.profiler` gives; each leaves a table."""


def make_profiler(name: str | None, folder: Path) -> Profiler | None:
    """The profiler of a name in `PROFILERS`, if any is asked for.

    Args:
        name: of the profiler.
        folder: of the run.
    """
    return None if name is None else PROFILERS[name](folder)
