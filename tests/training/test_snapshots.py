"""Snapshots of the weights in small real runs: their steps, their contents, and what they leave as it was."""

import re

import pytest
import torch
from omegaconf import OmegaConf

from tinyformer.checkpoint.file import at_step, load_checkpoint
from tinyformer.errors import ArgumentError
from tinyformer.run.trainer import make_callbacks
from tinyformer.training import RunCSVLogger, Snapshots
from tinyformer.training.callbacks.checkpoints import Checkpoints, is_scheduled, num_scheduled
from tinyformer.training.callbacks.metrics import Report
from training.runs import CONTENTS, QUIET, Do, fit, snapshots

pytestmark = pytest.mark.filterwarnings(*QUIET)


@pytest.mark.parametrize(
    ("every_n_steps", "steps", "expected"),
    [
        (10, 25, [0, 1, 2, 4, 8, 10, 20, 25]),
        (1, 3, [0, 1, 2, 3]),
        (100, 5, [0, 1, 2, 4, 5]),
        (1000, 3000, [0, *(2**power for power in range(10)), 1000, 2000, 3000]),  # Pythia's
    ],
)
def test_the_steps_by_hand(every_n_steps, steps, expected):
    assert [step for step in range(steps + 1) if is_scheduled(step, every_n_steps) or step == steps] == expected
    assert num_scheduled(steps, every_n_steps) == len(expected)


def keepers(weights):
    """Callbacks that copy the weights before the first step and after each."""

    def keep(trainer):
        network = trainer.lightning_module.network
        weights[trainer.global_step] = {name: value.clone() for name, value in network.state_dict().items()}

    return [Do(step, keep, "on_train_batch_end" if step else "on_train_start") for step in range(9)]


def test_each_has_the_weights_of_its_optimizer_step_and_training_is_as_without(tmp_path, capsys):
    """With dropout; two batches are accumulated, and the last step is not on the schedule."""
    settings = {"accumulate_grad_batches": 2, "max_steps": 7, "log_every_n_steps": 1, "network": {"dropout": 0.2}}
    weights, rows, modules = {}, [], []
    for name, own in {"without": [], "with": [Snapshots(4)]}.items():
        logger = RunCSVLogger(tmp_path / f"{name}.csv")
        callbacks = [Report(), *own, *keepers(weights), Checkpoints(tmp_path / name, CONTENTS)]
        modules.append(fit(tmp_path / name, *callbacks, logger=logger, **settings)[1])
        rows.append({step: (row.get("train/loss"), row.get("val/loss")) for step, row in logger.rows.items()})
    assert rows[0] == rows[1]
    assert len(rows[0]) == 7
    assert all(map(torch.equal, modules[0].parameters(), modules[1].parameters()))
    assert not (tmp_path / "without" / "snapshots").exists()
    saved, path = snapshots(tmp_path / "with"), at_step(tmp_path / "with", 7)
    assert list(saved) == [0, 1, 2, 4, 7]
    torch.testing.assert_close(saved, {step: weights[step] for step in saved}, rtol=0, atol=0)
    last, size = load_checkpoint(path), path.stat().st_size
    assert (last.step, last.overrides, last.facts) == (7, CONTENTS["overrides"], CONTENTS["facts"])
    said = re.search(r"^snapshots: 5 of ([\d.]+) MB, ([\d.]+) MB in all, in .*/snap", capsys.readouterr().out, re.M)
    assert list(map(float, said.groups())) == pytest.approx([size / 1e6, 5 * size / 1e6], abs=0.06)


def test_in_bfloat16_they_are_rounded_and_tied_weights_are_stored_once(tmp_path):
    folders = [tmp_path / dtype for dtype in ("float32", "bfloat16")]
    for folder in folders:
        fit(folder, Snapshots(8, folder.name), Checkpoints(folder, CONTENTS), network={"tied": True}, max_steps=1)
    exact, rounded = (snapshots(folder)[1] for folder in folders)
    assert {weight.dtype for weight in rounded.values()} == {torch.bfloat16}
    torch.testing.assert_close({name: value.bfloat16() for name, value in exact.items()}, rounded, rtol=0, atol=0)
    num_bytes = sum({value.data_ptr(): value.nbytes for value in rounded.values()}.values())
    assert num_bytes < sum(value.nbytes for value in rounded.values())  # the readout is the embedding
    large, small = (at_step(folder, 1).stat().st_size for folder in folders)
    assert large - small == pytest.approx(num_bytes, rel=0.05)


