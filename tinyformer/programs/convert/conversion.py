"""The conversion of a checkpoint to a Hugging Face folder, and the comparison of an import with `transformers`."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from tinyformer.checkpoint.file import Checkpoint, load_checkpoint, require_fitting
from tinyformer.config.admission import Plain, admit_config, composed, leaves, never_instantiated
from tinyformer.config.conf import key_of
from tinyformer.config.errors import ConfigError
from tinyformer.data.batches.windows import Batch
from tinyformer.errors import ArgumentError, argument_path
from tinyformer.interop import FAMILIES
from tinyformer.interop.encoder_decoders import special_ids
from tinyformer.interop.family import Family, Fields
from tinyformer.interop.folder import Difference, find_differences, write_folder
from tinyformer.interop.vocabulary import tokenizer_files
from tinyformer.measures.capture import capture_attention
from tinyformer.model.loading import load
from tinyformer.nn import EncoderDecoder
from tinyformer.run.importing import EMBEDDING, OUTPUT, compose_family, family_of, meta_network, open_source
from tinyformer.run.starting_checkpoint import tokenizer_of

WITHOUT_EFFECT = ("backend", "init", "init_std", "checkpoint_activations", "autocast_residual", "dropout")
"""Arguments that do not change the function of a trained network in evaluation."""


def export_model(path: Path, folder: Path) -> list[str]:
    """Write a checkpoint as a folder that `transformers` loads; return lines to print.

    Raises a `ConfigError` that names a setting without a counterpart in any family.
    """
    checkpoint = load_checkpoint(path)
    with argument_path(passed={"path": "checkpoint"}):
        config = admit_config(checkpoint, never_instantiated)  # classes are compared by name
    sized = OmegaConf.create(_with_sizes(checkpoint, config))
    written = OmegaConf.to_container(sized, resolve=False)
    function = _function_of(sized)
    # A node of another class differs in a single argument, its class, and would count as near.
    classes = _classes_of(config)
    distances = [len(classes ^ _classes_of(composed(family.groups)[0])) for family in FAMILIES]
    alike = [family for family, distance in zip(FAMILIES, distances, strict=True) if distance == min(distances)]
    candidates = [_as_family(family, sized, function) for family in alike]
    origin = checkpoint.facts.get("model_type")  # of several families with the same function, that of the import
    nearest = min(candidates, key=lambda found: (len(_relevant(found[3])), found[0].model_type != origin))
    family, fields, config, differences = nearest
    if lacking := _relevant(differences):
        setting = f"{_key(lacking[0], written)}={_shown(lacking[0].value)}"
        raise ConfigError(
            f"{setting} has no counterpart in {family.name}, the nearest of the families that can be exported: there "
            f"it is {_shown(lacking[0].other)}."
        )
    network = meta_network(config)
    resolved: Any = OmegaConf.to_container(OmegaConf.create(config).model, resolve=True)
    dtype, shapes = checkpoint.weights[EMBEDDING].dtype, {name: w.shape for name, w in network.state_dict().items()}
    zeros = {name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items() if name.endswith(".bias")}
    full = replace(checkpoint, weights=zeros | checkpoint.weights)
    require_fitting(network, full)
    weights = family.write(full.weights, network)
    if config["model"]["tied_readout"]:
        weights.pop(family.name_of(OUTPUT, network), None)  # an encoder without a head has no output matrix
    fields = fields | {"dtype": str(dtype).removeprefix("torch.")}
    write_folder(folder, _files(fields, family, checkpoint, resolved), weights)
    lines = [f"{family.name}, saved in {folder}: transformers loads it as {family.architecture}."]
    if not checkpoint.tokenizer:
        lines.append("The checkpoint has no tokenizer, so the folder has none.")
    return lines


def _classes_of(config: Plain) -> set[tuple[str, Any]]:
    """The classes in the parts of a config that determine the network, with their keys."""
    parts = {name: config[name] for name in ("network", "block", "norm", "feed_forward", "position", "task")}
    return {(key, value) for key, value in leaves(parts) if key.endswith("_target_")}


def _with_sizes(checkpoint: Checkpoint, config: Plain) -> Plain:
    """A checkpoint's config, in which a `vocab_size` or `d_ff` of null is set to the size of the weights."""
    weights, model = checkpoint.weights, dict(config["model"])
    # A feed-forward network without `up_proj` is a user's class, which no family has anyway.
    up = weights.get("encoder.layers.0.feed_forward.up_proj.weight", weights[EMBEDDING])
    sizes = {"vocab_size": weights[EMBEDDING].shape[0], "d_ff": up.shape[0]}
    model |= {key: size for key, size in sizes.items() if model.get(key) is None}
    return config | {"model": model}


def _as_family(family: Family, sized: DictConfig, function: Plain) -> tuple[Family, Fields, Plain, list[Difference]]:
    """The family, the fields and config of its model nearest to `sized`, and how `function` differs from that model."""
    values = {field.ours: OmegaConf.select(sized, field.ours) for field in family.fields}
    configs = {key: OmegaConf.to_container(value) for key, value in values.items() if OmegaConf.is_config(value)}
    fields = family.describe(values | configs)
    config = compose_family(family, family.settings(fields))
    return family, fields, config, list(find_differences(function, _function_of(OmegaConf.create(config))))


def _function_of(config: DictConfig) -> Plain:
    """The resolved part of a config that determines the outputs of the model."""
    objective = OmegaConf.to_container(config.task.objective, resolve=True)
    return {"network": OmegaConf.to_container(config.network, resolve=True), "task": {"objective": objective}}


