"""From a checkpoint to a Hugging Face folder."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from tinyformer.checkpoint.file import Checkpoint, load_checkpoint, require_fitting
from tinyformer.config.admission import Plain, admit_config, composed, never_instantiated
from tinyformer.config.checks import check_types
from tinyformer.config.conf import key_of
from tinyformer.config.errors import ConfigError
from tinyformer.errors import ArgumentError, argument_path
from tinyformer.interop import FAMILIES
from tinyformer.interop.encoder_decoders import special_ids
from tinyformer.interop.family import Family, Fields
from tinyformer.interop.folder import Difference, find_differences, write_folder
from tinyformer.interop.vocabulary import tokenizer_files
from tinyformer.programs.convert.importing import (
    EMBEDDING,
    FAMILY_NAMES,
    OUTPUT,
    compose_family,
    depths_of,
    meta_network,
)
from tinyformer.run.starting_checkpoint import tokenizer_of

WITHOUT_EFFECT = ("backend", "init", "init_std", "checkpoint_activations", "autocast_residual", "pruned_heads")
"""Arguments that do not change the function of a trained network: the weights of pruned heads are exported as zeros."""

TRAINING_ONLY = ("dropout",)  # arguments that change the function in training only


def export_model(path: Path, folder: Path) -> list[str]:
    """Write a checkpoint as a folder that `transformers` loads; returns a report, as lines to print.

    A `ConfigError` names what has no counterpart in any family.
    """
    checkpoint = load_checkpoint(path)
    with argument_path(passed={"path": "checkpoint"}):
        config = admit_config(checkpoint, never_instantiated)  # classes are compared by name
    sized = OmegaConf.create(_with_sizes(checkpoint, config))
    written = OmegaConf.to_container(sized, resolve=False)
    function = _function_of(sized)
    # A network of another class differs in a single argument, its class, and would count as the nearest.
    kind = function["network"]["_target_"]
    alike = [family for family in FAMILIES if composed(family.groups)[0]["network"]["_target_"] == kind]
    candidates = [_as_family(family, sized, function) for family in alike or FAMILIES]
    family, fields, config, differences = min(candidates, key=lambda candidate: len(_relevant(candidate[3])))
    if lacking := _relevant(differences):
        setting = f"{_key(lacking[0], written)}={_shown(lacking[0].value)}"
        raise ConfigError(
            f"{setting} has no counterpart in {family.name}, the nearest of {FAMILY_NAMES}: there it is "
            f"{_shown(lacking[0].other)}."
        )
    pruned_heads = function["network"]["pruned_heads"]
    smaller = config | {"model": config["model"] | {"pruned_heads": pruned_heads}}
    check_types(OmegaConf.create(smaller), "network")
    network, pruned = meta_network(config), meta_network(smaller)
    resolved: Any = OmegaConf.to_container(OmegaConf.create(config).model, resolve=True)
    depths = depths_of(resolved)
    dtype, shapes = checkpoint.weights[EMBEDDING].dtype, {name: w.shape for name, w in pruned.state_dict().items()}
    zeros = {name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items() if name.endswith(".bias")}
    full = replace(checkpoint, weights=zeros | checkpoint.weights)
    require_fitting(pruned, full)
    weights = family.write(network.unpruned(pruned, full.weights), depths, config["model"]["num_heads"])
    if config["model"]["tied_readout"]:
        del weights[family.name_of(OUTPUT, depths)]
    fields = fields | {"dtype": str(dtype).removeprefix("torch.")}
    write_folder(folder, _files(fields, family, checkpoint, resolved), weights)
    left_out = sorted({f"{_key(d, written)}={_shown(d.value)}" for d in differences if d.name in TRAINING_ONLY})
    lines = [f"{family.name}, saved in {folder}: transformers loads it as {family.architecture}."]
    for setting in left_out:
        lines.append(f"{setting} affects training only and is left out: {family.name} has no field for it.")
    if pruned_heads:
        lines.append(f"The weights of {len(pruned_heads)} pruned heads are zeros: {family.name} has no smaller layers.")
    if not checkpoint.tokenizer:
        lines.append("The checkpoint has no tokenizer, so the folder has none.")
    return lines


def _with_sizes(checkpoint: Checkpoint, config: Plain) -> Plain:
    """A checkpoint's config, with the sizes that are null in it taken from the weights."""
    weights, model = checkpoint.weights, dict(config["model"])
    # A feed-forward network without `up_proj` is a user's class, which no family has anyway.
    up = weights.get("encoder.layers.0.feed_forward.up_proj.weight", weights[EMBEDDING])
    sizes = {"vocab_size": weights[EMBEDDING].shape[0], "d_ff": up.shape[0]}
    model |= {key: size for key, size in sizes.items() if model.get(key) is None}
    return config | {"model": model}


