"""The decision to compile the network of a run, and the arguments of `torch.compile`."""

import math
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch.callbacks import Timer

from tinyformer.costs.network import count_costs, uncounted
from tinyformer.data import DataModule
from tinyformer.hardware import can_compile
from tinyformer.nn import AttentionMask, Network
from tinyformer.run.settings import Settings

MIN_SECONDS = 600.0
"""Training time from which compiling on a CPU pays: it takes up to a minute, and saves a tenth or more in bf16."""

FLOPS_OF_A_THREAD = 5e10
"""FLOP/s that training in bf16 on a CPU is planned with: a constant, so that a command is decided alike each time."""

LENGTHS = ("max_steps", "max_epochs")
"""Lightning's arguments for the length of a run; None or -1 for no limit."""


def decide_compiling(settings: Settings, network: Network, data: DataModule) -> Settings:
    """The settings with `compile=auto` decided on a CPU: it compiles long runs of one process in bf16.

    In fp32 it gains 5 % at most, and for batches of different lengths it takes minutes. A resumed run goes on as it
    began, since compiled sums round differently.
    """
    if settings.options.compile != "auto" or settings.device != "cpu" or settings.dtype != torch.bfloat16:
        return settings
    if not settings.is_one_process or data.row_format.varying_length or uncounted(network):
        return settings
    earlier = settings.resumed_facts.get("is_compiled")
    pays = planned_seconds(network, settings, data) >= MIN_SECONDS if earlier is None else earlier
    if not pays:
        return settings
    print("compile=auto: the network is compiled, which takes up to a minute; compile=false does without.", flush=True)
    if can_compile():
        return replace(settings, compile_mode=settings.options.compile_mode)
    print("compile=auto: the network is not compiled, since that fails here; a C++ compiler may be missing.")
    return settings


def planned_seconds(network: Network, settings: Settings, data: DataModule) -> float:
    """About how long training on a CPU will take, from its length and the operations of a token; 0 if unknown."""
    if uncounted(network):
        return 0.0
    arguments = settings.arguments
    steps, epochs = (math.inf if arguments.get(name) in (None, -1) else arguments[name] for name in LENGTHS)
    of_batch, of_epoch = data.batch_size * network.max_seq_len, float(data.splits["train"].num_tokens)
    limit = arguments.get("overfit_batches") or arguments.get("limit_train_batches")
    if limit is not None:  # a number of batches, or a fraction of them
        of_epoch = limit * of_epoch if isinstance(limit, float) else min(limit * of_batch, of_epoch)
    tokens = min(steps * (arguments.get("accumulate_grad_batches") or 1) * of_batch, epochs * of_epoch)
    seconds = tokens * count_costs(network).training_flops_per_token / (FLOPS_OF_A_THREAD * torch.get_num_threads())
    most = Timer(arguments.get("max_time")).time_remaining()
    return seconds if most is None else min(seconds, most)


def compile_network(
    network: Network, settings: Settings, varies: bool, mask: AttentionMask, num_processes: int
) -> None:
    """Compile a network in place, if the settings say so; see `compile_arguments`."""
    if settings.compile_mode is not None:
        # Torch compiles a function eight times at most, then runs it uncompiled; the networks of earlier runs count.
        # What else is compiled in this process is compiled again at its next call.
        torch.compiler.reset()
        network.compile(**compile_arguments(settings, varies, mask, num_processes))


def compile_arguments(settings: Settings, varies: bool, mask: AttentionMask, num_processes: int) -> dict[str, Any]:
    """The arguments of `torch.compile` for batches with such a mask; `varies` says whether they differ in length.

    The mode "auto" records the kernels of a step as CUDA graphs, which the host then launches as one, where all batches
    have one shape: each shape would be recorded anew, and documents differ in number.
    """
    mode = settings.compile_mode
    if mode == "auto":
        is_one_batch = (settings.arguments.get("accumulate_grad_batches") or 1) == num_processes == 1
        repeats = is_one_batch and not varies and mask.documents is None and not settings.is_sharded
        mode = "reduce-overhead" if settings.device == "cuda" and repeats else "default"
    # Without `dynamic` torch compiles twice: for the length of the first batch, then, at the second, for any.
    return {"mode": mode, "dynamic": varies or None}
