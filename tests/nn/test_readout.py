import torch
from torch import nn

from tinyformer.nn import TokenReadout


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
