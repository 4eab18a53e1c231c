"""The logit lens is the network that ends after some layers; the tuned lens reaches what another optimiser does."""

import copy
import math
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from interop.models import tokens
from model.models import LABELS, answerer, causal, classifier, masked, translator
from nn.model_cases import BLOCKS, make_encoder, token_ids

from analysis.contexts import (
    TOKENIZER,
    columns_of,
    loud,
    loud_encoder_decoder,
    loud_transformer,
    make_context,
    pair_context,
)
from analysis.test_transformer_lens import assert_same, both
from tinyformer.analysis import AnalysisContext, LogitLens
from tinyformer.analysis.causes.lens import fit_translator, log_probs, streams_of, targets_of
from tinyformer.data.batches.windows import IGNORED
from tinyformer.errors import ArgumentError
from tinyformer.measures.batches import rows_of
from tinyformer.nn import ClassReadout, MaskedTokenReadout, PostNormBlock, PreNormBlock, TokenReadout, Transformer
from tinyformer.tasks import CausalLM, Classification, MaskedLM


def windows(readout, task, **targets):
    """Windows of 6 and 4 tokens."""
    network = loud(Transformer(make_encoder(num_layers=2), readout))
    batch = {"inputs": token_ids(2, 6), "lengths": torch.tensor([6, 4]), **targets}
    return AnalysisContext(network, [batch], task, TOKENIZER, nullcontext, lambda: network)


SOME = torch.tensor([[5, IGNORED, IGNORED, 7, IGNORED, 9], [IGNORED, 30, 20, *[IGNORED] * 3]])
CLASSES = partial(ClassReadout, labels=LABELS, pooling="attention")
CASES = {
    "gqa": (lambda: make_context(loud_transformer(num_kv_heads=2, pruned_heads=[(0, 1)]), padded=True), 8),
    "sandwich": (lambda: make_context(loud_transformer(kind=BLOCKS["sandwich"]), padded=True), 8),
    "post": (lambda: make_context(loud_transformer(kind=PostNormBlock, bias=True), padded=True), 8),
    "pairs": (lambda: pair_context(loud_encoder_decoder()), 7),
    "capped": (lambda: windows(partial(TokenReadout, softcap=0.5), CausalLM(), targets=SOME), 6),
    "scaled": (lambda: windows(partial(TokenReadout, scaled=True), CausalLM(), targets=SOME), 6),
    "masked": (lambda: windows(MaskedTokenReadout, MaskedLM(), targets=SOME), 6),
    "classes": (lambda: windows(CLASSES, Classification(LABELS), labels=torch.tensor([2, 0])), 1),
}
"""Subjects, and the number of places of their first row."""


@torch.no_grad()
def log_q_by_depth(context, row):
    """The predictions of networks that end after each number of layers, with the same final norm and readout."""
    for depth in range(len(context.network.stacks()[-1].layers) + 1):
        network = copy.deepcopy(context.network)
        stack = network.stacks()[-1]
        stack.layers = stack.layers[:depth]
        yield context.task.forward(network, row).log_softmax(dim=-1).flatten(0, -2)


