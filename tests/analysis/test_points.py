"""Captured and replaced activations: nothing else changes, and all that follows is recomputed."""

from functools import partial

import pytest
import torch
from model.models import TEXTS, answerer, causal, classifier, masked, model, translator
from nn.test_compile import printed
from nn.test_own_classes import Clipped
from nn.variants import NAMES, able, factory, network

from tinyformer.errors import ArgumentError
from tinyformer.measures.points import intervention
from tinyformer.model.model import Model
from tinyformer.nn import Attention, ParallelBlock, PostNormBlock, SandwichBlock
from tinyformer.tasks import CausalLM

ARGUMENTS = {
    causal: (TEXTS,),
    masked: (TEXTS,),
    classifier: (TEXTS,),
    translator: (TEXTS, ["le chat", "un", "oiseau"]),
    answerer: (["who?", "where is it?"], ["the cat sat in the tree", "here"]),
}
BACKENDS = {name: ("eager", *(kernel for kernel in able(name, training=False) if kernel != "flex")) for name in NAMES}
CELLS = [(name, BACKENDS[name][index % len(BACKENDS[name])]) for index, name in enumerate(NAMES)]
"""Each variant with one of the backends that compute it."""


@pytest.mark.parametrize(("name", "backend"), [*CELLS, pytest.param("gqa", "flex", marks=pytest.mark.slow)])
def test_capturing_changes_nothing_and_own_values_replace_themselves(name, backend):
    some = model(name, backend=backend)
    logits, activations = some.run(TEXTS, capture="*")
    assert torch.equal(logits, some.logits(TEXTS))
    sizes = {"batch": 3, "seq": 10}
    assert {point: tuple(value.shape) for point, value in activations.items()} == {
        point: tuple(sizes.get(size, size) for size in shape) for point, shape in some.points.items()
    }
    for value in activations.values():
        assert (value[1, 2:] == 0).all() if value.ndim == 3 else (value[1, :, 2:] == 0).all()  # padding
    # Replaced weights are applied by definition, in another order than a fused kernel's.
    others = {point: lambda value: value for point in some.points if not point.endswith(("scores", "weights"))}
    assert torch.equal(some.run(TEXTS, replace=others).logits, logits)
    again = some.run(TEXTS, replace={"*": lambda value: value}).logits
    torch.testing.assert_close(again, logits, atol=0 if backend == "eager" else 1e-5, rtol=0)


@pytest.mark.parametrize("make", ARGUMENTS, ids=lambda make: make.__name__)
def test_every_task_has_points(make):
    some, arguments = make(), ARGUMENTS[make]
    logits, activations = some.run(*arguments, capture=["*"])
    assert list(activations) == list(some.points)
    assert torch.equal(activations["logits"], logits)
    for point in some.points:
        replaced = some.run(*arguments, replace={point: torch.zeros_like}).logits
        # Scores that are the same at every key do not show which of queries and keys are zero.
        assert not torch.equal(replaced, logits), point
    alone = some.run(*(each[1] for each in arguments), capture="*").activations
    for point, value in activations.items():
        row = value[-1 if make is answerer else 1]  # the first question has two windows
        row = row[tuple(slice(size) for size in alone[point].shape[1:])]
        torch.testing.assert_close(row, alone[point][0], atol=1e-5, rtol=1e-5)


class Doubled(Attention):
    """An attention whose weights, twice a softmax, have to be derived from what it computes."""

    def attend(self, qkv, mask, is_cross):
        return 2 * super().attend(qkv, mask, is_cross)


