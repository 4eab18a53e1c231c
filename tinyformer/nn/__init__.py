"""The model: plain PyTorch, without Lightning, Hydra or text.

To read it from the inside out: `attention` projects tokens to queries, keys and values, and back (`latent` and
`differential` are other ways to do so); `kernels.eager` opens with the definition, softmax(q kᵀ / √head_dim) v;
`softmax` holds the options that change it, a `mask`, a `score`, a relative `position`, and calls one of the `kernels`,
chosen before training. A `cache` keeps keys and values for decoding, a `gate` scales heads, and `prune` removes them
(`heads`). A `mixer` without scores, `recurrent` or a `convolution`, may take its place. A `block` is attention and
`feed_forward`, each with a `norm` and a `residual` connection; the `encoder` embeds tokens and stacks blocks, a
`readout` turns their output into scores of tokens (`vocabulary`) or of classes; the `transformer` is both, initialised
by `init`. In an `encoder_decoder`, a decoder attends to the encoder's output by cross-attention; what both networks
have is in `network`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
