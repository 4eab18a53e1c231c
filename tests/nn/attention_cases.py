"""Cases, errors and references that the tests of attention share."""

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from tinyformer.nn import BACKENDS, AttentionMask, Scoring

FUSED = ("sdpa", "flash")
TRAINABLE = ("eager", *FUSED)
"""The backends that train on CPU."""
ON_CPU = (*TRAINABLE, "flex")
"""Those that compute there; flex forward only."""
MASKS = ("full", "causal", "padded", "causal+padded")


@dataclass(frozen=True)
class Case:
    """Sizes and mask of one call of a backend; padded batches hold a long row and a row of length zero."""

    q_seq: int
    k_seq: int
    head_dim: int
    mask: str = "full"
    batch: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2

    def __str__(self) -> str:
        return f"{self.q_seq}x{self.k_seq}-d{self.head_dim}-{self.mask}"

    def attention_mask(self, device: str = "cpu") -> AttentionMask:
        mask = make_mask(self.mask, [max(1, 2 * self.k_seq // 3)] + [0] * (self.batch - 1), device)
        if "documents" in self.mask:  # three in the first row, two in the others
            ids = torch.zeros(self.batch, self.k_seq, dtype=torch.long, device=device)
            ids[0, self.k_seq // 4 :] += 1
            ids[:, self.k_seq // 2 :] += 1
            mask = replace(mask, documents=ids)
        if "pattern" in self.mask:
            shape = (self.batch, self.num_heads, self.q_seq, self.k_seq)
            allowed = torch.rand(shape, generator=torch.Generator().manual_seed(0)) < 0.5
            mask = replace(mask, allowed=allowed.to(device))
        return mask.within(max(1, self.k_seq // 3)) if "window" in self.mask else mask


def make_mask(kind: str, lengths: list[int], device: str = "cpu") -> AttentionMask:
    """The mask of a name in `MASKS`."""
    return AttentionMask(
        causal="causal" in kind, lengths=torch.tensor(lengths, device=device) if "padded" in kind else None
    )


def square(length: int, head_dim: int, mask: str) -> Case:
    """Self-attention; the longest with one head, to keep the reference's weights small."""
    case = Case(length, length, head_dim, mask)
    return case if length < 1024 else replace(case, num_heads=1, num_kv_heads=1)


@lru_cache(maxsize=2)
def inputs(case: Case, dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Random queries, keys, values and upstream gradient, the same for every backend."""
    random = torch.Generator().manual_seed(case.q_seq + 7 * case.k_seq + 13 * case.head_dim)
    query = (case.batch, case.num_heads, case.q_seq, case.head_dim)
    key = (case.batch, case.num_kv_heads, case.k_seq, case.head_dim)
    q, k, v, upstream = (torch.randn(s, generator=random).to(device, dtype) for s in (query, key, key, query))
    return q, k, v, upstream


def run_backend(name: str, case: Case, values: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """The output of a backend and its gradients of q, k and v; on CPU flex has the output alone."""
    mask, scoring = case.attention_mask(values[0].device.type), Scoring(case.head_dim**-0.5)
    if name == "flex" and values[0].device.type == "cpu":
        with torch.no_grad():
            return {"out": BACKENDS[name].compute(*values[:3], mask, scoring)}
    q, k, v = (x.detach().clone().requires_grad_() for x in values[:3])
    out = BACKENDS[name].compute(q, k, v, mask, scoring)
    grads = torch.autograd.grad(out, (q, k, v), values[3])
    return dict(zip(("out", "q", "k", "v"), (out.detach(), *grads), strict=True))


@lru_cache(maxsize=2)
def eager_result(case: Case, dtype: torch.dtype, math: torch.dtype, device: str = "cpu") -> dict[str, Tensor]:
    """What eager computes in the dtype `math` on inputs that were rounded to `dtype`."""
    values = tuple(x.to(math) for x in inputs(case, dtype, device))
    return run_backend("eager", case, values)


def scale_of(reference: Tensor) -> float:
    """The largest magnitude; 1 (that of the inputs) where the reference is zero but for rounding.

    So are the gradients of q and k when there is one key: its weight is 1 whatever they are.
    """
    largest = reference.abs().max().item()
    return largest if largest > 1e-6 else 1.0


def error(actual: Tensor, reference: Tensor) -> float:
    """max|a-b| / max|b|."""
    assert actual.shape == reference.shape
    return (actual.double() - reference.double()).abs().max().item() / scale_of(reference)


def assert_within_bf16(actual: Tensor, eager_bf16: Tensor, exact: Tensor, name: str = "") -> None:
    """No worse than the eager arithmetic in the same dtype, measured against float64.

    They round at different places (eager its scores and weights, the fused kernels their unnormalised
    weights), so neither is the truth, and an error up to twice that of eager is rounding; one more rounding
    of the result itself (2^-8 of its size: bf16 keeps 8 bits) is allowed where eager happens to be exact.
    """
    allowed = 2 * error(eager_bf16, exact) + 2**-8
    assert allowed < 0.1, f"{name}: eager in bf16 is too far off to be a yardstick"
    assert error(actual, exact) <= allowed, name
