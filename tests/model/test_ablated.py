"""Heads that a block ablates, in all that a model computes."""

import numpy as np
import pytest
import torch
from analysis.subjects import make_subject
from torch import Tensor

from model.untrained import LABELS, TEXTS, causal, classifier, masked, of_variant, reader, translator
from tinyformer.analysis.ablation import MODES, mean_outputs
from tinyformer.errors import ArgumentError
from tinyformer.generation.sampling import Sampling, generate
from tinyformer.nn import prune_heads

OTHERS = ["dog", "he reads a book"]
OUTPUT = "layers.1.attention.output_by_head"


def factors(model):
    gates = [layer.head_gate for layer in model.network.attentions()]
    return [gate.factors for gate in gates], [gate.replacement for gate in gates]


def tokens_of(activation: Tensor, lengths: list[int]) -> Tensor:
    """The tokens of all rows, `tokens heads dim`."""
    return torch.cat([row[:, :length].transpose(0, 1) for row, length in zip(activation, lengths, strict=True)])


def test_the_mode_chooses_what_replaces_a_head():
    model, lengths = causal(), [8, 2, 10]
    whole = model.run(TEXTS, capture=OUTPUT).activations[OUTPUT]
    others = model.run(OTHERS, capture=OUTPUT).activations[OUTPUT]
    pool = tokens_of(others, [4, 16])
    for mode in MODES:
        with model.ablated([(1, 2)], mode=mode, texts=None if mode == "zero" else OTHERS):
            logits, found = model.run(TEXTS, capture=OUTPUT)
            assert torch.equal(logits, model.logits(TEXTS))
        heads = found[OUTPUT]
        assert torch.equal(heads[:, [0, 1, 3]], whole[:, [0, 1, 3]])
        head = tokens_of(heads, lengths)[:, 2]
        if mode == "resample":
            donor = next(row for row in others[:, 2] if torch.equal(row[:4], heads[0, 2, :4]))  # at the same positions
            assert torch.equal(heads[2, 2, :4], donor[:4])
            assert all((pool[:, 2] == output).all(dim=1).any() for output in head)  # and then at any
        else:
            expected = pool[:, 2].mean(dim=0) if mode == "mean" else torch.zeros(8)
            torch.testing.assert_close(head, expected.expand_as(head))
    assert factors(model) == ([None] * 2, [None] * 2)
    with model.ablated([(1, 2)], "resample", OTHERS):
        first, made = model.logits(TEXTS), model.generate(TEXTS, num_tokens=4, temperature=0)
    for row, length in enumerate(lengths):  # a fixed seed, and a text in a batch is the text alone
        with model.ablated([(1, 2)], "resample", OTHERS):
            torch.testing.assert_close(model.logits(TEXTS[row]), first[row : row + 1, :length])
    with model.ablated([(1, 2)], "resample", OTHERS):  # at the positions behind those of a cache, too
        tokens = model.tokenize(TEXTS[0])[0].tolist()
        new = generate(model.network, tokens, 4, Sampling(0), use_cache=False)[0]
        assert made[0] == TEXTS[0] + model.tokenizer.continuation(new, after=tokens[0])


def test_the_mean_is_that_of_the_analyses():
    model = causal()
    subject = make_subject(model.network)
    tokens = torch.cat([batch["inputs"] for batch in subject.batches])
    with model.ablated([(1, 2)], "mean", tokens):
        found = model.run("bird", capture=OUTPUT).activations[OUTPUT]
    torch.testing.assert_close(found[0, 2], mean_outputs(subject)[1][2].expand(5, 8))


MAKERS = {
    "causal": lambda: (causal(), (0, 1), {"generate": ("the",), "encode": (TEXTS,), "loss": (TEXTS,)}),
    "masked": lambda: (masked(), (0, 1), {"encode": (TEXTS,), "loss": (TEXTS,)}),
    "classifier": lambda: (classifier(), (0, 1), {"logits": (TEXTS,), "loss": (TEXTS, LABELS)}),
    "translator": lambda: (
        translator(),
        ("cross", 0, 1),
        {"generate": (TEXTS,), "loss": (TEXTS, [*OTHERS, "no"])},
    ),
    "reader": lambda: (reader(), (1, 3), {"loss": ("who?", "a cat", "cat"), "answer": ("who?", "a cat")}),
}


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("mode", MODES)
def test_every_method_runs_without_the_head(kind, mode):
    model, head, calls = MAKERS[kind]()
    texts = {"translator": (OTHERS, OTHERS), "reader": ("where?", "in the tree")}.get(kind, (OTHERS,))
    whole = {name: getattr(model, name)(*arguments) for name, arguments in calls.items()}
    with model.ablated([head], mode, *(() if mode == "zero" else texts)):
        for name, arguments in calls.items():
            found = getattr(model, name)(*arguments)
            assert not (torch.equal(found, whole[name]) if isinstance(found, Tensor) else found == whole[name]), name
    for name, arguments in calls.items():
        found = getattr(model, name)(*arguments)
        assert torch.equal(found, whole[name]) if isinstance(found, Tensor) else found == whole[name]


