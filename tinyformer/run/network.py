"""The network of a run, with the weights of its initial checkpoint; its compilation and its attention backends."""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import lightning as L
import torch
from hydra.utils import instantiate
from lightning.pytorch.callbacks import Timer
from omegaconf import DictConfig, OmegaConf

from tinyformer.checkpoint.file import OWN_PREFIXES, require_fitting, start_from
from tinyformer.costs.network import count_costs, uncounted
from tinyformer.data import DataModule, TextTokenizer
from tinyformer.data.batches.windows import Batch
from tinyformer.data.stream import default_cache_dir
from tinyformer.errors import ArgumentError, argument_path
from tinyformer.files import write_whole
from tinyformer.hardware import Pass, can_compile, cpu_name, median_seconds
from tinyformer.measures.capture import running_hooks
from tinyformer.nn import BACKENDS, AttentionMask, BaseAttention, Network, Transformer, kernel_of_layer
from tinyformer.nn.maps import AttentionInputs
from tinyformer.nn.network import heads_pass
from tinyformer.run.settings import Settings
from tinyformer.tasks import Seq2Seq, Task

MIN_SECONDS_TO_COMPILE = 600.0
"""Seconds of training from which compiling on a CPU pays off; it takes up to a minute, and saves 10 % in bf16."""

FLOPS_OF_A_THREAD = 5e10
"""Assumed FLOP/s of a CPU thread in training: a constant, so that a command always leads to the same decision."""

CANDIDATES = ("eager", "sdpa")
"""The backends among which `auto` chooses on a CPU."""

MIN_SPEEDUP, REPEATS = 1.1, 4
"""The factor by which a backend has to be faster than the usual one, a margin for noise, and the factor by which the
time and rounds of the comparison exceed the usual."""

MIN_SECONDS_TO_MEASURE = 60.0
"""Planned training time in seconds from which backends are measured; the measurement takes a second or two."""

MAX_WEIGHTS = 2**26
"""Attention weights of a layer, over all heads and sequences, above which eager would take too long to be measured."""

FORMAT = 1
"""The version of the measurement in cached results; increase it when the measurement changes."""


def starting_network(
    config: DictConfig, tokenizer: TextTokenizer, settings: Settings, task: Task, group: Mapping[str, Any]
) -> Network:
    """Make the network of a run with the weights of its initial checkpoint; Lightning loads a resumed run's weights.

    `group` has the values of the `task` group.
    """
    start = settings.start
    if start is not None:
        unmade = make_network(config, tokenizer, "meta")  # before memory is allocated
        with argument_path(passed={"checkpoint": start.key}):
            require_fitting(unmade, start.checkpoint, OWN_PREFIXES if start.key == "init_from" else "")
    network = make_seeded_network(config, tokenizer)
    if start is not None and not start.is_resumed:
        with argument_path(passed={"checkpoint": start.key}):
            start_from(network, start.checkpoint, start.key == "checkpoint" or start.has_same_readout(group))
    if settings.options.freeze_encoder:
        _freeze_encoder(network)
    require_known_tokens(task, network)
    return network


def _freeze_encoder(network: Network) -> None:
    """Freeze all weights except the readout's."""
    if not isinstance(network, Transformer):
        reason = "trains the readout alone, but the readout of an encoder–decoder is trained with its decoder"
        raise ArgumentError("freeze_encoder", True, reason, {"freeze_encoder": False})
    network.encoder.requires_grad_(False)


def require_known_tokens(task: Task, network: Network) -> None:
    """Refuse special tokens that the vocabulary of a network does not have."""
    if isinstance(task, Seq2Seq):
        with argument_path("model", "special_tokens"):
            task.special_tokens.require_known(network.vocab_size)


def make_seeded_network(config: DictConfig, tokenizer: TextTokenizer | None, further: int = 0) -> Network:
    """The network of a run with random weights, drawn with the seed `config.seed + further`; see `make_network`."""
    L.seed_everything((config.seed + further) % 2**32, verbose=False)
    return make_network(config, tokenizer)


def make_network(config: DictConfig, tokenizer: TextTokenizer | None, device: str = "cpu") -> Network:
    """The network for a tokenizer's vocabulary, or of `model.vocab_size` tokens without a tokenizer.

    On the device "meta" it takes no memory.
    """
    vocab_size, needed = config.model.vocab_size, tokenizer.vocab_size if tokenizer else 0
    if vocab_size is not None and vocab_size < needed:
        reason = f"must be at least {needed}, the size of the tokenizer's vocabulary"
        raise ArgumentError("model.vocab_size", vocab_size, reason, {"vocab_size": needed})
    sized = OmegaConf.merge(config, {"model": {"vocab_size": vocab_size or needed}})
    with torch.device(device):
        return cast(Network, instantiate(sized.network, _convert_="all"))


def decide_compiling(settings: Settings, network: Network, data: DataModule) -> Settings:
    """Decide `compile=auto` on a CPU, and return the settings: long runs of one process in bf16 are compiled.

    Compiling gains 5 % at most in fp32, and takes minutes for batches of different lengths. A resumed run keeps its
    first decision, since compiled sums round differently.
    """
    if settings.options.compile != "auto" or settings.device != "cpu" or settings.dtype != torch.bfloat16:
        return settings
    if not settings.is_one_process or data.row_format.varying_length or uncounted(network):
        return settings
    earlier = settings.resumed_facts.get("is_compiled")
    pays = planned_seconds(network, settings, data) >= MIN_SECONDS_TO_COMPILE if earlier is None else earlier
    if not pays:
        return settings
    print("compile=auto: the network is compiled, which takes up to a minute; compile=false avoids it.", flush=True)
    if can_compile():
        return replace(settings, compile_mode=settings.options.compile_mode)
    print("compile=auto: the network is not compiled, since that fails here; a C++ compiler may be missing.")
    return settings