GRADIENTS = {
    "pre_norm": lambda: causal(bias=True, num_kv_heads=2, pruned_heads=[(0, 1)]),
    "post_norm": lambda: causal(kind=PostNormBlock, sink=True),
    "sandwich": lambda: causal(kind=SandwichBlock),
    "parallel": lambda: causal(kind=ParallelBlock),
    "mla": lambda: model("mla+rotary+qk_norm"),
    "differential": lambda: model("gqa+differential+sink+window"),
    "relative": lambda: model("gqa+relative"),
    "local_gaussian": lambda: model("gqa+local_gaussian"),
    "own": lambda: Model(network(partial(Doubled, 32, 4)), causal().tokenizer, CausalLM()),
    "translator": translator,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_are_the_slopes_of_replaced_activations(name):
    some, generator = GRADIENTS[name](), torch.Generator().manual_seed(0)
    some.network.double().requires_grad_(False)
    arguments = ARGUMENTS[translator if name == "translator" else causal]

    def scalar(logits):
        return (logits * torch.linspace(-1, 1, logits.shape[-1], dtype=logits.dtype)).sum()

    def gradients_of(arguments):
        logits, activations = some.run(*arguments, capture="*", gradients=True)
        torch.testing.assert_close(logits, some.logits(*arguments))
        return activations, torch.autograd.grad(scalar(logits), activations.values())

    activations, gradients = gradients_of(arguments)
    _, alone = gradients_of([each[1] for each in arguments])
    for (point, value), gradient, of_row in zip(activations.items(), gradients, alone, strict=True):
        row = gradient[1][tuple(slice(size) for size in of_row.shape[1:])]
        torch.testing.assert_close(row, of_row[0])
        assert torch.count_nonzero(gradient[1]) == torch.count_nonzero(row)  # none at padding
        step = 1e-7 * torch.randn(value.shape, generator=generator, dtype=value.dtype)
        up, down = (scalar(some.run(*arguments, replace={point: value.detach() + s}).logits) for s in (step, -step))
        torch.testing.assert_close((up - down) / 2, (gradient * step).sum(), rtol=1e-5, atol=1e-12)
        leaf = value.detach().requires_grad_()
        again = torch.autograd.grad(scalar(some.run(*arguments, replace={point: leaf}).logits), leaf)
        torch.testing.assert_close(again[0], gradient)


def test_replacements_act_in_the_order_of_the_forward_pass():
    some, doubled = causal(kind=PostNormBlock), causal(kind=PostNormBlock)  # whose final norm is the identity
    queries, weights = (f"layers.1.attention.{part}" for part in ("queries", "weights"))
    with torch.no_grad():
        doubled.network.attentions()[1].q_proj.weight.mul_(2)
    replace = {weights: lambda w: w.flip(1), queries: lambda q: 2 * q}
    found, alone = some.run(TEXTS, capture=weights, replace=replace), doubled.run(TEXTS, capture=weights)
    torch.testing.assert_close(found.activations[weights], alone.activations[weights].flip(1))
    _, captured = some.run(TEXTS, capture="*")
    alone = {POINT: lambda _: some.run(TEXTS[0], capture=POINT).activations[POINT]}  # may run the model itself
    assert torch.equal(some.run(TEXTS[0], replace=alone).logits, some.logits(TEXTS[0]))
    changed = some.run(TEXTS, capture="*", replace={"final_norm": lambda x: x.zero_()}).activations
    assert (changed["final_norm"] == 0).all()
    assert torch.equal(changed["layers.1.residual_post"], captured["layers.1.residual_post"])


def test_training_mode_checkpointing_and_bf16():
    some, rounded, weights = causal(dropout=0.5), causal(), "layers.0.attention.weights"
    expected = some.run(TEXTS, capture="*")
    some.network.encoder.checkpoint_activations = True
    assert torch.equal(some.run(TEXTS, capture="*").logits, expected.logits)
    assert some.network.encoder.checkpoint_activations
    some.network.train()
    in_training = some.run(TEXTS, capture=weights).activations[weights]
    torch.testing.assert_close(in_training, expected.activations[weights])  # before dropout
    assert some.network.training
    rounded.network.to(torch.bfloat16)
    logits, activations = rounded.run(TEXTS, capture="*")
    kinds = {value.dtype for name, value in activations.items() if not name.endswith(("scores", "weights"))}
    assert (kinds, activations[weights].dtype) == ({torch.bfloat16}, torch.float32)
    others = {name: value for name, value in activations.items() if "scores" not in name}
    torch.testing.assert_close(rounded.run(TEXTS, replace=others).logits, logits)


def test_replaced_scores_are_masked_and_hide_keys_themselves():
    some, scores, weights = causal(), "layers.0.attention.scores", "layers.0.attention.weights"

    def found(function):
        return some.run(TEXTS[:1], capture=weights, replace={scores: function}).activations[weights]

    torch.testing.assert_close(found(torch.zeros_like)[0, 0, 3], torch.tensor([0.25] * 4 + [0.0] * 4))
    hidden = found(lambda score: score.index_fill_(-1, torch.tensor(0), -torch.inf))
    assert (hidden[..., 0] == 0).all()
    torch.testing.assert_close(hidden.sum(-1), torch.tensor([0.0] + [1.0] * 7).expand(1, 4, 8))  # row 0 has no key left


class Silent(PostNormBlock):
    """A block that does not run its attention."""

    def forward(self, x, mask, cache=None, context=None):
        return x + self.feed_forward(x)


POINT = "layers.0.residual_mid"


def test_an_error_leaves_no_hook():
    some = causal()
    with pytest.raises(ZeroDivisionError):
        some.run(TEXTS, capture="*", replace={POINT: lambda x: 1 / 0})
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in some.network.modules())


