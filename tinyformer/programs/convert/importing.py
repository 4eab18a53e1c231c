"""From a Hugging Face folder to a checkpoint."""

from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

from tinyformer.checkpoint.file import Checkpoint, save_network
from tinyformer.config.admission import Plain, composed, describe_config
from tinyformer.config.conf import format_value
from tinyformer.config.errors import config_keys
from tinyformer.data import SpecialTokens
from tinyformer.errors import ArgumentError, argument_path
from tinyformer.interop import FAMILIES
from tinyformer.interop.family import Depths, Family, Fields, Weights
from tinyformer.interop.folder import CONFIG, DECODING, OF_DECODING, find_folder, read_config, read_tensors
from tinyformer.interop.vocabulary import read_json_of, read_tokenizer
from tinyformer.nn import Network

EMBEDDING, OUTPUT = "encoder.token_embedding.weight", "readout.proj.weight"
DECODER_EMBEDDING = "decoder.token_embedding.weight"

FAMILY_NAMES = f"{', '.join(family.name for family in FAMILIES[:-1])} and {FAMILIES[-1].name}"


def import_model(source: str, path: Path) -> list[str]:
    """Write a Hugging Face model, from its folder or by its name on the Hub, as a checkpoint; returns lines to print.

    An `ArgumentError` if the folder is malformed or of an unsupported family.
    """
    if path.exists():
        raise ArgumentError("path", path, "exists already")
    if not path.absolute().parent.is_dir():
        raise ArgumentError("path", path, "is in a folder that does not exist")
    with argument_path(passed={"path": "source"}):  # of a name on the Hub that cannot be reached
        folder = find_folder(source)
    fields = read_config(folder)
    family = _family_of(fields, folder)
    try:
        settings = family.settings(fields)
    except ArgumentError as error:
        file = DECODING if error.path[1] in {*OF_DECODING}.intersection(read_json_of(folder, DECODING)) else CONFIG
        error.path = (f"{folder / file}: {'.'.join(error.path[1:])}",)
        raise
    _require_known_tokens(settings, source)
    config = compose_family(family, settings)
    tokenizer = read_tokenizer(folder, fields)
    if tokenizer is not None and tokenizer.vocab_size > settings["model.vocab_size"]:
        reason = (
            f"the tokenizer has {tokenizer.vocab_size} tokens, but the model has embeddings for "
            f"{settings['model.vocab_size']} only; resize_token_embeddings of transformers adds the others"
        )
        raise ArgumentError("source", source, reason)
    tensors, dtypes = read_tensors(folder)
    depths = depths_of(config["model"])
    if (depth := max(depths.values())) > len(tensors):  # before a network of these layers is made
        reason = f"config.json asks for {depth:,} layers, and the files hold {len(tensors):,} tensors"
        raise ArgumentError("source", source, reason)
    network = meta_network(config)
    weights = _our_weights(tensors, family, fields, settings, network, depths, folder)
    layers = " + ".join(str(len(stack.layers)) for stack in network.stacks())
    size = f"{network.num_parameters():,} parameters in {layers} layers of {settings['model.num_heads']} heads"
    lines = [f"{family.name}, {size}, saved in {path}."]
    # Assigned, since the network is on the meta device.
    network.load_state_dict(weights, assign=True)
    facts = {"precision": "32-true", "data_fingerprint": None, "train/num_tokens": None}
    text = tokenizer.to_json() if tokenizer else None
    overrides = describe_config(config, family.groups)
    save_network(path, network, Checkpoint(path, weights, overrides, text, facts, step=0), overrides)
    lines += [f"Its weights were converted from {dtypes} to fp32."] if dtypes != "fp32" else []
    lines += [family.note] if family.note else []
    if tokenizer is None:
        return [*lines, "It has no tokenizer, so programs that read text refuse it; in Python it takes token ids."]
    program = f"python evaluate.py checkpoint={format_value(path)} data=text"
    file = "PAIRS" if len(network.stacks()) > 1 else "FILE"
    return [*lines, f"To analyse its heads: {program} data.files={file} analysis=heads"]


