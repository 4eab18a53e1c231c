"""Blocks, stacks of them, and whole networks: what is where, what it sees, and its initial weights."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

from nn.model_cases import block_factory, make_encoder, make_encoder_decoder, make_transformer, token_ids
from nn.variants import CAUSAL, NAMES, error, factory, tokens
from tinyformer.analysis import capture_attention
from tinyformer.nn import (
    Attention,
    AttentionMask,
    Cache,
    EncoderDecoder,
    PostNormBlock,
    PreNormBlock,
    RelativePosition,
    Residual,
    Shared,
    ShawPosition,
    T5Position,
    TokenReadout,
)

BLOCKS = pytest.mark.parametrize("kind", [PreNormBlock, PostNormBlock], ids=["pre", "post"])
SOURCE, TARGET, LENGTHS = token_ids(seq=9), token_ids(seq=7, seed=1), torch.tensor([9, 5])
PADDED = AttentionMask(lengths=LENGTHS)


# Blocks.


def randomised(module: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module


@BLOCKS
@pytest.mark.parametrize("sublayer", ["attention", "feed_forward"])
def test_each_connection_is_scaled_on_its_own(kind, sublayer):
    whole = randomised(block_factory(kind)())
    scaled = block_factory(kind, **{f"{sublayer}_residual": partial(Residual, branch=0.5)})()
    scaled.load_state_dict(whole.state_dict())
    halved = copy.deepcopy(whole)
    last = halved.attention.o_proj if sublayer == "attention" else halved.feed_forward.down_proj
    with torch.no_grad():
        last.weight *= 0.5
    torch.testing.assert_close(scaled(tokens(), CAUSAL), halved(tokens(), CAUSAL))
    assert error(scaled(tokens(), CAUSAL), whole(tokens(), CAUSAL)) > 1e-3


@BLOCKS
def test_dropout_acts_on_both_sublayers_in_training_only(kind):
    block, x = randomised(block_factory(kind, dropout=1.0)()), tokens()
    expected = x if kind is PreNormBlock else block.feed_forward_norm(block.attention_norm(x))
    assert torch.equal(block.train()(x, CAUSAL), expected)
    without = block_factory(kind)()
    without.load_state_dict(block.state_dict())
    assert torch.equal(block.eval()(x, CAUSAL), without(x, CAUSAL))


class TwoArguments(PreNormBlock):
    """A user's block, which knows of no other sequence."""

    def forward(self, x, mask, cache=None):
        return super().forward(x, mask, cache)


def test_blocks_without_cross_attention_need_not_know_of_it():
    assert make_encoder(kind=TwoArguments).eval()(token_ids()).isfinite().all()


# One stack.


def test_layers_share_a_position_where_they_are_told_to_and_nothing_else():
    t5 = partial(T5Position, 4)
    own, shared = (make_encoder(num_layers=3, attention_position=p, position=False) for p in (t5, Shared(t5)))
    sizes = [sum(parameter.numel() for parameter in encoder.parameters()) for encoder in (own, shared)]
    assert sizes[0] - sizes[1] == 2 * 32 * 4  # two tables
    # Its gradient is that of all layers together.
    with torch.no_grad():
        own.load_state_dict(shared.state_dict())
    for encoder in (own, shared):
        encoder(token_ids(), CAUSAL).square().sum().backward()
    tables = [[layer.attention.position.embedding.weight for layer in encoder.layers] for encoder in (own, shared)]
    torch.testing.assert_close(tables[1][0].grad, sum(table.grad for table in tables[0]))


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
    normalised = nn.functional.layer_norm(embedded, [32])
    encoder.eval()(ids)
    encoder.train()(ids)
    torch.testing.assert_close(entering[0], normalised)
    torch.testing.assert_close(entering[1], torch.where(entering[1] == 0, 0.0, 2 * normalised))
    assert 0 < (entering[1] == 0).float().mean() < 1