def test_under_weight_averaging_they_have_the_average_as_checkpoints_do(tmp_path):
    average = {"_target_": "lightning.pytorch.callbacks.EMAWeightAveraging", "decay": 0.5}
    group = {"snapshots": {"_target_": "tinyformer.training.Snapshots", "every_n_steps": 6}, "average": average}
    weights, callbacks = {}, make_callbacks(OmegaConf.create(group)).values()
    fit(tmp_path, *keepers(weights), *callbacks, Checkpoints(tmp_path, CONTENTS))
    saved = snapshots(tmp_path)
    for step, name in {6: "previous.ckpt", 8: "last.ckpt"}.items():
        torch.testing.assert_close(saved[step], load_checkpoint(tmp_path / name).weights, rtol=0, atol=0)
    assert not torch.equal(*(of["readout.proj.weight"] for of in (saved[6], weights[6])))


def test_too_many_are_refused_and_a_run_without_an_end_stops_at_the_bound(tmp_path):
    checkpoints = Checkpoints(tmp_path, CONTENTS)
    fit(tmp_path, Snapshots(8), checkpoints, max_steps=1)
    gb = at_step(tmp_path, 1).stat().st_size / 1e9
    said = r"^every_n_steps=1: makes 9 snapshots of 0\.\d\d MB, \d\.\d MB in all, and max_gb=.*; "
    with pytest.raises(ArgumentError, match=said + "max_gb=1 works"):
        fit(tmp_path / "refused", Snapshots(1, max_gb=8.5 * gb), checkpoints)
    assert not (tmp_path / "refused" / "snapshots").exists()
    fit(tmp_path / "fits", Snapshots(4, max_gb=5.5 * gb), checkpoints)
    stop = Do(8, lambda trainer: setattr(trainer, "should_stop", True))
    fit(tmp_path / "endless", Snapshots(1, max_gb=4.5 * gb), stop, checkpoints, max_steps=-1)
    assert list(snapshots(tmp_path / "fits")) == [0, 1, 2, 4, 8]
    assert list(snapshots(tmp_path / "endless")) == [0, 1, 2, 3]


@pytest.mark.parametrize(("first", "every_n_steps", "steps"), [(0, 0, []), (2, 0, [0, 1, 2]), (2, 2, [0, 1, 2, 4])])
def test_those_of_a_killed_run_are_removed_after_the_first_step(tmp_path, first, every_n_steps, steps):
    """The next run starts, or resumes from the checkpoint of step 2, perhaps without snapshots."""
    folder, checkpoints, seen = tmp_path / "snapshots", Checkpoints(tmp_path, CONTENTS), []
    fit(tmp_path, Snapshots(1), checkpoints, max_steps=2)
    for name in ("step_000003.ckpt", "step_000005.ckpt", "step_000004.ckpt.partial"):
        (folder / name).write_bytes(b"what the kill left")
    look = Do(first, lambda trainer: seen.extend(path.name for path in folder.iterdir()), "on_before_backward")
    checkpoint = str(checkpoints.last) if first else None
    fit(tmp_path, look, Snapshots(every_n_steps), checkpoints, max_steps=4, checkpoint=checkpoint)
    assert len(seen) == 6
    assert sorted(path.name for path in folder.iterdir()) == [f"step_00000{step}.ckpt" for step in steps]


@pytest.mark.parametrize(
    ("step", "sentence"),
    [
        (9, "step=9: is not one of the 4 steps with a snapshot; the nearest: 4, 10; step=10 works."),
        (-1, "step=-1: is not one of the 4 steps with a snapshot; the nearest: 0; step=0 works."),
        ("last", "step='last': must be a number of optimizer steps, or all; step=10 works."),
    ],
)
def test_a_step_that_does_not_exist_is_refused_with_those_that_do(tmp_path, step, sentence):
    run = tmp_path / "run"
    names = [f"snapshots/step_{number:06d}.ckpt" for number in (10, 0, 4, 2)]
    for name in (*names, "snapshots/step_000007.ckpt.partial", "checkpoints/a.ckpt"):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).touch()
    for path in (run, run / "checkpoints/a.ckpt", run / "snapshots/step_000002.ckpt"):
        assert at_step(path, None) == path
        assert [at_step(path, each).name for each in (4, "all")] == ["step_000004.ckpt", "step_000010.ckpt"]
        with pytest.raises(ArgumentError, match=f"^{re.escape(sentence)}$"):
            at_step(path, step)
    with pytest.raises(ArgumentError, match=r"has no snapshots; .* with callbacks\.snapshots\.every_n_steps=100\.$"):
        at_step(tmp_path, 4)
