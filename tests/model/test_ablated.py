"""Heads that a block ablates, in all that a model computes."""

import operator

import pytest
import torch
from torch import Tensor

from model.models import LABELS, TEXTS, answerer, causal, classifier, masked, translator
from tinyformer.analysis.removal.ablation import MODES
from tinyformer.generation.generation import Sampling, generate

OTHERS = ["dog", "he reads a book"]
OUTPUT = "layers.1.attention.output_by_head"


def factors(some):
    gates = [layer.head_gate for layer in some.network.attentions()]
    return [gate.factors for gate in gates], [gate.replacement for gate in gates]


def tokens_of(activation: Tensor, lengths: list[int]) -> Tensor:
    """The tokens of all rows, `tokens heads dim`."""
    return torch.cat([row[:, :length].transpose(0, 1) for row, length in zip(activation, lengths, strict=True)])


def test_the_mode_chooses_what_replaces_a_head():
    some, lengths = causal(), [8, 2, 10]
    whole, others = (some.run(texts, capture=OUTPUT).activations[OUTPUT] for texts in (TEXTS, OTHERS))
    pool = tokens_of(others, [4, 16])[:, 2]
    for mode in MODES:
        with some.ablated([(1, 2)], mode=mode, texts=None if mode == "zero" else OTHERS):
            logits, captured = some.run(TEXTS, capture=OUTPUT)
            assert torch.equal(logits, some.logits(TEXTS))
            alone = [some.logits(text) for text in TEXTS]
            made = some.generate(TEXTS, num_tokens=4, temperature=0)
            tokens = some.tokenize(TEXTS[0])[0].tolist()
            new = generate(some.network, tokens, 4, Sampling(0), use_cache=False)[0]
        for row, length in enumerate(lengths):  # a fixed seed, and a text in a batch is the text alone
            torch.testing.assert_close(alone[row], logits[row : row + 1, :length])
        # At the positions behind those of a cache, too.
        assert made[0] == TEXTS[0] + some.tokenizer.continuation(new, after=tokens[0])
        heads = captured[OUTPUT]
        assert torch.equal(heads[:, [0, 1, 3]], whole[:, [0, 1, 3]])
        head = tokens_of(heads, lengths)[:, 2]
        if mode == "resample":
            donor = next(row for row in others[:, 2] if torch.equal(row[:4], heads[0, 2, :4]))  # at the same positions
            assert torch.equal(heads[2, 2, :4], donor[:4])
            assert all((pool == output).all(dim=1).any() for output in head)  # and then at any
        else:
            expected = pool.mean(dim=0) if mode == "mean" else torch.zeros(8)
            torch.testing.assert_close(head, expected.expand_as(head))
    assert factors(some) == ([None] * 2, [None] * 2)


MAKERS = {
    causal: ((0, 1), (OTHERS,), {"generate": ("the",), "encode": (TEXTS,), "loss": (TEXTS,)}),
    masked: ((0, 1), (OTHERS,), {"encode": (TEXTS,), "loss": (TEXTS,)}),
    classifier: ((0, 1), (OTHERS,), {"logits": (TEXTS,), "loss": (TEXTS, LABELS)}),
    translator: (("cross", 0, 1), (OTHERS, OTHERS), {"generate": (TEXTS,), "loss": (TEXTS, [*OTHERS, "no"])}),
    answerer: ((1, 3), ("where?", "in the tree"), {"loss": ("who?", "a cat", "cat"), "answer": ("who?", "a cat")}),
}


@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("mode", MODES)
def test_every_method_runs_without_the_head(make, mode):
    some, (head, texts, calls) = make(), MAKERS[make]

    def results():
        found = [getattr(some, name)(*arguments) for name, arguments in calls.items()]
        return [result.tolist() if isinstance(result, Tensor) else result for result in found]

    whole = results()
    with some.ablated([head], mode, *(() if mode == "zero" else texts)):
        assert all(map(operator.ne, results(), whole))
    assert results() == whole


def test_blocks_nest():
    some = causal(ablated_heads=[[1, 3]])
    mean = tokens_of(some.run(OTHERS, capture=OUTPUT).activations[OUTPUT], [4, 16]).mean(dim=0)

    def is_mean_or_zero(heads, ablated):
        outputs = some.run(TEXTS, capture=OUTPUT).activations[OUTPUT][0, :, :8]
        torch.testing.assert_close(outputs[heads], mean[heads, None].expand(-1, 8, -1))
        assert (outputs[ablated] == 0).all()

    with some.ablated([(1, 0), (1, 1)], "mean", OTHERS):
        with some.ablated([(1, 1), (0, 2)]):
            is_mean_or_zero([0], [1, 3])
        with some.ablated([(1, 2)], "mean", OTHERS):
            is_mean_or_zero([0, 1, 2], [3])
            with some.ablated([(1, 2), (1, 0)]), some.ablated([(1, 2)], "mean", OTHERS):
                is_mean_or_zero([1, 2], [0, 3])  # its own mean, not that of what replaced it
        is_mean_or_zero([0, 1], [3])
    with pytest.raises(ZeroDivisionError), some.ablated([(1, 0)], "mean", OTHERS):
        raise ZeroDivisionError
    (first, second), replacements = factors(some)
    assert (first, second.tolist(), replacements) == (None, [1, 1, 1, 0], [None, None])