@pytest.mark.parametrize("backend", ["eager", "auto"])
def test_an_output_gate_comes_before_the_ablation(backend):
    model = of_variant("gate", backend=backend, ablated_heads=[[1, 0]])
    layer, block = model.network.attentions()[1], model.network.encoder.layers[1]
    parts = ["layers.0.residual_post", "layers.1.attention.values", "layers.1.attention.weights", OUTPUT]
    with model.ablated([(1, 3)]), torch.no_grad():
        stream, values, weights, outputs = model.run("the cat", capture=parts).activations.values()
        gate = torch.sigmoid(layer.output_gate.proj(block.attention_norm(stream))).mT.unsqueeze(-1)
        values = values.repeat_interleave(4 // values.shape[1], dim=1)
    expected = weights @ values * gate * torch.tensor([0.0, 1.0, 1.0, 0.0]).view(4, 1, 1)
    torch.testing.assert_close(outputs, expected)


def test_blocks_nest():
    model = causal(ablated_heads=[[1, 3]])
    mean = tokens_of(model.run(OTHERS, capture=OUTPUT).activations[OUTPUT], [4, 16]).mean(dim=0)

    def is_mean_or_zero(heads, ablated):
        found = model.run(TEXTS, capture=OUTPUT).activations[OUTPUT][0, :, :8]
        for head in heads:
            torch.testing.assert_close(found[head], mean[head].expand(8, 8))
        assert (found[ablated] == 0).all()

    with model.ablated([(1, 0), (1, 1)], "mean", OTHERS):
        with model.ablated([(1, 1), (0, 2)]):
            is_mean_or_zero([0], [1, 3])
        with model.ablated([(1, 2)], "mean", OTHERS):
            is_mean_or_zero([0, 1, 2], [3])
            with model.ablated([(1, 2), (1, 0)]), model.ablated([(1, 2)], "mean", OTHERS):
                is_mean_or_zero([1, 2], [0, 3])  # its own mean, not that of what replaced it
        is_mean_or_zero([0, 1], [3])
    with pytest.raises(ZeroDivisionError), model.ablated([(1, 0)], "mean", OTHERS):
        raise ZeroDivisionError
    (first, second), replacements = factors(model)
    assert first is None
    assert second.tolist() == [1, 1, 1, 0]
    assert replacements == [None, None]


def test_pruned_heads_keep_the_numbers_of_the_others():
    model = causal()
    prune_heads(model.network.attentions()[1], [1])
    with model.ablated([(1, 2)]):
        heads = model.run(TEXTS, capture=OUTPUT).activations[OUTPUT]
    assert [(heads[:, index] == 0).all().item() for index in range(3)] == [False, True, False]
    with model.ablated([np.unravel_index(6, (2, 4))]):
        assert torch.equal(model.run(TEXTS, capture=OUTPUT).activations[OUTPUT], heads)
    with pytest.raises(ArgumentError, match=r"^heads=\[\[1, 1\]\]: must hold \[layer, head\]"), model.ablated([(1, 1)]):
        pass


MISTAKES = [
    (causal, ([(2, 0)],), "heads=[[2, 0]]: must hold [layer, head] pairs of a model with 2 layers of 4 heads"),
    (causal, ([(0, True)],), "heads=[[0, True]]: "),
    (causal, ([("cross", 0, 0)],), "heads=[['cross', 0, 0]]: must hold [layer, head] pairs"),
    (causal, ([()],), "heads=[[]]: "),
    (translator, ([(0, 1)],), "heads=[[0, 1]]: must hold [kind, layer, head] with a kind of encoder, decoder, cross"),
    (translator, ([("cross", 1, 1)],), "cross has 1 layers of 4 heads; heads=[['cross', 0, 3]] works."),
    (causal, ([(0, 1)], "median"), "mode='median': must be one of zero, mean, resample."),
    (causal, ([(0, 1)], "mean"), "texts=None: must be given for mode='mean'"),
    (translator, ([("cross", 0, 1)], "mean", TEXTS, ["un"]), "targets=['un']: must be 3, as many as texts."),
]


@pytest.mark.parametrize(("make", "arguments", "message"), MISTAKES)
def test_mistakes(make, arguments, message):
    model = make()
    with pytest.raises(ArgumentError) as caught, model.ablated(*arguments):
        pass
    assert message in str(caught.value)
