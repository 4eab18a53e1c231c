"""Cost card of a variant before it is trained: `python -m tinyformer card attention=mha,gqa model=base`.

Parameters, floating-point operations and KV cache, counted without memory for weights; `analysis/costs.py` defines
each figure, and `analysis/memory.py` those of a batch.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeAlias

from omegaconf import DictConfig, OmegaConf
from rich import box
from rich.console import Console
from rich.table import Table

from tinyformer.config.checks import check_types, check_value
from tinyformer.config.errors import config_keys, exit_code_of, option_names
from tinyformer.config.invocation import Invocation, config_dir, describe_axes
from tinyformer.config.sweep import compose_sweep
from tinyformer.errors import ArgumentError, argument_path

CONFIG_DIR, CONFIG_NAME = config_dir(), "card"
AXES = ("model", "attention", "cross_attention", "position", "block", "feed_forward", "norm")

Card: TypeAlias = dict[str, Any]
"""A card as plain containers: the overrides of a variant, the fields of its `Costs`, and in `batch` the fields of its
`BatchCosts`, or None without a batch."""

GPT2_VOCAB_SIZE = 50_257
"""Used in place of the tokenizer's vocabulary size where `model.vocab_size` is null."""

NOTES = f"""\
FLOPs are those of matrix products in a sequence of T tokens; one multiply-add is 2. Attention is counted as the full
square of T x T pairs, as torch.utils.flop_counter does; a kernel may skip pairs that the causal mask or a window
masks. Training is 3 forward passes. With task=seq2seq, source and target have T tokens each, and "per token" is per
token of both. Where model.vocab_size is null, GPT-2's {GPT2_VOCAB_SIZE:,} tokens are counted."""

ROWS: tuple[tuple[str, Callable[[Card], str]], ...] = (
    ("parameters", lambda card: f"{card['num_parameters']:,}"),
    ("  attention", lambda card: f"{card['attention_parameters']:,}"),
    ("    weights, without biases", lambda card: f"{card['attention_weights']:,}"),
    ("    weights of a layer", lambda card: f"{card['attention_weights_per_layer']:,}"),
    ("  feed-forward", lambda card: f"{card['feed_forward_parameters']:,}"),
    ("  embeddings", lambda card: f"{card['embedding_parameters']:,}"),
    ("FLOPs per token, forward", lambda card: f"{card['flops_per_token']:,}"),
    ("  attention projections", lambda card: _part(card, "attention_projections")),
    ("  attention scores, values", lambda card: _part(card, "attention_scores_and_values")),
    ("  feed-forward", lambda card: _part(card, "feed_forward")),
    ("  readout", lambda card: _part(card, "readout")),
    ("  if masked pairs are skipped", lambda card: f"{card['attended_flops_per_token']:,}"),
    ("FLOPs per token, training", lambda card: f"{card['training_flops_per_token']:,}"),
    ("KV cache, bytes per token", lambda card: f"{card['cache_bytes_per_token']:,}"),
    ("  bytes of T tokens", lambda card: f"{card['cache_bytes']:,}"),
    ("  dtype", lambda card: card["cache_dtype"]),
    ("  reduction from multi-head", lambda card: f"{card['cache_reduction']:.2f}x"),
    ("T, tokens", lambda card: f"{card['seq_len']:,}"),
    ("vocabulary, tokens", lambda card: f"{card['vocab_size']:,}"),
)
"""The rows of the table, from top to bottom."""

BATCH_ROWS = {
    "batch, sequences": "batch",
    "  tokens": "tokens",
    "  FLOPs of a training step": "training_flops",
    "  bytes of a training step": "training_bytes",
    "    weights": "weight_bytes",
    "    gradients": "gradient_bytes",
    "    state of the optimizer": "optimizer_bytes",
    "    activations": "activation_bytes",
    "  bytes of the KV cache": "cache_bytes",
}
"""The rows of a batch: labels and fields of `BatchCosts`."""

BATCH_NOTES = """\
A training step holds weights, gradients and the optimizer's state in fp32, and what the layers store for the backward
pass, in mixed precision with dtype=bf16. Attention is counted as on CUDA, where backend=auto chooses a fused kernel if
one computes the variant. Logits, which are computed in parts, and memory within operations come on top."""


def main(arguments: Sequence[str] | None = None, prog: str = "python -m tinyformer card") -> int:
    """Print the cards of the variants that the command line names.

    Args:
        arguments: the command line; `sys.argv[1:]` by default.
        prog: the name of the program in its help.

    Returns:
        The exit code: 0, 1 for a bug, 2 for a mistake of the user.
    """
    options = _parser(prog).parse_intermixed_args(arguments)
    return exit_code_of(lambda: _show(options), CONFIG_DIR, CONFIG_NAME)