def _relevant(differences: Sequence[Difference]) -> list[Difference]:
    """The differences that change outputs in evaluation, without biases that only the family has: they become zeros."""
    return [d for d in differences if d.name not in WITHOUT_EFFECT and (d.name, d.other) != ("bias", True)]


def _key(difference: Difference, written: Any) -> str:
    try:
        return key_of(written, f"{difference.path}.{difference.name}").removesuffix("._target_")
    except KeyError:  # the checkpoint's config leaves the argument to its default
        return f"{difference.path}.{difference.name}"


def _shown(value: Any) -> str:
    """A value as it is typed on a command line; for a node or a class, the name of the class."""
    if isinstance(value, dict):
        value = value.get("_target_", value)
    if isinstance(value, str) and value.startswith("tinyformer."):
        return value.rpartition(".")[2]
    return json.dumps(value, separators=(",", ":"), default=str).strip('"')


def _files(fields: Fields, family: Family, checkpoint: Checkpoint, model: Plain) -> dict[str, Plain]:
    """The JSON files of a folder, given the values of the `model` group."""
    tokenizer = tokenizer_of(checkpoint) if checkpoint.tokenizer else None
    if "cross_attention" in family.groups:
        special, decoding = special_ids(model["special_tokens"], tokenizer.eos_id if tokenizer else None)
        files = {"config.json": fields | special, "generation_config.json": decoding}
        start = [] if special["bos_token_id"] is None else [special["bos_token_id"]]
        around = (start, [special["eos_token_id"]])
    elif tokenizer is None:
        return {"config.json": dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")) | fields}
    else:
        special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), tokenizer.eos_id)
        special["bos_token_id"] = tokenizer.start_id
        ends = special | {"eos_token_id": [*tokenizer.end_ids] if len(tokenizer.end_ids) > 1 else tokenizer.end_ids[0]}
        # RoBERTa counts positions from the id of its padding token.
        ends |= {name: fields[name] for name in ends.keys() & fields.keys()}
        generation = {"generation_config.json": ends} if family.generates else {}
        files, around = {"config.json": fields | ends, **generation}, ([tokenizer.eos_id], [])
    return files | (tokenizer_files(tokenizer, model["max_seq_len"], special, around) if tokenizer else {})


def import_transformers(text: str) -> Any:
    """The library `transformers`, without its messages; an `ArgumentError` is raised if it is not installed."""
    try:
        import transformers  # noqa: PLC0415
    except ImportError as error:
        raise ArgumentError("check", text, "needs the package transformers: pip install transformers") from error
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


@torch.no_grad()
def compare(source: str, checkpoint: Path, text: str, revision: str | None) -> list[str]:
    """The largest differences of logits and maps between a checkpoint and its source on a text, as lines to print.

    `revision` selects a commit of a source on the Hub. `transformers` computes in fp32 with eager attention. In an
    encoder–decoder, the text is the source and the decoder's input.

    Raises:
        ArgumentError: `transformers` cannot tokenise the text, or the text is too long.
    """
    transformers, model, found = import_transformers(text), load(checkpoint), open_source(source, revision)
    folder, file = (found.path.parent, {"gguf_file": found.path.name}) if found.path.is_file() else (found.path, {})
    try:
        tokens = transformers.AutoTokenizer.from_pretrained(folder, **file)(text)["input_ids"]
    except Exception as error:  # the class depends on what the folder lacks
        reason = f"transformers cannot tokenise it: {str(error).strip().splitlines()[0]}"
        raise ArgumentError("check", text, reason) from error
    same = "no tokenizer here"
    if model.origin and model.origin.checkpoint.tokenizer:
        same = "equal token ids" if model.tokenize(text)[0].tolist() == [tokens] else "other token ids"
    ids, lengths = model.tokenize(torch.tensor([tokens], dtype=torch.int64))

    architecture = getattr(transformers, family_of(found.fields, found.path).architecture)
    theirs = architecture.from_pretrained(folder, **file, attn_implementation="eager", dtype=torch.float32).eval()
    is_pair = isinstance(model.network, EncoderDecoder)
    batch: Batch = {"inputs": ids, "lengths": lengths, "source_lengths": lengths}
    with capture_attention(model.network) as maps:
        ours = model.network(*(ids, ids) if is_pair else (ids,), model.task.mask(batch))
    given = {"decoder_input_ids": ids} if is_pair else {}
    expected = theirs(input_ids=ids, **given, output_attentions=True)
    name = "logits" if "logits" in expected else "last_hidden_state"
    kinds = ("encoder_attentions", "decoder_attentions", "cross_attentions") if is_pair else ("attentions",)
    of_theirs = [layer for kind in kinds for layer in expected[kind]]
    differences = {
        (*address, head): difference
        for address, layer, other in zip(model.network.layer_addresses(), maps, of_theirs, strict=True)
        for head, difference in enumerate((layer - other).abs().amax(dim=(0, 2, 3)).tolist())
    }
    worst, most = max(differences, key=differences.__getitem__), (ours - expected[name]).abs().max()
    return [
        f"Compared with transformers {transformers.__version__}, on {len(tokens)} tokens ({same}):",
        f"  largest difference of {name}: {most:.1e}, where the largest is {expected[name].abs().max():.3g}",
        f"  largest difference of {len(differences)} maps: {differences[worst]:.1e}, of head {worst}",
    ]
