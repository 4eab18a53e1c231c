"""Tokenizers from files of strangers: what could hang or crash a process is rejected before the library reads it.

The regular expressions of a tokenizer are matched by Oniguruma, which backtracks; here they are parsed by Python, whose
syntax is nearly the same.
"""

import base64
import json
import re
from collections.abc import Iterator

# Python's parser has no public name: `sre_parse` is deprecated since Python 3.11.
from re import _compiler, _constants, _parser  # type: ignore[attr-defined]
from typing import Any

from tinyformer.data.tokenizer.tokenizer import TextTokenizer
from tinyformer.errors import ArgumentError

MAX_CHARACTERS, MAX_DEPTH = 200_000_000, 50
"""Bounds of a `tokenizer.json`: the largest public ones have 35 million characters and a depth of 8."""

MAX_GROWTH = 1000
"""The factor by which normalizers and decoders may lengthen a text; Llama's replace one character by one."""

SAMPLE = "The cat, 1 day: naïve 猫.\n"
"""A text that a tokenizer has to encode and decode before it is used."""

MAX_WORD, MAX_ID = 1000, 2**22
"""Bounds of WordPiece's words, in characters (BERT's: 100), and of token ids (XLM-V's: 0.9 million)."""

MAX_REPETITIONS = 3
"""The most repetitions in one alternative of a pattern; those of GPT-2, GPT-4, Llama 3 and Qwen have two."""


def tokenizer_from_stranger(text: str) -> TextTokenizer:
    """The tokenizer of a `tokenizer.json` that is not trusted; one that could take forever is refused."""
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

    If regular expressions are checked, too, some harmless ones are refused, since Python cannot parse them.
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
    if not _is_small(spec["model"].get("max_input_chars_per_word"), MAX_WORD):
        raise _refused(f"splits words of more than {MAX_WORD} characters, which could take forever")
    require_small_ids(spec["model"].get("vocab"))
    require_small_ids({number: node.get("id") for number, node in enumerate(_nodes(spec))})  # of added tokens
    patterns = (node["Regex"] for node in _nodes(spec) if isinstance(node.get("Regex"), str))
    for pattern in patterns if check_patterns else ():
        if could_take_forever(pattern):
            reason = f"has the pattern {pattern[:100]!r}, whose matching could take forever, as far as can be foreseen"
            raise _refused(reason)


def require_small_ids(vocabulary: Any) -> None:
    """Refuse a vocabulary with an id so large that a table up to it would fill the memory."""
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


# What lengthens a text.


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
    parsed = _parse(pattern["Regex"])
    return parsed is None or parsed.getwidth()[0] == 0


# Regular expressions.

LETTERS, OTHERS, UNKNOWN = "\ue000\ue001\ue002"
"""Characters that stand for Unicode properties, which Python does not parse: letters, other properties that no space
has, and those that it may have."""

WITHOUT_SPACES = re.compile(
    "L[ultmoC]?|M[nce]?|N[dlo]?|P[cdseifo]?|S[mcko]?"
    "|Arabic|Armenian|Bengali|Cyrillic|Devanagari|Greek|Han|Hangul|Hebrew|Hiragana|Katakana|Latin|Tamil|Thai"
)
"""Names of properties that no space has: categories and scripts."""

_REPEATS = (_constants.MAX_REPEAT, _constants.MIN_REPEAT, _constants.POSSESSIVE_REPEAT)
_ONE_CHARACTER = (_constants.LITERAL, _constants.NOT_LITERAL, _constants.IN, _constants.ANY)


def could_take_forever(pattern: str) -> bool:
    """Whether matching a pattern could take longer than a small power of the text's length.

    That is so if it repeats anything but a single character, or a character that may be a space as well as a letter, so
    that it matches whole texts and not words; if it has more than `MAX_REPETITIONS`; or if it cannot be parsed.
    """
    parsed = _parse(pattern)
    return parsed is None or not _is_simple(parsed)


def _parse(pattern: str) -> Any:
    """A parsed pattern; None if Python cannot parse it."""
    plain = re.sub(r"\\([pP])(?:\{(\^?\w+)\}|(\w))", _stand_in, pattern)
    # In Oniguruma these are a repeated repetition, a set in a set, and an intersection; Python reads them otherwise.
    if re.search(r"\}\+|\[\^?\]?[^\]]*\[|&&", re.sub(r"\\.", "_", plain, flags=re.DOTALL)):
        return None
    try:
        return _parser.parse(plain)
    except (re.error, RecursionError, OverflowError):
        return None


def _stand_in(found: re.Match[str]) -> str:
    name = found[2] or found[3]
    if found[1] == "P" or not WITHOUT_SPACES.fullmatch(name):
        return UNKNOWN
    return LETTERS if name == "L" else OTHERS


def _is_simple(parsed: Any) -> bool:
    repetitions = 0
    for operator, argument in parsed:
        if operator in _REPEATS:
            _, most, repeated = argument
            repetitions += most > 1
            if most > 1 and any(item[0] not in _ONE_CHARACTER or _spans_words(item, parsed.state) for item in repeated):
                return False
            if not _is_simple(repeated):
                return False
        elif operator is _constants.BRANCH:
            if not all(map(_is_simple, argument[1])):
                return False
        elif operator in (_constants.SUBPATTERN, _constants.ASSERT, _constants.ASSERT_NOT):
            if not _is_simple(argument[-1]):
                return False
        elif operator not in (*_ONE_CHARACTER, _constants.AT):
            return False
    return repetitions <= MAX_REPETITIONS


def _spans_words(item: tuple[Any, Any], state: Any) -> bool:
    """Whether an item of a parsed pattern, which is one character, may be both a space and a frequent letter."""
    operator, argument = item
    parts = argument if operator is _constants.IN else [item]
    named = {chr(value) for kind, value in parts if kind in (_constants.LITERAL, _constants.NOT_LITERAL)}
    matches = _compiler.compile(_parser.SubPattern(state, [item])).match
    is_space, is_letter = matches(" ") is not None, any(map(matches, "etaoinshrdluETAOINSHRDLU"))
    if operator is _constants.NOT_LITERAL or parts[0][0] is _constants.NEGATE:
        return is_space and is_letter and LETTERS not in named
    return (is_space or UNKNOWN in named) and (is_letter or not named.isdisjoint({LETTERS, OTHERS, UNKNOWN}))
