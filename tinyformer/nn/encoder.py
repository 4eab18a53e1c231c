"""Token ids in, one vector for each token out."""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tinyformer.nn.cache import Cache
from tinyformer.nn.dropout import make_dropout
from tinyformer.nn.mask import AttentionMask


class Encoder(nn.Module):
    """Embeds tokens and passes them through a stack of blocks.

    Whether it is BERT's encoder or GPT's "decoder" is the mask's business: they differ in nothing else.

    Args:
        vocab_size: number of tokens.
        num_layers: number of blocks.
        d_model: width of the residual stream.
        max_seq_len: the longest sequence, in tokens.
        block: makes a block, given `layer_index` and `num_layers`.
        norm: makes the final norm, which a block that ends normalised does without.
        position: makes the absolute position that is added to the embeddings, if any.
        dropout: probability to drop an element of the embedding in training.
        embedding_norm: normalise the embeddings, positions and all, as BERT and BLOOM do.
        checkpoint_activations: in training, keep no more of a layer than its input and compute the rest again in the
            backward pass: about a third more time, and memory for one layer in place of all (Chen et al. 2016, arXiv
            1604.06174).
    """

    def __init__(
        self,
        vocab_size: int,
        num_layers: int,
        d_model: int,
        max_seq_len: int,
        block: Callable[..., nn.Module],
        norm: Callable[..., nn.Module],
        position: Callable[..., nn.Module] | None = None,
        dropout: float = 0.0,
        embedding_norm: bool = False,
        checkpoint_activations: bool = False,
    ) -> None:
        super().__init__()
        self.checkpoint_activations = checkpoint_activations
        if num_layers < 1:
            raise ValueError(f"model.num_layers={num_layers}: a model has at least one layer, model.num_layers=1.")
        for key, size in {"vocab_size": vocab_size, "d_model": d_model, "max_seq_len": max_seq_len}.items():
            if size < 1:
                raise ValueError(f"model.{key}={size} is no size; one of at least 1 is, such as model.{key}=128.")
        self.vocab_size, self.max_seq_len = vocab_size, max_seq_len
        self.token_embedding = nn.Embedding(vocab_size, d_model)
        self.position = position() if position else None
        self.embedding_norm = norm(d_model) if embedding_norm else nn.Identity()
        self.dropout = make_dropout(dropout, "model.embedding_dropout")
        self.layers = nn.ModuleList(block(layer_index=i, num_layers=num_layers) for i in range(num_layers))
        self.final_norm = nn.Identity() if self.layers[-1].ends_normalised else norm(d_model)

    def forward(
        self, tokens: Int[Tensor, "batch seq"], mask: AttentionMask | None = None, cache: Cache | None = None
    ) -> Float[Tensor, "batch seq d_model"]:
        """Encode.

        Args:
            tokens: their ids.
            mask: who may attend to whom; everybody to everybody unless given.
            cache: of the tokens before these; it will hold these as well.

        Raises:
            ValueError: the sequence is longer than `max_seq_len`.
        """
        first = cache.length if cache else 0
        if first + tokens.shape[1] > self.max_seq_len:
            raise ValueError(
                f"A sequence of {first + tokens.shape[1]} tokens is longer than model.max_seq_len={self.max_seq_len}."
            )
        x = self.token_embedding(tokens)
        x = self.position(x, first) if self.position else x
        x = self.dropout(self.embedding_norm(x))
        again = self.checkpoint_activations and self.training and torch.is_grad_enabled() and cache is None
        for index, layer in enumerate(self.layers):
            given = (x, mask or AttentionMask(), cache.layers[index] if cache else None)
            x = checkpoint(layer, *given, use_reentrant=False) if again else layer(*given)
        return self.final_norm(x)
