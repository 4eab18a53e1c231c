"""Tokenizers as Hugging Face keeps them in a model's folder, in and out."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.implementations import BertWordPieceTokenizer

from tinyformer.data import TextTokenizer
from tinyformer.interop.family import Fields
from tinyformer.interop.json_file import read_json

SENTENCEPIECE = "tokenizer.model"
SETTINGS = "tokenizer_config.json"
SPECIAL = "special_tokens_map.json"

OWN_TOKENS = ("TemplateProcessing", "BertProcessing", "RobertaProcessing")
"""Post-processors of a `tokenizer.json` that put tokens around a text."""


def _from_json(folder: Path, settings: Fields) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def _from_merges(folder: Path, settings: Fields) -> Tokenizer:
    """GPT-2's, byte-level."""
    tokenizer = Tokenizer(models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt")))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=bool(settings.get("add_prefix_space", False)))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _from_words(folder: Path, settings: Fields) -> Tokenizer:
    """BERT's WordPiece."""
    made = BertWordPieceTokenizer(
        str(folder / "vocab.txt"),
        lowercase=settings.get("do_lower_case", True),
        strip_accents=settings.get("strip_accents"),
        handle_chinese_chars=settings.get("tokenize_chinese_chars", True),
    )
    return Tokenizer.from_str(made.to_str())


FORMATS: dict[tuple[str, ...], Callable[[Path, Fields], Tokenizer]] = {
    ("tokenizer.json",): _from_json,
    ("vocab.json", "merges.txt"): _from_merges,
    ("vocab.txt",): _from_words,
}
"""The files of a tokenizer, the most exact first."""

TOKENIZER_FILES = (*(name for names in FORMATS for name in names), SETTINGS, SPECIAL, SENTENCEPIECE)


def read_tokenizer(folder: Path, fields: Fields) -> TextTokenizer | None:
    """The tokenizer of a folder; None where it has none.

    A text begins with the token that ends one in GPT-2 and Llama, and with `[CLS]` in BERT.

    Args:
        folder: of the model.
        fields: of its `config.json`.

    Raises:
        ValueError: it cannot be read, or has no token to begin a text with.
    """
    found = next((names for names in FORMATS if all((folder / name).is_file() for name in names)), None)
    if found is None:
        if (folder / SENTENCEPIECE).is_file():
            raise ValueError(
                f"{folder / SENTENCEPIECE} alone is not read; a tokenizer.json beside it is, which "
                "AutoTokenizer.from_pretrained(…).save_pretrained(…) of transformers writes."
            )
        return None
    settings: Fields = {}
    for name in (SPECIAL, SETTINGS):
        if (folder / name).is_file():
            settings |= read_json(folder / name)
    try:
        tokenizer = FORMATS[found](folder, settings)
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{folder / found[0]} is no tokenizer that `tokenizers` can read ({error}).") from error
    spec = json.loads(tokenizer.to_str())
    first = _first_token(tokenizer, settings, fields)
    first_id = tokenizer.token_to_id(first) if first else None
    if first is not None and first_id is not None:
        # Ours begins a text without being told.
        spec["post_processor"] = _without(spec["post_processor"], _beginning(first, first_id))
    try:
        return TextTokenizer(Tokenizer.from_str(json.dumps(spec)), first)
    except ValueError as error:
        raise ValueError(
            f"{folder}: no token can stand between texts; name one of the vocabulary as eos_token in {SETTINGS}."
        ) from error


def tokenizer_files(tokenizer: TextTokenizer, max_seq_len: int) -> dict[str, dict[str, Any]]:
    """The files of a tokenizer, by name; a text that they encode begins as ours do."""
    spec = json.loads(tokenizer.to_json())
    spec.pop("eos_token", None)
    plain = Tokenizer.from_str(json.dumps(spec))
    eos = plain.id_to_token(tokenizer.eos_id)
    assert eos is not None
    begun, own = _beginning(eos, tokenizer.eos_id), spec["post_processor"]
    if own is None:
        spec["post_processor"] = begun
    elif not _adds_tokens(own):
        spec["post_processor"] = {"type": "Sequence", "processors": [own, begun]}
    special = {
        "eos_token": eos,
        "bos_token": eos,
        "cls_token": eos,
        "sep_token": eos,
        "pad_token": eos,
        "unk_token": None if tokenizer.unk_id is None else plain.id_to_token(tokenizer.unk_id),
        "mask_token": None if tokenizer.mask_id is None else plain.id_to_token(tokenizer.mask_id),
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_seq_len,
        "clean_up_tokenization_spaces": False,
    }
    return {
        "tokenizer.json": spec,
        SETTINGS: settings | {name: token for name, token in special.items() if token is not None},
    }


def _first_token(tokenizer: Tokenizer, settings: Fields, fields: Fields) -> str | None:
    """The token that a text begins with, by what the files say of it; None where they say nothing."""
    end = fields.get("eos_token_id")
    number = end[0] if isinstance(end, list) and end else end
    candidates = (
        _named(settings, "eos_token"),
        tokenizer.id_to_token(number) if isinstance(number, int) and number >= 0 else None,
        _named(settings, "cls_token"),
        "[CLS]",
    )
    return next((token for token in candidates if token and tokenizer.token_to_id(token) is not None), None)


def _named(settings: Fields, key: str) -> str | None:
    """A special token: a text, or an object that says more about it."""
    token = settings.get(key)
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def _beginning(token: str, token_id: int) -> dict[str, Any]:
    """The post-processor that begins a text, and the second of a pair, with a token."""
    mark = {"SpecialToken": {"id": token, "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in ("A", "B"))
    return {
        "type": "TemplateProcessing",
        "single": [mark, first],
        "pair": [mark, first, mark, second],
        "special_tokens": {token: {"id": token, "ids": [token_id], "tokens": [token]}},
    }


def _without(processor: dict[str, Any] | None, begun: dict[str, Any]) -> dict[str, Any] | None:
    """A post-processor as it was before an export put `begun` behind it."""
    if processor is not None and processor.get("processors", [])[1:] == [begun]:
        return processor["processors"][0]
    return None if processor == begun else processor


def _adds_tokens(processor: dict[str, Any]) -> bool:
    return processor["type"] in OWN_TOKENS or any(map(_adds_tokens, processor.get("processors", [])))