def make_card(overrides: Sequence[str], config: DictConfig) -> Card:
    """The card of one variant.

    Args:
        overrides: the overrides that lead to the config; they name the variant.
        config: a config of `card`, with its `hydra` node.

    Raises:
        ConfigError: a value does not fit its class, or contradicts another one.
    """
    # These import torch, which takes seconds; a config that does not compose is reported without it.
    from hydra.utils import instantiate
    from torch import device

    from tinyformer.analysis.costs import count_costs
    from tinyformer.run.match import match_size
    from tinyformer.run.scores import register_score

    vocab_size = GPT2_VOCAB_SIZE if config.model.vocab_size is None else config.model.vocab_size
    unresolved: Any = OmegaConf.to_container(config, resolve=False)
    with config_keys(config):
        check_types(config, "network", config.hydra.runtime.choices)
        match_size(config, Invocation(overrides), vocab_size, CONFIG_NAME)
        with device("meta"):
            register_score(unresolved)
            sized: Any = OmegaConf.merge(config, {"model": {"vocab_size": vocab_size}})
            network = instantiate(sized.network, _convert_="all")
        with argument_path(passed={"cache_dtype": "dtype"}):
            costs = count_costs(network, str(config.dtype))
        batch = None if config.batch is None else _batch_costs(config, sized)
    return {"overrides": list(overrides), **asdict(costs), "batch": batch}


def _batch_costs(config: DictConfig, sized: DictConfig) -> dict[str, Any]:
    """The costs of a training step; `sized` is the config with the size of the vocabulary filled in."""
    from hydra.utils import instantiate

    from tinyformer.analysis.memory import count_batch

    check_value(count_batch, "batch", config.batch, "batch")
    check_types(config, "optimizer", config.hydra.runtime.choices)

    def make_network() -> Any:
        return instantiate(sized.network, _convert_="all")

    return asdict(count_batch(make_network, instantiate(config.optimizer), config.batch, config.dtype))


def print_table(cards: Sequence[Card]) -> None:
    """Print cards side by side under the overrides in which they differ, with the shared overrides as the title."""
    columns = list(zip(*(card["overrides"] for card in cards), strict=True))
    differing = [index for index, column in enumerate(columns) if len(set(column)) > 1]
    title = " ".join(column[0] for index, column in enumerate(columns) if index not in differing)
    table = Table(title=title, box=box.SIMPLE_HEAD, show_header=bool(differing))
    table.add_column("\n".join(columns[index][0].partition("=")[0] for index in differing))
    for card in cards:
        values = (card["overrides"][index].partition("=")[2] for index in differing)
        table.add_column("\n".join(values), justify="right")
    for label, show in ROWS:
        table.add_row(label, *map(show, cards))
    batches = [card["batch"] or {} for card in cards]
    for label, field in BATCH_ROWS.items() if any(batches) else ():
        table.add_row(label, *(f"{batch[field]:,}" if batch else "" for batch in batches))
    # As wide as the table: a terminal may wrap lines, but no digit is cut off. Brackets in overrides are not markup.
    Console(width=10_000, markup=False).print(table)
    print(NOTES)
    if any(batches):
        print(BATCH_NOTES)


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Parameters, floating-point operations and KV cache of a variant.",
        epilog=f"The axes of a network and their choices:\n\n{describe_axes(CONFIG_DIR, AXES)}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="as for train.py; KEY=A,B shows both side by side"
    )
    parser.add_argument("--json", action="store_true", help="print JSON only")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the JSON to a file")
    return parser


def _show(options: argparse.Namespace) -> None:
    cards = [make_card(*variant) for variant in compose_sweep(CONFIG_DIR, CONFIG_NAME, options.overrides)]
    as_json = json.dumps({"cards": cards}, indent=2)
    if options.save:
        with option_names(path="--save"):
            _save(as_json, options.save)
    if options.json:
        print(as_json)
    else:
        print_table(cards)
        print(f"Saved in {options.save}." if options.save else "--save cards.json keeps these numbers as JSON.")


def _save(text: str, path: Path) -> None:
    if path.is_dir() or not path.parent.is_dir():
        raise ArgumentError("path", path, "must be a file in a folder that exists", {"path": "cards.json"})
    path.write_text(text + "\n")


def _part(card: Card, name: str) -> str:
    return f"{card['flops_per_token_by_part'][name]:,}"


if __name__ == "__main__":
    sys.exit(main())
