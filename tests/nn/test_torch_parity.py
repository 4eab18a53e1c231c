"""Parity with PyTorch's `Transformer` and the `MultiheadAttention` in it, in layers of pre-norm and of post-norm."""

import pytest
import torch
from torch import Tensor, nn

from nn.model_cases import make_encoder_decoder, token_ids
from nn.variants import CAUSAL, error
from tinyformer.nn import AttentionMask, BaseAttention, EncoderDecoder, PostNormBlock, PreNormBlock


def attention_weights(ours: BaseAttention) -> dict[str, Tensor]:
    """The weights under PyTorch's names."""
    weights = {"out_proj.weight": ours.o_proj.weight, "out_proj.bias": ours.o_proj.bias}
    for name in ("weight", "bias"):
        parts = [getattr(projection, name) for projection in (ours.q_proj, ours.k_proj, ours.v_proj)]
        weights[f"in_proj_{name}"] = torch.cat(parts)
    return weights


def as_torch(network: EncoderDecoder, kind: type[nn.Module]) -> nn.Transformer:
    """The same encoder and decoder as PyTorch builds them, whose parameters are made of the network's."""
    is_pre = kind is PreNormBlock
    options = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": is_pre}
    theirs = nn.Transformer(32, 4, 2, 2, 128, **options).eval()
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


@pytest.mark.parametrize("kind", [PreNormBlock, PostNormBlock], ids=["pre", "post"])
@pytest.mark.filterwarnings("ignore:enable_nested_tensor")  # PyTorch's layer says so of pre-norm
def test_parity_with_torch_transformer(kind):
    network, source, target = make_encoder_decoder(kind), token_ids(seq=9), token_ids(seq=7, seed=1)
    padded, theirs = AttentionMask(lengths=torch.tensor([9, 5])), as_torch(network, kind)
    embedding, positions = network.encoder.token_embedding.weight.detach(), network.encoder.position.embedding.weight
    embedded = [
        (embedding[tokens] + stack.position.embedding.weight.detach()[: tokens.shape[1]]).requires_grad_()
        for tokens, stack in ((source, network.encoder), (target, network.decoder))
    ]
    # In torch's masks, True means "may not".
    padding = {f"{name}_key_padding_mask": torch.arange(9) >= padded.lengths[:, None] for name in ("src", "memory")}
    expected = theirs(*embedded, tgt_mask=torch.ones(7, 7, dtype=torch.bool).triu(1), **padding)
    found = network.decoder(target, CAUSAL, context=network.encode(source, padded))
    assert error(found, expected) <= 1e-5
    torch.testing.assert_close(network(source, target, padded), found @ embedding.T)
    pairs = [(positions, embedded[0])]
    for stack, side in ((network.encoder, theirs.encoder), (network.decoder, theirs.decoder)):
        block, layer = stack.layers[0], side.layers[0]
        pairs += [
            (block.attention.o_proj.weight, layer.self_attn.out_proj.weight),
            (block.feed_forward.up_proj.bias, layer.linear1.bias),
            (block.feed_forward.down_proj.weight, layer.linear2.weight),
        ]
    pairs += [
        (block.cross_attention.o_proj.weight, layer.multihead_attn.out_proj.weight),
        (block.cross_attention_norm.weight, layer.norm2.weight),
    ]
    ours, gradients = (
        torch.autograd.grad(out, of, torch.linspace(-1, 1, out.numel()).view_as(out))
        for out, of in zip((found, expected), zip(*pairs, strict=True), strict=True)
    )
    assert error(ours[0][:9], gradients[0].sum(0)) <= 1e-5
    for actual, reference in zip(ours[1:], gradients[1:], strict=True):
        assert error(actual, reference) <= 1e-5
