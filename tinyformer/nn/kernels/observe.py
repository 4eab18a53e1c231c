"""Observing which kernel computes attention, from torch's dispatcher."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

KERNELS = {
    "FlashAttnFwdSm90": "fa3",
    "kernel_cutlass": "fa4",
    "triton_tem": "triton",
    "_scaled_dot_product_flash_attention": "flash",
    "_scaled_dot_product_efficient_attention": "efficient",
    "_scaled_dot_product_cudnn_attention": "cudnn",
    "_scaled_dot_product_fused_attention": "fused",
    "_varlen_attn": "varlen",
}
"""The short names of kernels, by parts of the names of torch's operators and of CUDA kernels. The first three have no
operator of their own; "varlen" is flash over packed sequences."""


def kernel_among(names: Iterable[str]) -> str:
    """The first entry of `KERNELS` that one of these names contains; "math" if none does: plain matrix products."""
    seen = list(names)
    return next((kernel for part, kernel in KERNELS.items() if any(part in name for name in seen)), "math")


class KernelObserver(TorchDispatchMode):
    """Records the attention operators that torch dispatches inside the block.

    Attributes:
        calls: the name of each operator, and the dtype of its queries.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, torch.dtype]] = []

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.calls]

    @property
    def kernel(self) -> str:
        return kernel_among(self.names)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if "scaled_dot_product" in name or "_varlen_attn" in name:
            self.calls.append((name, args[0].dtype))
        return func(*args, **(kwargs or {}))


def running_kernel(call: Callable[[], Any]) -> str:
    """The short name of the kernel that computes attention in a call, see `KERNELS`."""
    with KernelObserver() as observer:
        call()
    return observer.kernel
