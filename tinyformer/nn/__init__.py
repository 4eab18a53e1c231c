"""The model: plain PyTorch, without Lightning, Hydra or text.

To read it from the inside out: `attention` projects tokens to queries, keys and values, attends by one of the
`kernels`, and projects back; `kernels.eager` opens with the definition, softmax(q kᵀ / √head_dim) v. The options that
change it are in `softmax`: a `mask`, a `score`, a relative `position`. `heads` are gated, ablated and pruned, a `cache`
keeps keys and values for decoding, and `maps` shows the weights. `latent` and `differential` are other kinds of
attention; `mixers` without scores, an LSTM and a convolution, may take its place. A `block` is attention and
`feed_forward`, each with a `norm` and a `residual` connection; the `encoder` embeds tokens and stacks blocks, a
`readout` turns their output into scores of tokens (`vocabulary`) or of classes. The `transformer` is both, initialised
by `init`, or an encoder–decoder, in which a decoder attends to the encoder's output by cross-attention; `network` is
the base of the two.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
