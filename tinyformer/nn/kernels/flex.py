"""FlexAttention: the mask and the score modifications compiled into one kernel, which skips masked blocks."""

import functools
from collections.abc import Callable, Hashable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from tinyformer.nn.kernels.sdpa import widened
from tinyformer.nn.mask import AttentionMask, Grid, MaskMod
from tinyformer.nn.score import Scoring

# The smallest head size of the CUDA kernel.
FLEX_MIN_HEAD_DIM = 16

# Rows of queries that fit torch's kernel for decoding. Torch chooses this kernel for fewer tokens than that, but the
# kernel puts all heads of a group in one block, and torch fails if these are more rows (torch 2.11 to 2.13).
DECODING_ROWS = 128


def flex(
    q: Float[Tensor, "batch num_heads q_seq head_dim"],
    k: Float[Tensor, "batch num_kv_heads k_seq head_dim"],
    v: Float[Tensor, "batch num_kv_heads k_seq v_head_dim"],
    mask: AttentionMask,
    scoring: Scoring,
    dropout: float = 0.0,
) -> Float[Tensor, "batch num_heads q_seq v_head_dim"]:
    """FlexAttention (Dong et al. 2024, arXiv 2412.05496), compiled on CUDA; on CPU unfused and without gradients."""
    q_seq, k_seq, v_head_dim = q.shape[2], k.shape[2], v.shape[-1]
    first = k_seq - q_seq
    if q.device.type == "cuda":
        # The kernel takes no smaller heads; zeros change neither the scores nor the output's first dimensions.
        q, k, v = (widened(x, FLEX_MIN_HEAD_DIM) for x in (q, k, v))

    def score_mod(score: Tensor, batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return scoring.modify(score, Grid(batch, head, q_idx + first, kv_idx))

    is_own_graph = q.device.type == "cuda" and not torch.compiler.is_compiling()
    attend: Any = _compiled_flex(_structure(mask, scoring)) if is_own_graph else flex_attention
    out, aux = attend(
        q,
        k,
        v,
        score_mod=score_mod if scoring.modifies else None,
        block_mask=block_mask(mask, q_seq, k_seq, q.device),
        scale=scoring.scale,
        enable_gqa=q.shape[1] != k.shape[1],
        kernel_options={"BACKEND": "TRITON"} if q_seq * q.shape[1] // k.shape[1] > DECODING_ROWS else None,
        return_aux=AuxRequest(lse=scoring.sink is not None),
    )
    if scoring.sink is not None:
        # In the softmax over keys and sink, the keys' share is exp(lse) / (exp(lse) + exp(sink)).
        share = torch.sigmoid(aux.lse - scoring.sink.view(1, -1, 1))
        out = out * share.unsqueeze(-1).to(out.dtype)
    return out[..., :v_head_dim]


def _structure(mask: AttentionMask, scoring: Scoring) -> Hashable:
    """A key with the properties of mask and scoring that determine the code of the compiled kernel."""
    functions = tuple(getattr(mod.function, "__qualname__", type(mod.function)) for mod in scoring.mods)
    pattern = None if mask.allowed is None else tuple(size > 1 for size in mask.allowed.shape[:2])
    options = scoring.sink is None, scoring.log_decay is None
    return mask.span, mask.lengths is None, mask.documents is None, pattern, functions, options


@functools.cache
def _compiled_flex(structure: Hashable) -> Callable[..., Any]:
    """FlexAttention compiled for one structure.

    Torch recompiles a function for each structure. Beyond a limit for each code object, it runs the function unfused,
    with the scores of all pairs in memory. So each structure has its own code object. `fullgraph` forbids unfused runs.
    """

    def attend(*args: Any, **options: Any) -> Any:
        return flex_attention(*args, **options)

    attend.__code__ = attend.__code__.replace(co_name=f"attend_{abs(hash(structure))}")
    return torch.compile(attend, fullgraph=True)


def block_mask(mask: AttentionMask, q_seq: int, k_seq: int, device: torch.device) -> BlockMask | None:
    """FlexAttention's block mask: each block is skipped, full or partly masked. None if the mask hides no key."""
    has_tensors = any(part is not None for part in (mask.lengths, mask.documents, mask.allowed))
    return (_block_mask_of_batch if has_tensors else _block_mask_of_shape)(mask, q_seq, k_seq, device)


def _make_block_mask(mask: AttentionMask, q_seq: int, k_seq: int, device: torch.device) -> BlockMask | None:
    mods, first = mask.mask_mods(q_seq, k_seq), k_seq - q_seq
    if not mods:
        return None

    def allows(batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        allowed = mods[0](batch, head, q_idx, kv_idx)
        for mod in mods[1:]:
            allowed = allowed & mod(batch, head, q_idx, kv_idx)
        return allowed

    # Torch counts the arguments, which a type checker's wrapper would hide; a lambda is not wrapped.
    mask_mod: MaskMod = lambda batch, head, q_idx, kv_idx: allows(batch, head, q_idx + first, kv_idx)  # noqa: E731
    rows, heads = (None if size == 1 else size for size in (mask.num_rows, mask.num_heads))
    # The block mask is cached: if it is created in inference mode, it must work in training, too.
    with torch.inference_mode(False), torch.no_grad():
        return create_block_mask(mask_mod, rows, heads, q_seq, k_seq, device=str(device))


# The block mask of a mask without tensors depends on the shape alone, and is not recomputed at every step.
_block_mask_of_shape = functools.lru_cache(maxsize=32)(_make_block_mask)

# The layers of a step share the mask's tensors, which are compared by identity, but may have other windows.
_block_mask_of_batch = functools.lru_cache(maxsize=4)(_make_block_mask)
