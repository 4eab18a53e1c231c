"""Tokenizers of strangers: what could hang or crash is rejected, what is published is taken."""

import base64
import contextlib
import json
from typing import Any

import pytest

from tinyformer.data import ByteTokenizer
from tinyformer.data.tokenizer.untrusted_tokenizer import tokenizer_from_stranger
from tinyformer.errors import ArgumentError

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = r"(?i:'s|'t|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
GPT4O = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{M}]*[\p{Ll}\p{Lm}\p{M}]+(?i:'s|'t)?|\p{N}{1,3}|\s*[\r\n]+|\s+(?!\S)|\s+"
DEEPSEEK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
ENDLESS = (
    r"(a+)+$",
    r"(.+)*x",
    r"(a|a?)+$",
    r"\s+\s+\s+\s+\s+x",
    r"(?:x{1,50}){1,50}y",
    r"(a)\1*",
    r"(",
    r".+",
    r"[\s\S]*(?!)",
    r"[^\p{P}]+x",
    r"[^a]*x",
    r"\p{Print}+x",
    r"(?i:[A-Z ]+x)",
    r"[[:^digit:]]*x",
    r"[^a-z&&[^b]]*x",
)

SPEC = json.loads(ByteTokenizer().build([]).to_json())


PUBLISHED = (GPT2, LLAMA3, GPT4O, DEEPSEEK, r" {2,}", r"[\p{Han}]+|\p{Cyrillic}+", r"\d{1,3}(?=(?:\d{3}){1}\b)")


@pytest.mark.parametrize("pattern", PUBLISHED + ENDLESS)
def test_a_pattern_that_could_match_forever_is_rejected_and_published_ones_are_taken(pattern: str) -> None:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    steps = {"type": "Sequence", "pretokenizers": [split, SPEC["pre_tokenizer"]]}
    endless = pytest.raises(ArgumentError, match="whose matching could take forever")
    with endless if pattern in ENDLESS else contextlib.nullcontext():
        assert tokenizer_from_stranger(json.dumps(SPEC | {"pre_tokenizer": steps})).encode("a") == [97]


MALFORMED = [
    ("levels deep", "[" * 200_000 + "]" * 200_000),
    ("levels deep", '{"model":' * 60 + "1" + "}" * 60),
    ("is not JSON", '{"model": '),
    ("is not a tokenizer", "[1]"),
    ("is not a tokenizer", '{"model": 3}'),
    ("cannot be read", '{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}'),
    (
        "splits words of more than 1000",
        '{"model": {"type": "WordPiece", "max_input_chars_per_word": 9999, "vocab": {}}}',
    ),
    ("has a token id above", '{"model": {"type": "WordLevel", "vocab": {"a": 4000000000}}}'),
    ("has a token id above", '{"added_tokens": [{"id": 4000000000, "content": "a"}], "model": {"vocab": {}}}'),
    ("<eos>", '{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}'),
]


@pytest.mark.parametrize(("said", "contents"), MALFORMED, ids=[said for said, _ in MALFORMED])
def test_what_is_no_tokenizer_is_reported_in_one_sentence(said: str, contents: str) -> None:
    with pytest.raises(ArgumentError, match=rf"\A.*{said}.*\Z"):
        tokenizer_from_stranger(contents)


def test_brackets_in_strings_are_no_levels() -> None:
    model = SPEC["model"] | {"vocab": SPEC["model"]["vocab"] | {'["{\\' * 100: 257}}
    assert tokenizer_from_stranger(json.dumps(SPEC | {"model": model})).vocab_size == 258


def replacements(content: str, pattern: dict[str, str], number: int = 1) -> dict[str, Any]:
    replacement = {"type": "Replace", "pattern": pattern, "content": content}
    return {"type": "Sequence", "normalizers": [replacement] * number}


def table(trie: bytes, replacement: bytes) -> dict[str, str]:
    """SentencePiece's table of replacements: the size of a trie, the trie, and texts that end with a zero."""
    contents = len(trie).to_bytes(4, "little") + trie + replacement + b"\0"
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(contents).decode()}


ZEROS = bytes(4 * 1024)


@pytest.mark.parametrize(
    ("normalizer", "said"),
    [
        (replacements("aa", {"String": "a"}, 40), "times as long"),
        (replacements("a" * 2000, {"String": "a"}), "times as long"),
        (replacements("a", {"String": ""}, 40), "times as long"),
        (replacements("a", {"Regex": "(?=.)"}, 40), "times as long"),
        ({"type": "Prepend", "prepend": "a" * 2000}, "times as long"),
        (table(ZEROS, b"a" * 2000), "times as long"),
        (table(ZEROS[:4], b"abc"), "cannot encode a text: index out of bounds"),
        (replacements("▁", {"String": "a"}), None),
        ({"type": "Prepend", "prepend": "▁"}, None),
        (table(ZEROS, b"abc"), None),
    ],
)
def test_a_normalizer_that_multiplies_texts_or_is_damaged_is_rejected(normalizer: Any, said: str | None) -> None:
    with pytest.raises(ArgumentError, match=said) if said else contextlib.nullcontext():
        tokenizer_from_stranger(json.dumps(SPEC | {"normalizer": normalizer}))


def test_a_table_that_is_too_short_for_a_text_is_an_error_of_the_text() -> None:
    short = table(ZEROS[: 4 * 0xF0], b"abc")  # for the first byte of "😀"
    tokenizer = tokenizer_from_stranger(json.dumps(SPEC | {"normalizer": short}))
    with pytest.raises(ArgumentError, match="cannot encode a text: index out of bounds"):
        tokenizer.encode("😀")
