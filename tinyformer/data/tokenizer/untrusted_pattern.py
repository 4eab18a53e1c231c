"""Regular expressions from files of strangers: those that could be matched forever.

Tokenizers match them with Oniguruma, which backtracks; here they are parsed by Python, whose syntax is nearly the same.
"""

import re

# The parser has no public name: `sre_parse` is deprecated since Python 3.11.
from re import _constants, _parser  # type: ignore[attr-defined]
from typing import Any

MAX_REPETITIONS = 3
"""The most repetitions in one alternative of a pattern; those of GPT-2, GPT-4, Llama 3 and Qwen have two."""

LETTERS, OTHERS, UNKNOWN = "\ue000\ue001\ue002"
"""Characters that stand for Unicode properties: letters, other properties that no space has, and those that it may
have."""

WITHOUT_SPACES = re.compile(
    "L[ultmoC]?|M[nce]?|N[dlo]?|P[cdseifo]?|S[mcko]?"
    "|Arabic|Armenian|Bengali|Cyrillic|Devanagari|Greek|Han|Hangul|Hebrew|Hiragana|Katakana|Latin|Tamil|Thai"
)
"""Names of properties that no space has: categories and scripts."""

_REPEATS = (_constants.MAX_REPEAT, _constants.MIN_REPEAT, _constants.POSSESSIVE_REPEAT)
_ONE_CHARACTER = (_constants.LITERAL, _constants.NOT_LITERAL, _constants.IN, _constants.ANY)


def parse_pattern(pattern: str) -> Any:
    """A parsed pattern; None if Python cannot parse it."""
    # Python has no \p{L}: characters of private use take its place.
    plain = re.sub(r"\\([pP])(?:\{(\^?\w+)\}|(\w))", _private, pattern)
    # In Oniguruma these are a repeated repetition, a set in a set, and an intersection; Python reads them otherwise.
    if re.search(r"\}\+|\[\^?\]?[^\]]*\[|&&", re.sub(r"\\.", "_", plain, flags=re.DOTALL)):
        return None
    try:
        return _parser.parse(plain)
    except (re.error, RecursionError, OverflowError):
        return None


def _private(found: re.Match[str]) -> str:
    """The character that stands for a property."""
    name = found[2] or found[3]
    if found[1] == "P" or not WITHOUT_SPACES.fullmatch(name):
        return UNKNOWN
    return LETTERS if name == "L" else OTHERS


def _spans_words(item: tuple[Any, Any]) -> bool:
    """Whether an item of a parsed pattern, which is one character, may be both a space and a frequent letter."""
    return _may_match(item, " ") and any(_may_match(item, letter) for letter in "etaoinshrdluETAOINSHRDLU")


def _may_match(item: tuple[Any, Any], character: str) -> bool:
    """Whether an item of a parsed pattern, which is one character, may match a given letter or space."""
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


def could_take_forever(pattern: str) -> bool:
    """Whether matching a pattern could take longer than a small power of the text's length.

    That is so if it repeats anything but a single character, or a character that may be a space as well as a letter, so
    that it matches whole texts and not words; if it has more than `MAX_REPETITIONS`; or if it cannot be parsed.
    """
    parsed = parse_pattern(pattern)
    return parsed is None or not _is_simple(parsed)


def _is_simple(parsed: Any) -> bool:
    repetitions = 0
    for operator, argument in parsed:
        if operator in _REPEATS:
            _, most, repeated = argument
            repetitions += most > 1
            if most > 1 and [item[0] for item in repeated if item[0] not in _ONE_CHARACTER]:
                return False
            if most > 1 and any(map(_spans_words, repeated)):
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
