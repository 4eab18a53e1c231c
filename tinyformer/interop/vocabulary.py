"""Loading and writing of the tokenizer files in Hugging Face model folders."""

import base64
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.implementations import BertWordPieceTokenizer

from tinyformer.data import TextTokenizer
from tinyformer.data.tokenizer.tokenizer import add_special, template
from tinyformer.errors import ArgumentError
from tinyformer.interop.family import Fields

SETTINGS = "tokenizer_config.json"
SPECIAL, ADDED = "special_tokens_map.json", "added_tokens.json"

NAMED = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
"""Special tokens that `transformers` recognises within a text, in the order in which it adds them."""


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if there is no such file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _bert(settings: Fields, _: Tokenizer) -> tuple[Any, Any]:
    lowercase, accents = settings.get("do_lower_case", True), settings.get("strip_accents")
    normalizer = normalizers.BertNormalizer(True, settings.get("tokenize_chinese_chars", True), accents, lowercase)
    return normalizer, pre_tokenizers.BertPreTokenizer()


def _byte_level(settings: Fields, _: Tokenizer) -> tuple[Any, Any]:
    return None, pre_tokenizers.ByteLevel(add_prefix_space=bool(settings.get("add_prefix_space")))


def _llama(settings: Fields, _: Tokenizer) -> tuple[Any, Any]:
    scheme = "never" if settings.get("add_prefix_space") is False else "always" if settings.get("legacy") else "first"
    return None, pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)


def _t5(_: Fields, tokenizer: Tokenizer) -> tuple[Any, Any]:
    """Rebuild the Unigram model from its pieces, and end texts with `</s>`; return the normalizer and pre-tokenizer."""
    written = json.loads(tokenizer.to_str())
    tokenizer.model = models.Unigram([(piece, score) for piece, score in written["model"]["vocab"]], 2, False)
    tokenizer.post_processor = template(tokenizer, [], [tokenizer.get_vocab()["</s>"]])
    normalizer = written["normalizer"] or {}
    tables = [part for part in normalizer.get("normalizers", [normalizer]) if part.get("type") == "Precompiled"]
    kept = normalizers.Precompiled(base64.b64decode(tables[0]["precompiled_charsmap"])) if tables else None
    return kept, pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])


QWEN_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
QWEN_SPLIT += r"|\s+(?!\S)|\s+"


def _qwen(settings: Fields, _: Tokenizer) -> tuple[Any, Any]:
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=bool(settings.get("add_prefix_space")), use_regex=False)
    split = pre_tokenizers.Split(Regex(QWEN_SPLIT), "isolated")
    return normalizers.NFC(), pre_tokenizers.Sequence([split, to_bytes])


CLASSES: dict[str, tuple[type, Callable[[Fields, Tokenizer], tuple[Any, Any]]]] = {
    **dict.fromkeys(("BertTokenizer", "DistilBertTokenizer"), (models.WordPiece, _bert)),
    "Qwen2Tokenizer": (models.BPE, _qwen),
    **dict.fromkeys(("GPT2Tokenizer", "RobertaTokenizer", "BartTokenizer"), (models.BPE, _byte_level)),
    "GPTNeoXTokenizer": (models.BPE, lambda *given: (normalizers.NFC(), _byte_level(*given)[1])),
    "T5Tokenizer": (models.Unigram, _t5),
    **dict.fromkeys(("LlamaTokenizer", "CodeLlamaTokenizer"), (models.BPE, _llama)),
}
"""Tokenizer classes of `transformers` 5: the model that each needs, and a function for normalizer and pre-tokenizer."""

OF_TYPE = {
    **{"bart": "BartTokenizer", "gpt_neox": "GPTNeoXTokenizer", "roberta": "RobertaTokenizer"},
    **dict.fromkeys(("bert", "distilbert"), "BertTokenizer"),
    **dict.fromkeys(("gpt2", "gpt_neo", "gptj", "opt", "phi"), "GPT2Tokenizer"),
    **dict.fromkeys(("qwen2", "qwen3"), "Qwen2Tokenizer"),
}
AS_IT_IS = ("None", "PreTrainedTokenizer", "TokenizersBackend")
"""The class by `model_type`, if no file names a class; and the classes that use a `tokenizer.json` without changes."""

ALWAYS = {"qwen2": "Qwen2Tokenizer"}
ALWAYS |= dict.fromkeys(("mistral", "modernbert", "olmo2", "olmo3", "phi3"), "TokenizersBackend")
"""The class by `model_type`, if it does not depend on the class that the files name."""


def _from_merges(vocabulary: str, merges: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE.from_file(vocabulary, merges))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


FORMATS: dict[tuple[str, ...], tuple[Callable[..., Tokenizer], str | None]] = {
    ("tokenizer.json",): (Tokenizer.from_file, None),
    ("vocab.json", "merges.txt"): (_from_merges, "GPT2Tokenizer"),
    ("vocab.txt",): (lambda path: Tokenizer.from_str(BertWordPieceTokenizer(path).to_str()), "BertTokenizer"),
}
"""By file names, a loader of these files and the tokenizer's class; the first entry whose files exist is used."""

TOKENIZER_FILES = (*(name for names in FORMATS for name in names), SETTINGS, SPECIAL, ADDED)


