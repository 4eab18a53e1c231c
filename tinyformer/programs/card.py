"""Cost card of a variant before it is trained: `tinyformer card attention=mha,gqa model=base`.

Parameters, floating-point operations and KV cache, counted without allocating weights; `costs/network.py` defines
each number, and `costs/memory.py` the numbers of a batch.
"""

import argparse
import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, TypeAlias

from omegaconf import DictConfig, OmegaConf

from tinyformer.config.checks import check_types, check_value
from tinyformer.config.conf import describe_axes
from tinyformer.config.errors import config_keys, exit_code_of
from tinyformer.config.launch import CommandLine, compose_sweep
from tinyformer.errors import argument_path
from tinyformer.programs.console import print_table

CONFIG_NAME = "card"
AXES = ("model", "attention", "cross_attention", "position", "block", "feed_forward", "norm")

Card: TypeAlias = dict[str, Any]
"""The overrides of a variant and the fields of its `Costs`; `batch` and `gpus` have the fields of `BatchCosts` and
`GpuCosts`, or are None."""

GPT2_VOCAB_SIZE = 50_257  # used in place of the tokenizer's vocabulary size where `model.vocab_size` is null

NOTES = f"""\
FLOPs are counted for matrix products in a sequence of T tokens; a multiply-add is 2. Attention is counted as the full
square of T x T pairs, as torch.utils.flop_counter does; a kernel may skip pairs that the causal mask or a window
masks. Training is 3 forward passes. With task=seq2seq, source and target have T tokens each, and "per token" is per
token of both. If model.vocab_size is null, GPT-2's {GPT2_VOCAB_SIZE:,} tokens are counted.
Equal FLOPs are not equal time: many narrow heads take longer than few wide ones, see `tinyformer findings cost`."""

ROWS = (
    ("parameters", "num_parameters"),
    ("  attention", "attention_parameters"),
    ("    weights, without biases", "attention_weights"),
    ("    weights of a layer", "attention_weights_per_layer"),
    ("  feed-forward", "feed_forward_parameters"),
    ("  embeddings", "embedding_parameters"),
    ("FLOPs per token, forward", "flops_per_token"),
    ("  attention projections", "flops_per_token_by_part.attention_projections"),
    ("  attention scores, values", "flops_per_token_by_part.attention_scores_and_values"),
    ("  feed-forward", "flops_per_token_by_part.feed_forward"),
    ("  readout", "flops_per_token_by_part.readout"),
    ("  if masked pairs are skipped", "attended_flops_per_token"),
    ("FLOPs per token, training", "training_flops_per_token"),
    ("KV cache, bytes per token", "cache_bytes_per_token"),
    ("  bytes of T tokens", "cache_bytes"),
    ("  dtype", "cache_dtype"),
    ("  reduction from multi-head", "cache_reduction"),
    ("T, tokens", "seq_len"),
    ("vocabulary, tokens", "vocab_size"),
    ("batch, sequences", "batch.batch"),
    ("  tokens", "batch.tokens"),
    ("  FLOPs of a training step", "batch.training_flops"),
    ("  bytes of a training step", "batch.training_bytes"),
    ("    weights", "batch.weight_bytes"),
    ("    gradients", "batch.gradient_bytes"),
    ("    state of the optimizer", "batch.optimizer_bytes"),
    ("    activations", "batch.activation_bytes"),
    ("  bytes of the KV cache", "batch.cache_bytes"),
    ("GPUs", "gpus.gpus"),
    ("  bytes that each sends in a step, trainer=ddp", "gpus.sent_bytes"),
    ("  bytes that each sends in a step, trainer=fsdp", "gpus.sharded_sent_bytes"),
    ("  bytes of each without activations, trainer=fsdp", "gpus.sharded_bytes"),
    ("    part of the weights", "gpus.sharded_weight_bytes"),
    ("    part of the gradients", "gpus.sharded_gradient_bytes"),
    ("    part of the optimizer's state", "gpus.sharded_optimizer_bytes"),
    ("    whole weights", "gpus.whole_weight_bytes"),
    ("    whole gradients", "gpus.whole_gradient_bytes"),
)
"""The rows of the table from top to bottom: the label and the field of a `Card`."""

