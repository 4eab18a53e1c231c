"""The model: plain PyTorch, without Lightning, Hydra or text.

To read it from the inside out: `attention` projects tokens to queries, keys and values, attends by one of the
`kernels`, and projects back; `kernels.eager` opens with the definition, softmax(q kᵀ / √head_dim) v. The options that
change it are in `softmax`: a `mask`, a `score`, a relative `position`. `heads` are gated, ablated and pruned, a `cache`
keeps keys and values for decoding, and `maps` shows the weights. `latent` and `differential` are other kinds of
attention; `mixers` without scores, an LSTM and a convolution, may take its place. The `layers` of
a `block` are attention and a feed-forward network, each with a norm and a residual connection. `network` embeds tokens
and stacks blocks in an encoder, and a `readout` turns its output into scores of tokens or of classes. The `transformer`
is both, with initialised weights, or an encoder–decoder, in which a decoder attends to the encoder's output by
cross-attention.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
