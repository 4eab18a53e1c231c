"""Decoding with a cache equals the full forward pass, and the cache takes the memory that it should.

`test_laws` decodes every variant; here are absolute positions, other chunks and windows, padding, memory and copies.
"""

from functools import partial

import pytest
import torch

from nn.variants import CAUSAL, differential, documents, error, gqa, mha, mla, mqa, network, rotary, t5
from tinyformer.measures import capture_attention
from tinyformer.nn import (
    AttentionMask,
    Cache,
    LatentAttention,
    LayerCache,
    LearnedPosition,
    SinusoidalPosition,
    Transformer,
    by_layer,
)

SHARINGS = {"mha": mha, "gqa": gqa, "mqa": mqa, "mla": mla, "mla-q_rank": partial(mla, q_rank=10)}
SHARINGS["differential"] = differential
SHARINGS |= {
    ",".join(pair): partial(by_layer, pair, dict(SHARINGS)) for pair in (["mqa", "mla"], ["mla", "differential"])
}
ABSOLUTE = {"learned": partial(LearnedPosition, 16, 32), "sinusoidal": partial(SinusoidalPosition, 16, 32)}
RELATIVE = {"rotary": rotary, "t5": t5, "rotary,t5": partial(by_layer, ["rotary", "t5"], {"rotary": rotary, "t5": t5})}


def make_model(sharing: str = "gqa", position: str = "none", **options) -> Transformer:
    attention = partial(SHARINGS[sharing], position=RELATIVE.get(position), **options)
    return network(attention, ABSOLUTE.get(position))


def ids(seq: int = 11) -> torch.Tensor:
    return torch.randint(50, (2, seq), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def assert_decodes(model: Transformer, chunks: list[int], masks=None) -> None:
    masks = masks or (lambda first, end: CAUSAL)
    full, cache, parts = model(ids(), masks(0, 11)), Cache(2), []
    for chunk in ids().split(chunks, dim=1):
        first, end = cache.length, cache.length + chunk.shape[1]
        parts.append(model(chunk, masks(first, end), cache))
        assert cache.length == end
    assert error(torch.cat(parts, dim=1), full) <= 1e-5


@pytest.mark.parametrize("window", [1, 3, [4, None]], ids=["one", "window", "pattern"])
@pytest.mark.parametrize("position", ["learned", "sinusoidal", "rotary", "rotary,t5"])
@pytest.mark.parametrize("sharing", SHARINGS)
def test_every_sharing_decodes_at_every_position_in_every_window(sharing, position, window):
    assert_decodes(make_model(sharing, position, window=window), [5, 1, 1, 4])


@pytest.mark.parametrize("bias", [True, "k", "v"])
@pytest.mark.parametrize("sharing", ["mla", "mla-q_rank"])
def test_latents_decode_with_biases_and_with_one_head(sharing, bias):
    model = make_model(sharing, "rotary", bias=bias, sink=True)
    for layer in model.attentions():
        for letter in "kv" if bias is True else bias:
            getattr(layer, f"{letter}_proj").bias.data.normal_()
    assert_decodes(model, [4, 1, 1, 3, 2])
    assert_decodes(network(partial(LatentAttention, 32, 1, kv_rank=48, position=rotary)), [4, 1, 1, 3, 2])
    assert LatentAttention(32, 4).kv_rank == 4 * 8


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("sharing", ["gqa", "mla"])
def test_sequences_of_any_mask_decode(sharing, window):
    # Lengths, documents and the keys of a pattern count all keys, cached ones included.
    model, lengths = make_model(sharing, "rotary", window=window), torch.tensor([8, 3])
    assert_decodes(model, [6, 1, 4], lambda first, end: AttentionMask(True, lengths.clamp(max=end)))
    assert_decodes(model, [6, 1, 4], lambda first, end: AttentionMask(True, documents=documents(2)[:, :end]))
    pattern = torch.rand(1, 4, 11, 11, generator=torch.Generator().manual_seed(0)) < 0.5
    assert_decodes(model, [6, 1, 4], lambda first, end: AttentionMask(True, allowed=pattern[:, :, first:end, :end]))


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
