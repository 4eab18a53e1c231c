"""How far a backend's result is from the truth, which is eager's in float64, and which kernel made it."""

import contextlib
import copy
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from tinyformer.doctor.cases import MASKS, Shape, Variant
from tinyformer.nn import AttentionCase, AttentionMask, Scoring, backends
from tinyformer.nn.support import Backend, features_of

SEED = 1

ILL_CONDITIONED = {torch.float32: 2.5e-5, torch.bfloat16: 0.05}
"""Where eager's own arithmetic is off by more, a gradient is a sum of terms that cancel, such as that of differential
attention's λ over long rows in bf16: it is rounding, and tells nothing of a kernel. It does in fp32."""

ORACLE = Backend("oracle", backends.eager, lambda case: None)
"""Not the table's eager, which is examined like the others."""


@dataclass(frozen=True)
class Solution:
    """What a backend made of a problem: the output, and the gradients of inputs and parameters if asked for."""

    output: Tensor
    gradients: tuple[Tensor, ...]

    def errors(self, exact: "Solution", telling: Iterable[bool]) -> "Errors":
        """The distance from the exact one, given which gradients tell of a kernel."""
        gradients = self.gradient_errors(exact)
        told = [error for tells, error in zip(telling, gradients, strict=False) if tells]
        return Errors(relative_error(self.output, exact.output), max(gradients, default=None), max(told, default=None))

    def gradient_errors(self, exact: "Solution") -> list[float]:
        """The distance of each gradient from the exact one."""
        return [relative_error(a, b) for a, b in zip(self.gradients, exact.gradients, strict=False)]


@dataclass(frozen=True)
class Errors:
    """max|a - b| / max|b| of the output, and the largest of the gradients' if there are any.

    Args:
        output: of the output.
        gradient: of all gradients.
        telling_gradient: of those that tell of a kernel, see `ILL_CONDITIONED`.
    """

    output: float
    gradient: float | None
    telling_gradient: float | None


def relative_error(actual: Tensor, exact: Tensor) -> float:
    """max|a - b| / max|b|."""
    return ((actual.double() - exact).abs().max() / exact.abs().max()).item()