BATCH_NOTES = """\
A training step holds weights, gradients and the optimizer's state in fp32, and what the layers store for the backward
pass, in mixed precision with dtype=bf16. Attention is counted as on CUDA, where backend=auto chooses a fused kernel if
one computes the variant. Logits, which are computed in parts, and memory within operations are not included."""

GPU_NOTES = """\
With trainer=ddp each GPU holds all that its batch needs. With trainer=fsdp each GPU holds a part of all weights,
gradients and state. Whole are the weights and gradients outside of the blocks, the weights of two blocks and the
gradients of one block. The first GPU holds all weights while heads are measured and checkpoints are scored. The data
that Muon sends in addition are not counted."""


def main(arguments: Sequence[str]) -> int:
    """Print the cards of the variants that the command line names; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="tinyformer card",
        description="Parameters, floating-point operations and KV cache of a variant.",
        epilog=f"The axes of a network and their choices:\n\n{describe_axes(AXES)}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="as for train.py; KEY=A,B shows both side by side"
    )
    parser.add_argument("--json", action="store_true", help="print JSON only")
    options = parser.parse_intermixed_args(arguments)
    return exit_code_of(lambda: _show(options), CONFIG_NAME)


def _show(options: argparse.Namespace) -> None:
    cards = [make_card(*variant) for variant in compose_sweep(CONFIG_NAME, options.overrides)]
    if options.json:
        print(json.dumps({"cards": cards}, indent=2))
    else:
        _print_table(cards)


def make_card(overrides: Sequence[str], config: DictConfig) -> Card:
    """The card of a variant, given its overrides and its config of the program `card`, including the `hydra` node."""
    # These import torch, which takes seconds; a config that does not compose is reported without it.
    from hydra.utils import instantiate
    from torch import device

    from tinyformer.config.admission import register_score
    from tinyformer.costs.memory import count_batch, count_gpus
    from tinyformer.costs.network import count_costs
    from tinyformer.run.match import match_size

    vocab_size = GPT2_VOCAB_SIZE if config.model.vocab_size is None else config.model.vocab_size
    unresolved: Any = OmegaConf.to_container(config, resolve=False)
    with config_keys(config):
        check_types(config, "network")
        if config.get("match") is not None:
            match_size(config, CommandLine(overrides), vocab_size, CONFIG_NAME)
        with device("meta"):
            register_score(unresolved)
            sized: Any = OmegaConf.merge(config, {"model": {"vocab_size": vocab_size}})
            network = instantiate(sized.network, _convert_="all")
        with argument_path(passed={"cache_dtype": "dtype"}):
            costs = count_costs(network, str(config.dtype))
        card: Card = {"overrides": list(overrides), **asdict(costs), "batch": None, "gpus": None}
        make_network = functools.partial(instantiate, sized.network, _convert_="all")
        counts: dict[str, Callable[..., Any]] = {"batch": count_batch, "gpus": count_gpus}
        for name, count in counts.items():
            if config[name] is not None:
                check_value(count, name, config[name], name)
                check_types(config, "optimizer")
                card[name] = asdict(count(make_network, instantiate(config.optimizer), config[name], config.dtype))
    return card


def _print_table(cards: Sequence[Card]) -> None:
    """Print cards side by side under the overrides in which they differ, with the shared overrides as the title."""
    columns = list(zip(*(card["overrides"] for card in cards), strict=True))
    differing = [column for column in columns if len(set(column)) > 1]
    title = " ".join(column[0] for column in columns if column not in differing)
    names = ["\n".join(column[0].partition("=")[0] for column in differing)]
    names += ["\n".join(column[index].partition("=")[2] for column in differing) for index in range(len(cards))]
    notes = {"": NOTES, "batch": BATCH_NOTES, "gpus": GPU_NOTES}
    given = [group for group in notes if not group or any(card[group] for card in cards)]
    groups = {field: field.partition(".")[0] for _, field in ROWS}
    shown = [(label, field) for label, field in ROWS if groups[field] in given or groups[field] not in notes]
    rows = [[label, *(_shown(card, field) for card in cards)] for label, field in shown]
    print_table(names, rows, title=title, show_header=bool(differing))
    print(*(notes[group] for group in given), sep="\n")


def _shown(card: Card, field: str) -> str:
    """The text of a field of a card."""
    group, _, name = field.rpartition(".")
    value = card[group].get(name) if group else card[name]
    if isinstance(value, float):
        return f"{value:.2f}x" if name == "cache_reduction" else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else value or ""
