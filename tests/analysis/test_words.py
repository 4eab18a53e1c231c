"""The words of tokens, attention from word to word, and the tokens that a target copies."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nn.model_cases import make_transformer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from analysis.contexts import batch_of, columns_of, loud_encoder_decoder, loud_transformer, make_context, pair_context
from tinyformer.analysis import CrossAlignment, HeadRelations
from tinyformer.analysis.texts.alignment import copied_tokens
from tinyformer.analysis.texts.relations import relate
from tinyformer.data import BPETokenizer, ByteTokenizer, CharTokenizer, PairTokens, TextTokenizer
from tinyformer.errors import ArgumentError
from tinyformer.measures import TokenPair, Words, capture_pair, merge_words, words_of
from tinyformer.nn import AttentionMaps
from tinyformer.tasks import MaskedLM

PARAGRAPH = "The animal didn't cross (it was  tired).\n\nNaïve e\u0301 👋🏽 👨‍👩‍👧 中文 हिन्दी 3.5 \n"
NAMES = "The animal didn't cross ( it was tired ) . Naïve e\u0301 👋🏽 👨‍👩‍👧 中 文 हिन्दी 3 . 5"


def learned(model, trainer, special, pre_tokenizer, decoder):
    """A tokenizer of another kind, learned on `PARAGRAPH`."""
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizer, decoder
    tokenizer.train_from_iterator([PARAGRAPH] * 3, trainer(vocab_size=90, special_tokens=special, show_progress=False))
    return TextTokenizer(tokenizer, special[-1])


TOKENIZERS = {
    "char": CharTokenizer().build([PARAGRAPH]),
    "byte": ByteTokenizer().build([]),
    "bpe": BPETokenizer(300).build([PARAGRAPH * 3]),
    "unigram": learned(
        models.Unigram(),
        partial(trainers.UnigramTrainer, unk_token="<unk>"),
        ["<unk>", "</s>"],
        *(pre_tokenizers.Metaspace(), decoders.Metaspace()),
    ),
}
for kind, splitter in (("wordpiece", pre_tokenizers.BertPreTokenizer()), ("split", pre_tokenizers.WhitespaceSplit())):
    parts = models.WordPiece(unk_token="[UNK]"), trainers.WordPieceTrainer, ["[UNK]", "[SEP]"], splitter
    TOKENIZERS[kind] = learned(*parts, decoders.WordPiece())


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("char", PARAGRAPH, NAMES),
        ("byte", PARAGRAPH, NAMES),
        ("unigram", PARAGRAPH, NAMES),
        ("bpe", PARAGRAPH, NAMES.replace(") .", ").")),  # a token that holds several words makes them one
        ("wordpiece", "The animal didn't", "The animal didn ' t"),
        ("split", "The (it (animal", "The (it (animal"),
    ],
)
def test_words_do_not_depend_on_the_vocabulary(name, text, expected):
    tokenizer = TOKENIZERS[name]
    eos = tokenizer.token_strings([tokenizer.eos_id])
    words = words_of([tokenizer.eos_id, *tokenizer.encode(text), tokenizer.eos_id], tokenizer)
    assert words.names == (*eos, *expected.split(), *eos)


@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
@given(text=st.text(alphabet=sorted({*PARAGRAPH, "\ufffd", "\x00"}), max_size=40))
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


# Attention from word to word, in models whose weights link two words.


TEXT = "bb aa aa cc"
TOKENIZER = CharTokenizer().build([TEXT + "defghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTU"])
HEAD = 2
"""Of layer 0: each c attends to every a, and to nothing else."""


def linked_transformer(**options):
    """Attention is even in all heads but one."""
    torch.manual_seed(0)
    network = make_transformer(position=False, **options).eval()
    with torch.no_grad():
        for layer in network.encoder.layers:
            layer.attention.q_proj.weight.zero_()
        first = network.encoder.layers[0]
        torch.nn.init.eye_(network.encoder.token_embedding.weight)
        row = HEAD * first.attention.head_dim
        first.attention.k_proj.weight.zero_()
        for projection, letter in ((first.attention.q_proj, "c"), (first.attention.k_proj, "a")):
            # Zero for other letters, whose vectors have equal entries here after the norm.
            projection.weight[row, TOKENIZER.encode(letter + "A")] = torch.tensor([100.0, -100.0])
    return network


def context_of(network, **parts):
    return replace(make_context(network), tokenizer=TOKENIZER, **parts)


def related(context, *pairs, **options):
    found = HeadRelations(options.pop("text", TEXT), pairs, **options)(context, Path())
    return found, columns_of(found.tables["relations"])


def linked_by(seed=0):
    """Untrained weights, of which those of one seed link both words, too."""
    network = linked_transformer()
    if seed != 3:
        torch.nn.init.zeros_(network.encoder.layers[0].attention.q_proj.weight)
    return network


def test_one_head_links_two_words():
    context = context_of(linked_transformer(), untrained=linked_by)
    found, table = related(context, ["cc", "aa:2"], ["aa:2", "bb"])
    assert (table["layer"], table["head"]) == (((0,) * 4 + (1,) * 4) * 2, ("00", "01", "02", "03") * 4)
    assert table["query"] == ("cc",) * 8 + ("aa:2",) * 8
    # "cc", with the space before it, sees <eos> and 9, 10 and 11 of the 11 characters, 3 of which are " aa".
    even = sum(3 / n for n in (10, 11, 12)) / 3
    weights = [even] * 8
    # The space attends evenly; both c attend to four a, of which two are here.
    weights[HEAD] = (3 / 10 + 2 / 4 + 2 / 4) / 3
    assert table["weight"][:8] == pytest.approx(weights, abs=1e-4)
    assert table["uniform"][:8] == pytest.approx([even] * 8)
    assert table["rank"][:8] == (1,) * 8  # evenly, three characters have no less than two
    assert table["num_words"] == (5,) * 8 + (4,) * 8
    second = sum(2 / n for n in (7, 8, 9)) / 3
    assert table["weight"][8:] == pytest.approx([second] * 8, abs=1e-4)
    assert table["rank"][8:] == (2,) * 8  # behind aa:1, of three characters
    assert table["untrained"][:8] == pytest.approx([weights[HEAD]] * 8, abs=1e-4)
    control = found.lines["  cc → aa:2: untrained"]
    assert control == f"{even:.4f} to {weights[HEAD]:.4f} in the best head, 5 seeds"
    # A bidirectional model sees later words.
    _, table = related(context_of(linked_transformer(), task=MaskedLM()), ["aa:1", "cc"])
    assert table["weight"] == pytest.approx([3 / 12] * 8, abs=1e-4)
    assert table["num_words"] == (5,) * 8


def test_the_rank_is_among_the_words_that_are_seen():
    weights = torch.tensor([[0.5, 0.3, 0.2, 0.0], [0.1, 0.2, 0.3, 0.4]])
    visible = torch.tensor([[True, True, True, False]] * 2 + [[True] * 4] * 2)
    logits = torch.zeros(4, 4).masked_fill(~visible, -torch.inf)
    maps = AttentionMaps(weights.repeat(2, 1)[None, None], logits[None, None])
    words = Words(("x", "y", "z"), (0, 1, 1, 2))
    assert relate(maps, words, words, 0, 1) == [pytest.approx((0.5, 1, 2, 2 / 3))]  # a tie
    assert relate(maps, words, words, 1, 0) == [pytest.approx((0.3, 2, 3, (1 / 3 + 1 / 4) / 2))]  # rows 1 and 2


def test_words_of_the_target_and_of_the_source():
    network = loud_encoder_decoder()
    context = replace(pair_context(network), tokenizer=TOKENIZER)
    pair = context.pair_of(TOKENIZER.encode("bb aa cc"), TOKENIZER.encode("dd ee"), 16)
    queries = words_of(pair.predicted[0].tolist(), TOKENIZER)
    keys = Words(("bb", "aa", "cc", "<eos>"), (0, 0, 1, 1, 1, 2, 2, 2, 3))
    (weights,) = capture_pair(network, pair)["cross"]
    merged = merge_words(weights[0], queries, keys)
    _, table = related(context, ["dd", "aa"], ["dd", "<eos>"], text="bb aa cc", target="dd ee")
    assert table["weight"] == pytest.approx([*merged[:, 0, 1].tolist(), *merged[:, 0, 3].tolist()])
    assert table["uniform"] == pytest.approx((3 / 9,) * 4 + (1 / 9,) * 4)
    assert set(table["kind"]) == {"cross"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"text": None}, "text=None: must be one text"),
        ({"text": TEXT * 2}, "text='bb.*': has 23 tokens; at most 16 fit"),
        ({"pairs": ["cc", "bb"]}, "pairs=.*: must hold pairs of words"),
        ({"pairs": [["cat", "bb"]]}, "pairs='cat': the text has no cat; its words are <eos> bb aa aa cc"),
        ({"pairs": [["cc", "aa"]]}, "pairs='aa': the text has aa 2 times: aa:1 to aa:2"),
        ({"pairs": [["bb", "cc"]]}, r"bb does not see cc, which comes later in the text; .*task=masked_lm"),
        ({"window": 3}, r"cc does not see bb, which is outside of the window of every layer"),
    ],
)
def test_mistakes(options, message):
    options = {"text": TEXT, "pairs": [["cc", "bb"]], "window": None} | options
    context = context_of(linked_transformer(window=options.pop("window")))
    with pytest.raises(ArgumentError, match=message):
        HeadRelations(**options)(context, Path())


# Which tokens a target copies from its source, and how often heads of the cross-attention look at them.


DATES = CharTokenizer().build(["0123456789 -./abcdefghijklmnopqrstuvwxyzMJ年月日"])
PAIRS = [
    # Source, target, and where the copied words begin in the target and in the source, with their lengths.
    ("17 May 2031", "2031-05-17", [(0, 7, 4), (8, 0, 2)]),
    ("7 June 2006", "2006-06-07", [(0, 7, 4)]),  # the month is no word of the source, though 2006 ends in it
    ("12.05.2031", "2031-05-12", [(0, 6, 4), (5, 3, 2), (8, 0, 2)]),
    ("06.06.2006", "2006-06-06", [(0, 6, 4)]),  # 06 occurs twice
    ("2031年5月17日", "2031-05-17", [(0, 0, 4), (8, 7, 2)]),
    ("may 31st 1931", "1931-05-31", [(0, 9, 4)]),
    ("a 5 may", "5 - a", []),  # words of one character
]


def pair_of(source, target):
    ids = DATES.encode_batch([source, target])
    return TokenPair.of(*ids, PairTokens(DATES.eos_id, DATES.eos_id, (DATES.eos_id,)), 32)


def copied_in(words):
    """The row and the place of each copied token."""
    return [(row + i, place + i) for row, place, length in words for i in range(length)]


@pytest.mark.parametrize(("source", "target", "words"), PAIRS)
def test_copied_words_by_hand(source, target, words):
    assert sorted(copied_tokens(pair_of(source, target), DATES)) == copied_in(words)


def aligned(network, untrained, folder):
    """The findings on the pairs in one batch."""
    batches = [batch_of([pair_of(*texts) for *texts, _ in PAIRS])]
    context = replace(pair_context(network, untrained=lambda: untrained), batches=batches, tokenizer=DATES)
    return CrossAlignment()(context, folder)


def test_the_copied_tokens_that_a_head_hits(tmp_path):
    networks = {"trained": loud_encoder_decoder(), "untrained": loud_encoder_decoder(seed=1)}
    found = aligned(*networks.values(), tmp_path)
    columns, rows = found.tables["alignment"]
    for model, network in networks.items():
        table = columns_of((columns, [row for row in rows if row[0] == model]))
        for half, column in enumerate(("choosing", "tested")):
            hits = []
            for source, target, words in PAIRS[:-1][half::2]:
                weights = capture_pair(network, pair_of(source, target))["cross"].layers[0].weights[0]
                hits += [weights[:, row].argmax(dim=-1) == place for row, place in copied_in(words)]
            assert table[column] == pytest.approx(torch.stack(hits).double().mean(dim=0).tolist())
        best = table["choosing"].index(max(table["choosing"]))
        assert table["chosen"] == tuple(head == best for head in range(4))
        assert found.scalars[f"analysis/{model}/copied_tokens_hit"] == table["tested"][best]


def test_mistakes_are_named(tmp_path):
    with pytest.raises(ArgumentError, match=r"analysis=.*trained with task=seq2seq"):
        CrossAlignment()(make_context(loud_transformer()), tmp_path)
    with pytest.raises(ArgumentError, match="needs at least two pairs with a copied word, and the sample has 0"):
        CrossAlignment(min_length=99)(pair_context(loud_encoder_decoder()), tmp_path)
