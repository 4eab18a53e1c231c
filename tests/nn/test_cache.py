"""Decoding against a cache is the full forward pass, and the cache takes the memory that it should."""

from functools import partial

import pytest
import torch
from attention_cases import error
from variants import alibi, differential, gqa, mha, mla, mqa, network, prepared, rotary, shaw, shaw_keys, t5, tokens

from tinyformer.analysis import capture_attention
from tinyformer.nn import (
    AttentionMask,
    Cache,
    LayerCache,
    LearnedPosition,
    PostNormBlock,
    PreNormBlock,
    Shared,
    SinusoidalPosition,
    Transformer,
)

CAUSAL = AttentionMask(causal=True)
SHARINGS = {"mha": mha, "gqa": gqa, "mqa": mqa, "mla": mla, "mla-q_rank": partial(mla, q_rank=10)}
SHARINGS["differential"] = differential
ABSOLUTE = {"learned": partial(LearnedPosition, 16, 32), "sinusoidal": partial(SinusoidalPosition, 16, 32)}
RELATIVE = {"rotary": rotary, "alibi": alibi, "t5": t5, "shaw": shaw, "shaw-keys": shaw_keys, "t5-shared": Shared(t5)}
OPTIONS = {
    "plain": {},
    "window": {"window": 3},
    "windows": {"window": [2, None]},
    "sink": {"sink": True},
    "sink+window": {"sink": True, "window": 3},
    "softcap": {"softcap": 0.5},
    "local_gaussian": {"window": 4, "local_gaussian": True},
    "gate+qk_norm": {"gate": True, "qk_norm": True},
    "general": {"score": "general"},
    "additive": {"score": "additive"},
    "ablated": {"ablated_heads": [[0, 1], [1, 3]]},
}


def make_model(sharing: str = "gqa", position: str = "none", kind=PreNormBlock, **options) -> Transformer:
    relative = {"position": RELATIVE[position]} if position in RELATIVE else {}
    return network(partial(SHARINGS[sharing], **relative, **options), ABSOLUTE.get(position), kind)