def planned_seconds(network: Network, settings: Settings, data: DataModule) -> float:
    """An estimate of the seconds of training on a CPU, from the number of tokens and FLOPs per token; 0 if unknown."""
    if uncounted(network):
        return 0.0
    arguments = settings.arguments
    lengths = (arguments.get(name) for name in ("max_steps", "max_epochs"))
    steps, epochs = (math.inf if length in (None, -1) else length for length in lengths)
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
        # Torch compiles a function eight times at most, for all runs of a process, and then runs it uncompiled. Other
        # compiled functions of this process are compiled again at their next call.
        torch.compiler.reset()
        network.compile(**compile_arguments(settings, varies, mask, num_processes))


def compile_arguments(settings: Settings, varies: bool, mask: AttentionMask, num_processes: int) -> dict[str, Any]:
    """The arguments of `torch.compile` for batches with the given mask; `varies` is True if they differ in length.

    If all batches have one shape, `compile_mode=auto` records the kernels of a step as a CUDA graph, which the host
    then launches at once. Each further shape, or number of documents, would need another recording.
    """
    mode = settings.compile_mode
    if mode == "auto":
        is_one_batch = (settings.arguments.get("accumulate_grad_batches") or 1) == num_processes == 1
        repeats = is_one_batch and not varies and mask.documents is None and not settings.is_sharded
        mode = "reduce-overhead" if settings.device == "cuda" and repeats else "default"
    # Without `dynamic` torch compiles twice: for the length of the first batch, then, at the second, for any.
    return {"mode": mode, "dynamic": varies or None}


def choose_kernels(network: Network, settings: Settings, mask: AttentionMask, training: bool) -> list[str]:
    """Choose the attention backend of every layer for the whole run, and return the name of each layer's kernel."""
    with argument_path("network"):
        network.resolve_backends(settings.device, settings.dtype, mask.to(settings.device), training)
    return running_kernels(network, settings, mask, training)


def training_kernels(
    network: Network, settings: Settings, mask: AttentionMask, task: Task, data: DataModule
) -> tuple[list[str], str | None]:
    """Choose the attention kernels of a training run, and return the name of each layer's kernel.

    The second value names the measured backends of the layers whose backend is "auto", as a checkpoint stores these
    names; it is None if `measured_backends` does not measure.
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
    """For each layer, the kernel that the layer's chosen backend runs."""
    device, dtype, mask = settings.device, settings.dtype, mask.to(settings.device)
    layers = zip(network.attentions(), network.attention_masks(mask), strict=True)
    return [kernel_of_layer(layer, device, dtype, own, training=training) for layer, own in layers]


def measured_backends(
    network: Network, settings: Settings, mask: AttentionMask, task: Task, data: DataModule
) -> list[str] | None:
    """For a long run on a CPU, measure which backend is faster in each layer with the backend "auto"; else None.

    The faster backend depends on the processor. A layer's heads compute one batch forward and backward, by eager and by
    sdpa, and the cache folder stores the result for this machine. A resumed run keeps its backends, since others round
    differently. With several processes or `trainer.deterministic=true`, nothing is measured.
    """
    layers = _undecided(network)
    if settings.device != "cpu" or not layers or settings.dtype not in (torch.bfloat16, torch.float32):
        return None
    if settings.is_resumed:
        return _resumed_backends(network, settings, mask)
    if not settings.is_one_process or settings.arguments.get("deterministic"):
        return None
    if planned_seconds(network, settings, data) < MIN_SECONDS_TO_MEASURE:
        return None
    batch = next(iter(data.evaluation_dataloader("validation")))
    with torch.random.fork_rng(devices=[]), torch.autocast("cpu", torch.bfloat16, settings.dtype == torch.bfloat16):
        calls = attention_calls(network, task, batch)
        return [faster_backend(layer, calls.get(layer)) for layer in layers]


def _resumed_backends(network: Network, settings: Settings, mask: AttentionMask) -> list[str] | None:
    """The backends of the resumed run; None if they cannot compute the layers, for example with a new `score`."""
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
    """The inputs of attention in each layer, from one forward pass on a batch."""
    calls: dict[BaseAttention, AttentionInputs] = {}
    hooks = [
        layer.inputs_hook.register_forward_hook(lambda _, args, call, layer=layer: calls.update({layer: call}))
        for layer in network.attentions()
    ]
    with running_hooks(network, hooks):
        task.forward(network, batch)
    return calls


def faster_backend(layer: BaseAttention, call: AttentionInputs | None) -> str:
    """The name of the faster backend of a layer for inputs such as `call`, measured once and then cached on disk.

    It is `layer.resolved`, unmeasured, if sdpa cannot compute the call, or if eager would take too long to measure.
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
    if path.exists():
        return path.read_text(encoding="utf-8")
    name = faster(usual, {name: heads_pass(layer, call, BACKENDS[name]) for name in CANDIDATES}, "cpu")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, name)
    return name


def faster(usual: str, passes: Mapping[str, Pass], device: str) -> str:
    """The name of the fastest pass, if the pass `usual` takes more than `MIN_SPEEDUP` times as long; else `usual`."""
    seconds = median_seconds(passes, device, REPEATS)
    fastest = min(seconds, key=seconds.__getitem__)
    return fastest if seconds[usual] > MIN_SPEEDUP * seconds[fastest] else usual
