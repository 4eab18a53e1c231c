"""A model's folder: found here or on the Hub, read, written."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from tinyformer.data import hub
from tinyformer.interop.family import Fields, Weights
from tinyformer.interop.json_file import read_json
from tinyformer.interop.vocabulary import TOKENIZER_FILES

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
SHARDS = "model-*-of-*.safetensors"

DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}
"""Of weights that are plain numbers, and what they are called; others are quantised."""


def find_folder(name: str) -> Path:
    """The folder of a model: `name` itself, or what the Hub has under it, only the files that are read.

    Raises:
        ValueError: there is neither, or the Hub cannot be reached.
    """
    path = Path(name)
    if path.is_dir():
        return path
    if path.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ValueError(f"{name} is no folder; one with {CONFIG} and {WEIGHTS} works, or a model's name on the Hub.")
    return hub.model_folder(name, [CONFIG, WEIGHTS, INDEX, SHARDS, *TOKENIZER_FILES])


def read_config(folder: Path) -> Fields:
    """The fields of a folder's `config.json`.

    Raises:
        ValueError: there is none, or none that can be read.
    """
    if not (folder / CONFIG).is_file():
        raise ValueError(f"{folder} has no {CONFIG}; a folder that save_pretrained of transformers wrote has one.")
    return read_json(folder / CONFIG)


def read_tensors(folder: Path) -> tuple[Weights, str]:
    """All tensors of a folder's files in fp32, whole numbers as they are; and the names of the types they had.

    Raises:
        ValueError: there are none, or none that can be read.
    """
    tensors: Weights = {}
    for path in _files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dictionary)
        except (OSError, SafetensorError) as error:
            raise ValueError(
                f"{path} cannot be read: it is cut short, damaged, or no safetensors ({error})."
            ) from error
    for name, tensor in tensors.items():
        # Those of more dimensions are masks, which old files call a bias.
        if tensor.dtype not in DTYPES and tensor.ndim < 3 and name.endswith(("weight", "bias")):
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise ValueError(f"{folder}: {name} is quantised ({dtype}); fp32, bf16 and fp16 come in.")
    dtypes = sorted({DTYPES[tensor.dtype] for tensor in tensors.values() if tensor.dtype in DTYPES})
    plain = {name: tensor.float() if tensor.dtype in DTYPES else tensor for name, tensor in tensors.items()}
    return plain, ", ".join(dtypes)


def _files(folder: Path) -> list[Path]:
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if not (folder / INDEX).is_file():
        raise ValueError(
            f"{folder} has no {WEIGHTS}; pickles such as pytorch_model.bin are not read, since they can run code: "
            "transformers' save_pretrained makes one of them."
        )
    shards = read_json(folder / INDEX).get("weight_map")
    names = sorted(set(map(str, shards.values()))) if isinstance(shards, dict) else []
    missing = [name for name in names if name != Path(name).name or not (folder / name).is_file()]
    if not names or missing:
        raise ValueError(f"{folder / INDEX} names {missing[0] if missing else 'no file'}, which is not there.")
    return [folder / name for name in names]


def write_folder(folder: Path, files: dict[str, dict[str, Any]], weights: Weights) -> None:
    """Write a new folder, whole or not at all.

    Args:
        folder: that does not exist.
        files: JSON objects by the names of their files.
        weights: for `model.safetensors`.

    Raises:
        ValueError: it exists, or the folder that it would lie in does not.
    """
    if folder.exists():
        raise ValueError(f"{folder} exists already; name a folder that does not.")
    if not folder.absolute().parent.is_dir():
        raise ValueError(f"{folder} lies in no folder that exists.")
    temporary = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir()
        for name, contents in files.items():
            text = json.dumps(contents, indent=2, ensure_ascii=False) + "\n"
            (temporary / name).write_text(text, encoding="utf-8")
        save_file(weights, temporary / WEIGHTS, metadata={"format": "pt"})
        shutil.copymode(temporary / next(iter(files)), temporary / WEIGHTS)  # which save_file keeps to its owner
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
