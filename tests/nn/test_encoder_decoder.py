"""The encoder–decoder: parity with PyTorch's, what each token sees, and decoding behind a cache of both attentions."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nn.model_cases import block_factory
from nn.variants import NAMES, error, factory
from tinyformer.errors import ArgumentError
from tinyformer.nn import (
    Attention,
    AttentionMask,
    BaseAttention,
    Cache,
    Decoder,
    Encoder,
    EncoderDecoder,
    LayerNorm,
    LearnedPosition,
    PostNormBlock,
    PreNormBlock,
    TokenReadout,
)

VOCAB, WIDTH, LAYERS = 50, 32, 2
BLOCKS = pytest.mark.parametrize("kind", [PreNormBlock, PostNormBlock], ids=["pre", "post"])


def ids(seq: int, seed: int = 0) -> Tensor:
    return torch.randint(VOCAB, (2, seq), generator=torch.Generator().manual_seed(seed))


SOURCE, TARGET, LENGTHS = ids(9), ids(7, seed=1), torch.tensor([9, 5])
PADDED = AttentionMask(lengths=LENGTHS)


def make(
    kind: type[nn.Module] = PreNormBlock,
    cross: Any = None,
    std: float = 0.3,
    shared: bool = True,
    bias: bool = True,
    **block: Any,
) -> EncoderDecoder:
    torch.manual_seed(0)
    sizes = (VOCAB, LAYERS, WIDTH, 16)
    parts = {
        "block": block_factory(kind, bias=bias, **block),
        "norm": partial(LayerNorm, bias=bias),
        "position": partial(LearnedPosition, 16, WIDTH),
    }
    decoder = Decoder(*sizes, cross_attention=cross or partial(Attention, WIDTH, 4, bias=bias), **parts)
    network = EncoderDecoder(Encoder(*sizes, **parts), decoder, TokenReadout, shared_embedding=shared)
    for name, parameter in network.named_parameters():
        nn.init.normal_(parameter, 1.0 if "norm.weight" in name else 0.0, std)
    return network.eval()


def attention_weights(ours: BaseAttention) -> dict[str, Tensor]:
    projections = (ours.q_proj, ours.k_proj, ours.v_proj)
    return {
        "in_proj_weight": torch.cat([proj.weight for proj in projections]),
        "in_proj_bias": torch.cat([proj.bias for proj in projections]),
        "out_proj.weight": ours.o_proj.weight,
        "out_proj.bias": ours.o_proj.bias,
    }


def as_torch(network: EncoderDecoder, kind: type[nn.Module]) -> nn.Transformer:
    """The same encoder and decoder as PyTorch builds them, whose parameters are made of the network's."""
    is_pre = kind is PreNormBlock
    options = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": is_pre}
    theirs = nn.Transformer(WIDTH, 4, LAYERS, LAYERS, 4 * WIDTH, **options).eval()
    for side, stack in ((theirs.encoder, network.encoder), (theirs.decoder, network.decoder)):
        if is_pre:
            side.norm.load_state_dict(stack.final_norm.state_dict())
        else:
            side.norm = None  # PyTorch has one behind post-norm, too
        for layer, block in zip(side.layers, stack.layers, strict=True):
            layer.self_attn.load_state_dict(attention_weights(block.attention))
            layer.linear1.load_state_dict(block.feed_forward.up_proj.state_dict())
            layer.linear2.load_state_dict(block.feed_forward.down_proj.state_dict())
            norms = [block.attention_norm, block.feed_forward_norm]
            if block.cross_attention is not None:
                layer.multihead_attn.load_state_dict(attention_weights(block.cross_attention))
                norms.insert(1, block.cross_attention_norm)
            for number, norm in enumerate(norms, start=1):
                getattr(layer, f"norm{number}").load_state_dict(norm.state_dict())
    return theirs


