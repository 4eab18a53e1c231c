"""The modules, masks and inputs on which the doctor runs a backend, and the errors against eager in float64."""

import contextlib
import copy
import functools
import os
import platform
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from tinyformer import nn
from tinyformer.hardware import cpu_name, keep_freed_memory, profiled_events
from tinyformer.nn import AttentionMask, BaseAttention, KernelRequirements, Scoring
from tinyformer.nn.kernels.choose import Backend
from tinyformer.nn.kernels.eager import eager
from tinyformer.nn.maps import kernel_among
from tinyformer.programs.doctor.variants import DTYPE_NAMES, MASK_NAMES, MAX_SEQ, NUM_HEADS, Variant

DTYPES = dict(zip(DTYPE_NAMES, (torch.float32, torch.bfloat16), strict=True))


@dataclass(frozen=True)
class Shape:
    """The sizes of a batch: tokens per row, dimensions per head, and rows; there are `NUM_HEADS` heads."""

    seq: int
    head_dim: int
    batch: int

    @property
    def d_model(self) -> int:
        return NUM_HEADS * self.head_dim


SHAPE, FULL_SHAPE = Shape(256, 32, 2), Shape(MAX_SEQ, 64, 2)
"""The default and the `--full` shape. Most errors show at any length; the full shape has several blocks of keys, across
which a fused kernel rescales its sums."""


