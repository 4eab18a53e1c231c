"""Tokenizers: exact round trips, unknown characters, special tokens spelled out, labels."""

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from tinyformer.data import BPETokenizer, ByteTokenizer, CharTokenizer, TextTokenizer, TokenizerFile

SAMPLE = "To be, or not to be: that is the question.\r\n\tNaïve café e\u0301 😀\u2028\x00 <eos> <unk>\n" * 20
RECIPES = [CharTokenizer(), ByteTokenizer(), BPETokenizer(vocab_size=300)]
any_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
TOKENIZERS = {recipe.name: recipe.build([SAMPLE]) for recipe in RECIPES}


@any_recipe
@given(text=st.text(alphabet=sorted(set(SAMPLE)), max_size=300))
def test_decoding_gives_the_text_back(recipe, text):
    tokenizer = TOKENIZERS[recipe.name]
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("name", ["byte", "bpe"])
@given(text=st.text(max_size=200))
def test_byte_level_tokenizers_know_every_string(name, text):
    tokenizer = TOKENIZERS[name]
    assert tokenizer.unk_id is None
    assert tokenizer.decode(tokenizer.encode(text)) == text


@any_recipe
def test_special_tokens_in_the_text_are_plain_characters(recipe):
    tokenizer = TOKENIZERS[recipe.name]
    ids = tokenizer.encode("a<eos>b<unk>")
    assert tokenizer.eos_id not in ids
    assert tokenizer.unk_id not in ids
    assert tokenizer.decode(ids) == "a<eos>b<unk>"


@any_recipe
def test_json_keeps_everything(recipe):
    tokenizer = TOKENIZERS[recipe.name]
    copy = TextTokenizer.from_json(tokenizer.to_json())
    assert copy.encode(SAMPLE) == tokenizer.encode(SAMPLE)
    assert (copy.vocab_size, copy.eos_id, copy.unk_id) == (
        tokenizer.vocab_size,
        tokenizer.eos_id,
        tokenizer.unk_id,
    )
    assert copy.fingerprint == tokenizer.fingerprint
    assert copy.encode("<eos>") != [copy.eos_id]


@any_recipe
def test_building_twice_gives_the_same(recipe):
    assert recipe.build([SAMPLE]).fingerprint == recipe.build([SAMPLE]).fingerprint


@any_recipe
@settings(max_examples=20)
@given(st.lists(st.text(alphabet=sorted(set(SAMPLE)), max_size=9000), max_size=3))
def test_a_batch_is_encoded_as_its_texts_are(recipe, texts):
    tokenizer = TOKENIZERS[recipe.name]
    whole = [tokenizer._tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    assert tokenizer.encode_batch(texts) == whole


def test_characters_are_sorted_after_the_special_tokens():
    tokenizer = CharTokenizer().build(["cab", "d"])
    assert tokenizer.labels(range(tokenizer.vocab_size)) == ["<unk>", "<eos>", "a", "b", "c", "d"]


def test_each_unknown_character_is_one_unknown_token():
    tokenizer = CharTokenizer().build(["ab"])
    a, b, unknown = *tokenizer.encode("ab"), tokenizer.unk_id
    assert tokenizer.encode("a??😀e\u0301b") == [a, *[unknown] * 5, b]


def test_a_byte_is_its_own_id():
    tokenizer = ByteTokenizer().build([])
    assert tokenizer.encode("é\n") == [0xC3, 0xA9, 0x0A]
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (257, 256)


def test_labels_are_printable():
    byte = TOKENIZERS["byte"]
    assert byte.labels([10, 32, 65, 0, 0xC3, 9]) == ["⏎", "·", "A", "\\x00", "\\xc3", "\\x09"]
    char = CharTokenizer().build(["\u2028é\ue000"])
    assert char.labels([2, 3, 4]) == ["é", "\\xe2\\x80\\xa8", "\\xee\\x80\\x80"]
    for tokenizer in TOKENIZERS.values():
        labels = tokenizer.labels(range(tokenizer.vocab_size))
        assert all(label and label.isprintable() for label in labels)


def test_bpe_learns_no_more_than_asked_and_refuses_less_than_the_bytes():
    assert BPETokenizer(vocab_size=270).build([SAMPLE]).vocab_size == 270
    with pytest.raises(ValueError, match=r"tokenizer.vocab_size=256: .*tokenizer.vocab_size=2048 works"):
        BPETokenizer(vocab_size=256)


def test_a_megabyte_in_one_document_is_fast():
    text = "The quick brown fox jumps over the lazy dog.\n" * 25_000
    tokenizer = CharTokenizer().build([text])
    start = time.perf_counter()
    assert len(tokenizer.encode(text)) == len(text)
    assert time.perf_counter() - start < 2


@pytest.mark.parametrize("count", [0, 1, 7, 10**6])
def test_prefix_is_the_text_of_the_first_tokens(count):
    for tokenizer in TOKENIZERS.values():
        text = "To be, or not to be"
        prefix = tokenizer.prefix(text, count)
        assert text.startswith(prefix)
        assert tokenizer.encode(text)[:count] == tokenizer.encode(prefix)


@pytest.fixture
def foreign(tmp_path):
    """A file such as other libraries write: it cuts, pads, adds tokens, and its ids have holes."""

    def write(*special):
        words = {"hello": 3, "world": 5, "[UNK]": 9} | {token: 20 + i for i, token in enumerate(special)}
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer.add_special_tokens(list(special))
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{special[0]} $A", special_tokens=[(special[0], 20)]
        )
        tokenizer.enable_truncation(2)
        tokenizer.enable_padding(length=8)
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        return str(tmp_path / "tokenizer.json")

    return write


def test_a_file_encodes_nothing_but_the_text(foreign):
    tokenizer = TokenizerFile(foreign("</s>")).build([])
    assert tokenizer.encode("hello world hello nobody") == [3, 5, 3, 9]
    assert (tokenizer.eos_id, tokenizer.unk_id, tokenizer.vocab_size) == (20, 9, 21)


def test_a_named_eos_survives_json(foreign):
    tokenizer = TokenizerFile(foreign("<stop>", "</s>"), eos_token="<stop>").build([])
    assert tokenizer.eos_id == 20
    assert TextTokenizer.from_json(tokenizer.to_json()).eos_id == 20


def test_a_file_without_eos_is_refused(foreign):
    path = foreign("<stop>")
    with pytest.raises(ValueError, match=r"tokenizer.eos_token=None: the vocabulary has no <eos>"):
        TokenizerFile(path).build([])
    with pytest.raises(ValueError, match=r"tokenizer.eos_token=<no>: the vocabulary has no <no>"):
        TokenizerFile(path, eos_token="<no>").build([])


def test_a_missing_or_wrong_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"tokenizer.path=.*none.json: there is no such file"):
        TokenizerFile(str(tmp_path / "none.json")).build([])
    (tmp_path / "wrong.json").write_text(json.dumps({"a": 1}))
    with pytest.raises(ValueError, match=r"tokenizer.path=.*wrong.json: this is no tokenizer.json"):
        TokenizerFile(str(tmp_path / "wrong.json")).build([])
