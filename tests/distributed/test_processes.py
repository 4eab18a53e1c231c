"""Several processes of a run: none waits for another in a step, and they share the work of Muon."""

import itertools
from collections import Counter

import lightning as L
import pytest
import torch
from training.runs import CONTENTS, QUIET
from training.step_cases import ROWS, STEPS, off, trained

from tinyformer.errors import ArgumentError
from tinyformer.training import MuonWithAdamW, optimizers
from tinyformer.training.callbacks import checkpoints
from tinyformer.training.callbacks.checkpoints import Checkpoints

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings(*QUIET, "ignore:.*fork", "ignore:You defined a .validation")]

BLOCKING = ("barrier", "broadcast", "broadcast_object_list", "all_gather_object", "monitored_barrier")
"""Functions of torch.distributed in which the host waits for other processes."""
READING = ("item", "tolist", "__float__", "__int__")
"""Methods of a tensor in which it waits for the device."""


class Noted(L.Callback):
    """Writes what has been counted up to the end of each step, in a file for each process."""

    def __init__(self, path, counts):
        self.path, self.counts, self.steps = path, counts, []

    def on_train_batch_end(self, trainer, *args):
        self.steps.append(dict(self.counts))
        torch.save(self.steps, self.path / f"{trainer.global_rank}.pt")


def counting(counts, name, function):
    def counted(*arguments, **options):
        counts[name] += 1
        return function(*arguments, **options)

    return counted


READ, ASKED = {"tolist": 2}, {"__int__": 1}
"""At a report, losses with flags and the report's sums are read; then, after `Noted`, whether there was a signal."""


@pytest.mark.parametrize(
    ("every", "expected"), [(4, {4: READ, 5: ASKED, 8: READ, 9: ASKED, 12: READ}), (12, {11: ASKED, 12: READ})]
)
def test_no_process_waits_for_another_between_two_reports(every, expected, tmp_path, monkeypatch):
    counts = Counter()
    for name in BLOCKING:
        monkeypatch.setattr(torch.distributed, name, counting(counts, name, getattr(torch.distributed, name)))
    for name in READING:
        monkeypatch.setattr(torch.Tensor, name, counting(counts, name, getattr(torch.Tensor, name)))
    callbacks = [Checkpoints(tmp_path / "checkpoints", CONTENTS), Noted(tmp_path, counts)]
    trained(tmp_path, "causal_lm", (2, 1, ROWS // 2), callbacks=callbacks, log_every_n_steps=every)
    for rank in (0, 1):
        steps = torch.load(tmp_path / f"{rank}.pt")
        changes = [Counter(after) - Counter(before) for before, after in itertools.pairwise(steps)]
        assert changes == [Counter(expected.get(number, {})) for number in range(2, STEPS + 1)]


@pytest.mark.parametrize("processes", [2, 4])
def test_processes_share_the_matrices_of_muon(processes, tmp_path, monkeypatch):
    """In fp32, in which batched products of another number of matrices round differently."""
    monkeypatch.setattr(optimizers, "has_native_bf16", lambda device: False)
    multiplied = Counter()

    def baddbmm(x, *others, **factors):
        multiplied[tuple(x.shape[1:])] += len(x)
        return product(x, *others, **factors)

    product = torch.baddbmm
    monkeypatch.setattr(torch, "baddbmm", baddbmm)
    muon, own = MuonWithAdamW(lr=0.01), [Noted(tmp_path, multiplied)]
    _, weights, loss, _ = trained(tmp_path, "causal_lm", optimizer=muon, callbacks=own, precision="32-true")
    whole = Counter(torch.load(tmp_path / "0.pt")[-1])
    multiplied.clear()
    layout = (processes, 1, ROWS // processes)
    _, after, reported, _ = trained(tmp_path, "causal_lm", layout, optimizer=muon, callbacks=own, precision="32-true")
    assert off(after, weights) < 2e-4
    assert reported == pytest.approx(loss, rel=1e-4)
    for rank in range(processes):
        parts = torch.load(tmp_path / f"{rank}.pt")[-1]
        assert parts == {shape: number / processes for shape, number in whole.items()}


def test_processes_that_begin_at_different_steps_are_refused(tmp_path, monkeypatch):
    """As without a shared folder, where one node resumes a run and another starts it."""
    monkeypatch.setattr(checkpoints, "max_over_processes", lambda steps: torch.tensor([5, 0]))
    with pytest.raises(ArgumentError, match="its processes begin at steps 0 to 5; all nodes have to share the folder"):
        trained(tmp_path, "causal_lm", callbacks=[Checkpoints(tmp_path / "run/checkpoints", CONTENTS)])