@BLOCKS
@pytest.mark.filterwarnings("ignore:enable_nested_tensor")  # PyTorch's layer says so of pre-norm
def test_parity_with_torch_transformer(kind):
    network = make(kind)
    theirs = as_torch(network, kind)
    embedding, positions = network.encoder.token_embedding.weight.detach(), network.encoder.position.embedding.weight
    embedded = [
        (embedding[tokens] + stack.position.embedding.weight.detach()[: tokens.shape[1]]).requires_grad_()
        for tokens, stack in ((SOURCE, network.encoder), (TARGET, network.decoder))
    ]
    is_padding = torch.arange(9) >= LENGTHS[:, None]
    expected = theirs(
        *embedded,
        tgt_mask=torch.ones(7, 7, dtype=torch.bool).triu(1),
        src_key_padding_mask=is_padding,
        memory_key_padding_mask=is_padding,
    )
    found = network.decoder(TARGET, AttentionMask(causal=True), context=network.encode(SOURCE, PADDED))
    assert error(found, expected) <= 1e-5
    torch.testing.assert_close(network(SOURCE, TARGET, PADDED), found @ network.encoder.token_embedding.weight.T)
    upstream = torch.randn(found.shape)
    block, layer = network.decoder.layers[0], theirs.decoder.layers[0]
    last, other = network.encoder.layers[0], theirs.encoder.layers[0]
    pairs = [
        (block.cross_attention.o_proj.weight, layer.multihead_attn.out_proj.weight),
        (block.cross_attention_norm.weight, layer.norm2.weight),
        (block.attention.o_proj.weight, layer.self_attn.out_proj.weight),
        (block.feed_forward.up_proj.bias, layer.linear1.bias),
        (last.feed_forward.down_proj.weight, other.linear2.weight),  # through the cross-attention
        (last.attention.o_proj.weight, other.self_attn.out_proj.weight),
    ]
    ours = torch.autograd.grad(found, [pair[0] for pair in pairs] + [positions], upstream)
    gradients = torch.autograd.grad(expected, [pair[1] for pair in pairs] + [embedded[0]], upstream)
    for actual, reference in zip(ours[:-1], gradients[:-1], strict=True):
        assert error(actual, reference) <= 1e-5
    assert error(ours[-1][:9], gradients[-1].sum(0)) <= 1e-5


@BLOCKS
@torch.no_grad()
def test_a_token_sees_the_whole_source_and_none_of_the_tokens_after_it(kind):
    network = make(kind)
    before = network(SOURCE, TARGET, PADDED)
    later = TARGET.clone()
    later[:, 4] = (later[:, 4] + 1) % VOCAB
    after = network(SOURCE, later, PADDED)
    assert torch.equal(after[:, :4], before[:, :4])
    assert (after[:, 4:] != before[:, 4:]).any(dim=-1).all()
    # Padding of the source changes nothing, and each of its tokens changes every token of the target.
    other = torch.where(torch.arange(9) < LENGTHS[:, None], SOURCE, (SOURCE + 1) % VOCAB)
    assert torch.equal(network(other, TARGET, PADDED), before)
    assert error(network(SOURCE[1:, :5], TARGET[1:]), before[1:]) <= 1e-5
    for position in range(5):
        other = SOURCE.clone()
        other[:, position] = (other[:, position] + 1) % VOCAB
        assert (network(other, TARGET, PADDED) != before).any(dim=-1).all()
    assert network.encode(SOURCE, AttentionMask(causal=True)).mask == AttentionMask()  # of a causal encoder, too


CROSS = [name for name in NAMES if "window" not in name and "local_gaussian" not in name]


@pytest.mark.parametrize("name", CROSS)
@torch.no_grad()
def test_decoding_behind_a_cache_projects_the_source_once(name):
    network = make(cross=factory(name), kind=PreNormBlock)
    expected = network(SOURCE, TARGET, PADDED)
    context, cache, parts = network.encode(SOURCE, PADDED), Cache(LAYERS), []
    projected = []
    for layer in network.attentions_by_kind()["cross"]:
        projection = getattr(layer, "kv_down_proj", layer.k_proj)
        projection.register_forward_hook(lambda module, inputs, out: projected.append(inputs[0].shape[1]))
    for chunk in TARGET.split([3, 1, 1, 2], dim=1):
        parts.append(network.decode(chunk, context, cache=cache))
        assert cache.length == sum(part.shape[1] for part in parts)
    assert error(torch.cat(parts, dim=1), expected) <= 1e-5
    assert projected == [9] * LAYERS
    held = sum(layer.num_bytes for layer in cache.context_layers)
    assert cache.num_bytes == held + sum(layer.num_bytes for layer in cache.layers) > held > 0


def test_embeddings_are_shared_or_not():
    shared, own = make(), make(shared=False)
    assert shared.encoder.token_embedding is shared.decoder.token_embedding
    assert shared.readout.proj.weight is shared.encoder.token_embedding.weight
    assert own.num_parameters() - shared.num_parameters() == VOCAB * WIDTH
    assert own.readout.proj.weight is own.decoder.token_embedding.weight
    loss = shared(SOURCE, TARGET[:, :-1], PADDED, targets=TARGET[:, 1:])
    loss.backward()
    logits = shared(SOURCE, TARGET[:, :-1], PADDED)
    torch.testing.assert_close(loss, nn.functional.cross_entropy(logits.flatten(0, 1), TARGET[:, 1:].flatten()))


