"""Causal head gating: gates beside a brute-force search, verdicts on heads made by hand, and windows that are apart."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from nn.model_cases import make_transformer
from torch.nn.functional import softplus

from analysis.contexts import ADDRESSES, columns_of, loud_encoder_decoder, loud_transformer, make_context, pair_context
from analysis.test_redundancy import made_by_hand
from tinyformer.analysis import HeadGating
from tinyformer.analysis.causes.gates import LARGEST_LOGIT, every_second, learned_gates
from tinyformer.analysis.removal.ablation import head_changes, head_importance
from tinyformer.nn import prune_heads

QUICK = HeadGating(num_fits=1, num_steps=3, num_resamples=10)


def by_hand(writes=(2.0, -1.0, 0.0)):
    """`made_by_hand` with one batch: head 0 finds the first bit, head 1 works against it, head 2 does nothing."""
    context = made_by_hand(writes)
    first, second = context.batches
    return replace(context, batches=[{name: torch.cat([rows, second[name]]) for name, rows in first.items()}])


def loss_of(first, second):
    """The loss of `by_hand` with gates on its first two heads, in closed form; nothing finds the second bit."""
    return softplus(torch.as_tensor(second - 2.0 * first)) + softplus(torch.tensor(0.0))


@pytest.mark.parametrize("pressure", [0.02, -0.02, 0.0025])
def test_learned_gates_are_those_of_a_brute_force_search(pressure):
    grid = torch.linspace(-LARGEST_LOGIT, LARGEST_LOGIT, 601)
    first, second = grid[:, None], grid[None, :]
    objective = loss_of(first.sigmoid(), second.sigmoid()) - pressure * (first + second)
    expected = grid[list(divmod(int(objective.argmin()), len(grid)))].sigmoid()
    found = learned_gates(by_hand(), torch.tensor([0.5, -0.5, 0.0]), pressure, torch.full((8,), 3.0), 150)
    torch.testing.assert_close(found[:2].sigmoid(), expected, rtol=0, atol=3e-3)
    assert found[2] == (LARGEST_LOGIT if pressure > 0 else -LARGEST_LOGIT)


def test_a_harmful_and_a_useless_head_are_found():
    found = HeadGating(num_fits=2, num_steps=40)(by_hand(), Path())
    table, scores = (columns_of(found.tables[name]) for name in ("gates", "gate_scores"))
    assert table["verdict"] == ("facilitating", "interfering", "irrelevant")
    whole, better = float(loss_of(1, 1)), float(loss_of(1, 0))
    assert table["change"] == pytest.approx([float(loss_of(0, 1)) - whole, better - whole, 0], abs=1e-6)
    for kind, kept in {"harmless": 2, "needed": 1}.items():  # the useless head does no harm, and is not needed
        assert found.scalars[f"analysis/{kind}_heads"] == kept
        assert found.scalars[f"analysis/{kind}_change"] == pytest.approx(better - whole, abs=1e-6)
    assert found.lines["  interfering"] == "1 (1): layer 0 head 1"
    assert scores["facilitation"] == pytest.approx(table["g-"])
    assert scores["interference"] == pytest.approx([1 - gate for gate in table["g+"]])


def test_untrained_heads_are_irrelevant():
    context = make_context(network := make_transformer(), batch_size=6, untrained=lambda: network)
    found = HeadGating(num_fits=2, num_steps=40)(context, Path()).scalars
    assert found["analysis/irrelevant"] == found["analysis/untrained_irrelevant"] == len(context.heads)


def test_ablated_and_pruned_heads_are_left_out_and_the_others_have_the_same_gates():
    ablated, pruned = (loud_transformer(num_kv_heads=2, ablated_heads=heads) for heads in ([[1, 3]], []))
    prune_heads(pruned.attentions()[1], [3])
    tables = [QUICK(make_context(of, padded=True, untrained=lambda of=of: of)).tables for of in (ablated, pruned)]
    first, second = (columns_of(table["gates"]) for table in tables)
    assert list(zip(first["layer"], first["head"], strict=True)) == [(at // 4, at % 4) for at in range(7)]
    for name in ("head", "g+", "g-", "change", "importance"):
        assert first[name] == pytest.approx(second[name], rel=1e-3, abs=1e-5), name
    assert ablated.attentions()[1].head_gate.factors.tolist() == [1, 1, 1, 0]


def test_the_heads_of_an_encoder_decoder_have_gates():
    context = pair_context(network := loud_encoder_decoder(), batch_size=2, untrained=lambda: network)
    table, measured = columns_of(QUICK(context).tables["gates"]), every_second(context, 1)
    heads = [(*address, head) for address in ADDRESSES for head in range(4)]
    assert list(zip(table["kind"], table["layer"], table["head"], strict=True)) == heads
    assert torch.equal(QUICK._gates(measured, [(3, 1)]), QUICK._gates(measured, measured.heads)[..., 13:14])
    assert table["change"] == pytest.approx([*head_changes(measured).values()], abs=1e-6)
    assert table["importance"] == pytest.approx([*head_importance(measured).values()], abs=1e-6)


def test_every_second_window_is_learned_from():
    context = make_context(loud_transformer(), num_windows=7, batch_size=3)
    context.batches[0]["document_starts"] = torch.tensor([0, 24], dtype=torch.int32)
    windows, start = torch.cat([batch["inputs"] for batch in context.batches]), torch.linspace(-1, 1, 8)
    for first in (0, 1):
        parts, counts = every_second(context, first), 2.0 * (torch.arange(7) % 2 == first)
        assert torch.equal(torch.cat([batch["inputs"] for batch in parts.batches]), windows[first::2])
        assert all(len(rows) == len(batch["inputs"]) for batch in parts.batches for rows in batch.values())
        found = learned_gates(parts, start, 0.01, torch.ones(parts.num_windows), 4)
        torch.testing.assert_close(found, learned_gates(context, start, 0.01, counts, 4), rtol=0, atol=1e-3)