@pytest.mark.parametrize("case", CASES)
def test_each_depth_is_a_network_that_ends_there(case):
    context, places = CASES[case][0](), CASES[case][1]
    found = LogitLens(num_resamples=50)(context)
    table, expected = columns_of(found.tables["lens"]), []
    for row in rows_of(context.batches):
        is_target, targets, by_depth = targets_of(row) != IGNORED, targets_of(row), [*log_q_by_depth(context, row)]
        for log_q in by_depth:
            nats = F.nll_loss(log_q, targets, reduction="none", ignore_index=IGNORED)
            kl = (by_depth[-1].exp() * (by_depth[-1] - log_q)).sum(dim=-1)
            agreement = (log_q.argmax(dim=-1) == by_depth[-1].argmax(dim=-1)).float()
            expected.append(torch.stack([nats, kl, agreement, is_target.float()])[:, is_target].sum(dim=1))
    sums = torch.stack(expected).unflatten(0, (-1, len(by_depth))).sum(dim=0)
    for name, means in zip(("nats", "kl", "agreement"), (sums / sums[:, 3:]).T.tolist(), strict=False):
        assert table[name][: len(means)] == pytest.approx(means, abs=1e-5)
        ends = zip(table[f"{name}_low"], table[name], table[f"{name}_high"], strict=True)
        assert all(low - 1e-9 <= mean <= high + 1e-9 for low, mean, high in ends)
    assert table["nats"][len(means) - 1] == pytest.approx(context.losses().mean, abs=1e-5)

    row = rows_of(context.batches)[0]
    given, by_depth = targets_of(row)[:places], [*log_q_by_depth(context, row)]
    targets = given.where(given != IGNORED, by_depth[-1].argmax(dim=-1)[:places]).tolist()
    name = (LABELS if case == "classes" else TOKENIZER.token_strings(range(50))).__getitem__
    cells = found.tables["logit_lens"][1]
    assert [cell[:2] for cell in cells] == [[depth, place] for depth in range(len(by_depth)) for place in range(places)]
    for depth, place, _, predicted, probability, target, is_given, of_target, rank in cells:
        log_q, index = by_depth[depth][place].tolist(), targets[place]
        assert (predicted, target, is_given) == (name(log_q.index(max(log_q))), name(index), given[place] != IGNORED)
        assert (math.log(probability), math.log(of_target)) == pytest.approx((max(log_q), log_q[index]), abs=1e-4)
        assert rank == sorted(log_q, reverse=True).index(log_q[index]) + 1


def context_of(model):
    batch = {"inputs": token_ids(1, 4), "lengths": torch.tensor([4]), "targets": token_ids(1, 4)}
    return AnalysisContext(model.network, [batch], model.task, model._tokenizer)


TEXTS = {
    causal: ({"text": "cat"}, "<eos> c a t", "c a t -", "t"),
    masked: ({"text": "c<mask>t"}, "<eos> c <mask> t", "- c - t", "<mask>"),
    translator: ({"text": "cat", "target": "le"}, "<eos> l e", "l e <eos>", "e"),
    classifier: ({"text": "cat"}, "(text)", "-", "(text)"),
}


@pytest.mark.parametrize("make", TEXTS, ids=lambda make: make.__name__)
def test_the_table_of_a_text(make):
    options, read, targets, at = TEXTS[make]
    found = LogitLens(**options)(context_of(make()))
    table, depths = columns_of(found.tables["logit_lens"]), len(found.lines) - 1
    shown = [target if given else "-" for target, given in zip(table["target"], table["given"], strict=True)]
    assert [*table["token"]] == read.split() * depths
    assert shown == targets.split() * depths
    assert found.lines["logit lens"].startswith(f'prediction at "{at}", its probability, and the rank of "')
    assert ("rank 1" in found.lines["  logit lens, output"]) is ("-" in shown)
    names = ["output", "1 layer", "embedding"] if depths == 3 else ["output", "embedding"]
    above = [target if given else f"({target})" for target, given in zip(table["target"], table["given"], strict=True)]
    expected, number = ["target", *above[: len(read.split())]], len(read.split())
    for depth, name in zip(reversed(range(depths)), names, strict=True):
        expected += [name, *table["predicted"][depth * number : (depth + 1) * number]]
    expected += ["token", *read.split()]
    assert [label.text for label in found.figures["logit_lens"].labels][-len(expected) :] == expected


