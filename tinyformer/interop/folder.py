"""Loading and writing of Hugging Face model folders, and the differences between the networks of two configs."""

import contextlib
import inspect
import json
import os
import pydoc
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tinyformer.data.sources import hub
from tinyformer.errors import ArgumentError
from tinyformer.files import atomic_write
from tinyformer.interop.family import Fields, Weights
from tinyformer.interop.vocabulary import TOKENIZER_FILES, read_json

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
SHARDS = "model-*-of-*.safetensors"

DECODING = "generation_config.json"
OF_DECODING = ("eos_token_id", "decoder_start_token_id", "forced_bos_token_id", "bad_words_ids", "suppress_tokens")
"""The file with decoding settings in newer versions of `transformers`, and the fields that are loaded from it."""

PATTERNS = (CONFIG, DECODING, WEIGHTS, INDEX, SHARDS, *TOKENIZER_FILES)

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Dtypes of weights that are not quantised."""


def find_folder(name: str, revision: str | None = None, patterns: Sequence[str] = PATTERNS) -> Path:
    """The folder of a model: a local folder, or the downloaded files of a model on the Hub, named after its commit."""
    return Path(name) if os.path.isdir(name) else hub.model_folder(name, patterns, revision)


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """A context in which an error about a damaged file becomes an `ArgumentError` about the source of the model."""
    try:
        yield
    except ArgumentError:
        raise
    except Exception as error:  # a damaged file can raise anything
        problem = " ".join(str(error).split())[:100]
        reason = f"cannot be read: a file is cut short, damaged, or of an unknown type ({problem})"
        raise ArgumentError("source", str(path), reason) from error


def model_files(folder: Path) -> list[Path]:
    """The files of a folder that an import reads."""
    return sorted({file for pattern in PATTERNS for file in folder.glob(pattern)})


def read_config(folder: Path) -> Fields:
    """The fields of a folder's `config.json`, with the special tokens of its `generation_config.json`."""
    if not (folder / CONFIG).is_file():
        reason = f"has no {CONFIG}; a folder written by save_pretrained of transformers has one"
        raise ArgumentError("folder", str(folder), reason)
    decoding = read_json(folder / DECODING)
    return read_json(folder / CONFIG) | {name: decoding[name] for name in OF_DECODING if name in decoding}


def read_tensors(folder: Path) -> Weights:
    """All tensors of a folder, with floating-point weights in fp32."""
    tensors: Weights = {}
    for path in _files(folder):
        tensors |= load_file(path)
    for name, tensor in tensors.items():
        # Tensors of 3 or more dimensions are masks, which older files call a bias.
        is_weight = tensor.is_floating_point() or (tensor.ndim < 3 and name.endswith(("weight", "bias")))
        if tensor.dtype not in DTYPES and is_weight:
            dtype = str(tensor.dtype).removeprefix("torch.")
            reason = f"{name} is quantised ({dtype}); only fp32, bf16 and fp16 weights are supported"
            raise ArgumentError("folder", str(folder), reason)
    return {name: tensor.float() if tensor.dtype in DTYPES else tensor for name, tensor in tensors.items()}


def _files(folder: Path) -> list[Path]:
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if not (folder / INDEX).is_file():
        reason = (
            f"has no {WEIGHTS}; pickle files such as pytorch_model.bin are not loaded, since they can run code; "
            "save_pretrained of transformers converts them"
        )
        raise ArgumentError("folder", str(folder), reason)
    names = sorted({*read_json(folder / INDEX)["weight_map"].values()})
    if outside := [name for name in names if Path(name).name != name]:
        raise ArgumentError("folder", str(folder), f"its {INDEX} names {outside[0]}, which is not in the folder")
    return [folder / name for name in names]


def write_folder(folder: Path, files: dict[str, dict[str, Any]], weights: Weights) -> None:
    """Atomically write a new folder with JSON files, given as objects by file name, and with weights."""
    if folder.exists():
        raise ArgumentError("folder", str(folder), "already exists; choose a new folder")
    folder.absolute().parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(folder) as temporary:
        temporary.mkdir()
        for name, contents in files.items():
            text = json.dumps(contents, indent=2, ensure_ascii=False) + "\n"
            (temporary / name).write_text(text, encoding="utf-8")
        save_file(weights, temporary / WEIGHTS, metadata={"format": "pt"})
        shutil.copymode(temporary / next(iter(files)), temporary / WEIGHTS)  # save_file lets only the owner read it


@dataclass(frozen=True)
class Difference:
    """A value in which two configs differ."""

    path: str  # the dotted path of the node
    name: str  # the key of the value in the node
    value: Any  # the value in the first config
    other: Any  # the value in the second config


def find_differences(node: dict[str, Any], other: dict[str, Any], path: str = "") -> Iterator[Difference]:
    """The differences between two resolved nodes at a dotted path; a missing argument has its class's default.

    The node `other` is trusted; a class in `node` is imported only if `other` names the same class there.
    """
    if node.get("_target_") != other.get("_target_"):
        yield Difference(path, "_target_", node.get("_target_"), other.get("_target_"))
        return
    node, other = _with_defaults(node), _with_defaults(other)
    for name in sorted(node.keys() | other.keys()):
        value, other_value = node.get(name), other.get(name)
        if isinstance(value, dict) and isinstance(other_value, dict):
            yield from find_differences(value, other_value, f"{path}.{name}" if path else name)
        elif value != other_value:
            yield Difference(path, name, value, other_value)


def _with_defaults(node: dict[str, Any]) -> dict[str, Any]:
    """A node with all arguments of its class, so that an explicit default does not count as a difference."""
    target = pydoc.locate(node["_target_"]) if "_target_" in node else None
    if not inspect.isclass(target):
        return node
    defaults = {
        name: parameter.default
        for kind in reversed(target.__mro__[:-1])  # all but `object`
        if "__init__" in kind.__dict__
        for name, parameter in inspect.signature(kind).parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }
    # Configs hold lists, not tuples.
    full: dict[str, Any] = {
        name: list(value) if isinstance(value, tuple) else value for name, value in (defaults | node).items()
    }
    if full.get("head_dim", 0) is None and full.get("num_heads") and full.get("d_model"):
        full["head_dim"] = full["d_model"] // full["num_heads"]
    if full.get("v_head_dim", 0) is None:
        full["v_head_dim"] = full["head_dim"]
    return full
