"""From a Hugging Face folder to a checkpoint, and back."""

import functools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from tinyformer.app.config import register_resolvers, written_at
from tinyformer.app.sweep import compose_sweep
from tinyformer.checkpoint import Checkpoint, load_checkpoint, require_fitting, save_network
from tinyformer.data import TextTokenizer
from tinyformer.interop import (
    FAMILIES,
    Difference,
    Family,
    find_differences,
    find_folder,
    read_config,
    read_tensors,
    read_tokenizer,
    tokenizer_files,
    write_folder,
)
from tinyformer.interop.family import Fields, Weights
from tinyformer.nn import Transformer

Plain: TypeAlias = dict[str, Any]
"""A config as plain containers."""

EMBEDDING, OUTPUT = "encoder.token_embedding.weight", "readout.proj.weight"

WITHOUT_EFFECT = ("backend", "init_std", "checkpoint_activations")
"""Arguments that do not change what a trained network computes."""

TRAINING_ONLY = ("dropout",)
"""Arguments that change what it computes in training alone."""

NAMES = f"{', '.join(family.name for family in FAMILIES[:-1])} and {FAMILIES[-1].name}"


def import_model(source: str, path: Path, config_dir: Path) -> list[str]:
    """Write a checkpoint of a Hugging Face model.

    Args:
        source: its folder, or its name on the Hub.
        path: of the checkpoint.
        config_dir: where the config files are.

    Returns:
        What was done, as lines to print.

    Raises:
        ValueError: the folder is malformed or of another family, or the checkpoint cannot be written there.
    """
    if path.exists():
        raise ValueError(f"{path} exists already; name a file that does not.")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"{path} lies in no folder that exists.")
    folder = find_folder(source)
    fields = read_config(folder)
    family = _family_of(fields, folder)
    settings = family.settings(fields)
    config = _compose(config_dir, family, settings)
    tokenizer = read_tokenizer(folder, fields)
    if tokenizer is not None and tokenizer.vocab_size > settings["model.vocab_size"]:
        raise ValueError(
            f"{folder}: the tokenizer has {tokenizer.vocab_size} tokens, and the model vectors for "
            f"{settings['model.vocab_size']} of them; resize_token_embeddings of transformers adds the others."
        )
    tensors, dtypes = read_tensors(folder)
    network = _network(config)
    weights = _our_weights(tensors, family, fields, settings, network, folder)
    heads = f"{settings['model.num_layers']} layers of {settings['model.num_heads']} heads"
    lines = [f"{family.name}, {network.num_parameters():,} parameters in {heads}, saved in {path}."]
    # Assigned, since the network is one without memory.
    network.load_state_dict(weights, assign=True)
    facts = {"precision": "32-true", "data_fingerprint": None, "train/num_tokens": None}
    text = tokenizer.to_json() if tokenizer else None
    save_network(path, network, Checkpoint(path, weights, config, text, facts, step=0), config)
    lines += [f"Its weights, {dtypes}, became fp32."] if dtypes != "fp32" else []
    lines += [family.note] if family.note else []
    if tokenizer is None:
        return [*lines, "It has no tokenizer, so programs that read text refuse it; in Python it takes token ids."]
    return [
        *lines,
        f"python evaluate.py checkpoint={path} data=text data.files=FILE analysis=heads looks at its heads.",
    ]


def export_model(path: Path, folder: Path, config_dir: Path) -> list[str]:
    """Write a folder that `transformers` loads.

    Args:
        path: of the checkpoint.
        folder: that does not exist.
        config_dir: where the config files are.

    Returns:
        What was done, as lines to print.

    Raises:
        ValueError: something in the model has no counterpart in any family, or the folder cannot be written.
    """
    register_resolvers(config_dir)
    checkpoint = load_checkpoint(path)
    own = OmegaConf.create(_with_sizes(checkpoint))
    written = OmegaConf.to_container(own, resolve=False)
    computing = _computing(own)
    candidates = [_as_family(family, own, computing, config_dir) for family in FAMILIES]
    family, fields, config, found = min(candidates, key=lambda candidate: len(_of_weight(candidate[3])))
    if lacking := _of_weight(found):
        raise ValueError(
            f"{_key(lacking[0], written)}={_shown(lacking[0].own)} has no counterpart in {family.name}, the nearest of "
            f"{NAMES}: there it is {_shown(lacking[0].other)}."
        )
    network, num_layers = _network(config), config["model"]["num_layers"]
    dtype, shapes = checkpoint.weights[EMBEDDING].dtype, {name: w.shape for name, w in network.state_dict().items()}
    zeros = {name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items() if name.endswith(".bias")}
    full = replace(checkpoint, weights=zeros | checkpoint.weights)
    require_fitting(network, full)
    weights = family.write(full.weights, num_layers)
    if config["model"]["tied_readout"]:
        del weights[family.name_of(OUTPUT, num_layers)]
    fields = fields | {"dtype": str(dtype).removeprefix("torch.")}
    write_folder(folder, _files(fields, family, checkpoint, config["model"]["max_seq_len"]), weights)
    left_out = sorted({f"{_key(one, written)}={_shown(one.own)}" for one in found if one.name in TRAINING_ONLY})
    return [
        f"{family.name}, saved in {folder}: transformers loads it as {family.architecture}.",
        *(f"{setting} is for training and has no field in {family.name}: it is left out." for setting in left_out),
        *([] if checkpoint.tokenizer else ["The checkpoint has no tokenizer, so the folder has none."]),
    ]


def _family_of(fields: Fields, folder: Path) -> Family:
    family = next((one for one in FAMILIES if one.model_type == fields.get("model_type")), None)
    if family is None:
        raise ValueError(
            f"{folder}: config.json says model_type={str(fields.get('model_type'))[:100]}; {NAMES} come in "
            f"({', '.join(one.model_type for one in FAMILIES)})."
        )
    return family


