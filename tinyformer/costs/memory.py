"""Memory and FLOPs of a training step on a batch, counted without allocating the tensors.

The network, its optimizer and one forward pass run on torch's fake tensors, which have shapes and dtypes but no data.
So the optimizer's state and the tensors that autograd stores for the backward pass are counted, not estimated:

    memory  weights + gradients + state of the optimizer + activations

The weights and their gradients are in fp32, as in mixed precision. Activations are the tensors that layers store; a
tensor that several operations share counts once. Fused attention kernels store queries, keys, values, outputs and one
number for each query and head (Dao et al. 2022, arXiv 2205.14135); the eager kernel also stores the weights of all
query–key pairs. Logits, which are computed in chunks, and memory that an operation frees again are not counted.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tinyformer.costs.network import count_costs, num_bytes
from tinyformer.nn import AttentionMask, EncoderDecoder, Network
from tinyformer.nn.kernels.choose import BACKENDS, Backend, select_backend
from tinyformer.nn.kernels.sdpa import widened
from tinyformer.nn.score import Scoring


@dataclass(frozen=True)
class BatchCosts:
    """FLOPs and memory of a training step on `batch` sequences of T tokens, and the size of their KV cache."""

    batch: int
    tokens: int  # number of tokens in all sequences; in an encoder–decoder, in the targets
    training_flops: int
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int  # of the tensors that layers store for the backward pass
    training_bytes: int  # the sum of the four fields above
    cache_bytes: int  # of all sequences after T tokens


def count_batch(
    make_network: Callable[[], Network],
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    batch: int,
    dtype: str = "bf16",
) -> BatchCosts:
    """The costs of a batch; the factories are called under fake tensors, which take no memory.

    `dtype` is the dtype of activations and of the KV cache: "bf16", as in mixed precision, or "fp32".
    """
    with FakeTensorMode():
        network = make_network().train()
        costs = count_costs(network, dtype)
        parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
        activations = activation_bytes(network, batch, dtype)
        state = _state_bytes(make_optimizer(network), parameters)
        weights, gradients = num_bytes(network.parameters()), num_bytes(parameters)
    return BatchCosts(
        batch=batch,
        tokens=batch * costs.seq_len,
        training_flops=batch * costs.seq_len * costs.training_flops_per_token,
        weight_bytes=weights,
        gradient_bytes=gradients,
        optimizer_bytes=state,
        activation_bytes=activations,
        training_bytes=weights + gradients + state + activations,
        cache_bytes=batch * costs.cache_bytes,
    )


@dataclass(frozen=True)
class GpuCosts:
    """Memory and traffic of each of n GPUs in a training step, in which each GPU has a separate batch.

    With `trainer=ddp`, a GPU holds what `BatchCosts` counts. With `trainer=fsdp`, it holds a shard of every weight,
    gradient and optimizer state (the first GPU's is the largest), and whole weights and gradients of the block in use.
    With ring algorithms, a GPU sends (n - 1) / n of the bytes that are gathered or scattered, and twice as much to sum
    gradients in `ddp`. Gathered weights of blocks may be in bf16; all else is in fp32. If a step accumulates gradients,
    `fsdp` has this traffic for each of the batches whose gradients are accumulated.
    """

    gpus: int
    sent_bytes: int  # with `trainer=ddp`, to reduce the gradients
    sharded_sent_bytes: int  # to gather the weights of a block twice and all others once, and to scatter the gradients
    sharded_weight_bytes: int
    sharded_gradient_bytes: int
    sharded_optimizer_bytes: int
    whole_weight_bytes: int  # of the weights outside of the blocks, and of the largest block and the next
    whole_gradient_bytes: int  # of the weights outside of the blocks, and of the largest block
    sharded_bytes: int  # the sum of the five fields above


def count_gpus(
    make_network: Callable[[], Network],
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    gpus: int,
    dtype: str = "bf16",
) -> GpuCosts:
    """The costs of each of several GPUs, given factories as for `count_batch`.

    Weights of blocks are gathered in `dtype`. The update directions that Muon sends for a matrix are not counted.
    """
    size = 2 if dtype == "bf16" else 4
    with FakeTensorMode():
        network = make_network().train()
        weights = list(network.parameters())
        trained = [weight for weight in weights if weight.requires_grad]
        blocks = sorted(sum(weight.numel() for weight in block.parameters()) for block in network.separate_blocks())
        others, gradients = num_bytes(weights) - 4 * sum(blocks), num_bytes(trained)
        held = {
            "sharded_weight_bytes": 4 * _part(weights, gpus),
            "sharded_gradient_bytes": 4 * _part(trained, gpus),
            "sharded_optimizer_bytes": _state_bytes(make_optimizer(network), trained, gpus),
            "whole_weight_bytes": others + size * sum(blocks[-2:]),
            "whole_gradient_bytes": others + size * sum(blocks[-1:]),
        }
    return GpuCosts(
        gpus=gpus,
        sent_bytes=2 * gradients * (gpus - 1) // gpus,
        sharded_sent_bytes=(2 * size * sum(blocks) + others + gradients) * (gpus - 1) // gpus,
        sharded_bytes=sum(held.values()),
        **held,
    )


def _part(tensors: Iterable[Tensor], gpus: int) -> int:
    """The number of elements in the first GPU's shard of tensors, whose rows are divided among the GPUs."""
    return sum(-(-len(tensor) // gpus) * tensor[0].numel() for tensor in tensors)


def activation_bytes(network: Network, batch: int, dtype: str) -> int:
    """Bytes that layers store for the backward pass of a batch of the longest sequences; the call modifies the network.

    With activation checkpointing, these are the inputs of all layers, and the largest activations of a single layer.
    Copies of weights in bf16 are counted if a layer stores them, but not if only autocast's cache keeps them.
    """
    own = {tensor.untyped_storage()._cdata for tensor in (*network.parameters(), *network.buffers())}
    stored: dict[int, Tensor] = {}
    inputs: list[int] = []
    before: list[int] = []

    def store(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage()._cdata not in own:
            stored.setdefault(tensor.untyped_storage()._cdata, tensor)
        return tensor

    def note_input(layer: nn.Module, arguments: tuple[Any, ...]) -> None:
        inputs.append(num_bytes(arguments[:1]))
        before.append(_bytes(stored.values()))

    ids = torch.zeros(batch, network.max_seq_len, dtype=torch.long)
    recomputes = network.encoder.checkpoint_activations
    _choose_kernels(network)
    for stack in network.stacks():
        stack.checkpoint_activations = False
        for layer in cast(Any, stack.layers):
            layer.register_forward_pre_hook(note_input)
    casts = torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16")
    with torch.autograd.graph.saved_tensors_hooks(store, lambda tensor: tensor), casts:
        if isinstance(network, EncoderDecoder):
            network.decoder(ids, AttentionMask(causal=True), None, network.encode(ids))
        else:
            network.encoder(ids, AttentionMask(causal=True))
    total = _bytes(stored.values())
    if not recomputes:
        return total
    largest = max(after - first for first, after in zip(before, [*before[1:], total], strict=True))
    return before[0] + sum(inputs) + largest


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def _state_bytes(optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor], gpus: int = 1) -> int:
    """Bytes of an optimizer's state, which its first step creates; with several GPUs, of the first GPU's shard."""
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    parts = getattr(optimizer, "optimizers", [optimizer])
    states = [(weight, value) for part in parts for weight in part.state for value in part.state[weight].values()]
    return sum(
        _part([value], gpus) * value.element_size() if value.shape == weight.shape else value.nbytes
        for weight, value in states
        if isinstance(value, Tensor)
    )


def _choose_kernels(network: Network) -> None:
    """Set each layer's backend so that the layer stores on any device what its CUDA kernel would store."""
    fused = Backend("fused", _fused, lambda case: None)
    for layer in network.attentions():
        case = layer.planned_case("cuda", torch.bfloat16, AttentionMask(causal=True), network.max_seq_len)
        name = select_backend("auto", case).name if layer.backend == "auto" else layer.backend
        layer.resolved = BACKENDS["eager"] if name == "eager" else fused


def _fused(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scoring: Scoring, dropout: float = 0.0) -> Tensor:
    # As in `sdpa`, the kernels take queries, keys and values of one size.
    width, v_head_dim = max(q.shape[-1], v.shape[-1]), v.shape[-1]
    out: Tensor = _FusedAttention.apply(*(widened(x, width) for x in (q, k, v)))
    return out[..., :v_head_dim]


class _FusedAttention(torch.autograd.Function):
    """A stand-in for a fused kernel, which allocates the same tensors but computes nothing."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Float[Tensor, "batch num_heads q_seq head_dim"],
        k: Float[Tensor, "batch num_kv_heads k_seq head_dim"],
        v: Float[Tensor, "batch num_kv_heads k_seq head_dim"],
    ) -> Float[Tensor, "batch num_heads q_seq head_dim"]:
        # In memory the heads of a token are side by side, so that the output projection needs no copy.
        out = torch.empty_like(q.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:3], dtype=torch.float32))
        return out