@pytest.mark.parametrize(
    ("kind", "backend", "dropout"), [(PreNormBlock, "eager", 0.3), (PostNormBlock, "sdpa", 0.0)], ids=["pre", "post"]
)
def test_gradients_do_not_depend_on_whether_activations_are_kept(kind, backend, dropout):
    parts = {"kind": kind, "backend": backend, "dropout": dropout, "embedding_dropout": dropout}
    encoder, gradients, states = make_encoder(num_layers=3, **parts).train(), [], []
    for again in (False, True):
        encoder.checkpoint_activations = again
        encoder.zero_grad()
        torch.manual_seed(0)
        encoder(token_ids(), CAUSAL).square().sum().backward()
        gradients.append([parameter.grad.clone() for parameter in encoder.parameters()])
        states.append(torch.get_rng_state())  # what follows draws what it would have drawn
    assert all(torch.equal(kept, computed) for kept, computed in zip(*gradients, strict=True))
    assert torch.equal(*states)


@pytest.mark.parametrize(("train", "grad", "calls"), [(True, True, 2), (False, True, 1), (True, False, 1)])
def test_layers_are_computed_again_in_training_only(train, grad, calls):
    encoder, seen = make_encoder(checkpoint_activations=True).train(train), []
    encoder.layers[0].attention_norm.register_forward_hook(lambda *args: seen.append(args))
    with torch.set_grad_enabled(grad):
        out = encoder(token_ids(), CAUSAL)
    if grad:
        out.sum().backward()
    assert len(seen) == calls


def test_maps_are_captured_once_where_activations_are_computed_again():
    model, ids = make_transformer(checkpoint_activations=True).train(), token_ids()
    with capture_attention(model) as maps:
        model(ids, CAUSAL).sum().backward()
    with capture_attention(model.eval()) as expected:
        model(ids, CAUSAL)
    assert all(torch.equal(*pair) for pair in zip(maps, expected, strict=True))


@BLOCKS
@pytest.mark.parametrize(("low", "autocast"), [(True, True), (True, False), (False, True)])
def test_the_residual_stream_has_autocasts_dtype_by_choice(kind, low, autocast):
    encoder, plain = make_encoder(kind=kind, autocast_residual=low), make_encoder(kind=kind)
    plain.load_state_dict(encoder.state_dict())
    streams = []
    for layer in encoder.layers:
        layer.register_forward_pre_hook(lambda module, inputs: streams.append(inputs[0].dtype))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out, expected = encoder(token_ids(), CAUSAL), plain(token_ids(), CAUSAL)
    assert streams == [torch.bfloat16 if low and autocast else torch.float32] * 2
    assert torch.equal(out, expected) != (low and autocast)
    torch.testing.assert_close(out.float(), expected.float(), rtol=0, atol=0.1)  # of numbers near 1, after two layers
    out.sum().backward()


# Sizes, initial weights, the state, and backends of a network.


@pytest.mark.parametrize(("tied", "expected"), [(True, 124_439_808), (False, 124_439_808 + 50_257 * 768)])
def test_gpt2_has_its_published_number_of_parameters(tied, expected):
    with torch.device("meta"):
        model = make_transformer(
            tied=tied, vocab_size=50_257, num_layers=12, d_model=768, num_heads=12, max_seq_len=1024, bias=True
        )
    assert model.num_parameters() == expected


@pytest.mark.parametrize("init_std", [0.02, 0.1])
def test_initial_weights_follow_gpt2(init_std):
    torch.manual_seed(0)
    model = make_transformer(vocab_size=500, num_layers=8, d_model=128, max_seq_len=256, bias=True, tied=False)
    if init_std != 0.02:  # the default
        model = type(model)(model.encoder, lambda embedding: model.readout, init_std)
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            assert (parameter == ("norm.weight" in name)).all(), name
        else:
            is_residual = "o_proj" in name or "down_proj" in name
            # √(2 · 8) = 4. The smallest matrix has 16,384 numbers: the standard error of their std is 0.6 %.
            expected = init_std / 4 if is_residual else init_std
            assert parameter.std().item() == pytest.approx(expected, rel=0.03), name
            assert abs(parameter.mean().item()) < 4 * expected / parameter.numel() ** 0.5, name


