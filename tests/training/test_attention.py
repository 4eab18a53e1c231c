"""Attention in training: telemetry of heads in small real runs, and the memory that attention weights take."""

import math
from functools import partial

import pytest
import torch
from commands import table
from matplotlib.image import imread
from nn.model_cases import make_transformer, token_ids

from tinyformer.costs.network import find_memory_shortage, stored_bytes
from tinyformer.measures import MEASURES, PATTERNS
from tinyformer.nn import AttentionMask
from tinyformer.training import AttentionTelemetry
from tinyformer.training.callbacks.checkpoints import Checkpoints, Interrupted
from tinyformer.training.callbacks.report import Report
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


# The memory of attention weights: what autograd stores, and the warning before it does not fit.

CAUSAL = AttentionMask(causal=True)
SEQ, HEADS, ROWS = 64, 4, 3
BACKEND = ("network", "encoder", "block", "attention", "backend")
RECOMPUTE, LENGTH = ("network", "encoder", "checkpoint_activations"), ("network", "encoder", "max_seq_len")
BATCH, ACCUMULATE = ("datamodule", "batch_size"), ("trainer", "accumulate_grad_batches")


def bytes_of_maps(model, autocast=False):
    """Bytes of all tensors that autograd stores with a number for each head, query and key, each counted once."""
    sizes = {}

    def pack(tensor):
        if tensor.numel() >= ROWS * HEADS * SEQ * SEQ:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
    ):
        assert model(token_ids(ROWS, SEQ), CAUSAL).requires_grad
    return sum(sizes.values())


@pytest.mark.parametrize(
    ("dropout", "autocast", "bytes_per_weight"), [(0.0, False, 4), (0.0, True, 6), (0.1, False, 12), (0.1, True, 8)]
)
def test_the_estimate_is_what_autograd_stores(dropout, autocast, bytes_per_weight):
    model = make_transformer(max_seq_len=SEQ, num_layers=3, backend="eager", dropout=0.0).train()
    for layer in model.attentions():
        layer.dropout = dropout
    dtype = torch.bfloat16 if autocast else torch.float32
    estimate = 3 * ROWS * stored_bytes(model.attentions()[0], SEQ, "cpu", dtype)
    assert estimate == bytes_of_maps(model, autocast) == 3 * ROWS * HEADS * SEQ * SEQ * bytes_per_weight


ROW = 4 * 4 * 4 * 1024 * 1024
"""Bytes that a sequence takes in 4 layers with 4 heads: 67.1 MB in fp32."""


@pytest.mark.parametrize(
    ("free", "dropout", "recompute", "works"),
    [
        (8 * ROW, 0.0, False, None),
        (8 * ROW - 1, 0.0, False, {BACKEND: "flash"}),
        (2 * ROW, 0.0, True, None),
        # Flash has no dropout on CPU; with it, weights take 12 bytes instead of 4.
        (6 * ROW, 0.1, False, {RECOMPUTE: True}),
        (ROW, 0.1, True, {BATCH: 1, ACCUMULATE: 8}),
        (ROW * 3 // 8, 0.1, True, {LENGTH: 256}),
    ],
)
def test_what_does_not_fit_is_reported_with_settings_that_help(free, dropout, recompute, works):
    model = make_transformer(num_layers=4, max_seq_len=1024, backend="eager", checkpoint_activations=recompute)
    for layer in model.attentions():
        layer.dropout = dropout
    found = find_memory_shortage(model, ["eager"] * 4, "cpu", torch.float32, CAUSAL, 8, free)
    assert (found and found.works) == works
