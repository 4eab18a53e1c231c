"""Decoding with a cache equals the full forward pass, and the cache takes the memory that it should.

`test_laws` decodes every variant; here are absolute positions, other chunks and windows, padding, memory and copies.
"""

from functools import partial
from itertools import product

import pytest
import torch

from nn.variants import (
    alibi,
    differential,
    documents,
    error,
    gqa,
    mha,
    mla,
    mqa,
    network,
    prepared,
    rotary,
    shaw,
    shaw_keys,
    t5,
    tokens,
)
from tinyformer.analysis import capture_attention
from tinyformer.errors import ArgumentError
from tinyformer.nn import (
    AttentionMask,
    Cache,
    LatentAttention,
    LayerCache,
    LearnedPosition,
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
WINDOWS = {"all": None, "window": 3, "one": 1, "pattern": [4, None]}


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


@pytest.mark.parametrize("window", [None, 3])
@torch.no_grad()
def test_a_mask_of_any_pattern_has_all_keys_and_the_queries_of_the_call(window):
    model, cache, first, parts = make_model("gqa", "rotary", window=window), Cache(2), 0, []
    pattern = torch.rand(1, 4, 11, 11, generator=torch.Generator().manual_seed(0)) < 0.5
    for chunk in ids().split([5, 1, 1, 4], dim=1):
        end = first + chunk.shape[1]
        parts.append(model(chunk, AttentionMask(True, allowed=pattern[:, :, first:end, :end]), cache))
        first = end
    assert error(torch.cat(parts, dim=1), model(ids(), AttentionMask(True, allowed=pattern))) <= 1e-5


def combinations():
    """Sharings, positions and windows; each sharing in each window, at one position or another, is fast."""
    positions = ["none", "learned", "sinusoidal", "rotary", "alibi", "t5", "shaw-keys"]
    for index, case in enumerate(product(WINDOWS, SHARINGS, positions)):
        is_fast = index % len(positions) == (index // len(positions)) % len(positions)
        yield pytest.param(*case, marks=[] if is_fast else [pytest.mark.nightly])


@pytest.mark.parametrize(("window", "sharing", "position"), list(combinations()))
def test_every_sharing_decodes_at_every_position_in_every_window(sharing, position, window):
    # The first chunk is longer than a window, and so is one behind it.
    assert_decodes(make_model(sharing, position, window=WINDOWS[window]), [5, 1, 1, 4])


@pytest.mark.parametrize("position", ["rotary", "alibi", "t5"])
@pytest.mark.parametrize("backend", ["sdpa", "flash", "flex"])
def test_every_backend_decodes(backend, position):
    assert_decodes(make_model(position=position, sink=True, window=5, backend=backend), [4, 1, 1, 3, 2])


@pytest.mark.parametrize("sharing", ["mla", "mla-q_rank"])
def test_latents_decode_with_biases_and_with_one_head(sharing):
    for options in ({"bias": True}, {"bias": True, "sink": True}):
        model = make_model(sharing, "rotary", **options)
        torch.manual_seed(3)
        for layer in model.attentions():
            layer.k_proj.bias.data.normal_()
            layer.v_proj.bias.data.normal_()
        assert_decodes(model, [4, 1, 1, 3, 2])
    single = partial(LatentAttention, 32, 1, kv_rank=48, position=rotary)
    assert_decodes(network(single), [4, 1, 1, 3, 2])


@torch.no_grad()
def test_cached_tokens_matter_and_count_towards_the_longest_sequence():
    model, cache = make_model(position="rotary"), Cache(2)
    model(ids()[:, :10], CAUSAL, cache)
    assert error(model(ids()[:, 10:], CAUSAL, cache), model(ids()[:, 10:], CAUSAL)) > 1e-2
    model(ids(5), CAUSAL, cache)
    with pytest.raises(ArgumentError, match="at most max_seq_len=16 tokens after 16 in the cache"):
        model(ids(1), CAUSAL, cache)


@torch.no_grad()
@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("sharing", ["gqa", "mla"])
def test_padded_and_packed_sequences_decode(sharing, window):
    # Lengths and documents count all keys, cached ones included.
    attention = prepared(partial(SHARINGS[sharing], position=rotary, window=window))
    for lengths, packed in [(torch.tensor([11, 8, 3]), None), (None, documents())]:
        full = attention(tokens(), AttentionMask(True, lengths, packed))
        cache, parts = LayerCache(), []
        for chunk in tokens().split([6, 1, 4], dim=1):
            end = cache.length + chunk.shape[1]
            mask = AttentionMask(
                True, None if lengths is None else lengths.clamp(max=end), None if packed is None else packed[:, :end]
            )
            parts.append(attention(chunk, mask, cache=cache))
        assert error(torch.cat(parts, dim=1), full) <= 1e-5


@torch.no_grad()
def test_tokens_after_cached_ones_need_a_causal_mask():
    model, cache = make_model(), Cache(2)
    model(ids()[:, :6], AttentionMask(), cache)  # a prefix may attend to all of itself
    assert cache.length == 6
    with pytest.raises(ArgumentError, match=r"^mask\.causal=False: must be True"):
        model(ids()[:, 6:], AttentionMask(), cache)


@torch.no_grad()
@pytest.mark.parametrize("window", [None, 3], ids=["all", "window"])
@pytest.mark.parametrize("sharing", ["gqa", "mla", "differential"])
def test_captured_weights_of_a_chunk_are_the_last_rows(sharing, window):
    """Cached tokens that a window has left behind stand at their places with weight 0."""
    model, cache = make_model(sharing, "t5", window=window), Cache(2)
    with capture_attention(model) as full:
        model(ids(), CAUSAL)
    with capture_attention(model) as maps:
        model(ids()[:, :6], CAUSAL, cache)
        model(ids()[:, 6:], CAUSAL, cache)
    for layer in range(2):
        assert error(maps[layer], full[layer][:, :, :6, :6]) <= 1e-5
        assert error(maps[2 + layer], full[layer][:, :, 6:]) <= 1e-5


# Memory.


@pytest.mark.parametrize(
    ("sharing", "numbers"),
    [
        ("mha", 2 * 4 * 8),
        ("gqa", 2 * 2 * 8),
        ("mqa", 2 * 1 * 8),
        ("mla", 12 + 4),  # kv_rank + rope_head_dim
        ("mla-q_rank", 12 + 4),
        ("differential", 2 * 2 * 8),
    ],
)
@torch.no_grad()
def test_a_cache_takes_the_memory_of_its_kv_heads(sharing, numbers):
    cache = Cache(2)
    assert (cache.length, cache.num_bytes, len(cache.layers)) == (0, 0, 2)
    make_model(sharing, "rotary")(ids(), CAUSAL, cache)
    assert cache.num_bytes == 4 * numbers * 2 * 2 * 11  # bytes, numbers per token, rows, layers, tokens


def numbered(first, last):
    return torch.arange(float(first), last).view(1, 1, -1, 1)


@pytest.mark.parametrize(("window", "visible"), [(None, [5, 6, 9]), (1, [5, 1, 3]), (3, [5, 3, 5]), (6, [5, 6, 8])])
def test_a_chunk_gets_itself_and_the_window_of_its_first_token(window, visible):
    cache = LayerCache()
    for (first, last), number in zip([(0, 5), (5, 6), (6, 9)], visible, strict=True):
        keys, values = cache.extend(numbered(first, last), -numbered(first, last), window=window)
        assert torch.equal(keys, numbered(last - number, last))
        assert torch.equal(values, -keys)
        held = last if window is None else min(window, last)
        assert torch.equal(cache.tensors[0], numbered(last - held, last))
    assert (cache.length, cache.num_bytes) == (9, 2 * 4 * held)
    if window is not None:  # the rest is freed, not only hidden
        assert sum(tensor.untyped_storage().nbytes() for tensor in cache.tensors) == cache.num_bytes


def test_full_memory_is_doubled():
    cache, addresses = LayerCache(room=3), []
    for index in range(20):
        cache.extend(numbered(index, index + 1))
        assert torch.equal(cache.tensors[0], numbered(0, index + 1))
        addresses.append(cache.tensors[0].data_ptr())
    assert [index for index in range(1, 20) if addresses[index] != addresses[index - 1]] == [3, 6, 12]


@pytest.mark.parametrize(("window", "held"), [(None, [0, 1, 2, 3, 4]), (4, [1, 2, 3, 4])])
def test_a_copy_and_its_original_are_independent(window, held):
    cache = LayerCache(room=10)
    cache.extend(numbered(0, 5), window=window)
    other = cache.copy()
    assert (other.length, other.num_held, other.num_bytes) == (5, len(held), 4 * len(held))
    other.extend(numbered(7, 9), window=window)
    assert cache.tensors[0].flatten().tolist() == held
    cache.extend(numbered(5, 6), window=window)
    assert cache.tensors[0].flatten().tolist()[-3:] == [3, 4, 5]
    assert other.tensors[0].flatten().tolist()[-3:] == [4, 7, 8]


def test_gradients_are_refused():
    with pytest.raises(ArgumentError, match=r"torch\.no_grad\(\)"):
        make_model()(ids(), CAUSAL, Cache(2))
    with pytest.raises(ArgumentError, match=r"torch\.no_grad\(\)"):
        LayerCache().extend(torch.zeros(1, 1, 1, 1, requires_grad=True), torch.zeros(1, 1, 1, 1))
