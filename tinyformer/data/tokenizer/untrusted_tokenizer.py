"""Tokenizers from files of strangers: what could hang or crash a process is rejected before the library reads it."""

import base64
import json
import re
from collections.abc import Iterator
from typing import Any

from tinyformer.data.tokenizer.tokenizer import TextTokenizer
from tinyformer.data.tokenizer.untrusted_pattern import could_take_forever, parse_pattern
from tinyformer.errors import ArgumentError

MAX_CHARACTERS, MAX_DEPTH = 200_000_000, 50
"""Bounds of a `tokenizer.json`: the largest public ones have 35 million characters and a depth of 8."""

MAX_GROWTH = 1000
"""The factor by which normalizers and decoders may lengthen a text; Llama's replace one character by one."""

SAMPLE = "The cat, 1 day: naïve 猫.\n"
"""A text that a tokenizer has to encode and decode before it is used."""

MAX_WORD, MAX_ID = 1000, 2**22
"""Bounds of WordPiece's words, in characters (BERT's: 100), and of token ids (XLM-V's: 0.9 million)."""


def tokenizer_from_stranger(text: str) -> TextTokenizer:
    """The tokenizer of a `tokenizer.json` that is not trusted.

    Raises:
        ArgumentError: the text is not a tokenizer's, or the tokenizer could take forever.
    """
    require_harmless(text)
    try:
        tokenizer = TextTokenizer.from_json(text)
        tokenizer.decode(tokenizer.encode(SAMPLE))
    except ArgumentError:
        raise
    except BaseException as error:  # the library raises bare exceptions, and panics are no `Exception`
        if not is_complaint(error):
            raise
        raise _refused(f"cannot be read: {str(error)[:200]}") from error
    return tokenizer


def is_complaint(error: BaseException) -> bool:
    """Whether an error says that the tokenizers library cannot read a file: an exception, or a panic of the library."""
    is_panic = type(error).__name__ == "PanicException"  # a class that cannot be imported
    return is_panic or (isinstance(error, Exception) and not isinstance(error, MemoryError))


def require_harmless(text: str, check_patterns: bool = True) -> None:
    """Refuse a `tokenizer.json` that is not a JSON object, is nested too deeply, or could take forever on a short text.

    Args:
        text: the file.
        check_patterns: whether to check regular expressions, too. Some that are harmless are refused, since Python
            cannot parse them.

    Raises:
        ArgumentError: see above.
    """
    if len(text) > MAX_CHARACTERS:
        raise _refused(f"has more than {MAX_CHARACTERS:,} characters")
    if _depth(text) > MAX_DEPTH:  # before the parser, which recurses
        raise _refused(f"is nested more than {MAX_DEPTH} levels deep")
    try:
        spec = json.loads(text)
    except ValueError as error:
        raise _refused("is not JSON") from error
    if not isinstance(spec, dict) or not isinstance(spec.get("model"), dict):
        raise _refused("is not a tokenizer.json")
    if (growth := _growth(spec)) > MAX_GROWTH:
        raise _refused(f"makes texts up to {growth:.0e} times as long, more than {MAX_GROWTH:,} times")
    if (longest := spec["model"].get("max_input_chars_per_word", 0)) and not _is_small(longest, MAX_WORD):
        raise _refused(f"splits words of more than {MAX_WORD} characters, which could take forever")
    require_small_ids(spec["model"].get("vocab"))
    require_small_ids({number: node.get("id") for number, node in enumerate(_nodes(spec))})  # of added tokens
    for pattern in _patterns(spec) if check_patterns else ():
        if could_take_forever(pattern):
            reason = f"has the pattern {pattern[:100]!r}, whose matching could take forever, as far as can be foreseen"
            raise _refused(reason)


def require_small_ids(vocabulary: Any) -> None:
    """Refuse a vocabulary with an id so large that a table up to it would fill the memory.

    Raises:
        ArgumentError: see above.
    """
    ids = vocabulary.values() if isinstance(vocabulary, dict) else ()
    if not all(_is_small(number, MAX_ID) for number in ids):
        raise _refused(f"has a token id above {MAX_ID:,}")


def _is_small(number: Any, largest: int) -> bool:
    """Whether a value is at most `largest`; True for other types, which the tokenizers library rejects itself."""
    return not isinstance(number, int | float) or number <= largest


def _refused(reason: str) -> ArgumentError:
    return ArgumentError("tokenizer", "tokenizer.json", reason)


def _depth(text: str) -> int:
    """How deeply brackets are nested, those inside strings left out."""
    depth = deepest = 0
    for bracket in re.finditer(r'"(?:[^"\\]|\\.)*"|[\[\]{}]', text, re.DOTALL):
        if bracket[0] in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif bracket[0] in "]}":
            depth -= 1
    return deepest


def _nodes(spec: Any) -> Iterator[dict[str, Any]]:
    """Every mapping of a specification, except in the vocabulary."""
    if isinstance(spec, dict):
        yield spec
        spec = [value for name, value in spec.items() if name not in ("vocab", "merges")]
    for child in spec if isinstance(spec, list) else ():
        yield from _nodes(child)


def _patterns(spec: Any) -> list[str]:
    """The regular expressions of a specification, wherever they stand."""
    return [node["Regex"] for node in _nodes(spec) if isinstance(node.get("Regex"), str)]


def _growth(spec: Any) -> float:
    """By how much all replacements and templates together, wherever they stand, can lengthen a text."""
    growth = 1.0
    for node in _nodes(spec):
        if node.get("type") == "Precompiled":
            growth *= max(1, _longest_of(node.get("precompiled_charsmap")))
        if node.get("type") == "Prepend" and isinstance(node.get("prepend"), str):
            growth *= 1 + len(node["prepend"])
        if node.get("type") == "Replace" and isinstance(node.get("content"), str):
            growth *= max(1, len(node["content"]) + _matches_empty(node.get("pattern")))
        if node.get("type") == "TemplateProcessing":  # which can repeat its text
            growth *= max(1, *(json.dumps(node.get(name)).count('"Sequence"') for name in ("single", "pair")))
    return growth


def _longest_of(charsmap: Any) -> int:
    """The bytes of the longest replacement in SentencePiece's table: the size of a trie, the trie, and the texts."""
    try:
        table = base64.b64decode(charsmap)
    except (TypeError, ValueError):
        return 0  # which the library does not read, either
    texts = table[4 + int.from_bytes(table[:4], "little") :]
    return max(map(len, texts.split(b"\0")))


def _matches_empty(pattern: Any) -> bool:
    """Whether a pattern matches the empty text, which stands at every position."""
    if not isinstance(pattern, dict) or pattern.get("String") == "":
        return True
    if not isinstance(pattern.get("Regex"), str):
        return False
    parsed = parse_pattern(pattern["Regex"])
    return parsed is None or parsed.getwidth()[0] == 0
