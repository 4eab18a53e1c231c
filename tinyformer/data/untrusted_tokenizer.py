"""Tokenizers from files of strangers: what could hang or crash a process is rejected before the library reads it."""

import base64
import json
import re
from collections.abc import Iterator

# The parser has no public name: `sre_parse` is deprecated since Python 3.11.
from re import _constants, _parser  # type: ignore[attr-defined]
from typing import Any

from tinyformer.data.tokenizer import TextTokenizer
from tinyformer.errors import ArgumentError

MAX_CHARACTERS, MAX_DEPTH = 200_000_000, 50
"""Bounds of a `tokenizer.json`: the largest public ones have 35 million characters and a depth of 8."""

MAX_GROWTH = 1000
"""By which normalizers and decoders may multiply the length of a text; Llama's replace one character by one."""

SAMPLE = "The cat, 1 day: naïve 猫.\n"
"""A text that a tokenizer has to encode and decode before it is used."""

MAX_WORD, MAX_ID = 1000, 2**22
"""Bounds of WordPiece's words, in characters (BERT's: 100), and of token ids (the largest: 262,144)."""

MAX_REPETITIONS = 3
"""In one alternative of a pattern; those of GPT-2, GPT-4, Llama 3 and Qwen have two."""


def tokenizer_from_stranger(text: str) -> TextTokenizer:
    """The tokenizer of a `tokenizer.json` that is not trusted.

    Raises:
        ArgumentError: the text is not that of a tokenizer, or the tokenizer could take forever.
    """
    require_harmless(text)
    try:
        tokenizer = TextTokenizer.from_json(text)
        tokenizer.decode(tokenizer.encode(SAMPLE))
    except ArgumentError:
        raise
    except BaseException as error:  # the library raises bare exceptions, and panics are no exceptions of Python's
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise _refused(f"cannot be read: {str(error)[:200]}") from error
    return tokenizer


def require_harmless(text: str) -> None:
    """Refuse a `tokenizer.json` that is no JSON object, is nested too deeply, or could take forever on a short text.

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
    added = spec.get("added_tokens")
    require_small_ids(
        {n: token.get("id") for n, token in enumerate(added) if isinstance(token, dict)}
        if isinstance(added, list)
        else {}
    )
    for pattern in _patterns(spec):
        if _backtracks(pattern):
            reason = f"has the pattern {pattern[:100]!r}, whose matching could take forever"
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
    """Whether a value is at most this; what is no number is refused by the library."""
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
    """By how much all replacements together, wherever they stand, can lengthen a text."""
    growth = 1.0
    for node in _nodes(spec):
        if node.get("type") == "Precompiled":
            growth *= max(1, _longest_of(node.get("precompiled_charsmap")))
        if node.get("type") == "Replace" and isinstance(node.get("content"), str):
            growth *= max(1, len(node["content"]) + _matches_nothing(node.get("pattern")))
    return growth


def _longest_of(charsmap: Any) -> int:
    """The bytes of the longest replacement in SentencePiece's table: the size of a trie, the trie, and the texts."""
    try:
        table = base64.b64decode(charsmap)
    except (TypeError, ValueError):
        return 0  # which the library does not read, either
    texts = table[4 + int.from_bytes(table[:4], "little") :]
    return max(map(len, texts.split(b"\0")))


def _matches_nothing(pattern: Any) -> bool:
    """Whether a pattern matches the empty text, which stands at every position."""
    if not isinstance(pattern, dict) or pattern.get("String") == "":
        return True
    if not isinstance(pattern.get("Regex"), str):
        return False
    parsed = _parsed(pattern["Regex"])
    return parsed is None or parsed.getwidth()[0] == 0


def _parsed(pattern: str) -> Any:
    """A parsed pattern; None if Python cannot parse it."""
    # Python has no \p{L}: characters of private use take its place.
    plain = re.sub(r"\\p\{?([LMNPS])\w{0,20}\}?|\\[pP](\{\^?\w+\}|\w)", _private, pattern)
    if "}+" in plain:  # possessive here, and a repeated repetition there
        return None
    try:
        return _parser.parse(plain)
    except (re.error, RecursionError, OverflowError):
        return None


LETTERS, OTHERS, UNKNOWN = "\ue000\ue001\ue002"
"""Characters that stand for properties: letters, others that no space has, and those that one may have."""


def _private(found: re.Match[str]) -> str:
    """The character that stands for a property."""
    return UNKNOWN if found[1] is None else LETTERS if found[1] == "L" else OTHERS


def _may_match(item: tuple[Any, Any], character: str) -> bool:
    """Whether an item of a parsed pattern, which is one character, may be a letter or a space."""
    operator, argument = item
    code, certain = ord(character), {LETTERS} if character.isalpha() else set()
    possible = {LETTERS, OTHERS, UNKNOWN} if character.isalpha() else {UNKNOWN}
    if operator is _constants.ANY:
        return True
    if operator in (_constants.LITERAL, _constants.NOT_LITERAL):
        is_same = argument == code
        if operator is _constants.LITERAL:
            return is_same or chr(argument) in possible
        return not is_same and chr(argument) not in certain
    is_negated = argument[0][0] is _constants.NEGATE
    holds = possible if not is_negated else certain
    found = any(
        (kind is _constants.LITERAL and (value == code or chr(value) in holds))
        or (kind is _constants.RANGE and value[0] <= code <= value[1])
        or (kind is _constants.CATEGORY and _in_category(str(value), character))
        for kind, value in argument
    )
    return found is not is_negated


def _in_category(name: str, character: str) -> bool:
    r"""Whether a letter or a space is in \w, \W, \s, \S, \d or \D."""
    is_in = {"WORD": character.isalpha(), "SPACE": character.isspace(), "DIGIT": False}[name.rpartition("_")[2]]
    return is_in is not ("NOT" in name)


def _backtracks(pattern: str) -> bool:
    """Whether matching a pattern could take longer than a small power of the text's length.

    It repeats something else than one character, has more than `MAX_REPETITIONS` in a row, or cannot be parsed.
    """
    parsed = _parsed(pattern)
    return parsed is None or not _is_simple(parsed)


def _is_simple(parsed: Any) -> bool:
    repetitions = 0
    for operator, argument in parsed:
        if operator in _REPEATS:
            _, most, repeated = argument
            repetitions += most > 1
            if most > 1 and [item[0] for item in repeated if item[0] not in _ONE_CHARACTER]:
                return False
            if most > 1 and any(_may_match(item, "a") and _may_match(item, " ") for item in repeated):
                return False  # it matches whole texts, and not words or spaces
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


_REPEATS = (_constants.MAX_REPEAT, _constants.MIN_REPEAT, _constants.POSSESSIVE_REPEAT)
_ONE_CHARACTER = (_constants.LITERAL, _constants.NOT_LITERAL, _constants.IN, _constants.ANY)