def _compose(config_dir: Path, family: Family, settings: Plain) -> Plain:
    """Our config of a model of a family, unresolved, as a run's checkpoint has it."""
    config = OmegaConf.create(_base(config_dir, family.overrides))
    OmegaConf.set_struct(config, True)
    for key, value in settings.items():
        OmegaConf.update(config, key, value)
    plain: Any = OmegaConf.to_container(config, resolve=False)
    return plain


@functools.cache
def _base(config_dir: Path, overrides: tuple[str, ...]) -> Plain:
    (_, config), *_ = compose_sweep(config_dir, "train", overrides)
    plain: Any = OmegaConf.to_container(config, resolve=False)
    del plain["hydra"]
    return plain


def _network(config: Plain) -> Transformer:
    """The network of a config, without memory."""
    with torch.device("meta"):
        return instantiate(OmegaConf.create(config).network, _convert_="all")


def _our_weights(
    tensors: Weights, family: Family, fields: Fields, settings: Plain, network: Transformer, folder: Path
) -> Weights:
    """The weights for a network.

    Raises:
        ValueError: one is missing, of another shape, or has no place.
    """
    num_layers, expected = settings["model.num_layers"], network.state_dict()
    weights, others = family.read(tensors, num_layers)
    if settings["model.tied_readout"] and EMBEDDING in weights:
        if not torch.equal(weights.setdefault(OUTPUT, weights[EMBEDDING]), weights[EMBEDDING]):
            raise ValueError(
                f"{folder}: {family.name_of(OUTPUT, num_layers)} is not {family.name_of(EMBEDDING, num_layers)}, "
                "though config.json says tie_word_embeddings=true; tie_word_embeddings=false keeps both."
            )
        weights[OUTPUT] = weights[EMBEDDING]
    architecture = f"config.json says architectures={fields.get('architectures')}"
    for name in sorted(expected.keys() - weights.keys()):
        raise ValueError(
            f"{folder} has no {family.name_of(name, num_layers)}, which {family.architecture} has; {architecture}."
        )
    for name in [*sorted(weights.keys() - expected.keys()), *others]:
        raise ValueError(
            f"{folder} has {family.name_of(name, num_layers)}, which has no place in {family.architecture} as "
            f"config.json describes it; {architecture}."
        )
    for name, weight in weights.items():
        if weight.shape != expected[name].shape:
            raise ValueError(
                f"{folder}: {family.name_of(name, num_layers)} does not fit config.json: it makes {name} "
                f"{list(weight.shape)}, where {list(expected[name].shape)} is needed."
            )
    return weights


def _with_sizes(checkpoint: Checkpoint) -> Plain:
    """A checkpoint's config, with those sizes that its run took from elsewhere."""
    weights, model = checkpoint.weights, dict(checkpoint.config["model"])
    # Without it, the feed-forward network is a class of the user's, which no family has anyway.
    up = weights.get("encoder.layers.0.feed_forward.up_proj.weight", weights[EMBEDDING])
    taken = {"vocab_size": weights[EMBEDDING].shape[0], "d_ff": up.shape[0]}
    model |= {key: size for key, size in taken.items() if model.get(key) is None}
    return checkpoint.config | {"model": model}


def _as_family(
    family: Family, own: DictConfig, computing: Plain, config_dir: Path
) -> tuple[Family, Fields, Plain, list[Difference]]:
    """The fields with which a family comes nearest to a config, our config of these, and where the two differ."""
    fields = family.describe({one.ours: OmegaConf.select(own, one.ours) for one in family.fields})
    config = _compose(config_dir, family, family.settings(fields))
    return family, fields, config, list(find_differences(computing, _computing(OmegaConf.create(config))))


def _computing(config: DictConfig) -> Plain:
    """What of a config decides what is computed, resolved."""
    objective = OmegaConf.to_container(config.task.objective, resolve=True)
    return {"network": OmegaConf.to_container(config.network, resolve=True), "task": {"objective": objective}}


def _of_weight(differences: Sequence[Difference]) -> list[Difference]:
    """Those that change what is computed in evaluation; biases that a model lacks are exported as zeros."""
    harmless = (*WITHOUT_EFFECT, *TRAINING_ONLY)
    return [one for one in differences if one.name not in harmless and not _is_bias_of_zeros(one)]


def _is_bias_of_zeros(difference: Difference) -> bool:
    return (difference.name, difference.own, difference.other) == ("bias", False, True)


def _key(difference: Difference, written: Any) -> str:
    """The key under which a user sets what differs."""
    try:
        return written_at(written, difference.path, difference.name).removesuffix("._target_")
    except KeyError:  # an argument that the checkpoint's config leaves to its default
        return f"{difference.path}.{difference.name}"


def _shown(value: Any) -> str:
    """A value as on a command line; of a node, or a class, the class's name."""
    if isinstance(value, dict):
        value = value.get("_target_", value)
    if isinstance(value, str) and value.startswith("tinyformer."):
        return value.rpartition(".")[2]
    return json.dumps(value, separators=(",", ":"), default=str).strip('"')


def _files(fields: Fields, family: Family, checkpoint: Checkpoint, max_seq_len: int) -> dict[str, Plain]:
    """The JSON files of a folder."""
    if not checkpoint.tokenizer:
        return {"config.json": fields}
    tokenizer = TextTokenizer.from_json(checkpoint.tokenizer)
    special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), tokenizer.eos_id)
    generation = {"generation_config.json": special} if family.generates else {}
    return {"config.json": fields | special, **generation, **tokenizer_files(tokenizer, max_seq_len)}
