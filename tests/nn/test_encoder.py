from functools import partial

import pytest
import torch
from torch import nn

from nn.model_cases import make_encoder, make_transformer, token_ids
from tinyformer.analysis import capture_attention
from tinyformer.nn import AttentionMask, PostNormBlock, PreNormBlock, Residual, Shared, T5Position

CAUSAL = AttentionMask(causal=True)


class TwoArguments(PreNormBlock):
    """A user's block, which knows of no other sequence."""

    def forward(self, x, mask, cache=None):
        return super().forward(x, mask, cache)


def test_blocks_without_cross_attention_need_not_know_of_it():
    assert torch.equal(make_encoder(kind=TwoArguments).eval()(token_ids()).isfinite().all(), torch.tensor(True))


def test_the_forward_pass_by_hand():
    encoder = make_encoder(num_layers=2)
    ids = token_ids()
    x = encoder.token_embedding.weight[ids] + encoder.position.embedding.weight[:8]
    for layer in encoder.layers:
        x = layer(x, CAUSAL)
    torch.testing.assert_close(encoder(ids, CAUSAL), encoder.final_norm(x))


def test_only_pre_norm_needs_a_final_norm():
    assert isinstance(make_encoder(kind=PreNormBlock).final_norm, nn.LayerNorm)
    assert isinstance(make_encoder(kind=PostNormBlock).final_norm, nn.Identity)


def test_layers_share_a_position_where_they_are_told_to_and_nothing_else():
    t5 = partial(T5Position, 4)
    own, shared = (make_encoder(num_layers=3, attention_position=p, position=False) for p in (t5, Shared(t5)))
    for encoder, tables in ((own, 3), (shared, 1)):
        assert len({id(layer.attention.position) for layer in encoder.layers}) == tables
        assert sum(parameter.shape == (32, 4) for parameter in encoder.parameters()) == tables
    others = [{id(part) for part in layer.modules()} - {id(layer.attention.position)} for layer in shared.layers]
    embedding = {id(part) for part in shared.layers[0].attention.position.modules()}
    assert (others[0] & others[1]) | (others[1] & others[2]) | (others[0] & others[2]) <= embedding
    # Its gradient is that of all layers together.
    with torch.no_grad():
        own.load_state_dict(shared.state_dict())
    for encoder in (own, shared):
        encoder(token_ids(), CAUSAL).square().sum().backward()
    gradients = [layer.attention.position.embedding.weight.grad for layer in own.layers]
    expected = torch.stack(gradients).sum(0)
    torch.testing.assert_close(shared.layers[0].attention.position.embedding.weight.grad, expected)


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
    encoder, ids = make_encoder(embedding_norm=True, embedding_dropout=0.5), token_ids()
    entering: list[torch.Tensor] = []
    encoder.layers[0].register_forward_pre_hook(lambda layer, args: entering.append(args[0]))
    embedded = encoder.token_embedding.weight[ids] + encoder.position.embedding.weight[:8]
    normalised = torch.nn.functional.layer_norm(embedded, [32])
    encoder.eval()(ids)
    torch.testing.assert_close(entering[0], normalised)
    encoder.train()(ids)
    torch.testing.assert_close(entering[1], torch.where(entering[1] == 0, 0.0, 2 * normalised))
    assert 0 < (entering[1] == 0).float().mean() < 1
    assert isinstance(make_encoder().embedding_norm, nn.Identity)


# Activations that are computed again.


def gradients(encoder, ids, seed=0):
    encoder.zero_grad()
    torch.manual_seed(seed)
    encoder(ids, CAUSAL).square().sum().backward()
    return [parameter.grad for parameter in encoder.parameters()]


@pytest.mark.parametrize(
    ("kind", "backend", "dropout"), [(PreNormBlock, "eager", 0.3), (PostNormBlock, "sdpa", 0.0)], ids=["pre", "post"]
)
def test_gradients_do_not_depend_on_whether_activations_are_kept(kind, backend, dropout):
    parts = {"kind": kind, "backend": backend, "dropout": dropout, "embedding_dropout": dropout}
    encoder, ids = make_encoder(num_layers=3, **parts).train(), token_ids()
    kept = [gradient.clone() for gradient in gradients(encoder, ids)]
    state = torch.get_rng_state()
    encoder.checkpoint_activations = True
    again = gradients(encoder, ids)
    assert all(torch.equal(one, other) for one, other in zip(kept, again, strict=True))
    assert torch.equal(torch.get_rng_state(), state)  # what follows draws what it would have drawn
    if dropout:
        assert not torch.equal(kept[0], gradients(encoder, ids, seed=1)[0])


@pytest.mark.parametrize(
    ("train", "grad", "calls"), [(True, True, 2), (False, True, 1), (True, False, 1)], ids=["training", "eval", "free"]
)
def test_layers_are_computed_again_in_training_only(train, grad, calls):
    encoder = make_encoder(checkpoint_activations=True).train(train)
    seen = []
    encoder.layers[0].attention_norm.register_forward_hook(lambda *args: seen.append(args))
    with torch.set_grad_enabled(grad):
        out = encoder(token_ids(), CAUSAL)
    if grad:
        out.sum().backward()
    assert len(seen) == calls


@pytest.mark.parametrize("kind", [PreNormBlock, PostNormBlock], ids=["pre", "post"])
@pytest.mark.parametrize(("low", "autocast"), [(True, True), (True, False), (False, True)])
def test_the_residual_stream_has_autocasts_dtype_by_choice(kind, low, autocast):
    encoder = make_encoder(kind=kind, autocast_residual=low)
    plain = make_encoder(kind=kind)
    plain.load_state_dict(encoder.state_dict())
    streams = []
    for layer in encoder.layers:
        layer.register_forward_pre_hook(lambda module, inputs: streams.append(inputs[0].dtype))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out, expected = encoder(token_ids(), CAUSAL), plain(token_ids(), CAUSAL)
    assert streams == [torch.bfloat16 if low and autocast else torch.float32] * 2
    if not (low and autocast):
        assert torch.equal(out, expected)
    torch.testing.assert_close(out.float(), expected.float(), rtol=0, atol=0.1)  # of numbers near 1, after two layers
    out.sum().backward()


def test_maps_are_captured_once_where_activations_are_computed_again():
    model, ids = make_transformer(checkpoint_activations=True).train(), token_ids()
    with capture_attention(model) as maps:
        model(ids, CAUSAL).sum().backward()
    assert len(maps) == 2
    assert model.encoder.checkpoint_activations
    with capture_attention(model.eval()) as expected:
        model(ids, CAUSAL)
    assert all(torch.equal(one, other) for one, other in zip(maps, expected, strict=True))
