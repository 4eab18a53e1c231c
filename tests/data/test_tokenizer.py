"""Tokenizers: exact round trips, streamed text; of strangers, what could hang is rejected, what is published taken."""

import base64
import contextlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from tinyformer.data import BPETokenizer, ByteTokenizer, CharTokenizer, TextTokenizer, TokenizerFile
from tinyformer.data.tokenizer.untrusted_tokenizer import tokenizer_from_stranger
from tinyformer.errors import ArgumentError

SAMPLE = (
    "To be, or not to be: that is the question.\r\n\tNaïve café e\u0301 👋🏽 中\ufffd😀\u2028\x00 <eos> <unk>\n" * 20
)
RECIPES = [CharTokenizer(), ByteTokenizer(), BPETokenizer(vocab_size=300)]
any_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
TOKENIZERS = {recipe.name: recipe.build([SAMPLE]) for recipe in RECIPES}
texts = st.text(alphabet=sorted(set(SAMPLE)), max_size=300)


@any_recipe
@given(text=texts)
@settings(max_examples=40, deadline=None)
def test_decoding_returns_the_text(recipe, text):
    tokenizer = TOKENIZERS[recipe.name]
    assert tokenizer.decode(tokenizer.encode(text)) == text


@any_recipe
def test_recipes_are_deterministic_json_keeps_everything_and_special_tokens_are_plain_text(recipe):
    tokenizer = TOKENIZERS[recipe.name]
    copy = TextTokenizer.from_json(tokenizer.to_json())
    assert copy.encode(SAMPLE) == tokenizer.encode(SAMPLE)
    assert (copy.vocab_size, copy.eos_id, copy.unk_id) == (tokenizer.vocab_size, tokenizer.eos_id, tokenizer.unk_id)
    assert copy.fingerprint == tokenizer.fingerprint == recipe.build([SAMPLE]).fingerprint
    for same in (tokenizer, copy):
        ids = same.encode("a<eos>b<unk>")
        assert not {same.eos_id, same.unk_id} & {*ids}
        assert same.decode(ids) == "a<eos>b<unk>"


def test_characters_are_sorted_after_the_special_tokens_and_others_are_unknown():
    tokenizer = CharTokenizer().build(["cab", "d"])
    assert tokenizer.token_strings(range(tokenizer.vocab_size)) == ["<unk>", "<eos>", "a", "b", "c", "d"]
    assert tokenizer.encode("a??😀e\u0301b") == [2, *[tokenizer.unk_id] * 5, 3]


def foreign(folder, *special):
    """A file of another library: it truncates, pads, adds tokens, and its ids have gaps."""
    words = {"hello": 3, "world": 5, "[UNK]": 9} | {token: 20 + i for i, token in enumerate(special)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(list(special))
    template = processors.TemplateProcessing(single=f"{special[0]} $A", special_tokens=[(special[0], 20)])
    tokenizer.post_processor = template
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(folder / "tokenizer.json"))
    return str(folder / "tokenizer.json")


def test_a_file_encodes_nothing_but_the_text(tmp_path):
    tokenizer = TokenizerFile(foreign(tmp_path, "</s>")).build([])
    assert tokenizer.encode("hello world hello nobody") == [3, 5, 3, 9]
    assert (tokenizer.eos_id, tokenizer.unk_id, tokenizer.vocab_size) == (20, 9, 21)
    named = TokenizerFile(foreign(tmp_path, "<stop>", "</s>"), eos_token="<stop>").build([])
    assert named.eos_id == TextTokenizer.from_json(named.to_json()).eos_id == 20


def test_dropout_of_merges_is_off_wherever_a_file_comes_from(tmp_path):
    spec = json.loads(TOKENIZERS["bpe"].to_json())
    spec["model"]["dropout"] = 0.5
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    text = SAMPLE.replace("<eos>", "")
    named, stored = TokenizerFile(str(tmp_path / "tokenizer.json")).build([]), tokenizer_from_stranger(json.dumps(spec))
    for tokenizer in (named, stored):
        for same in (tokenizer, tokenizer.with_mask(), TextTokenizer.from_json(tokenizer.to_json())):
            assert same.encode(text) == same.read([text], around=False)[0] == TOKENIZERS["bpe"].encode(text)


# Text that arrives token by token.


@any_recipe
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_pieces_add_up_to_the_text(recipe, data):
    tokenizer = TOKENIZERS[recipe.name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))  # mostly invalid UTF-8
    assert "".join(tokenizer.pieces(ids)) == tokenizer.decode(ids)
    emitted = ""
    for piece in tokenizer.pieces(tokenizer.encode(SAMPLE[:90])):
        emitted += piece
        assert SAMPLE.startswith(emitted)
    assert emitted == SAMPLE[:90]


def test_a_character_arrives_with_the_last_of_its_bytes():
    tokenizer, consumed = TOKENIZERS["byte"], []
    ids = (consumed.append(byte) or byte for byte in "é👋a".encode())
    arrived = [(len(consumed), piece) for piece in tokenizer.pieces(ids)]
    assert arrived == [(2, "é"), (6, "👋"), (7, "a")]
    assert list(tokenizer.pieces([0x61, 0xF0, 0x9F, 0x62, 0xF0])) == ["a", "\ufffdb", "\ufffd"]


# Those of strangers.

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = r"(?i:'s|'t|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
GPT4O = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{M}]*[\p{Ll}\p{Lm}\p{M}]+(?i:'s|'t)?|\p{N}{1,3}|\s*[\r\n]+|\s+(?!\S)|\s+"
DEEPSEEK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
ENDLESS = [r"(a+)+$", r"(a|a?)+$", r"\s+\s+\s+\s+\s+x", r"(a)\1*", r"(", r".+", r"[\s\S]*(?!)", r"[^\p{P}]+x"]
ENDLESS += [r"(?i:[A-Z ]+x)", r"[^a-z&&[^b]]*x"]
SPEC = json.loads(ByteTokenizer().build([]).to_json())

PUBLISHED = (GPT2, LLAMA3, GPT4O, DEEPSEEK, r" {2,}", r"[\p{Han}]+|\p{Cyrillic}+", r"\d{1,3}(?=(?:\d{3}){1}\b)")


@pytest.mark.parametrize("pattern", [*PUBLISHED, *ENDLESS])
def test_a_pattern_that_could_match_forever_is_rejected_and_published_ones_are_taken(pattern: str) -> None:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    steps = {"type": "Sequence", "pretokenizers": [split, SPEC["pre_tokenizer"]]}
    endless = pytest.raises(ArgumentError, match="whose matching could take forever")
    with endless if pattern in ENDLESS else contextlib.nullcontext():
        assert tokenizer_from_stranger(json.dumps(SPEC | {"pre_tokenizer": steps})).encode("a") == [97]


MALFORMED = [
    ("levels deep", "[" * 200_000 + "]" * 200_000),
    ("is not JSON", '{"model": '),
    ("is not a tokenizer", "[1]"),
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