@pytest.mark.parametrize("tied", [True, False])
def test_xavier_draws_projections_by_their_fans_and_embeddings_by_their_width(tied):
    torch.manual_seed(0)
    model = make_transformer(vocab_size=500, num_layers=2, d_model=128, max_seq_len=64, bias=True, tied=tied)
    model = type(model)(model.encoder, lambda embedding: model.readout, init="xavier")
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) or (tied and name == "readout.proj"):
            assert module.weight.std().item() == pytest.approx(128**-0.5, rel=0.03), name
        elif isinstance(module, nn.Linear):
            bound = (6 / sum(module.weight.shape)) ** 0.5
            assert 0.99 * bound < module.weight.abs().max() <= bound, name
            assert module.weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.03), name
            assert module.bias is None or not module.bias.any(), name


@pytest.mark.parametrize("init", ["normal", "xavier"])
@pytest.mark.parametrize("position", [lambda head_dim: T5Position(4), ShawPosition], ids=["t5", "shaw"])
def test_tables_of_relative_positions_have_the_given_deviation(position, init):
    torch.manual_seed(0)
    made = make_transformer(d_model=128, attention_position=position)
    model = type(made)(made.encoder, lambda embedding: made.readout, init_std=0.05, init=init)
    relative = [module for module in model.modules() if isinstance(module, RelativePosition)]
    tables = [part.weight for module in relative for part in module.modules() if isinstance(part, nn.Embedding)]
    # The smallest has 32 · 4 numbers: the standard error of their std is 6 %.
    assert [table.std().item() for table in tables] == pytest.approx([0.05] * len(tables), rel=0.25) != []


def test_the_state_holds_no_positions_and_no_gates():
    model = make_transformer(position=False, ablated_heads=[[0, 1]], qk_norm=True)
    names = set(model.state_dict())
    assert names == {name for name, _ in model.named_parameters(remove_duplicate=False)}
    make_transformer(position=False, qk_norm=True).load_state_dict(model.state_dict())


def test_backends_are_resolved_for_the_longest_sequence_and_all_are_named(native_bf16):
    model = make_transformer(backend="eager")
    model.attentions()[1].backend = "flash"
    assert model.resolve_backends("cpu", torch.float32, CAUSAL) == "eager, flash"
    for length, name in ((64, "eager"), (1024, "sdpa")):
        made = make_transformer(d_model=128, num_heads=2, num_layers=1, max_seq_len=length)
        assert made.resolve_backends("cpu", torch.bfloat16, CAUSAL) == name


# Encoder–decoders.


@BLOCKS
@torch.no_grad()
def test_a_token_sees_the_whole_source_and_none_of_the_tokens_after_it(kind):
    network = make_encoder_decoder(kind)
    before = network(SOURCE, TARGET, PADDED)
    later = TARGET.clone()
    later[:, 4] = (later[:, 4] + 1) % 50
    after = network(SOURCE, later, PADDED)
    assert torch.equal(after[:, :4], before[:, :4])
    assert (after[:, 4:] != before[:, 4:]).any(dim=-1).all()
    # Padding of the source changes nothing, and each of its tokens changes every token of the target.
    other = torch.where(torch.arange(9) < LENGTHS[:, None], SOURCE, (SOURCE + 1) % 50)
    assert torch.equal(network(other, TARGET, PADDED), before)
    assert error(network(SOURCE[1:, :5], TARGET[1:]), before[1:]) <= 1e-5
    for position in range(5):
        other = SOURCE.clone()
        other[:, position] = (other[:, position] + 1) % 50
        assert (network(other, TARGET, PADDED) != before).any(dim=-1).all()
    assert network.encode(SOURCE, AttentionMask(causal=True)).mask == AttentionMask()  # of a causal encoder, too


CROSS = [name for name in NAMES if "window" not in name and "local_gaussian" not in name]


