"""Snapshots of a run on the command line and in Python: `step=`, and any analysis over all of them."""

import gc
import re
import shutil
import weakref
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from analysis.contexts import columns_of, loud_transformer, make_context
from commands import Program, Trained, column, ran, results_of, table
from omegaconf import OmegaConf

import tinyformer
from tinyformer.analysis import HeadAblation, Snapshot
from tinyformer.analysis.over_training.over_steps import OverSteps, charts, joined
from tinyformer.checkpoint.file import load_checkpoint
from tinyformer.errors import ArgumentError
from tinyformer.run.pipeline import evaluate

pytestmark = pytest.mark.usefixtures("book")  # the text of the run, where an evaluation looks for it
STEPS = [0, 1, 2, 4, 8, 15, 30]


def test_a_step_is_scored_as_in_training_and_loaded_in_python(program: Program, trained: Trained) -> None:
    assert f"snapshots: {len(STEPS)} of 0." in trained.out
    words = "data.files=book.txt hydra.run.dir=evaluated callbacks.attention=null generate.num_tokens=2"
    ran(program, "evaluate.py", f"checkpoint={trained.last} step=15", words)
    results = results_of("evaluated")
    assert results["steps"] == 15
    assert results["val/loss"] == pytest.approx(float(column(trained.folder, "val/loss")[15]), abs=1e-5)
    model = tinyformer.load(trained.folder, step=15)
    assert str(model.origin) == "run/step_000015.ckpt, step 15"
    stored = load_checkpoint(trained.folder / "snapshots/step_000015.ckpt").weights
    torch.testing.assert_close(dict(model.network.state_dict()), stored, rtol=0, atol=0)
    assert tinyformer.load(trained.folder).origin.checkpoint.path == trained.last


@pytest.mark.slow
def test_an_analysis_of_all_steps_joins_what_it_finds_in_each(program: Program, trained: Trained) -> None:
    own, model = ["data.files=book.txt", "analysis.num_windows=9"], tinyformer.load(trained.last)
    words = f"checkpoint={trained.folder} step=all hydra.run.dir=all analysis=heads"
    assert "7, of steps 0 to 30; the lines below are for the last" in ran(program, "evaluate.py", words, *own)
    assert {path.stem for path in Path("all").glob("*.png")} == {"ablation", "ablation_by_step", "loss_by_step"}
    python = model.analyse(HeadAblation(num_windows=9), [own[0], "step=all"]).tables
    assert {name: [[*row.values()] for row in table(f"all/{name}.csv")] for name in python} == {
        name: [list(map(str, row)) for row in rows] for name, (_, rows) in python.items()
    }
    assert columns_of(python["scalars"])["step"] == tuple(STEPS)
    early = tinyformer.load(trained.folder, step=4)
    at_4 = [row[1:] for row in python["ablation"][1] if row[0] == 4]
    assert early.analyse("heads", own).tables["ablation"][1] == at_4
    with early.ablated([(0, 0)]), model.ablated([(0, 0)]):  # whose own weights are those of step 30
        assert model.analyse("heads", [*own, "step=4"]).tables == early.analyse("heads", own).tables
    shutil.copytree(trained.folder, "run")
    Path("run/snapshots/step_000008.ckpt").write_bytes(b"damaged")
    refused = program("evaluate.py", "checkpoint=run step=all analysis=heads", own[0])
    assert re.match(r"Error: checkpoint=\S+/run/snapshots/step_000008\.ckpt: cannot be read", refused.err), refused.err


@pytest.mark.parametrize(("analysis", "works"), [(None, "analysis='heads'"), ({}, "score=False")])
def test_snapshots_are_not_scored(analysis: Any, works: str) -> None:
    config = OmegaConf.create({"step": "all", "analysis": analysis, "score": True})
    with pytest.raises(ArgumentError, match=f"^step='all': analyses each snapshot, and scores none; {works} works"):
        evaluate(config, Path())


@dataclass
class Watched:
    """An analysis that writes a file, and counts the networks of snapshots that are in memory."""

    networks: list[weakref.ref]
    num_windows: int = 6
    needs_gradient: bool = False

    def __call__(self, model, folder=Path()):
        gc.collect()
        assert sum(network() is not None for network in self.networks) == 1
        (folder / f"{len(self.networks)}.txt").touch()
        return HeadAblation(num_resamples=20)(model, folder)


def test_one_network_is_in_memory_and_found_in_as_alone(tmp_path: Path) -> None:
    networks = []

    def network(seed):
        made = loud_transformer(seed=seed, num_layers=3)
        networks.append(weakref.ref(made))
        return made

    context = make_context(loud_transformer(seed=9, num_layers=3))
    snapshots = [Snapshot(step, partial(network, seed)) for step, seed in {0: 1, 1: 2, 8: 3}.items()]
    findings = OverSteps(Watched(networks))(replace(context, snapshots=snapshots), tmp_path)
    assert [path.name for path in tmp_path.glob("[1-3].txt")] == ["3.txt"]
    alone = HeadAblation(num_resamples=20)(replace(context, network=loud_transformer(seed=2, num_layers=3)))
    assert [row[1:] for row in findings.tables["ablation"][1] if row[0] == 1] == alone.tables["ablation"][1]
    assert findings.tables["scalars"][1][1] == [1, alone.scalars["analysis/loss"]]
    assert findings.own_facts["ablation_by_step"]["step"] == "0 to 8"


def test_tables_are_joined_and_drawn_by_hand() -> None:
    tables = {0: (["layer", "head", "a"], [[0, 0, 1.0], [0, 1, None]]), 4: (["layer", "head", "b"], [[0, 0, 2.0]])}
    rows = [[0, 0, 0, 1.0, None], [0, 0, 1, None, None], [4, 0, 0, None, 2.0]]
    assert joined(tables) == (["step", "layer", "head", "a", "b"], rows)
    columns = ["step", "kind", "layer", "head", "kv_head", "a"]
    heads = [[0, "cross", 0, 2, 1, 0.5], [4, "cross", 0, 2, 1, None]]
    scalars, layers, none = (["step", "b/c"], [[0, 1], [4, None]]), (["step", "layer", "a"], rows), (columns, [])
    other = {"scalars": scalars, "layers": layers, "none": none, "pairs": (columns, [*heads, heads[0]])}
    drawn = {name: figure.axes[0].lines for name, figure in charts({"heads": (columns, heads), **other}).items()}
    curves = {
        name: [(line.get_label(), str(line.get_ydata().tolist())) for line in lines] for name, lines in drawn.items()
    }
    assert curves == {"heads": [("cross layer 0 head 2", "[0.5, nan]")], "b_c": [("_child0", "[1.0, nan]")]}
