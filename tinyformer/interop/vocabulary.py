"""Tokenizer files of Hugging Face model folders, read and written."""

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.implementations import BertWordPieceTokenizer

from tinyformer.data import TextTokenizer
from tinyformer.data.tokenizer.tokenizer import template
from tinyformer.data.tokenizer.untrusted_tokenizer import is_complaint
from tinyformer.errors import ArgumentError, argument_path
from tinyformer.interop.family import Fields

SENTENCEPIECE = ("tokenizer.model", "spiece.model")
SETTINGS = "tokenizer_config.json"
SPECIAL = "special_tokens_map.json"

NAMED = ("bos_token", "eos_token", "cls_token", "sep_token", "pad_token", "mask_token")
"""Special tokens that `transformers` recognises within a text."""


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; anything else is refused."""
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
        json.dumps(contents, ensure_ascii=False).encode()  # fails for half of a surrogate pair
    except (OSError, ValueError, RecursionError) as error:  # not UTF-8, no JSON, or nested too deeply
        raise ArgumentError("path", str(path), f"cannot be read as JSON ({error})") from error
    if isinstance(contents, dict):
        return contents
    raise ArgumentError("path", str(path), "is not a JSON object")


def _from_json(folder: Path, settings: Fields) -> Tokenizer:
    return Tokenizer.from_str((folder / "tokenizer.json").read_text(encoding="utf-8"))


def _from_merges(folder: Path, settings: Fields) -> Tokenizer:
    """A byte-level BPE tokenizer, such as GPT-2's."""
    tokenizer = Tokenizer(models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt")))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=bool(settings.get("add_prefix_space", False)))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _from_words(folder: Path, settings: Fields) -> Tokenizer:
    """A WordPiece tokenizer, such as BERT's."""
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
"""Readers by the files that they need; the first whose files exist is used."""

TOKENIZER_FILES = (*(name for names in FORMATS for name in names), SETTINGS, SPECIAL, *SENTENCEPIECE)


def read_tokenizer(folder: Path, fields: Fields) -> TextTokenizer | None:
    """The tokenizer of a model folder with these fields in its `config.json`; None if it has none.

    Its post-processor determines the tokens around a text.
    """
    names = next((names for names in FORMATS if all((folder / name).is_file() for name in names)), None)
    if names is None:
        if model := next((name for name in SENTENCEPIECE if (folder / name).is_file()), None):
            reason = (
                f"{model} is not supported without a tokenizer.json, which "
                "AutoTokenizer.from_pretrained(…).save_pretrained(…) of transformers writes"
            )
            raise ArgumentError("folder", str(folder), reason)
        return None
    settings: Fields = {}
    for name in (SPECIAL, SETTINGS):
        if (folder / name).is_file():
            with argument_path(passed={"path": "folder"}):
                settings |= read_json(folder / name)
    with _library_errors(folder, names[0]):
        tokenizer = FORMATS[names](folder, settings)
        named = [token for name in NAMED if (token := _special_token(settings, name)) is not None]
        tokenizer.add_special_tokens([token for token in named if tokenizer.token_to_id(token) is not None])
        first = _first_token(tokenizer, settings, fields)
        # Only the `config.json` of BART names the tokens around a text where its tokenizer is in `vocab.json`.
        is_silent = tokenizer.post_processor is None and names[0] != "tokenizer.json"
    try:
        return TextTokenizer(tokenizer, first, not (is_silent and fields.get("is_encoder_decoder")))
    except ArgumentError as error:
        reason = f"the tokenizer has no token that separates texts; {SETTINGS} must name one as eos_token"
        reason = reason if error.path == ("eos_token",) else f"{names[0]} {error.reason}"
        raise ArgumentError("folder", str(folder), reason) from error


@contextlib.contextmanager
def _library_errors(folder: Path, name: str) -> Iterator[None]:
    """Turn errors of the tokenizers library into `ArgumentError`s about a file."""
    try:
        yield
    except ArgumentError as error:
        raise ArgumentError("folder", str(folder), f"{name} {error.reason}") from error
    except BaseException as error:  # the library raises bare exceptions, and panics are no `Exception`
        if not is_complaint(error):
            raise
        reason = f"{name} cannot be read by the tokenizers library ({error})"
        raise ArgumentError("folder", str(folder), reason) from error


def tokenizer_files(
    tokenizer: TextTokenizer, max_seq_len: int, ids: Fields, around: tuple[Sequence[int], Sequence[int]]
) -> dict[str, dict[str, Any]]:
    """The JSON files of a tokenizer by name; it encodes a text in `transformers` to the same tokens as here.

    `ids` are the fields `bos_token_id`, `eos_token_id` and `pad_token_id` of the model, and `around` the tokens before
    and after a text, unless the tokenizer's post-processor adds them.
    """
    plain = Tokenizer.from_str(tokenizer.reader.to_str())
    if not tokenizer.post_processed:
        plain.post_processor = template(plain, *around)
    bos, eos, pad = (
        None if (number := ids[f"{name}_token_id"]) is None else plain.id_to_token(number)
        for name in ("bos", "eos", "pad")
    )
    special = {
        "eos_token": eos,
        "bos_token": bos,
        "cls_token": bos or eos,
        "sep_token": eos,
        "pad_token": pad,
        "unk_token": None if tokenizer.unk_id is None else plain.id_to_token(tokenizer.unk_id),
        "mask_token": None if tokenizer.mask_id is None else plain.id_to_token(tokenizer.mask_id),
    }
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": max_seq_len}
    settings |= {"clean_up_tokenization_spaces": False}
    return {
        "tokenizer.json": json.loads(plain.to_str()),
        SETTINGS: settings | {name: token for name, token in special.items() if token is not None},
    }


def _first_token(tokenizer: Tokenizer, settings: Fields, fields: Fields) -> str | None:
    """The token that starts a text according to the files; None if they do not name one."""
    end = fields.get("eos_token_id")
    end_id = end[0] if isinstance(end, list) and end else end
    tokens = {number: token for token, number in tokenizer.get_vocab(with_added_tokens=True).items()}
    candidates = (
        _special_token(settings, "eos_token"),
        tokens.get(end_id) if isinstance(end_id, int) else None,
        _special_token(settings, "cls_token"),
        "[CLS]",
    )
    return next((token for token in candidates if token and tokenizer.token_to_id(token) is not None), None)


def _special_token(settings: Fields, name: str) -> str | None:
    """A special token, which is a string or an object with the string as its `content`."""
    token = settings.get(name)
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None
