"""The import of a Hugging Face model as a checkpoint, at a path or in the cache."""

import hashlib
import json
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import filelock
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

from tinyformer.checkpoint.file import Checkpoint, save_network
from tinyformer.checkpoint.format import FORMAT
from tinyformer.checkpoint.paths import find_checkpoint
from tinyformer.config.admission import Plain, composed, describe_config
from tinyformer.config.conf import format_value
from tinyformer.config.errors import config_keys, say
from tinyformer.data import TextTokenizer
from tinyformer.data.stream import default_cache_dir
from tinyformer.errors import ArgumentError, argument_path
from tinyformer.interop import FAMILIES
from tinyformer.interop.family import Family, Fields, Weights
from tinyformer.interop.folder import CONFIG, find_folder, model_files, read_config, read_tensors, reading
from tinyformer.interop.gguf import PRE_TOKENIZERS, GGUFFile
from tinyformer.interop.vocabulary import read_tokenizer
from tinyformer.nn import Network

VERSION = 1
"""The version of imports in the cache, increased when the same files give another checkpoint."""

EMBEDDING, OUTPUT = "encoder.token_embedding.weight", "readout.proj.weight"
DECODER_EMBEDDING = "decoder.token_embedding.weight"


def find_model(source: str | Path, revision: str | None = None) -> Path:
    """The checkpoint of a model: a Hugging Face model is imported into the cache, any other path is returned.

    A Hugging Face model is a GGUF file, a folder with a `config.json`, or the name of a model on the Hub unless a file
    or folder here has this name. It is imported again if the Hub has a newer commit, or if one of its files was
    written. For `revision` and errors, see `import_model`.
    """
    path = find_checkpoint(source)
    _require_on_hub(path, revision)
    if os.path.isfile(path / CONFIG) or is_gguf(path):  # `Path.is_file` raises an error for too long a name
        files = [path] if is_gguf(path) else model_files(path)
        written = [(file.name, (now := file.stat()).st_size, now.st_mtime_ns) for file in files]
        content = hashlib.sha256(json.dumps([str(path.resolve()), written]).encode()).hexdigest()
    elif not os.path.exists(path) and re.fullmatch(r"[\w.-]+/[\w.-]+(?<!\.ckpt)", str(source)):
        content = revision = find_folder(str(source), revision, [CONFIG]).name  # the commit
    else:
        return path
    folder = default_cache_dir() / "imported" / (path.resolve().name if path.exists() else "--".join(path.parts))
    folder.mkdir(parents=True, exist_ok=True)
    found = folder / f"{content[:12]}-{FORMAT}.{VERSION}.ckpt"
    with filelock.FileLock(f"{found}.lock"):
        if not found.exists():
            import_model(str(source), found, revision)
            size = f"{found.stat().st_size / 1e6:,.1f} MB"
            say(f"Imported {source} to {found}, {size}; TINYFORMER_CACHE moves the cache.")
    return found


class Source(NamedTuple):
    """The files of a model to import."""

    path: Path  # the folder or the GGUF file
    config: str  # the name of what holds the fields, for errors
    fields: Fields
    read_tensors: Callable[[], Weights]
    read_tokenizer: Callable[[], TextTokenizer | None]
    untokenized: str  # the beginning of a sentence about the lack of a tokenizer


def open_source(source: str, revision: str | None) -> Source:
    """The files of a GGUF file, of a Hugging Face folder, or of a name on the Hub."""
    _require_on_hub(Path(source), revision)
    if is_gguf(path := Path(source)):
        file, known = GGUFFile(path), ", ".join(PRE_TOKENIZERS)
        lacking = f"Its tokenizer is not imported, since its pre-tokenizer is none of {known}"
        return Source(path, "metadata", file.fields, file.read_tensors, file.read_tokenizer, lacking)
    with argument_path(passed={"path": "source"}):  # the name of a model on the Hub that cannot be reached
        folder = find_folder(source, revision)
    with reading(folder):
        fields, tensors = read_config(folder), partial(read_tensors, folder)
    return Source(folder, CONFIG, fields, tensors, partial(read_tokenizer, folder, fields), "It has no tokenizer.json")


def _require_on_hub(path: Path, revision: str | None) -> None:
    if revision is not None and os.path.exists(path):
        raise ArgumentError("revision", revision, f"selects a commit of a model on the Hub, and {path} is here")


def is_gguf(path: Path) -> bool:
    """Return True if a path is a file of the GGUF format by its name."""
    return path.suffix == ".gguf" and os.path.isfile(path)


