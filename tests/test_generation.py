"""Drawing tokens, and going on from a prompt."""

import pytest
import torch
from nn.model_cases import make_transformer, token_ids

from tinyformer.generation import Sampling, generate
from tinyformer.nn import AttentionMask

SHARES = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05])


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    return make_transformer(vocab_size=20, max_seq_len=8, tied=False, dropout=0.5)


def draw(sampling, num=4000, seed=0, shares=SHARES):
    logits = shares.log().expand(num, -1)
    return sampling.draw(logits, torch.Generator().manual_seed(seed))


def frequencies(tokens):
    return torch.bincount(tokens, minlength=len(SHARES)) / len(tokens)


def greedy_by_full_forwards(network, tokens, num_tokens):
    network.eval()
    for _ in range(num_tokens):
        with torch.no_grad():
            logits = network(tokens[:, -8:], AttentionMask(causal=True))
        tokens = torch.cat([tokens, logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    return tokens[:, -num_tokens:]


# One token.


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(), SHARES),
        (Sampling(temperature=0.5), SHARES**2 / (SHARES**2).sum()),
        (Sampling(temperature=2.0), SHARES**0.5 / (SHARES**0.5).sum()),
        (Sampling(top_k=2), torch.tensor([4 / 7, 3 / 7, 0, 0, 0])),
        (Sampling(top_k=9), SHARES),
        (Sampling(top_p=0.71), torch.tensor([0.4, 0.3, 0.15, 0, 0]) / 0.85),
        (Sampling(top_p=0.69), torch.tensor([4 / 7, 3 / 7, 0, 0, 0])),
        (Sampling(top_p=1.0), SHARES),
        # Among the two likeliest, 4/7 and 3/7, the first alone reaches a half.
        (Sampling(top_k=2, top_p=0.5), torch.tensor([1.0, 0, 0, 0, 0])),
    ],
    ids=str,
)
def test_draws_follow_the_shares(sampling, expected):
    found = frequencies(draw(sampling))
    assert ((found > 0) == (expected > 0)).all()  # exactly the tokens that are left to draw
    # Four standard errors of a share of 4,000 draws.
    assert (found - expected).abs().max() < 4 * (0.25 / 4000) ** 0.5


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.0), Sampling(top_k=1), Sampling(top_p=1e-6)], ids=str)
def test_greedy_in_three_ways(sampling):
    shares = SHARES[torch.tensor([2, 0, 4, 1, 3])]
    assert (draw(sampling, shares=shares) == 1).all()


def test_a_share_that_is_reached_exactly_is_enough():
    shares = torch.tensor([0.5, 0.25, 0.125, 0.125])
    assert set(draw(Sampling(top_p=0.5), shares=shares).tolist()) == {0}
    assert set(draw(Sampling(top_p=0.75), shares=shares).tolist()) == {0, 1}


def test_rows_are_drawn_on_their_own():
    logits = torch.stack([SHARES.log(), SHARES.flip(0).log()])
    assert Sampling(top_k=1).draw(logits).tolist() == [0, 4]
    many = torch.stack([Sampling(top_p=0.5).draw(logits) for _ in range(100)])
    assert set(many[:, 0].tolist()) == {0, 1}
    assert set(many[:, 1].tolist()) == {3, 4}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1.0}, r"generate.temperature=-1.0 is negative; 0 takes"),
        ({"top_k": 0}, r"generate.top_k=0: .*generate.top_k=1"),
        ({"top_p": 0.0}, r"generate.top_p=0.0 .*; generate.top_p=0.9 is"),
        ({"top_p": 1.5}, r"generate.top_p=1.5 .*; generate.top_p=0.9 is"),
    ],
)
def test_values_out_of_range_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**settings)


# Many.


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.0), Sampling(top_k=1), Sampling(top_p=1e-6)], ids=str)
def test_greedy_text_is_the_argmax_of_repeated_forwards(network, sampling):
    prompt = token_ids(batch=3, seq=2, vocab_size=20)
    expected = greedy_by_full_forwards(network, prompt, 10)  # past max_seq_len = 8
    assert torch.equal(generate(network, prompt, 10, sampling), expected)


def test_a_long_prompt_counts_by_its_last_tokens(network):
    prompt = token_ids(batch=1, seq=30, vocab_size=20)
    cut = generate(network, prompt[:, -8:], 5, Sampling(temperature=0.0))
    assert torch.equal(generate(network, prompt, 5, Sampling(temperature=0.0)), cut)


def test_seeds_decide_and_nothing_else(network):
    prompt = token_ids(batch=2, seq=3, vocab_size=20)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = generate(network, prompt, 20, seed=3)
    assert torch.equal(torch.get_rng_state(), before)  # training goes on as if nothing had been drawn
    torch.manual_seed(2)
    assert torch.equal(generate(network, prompt, 20, seed=3), first)
    assert not torch.equal(generate(network, prompt, 20, seed=4), first)


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_is_given_back_and_dropout_is_off(network, training):
    network.train(training)
    prompt = token_ids(batch=1, seq=3, vocab_size=20)
    assert torch.equal(
        generate(network, prompt, 6, Sampling(temperature=0.0)),
        generate(network, prompt, 6, Sampling(top_k=1)),
    )
    assert network.training is training


def test_no_tokens_are_no_tokens(network):
    assert generate(network, token_ids(batch=2, seq=3, vocab_size=20), 0).shape == (2, 0)
