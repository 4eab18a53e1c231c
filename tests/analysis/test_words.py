"""The words of tokens, and attention maps of words."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from tinyformer.analysis import Words, merge_words, words_of
from tinyformer.data import BPETokenizer, ByteTokenizer, CharTokenizer, TextTokenizer

TEXT = "The animal didn't cross (it was  tired).\n\nNaïve e\u0301 👋🏽 👨‍👩‍👧 中文 हिन्दी 3.5 \n"
NAMES = "The animal didn't cross ( it was tired ) . Naïve e\u0301 👋🏽 👨‍👩‍👧 中 文 हिन्दी 3 . 5"


def learned(model, trainer, special, pre_tokenizer, decoder, normalizer=None):
    """A tokenizer of another kind, learned on `TEXT`."""
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizer, decoder
    if normalizer:
        tokenizer.normalizer = normalizer
    tokenizer.train_from_iterator([TEXT] * 3, trainer(vocab_size=90, special_tokens=special, show_progress=False))
    return TextTokenizer(tokenizer, special[-1])


TOKENIZERS = {
    "char": CharTokenizer().build([TEXT]),
    "byte": ByteTokenizer().build([]),
    "bpe": BPETokenizer(300).build([TEXT * 3]),
    "unigram": learned(
        models.Unigram(),
        partial(trainers.UnigramTrainer, unk_token="<unk>"),
        ["<unk>", "</s>"],
        *(pre_tokenizers.Metaspace(), decoders.Metaspace()),
    ),
    "wordpiece": learned(
        models.WordPiece(unk_token="[UNK]"),
        trainers.WordPieceTrainer,
        ["[UNK]", "[SEP]"],
        *(pre_tokenizers.BertPreTokenizer(), decoders.WordPiece(), normalizers.BertNormalizer()),
    ),
}


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("char", TEXT, NAMES),
        ("byte", TEXT, NAMES),
        ("unigram", TEXT, NAMES),
        ("bpe", TEXT, NAMES.replace(") .", ").")),  # a token that holds several words makes them one
        ("wordpiece", "The ANIMAL didn't", "the animal didn ' t"),
    ],
)
def test_words_do_not_depend_on_the_vocabulary(name, text, expected):
    tokenizer = TOKENIZERS[name]
    eos = tokenizer.token_strings([tokenizer.eos_id])
    words = words_of([tokenizer.eos_id, *tokenizer.encode(text), tokenizer.eos_id], tokenizer)
    assert words.names == (*eos, *expected.split(), *eos)


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([], Words((), ())),
        ([256, *b" ", *b" "], Words(("<eos>", "  "), (0, 1, 1))),
        ([*b"a \n", *b"b "], Words(("a", "b"), (0, 1, 1, 1, 1))),
        ([*"a,é".encode()], Words(("a", ",", "é"), (0, 1, 2, 2))),
        ([0xC3], Words(("\ufffd",), (0,))),  # half a character
        ([256, 256], Words(("<eos>", "<eos>"), (0, 1))),
    ],
)
def test_words_of_bytes(ids, words):
    assert words_of(ids, TOKENIZERS["byte"]) == words


@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
@given(text=st.text(alphabet=sorted({*TEXT, "\ufffd", "\x00"}), max_size=40))
@settings(max_examples=30, deadline=None)
def test_words_hold_every_token_once_and_all_of_the_text(tokenizer, text):
    ids = tokenizer.encode(text)
    words = words_of(ids, tokenizer)
    assert [token for word in range(len(words.names)) for token in words.tokens(word)] == [*range(len(ids))]
    assert "".join("".join(words.names).split()) == "".join(tokenizer.decode(ids).split())


def test_weights_to_a_word_are_summed_and_weights_from_a_word_are_averaged():
    weights = torch.tensor([[0.1, 0.2, 0.7], [0.3, 0.3, 0.4], [0.5, 0.1, 0.4]])
    queries, keys = Words(("a", "bc"), (0, 1, 1)), Words(("ab", "c"), (0, 0, 1))
    merged = merge_words(torch.stack([weights, weights.flip(0)]), queries, keys)
    expected = torch.tensor([[[0.3, 0.7], [0.6, 0.4]], [[0.6, 0.4], [0.45, 0.55]]])
    torch.testing.assert_close(merged, expected)
