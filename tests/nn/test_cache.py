"""Decoding against a cache is the full forward pass, and the cache takes the memory that it should."""

from functools import partial
from itertools import product

import pytest
import torch
from attention_cases import AttentionKernels, error
from variants import (
    alibi,
    differential,
    documents,
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
from tinyformer.nn import (
    AttentionMask,
    Cache,
    LatentAttention,
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
WINDOWS = {"all": None, "window": 3, "one": 1, "pattern": [4, None]}


@CHUNKS
@pytest.mark.parametrize("sharing", SHARINGS)
def test_every_sharing_decodes(sharing, chunks):
    assert_decodes(make_model(sharing), chunks)


@CHUNKS
@pytest.mark.parametrize("position", [*ABSOLUTE, *RELATIVE])
def test_every_position_decodes(position, chunks):
    assert_decodes(make_model(position=position), chunks)


def sharings_positions_windows():
    """All of them; every seventh, which is each sharing in each window, at one position or another, is fast."""
    positions = ["none", "learned", "sinusoidal", "rotary", "alibi", "t5", "shaw-keys"]
    for index, case in enumerate(product(WINDOWS, SHARINGS, positions)):
        marks = [] if index % len(positions) == (index // len(positions)) % len(positions) else [pytest.mark.slow]
        yield pytest.param(*case, marks=marks)


@pytest.mark.parametrize(("window", "sharing", "position"), list(sharings_positions_windows()))
def test_every_sharing_decodes_at_every_position_in_every_window(sharing, position, window):
    # The first chunk is longer than a window, and so is one behind it.
    assert_decodes(make_model(sharing, position, window=WINDOWS[window]), [5, 1, 1, 4])


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_option_decodes(options):
    assert_decodes(make_model(position="rotary", **options), [4, 1, 1, 3, 2])


@pytest.mark.parametrize("position", ["rotary", "alibi", "t5", "shaw-keys"])
@pytest.mark.parametrize("backend", ["eager", "sdpa", "flash", "flex"])
def test_every_backend_decodes(backend, position):
    assert_decodes(make_model(position=position, sink=True, window=5, backend=backend), [4, 1, 1, 3, 2])


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("sharing", ["mla", "differential"])
def test_every_option_decodes_in_the_other_sharings(sharing, options):
    assert_decodes(make_model(sharing, position="rotary", **options), [4, 1, 1, 3, 2])


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
    with pytest.raises(ValueError, match="at most max_seq_len=16 tokens after 16 in the cache"):
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


@torch.no_grad()
@pytest.mark.parametrize("chunks", [[11], [6, 1, 4]], ids=str)
@pytest.mark.parametrize(("sharing", "window"), [("gqa", 1), ("mla", 3), ("differential", 3), ("mqa", 20)])
def test_a_window_bounds_what_is_held(sharing, window, chunks):
    whole, bounded = Cache(2), Cache(2)
    make_model(sharing)(ids(), CAUSAL, whole)
    model = make_model(sharing, window=window)
    for chunk in ids().split(chunks, dim=1):
        model(chunk, CAUSAL, bounded)
    assert (bounded.length, bounded.layers[1].num_held) == (11, min(window, 11))
    assert bounded.num_bytes * 11 == whole.num_bytes * min(window, 11)
    # The rest is free, and not only out of sight.
    memory = sum(tensor.untyped_storage().nbytes() for layer in bounded.layers for tensor in layer.tensors)
    assert memory == bounded.num_bytes


def numbered(first, last):
    return torch.arange(float(first), last).view(1, 1, -1, 1)


@pytest.mark.parametrize(("window", "seen"), [(None, [5, 6, 9]), (1, [5, 1, 3]), (3, [5, 3, 5]), (6, [5, 6, 8])])
def test_a_chunk_sees_itself_and_what_its_first_token_may(window, seen):
    cache = LayerCache()
    for (first, last), number in zip([(0, 5), (5, 6), (6, 9)], seen, strict=True):
        keys, values = cache.extend(numbered(first, last), -numbered(first, last), window=window)
        assert torch.equal(keys, numbered(last - number, last))
        assert torch.equal(values, -keys)
        held = last if window is None else min(window, last)
        assert torch.equal(cache.tensors[0], numbered(last - held, last))
    assert cache.length == 9


def test_memory_doubles_when_it_is_full():
    cache, places = LayerCache(room=3), []
    for index in range(20):
        cache.extend(numbered(index, index + 1))
        assert torch.equal(cache.tensors[0], numbered(0, index + 1))
        places.append(cache.tensors[0].data_ptr())
    assert [index for index in range(1, 20) if places[index] != places[index - 1]] == [3, 6, 12]


@pytest.mark.parametrize("window", [None, 4])
def test_a_copy_goes_its_own_way(window):
    cache = LayerCache(room=10)
    cache.extend(numbered(0, 3), window=window)
    other = cache.copy()
    assert (other.length, other.num_held, other.num_bytes) == (3, 3, 12)
    other.extend(numbered(7, 9), window=window)
    cache.extend(numbered(3, 4), window=window)
    assert cache.tensors[0].flatten().tolist() == [0, 1, 2, 3]
    assert other.tensors[0].flatten().tolist()[-3:] == [2, 7, 8]


def test_a_cache_keeps_no_gradient():
    with pytest.raises(ValueError, match=r"under torch\.no_grad\(\)"):
        make_model()(ids(), CAUSAL, Cache(2))


def test_a_layer_remembers_in_order():
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
@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("sharing", ["gqa", "mla"])
@pytest.mark.parametrize("chunks", [[6, 5], [9, 1, 1]], ids=str)
def test_a_cache_of_padded_or_packed_sequences(sharing, chunks, window):
    # Lengths and documents count the keys, those that came before included.
    attention = prepared(partial(SHARINGS[sharing], position=rotary, window=window))
    for lengths, packed in [(torch.tensor([11, 8, 3]), None), (None, documents())]:
        full = attention(tokens(), AttentionMask(True, lengths, packed))
        cache, parts = LayerCache(), []
        for chunk in tokens().split(chunks, dim=1):
            end = cache.length + chunk.shape[1]
            mask = AttentionMask(
                True,
                None if lengths is None else lengths.clamp(max=end),
                None if packed is None else packed[:, :end],
            )
            parts.append(attention(chunk, mask, cache=cache))
        assert error(torch.cat(parts, dim=1), full) <= 1e-5


@torch.no_grad()
def test_what_sees_ahead_has_no_cache():
    model, cache = make_model(), Cache(2)
    both = AttentionMask()
    # A prefix that sees all of itself, and what goes on from it, see the same in one pass or in two.
    model(ids()[:, :6], both, cache)
    assert cache.length == 6
    with pytest.raises(ValueError, match=r"^mask\.causal=False: must be True"):
        model(ids()[:, 6:], both, cache)


@torch.no_grad()
@pytest.mark.parametrize("window", [None, 3])
def test_a_step_needs_no_mask(window):
    model, cache = make_model(window=window, backend="sdpa"), Cache(2)
    model(ids()[:, :10], CAUSAL, cache)
    with AttentionKernels() as kernels:
        model(ids()[:, 10:], CAUSAL, cache)
    assert [len(kernels.calls), kernels.num_masked] == [2, 0]


def test_a_gradient_in_one_of_the_tensors_is_refused():
    with pytest.raises(ValueError, match=r"torch\.no_grad\(\)"):
        LayerCache().extend(torch.zeros(1, 1, 1, 1, requires_grad=True), torch.zeros(1, 1, 1, 1))