def test_what_a_class_of_yours_computes_otherwise_is_refused():
    some = Model(network(partial(Clipped, 32, 4)), causal().tokenizer, CausalLM())
    silent = Model(network(factory("mha"), kind=Silent), causal().tokenizer, CausalLM())
    assert not [name for name in some.run(TEXTS, capture="*").activations if name.endswith("weights")]
    with pytest.raises(ArgumentError, match=r"Clipped overrides `?attend`?, but not `?apply_weights`?"):
        some.run(TEXTS, replace={"layers.1.attention.weights": torch.zeros_like})
    with pytest.raises(ArgumentError, match=r"^replace='layers\.0\.residual_mid': is not computed"):
        silent.run(TEXTS, replace={POINT: torch.zeros_like})
    with pytest.raises(ArgumentError, match=r"Doubled.*: has weights that are not the softmax of its scores"):
        GRADIENTS["own"]().run(TEXTS, replace={"layers.0.attention.scores": torch.zeros_like})


@pytest.mark.parametrize("make", [causal, masked, classifier])
def test_a_function_does_not_let_padding_change_a_text(make):
    some, seen = make(), []
    for function in (lambda x: x - x.mean(dim=1, keepdim=True), lambda x: torch.cat([x[:, :-1], 2 * x[:, -1:]], dim=1)):
        together, activations = some.run(TEXTS, capture=POINT, replace={POINT: function})
        for row, text in enumerate(TEXTS):
            alone = some.run(text, replace={POINT: function}).logits[0]
            torch.testing.assert_close(together[row][: len(alone)], alone, rtol=1e-4, atol=1e-4)
        assert (activations[POINT][1, 2:] == 0).all()
    with intervention(some.network, {}, replace={POINT: lambda x: seen.append(tuple(x.shape)) or x}) as passes:
        some.logits(TEXTS)
        assert (seen.pop()[0], [*passes.values()]) == (3, [])  # nothing is kept
    some.run(TEXTS, replace={POINT: lambda x: seen.append(tuple(x.shape)) or x})
    assert sorted(seen) == [(1, length, 32) for length in sorted(some.tokenize(TEXTS)[1].tolist())]  # real tokens
    with pytest.raises(IndexError):
        some.run(TEXTS, replace={POINT: lambda x: seen.append(x.shape) or x[:, 5]})
    assert len(seen) == 4  # called once more, although the text is too short


COMPILED = """
    import torch

    from model.models import TEXTS, causal

    replace = {"layers.0.attention.weights": lambda w: w.flip(1), "layers.1.residual_mid": torch.relu}
    plain, model = causal(), causal()
    model.network.compile(backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(model.logits(TEXTS), plain.logits(TEXTS))
    assert torch.equal(model.run(TEXTS, capture="*").logits, plain.logits(TEXTS))
    assert torch.equal(model.run(TEXTS, replace=replace).logits, plain.run(TEXTS, replace=replace).logits)
    for mode in ("zero", "mean", "resample"):
        with model.ablated([(0, 1)], mode, TEXTS), plain.ablated([(0, 1)], mode, TEXTS):
            assert torch.equal(model.logits(TEXTS), plain.logits(TEXTS))
    torch.testing.assert_close(model.logits(TEXTS), plain.logits(TEXTS))
    print("same")
"""


@pytest.mark.slow
def test_a_compiled_model_is_run_uncompiled():
    assert printed(COMPILED) == "same\n"
