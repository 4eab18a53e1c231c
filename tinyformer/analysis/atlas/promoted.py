"""Which tokens the output of a head promotes by itself."""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tinyformer.nn import BaseAttention, Network, PostNormBlock, PreNormBlock, TokenReadout

NUM_PROMOTED = 3  # tokens


@torch.no_grad()
def promoted_tokens(
    network: Network, layer: BaseAttention, head: int, outputs: Float[Tensor, "events v_head_dim"]
) -> Int[Tensor, "events tokens"] | None:
    """The tokens whose logits a head's outputs raise most: those of what W_O makes of them, through norms and readout.

    Norms are linear but for their scale, a positive number for each token that changes no order, see
    `mechanism.attribution`. None where nothing is added to the logits of tokens: in an encoder that a decoder reads, in
    front of a readout of classes or one that is not linear, or of a residual connection that is removed.
    """
    stack, readout = network.stacks()[-1], network.readout
    place = next((at for at, block in enumerate(stack.layers) if layer in block.children()), None)
    if place is None or type(readout) is not TokenReadout:
        return None
    x = outputs @ layer.o_proj.weight.float().unflatten(1, (layer.num_heads, -1))[:, head].T
    norms, scale, is_before = list[nn.Module](), 1.0, True
    for block in stack.layers[place:]:
        if not isinstance(block, PreNormBlock | PostNormBlock):
            return None
        for name in ("attention", "cross_attention", "feed_forward"):
            if (module := getattr(block, name)) is None or (is_before and module is not layer):
                continue
            residual = getattr(block, f"{name}_residual")
            scale *= residual.branch if is_before else residual.skip
            norms += [getattr(block, f"{name}_norm")] if isinstance(block, PostNormBlock) else []
            is_before = False
    for norm in (*norms, stack.final_norm):
        if isinstance(norm, nn.LayerNorm):
            x = x - x.mean(dim=-1, keepdim=True)
        elif not isinstance(norm, nn.RMSNorm | nn.Identity):
            return None
        x = x if isinstance(norm, nn.Identity) else x * norm.weight.float()
    return None if scale == 0 else (scale * x @ readout.proj.weight.float().T).topk(NUM_PROMOTED).indices
