"""The kernels that torch runs on the stand-in device: those of `sdpa`, and how many graphs `flex` compiles."""

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters

from tinyformer.nn import BACKENDS, AttentionMask, Scoring
from tinyformer.nn.maps import KernelObserver
from tinyformer.nn.score import ScoreMod, softcap

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
BATCH, HEADS, SEQ, HEAD_DIM = 2, 4, 64, 32


def masks() -> dict[str, AttentionMask]:
    lengths = torch.full((BATCH,), 50).to("cuda")
    documents = torch.arange(SEQ).div(20, rounding_mode="floor").expand(BATCH, SEQ).to("cuda")
    return {
        "full": AttentionMask(),
        "causal": AttentionMask(True),
        "padded": AttentionMask(lengths=lengths),
        "window": AttentionMask(True, window=16),
        "local": AttentionMask(window=16),
        "documents": AttentionMask(True, documents=documents),
    }


def inputs(kv_heads: int, dtype: torch.dtype) -> Iterator[Tensor]:
    for heads in (HEADS, kv_heads, kv_heads):
        yield torch.zeros(BATCH, heads, SEQ, HEAD_DIM, dtype=dtype).to("cuda").requires_grad_()


def sdpa_kernels() -> dict[str, str]:
    """The kernel of each mask, sharing, dtype and dropout, forward and backward."""
    chosen = {}
    names = product(("full", "single", "causal", "padded"), (HEADS, 2), DTYPES, (0.0, 0.1))
    for mask, kv_heads, dtype, dropout in names:
        q, k, v = inputs(kv_heads, DTYPES[dtype])
        q = q[:, :, :1] if mask == "single" else q
        described = masks().get(mask, AttentionMask())
        with KernelObserver() as observer, contextlib.suppress(RuntimeError):  # cuDNN's needs a library
            BACKENDS["sdpa"].compute(q, k, v, described, Scoring(0.2), dropout).sum().backward()
        sharing = "own" if kv_heads == HEADS else "shared"
        chosen[f"{mask} {sharing} {dtype} {dropout}"] = observer.kernel
    return chosen


def flex_graphs() -> int:
    """The number of graphs compiled for each mask with and without modified scores, forward and backward."""
    distance = ScoreMod(lambda score, batch, head, q_idx, kv_idx: score - 0.1 * (q_idx - kv_idx), additive=True)
    for mask, mods in product(masks().values(), ((), (softcap(5.0),), (distance,))):
        q, k, v = inputs(1, torch.bfloat16)  # so many queries of one head that torch's kernel for decoding takes none
        BACKENDS["flex"].compute(q, k, v, mask, Scoring(0.2, mods=mods)).sum().backward()
    return counters["stats"]["unique_graphs"]


REPORTS: dict[str, Callable[[], Any]] = {"sdpa": sdpa_kernels, "flex": flex_graphs}

if __name__ == "__main__":
    report = {sys.argv[1]: REPORTS[sys.argv[1]]}
    Path(os.environ["REPORT"]).write_text(json.dumps({name: compute() for name, compute in report.items()}))
