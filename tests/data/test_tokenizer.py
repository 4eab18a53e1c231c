"""Tokenizers: exact round trips, streamed text; a file that is no tokenizer is refused."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from tinyformer.data import BPETokenizer, ByteTokenizer, CharTokenizer, TextTokenizer, TokenizerFile
from tinyformer.data.recipe import lost_bytes
from tinyformer.errors import ArgumentError

SAMPLE = (
    "To be, or not to be: that is the question.\r\n\tNaïve café e\u0301 👋🏽 中\ufffd😀\u2028\x00 <eos> <unk>\n" * 20
)
RECIPES = [CharTokenizer(), ByteTokenizer(), BPETokenizer(vocab_size=300)]
any_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
TOKENIZERS = {recipe.name: recipe.build([SAMPLE]) for recipe in RECIPES}


@any_recipe
def test_recipes_are_deterministic_json_keeps_everything_and_special_tokens_are_plain_text(recipe):
    """The mask, which is the last token, too."""
    tokenizer = TOKENIZERS[recipe.name]
    assert tokenizer.fingerprint == recipe.build([SAMPLE]).fingerprint
    assert (tokenizer.mask_id, tokenizer.with_mask().mask_id) == (None, tokenizer.vocab_size)
    for made, size in ((tokenizer, tokenizer.vocab_size), (tokenizer.with_mask(), tokenizer.vocab_size + 1)):
        copy = TextTokenizer.from_json(made.to_json())
        for name in ("eos_id", "unk_id", "mask_id", "fingerprint"):
            assert getattr(copy, name) == getattr(made, name)
        for same in (made, copy):
            assert (same.vocab_size, same.encode(SAMPLE)) == (size, tokenizer.encode(SAMPLE))
            ids = same.encode("a<eos>b<unk>")
            assert not {same.eos_id, same.unk_id, same.mask_id} & {*ids}
            assert same.mask_id not in same.encode("a <mask> b")
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


WORDS = dict(zip(["[UNK]", "[SEP]", "ab", "cd", "a", "b", "Ġ"], range(7), strict=True))
LEVEL, FUSED = models.WordLevel(WORDS, unk_token="[UNK]"), models.BPE(WORDS, [], unk_token="[UNK]", fuse_unk=True)
PIECES, BYTES = models.WordPiece(WORDS, unk_token="[UNK]"), models.BPE(WORDS, [], unk_token="[UNK]")
SPACES, SYMBOLS = pre_tokenizers.Whitespace(), pre_tokenizers.Split("", "isolated")


@pytest.mark.parametrize(
    ("model", "splitter", "decoder", "text", "lost", "unknown"),
    [
        (LEVEL, SPACES, None, "ab cd\n", 1 / 6, "'zéz'"),
        (PIECES, SPACES, None, "AB cd", 2 / 5, "'zéz'"),
        (LEVEL, SYMBOLS, None, "abab", 3 / 7, "' ', 'z', 'é'"),
        (LEVEL, None, None, "ab", 0, "'ab zéz '"),
        (FUSED, None, decoders.Fuse(), "ab", 0, "' zéz '"),
        (BYTES, pre_tokenizers.ByteLevel(), decoders.ByteLevel(), "ab", 0, "'z', 'é'"),
    ],
)
def test_what_a_tokenizer_loses_is_told(model, splitter, decoder, text, lost, unknown, capsys):
    made = Tokenizer(model)
    made.normalizer, made.pre_tokenizer, made.decoder = normalizers.Lowercase(), splitter, decoder
    tokenizer = TextTokenizer(made)
    assert lost_bytes([text], tokenizer) == pytest.approx(lost)
    for _ in range(2):  # told once, without the unknown token that is spelled out
        tokenizer.read(["ab zéz [UNK]"])
    assert capsys.readouterr().err == f"The tokenizer encodes {unknown} as [UNK].\n"


def test_dropout_of_merges_is_off_wherever_a_file_comes_from(tmp_path):
    spec = json.loads(TOKENIZERS["bpe"].to_json())
    spec["model"]["dropout"] = 0.5
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    text = SAMPLE.replace("<eos>", "")
    named, stored = TokenizerFile(str(tmp_path / "tokenizer.json")).build([]), TextTokenizer.from_json(json.dumps(spec))
    for tokenizer in (named, stored):
        for same in (tokenizer, tokenizer.with_mask(), TextTokenizer.from_json(tokenizer.to_json())):
            assert same.encode(text) == same.read([text], around=False)[0] == TOKENIZERS["bpe"].encode(text)


# Text that arrives token by token.


@any_recipe
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_decoding_returns_the_text_to_which_pieces_add_up(recipe, data):
    tokenizer = TOKENIZERS[recipe.name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))  # mostly invalid UTF-8
    assert "".join(tokenizer.pieces(ids)) == tokenizer.decode(ids)
    text, emitted = data.draw(st.text(alphabet=sorted(set(SAMPLE)), max_size=300)), ""
    for piece in tokenizer.pieces(tokenizer.encode(text)):
        emitted += piece
        assert text.startswith(emitted)
    assert emitted == text == tokenizer.decode(tokenizer.encode(text))


def test_a_character_arrives_with_the_last_of_its_bytes():
    tokenizer, consumed = TOKENIZERS["byte"], []
    ids = (consumed.append(byte) or byte for byte in "é👋a".encode())
    arrived = [(len(consumed), piece) for piece in tokenizer.pieces(ids)]
    assert arrived == [(2, "é"), (6, "👋"), (7, "a")]
    assert list(tokenizer.pieces([0x61, 0xF0, 0x9F, 0x62, 0xF0])) == ["a", "\ufffdb", "\ufffd"]
    library = Tokenizer(models.BPE({"<0x0A>": 0, "<0xF0>": 1, "a": 2, "</s>": 3}, [], byte_fallback=True))
    library.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    assert list(TextTokenizer(library).pieces([2, 0, 1, 2, 2])) == ["a", "\n", "\ufffda", "a"]


# Untrusted ones.

MALFORMED = {
    "[" * 200_000 + "]" * 200_000: "cannot be read: ",
    '{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}': "cannot be read: ",
    '{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}': "<eos>",
}


@pytest.mark.parametrize(("contents", "said"), MALFORMED.items(), ids=range(len(MALFORMED)))
def test_what_is_no_tokenizer_is_reported_in_one_sentence(contents: str, said: str) -> None:
    with pytest.raises(ArgumentError, match=rf"\A.*{said}.*\Z"):
        TextTokenizer.from_json(contents)
