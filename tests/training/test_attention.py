"""Attention in training: telemetry of heads in small real runs."""

import math
from functools import partial

import pytest
import torch
from commands import table
from matplotlib.image import imread

from tinyformer.measures import MEASURES, PATTERNS
from tinyformer.training import AttentionTelemetry
from tinyformer.training.callbacks.checkpoints import Checkpoints, Interrupted
from tinyformer.training.callbacks.metrics import Report
from training.runs import CONTENTS, QUIET, fit, interrupt

pytestmark = pytest.mark.filterwarnings(*QUIET)

COSTLY = ("vertical", "block", "mean_similarity", "offset_share", "offset", "segment_vertical", "horizontal", "phrases")
NAMES = {
    f"attention/layer_{layer:02d}/head_{head:02d}/{name}"
    for layer in range(2)
    for head in range(4)
    for name in (*MEASURES, *PATTERNS)
}


def logged(logger):
    found = {
        step: {name: value for name, value in row.items() if name.startswith("attention/")}
        for step, row in logger.rows.items()
    }
    return {step: values for step, values in found.items() if values}


def test_heads_are_measured_at_steps_and_validations_and_plotted_at_validations(tmp_path, logger):
    telemetry = AttentionTelemetry(every_n_steps=2, num_windows=3, probe_text="A cat.", num_tokens=5)
    fit(tmp_path, telemetry, logger=logger)
    measured = logged(logger)
    assert list(measured) == [0, 2, 3, 4, 6, 8]
    assert telemetry.num_measurements == 8  # twice at 6 and 8, where both coincide
    for step, values in measured.items():
        costly = set() if step in (0, 3, 6, 8) else {name for name in NAMES if name.rsplit("/")[-1] in COSTLY}
        assert values.keys() == NAMES - costly
        assert all(math.isfinite(value) for value in values.values())
    assert [path.name for path in telemetry.paths] == [f"step_{step:06d}.png" for step in (3, 6, 8)]
    assert all(imread(path).ndim == 3 for path in telemetry.paths)
    assert telemetry.probing.axes[""].keys == ["<eos>", "A", "·", "c", "a"]
    rows = table(tmp_path / "attention" / "heads.csv")
    assert [(row["layer"], row["head"]) for row in rows] == [(str(n), f"{m:02d}") for n in range(2) for m in range(4)]
    for row in rows:
        for name in (*MEASURES, *PATTERNS):
            assert float(row[name]) == measured[8][f"attention/layer_{int(row['layer']):02d}/head_{row['head']}/{name}"]


def test_measures_are_computed_in_fp32_under_mixed_precision(tmp_path, logger):
    """bf16 has 8 bits: a value that was computed in it would not change when rounded to it."""
    fit(tmp_path, AttentionTelemetry(), logger=logger, precision="bf16-mixed", max_steps=1)
    exact = [value for name, value in logged(logger)[0].items() if name.endswith(("similarity", "rank"))]
    assert len(exact) == 24
    assert all(value != torch.tensor(value).bfloat16().item() for value in exact)


def test_padding_is_not_measured(tmp_path, logger):
    text = "\n\n".join("One two three four five." for _ in range(200))
    telemetry = AttentionTelemetry(every_n_steps=4)
    fit(tmp_path, telemetry, logger=logger, data={"text": text, "pack": "document"}, max_steps=1)
    assert (telemetry.probing.windows["targets"] >= 0).all()
    assert logged(logger)[0].keys() == NAMES


def test_telemetry_does_not_affect_training_nor_its_time(tmp_path, monkeypatch):
    excluded, exclude = [], Report.exclude
    monkeypatch.setattr(Report, "exclude", lambda self, seconds: excluded.append(seconds) or exclude(self, seconds))
    telemetry, reporter, runs = AttentionTelemetry(every_n_steps=1), Report(), []
    for callbacks in ([reporter, telemetry], []):
        _, module = fit(tmp_path, *callbacks, network={"dropout": 0.2}, precision="bf16-mixed")
        runs.append(module.network.state_dict() | {"drawn": torch.rand(3)})
    assert all(torch.equal(tensor, runs[1][name]) for name, tensor in runs[0].items())
    assert telemetry.seconds > 0
    assert telemetry.seconds + reporter.total.seconds < reporter.seconds
    assert len(excluded) == 1 + 8 + 3  # before the first step, after each step and at each validation
    assert telemetry.seconds == sum(excluded)


def test_a_resumed_run_continues_events_and_seconds(tmp_path, logger):
    fit(tmp_path / "first", AttentionTelemetry(every_n_steps=1), logger=logger)
    series = [logged(logger)[step]["attention/layer_01/head_02/first_token"] for step in range(9)]
    sink = (series[0] + series[-1]) / 2  # one head's attention to the first token crosses this
    make = partial(AttentionTelemetry, every_n_steps=1, thresholds={"first_token": sink}, hysteresis=0.0)
    whole, first, resumed = make(), make(), make()
    fit(tmp_path / "whole", whole, Checkpoints(tmp_path / "whole", CONTENTS))
    checkpoints = Checkpoints(tmp_path / "broken", CONTENTS)
    with pytest.raises(Interrupted):
        fit(tmp_path / "broken", first, interrupt(5), checkpoints)
    last = str(checkpoints.last)
    fit(tmp_path / "broken", resumed, Checkpoints(tmp_path / "broken", CONTENTS), checkpoint=last)
    assert whole.detector.events
    assert table(tmp_path / "whole" / "events.csv") == table(tmp_path / "broken" / "events.csv")
    assert resumed.num_measurements == whole.num_measurements == 12
    assert resumed.seconds > first.seconds