def read_tokenizer(folder: Path, fields: Fields) -> TextTokenizer | None:
    """The tokenizer of a model folder, given the fields of its `config.json`; None if the folder has no tokenizer.

    The tokenizer's post-processor determines the tokens around a text.
    """
    names = next((names for names in FORMATS if all((folder / name).is_file() for name in names)), None)
    if names is None:
        return None
    special, settings, added = (read_json(folder / name) for name in (SPECIAL, SETTINGS, ADDED))
    settings = special | settings if "added_tokens_decoder" in settings else settings | special
    reader, kind = FORMATS[names]
    kind = kind or _class_of(settings, fields)
    _require_applied(settings, kind, folder, names[0])
    tokenizer = reader(*(str(folder / name) for name in names))
    _set_parts(tokenizer, kind, settings)
    # If BART's tokenizer is in `vocab.json`, only its `config.json` names the tokens around a text.
    is_silent = tokenizer.post_processor is None and names[0] != "tokenizer.json"
    _add_tokens(tokenizer, settings, added)
    ends = _end_ids(tokenizer, fields)
    first, mask = _first_token(tokenizer, settings, ends), _content(settings.get("mask_token"))
    return TextTokenizer(tokenizer, first, not (is_silent and fields.get("is_encoder_decoder")), ends, mask)


def tokenizer_files(
    tokenizer: TextTokenizer, max_seq_len: int, ids: Fields, around: tuple[Sequence[int], Sequence[int]]
) -> dict[str, dict[str, Any]]:
    """The contents of a tokenizer's JSON files by file name; in `transformers`, a text has the same tokens as here.

    `ids` are the fields `bos_token_id`, `eos_token_id` and `pad_token_id` of the model, and `around` the tokens before
    and after a text, unless the tokenizer's post-processor adds them.
    """
    plain = Tokenizer.from_str(tokenizer.reader.to_str())
    if not tokenizer.post_processed:
        plain.post_processor = template(plain, *around)
    bos, eos, pad = (ids[f"{name}_token_id"] for name in ("bos", "eos", "pad"))
    special = {"eos": eos, "bos": bos, "cls": eos if bos is None else bos, "sep": eos, "pad": pad}
    special |= {"unk": tokenizer.unk_id, "mask": tokenizer.mask_id}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": max_seq_len}
    settings |= {"clean_up_tokenization_spaces": False}
    tokens = {f"{name}_token": plain.id_to_token(i) for name, i in special.items() if i is not None}
    return {"tokenizer.json": json.loads(plain.to_str()), SETTINGS: settings | tokens}


def _class_of(settings: Fields, fields: Fields) -> str:
    """The class with which `transformers` 5 loads a `tokenizer.json`."""
    named, model_type = settings.get("tokenizer_class") or fields.get("tokenizer_class"), fields.get("model_type")
    return ALWAYS.get(str(model_type)) or str(named or OF_TYPE.get(str(model_type))).removesuffix("Fast")


def _require_applied(settings: Fields, kind: str, folder: Path, name: str) -> None:
    """Refuse a setting that changes the tokens of a text, but is not supported."""
    of_class = () if kind in (*CLASSES, *AS_IT_IS) else ("add_prefix_space", "do_lower_case", "strip_accents")
    around = () if name == "tokenizer.json" else ("add_bos_token", "add_eos_token")
    for setting in ("split_special_tokens", "fix_mistral_regex", *of_class, *around):
        if settings.get(setting):
            reason = f"{SETTINGS} has {setting}={json.dumps(settings[setting])[:100]}, which changes the tokens of a "
            reason += f"text, and is not supported for tokenizer_class={kind}; without this setting the folder works"
            raise ArgumentError("folder", str(folder), reason)


def _set_parts(tokenizer: Tokenizer, kind: str, settings: Fields) -> None:
    """Set normalizer and pre-tokenizer as `transformers` does, whose Llama class leaves byte-level ones unchanged."""
    model, parts = CLASSES.get(kind, (type(None), _byte_level))
    if isinstance(tokenizer.model, model) and not (parts is _llama and '"ByteLevel"' in tokenizer.to_str()):
        tokenizer.normalizer, tokenizer.pre_tokenizer = parts(settings, tokenizer)


def _add_tokens(tokenizer: Tokenizer, settings: Fields, added: Fields) -> None:
    """Add the tokens in files next to `tokenizer.json`, with flags such as "lstrip", in the order of `transformers`."""
    extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
    keys = dict.fromkeys([*NAMED, *(name for name in settings if name.endswith("_token"))])
    tokens = [*map(settings.get, keys), *(extra.values() if isinstance(extra, dict) else extra)]
    special = [name for token in tokens if (name := _content(token))]
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    others = {i: {"content": name, "special": name in special} for name, i in added.items() if name not in known}
    decoder = settings.get("added_tokens_decoder", others)
    for number in sorted(decoder, key=int):
        tokenizer.add_tokens([AddedToken(**{flag: on for flag, on in decoder[number].items() if flag != "__type"})])
    add_special(tokenizer, special)


def _end_ids(tokenizer: Tokenizer, fields: Fields) -> list[int]:
    """The ids of the tokens that end a generated text, of which a model may have several."""
    end, known = fields.get("eos_token_id"), tokenizer.get_vocab(with_added_tokens=True).values()
    return [i for i in (end if isinstance(end, list) else [end]) if i in known]


def _first_token(tokenizer: Tokenizer, settings: Fields, ends: Sequence[int]) -> str | None:
    """The token that starts a text according to the files; None if they do not name one."""
    eos, cls = (_content(settings.get(name)) for name in ("eos_token", "cls_token"))
    candidates = (eos, *map(tokenizer.id_to_token, ends[:1]), cls, "[CLS]")
    return next((token for token in candidates if token and tokenizer.token_to_id(token) is not None), None)


def _content(token: object) -> str | None:
    """The text of a special token, given as a string or as an object with the text as its `content`; else None."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None
