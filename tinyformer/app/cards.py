"""The card of a variant, what it costs: made from a config, printed beside others, saved."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeAlias

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from rich import box
from rich.console import Console
from rich.table import Table

from tinyformer.analysis.costs import count_costs
from tinyformer.app.config import check_types
from tinyformer.nn import Transformer

Card: TypeAlias = dict[str, Any]
"""The overrides that make a variant, and its `Costs`, as plain containers."""

GPT2_VOCAB_SIZE = 50_257
"""Stands for the tokenizer's where `model.vocab_size` is null."""

NOTES = f"""\
FLOPs are those of matrix products in a sequence of T tokens; one multiply-add is 2. Attention is counted as the full
square of T x T pairs, as torch.utils.flop_counter does; a kernel may skip the pairs that the causal mask and windows
hide. Training is 3 forward passes. Where model.vocab_size is null, GPT-2's {GPT2_VOCAB_SIZE:,} tokens are counted."""

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
    ("  if hidden pairs are skipped", lambda card: f"{card['attended_flops_per_token']:,}"),
    ("FLOPs per token, training", lambda card: f"{card['training_flops_per_token']:,}"),
    ("cache, bytes per token", lambda card: f"{card['cache_bytes_per_token']:,}"),
    ("  of T tokens", lambda card: f"{card['cache_bytes']:,}"),
    ("  dtype", lambda card: card["cache_dtype"]),
    ("  reduction from multi-head", lambda card: f"{card['cache_reduction']:.2f}x"),
    ("T, tokens", lambda card: f"{card['seq_len']:,}"),
    ("vocabulary, tokens", lambda card: f"{card['vocab_size']:,}"),
)
"""What the table shows of a card, from top to bottom."""


def make_card(overrides: Sequence[str], config: DictConfig) -> Card:
    """The card of one variant; its network is built without memory for weights.

    Args:
        overrides: that make the config, to name it.
        config: of `card`, with its `hydra` node.

    Raises:
        ValueError: a value does not fit its class, or does not go together with others.
    """
    HydraConfig.instance().set_config(config)  # which the checks read the defaults from
    check_types(config, "network")
    return {"overrides": list(overrides), **asdict(count_costs(_network(config), str(config.dtype)))}


def print_table(cards: Sequence[Card]) -> None:
    """Print cards side by side: the overrides in which they differ above them, the others as the title."""
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
    # As wide as it is: a terminal may break lines, but no digit is left out. A list is no markup.
    Console(width=10_000, markup=False).print(table)
    print(NOTES)


def as_json(cards: Sequence[Card]) -> str:
    """Cards as a JSON object."""
    return json.dumps({"cards": cards}, indent=2)


def save(cards: Sequence[Card], path: Path) -> None:
    """Write cards to a file, as JSON.

    Raises:
        ValueError: there is no such folder.
    """
    if path.is_dir() or not path.parent.is_dir():
        raise ValueError(f"--save {path} is no file in a folder that exists; --save cards.json works.")
    path.write_text(as_json(cards) + "\n")


def _network(config: DictConfig) -> Transformer:
    vocab_size = GPT2_VOCAB_SIZE if config.model.vocab_size is None else config.model.vocab_size
    sized = OmegaConf.merge(config, {"model": {"vocab_size": vocab_size}})
    with torch.device("meta"):
        return instantiate(sized.network, _convert_="all")


def _part(card: Card, name: str) -> str:
    return f"{card['flops_per_token_by_part'][name]:,}"