def test_attentions_are_named_by_what_they_attend_to():
    network = make()
    kinds = network.attentions_by_kind()
    assert {kind: len(layers) for kind, layers in kinds.items()} == {"encoder": 2, "decoder": 2, "cross": 2}
    modules = [module for module in network.modules() if isinstance(module, BaseAttention)]
    assert {id(layer) for layers in kinds.values() for layer in layers} == {id(module) for module in modules}


def test_initial_weights_leave_room_for_three_branches_in_a_layer_of_the_decoder():
    network = make(bias=False)
    parts = (network.encoder, network.decoder)
    again = EncoderDecoder(*parts, TokenReadout, init_std=0.1)
    for stack, branches in ((again.encoder, 4), (again.decoder, 6)):
        weight = torch.cat([layer.feed_forward.down_proj.weight for layer in stack.layers])
        assert weight.std().item() == pytest.approx(0.1 / branches**0.5, rel=0.05)
    assert again.decoder.layers[0].cross_attention.q_proj.weight.std().item() == pytest.approx(0.1, rel=0.1)


@pytest.mark.parametrize("shared", [True, False])
def test_xavier_leaves_every_embedding_its_own_variance(shared):
    made = make(bias=False, shared=shared)
    again = EncoderDecoder(made.encoder, made.decoder, TokenReadout, shared_embedding=shared, init="xavier")
    for stack in (again.encoder, again.decoder):
        assert stack.token_embedding.weight.std().item() == pytest.approx(WIDTH**-0.5, rel=0.05)
        assert stack.position.embedding.weight.std().item() == pytest.approx(WIDTH**-0.5, rel=0.1)
    weight = again.decoder.layers[1].cross_attention.o_proj.weight
    assert 0.99 * (3 / WIDTH) ** 0.5 < weight.abs().max() <= (3 / WIDTH) ** 0.5


def test_what_cannot_be_is_refused():
    with pytest.raises(ArgumentError, match=r"^cross_attention\.window=4: must be None in cross-attention"):
        make(cross=partial(Attention, WIDTH, 4, window=4))
    with pytest.raises(ArgumentError, match=r"^context=None: is needed by a block with cross-attention"):
        make().decoder(TARGET, AttentionMask(causal=True))
    network, cache = make(), Cache(LAYERS)
    with torch.no_grad():
        network.decode(TARGET[:, :3], network.encode(SOURCE), cache=cache)
        with pytest.raises(ArgumentError, match="holds a context of 2 sequences of 9 tokens, and this one has 2 of 7"):
            network.decode(TARGET[:, 3:], network.encode(SOURCE[:, :7]), cache=cache)
    with pytest.raises(ArgumentError, match="must be None: each source is a row of its own"):
        network.encode(SOURCE, AttentionMask(documents=torch.zeros(2, 9, dtype=torch.long)))
    wide = Encoder(VOCAB, 1, 2 * WIDTH, 16, block=block_factory(d_model=2 * WIDTH), norm=LayerNorm)
    with pytest.raises(ArgumentError, match=r"^decoder=32: must have the width of the encoder, 64\.$"):
        EncoderDecoder(wide, network.decoder, TokenReadout)
    large = Encoder(VOCAB + 1, 1, WIDTH, 16, block=block_factory(), norm=LayerNorm)
    with pytest.raises(ArgumentError, match=r"of the shapes \(51, 32\) and \(50, 32\); shared_embedding=False"):
        EncoderDecoder(large, make().decoder, TokenReadout)


@torch.no_grad()
def test_a_head_of_a_kind_is_ablated_by_its_address():
    cross, one = partial(Attention, WIDTH, 4, bias=True), ["cross", 1, 2]
    addresses = [["encoder", 0, 1], one, ["decoder", 1, 3]]
    sizes = (VOCAB, LAYERS, WIDTH, 16)
    parts = {"block": block_factory(bias=True, ablated_heads=addresses), "norm": LayerNorm}
    decoder = Decoder(*sizes, cross_attention=partial(cross, ablated_heads=addresses), **parts)
    ablated = EncoderDecoder(Encoder(*sizes, kind="encoder", **parts), decoder, TokenReadout).eval()
    zeroed = copy.deepcopy(ablated)
    assert not torch.equal(ablated(SOURCE, TARGET), _whole(zeroed)(SOURCE, TARGET))
    for kind, layer, head in addresses:
        width = WIDTH // 4
        zeroed.attentions_by_kind()[kind][layer].o_proj.weight[:, head * width : (head + 1) * width] = 0
    torch.testing.assert_close(ablated(SOURCE, TARGET), zeroed(SOURCE, TARGET))


def _whole(network: EncoderDecoder) -> EncoderDecoder:
    """The network without its ablations."""
    for layer in network.attentions():
        layer.head_gate.factors = None
    return network
