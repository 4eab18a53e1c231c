"""Stacks of blocks, and whole networks: what is where, what it sees, and its initial weights."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from nn.model_cases import BLOCKS, make_encoder, make_encoder_decoder, make_transformer, token_ids
from nn.variants import CAUSAL, NAMES, error, factory
from tinyformer.measures import capture_attention
from tinyformer.nn import (
    Attention,
    AttentionMask,
    Cache,
    Context,
    EncoderDecoder,
    PostNormBlock,
    PreNormBlock,
    Residual,
    TokenReadout,
    Transformer,
)

SOURCE, TARGET, LENGTHS = token_ids(seq=9), token_ids(seq=7, seed=1), torch.tensor([9, 5])
PADDED = AttentionMask(lengths=LENGTHS)


def made(network: Transformer | EncoderDecoder, shared: bool = True, **options: Any) -> Transformer | EncoderDecoder:
    """A network of the same stacks with weights drawn anew."""
    readout = partial(TokenReadout, tied=shared)
    if isinstance(network, Transformer):
        return Transformer(network.encoder, readout, **options)
    return EncoderDecoder(network.encoder, network.decoder, TokenReadout, shared_embedding=shared, **options)


# One stack.


def test_layers_know_their_place():
    encoder = make_encoder(
        num_layers=3,
        ablated_heads=[[0, 1], [2, 3]],
        attention_residual=partial(Residual, skip=[1, 2, 3]),
        feed_forward_residual=partial(Residual, branch=[4, 5, 6]),
    )
    gates = [layer.attention.head_gate.factors for layer in encoder.layers]
    assert [None if gate is None else gate.tolist() for gate in gates] == [[1, 0, 1, 1], None, [1, 1, 1, 0]]
    assert [layer.attention_residual.skip for layer in encoder.layers] == [1, 2, 3]
    assert [layer.feed_forward_residual.branch for layer in encoder.layers] == [4, 5, 6]


def test_embeddings_are_normalised_with_their_positions_and_before_dropout():
    encoder, entering = make_encoder(embedding_norm=True, embedding_dropout=0.5), []
    encoder.layers[0].register_forward_pre_hook(lambda layer, args: entering.append(args[0]))
    encoder.eval()(token_ids())
    encoder.train()(token_ids())
    embedded = encoder.token_embedding.weight[token_ids()] + encoder.position.embedding.weight[:8]
    torch.testing.assert_close(entering[0], nn.functional.layer_norm(embedded, [32]))
    torch.testing.assert_close(entering[1], torch.where(entering[1] == 0, 0.0, 2 * entering[0]))
    assert 0 < (entering[1] == 0).float().mean() < 1


@pytest.mark.parametrize(("kind", "dropout"), [(PreNormBlock, 0.3), (PostNormBlock, 0.0)], ids=["pre", "post"])
def test_gradients_do_not_depend_on_whether_activations_are_kept(kind, dropout):
    encoder = make_encoder(num_layers=3, kind=kind, dropout=dropout, embedding_dropout=dropout).train()
    gradients, states = [], []
    for again in (False, True):
        encoder.checkpoint_activations = again
        torch.manual_seed(0)
        loss = encoder(token_ids(), CAUSAL).square().sum()
        gradients.append(torch.autograd.grad(loss, [*encoder.parameters()]))
        states.append(torch.get_rng_state())  # what follows draws what it would have drawn
    assert all(map(torch.equal, *gradients))
    assert torch.equal(*states)


@pytest.mark.parametrize("kind", BLOCKS.values(), ids=BLOCKS)
@pytest.mark.parametrize(("low", "autocast"), [(True, True), (True, False), (False, True)])
def test_the_residual_stream_has_autocasts_dtype_by_choice(kind, low, autocast):
    encoder, plain, streams = make_encoder(kind=kind, autocast_residual=low), make_encoder(kind=kind), []
    plain.load_state_dict(encoder.state_dict())
    for layer in encoder.layers:
        layer.register_forward_pre_hook(lambda module, inputs: streams.append(inputs[0].dtype))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out, expected = encoder(token_ids(), CAUSAL), plain(token_ids(), CAUSAL)
    assert streams == [torch.bfloat16 if low and autocast else torch.float32] * 2
    assert torch.equal(out, expected) != (low and autocast)
    torch.testing.assert_close(out.float(), expected.float(), rtol=0, atol=0.1)  # of numbers near 1, after two layers


# Sizes, initial weights, the state, and backends of a network.


@pytest.mark.parametrize("init_std", [0.02, 0.1])
def test_initial_weights_follow_gpt2(init_std):
    torch.manual_seed(0)
    model = make_transformer(vocab_size=500, num_layers=8, d_model=128, max_seq_len=256, bias=True, tied=False)
    if init_std != 0.02:  # the default
        model = Transformer(model.encoder, lambda embedding: model.readout, init_std)
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            assert (parameter == ("norm.weight" in name)).all(), name
        else:
            # √(2 · 8) = 4. The smallest matrix has 16,384 numbers: the standard error of their std is 0.6 %.
            expected = init_std / 4 if "o_proj" in name or "down_proj" in name else init_std
            assert parameter.std().item() == pytest.approx(expected, rel=0.03), name
            assert abs(parameter.mean().item()) < 4 * expected / parameter.numel() ** 0.5, name


LARGE = {"vocab_size": 500, "d_model": 128, "max_seq_len": 64}


@pytest.mark.parametrize("network", [lambda: make_transformer(**LARGE), make_encoder_decoder], ids=["one", "two"])
@pytest.mark.parametrize("shared", [True, False])
def test_xavier_draws_projections_by_their_fans_and_embeddings_by_their_width(network, shared):
    torch.manual_seed(0)
    model = made(network(), shared, init="xavier")
    embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        tolerance = 0.03 if weight is None else max(0.03, 2.8 / (2 * weight.numel()) ** 0.5)  # 2.8 standard errors
        if weight in embeddings:
            assert weight.std().item() == pytest.approx(weight.shape[1] ** -0.5, rel=tolerance), name
        elif isinstance(module, nn.Linear):
            bound = (6 / sum(module.weight.shape)) ** 0.5
            assert 0.99 * bound < module.weight.abs().max() <= bound, name
            assert module.weight.std().item() == pytest.approx(bound / 3**0.5, rel=tolerance), name
            assert module.bias is None or not module.bias.any(), name


# Encoder–decoders.


SELF = {"window", "exclusive", "convolution", "shifted_keys", "forget"}
CROSS = [name for name in NAMES if not SELF & {*name.split("+")}]


@pytest.mark.parametrize("name", CROSS)
@torch.no_grad()
def test_decoding_behind_a_cache_projects_the_source_once(name):
    network = make_encoder_decoder(cross=factory(name), kind=PreNormBlock)
    expected = network(SOURCE, TARGET, PADDED)
    context, cache, parts = network.encode(SOURCE, PADDED), Cache(2), []
    projected: list[int] = []
    for layer in network.attentions_by_kind()["cross"]:
        projection = getattr(layer, "kv_down_proj", layer.k_proj)
        projection.register_forward_hook(lambda module, inputs, out: projected.append(inputs[0].shape[1]))
    for chunk in TARGET.split([3, 1, 1, 2], dim=1):
        parts.append(network.decode(chunk, context, cache=cache))
        assert cache.length == sum(part.shape[1] for part in parts)
    assert error(torch.cat(parts, dim=1), expected) <= 1e-5
    assert projected == [9] * 2
    assert network.encode(SOURCE, CAUSAL).mask == AttentionMask()  # of a causal encoder, too
    held = sum(layer.num_bytes for layer in cache.context_layers)
    assert cache.num_bytes == held + sum(layer.num_bytes for layer in cache.layers) > held > 0


@torch.no_grad()
def test_a_window_of_the_source_is_around_the_same_position():
    """Of 9 source tokens or 5, seen by 7 target tokens: t - 1, t and t + 1, or the same around the last."""
    cross = partial(Attention, 32, 4, bias=True, window=3)
    network, whole = make_encoder_decoder(cross=cross), make_encoder_decoder()
    with capture_attention(network) as maps:
        logits = network(SOURCE, TARGET, PADDED)
    seen = [maps[layer][:, 0] > 0 for layer, (kind, _) in enumerate(network.layer_addresses()) if kind == "cross"]
    near = [[[abs(min(t, last) - s) <= 1 and s <= last for s in range(9)] for t in range(7)] for last in (8, 4)]
    assert len(seen) == 2
    assert all(torch.equal(layer, torch.tensor(near)) for layer in seen)
    context, cache = network.encode(SOURCE, PADDED), Cache(2)
    parts = [network.decode(chunk, context, cache=cache) for chunk in TARGET.split([3, 1, 1, 2], dim=1)]
    assert error(torch.cat(parts, dim=1), logits) <= 1e-5
    masked = Context(context.vectors, AttentionMask(lengths=LENGTHS, allowed=torch.tensor(near).unsqueeze(1)))
    assert error(whole.decode(TARGET, masked), logits) <= 1e-5
    assert error(whole(SOURCE, TARGET, PADDED), logits) > 1e-3
    assert error(network(SOURCE, TARGET)[:1], logits[:1]) <= 1e-5


def test_embeddings_are_shared_or_not():
    shared, own = make_encoder_decoder(), make_encoder_decoder(shared=False)
    assert shared.encoder.token_embedding is shared.decoder.token_embedding
    assert shared.readout.proj.weight is shared.encoder.token_embedding.weight
    assert own.num_parameters() - shared.num_parameters() == 50 * 32
    assert own.readout.proj.weight is own.decoder.token_embedding.weight


@torch.no_grad()
def test_a_head_of_a_kind_is_ablated_by_its_address():
    addresses = [["encoder", 0, 1], ["cross", 1, 2], ["decoder", 1, 3]]
    cross = partial(Attention, 32, 4, bias=True, ablated_heads=addresses)
    ablated, zeroed = make_encoder_decoder(cross=cross, ablated_heads=addresses), make_encoder_decoder()
    assert error(ablated(SOURCE, TARGET), zeroed(SOURCE, TARGET)) > 1e-3
    for kind, layer, head in addresses:
        zeroed.attentions_by_kind()[kind][layer].o_proj.weight.unflatten(1, (4, -1))[:, head] = 0
    torch.testing.assert_close(ablated(SOURCE, TARGET), zeroed(SOURCE, TARGET))
