import pytest
import torch
from torch import nn

from tinyformer.nn import AttentionMask, ClassReadout, MaskedTokenReadout, RMSNorm, TokenReadout


def test_tied_scores_are_products_with_the_embeddings():
    embedding = nn.Embedding(11, 4)
    readout, x = TokenReadout(embedding), torch.randn(2, 3, 4)
    assert readout.proj.weight is embedding.weight
    torch.testing.assert_close(readout(x), torch.einsum("bsd,vd->bsv", x, embedding.weight))


def test_untied_scores_have_their_own_matrix():
    embedding = nn.Embedding(11, 4)
    readout, x = TokenReadout(embedding, tied=False), torch.randn(2, 3, 4)
    assert readout.proj.weight is not embedding.weight
    torch.testing.assert_close(readout(x), torch.einsum("bsd,vd->bsv", x, readout.proj.weight))
    readout(x).sum().backward()
    assert embedding.weight.grad is None


def test_berts_readout_has_a_layer_of_its_own_and_a_bias_for_each_token():
    torch.manual_seed(0)
    embedding, x = nn.Embedding(11, 4), torch.randn(2, 3, 4)
    readout = MaskedTokenReadout(embedding, norm=RMSNorm, activation="silu")
    nn.init.normal_(readout.norm.weight)
    hidden = torch.einsum("bsi,oi->bso", x, readout.dense.weight) + readout.dense.bias
    hidden = hidden * torch.sigmoid(hidden)
    hidden = hidden / (hidden.square().mean(dim=-1, keepdim=True) + 1e-6).sqrt() * readout.norm.weight
    expected = torch.einsum("bsd,vd->bsv", hidden, embedding.weight) + readout.proj.bias
    torch.testing.assert_close(readout(x), expected)
    assert readout.proj.weight is embedding.weight
    assert MaskedTokenReadout(embedding, tied=False).proj.weight is not embedding.weight


def vectors():
    torch.manual_seed(0)
    return torch.randn(2, 4, 6), torch.tensor([4, 3])


def test_the_first_token_stands_for_all():
    x, lengths = vectors()
    readout = ClassReadout(nn.Embedding(11, 6), ["a", "b"], "cls")
    torch.testing.assert_close(readout(x, AttentionMask(lengths=lengths)), readout.proj(x[:, 0]))


def test_the_mean_is_over_real_tokens():
    x, lengths = vectors()
    readout = ClassReadout(nn.Embedding(11, 6), ["a", "b", "c"], "mean")
    expected = readout.proj(torch.stack([x[0].mean(dim=0), x[1, :3].mean(dim=0)]))
    torch.testing.assert_close(readout(x, AttentionMask(lengths=lengths)), expected)
    torch.testing.assert_close(readout(x), readout.proj(x.mean(dim=1)))


def test_pooling_by_attention_is_additive_attention_with_one_query():
    x, lengths = vectors()
    readout = ClassReadout(nn.Embedding(11, 6), ["a", "b"], "attention")
    pooling = readout.pooling
    scores = [
        pooling.query.weight[0] @ torch.tanh(pooling.key_proj.weight @ v + pooling.key_proj.bias) for v in x[1, :3]
    ]
    weights = torch.stack(scores).softmax(dim=0)
    torch.testing.assert_close(readout(x, AttentionMask(lengths=lengths))[1], readout.proj(weights @ x[1, :3]))
    real = torch.arange(4) < lengths[:, None]
    torch.testing.assert_close(pooling.weights(x, real)[1], torch.cat([weights, torch.zeros(1)]))


@pytest.mark.parametrize("pooling", ["cls", "mean", "attention"])
def test_padding_that_is_not_finite_harms_no_text(pooling):
    x, lengths = vectors()
    readout, mask = ClassReadout(nn.Embedding(11, 6), ["a", "b"], pooling), AttentionMask(lengths=lengths)
    expected = readout(x, mask)
    x[1, 3] = torch.nan
    torch.testing.assert_close(readout(x, mask), expected)
