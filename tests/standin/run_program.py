"""Run `train.py`, `evaluate.py` or a benchmark on the stand-in device, with counts: `run_program.py train.py WORDS`.

All code that looks at numbers is replaced: metrics, which would divide by zero tokens or count classes, the draw of a
token, the end of a beam search, the text of an answer, the check of weights for finite values, and the entropy, whose
kernel torch compiles while it runs. Tensors that processes send one another on the device do not arrive. The report
says how often the host launched kernels and waited, in each step and in each measurement of the heads, and how many
graphs were compiled.
"""

import contextlib
import ctypes
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch._dynamo.utils import counters
from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers the backend "fake"

from tinyformer.data import QuestionSplit
from tinyformer.generation import generation
from tinyformer.generation.generation import Sampling
from tinyformer.tasks import CausalLM, Classification, MaskedLM, Seq2Seq, SpanExtraction, classification
from tinyformer.training import AttentionTelemetry, FiniteCheck
from tinyformer.training.callbacks import finite
from tinyformer.training.callbacks.finite import NonFiniteStep

ROOT = Path(__file__).parent.parent.parent


class Counts:
    """The launches and waits since the start of the process."""

    def __init__(self) -> None:
        runtime, driver = (ctypes.CDLL(f"{os.environ['STANDIN']}/{name}") for name in ("runtime.so", "libcuda.so.1"))
        self._launches = [ctypes.c_int.in_dll(runtime, "fake_launches"), ctypes.c_int.in_dll(driver, "fake_triton")]
        self._waits = ctypes.c_int.in_dll(runtime, "fake_syncs")

    def now(self) -> tuple[int, int]:
        return sum(count.value for count in self._launches), self._waits.value


COUNTS = Counts()
REPORT: dict[str, Any] = {"steps": [], "measurements": []}


class StepCounter(L.Callback):
    """Counts what one step of training launches and waits for, the optimizer's included."""

    def on_train_batch_start(self, *args: Any) -> None:
        self.before = COUNTS.now()

    def on_train_batch_end(self, *args: Any) -> None:
        REPORT["steps"].append([after - before for before, after in zip(self.before, COUNTS.now(), strict=True)])


def count_measurements() -> None:
    measure = AttentionTelemetry._measure

    def counted(*args: Any, **options: Any) -> Any:
        before = COUNTS.now()
        measures = measure(*args, **options)
        REPORT["measurements"].append([after - start for start, after in zip(before, COUNTS.now(), strict=True)])
        return measures

    AttentionTelemetry._measure = counted  # type: ignore[method-assign]


def unreduced(state: None, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A communication hook that returns a bucket as it is: the backend "fake" returns no tensor."""
    reduced: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    reduced.set_result(bucket.buffer())
    return reduced


def replace_numbers() -> None:
    for strategy in (DDPStrategy, ModelParallelStrategy):
        strategy._get_process_group_backend = lambda self: "cpu:gloo,cuda:fake"  # type: ignore[method-assign]
    initialise = torch.distributed.init_process_group

    def without_device(*args: Any, device_id: Any = None, **options: Any) -> None:
        initialise(*args, **options)  # with a device, groups are split, which "fake" cannot

    torch.distributed.init_process_group = without_device
    DDPStrategy._register_ddp_hooks = lambda self: self.model.register_comm_hook(None, unreduced)  # type: ignore
    torch.backends.cuda.enable_cudnn_sdp(False)  # cuDNN asks the driver for more than the device has
    torch.special.entr = torch.neg
    Sampling.draw = lambda self, logits, generator=None: torch.zeros(len(logits), dtype=torch.long)  # type: ignore
    classification.multiclass_confusion_matrix = lambda logits, labels, number: labels.new_zeros(number, number)
    read = FiniteCheck._read

    def read_alone(*args: Any) -> None:
        with contextlib.suppress(NonFiniteStep):
            read(*args)

    FiniteCheck._read = read_alone  # type: ignore[method-assign]
    finite._origin = lambda *args: None
    FiniteCheck.on_save_checkpoint = lambda self, *_: None  # type: ignore[method-assign]
    generation._unfinished = lambda ended, going_on: torch.arange(len(ended)).to(ended.device)  # type: ignore
    generation.PairTokens.without_bos = lambda self, text: []  # type: ignore[method-assign]
    QuestionSplit.texts_of = lambda self, spans: [""] * len(spans)  # type: ignore[method-assign]
    for task in (CausalLM, MaskedLM, Classification, Seq2Seq, SpanExtraction):

        def metrics(self: Any, sums: Any, split: Any, computed: Any = task.metrics) -> Any:
            return computed(self, {name: torch.ones(value.shape) for name, value in sums.items()}, split)

        task.metrics = metrics  # type: ignore[method-assign]


def main() -> None:
    sys.argv = [str(ROOT / sys.argv[1]), *sys.argv[2:]]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))  # as of a script
    sys.modules["run_program"] = sys.modules["__main__"]
    if sys.argv[0].endswith("train.py"):
        sys.argv.append("+callbacks.counter={_target_:run_program.StepCounter}")
    replace_numbers()
    count_measurements()
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        REPORT["graphs"] = counters["stats"]["unique_graphs"]
        Path(os.environ["REPORT"]).write_text(json.dumps(REPORT))


if __name__ == "__main__":
    main()