class Problem:
    """An attention, a mask and their inputs: the same for every backend.

    In bf16 it is computed as a model trains, under autocast: parameters and inputs are fp32, so one result in float64
    is the truth for every dtype.

    Args:
        variant: the attention.
        mask: a name in `MASKS`.
        shape: the sizes.
        device: where.
    """

    def __init__(self, variant: Variant, mask: str, shape: Shape, device: torch.device) -> None:
        shape = variant.shape(shape)
        k_seq = 3 * shape.seq // 2 if variant.crosses else shape.seq
        self.module, self.device, self.crosses = variant.module(shape).to(device), device, variant.crosses
        self._eager_errors: dict[torch.dtype, Errors] = {}
        self._tells: dict[torch.dtype, list[bool]] = {}
        self.mask: AttentionMask = MASKS[mask](shape.batch, k_seq, device).within(self.module.window)
        queries, keys = (shape.batch, shape.seq, shape.d_model), (shape.batch, k_seq, shape.d_model)
        self.upstream = torch.randn(queries).to(device)
        self.inputs = [torch.randn(size).to(device) for size in ([queries, keys] if self.crosses else [queries])]

    def case(self, dtype: torch.dtype, gradient: bool = True) -> AttentionCase:
        """What it asks of a backend."""
        module = self.module
        q = torch.zeros(1, module.num_heads, 1, module.head_dim, device=self.device, requires_grad=gradient)
        _, scoring = module.scoring(q, 1, self.mask, self.crosses)
        q_seq, k_seq = self.inputs[0].shape[1], self.inputs[-1].shape[1]
        uneven = module.head_dim != module.v_head_dim
        features = features_of(self.mask, scoring, q_seq, k_seq, module.dropout > 0, gradient, uneven)
        return AttentionCase(
            self.device.type, dtype, max(module.head_dim, module.v_head_dim), features, max(q_seq, k_seq)
        )

    def solve(self, backend: Backend, dtype: torch.dtype, gradient: bool = True) -> Solution:
        """The output of a backend, whatever it refuses, and the gradients."""
        module = self.module if dtype != torch.float64 else copy.deepcopy(self.module).double()
        module.resolved = backend
        inputs = [x.to(torch.promote_types(x.dtype, dtype)).requires_grad_(gradient) for x in self.inputs]
        torch.manual_seed(SEED)
        with torch.set_grad_enabled(gradient), arithmetic(self.device, dtype):
            output = module(
                inputs[0],
                self.mask,
                context=inputs[1] if self.crosses else None,
                context_mask=self.mask if self.crosses else None,
            )
        leaves = [*inputs, *module.parameters()] if gradient else []
        upstream = self.upstream.to(output.dtype)
        # What a backend ignores gets a gradient of zero, which is an error like others.
        gradients = torch.autograd.grad(output, leaves, upstream, materialize_grads=True) if gradient else ()
        return Solution(output.detach(), gradients)

    def errors(self, backend: Backend, solution: Solution, dtype: torch.dtype) -> Errors:
        """Those of a backend's solution."""
        exact = self.exact if not self.module.dropout else self._exact_without(self._dropped(backend, dtype))
        return solution.errors(exact, self._telling(dtype))

    def _telling(self, dtype: torch.dtype) -> list[bool]:
        """Which gradients tell of a kernel in this dtype; those of the inputs always do."""
        if dtype not in self._tells:
            rounded, exact = self.solve(ORACLE, dtype), self.solve(ORACLE, torch.float64)
            errors = enumerate(rounded.gradient_errors(exact))
            limit = ILL_CONDITIONED[dtype]
            self._tells[dtype] = [index < len(self.inputs) or error <= limit for index, error in errors]
        return self._tells[dtype]

    @functools.cached_property
    def exact(self) -> Solution:
        """The truth."""
        return self.solve(ORACLE, torch.float64)

    def eager_errors(self, dtype: torch.dtype) -> Errors:
        """Those of the arithmetic as it is written, in the same dtype: the yardstick."""
        if dtype not in self._eager_errors:
            self._eager_errors[dtype] = self.errors(ORACLE, self.solve(ORACLE, dtype), dtype)
        return self._eager_errors[dtype]

    def _exact_without(self, dropped: Tensor) -> Solution:
        """The truth for weights of which these are dropped, and the others scaled as dropout does."""
        share = 1 - self.module.dropout

        def compute(
            q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scoring: Scoring, dropout: float = 0.0
        ) -> Tensor:
            thinned = replace(scoring, reweigh=lambda weights, grid: weights.masked_fill(dropped, 0.0) / share)
            return backends.eager(q, k, v, mask, thinned)

        return self.solve(replace(ORACLE, compute=compute), torch.float64)

    def _dropped(self, backend: Backend, dtype: torch.dtype) -> Tensor:
        """Which weights a backend drops under the seed: it is given unit vectors for values, and returns its weights.

        Kernels draw alike whatever the values hold, so these are the weights that it dropped before.
        """
        found: list[Tensor] = []

        def compute(
            q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scoring: Scoring, dropout: float = 0.0
        ) -> Tensor:
            units = torch.eye(v.shape[2], device=v.device, dtype=v.dtype).split(v.shape[3], dim=1)
            for unit in units:
                values = torch.zeros_like(v)
                values[..., : unit.shape[1]] = unit
                torch.manual_seed(SEED)
                found.append(backend.compute(q, k, values, mask, scoring, dropout)[..., : unit.shape[1]] == 0)
            return torch.zeros_like(q)

        self.solve(replace(backend, compute=compute), dtype, gradient=False)
        return torch.cat(found, dim=-1)

    def row_without_keys(self, solution: Solution) -> str | None:
        """What is wrong with a row of length zero, if the mask has one: there all must be zero, gradients too."""
        values = (solution.output, *solution.gradients)
        if not all(value.isfinite().all() for value in values):
            return "gives values that are not finite"
        if self.mask.lengths is None:
            return None
        empty = self.mask.lengths == 0
        of_inputs = solution.gradients[: len(self.inputs)]
        if any(value[empty].any() for value in (solution.output, *of_inputs)):
            return "gives a row without keys something else than zeros"
        return None


@contextlib.contextmanager
def arithmetic(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Autocast to a lower dtype than the parameters'; on CPU without tracing what flex would not compile anyway."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.autocast(device.type, dtype, enabled=dtype == torch.bfloat16))
        if device.type == "cpu":
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


KERNELS = {
    "FlashAttnFwdSm90": "fa3",
    "kernel_cutlass": "fa4",
    "triton_tem": "triton",
    "_scaled_dot_product_flash_attention": "flash",
    "_scaled_dot_product_efficient_attention": "efficient",
    "_scaled_dot_product_cudnn_attention": "cudnn",
    "_varlen_attn": "varlen",
}
"""Parts of the names of torch's operators and of CUDA's kernels, and what to call them. Where none ran, matrix products
did: "math"."""


@contextlib.contextmanager
def watched_kernel() -> Iterator[Callable[[], str]]:
    """Watch a block through torch's profiler; the function tells afterwards which kernel computed attention."""
    # CUDA's own kernels tell FlashAttention 2, 3 and 4 apart, which are one operator; flex is none at all.
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    with profile(activities=activities) as watched:
        yield lambda: kernel_among(event.name() for event in profiled_events(watched))


def profiled_events(watched: profile) -> list[Any]:
    """What torch's profiler saw, as it comes: making a tree of it (`watched.events()`) takes longer than the pass."""
    assert watched.profiler is not None
    assert watched.profiler.kineto_results is not None
    return watched.profiler.kineto_results.events()


def kernel_among(names: Iterable[str]) -> str:
    """The name in `KERNELS` of the most telling of these."""
    ran = list(names)
    return next((kernel for part, kernel in KERNELS.items() if any(part in name for name in ran)), "math")