def ids(seq: int = 11) -> torch.Tensor:
    return torch.randint(50, (2, seq), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def assert_decodes(model: Transformer, chunks: list[int]) -> None:
    full, cache, parts = model(ids(), CAUSAL), Cache(2), []
    for chunk in ids().split(chunks, dim=1):
        parts.append(model(chunk, CAUSAL, cache))
        assert cache.length == sum(part.shape[1] for part in parts)
    assert error(torch.cat(parts, dim=1), full) <= 1e-5


CHUNKS = pytest.mark.parametrize("chunks", [[1] * 11, [4, 1, 1, 3, 2]], ids=["one-by-one", "chunks"])


@CHUNKS
@pytest.mark.parametrize("sharing", SHARINGS)
def test_every_sharing_decodes(sharing, chunks):
    assert_decodes(make_model(sharing), chunks)


@CHUNKS
@pytest.mark.parametrize("position", [*ABSOLUTE, *RELATIVE])
def test_every_position_decodes(position, chunks):
    assert_decodes(make_model(position=position), chunks)


@pytest.mark.parametrize("position", ["rotary", "alibi", "t5", "shaw-keys"])
@pytest.mark.parametrize("sharing", ["mqa", "mla", "differential"])
def test_every_sharing_decodes_with_relative_positions(sharing, position):
    assert_decodes(make_model(sharing, position), [4, 1, 1, 3, 2])


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_option_decodes(options):
    assert_decodes(make_model(position="rotary", **options), [4, 1, 1, 3, 2])


@pytest.mark.parametrize("position", ["rotary", "alibi", "t5", "shaw-keys"])
@pytest.mark.parametrize("backend", ["eager", "sdpa", "flash", "flex"])
def test_every_backend_decodes(backend, position):
    assert_decodes(make_model(position=position, sink=True, window=5, backend=backend), [4, 1, 1, 3, 2])


def test_post_norm_blocks_decode():
    assert_decodes(make_model(kind=PostNormBlock), [4, 1, 1, 3, 2])


@torch.no_grad()
def test_the_tokens_before_matter():
    model, cache = make_model(position="rotary"), Cache(2)
    model(ids()[:, :10], CAUSAL, cache)
    with_cache = model(ids()[:, 10:], CAUSAL, cache)
    assert error(with_cache, model(ids()[:, 10:], CAUSAL)) > 1e-2


@torch.no_grad()
def test_a_cache_counts_towards_the_longest_sequence():
    model, cache = make_model(position="rotary"), Cache(2)
    model(ids(16), CAUSAL, cache)
    with pytest.raises(ValueError, match=r"17 tokens is longer than model\.max_seq_len=16"):
        model(ids(1), CAUSAL, cache)


# Memory.


def bytes_per_token_and_layer(**options) -> float:
    cache = Cache(2)
    with torch.no_grad():
        make_model(**options)(ids(), CAUSAL, cache)
    assert cache.num_bytes % (2 * 2 * 11) == 0  # rows, layers, tokens
    return cache.num_bytes / (2 * 2 * 11)


@pytest.mark.parametrize(
    ("sharing", "numbers"),
    [
        ("mha", 2 * 4 * 8),
        ("gqa", 2 * 2 * 8),  # half of that
        ("mqa", 2 * 1 * 8),
        ("mla", 12 + 4),  # kv_rank + rope_head_dim
        ("mla-q_rank", 12 + 4),
        ("differential", 2 * 2 * 8),
    ],
)
def test_a_cache_takes_the_memory_that_its_sharing_promises(sharing, numbers):
    assert bytes_per_token_and_layer(sharing=sharing, position="rotary") == 4 * numbers


def test_an_empty_cache_is_empty():
    assert (Cache(3).length, Cache(3).num_bytes, len(Cache(3).layers)) == (0, 0, 3)


def test_a_layer_remembers_in_order_and_forgets_the_last():
    cache = LayerCache()
    first, second = torch.arange(6.0).view(1, 1, 3, 2), torch.arange(4.0).view(1, 1, 2, 2)
    assert torch.equal(cache.extend(first)[0], first)
    (both,) = cache.extend(second)
    assert torch.equal(both, torch.cat([first, second], dim=2))
    assert (cache.length, cache.num_bytes) == (5, 40)


# Weights.


@torch.no_grad()
@pytest.mark.parametrize("position", ["rotary", "t5", "shaw"])
@pytest.mark.parametrize("sharing", ["gqa", "mla", "differential"])
def test_captured_weights_of_a_chunk_are_the_last_rows(sharing, position):
    if position == "shaw" and sharing != "gqa":  # whose values are not of the size of its queries
        position = "shaw-keys"
    model, cache = make_model(sharing, position), Cache(2)
    with capture_attention(model) as full:
        model(ids(), CAUSAL)
    with capture_attention(model) as maps:
        model(ids()[:, :6], CAUSAL, cache)
        model(ids()[:, 6:], CAUSAL, cache)
    assert cache.length == 11
    for layer in range(2):
        assert error(maps[layer], full[layer][:, :, :6, :6]) <= 1e-5
        assert error(maps[2 + layer], full[layer][:, :, 6:]) <= 1e-5


@torch.no_grad()
def test_a_cache_of_a_sequence_and_padding_at_its_right():
    # The lengths count the keys, those in the cache included.
    attention, cache = prepared(partial(gqa, position=rotary)), LayerCache()
    mask = AttentionMask(True, torch.tensor([11, 8, 3]))
    full = attention(tokens(), mask)
    attention(tokens()[:, :6], CAUSAL, cache=cache)
    assert error(attention(tokens()[:, 6:], mask, cache=cache), full[:, 6:]) <= 1e-5
