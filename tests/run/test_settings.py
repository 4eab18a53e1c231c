"""Settings of a run: what was used is stored, and each callback of Lightning does what it documents, or is refused."""

import re

import pytest
import torch
import yaml
from commands import BOOK, SMALL, TEXT, column, results_of, weights_of
from training.runs import make_data, make_module, snapshots

import tinyformer
from tinyformer.checkpoint.file import load_checkpoint
from tinyformer.config.errors import ConfigError
from tinyformer.run.data import evaluation_mask

pytestmark = pytest.mark.filterwarnings("ignore:When using the .ThroughputMonitor., you need to define")
WORDS = f"{SMALL} {TEXT} trainer.max_steps=6 trainer.val_check_interval=2 trainer.log_every_n_steps=2".split()


def run(folder, *added):
    """The folder of a run of six steps."""
    (folder / "book.txt").write_text(BOOK)
    words = [*WORDS, f"data.files={folder / 'book.txt'}", f"hydra.run.dir={folder / 'run'}"]
    return tinyformer.train([*words, *added]).folder


def adding(name, arguments):
    """The override with which a user adds a callback of Lightning."""
    return f"+callbacks.mine={{_target_:lightning.pytorch.callbacks.{name}{arguments and ','}{arguments}}}"


@pytest.fixture(scope="module")
def plain(tmp_path_factory, cache):
    """The run without another callback, with its weights after each step."""
    return run(tmp_path_factory.mktemp("plain"), "callbacks.snapshots.every_n_steps=1")


CALL = "{_target_:hydra.utils.get_method,path:builtins.%s}"
WORKS = [
    ("EMAWeightAveraging", "decay:0.5,update_starting_at_step:4", {"weights": (5, 6)}),
    ("EarlyStopping", "monitor:val/loss,stopping_threshold:100", {"weights": (2,)}),
    ("LearningRateMonitor", "", {"logged": "lr-CombinedOptimizer/pg1"}),
    ("ModelCheckpoint", "every_n_train_steps:3,save_top_k:-1", {}),
    ("ModelSummary", "", {"said": "Total params"}),
    ("TQDMProgressBar", "", {"said": r"\A(?!.*step 6/6)"}),
    ("ThroughputMonitor", "batch_size_fn:" + CALL % "len", {"logged": "train/samples"}),
    ("Timer", "duration:{milliseconds:1}", {"weights": (1,)}),
    ("WeightAveraging", "", {"weights": (1, 2, 3, 4, 5, 6)}),
]
"""Callbacks with their arguments, and what they do: the last weights are the mean of those of some steps."""

REFUSED = {"BackboneFinetuning": "", "BatchSizeFinder": "", "LearningRateFinder": ""}
REFUSED |= {"GradientAccumulationScheduler": "scheduling:{1:2}", "StochasticWeightAveraging": "swa_lrs:0.01"}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "arguments", "effect"), WORKS, ids=[name for name, _, _ in WORKS])
def test_a_callback_does_what_it_documents(name, arguments, effect, tmp_path, plain, capsys, caplog):
    folder = run(tmp_path, adding(name, arguments))
    assert re.search(effect.get("said", ""), caplog.text + capsys.readouterr().out, re.DOTALL)
    assert column(folder, effect.get("logged", "val/loss"))
    steps, saved = effect.get("weights", (6,)), snapshots(plain)
    means = {f"network.{key}": sum(saved[step][key] for step in steps) / len(steps) for key in saved[6]}
    torch.testing.assert_close(weights_of(folder), means)
    assert results_of(folder)["steps"] == steps[-1]
    losses, usual = column(folder, "val/loss"), column(plain, "val/loss")
    assert [step for step in usual if usual[step] == losses.get(step)] == [step for step in usual if step <= steps[0]]
    if name == "ModelCheckpoint":
        (path,) = folder.rglob("*-step=3.ckpt")
        torch.testing.assert_close(load_checkpoint(path).weights, saved[3])


@pytest.mark.parametrize(("name", "arguments"), REFUSED.items())
def test_a_callback_is_refused_before_anything_is_written(name, arguments, tmp_path):
    with pytest.raises(ConfigError, match=f"^callbacks.mine={name}: .*; callbacks.mine=null works.$"):
        run(tmp_path, adding(name, arguments))
    assert not (tmp_path / "run").exists()


def test_the_precision_that_was_used_is_stored(tmp_path):
    folder = run(tmp_path, "trainer.precision=auto")
    used = load_checkpoint(folder / "checkpoints/last.ckpt").facts["precision"]
    stored = yaml.safe_load((folder / "config.yaml").read_text())["trainer"]["precision"]
    assert stored == used == results_of(folder)["precision"] != "auto"


def test_less_than_one_batch_of_the_split_that_is_scored_after_training_is_refused(tmp_path):
    data = make_data(tmp_path, test_fraction=0.05, validation_fraction=0.4)
    task = make_module(data).task
    evaluation_mask(task, data, "validation", 0.1)
    with pytest.raises(ConfigError, match=r"0\.1 of the \d batches of the test split is less than one; .*=1\.$"):
        evaluation_mask(task, data, "test", 0.1)