def _as_family(family: Family, sized: DictConfig, function: Plain) -> tuple[Family, Fields, Plain, list[Difference]]:
    """The fields of a family that come closest to a config, the config that they describe, and their differences."""
    values = {field.ours: OmegaConf.select(sized, field.ours) for field in family.fields}
    configs = {key: OmegaConf.to_container(value) for key, value in values.items() if OmegaConf.is_config(value)}
    plain = values | configs
    fields = family.describe(plain)
    config = compose_family(family, family.settings(fields))
    return family, fields, config, list(find_differences(function, _function_of(OmegaConf.create(config))))


def _function_of(config: DictConfig) -> Plain:
    """The part of a config that determines the model's function, resolved."""
    objective = OmegaConf.to_container(config.task.objective, resolve=True)
    return {"network": OmegaConf.to_container(config.network, resolve=True), "task": {"objective": objective}}


def _relevant(differences: Sequence[Difference]) -> list[Difference]:
    """The differences that change the function in evaluation; a bias that the model lacks is exported as zeros."""
    harmless, bias_of_zeros = (*WITHOUT_EFFECT, *TRAINING_ONLY), ("bias", False, True)
    return [d for d in differences if d.name not in harmless and (d.name, d.value, d.other) != bias_of_zeros]


def _key(difference: Difference, written: Any) -> str:
    try:
        return key_of(written, f"{difference.path}.{difference.name}").removesuffix("._target_")
    except KeyError:  # the checkpoint's config leaves the argument to its default
        return f"{difference.path}.{difference.name}"


def _shown(value: Any) -> str:
    """A value as on a command line; a node or a class by the name of the class."""
    if isinstance(value, dict):
        value = value.get("_target_", value)
    if isinstance(value, str) and value.startswith("tinyformer."):
        return value.rpartition(".")[2]
    return json.dumps(value, separators=(",", ":"), default=str).strip('"')


def _files(fields: Fields, family: Family, checkpoint: Checkpoint, model: Plain) -> dict[str, Plain]:
    """The JSON files of a folder, given the values of the `model` group."""
    tokenizer = tokenizer_of(checkpoint) if checkpoint.tokenizer else None
    if "cross_attention" in family.groups:
        if tokenizer is None and model["special_tokens"]["eos"] is None:
            reason = "has no tokenizer, and does not say which token ends a text (model.special_tokens.eos)"
            raise ArgumentError("checkpoint", str(checkpoint.path), reason)
        special, decoding = special_ids(model["special_tokens"], tokenizer.eos_id if tokenizer else None)
        files = {"config.json": fields | special, "generation_config.json": decoding}
        start = [] if special["bos_token_id"] is None else [special["bos_token_id"]]
        around = (start, [special["eos_token_id"]])
    elif tokenizer is None:
        return {"config.json": fields}
    else:
        special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), tokenizer.eos_id)
        special["bos_token_id"] = tokenizer.start_id
        ends = special | {"eos_token_id": [*tokenizer.end_ids] if len(tokenizer.end_ids) > 1 else tokenizer.end_ids[0]}
        generation = {"generation_config.json": ends} if family.generates else {}
        files, around = {"config.json": fields | ends, **generation}, ([tokenizer.eos_id], [])
    return files | (tokenizer_files(tokenizer, model["max_seq_len"], special, around) if tokenizer else {})
