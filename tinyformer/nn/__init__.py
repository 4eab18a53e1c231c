"""The model in plain PyTorch, which uses neither Lightning nor Hydra.

The modules from the inside out: `attention` projects tokens to queries, keys and values, computes the heads' outputs
with one of the `kernels`, and projects the outputs back. `kernels.eager` has the definition, softmax(q kᵀ / √head_dim)
v; `softmax` has the options that change it: a `mask`, a `score`, a relative `position`. `heads` gates, ablates and
prunes heads, `shift` mixes a token with the few tokens before it, `forget` has the gates of forgetting attention,
`cache` stores keys and values for decoding, and `maps` returns attention weights. `latent` and `differential` are
variants of attention; `mixers`, an LSTM and a convolution, replace attention. A `block` is attention and a feed-forward
network, each with a norm and a residual connection from `layers`. `network` stacks blocks into an
encoder, and a `readout` maps the encoder's output to logits of tokens or classes. `transformer` joins encoder and
readout, or an encoder, a decoder with cross-attention to the encoder's output, and a readout; it initialises weights.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