def compose_family(family: Family, settings: Plain) -> Plain:
    """Our unresolved config of a family's model, as a checkpoint stores it; `settings` are values by config key."""
    config = OmegaConf.create(composed(family.groups)[0])
    OmegaConf.set_struct(config, True)
    for key, value in settings.items():
        OmegaConf.update(config, key, value)
    plain: Any = OmegaConf.to_container(config, resolve=False)
    return plain


def depths_of(model: Plain) -> Depths:
    """The number of layers of each stack, given the values of the `model` group."""
    depth, encoder = model["num_layers"], model.get("num_encoder_layers")
    return {"encoder": encoder if isinstance(encoder, int) else depth, "decoder": depth}


def meta_network(config: Plain) -> Network:
    """The network of a config on the meta device, which allocates no memory for weights."""
    created = OmegaConf.create(config)
    with torch.device("meta"), config_keys(created):
        return instantiate(created.network, _convert_="all")


def _require_known_tokens(settings: Plain, source: str) -> None:
    """Refuse special tokens whose ids the vocabulary does not have."""
    keys = {key: key.rpartition(".")[2] for key in settings if key.startswith("model.special_tokens.")}
    try:
        SpecialTokens(**{name: settings[key] for key, name in keys.items()}).require_known(settings["model.vocab_size"])
    except ArgumentError as error:
        reason = f"its special token {error.path[0]}={error.value} {error.reason}"
        raise ArgumentError("source", source, reason) from error


def _family_of(fields: Fields, folder: Path) -> Family:
    for family in FAMILIES:
        if family.model_type == fields.get("model_type") and family.covers(fields):
            return family
    supported = f"{FAMILY_NAMES} are supported ({', '.join(dict.fromkeys(known.model_type for known in FAMILIES))})"
    reason = f"config.json says model_type={str(fields.get('model_type'))[:100]}; {supported}"
    raise ArgumentError("source", folder, reason)


def _our_weights(
    tensors: Weights, family: Family, fields: Fields, settings: Plain, network: Network, depths: Depths, folder: Path
) -> Weights:
    """The weights of a family under our names; refused if one is missing, has another shape or no place here."""
    expected = network.state_dict()
    weights, others = family.read(tensors, depths, settings["model.num_heads"])
    tied = (DECODER_EMBEDDING, OUTPUT) if settings["model.tied_readout"] else (DECODER_EMBEDDING,)
    for name in tied if EMBEDDING in weights else ():
        if name not in expected:  # one stack has no second embedding
            continue
        if not torch.equal(weights.setdefault(name, weights[EMBEDDING]), weights[EMBEDDING]):
            reason = f"{family.name_of(name, depths)} differs from {family.name_of(EMBEDDING, depths)}"
            if name == OUTPUT:
                reason += ", although config.json says tie_word_embeddings=true; tie_word_embeddings=false keeps both"
            raise ArgumentError("source", folder, reason)
        weights[name] = weights[EMBEDDING]
    architecture = f"config.json says architectures={fields.get('architectures')}"
    for name in sorted(expected.keys() - weights.keys()):
        reason = f"has no {family.name_of(name, depths)}, which {family.architecture} has; {architecture}"
        raise ArgumentError("source", folder, reason)
    for name in [*sorted(weights.keys() - expected.keys()), *others]:
        reason = (
            f"has {family.name_of(name, depths)}, which has no place in {family.architecture} as config.json "
            f"describes it; {architecture}"
        )
        raise ArgumentError("source", folder, reason)
    for name, weight in weights.items():
        if weight.shape != expected[name].shape:
            reason = (
                f"{family.name_of(name, depths)} does not fit config.json: it gives {name} the shape "
                f"{list(weight.shape)} instead of {list(expected[name].shape)}"
            )
            raise ArgumentError("source", folder, reason)
    return weights
