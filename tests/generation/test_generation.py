"""Sampling of tokens, generation from prompts, and beam search, with and without a KV cache."""

from functools import partial

import pytest
import torch
from nn.model_cases import make_encoder_decoder, make_transformer, token_ids
from nn.test_networks import CROSS, LENGTHS, SOURCE
from nn.variants import factory, gqa, rotary
from nn.variants import network as variant

from tinyformer.data import BPETokenizer, PairTokens
from tinyformer.errors import ArgumentError
from tinyformer.generation.generation import Beam, Sampling, beam_search, ends, generate
from tinyformer.nn import AttentionMask

SHARES = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05])


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    return make_transformer(vocab_size=20, max_seq_len=8, tied=False, dropout=0.5)


def draw(sampling, shares=SHARES):
    return sampling.draw(shares.log().expand(4000, -1), [torch.Generator().manual_seed(0)] * 4000)


# One token.


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(), SHARES),
        (Sampling(temperature=0.5), SHARES**2 / (SHARES**2).sum()),
        (Sampling(top_k=2), torch.tensor([4 / 7, 3 / 7, 0, 0, 0])),
        (Sampling(top_p=0.71), torch.tensor([0.4, 0.3, 0.15, 0, 0]) / 0.85),
        (Sampling(top_p=0.69), torch.tensor([4 / 7, 3 / 7, 0, 0, 0])),
        # Among the two likeliest, 4/7 and 3/7, the first alone reaches a half.
        (Sampling(top_k=2, top_p=0.5), torch.tensor([1.0, 0, 0, 0, 0])),
        (Sampling(temperature=0.0), torch.tensor([1.0, 0, 0, 0, 0])),
    ],
    ids=str,
)
def test_samples_follow_the_probabilities(sampling, expected):
    found = torch.bincount(draw(sampling), minlength=len(SHARES)) / 4000
    assert ((found > 0) == (expected > 0)).all()  # exactly the tokens that are left to draw
    # Four standard errors of a share of 4,000 draws.
    assert (found - expected).abs().max() < 4 * (0.25 / 4000) ** 0.5


def test_ties_leave_the_smallest_set():
    halves = torch.tensor([0.5, 0.25, 0.125, 0.125])
    for sampling, shares, number in (
        (Sampling(top_p=0.5), halves, 1),  # a share that is reached exactly is enough
        (Sampling(top_k=2), torch.tensor([0.1, 0.3, 0.3, 0.3]), 2),
    ):
        assert len(set(draw(sampling, shares).tolist())) == number


# Many.


def test_greedy_text_is_the_argmax_of_repeated_forwards(network):
    prompt = token_ids(batch=3, seq=2, vocab_size=20)
    made = generate(network.train(), prompt, 10, Sampling(temperature=0.0))
    assert network.training  # as before, although without dropout
    tokens = prompt
    network.eval()
    for _ in range(10):  # past max_seq_len = 8
        with torch.no_grad():
            logits = network(tokens[:, -8:], AttentionMask(causal=True))
        tokens = torch.cat([tokens, logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    assert made == tokens[:, 2:].tolist()


def test_seeds_decide_and_nothing_else(network):
    prompt, before = token_ids(batch=2, seq=3, vocab_size=20), torch.get_rng_state()
    assert generate(network, prompt, 20, seed=3) != generate(network, prompt, 20, seed=4)
    assert torch.equal(torch.get_rng_state(), before)  # training goes on as if nothing had been drawn


UNEQUAL = [[7], [3, 1, 4, 1, 5], [9, 2, 6], list(range(17))]


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.0), Sampling(top_k=20), Sampling()])
def test_a_prompt_is_continued_as_if_alone_with_a_cache_and_without(sampling):
    model = variant(partial(gqa, position=rotary, window=[4, None]))
    together = generate(model, UNEQUAL, 5, sampling, seed=5)
    assert together == generate(model, UNEQUAL, 5, sampling, seed=5, use_cache=False)
    assert [len(text) for text in together] == [5] * 4
    for row, prompt in enumerate(UNEQUAL):
        assert [together[row]] == generate(model, [prompt], 5, sampling, seed=5 + row)


def test_known_tokens_are_read_at_once():
    model, read = variant(gqa), []
    hook = model.encoder.register_forward_pre_hook(lambda encoder, args: read.append(args[0].shape[1]))
    assert list(map(len, generate(model, [[1, 2], [3] * 9], 2))) == [2, 2]
    assert read == [2, 1, 9, 1]
    # Beyond 16 tokens positions shift, and the whole window is read again.
    read.clear()
    generate(model, [[1] * 13], 6)
    hook.remove()
    assert read == [13, 1, 1, 1, 16, 16]


def test_a_stop_token_ends_one_text_and_not_the_others():
    model = variant(partial(gqa, position=rotary))
    whole = generate(model, UNEQUAL, 12, seed=1)
    stop = whole[1][4]
    cut = generate(model, UNEQUAL, 12, seed=1, stop_token=stop)
    assert cut == [text[: text.index(stop)] if stop in text else text for text in whole]
    assert len(cut[1]) <= 4 < max(map(len, cut))


def test_settings_that_do_not_work():
    for setting in ("beams", "length_penalty"):
        with pytest.raises(ArgumentError, match=f"^{setting}=-1: must be .*; {setting}=.* works"):
            Beam(**{setting: -1})


@pytest.mark.slow
def test_strings_end_a_text_as_in_transformers():
    transformers, text = pytest.importorskip("transformers"), "the cat sat; naïve 猫 cat " * 3
    tokenizer = BPETokenizer(300).build([text])
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer)
    texts = [tokenizer.encode(text)[:end] for end in range(2, 30)]
    for stop in (["e c"], ["t; n", "sat"], ["zz"]):
        criteria = transformers.generation.StopStringCriteria(theirs, stop)
        expected = [bool(criteria(torch.tensor([ids]), None)) for ids in texts]
        assert [ends(tokenizer, stop)["is_end"](ids) for ids in texts] == expected


# Beam search: tests/interop compares it with that of transformers.

END = 7
TOKENS = PairTokens(END, END, (END,))


@pytest.mark.parametrize("name", [name for name in CROSS if "+" not in name])
def test_rows_and_caches_do_not_change_a_target(name):
    network = make_encoder_decoder(cross=factory(name), std=0.4)
    both = beam_search(network, SOURCE, LENGTHS, TOKENS, Beam(3), max_tokens=8)
    assert both == beam_search(network, SOURCE, LENGTHS, TOKENS, Beam(3), max_tokens=8, use_cache=False)
    for row, length in enumerate(LENGTHS.tolist()):
        one, own = SOURCE[row : row + 1, :length], LENGTHS[row : row + 1]
        assert beam_search(network, one, own, TOKENS, Beam(3), max_tokens=8) == [both[row]]