def _lengths(rows: int, seq: int, device: torch.device) -> torch.Tensor:
    """The number of keys in each row that are not padding: two thirds of the keys, but no key in the last row."""
    return torch.tensor([2 * seq // 3] * (rows - 1) + [0], device=device)


def _documents(rows: int, seq: int, device: torch.device) -> torch.Tensor:
    """Three or four documents per row, with different borders in each row."""
    shifts = torch.arange(rows, device=device).unsqueeze(1) * seq // 7
    return (torch.arange(seq, device=device) + shifts) * 3 // seq


MakeMask = Callable[[int, int, torch.device], AttentionMask]
"""A function that makes the mask of a batch from its number of rows, its number of keys and the device."""

MASKS: dict[str, MakeMask] = {
    "full": lambda rows, seq, device: AttentionMask(),
    "causal": lambda rows, seq, device: AttentionMask(causal=True),
    "padded": lambda rows, seq, device: AttentionMask(lengths=_lengths(rows, seq, device)),
    "causal+padded": lambda rows, seq, device: AttentionMask(causal=True, lengths=_lengths(rows, seq, device)),
    "documents": lambda rows, seq, device: AttentionMask(causal=True, documents=_documents(rows, seq, device)),
}
"""The masks by name. Documents also have a causal mask, as in the training of language models."""
assert tuple(MASKS) == MASK_NAMES


def factory_of(variant: Variant) -> Callable[..., BaseAttention]:
    """A function of `d_model` and `num_heads` that makes the attention module of a variant."""
    options = dict(variant.options)
    if "position" in options:
        kind, arguments = options["position"]
        options["position"] = functools.partial(getattr(nn, kind), **arguments)
    return functools.partial(getattr(nn, variant.attention), **options)


def make_module(variant: Variant, shape: Shape) -> BaseAttention:
    """A random attention module, with all parameters away from special values such as 0 or 1."""
    torch.manual_seed(0)
    module = factory_of(variant)(shape.d_model, NUM_HEADS)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return module


SEEDS = (1, 2, 3)
"""Seeds of the inputs. Backends are compared on the inputs of the first seed; all seeds give the typical size of each
gradient. A gradient whose terms cancel, such as that of differential attention's λ, may be small by chance, which would
make its relative error large."""

ILL_CONDITIONED = {torch.float32: 2.5e-5, torch.bfloat16: 0.05, torch.float64: torch.inf}
"""By dtype, the largest error of eager in a parameter's gradient at which backends are tested by it. If it is exceeded,
the terms of the gradient cancel, as for differential attention's λ over long rows in bf16, and errors are rounding."""

ORACLE = Backend("oracle", eager, lambda case: None)
"""Eager as the definition of attention; `BACKENDS["eager"]` is tested like the others."""


@dataclass(frozen=True)
class Solution:
    """The output of a backend, and the gradients of inputs and parameters; empty if they were not computed."""

    output: Tensor
    gradients: tuple[Tensor, ...]

    def gradient_errors(self, exact: "Solution", sizes: Iterable[float]) -> list[float]:
        triples = zip(self.gradients, exact.gradients, sizes, strict=False)
        return [relative_error(a, b, size) for a, b, size in triples]


@dataclass(frozen=True)
class Errors:
    """Largest relative errors: of the output, of all gradients, and of well-conditioned gradients.

    Without gradients the last two are None; see `ILL_CONDITIONED`.
    """

    output: float
    gradient: float | None
    counted_gradient: float | None


def relative_error(actual: Tensor, exact: Tensor, size: float | None = None) -> float:
    """max|actual - exact| / size, by default with the size max|exact|; not divided if the size is 0 up to rounding."""
    size = exact.abs().max().item() if size is None else size
    return (actual.double() - exact).abs().max().item() / (size if size > 1e-6 else 1.0)


class Problem:
    """An attention module, a mask and inputs, the same for every backend.

    In bf16 the module runs under autocast, as in training: parameters and inputs stay fp32, so one solution in
    float64 is exact for every dtype. With `cross`, the module attends to another sequence, 1.5 times as long, and the
    mask applies to that sequence.
    """

    def __init__(
        self, module: BaseAttention, make_mask: MakeMask, shape: Shape, device: torch.device, cross: bool = False
    ) -> None:
        self.module, self.device, self.cross = module.to(device), device, cross
        k_seq = 3 * shape.seq // 2 if cross else shape.seq
        self.mask: AttentionMask = make_mask(shape.batch, k_seq, device).within(module.window)
        queries, keys = (shape.batch, shape.seq, shape.d_model), (shape.batch, k_seq, shape.d_model)
        self._sizes = [queries, queries, keys] if cross else [queries, queries]
        _, *self.inputs = self._drawn(SEEDS[0])
        # Eager in the same dtype, which the other backends are compared with.
        self._eager = functools.cache(lambda dtype: self.solve(ORACLE, dtype))
        self.eager_errors = functools.cache(lambda dtype: self.errors(ORACLE, self._eager(dtype), dtype))

    def _drawn(self, seed: int) -> list[Tensor]:
        random = torch.Generator().manual_seed(seed)
        return [torch.randn(size, generator=random).to(self.device) for size in self._sizes]

    def case(self, dtype: torch.dtype, gradient: bool = True) -> KernelRequirements:
        """The requirements of the module's call that a kernel has to meet; with `gradient`, a backward pass follows."""
        module, (q_seq, k_seq) = self.module, (self.inputs[0].shape[1], self.inputs[-1].shape[1])
        sizes = (q_seq, module.head_dim), (k_seq, module.head_dim), (k_seq, module.v_head_dim)
        q, k, v = (
            torch.zeros(1, module.num_heads, *size, device=self.device, requires_grad=gradient) for size in sizes
        )
        scoring = module.scoring(q[:, :, :1], 1, module.planned_mask(self.mask, q[:, :, :1]), self.cross)
        case = KernelRequirements.of(q, k, v, self.mask, scoring, module.dropout, gradient)
        return case._replace(dtype=dtype)

    def solve(self, backend: Backend, dtype: torch.dtype, gradient: bool = True, seed: int = SEEDS[0]) -> Solution:
        """The output and the gradients of a backend; the backend is called even for a case that it would refuse."""
        module = self.module if dtype != torch.float64 else copy.deepcopy(self.module).double()
        module.resolved = backend
        upstream, *drawn = self._drawn(seed)
        inputs = [x.to(torch.promote_types(x.dtype, dtype)).requires_grad_(gradient) for x in drawn]
        torch.manual_seed(seed)
        with torch.set_grad_enabled(gradient), arithmetic(self.device, dtype):
            context = {"context": inputs[1], "context_mask": self.mask} if self.cross else {}
            output = module(inputs[0], self.mask, **context)
        leaves = [*inputs, *module.parameters()] if gradient else []
        upstream = upstream.to(output.dtype)
        # A parameter that a backend ignores gets a gradient of zero, which counts as an error.
        gradients = torch.autograd.grad(output, leaves, upstream, materialize_grads=True) if gradient else ()
        return Solution(output.detach(), gradients)

    def errors(self, backend: Backend, solution: Solution, dtype: torch.dtype) -> Errors:
        exact = self.exact if not self.module.dropout else self._exact_without(self._dropped(backend, dtype))
        gradients = solution.gradient_errors(exact, self.gradient_sizes)
        rounding = self._eager(dtype).gradient_errors(self.exact, self.gradient_sizes)
        rounding[: len(self.inputs)] = [0.0] * len(self.inputs)  # the gradients of inputs always count
        pairs = zip(gradients, rounding, strict=False)
        counted = [error for error, own in pairs if own <= ILL_CONDITIONED[dtype]]
        output = relative_error(solution.output, exact.output)
        return Errors(output, max(gradients, default=None), max(counted, default=None))

    @functools.cached_property
    def exact(self) -> Solution:
        return self.solve(ORACLE, torch.float64)

    @functools.cached_property
    def gradient_sizes(self) -> list[float]:
        """The largest absolute value of each gradient, over the inputs of all seeds."""
        solutions = [self.exact, *(self.solve(ORACLE, torch.float64, seed=seed) for seed in SEEDS[1:])]
        by_leaf = zip(*(solution.gradients for solution in solutions), strict=True)
        return [max(gradient.abs().max().item() for gradient in gradients) for gradients in by_leaf]

    def _exact_without(self, dropped: Tensor) -> Solution:
        """The solution in float64 with the `dropped` attention weights set to 0 and all other weights rescaled."""
        scale = 1 - self.module.dropout

        def compute(
            q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scoring: Scoring, dropout: float = 0.0
        ) -> Tensor:
            with_dropout = replace(scoring, reweigh=lambda weights, grid: weights.masked_fill(dropped, 0.0) / scale)
            return eager(q, k, v, mask, with_dropout)

        return self.solve(replace(ORACLE, compute=compute), torch.float64)

    def _dropped(self, backend: Backend, dtype: torch.dtype) -> Tensor:
        """A mask of the attention weights that a backend drops with the first seed.

        If the values are unit vectors, the output shows the weights. A kernel's random numbers do not depend on the
        values, so `solve` drops the same weights with this seed.
        """
        is_zero: list[Tensor] = []

        def compute(
            q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scoring: Scoring, dropout: float = 0.0
        ) -> Tensor:
            units = torch.eye(v.shape[2], device=v.device, dtype=v.dtype).split(v.shape[3], dim=1)
            for unit in units:
                values = torch.zeros_like(v)
                values[..., : unit.shape[1]] = unit
                torch.manual_seed(SEEDS[0])
                is_zero.append(backend.compute(q, k, values, mask, scoring, dropout)[..., : unit.shape[1]] == 0)
            return torch.zeros_like(q)

        self.solve(replace(backend, compute=compute), dtype, gradient=False)
        return torch.cat(is_zero, dim=-1)

    def invalid_values(self, solution: Solution) -> str | None:
        """The reason why a solution is invalid at any precision: not finite, or not zero in a row of length zero."""
        values = (solution.output, *solution.gradients)
        if not all(value.isfinite().all() for value in values):
            return "gives values that are not finite"
        if self.mask.lengths is None:
            return None
        empty = self.mask.lengths == 0
        input_gradients = solution.gradients[: len(self.inputs)]
        if any(value[empty].any() for value in (solution.output, *input_gradients)):
            return "gives nonzero values for a row without keys"
        return None


@contextlib.contextmanager
def arithmetic(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Autocast if the dtype is bf16; on a CPU, do not trace FlexAttention, since it is not compiled there."""
    untraced = torch.compiler.set_stance("force_eager") if device.type == "cpu" else contextlib.nullcontext()
    with torch.autocast(device.type, dtype, enabled=dtype == torch.bfloat16), untraced:
        yield


@contextlib.contextmanager
def watched_kernel() -> Iterator[Callable[[], str]]:
    """Profile a `with` statement. It yields a function that, called afterwards, names the kernel of attention."""
    # FlashAttention 2, 3 and 4 share one operator of torch and differ only in their CUDA kernels; flex has no operator.
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    with profile(activities=activities) as watched:
        yield lambda: kernel_among(event.name() for event in profiled_events(watched))


def describe_machine(device: torch.device, full: bool) -> dict[str, Any]:
    """Hardware, versions and settings that the results depend on."""
    return {
        "device": device.type,
        "name": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "full": full,
    }


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence the warnings that a user can do nothing about, and no others."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler writes to stderr whenever it starts and stops
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile", UserWarning)
        # Since torch 2.11. Keeping the events, as it advises, would cost 13 ms for each of a thousand profiles.
        warnings.filterwarnings("ignore", "Warning: Profiler clears events", UserWarning)
        yield


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one thread: processor time of several threads is not comparable, and small matrices gain nothing."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    keep_freed_memory()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
