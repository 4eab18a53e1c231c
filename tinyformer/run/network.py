"""The network of a run: made from its config, with the weights of the checkpoint that the run begins with."""

from collections.abc import Mapping
from typing import Any, cast

import lightning as L
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from tinyformer.checkpoint.file import OWN_PREFIXES, Checkpoint, require_fitting, start_from
from tinyformer.config.errors import OUT_OF_MEMORY, ConfigError, raising_module
from tinyformer.data import TextTokenizer
from tinyformer.errors import ArgumentError, argument_path
from tinyformer.hardware import free_memory
from tinyformer.nn import LearnedPosition, Network, Transformer
from tinyformer.run.settings import Settings


def starting_network(
    config: DictConfig, tokenizer: TextTokenizer, settings: Settings, task: Mapping[str, Any]
) -> Network:
    """The network of a run, with the weights of the checkpoint it begins with; Lightning loads a resumed run's."""
    start = settings.start
    if start is not None:
        unmade = make_network(config, tokenizer, "meta")  # before memory is allocated
        _require_same_positions(unmade, start.checkpoint)
        with argument_path(passed={"checkpoint": start.key}):
            require_fitting(unmade, start.checkpoint, OWN_PREFIXES if start.key == "init_from" else "")
    network = make_seeded_network(config, tokenizer)
    if start is not None and not start.is_resumed:
        with argument_path(passed={"checkpoint": start.key}):
            start_from(network, start.checkpoint, start.key == "checkpoint" or start.has_same_readout(task))
    if settings.options.freeze_encoder:
        _freeze_encoder(network)
    return network


def _require_same_positions(network: Network, checkpoint: Checkpoint) -> None:
    """Refuse a context that a checkpoint has no learned position vectors for.

    All other positional encodings are computed for any position, or from clipped distances.
    """
    for name, module in network.named_modules():
        weight = checkpoint.weights.get(f"{name}.embedding.weight")
        if isinstance(module, LearnedPosition) and weight is not None and len(weight) != module.max_seq_len:
            reason = f"the run has learned vectors for {len(weight)} positions, and for no others"
            raise ArgumentError("model.max_seq_len", module.max_seq_len, reason, {"model.max_seq_len": len(weight)})


def _freeze_encoder(network: Network) -> None:
    """Train the readout alone, which has to have parameters of its own."""
    if not isinstance(network, Transformer):
        reason = "trains the readout alone, but the readout of an encoder–decoder is trained with its decoder"
        raise ArgumentError("freeze_encoder", True, reason, {"freeze_encoder": False})
    network.encoder.requires_grad_(False)
    if not network.num_parameters():
        reason = "no parameter would be trained, since the readout is the token embedding"
        raise ArgumentError("freeze_encoder", True, reason, {"model.tied_readout": False})


def make_seeded_network(config: DictConfig, tokenizer: TextTokenizer | None, further: int = 0) -> Network:
    """The network of a run, its weights drawn from `seed`, or from one `further` on; see `make_network`."""
    L.seed_everything((config.seed + further) % 2**32, verbose=False)
    network = make_network(config, tokenizer)
    _try_out(network)
    return network


def make_network(config: DictConfig, tokenizer: TextTokenizer | None, device: str = "cpu") -> Network:
    """The network for a tokenizer's vocabulary, or of `model.vocab_size` tokens without a tokenizer.

    On the device "meta" it takes no memory.
    """
    vocab_size, needed = config.model.vocab_size, tokenizer.vocab_size if tokenizer else 0
    if vocab_size is not None and vocab_size < needed:
        reason = f"must be at least {needed}, the size of the tokenizer's vocabulary"
        raise ArgumentError("model.vocab_size", vocab_size, reason, {"vocab_size": needed})
    sized = OmegaConf.merge(config, {"model": {"vocab_size": vocab_size or needed}})
    if device != "meta":
        _require_memory(sized)
    with torch.device(device):
        return cast(Network, instantiate(sized.network, _convert_="all"))


def _require_memory(config: Any) -> None:
    """Refuse a network whose matrices alone do not fit into memory: the system would kill the process."""
    model, free = config.model, free_memory("cpu")
    d_ff = OmegaConf.select(config, "feed_forward.d_ff") or model.d_model
    sizes = [model.vocab_size, model.num_layers, model.d_model, d_ff]
    if free is None or not all(isinstance(size, int) for size in sizes):
        return
    num_bytes = 4 * model.d_model * (model.vocab_size + 2 * model.num_layers * d_ff)
    if num_bytes > free:
        raise ConfigError(
            f"model: its matrices take {num_bytes / 1e9:,.0f} GB, and {free / 1e9:,.0f} GB of memory are free; smaller "
            f"model.d_model, model.num_layers, model.vocab_size or feed_forward.d_ff take less."
        )


@torch.no_grad()
def _try_out(network: Network) -> None:
    """Run a network on two tokens, to refuse parts that do not fit together."""
    was_training = network.training
    tokens = torch.zeros(1, min(2, network.max_seq_len), dtype=torch.long)
    try:
        network.eval()(*[tokens] * len(network.stacks()))
    except ArgumentError:
        return  # a backend that does not run here, which the run reports with its key
    except (RuntimeError, IndexError) as error:
        if OUT_OF_MEMORY.search(str(error)) or not raising_module(error).startswith(("torch.", "tinyformer.")):
            raise
        problem = f"the parts of the network do not fit together ({error})"
        raise ConfigError(
            f"{problem}; all of their sizes follow from the model group, such as model.d_model."
        ) from error
    finally:
        network.train(was_training)
