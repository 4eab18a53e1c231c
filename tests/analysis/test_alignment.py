"""Which tokens a target copies from its source, and how often heads of the cross-attention look at them."""

from dataclasses import replace

import pytest
import torch

from analysis.subjects import batch_of, columns_of, loud_encoder_decoder, loud_transformer, make_subject, pair_subject
from tinyformer.analysis import CrossAlignment, TokenPair, capture_pair
from tinyformer.analysis.alignment import copied_tokens
from tinyformer.data import CharTokenizer, PairTokens
from tinyformer.errors import ArgumentError

TOKENIZER = CharTokenizer().build(["0123456789 -./abcdefghijklmnopqrstuvwxyzMJ年月日"])
EOS = TOKENIZER.eos_id
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
    ids = TOKENIZER.encode_batch([source, target])
    return TokenPair.of(*ids, PairTokens(EOS, EOS, (EOS,)), 32)


def copied_in(words):
    """The row and the place of each copied token."""
    return [(row + i, place + i) for row, place, length in words for i in range(length)]


@pytest.mark.parametrize(("source", "target", "words"), PAIRS)
def test_copied_words_by_hand(source, target, words):
    assert sorted(copied_tokens(pair_of(source, target), TOKENIZER)) == copied_in(words)


def aligned(network, untrained, folder):
    """The findings on the pairs in one batch."""
    batches = [batch_of([pair_of(*texts) for *texts, _ in PAIRS])]
    subject = replace(pair_subject(network, untrained=lambda: untrained), batches=batches, tokenizer=TOKENIZER)
    return CrossAlignment()(subject, folder)


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


def test_an_ablated_head_is_never_the_best(tmp_path):
    ablated = loud_encoder_decoder(ablated_heads=[["cross", 0, head] for head in (0, 1, 3)])
    table = columns_of(aligned(ablated, ablated, tmp_path).tables["alignment"])
    assert table["chosen"] == (False, False, True, False) * 2


def test_mistakes_are_named(tmp_path):
    with pytest.raises(ArgumentError, match=r"analysis=.*trained with task=seq2seq"):
        CrossAlignment()(make_subject(loud_transformer()), tmp_path)
    with pytest.raises(ArgumentError, match="needs at least two pairs with a copied word, and the sample has 0"):
        CrossAlignment(min_length=99)(pair_subject(loud_encoder_decoder()), tmp_path)
