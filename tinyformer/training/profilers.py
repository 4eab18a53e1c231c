"""Lightning's profilers, set up to write into the run's folder."""

import os
from collections.abc import Callable
from pathlib import Path

from lightning.pytorch.profilers import AdvancedProfiler, Profiler, PyTorchProfiler, SimpleProfiler
from torch.profiler import profile, schedule

FILENAME = "profile"


class StepTrace(PyTorchProfiler):
    """Torch's profiler over three steps, after one skipped and one warm-up step, to bound the size of the trace.

    It counts training steps in training and validation steps in evaluation. Lightning's own class counts both, and
    traces neither in full if they alternate.

    Args:
        folder: the folder for a table and `trace.json`, which chrome://tracing and ui.perfetto.dev display.
    """

    def __init__(self, folder: Path) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise it reports each start and stop on stderr

        def export(trace: profile) -> None:
            trace.export_chrome_trace(str(folder / "trace.json"))

        three_steps = schedule(wait=1, warmup=1, active=3, repeat=1)
        super().__init__(
            folder,
            FILENAME,
            schedule=three_steps,
            on_trace_ready=export,
            record_module_names=False,  # they need hooks, which a compiled network does not call
            row_limit=40,
            acc_events=True,  # otherwise torch 2.11 warns that it drops the events of earlier cycles
        )

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        """Choose which steps to count."""
        super().setup(stage, local_rank, log_dir)
        self.STEP_FUNCTIONS = {"training_step" if stage == "fit" else "validation_step"}


PROFILERS: dict[str, Callable[[Path], Profiler]] = {
    "simple": lambda folder: SimpleProfiler(folder, FILENAME),
    "advanced": lambda folder: AdvancedProfiler(folder, FILENAME),
    "torch": StepTrace,
}
"""Each profiler by its name; all of them write a table."""


def make_profiler(name: str | None, folder: Path) -> Profiler | None:
    """The profiler with a name in `PROFILERS`, writing into a run's folder; None for None."""
    return None if name is None else PROFILERS[name](folder)