@pytest.mark.slow
@pytest.mark.parametrize("kind", [PreNormBlock, PostNormBlock])
def test_the_tuned_lens_reaches_the_divergence_of_another_full_batch_optimiser(kind):
    """To 1 %: that of L-BFGS until it converges, in fp64, in the coordinates of the stream."""
    context = make_context(loud_transformer(kind=kind), num_windows=60)
    x, _, output = map(torch.cat, zip(*(streams_of(context, row) for row in rows_of(context.batches)), strict=True))
    network = context.network.requires_grad_(False)
    fitted = fit_translator(x, output, partial(log_probs, network)).double()
    network, x, output = network.double(), x.double(), output.double()
    p = F.softmax(network.readout(network.encoder.final_norm(output)), dim=-1)

    def divergence(translator):
        log_q = F.log_softmax(network.readout(network.encoder.final_norm(translator(x))), dim=-1)
        return (p * (p.log() - log_q)).sum(dim=-1).mean()

    def gradient():
        optimizer.zero_grad()
        (loss := divergence(other)).backward()
        return loss

    other = torch.nn.Linear(32, 32).double()
    other.load_state_dict({"weight": torch.eye(32), "bias": torch.zeros(32)})
    before = divergence(other).item()
    optimizer = torch.optim.LBFGS(other.parameters(), max_iter=1000, line_search_fn="strong_wolfe", tolerance_change=0)
    optimizer.step(gradient)
    assert divergence(other).item() < 0.1 * before
    assert divergence(fitted).item() == pytest.approx(divergence(other).item(), rel=0.01)


def test_the_tuned_lens_is_fitted_on_half_of_the_windows_and_measured_on_the_other():
    other = loud_transformer(seed=1)
    context = make_context(loud_transformer(), num_windows=40, untrained=lambda: other)
    context.batches[0]["targets"][0, :5] = IGNORED
    found = LogitLens(tuned=True)(context)
    assert all(weight.grad is None for weight in context.network.parameters())
    rows, table = rows_of(context.batches), columns_of(found.tables["lens"])
    assert table["lens"] == ("logit lens",) * 3 + ("tuned lens",) * 3 + ("untrained",) * 3
    assert all(table["kl"][depth] > table["kl"][3 + depth] for depth in range(2))
    of_rows = [[x[row["targets"][0] != IGNORED] for x in streams_of(context, row)] for row in rows[::2]]
    x, _, output = map(torch.cat, zip(*of_rows, strict=True))
    translate = fit_translator(x, output, predict := partial(log_probs, context.network))
    with torch.no_grad():
        told = torch.cat([predict(translate(streams_of(context, row)[0])) for row in rows[1::2]])
    targets = torch.cat([row["targets"][0] for row in rows[1::2]])
    assert table["nats"][3] == pytest.approx(F.nll_loss(told, targets).item(), abs=1e-4)
    control = columns_of(LogitLens()(replace(context, network=other, batches=rows[1::2])).tables["lens"])
    assert [*found.figures["lens_agreement"].axes[0].lines[0].get_ydata()] == list(control["agreement"][:3])
    assert "over 20 windows, while the tuned lens is fitted on 20 others" in found.lines["lens"]
    assert {"logit_lens", "tuned_lens"} <= {*found.figures}
    shown = columns_of(found.tables["tuned_lens"])["token"][:8]
    assert list(shown) == TOKENIZER.token_strings(rows[1]["inputs"][0])  # that did not fit it


def test_a_model_for_questions_has_no_lens():
    with pytest.raises(ArgumentError, match="analysis='lens': predicts tokens or classes from the residual stream"):
        LogitLens()(context_of(answerer()))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_the_lens_is_that_of_transformer_lens(family, tmp_path):
    ours, bridge = both(family, tmp_path)
    ids = tokens()
    batch = {"inputs": ids, "lengths": torch.full((len(ids),), ids.shape[1])}
    context = AnalysisContext(ours.network, [batch], ours.task, TOKENIZER)
    with torch.no_grad():
        theirs = bridge.run_with_cache(ids)[1].logit_lens(positions=None, return_type="log_probs").values
        for at, row in enumerate(rows_of(context.batches)):
            for depth, (x, expected) in enumerate(zip(streams_of(context, row), theirs[:, at], strict=True)):
                assert_same(log_probs(ours.network, x), expected, f"{family} {depth}")
