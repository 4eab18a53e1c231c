"""Fully sharded data parallelism: each process has a part of every weight, gradient and state of the optimizer.

It is stage 3 of ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054) with torch's `fully_shard` (Zhao et al. 2023, arXiv
2304.11277): the weights of a block are gathered for its forward pass and for its backward pass.
"""

import copy
import itertools
import os
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from tinyformer.nn import Network
from tinyformer.training.step import whole

PRECISIONS = ("32-true", "bf16-mixed", "bf16-true")
"""The precisions of sharded training; Lightning has no loss scaling and no fp64 for sharded weights."""

_runs = itertools.count()


class FullyShardedStrategy(ModelParallelStrategy):
    """Lightning's strategy for `fully_shard`; its checkpoints are like the checkpoints of one process.

    The first process gathers weights and optimizer state, one tensor at a time. So a run may be resumed with another
    number of processes, or with another strategy.
    """

    lightning_restore_optimizer = True

    def __init__(self) -> None:
        super().__init__(tensor_parallel_size=1, save_distributed_checkpoint=False)

    def _setup_distributed(self) -> None:
        """Use other keys of torch's store for each run in a process, as torch keeps the stores of earlier runs open."""
        environment, self._data_parallel_size = self.cluster_environment, self.num_nodes * self.num_processes
        assert environment is not None
        assert self.accelerator is not None
        self.set_world_ranks()
        self.accelerator.setup_device(self.root_device)
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = environment.main_address, str(environment.main_port)
        place = next(torch.distributed.rendezvous("env://", self.global_rank, self.world_size))
        store = torch.distributed.PrefixStore(f"run {next(_runs)}", place[0])
        group: Any = {"store": store, "rank": self.global_rank, "world_size": self.world_size, "timeout": self._timeout}
        group["device_id"] = None if self.root_device.type == "cpu" else self.root_device
        torch.distributed.init_process_group(self._get_process_group_backend(), **group)
        super()._setup_distributed()  # uses the group

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        return self.checkpoint_io.load_checkpoint(checkpoint_path, weights_only=weights_only)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.lightning_module is not None
        return whole(self.lightning_module.state_dict(keep_vars=True), self.is_global_zero, torch.device("cpu"))

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        own, loaded = self.lightning_module.state_dict(), checkpoint["state_dict"]
        parts = {name: part_as(own[name], value) if name in own else value for name, value in loaded.items()}
        self.lightning_module.load_state_dict(parts, strict=strict)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        state = super(ModelParallelStrategy, self).optimizer_state(optimizer)
        return whole(state, self.is_global_zero, torch.device("cpu"))

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            parts, states = getattr(optimizer, "optimizers", [optimizer]), state.get("optimizers", [state])
            for part, of_part in zip(parts, states, strict=True):
                weights = [weight for group in part.param_groups for weight in group["params"]]
                for number, values in of_part["state"].items():
                    values.update({name: part_as(weights[number], value) for name, value in values.items()})
            optimizer.load_state_dict(state)


def shard(network: Network, mesh: DeviceMesh, precision: str) -> None:
    """Shard a network in place: each process keeps some rows of every weight.

    The weights of a block are gathered when the block runs. All other weights, such as embeddings, stay gathered for a
    whole step. In mixed precision, a block's weights are gathered in bf16, and its gradients are summed in fp32.
    """
    policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    if precision == "bf16-mixed":
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    for block in network.separate_blocks():
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(network, mesh=mesh, reshard_after_forward=False)


def part_as(own: Any, value: Any) -> Any:
    """Shard the tensor `value` like `own`, without communication; a value of another shape is returned unchanged."""
    if not isinstance(own, DTensor) or not isinstance(value, Tensor) or own.shape != value.shape:
        return value
    first = own.device_mesh.get_local_rank() * -(-len(value) // own.device_mesh.size())  # as `torch.chunk` divides rows
    part = value[first : first + len(own.to_local())].to(own.device, copy=True)
    layout: Any = {"shape": own.shape, "stride": own.stride()}
    return DTensor.from_local(part, own.device_mesh, own.placements, run_check=False, **layout)


def without_weights(network: Network) -> Network:
    """A copy whose weights are on the device "meta", without memory."""
    return _with_weights(network, {name: weight.detach().to("meta") for name, weight in network.named_parameters()})


def _with_weights(network: Network, weights: Mapping[str, Tensor]) -> Network:
    """A copy of a network with other weights, given by name."""
    named = network.named_parameters()
    memo: dict[int, Any] = {id(old): nn.Parameter(weights[name], old.requires_grad) for name, old in named}
    return copy.deepcopy(network, memo)  # uses the new weights in place of copies


def whole_copy(network: Network, blank: Network, is_kept: bool) -> Network | None:
    """A copy of a sharded network with whole weights, or None without `is_kept`; all processes call it together.

    `blank` is the copy without weights that was made before the network was sharded.
    """
    weights = whole(dict(network.named_parameters()), is_kept)
    if not is_kept:
        return None
    device = next(iter(weights.values())).device  # to which the buffers were moved, too
    return _with_weights(blank, weights).train(network.training).to(device)
