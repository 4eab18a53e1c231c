"""Text that comes token by token."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tinyformer.data import BPETokenizer, ByteTokenizer, CharTokenizer, TextTokenizer

EMOJI = "👋🏽 né 中\n\ufffd!"
TOKENIZERS = {
    recipe.name: recipe.build([EMOJI * 9]) for recipe in (CharTokenizer(), ByteTokenizer(), BPETokenizer(270))
}


def of_words(*names, eos="</s>", **decoder):
    """A vocabulary whose decoder tells the first word of a text from the others."""
    vocabulary = {name: index for index, name in enumerate([eos, "<unk>", *names])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return TextTokenizer(tokenizer, eos)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
def test_pieces_add_up_to_the_text_and_never_change(name, data):
    tokenizer = TOKENIZERS[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))  # most of them no UTF-8
    assert "".join(tokenizer.pieces(ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_character_comes_whole(name):
    tokenizer, ids, told = TOKENIZERS[name], iter(TOKENIZERS[name].encode(EMOJI)), ""
    for piece in tokenizer.pieces(ids):
        told += piece
        assert EMOJI.startswith(told)
    assert told == EMOJI


def test_a_character_comes_with_the_last_of_its_bytes():
    tokenizer, given_ids = TOKENIZERS["byte"], []
    ids = (given_ids.append(byte) or byte for byte in "é👋a".encode())
    came = [(len(given_ids), piece) for piece in tokenizer.pieces(ids)]
    assert came == [(2, "é"), (6, "👋"), (7, "a")]


def test_what_is_no_character_comes_when_that_is_certain():
    pieces = list(TOKENIZERS["byte"].pieces([0x61, 0xF0, 0x9F, 0x62, 0xF0]))
    assert pieces == ["a", "\ufffdb", "\ufffd"]


def test_a_word_behind_others_keeps_its_space():
    tokenizer = of_words("▁the", "▁cat", "▁sees")
    before, after = tokenizer.encode("the cat"), tokenizer.encode(" sees the cat")
    assert tokenizer.decode(after) == "sees the cat"
    assert tokenizer.continuation(after, before) == " sees the cat"
    assert list(tokenizer.pieces(after, after=before)) == [" sees", " the", " cat"]
    assert list(tokenizer.pieces(after)) == ["sees", " the", " cat"]


def test_bytes_beside_other_tokens_never_stop_the_text():
    vocabulary = {"</s>": 0, "<unk>": 1, "a": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    text = TextTokenizer(tokenizer, "</s>")
    wave = [2, 3 + 0x0A, *(3 + byte for byte in "👋".encode()), 2]
    assert list(text.pieces(wave)) == ["a", "\n", "👋", "a"]
    # Of a run of bytes with a wrong one among them, the decoder makes nothing but replacement characters.
    assert "".join(text.pieces([2, 3 + 0x0A, 3 + 0xFF, 2])).startswith("a\n")