def import_model(source: str, path: Path, revision: str | None = None) -> list[str]:
    """Convert a Hugging Face model to a checkpoint; return lines to print.

    Args:
        source: a GGUF file, a folder, or the name of a model on the Hub.
        path: the file to write.
        revision: a branch, a tag or a commit of the Hub; None for the main branch.

    Raises:
        ArgumentError: the model is not supported, or the Hub has no such model or cannot be reached.
    """
    if path.exists():
        raise ArgumentError("path", path, "exists already")
    files = open_source(source, revision)
    family = family_of(files.fields, files.path)
    try:
        with reading(files.path):
            settings, tokenizer = family.settings(files.fields), files.read_tokenizer()
    except ArgumentError as error:
        error.path = (f"{files.path / files.config}: {'.'.join(error.path[1:])}",)
        raise
    config = compose_family(family, settings)
    if tokenizer is not None and tokenizer.vocab_size > settings["model.vocab_size"]:
        reason = (
            f"the tokenizer has {tokenizer.vocab_size} tokens, but the model has embeddings for "
            f"{settings['model.vocab_size']} only; resize_token_embeddings of transformers adds the missing ones"
        )
        raise ArgumentError("source", source, reason)
    network = meta_network(config)
    with reading(files.path):
        weights = _our_weights(files, family, settings, network)
    layers = " + ".join(str(len(stack.layers)) for stack in network.stacks())
    size = f"{network.num_parameters():,} parameters in {layers} layers of {settings['model.num_heads']} heads"
    lines = [f"{family.name}, {size}, saved in {path}."]
    # Assigned, since the network is on the meta device.
    network.load_state_dict(weights, assign=True)
    facts = {"precision": "32-true", "data_fingerprint": None, "train/num_tokens": None}
    facts["model_type"] = family.model_type
    text = tokenizer.to_json() if tokenizer else None
    overrides = describe_config(config, family.groups)
    path.absolute().parent.mkdir(parents=True, exist_ok=True)
    save_network(path, network, Checkpoint(path, weights, overrides, text, facts, step=0), overrides)
    lines += [family.note] if family.note else []
    if tokenizer is None:
        return [*lines, f"{files.untokenized}, so programs that read text refuse it; in Python it takes token ids."]
    program = f"python evaluate.py checkpoint={format_value(path)} data=text"
    file = "PAIRS" if len(network.stacks()) > 1 else "FILE"
    return [*lines, f"To analyse its heads: {program} data.files={file} analysis=heads"]


def compose_family(family: Family, settings: Plain) -> Plain:
    """Our unresolved config of a family's model, as a checkpoint stores it; `settings` has values by config key."""
    config = OmegaConf.create(composed(family.groups)[0])
    OmegaConf.set_struct(config, True)
    for key, value in settings.items():
        OmegaConf.update(config, key, value)
    plain: Any = OmegaConf.to_container(config, resolve=False)
    return plain


def meta_network(config: Plain) -> Network:
    """The network of a config on the meta device, which allocates no memory for weights."""
    created = OmegaConf.create(config)
    with torch.device("meta"), config_keys(created):
        return instantiate(created.network, _convert_="all")


def family_of(fields: Fields, folder: Path) -> Family:
    """The family of a model with the given `config.json`; an `ArgumentError` is raised if there is none."""
    for family in FAMILIES:
        if family.model_type == fields.get("model_type") and family.covers(fields):
            return family
    known = ", ".join(dict.fromkeys(family.model_type for family in FAMILIES))
    reason = f"config.json says model_type={str(fields.get('model_type'))[:100]}; supported types are {known}"
    raise ArgumentError("source", folder, reason)


def _our_weights(files: Source, family: Family, settings: Plain, network: Network) -> Weights:
    """Rename the weights of a family to our names; raise an error for a missing or an unknown weight."""
    expected = network.state_dict()
    weights, others = family.read(files.read_tensors(), network)
    tied = (DECODER_EMBEDDING, OUTPUT) if settings["model.tied_readout"] else (DECODER_EMBEDDING,)
    for name in (name for name in tied if name in expected and EMBEDDING in weights):  # one stack has one embedding
        if not torch.equal(weights.setdefault(name, weights[EMBEDDING]), weights[EMBEDDING]):
            reason = f"{family.name_of(name, network)} differs from {family.name_of(EMBEDDING, network)}"
            if name == OUTPUT:
                reason += f", although {files.config} says tie_word_embeddings=true; false keeps both"
            raise ArgumentError("source", files.path, reason)
        weights[name] = weights[EMBEDDING]
    lacking = [family.name_of(name, network) for name in sorted(expected.keys() - weights.keys())]
    others = [*(family.name_of(name, network) for name in sorted(weights.keys() - expected.keys())), *others]
    problems = [*(f"{name} is missing" for name in lacking), *(f"{name} is not part of it" for name in others)]
    for name in sorted(expected.keys() & weights.keys()):
        if (shape := [*weights[name].shape]) != (needed := [*expected[name].shape]):
            problems.append(f"{family.name_of(name, network)} has the size {shape}, not {needed}, here")
    if problems:
        reason = f"does not match the {family.architecture} of its {files.config}: {problems[0]}"
        raise ArgumentError("source", files.path, reason)
    return weights