@pytest.mark.parametrize("name", CROSS)
@torch.no_grad()
def test_decoding_behind_a_cache_projects_the_source_once(name):
    network = make_encoder_decoder(cross=factory(name), kind=PreNormBlock)
    expected = network(SOURCE, TARGET, PADDED)
    context, cache, parts = network.encode(SOURCE, PADDED), Cache(2), []
    projected = []
    for layer in network.attentions_by_kind()["cross"]:
        projection = getattr(layer, "kv_down_proj", layer.k_proj)
        projection.register_forward_hook(lambda module, inputs, out: projected.append(inputs[0].shape[1]))
    for chunk in TARGET.split([3, 1, 1, 2], dim=1):
        parts.append(network.decode(chunk, context, cache=cache))
        assert cache.length == sum(part.shape[1] for part in parts)
    assert error(torch.cat(parts, dim=1), expected) <= 1e-5
    assert projected == [9] * 2
    held = sum(layer.num_bytes for layer in cache.context_layers)
    assert cache.num_bytes == held + sum(layer.num_bytes for layer in cache.layers) > held > 0


def test_embeddings_are_shared_or_not():
    shared, own = make_encoder_decoder(), make_encoder_decoder(shared=False)
    assert shared.encoder.token_embedding is shared.decoder.token_embedding
    assert shared.readout.proj.weight is shared.encoder.token_embedding.weight
    assert own.num_parameters() - shared.num_parameters() == 50 * 32
    assert own.readout.proj.weight is own.decoder.token_embedding.weight
    loss = shared(SOURCE, TARGET[:, :-1], PADDED, targets=TARGET[:, 1:])
    loss.backward()
    logits = shared(SOURCE, TARGET[:, :-1], PADDED)
    torch.testing.assert_close(loss, nn.functional.cross_entropy(logits.flatten(0, 1), TARGET[:, 1:].flatten()))


def test_initial_weights_leave_room_for_three_branches_in_a_layer_of_the_decoder():
    network = make_encoder_decoder(bias=False)
    parts = (network.encoder, network.decoder)
    again = EncoderDecoder(*parts, TokenReadout, init_std=0.1)
    for stack, branches in ((again.encoder, 4), (again.decoder, 6)):
        weight = torch.cat([layer.feed_forward.down_proj.weight for layer in stack.layers])
        assert weight.std().item() == pytest.approx(0.1 / branches**0.5, rel=0.05)
    assert again.decoder.layers[0].cross_attention.q_proj.weight.std().item() == pytest.approx(0.1, rel=0.1)


@pytest.mark.parametrize("shared", [True, False])
def test_xavier_leaves_every_embedding_its_own_variance(shared):
    made = make_encoder_decoder(bias=False, shared=shared)
    again = EncoderDecoder(made.encoder, made.decoder, TokenReadout, shared_embedding=shared, init="xavier")
    for stack in (again.encoder, again.decoder):
        assert stack.token_embedding.weight.std().item() == pytest.approx(32**-0.5, rel=0.05)
        assert stack.position.embedding.weight.std().item() == pytest.approx(32**-0.5, rel=0.1)
    weight = again.decoder.layers[1].cross_attention.o_proj.weight
    assert 0.99 * (3 / 32) ** 0.5 < weight.abs().max() <= (3 / 32) ** 0.5


@torch.no_grad()
def test_a_head_of_a_kind_is_ablated_by_its_address():
    addresses = [["encoder", 0, 1], ["cross", 1, 2], ["decoder", 1, 3]]
    cross = partial(Attention, 32, 4, bias=True, ablated_heads=addresses)
    ablated, zeroed = make_encoder_decoder(cross=cross, ablated_heads=addresses), make_encoder_decoder()
    assert error(ablated(SOURCE, TARGET), zeroed(SOURCE, TARGET)) > 1e-3
    for kind, layer, head in addresses:
        zeroed.attentions_by_kind()[kind][layer].o_proj.weight.unflatten(1, (4, -1))[:, head] = 0
    torch.testing.assert_close(ablated(SOURCE, TARGET), zeroed(SOURCE, TARGET))
