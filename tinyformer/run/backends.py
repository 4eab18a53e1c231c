"""The attention backend of each layer of a run."""

import contextlib
import hashlib
import json

import torch

from tinyformer.batch import Batch
from tinyformer.data import DataModule
from tinyformer.data.store import default_cache_dir
from tinyformer.errors import argument_path
from tinyformer.files import write_whole
from tinyformer.hardware import cpu_name
from tinyformer.measures.capture import running_hooks
from tinyformer.nn import BACKENDS, AttentionMask, BaseAttention, Network, kernel_of_layer
from tinyformer.nn.maps import AttentionInputs
from tinyformer.nn.timing import CANDIDATES, faster, heads_pass
from tinyformer.run.network import planned_seconds
from tinyformer.run.settings import Settings
from tinyformer.tasks import Task

MIN_SECONDS = 60.0
"""Planned training time from which backends are measured, which takes a second or two."""

MAX_WEIGHTS = 2**26
"""Attention weights of a layer, over all heads and sequences, above which eager would take too long to be measured."""

FORMAT = 1
"""Increase it when backends are measured in another way."""


def choose_kernels(network: Network, settings: Settings, mask: AttentionMask, training: bool) -> list[str]:
    """Choose the attention backend of every layer for the whole run, and name the kernel that runs in each."""
    with argument_path("network"):
        network.resolve_backends(settings.device, settings.dtype, mask.to(settings.device), training)
    return running_kernels(network, settings, mask, training)


def training_kernels(
    network: Network, settings: Settings, mask: AttentionMask, task: Task, data: DataModule
) -> tuple[list[str], str | None]:
    """The kernels of training, as `choose_kernels` gives them or as measured.

    The second value names the backends of the layers that are "auto", as a checkpoint stores them, if they were
    measured, now or before.
    """
    kernels = choose_kernels(network, settings, mask, training=True)
    names = measured_backends(network, settings, mask, task, data)
    if names is None:
        return kernels, None
    for layer, name in zip(_undecided(network), names, strict=True):
        layer.resolved = BACKENDS[name]
    return running_kernels(network, settings, mask, training=True), "-".join(names)


def _undecided(network: Network) -> list[BaseAttention]:
    return [layer for layer in network.attentions() if layer.backend == "auto"]


def running_kernels(network: Network, settings: Settings, mask: AttentionMask, training: bool) -> list[str]:
    """The kernel that the chosen backend of each layer runs."""
    device, dtype, mask = settings.device, settings.dtype, mask.to(settings.device)
    layers = zip(network.attentions(), network.attention_masks(mask), strict=True)
    return [kernel_of_layer(layer, device, dtype, own, training=training) for layer, own in layers]


def measured_backends(
    network: Network, settings: Settings, mask: AttentionMask, task: Task, data: DataModule
) -> list[str] | None:
    """The fastest backend of each layer that is "auto" in a long run on a CPU, by measurement; None for other runs.

    Which is faster depends on the processor. A layer's heads compute one batch forward and backward, by eager and
    by sdpa; the cache folder keeps which was faster on this machine. A resumed run goes on as it began, since backends
    round differently; several processes and `trainer.deterministic=true` take the usual choice.
    """
    layers = _undecided(network)
    if settings.device != "cpu" or not layers or settings.dtype not in (torch.bfloat16, torch.float32):
        return None
    if settings.is_resumed:
        return _resumed_backends(network, settings, mask)
    if not settings.is_one_process or settings.arguments.get("deterministic"):
        return None
    if planned_seconds(network, settings, data) < MIN_SECONDS:
        return None
    batch = next(iter(data.evaluation_dataloader("validation")))
    with torch.random.fork_rng(devices=[]), torch.autocast("cpu", torch.bfloat16, settings.dtype == torch.bfloat16):
        calls = attention_calls(network, task, batch)
        return [faster_backend(layer, calls.get(layer)) for layer in layers]


def _resumed_backends(network: Network, settings: Settings, mask: AttentionMask) -> list[str] | None:
    """The backends of the resumed run; None if they cannot compute the layers, which may have other scores now."""
    names = (settings.resumed_facts.get("backends") or "").split("-")
    cases = [
        layer.planned_case(settings.device, settings.dtype, own, network.max_seq_len)
        for layer, own in zip(network.attentions(), network.attention_masks(mask), strict=True)
        if layer.backend == "auto"
    ]
    if len(names) != len(cases) or not set(names) <= set(CANDIDATES):
        return None
    return None if any(BACKENDS[name].refusal(case) for name, case in zip(names, cases, strict=True)) else names


@torch.no_grad()
def attention_calls(network: Network, task: Task, batch: Batch) -> dict[BaseAttention, AttentionInputs]:
    """The inputs of attention in each layer as the network reads a batch."""
    calls: dict[BaseAttention, AttentionInputs] = {}
    hooks = [
        layer.inputs_hook.register_forward_hook(lambda _, args, call, layer=layer: calls.update({layer: call}))
        for layer in network.attentions()
    ]
    with running_hooks(network, hooks):
        task.forward(network, batch)
    return calls


def faster_backend(layer: BaseAttention, call: AttentionInputs | None) -> str:
    """The name of the faster backend of a layer for calls such as this one, kept in the cache folder.

    It is the usual one where sdpa cannot compute the call, or where eager takes too long to be measured.
    """
    assert layer.resolved is not None
    usual = layer.resolved.name
    if call is None or usual not in CANDIDATES:
        return usual
    q, k, v = call.qkv
    case = layer.planned_case("cpu", q.dtype, call.mask, k.shape[2])
    num_weights = q.shape[:3].numel() * k.shape[2]
    if num_weights > MAX_WEIGHTS or any(BACKENDS[name].refusal(case) for name in CANDIDATES):
        return usual
    shapes = [list(x.shape) for x in (q, k, v)]
    machine = [cpu_name(), torch.get_num_threads(), torch.__version__, FORMAT]
    key = json.dumps([machine, usual, type(layer).__name__, sorted(case.features), str(q.dtype), shapes])
    path = default_cache_dir() / "backends" / hashlib.sha256(key.encode()).hexdigest()
    with contextlib.suppress(OSError, ValueError):  # none yet, or damaged
        if (known := path.read_text(encoding="utf-8")) in CANDIDATES:
            return known
    name = faster(usual, {name: heads_pass(layer, call, BACKENDS[name]) for name in CANDIDATES}, "cpu")
    with contextlib.suppress(OSError):  # a folder that cannot be written to
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, name)
    return name
