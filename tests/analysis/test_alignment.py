"""Which tokens a target copies from its source, and how often heads of the cross-attention look at them."""

from dataclasses import replace

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from analysis.pair_subjects import loud_encoder_decoder, pair_subject
from analysis.subjects import columns_of, loud_transformer, make_subject
from tinyformer.analysis import CrossAlignment, TokenPair, capture_pair
from tinyformer.analysis.alignment import copied_tokens
from tinyformer.batch import IGNORED
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


@pytest.mark.parametrize(("source", "target", "words"), PAIRS)
def test_copied_words_by_hand(source, target, words):
    expected = [(row + i, place + i) for row, place, length in words for i in range(length)]
    assert sorted(copied_tokens(pair_of(source, target), TOKENIZER)) == expected


def test_the_copied_tokens_that_a_head_hits(tmp_path):
    network, other = loud_encoder_decoder(), loud_encoder_decoder(seed=1)
    subject = pair_subject(network, untrained=lambda: other)
    pairs = [pair_of(source, target) for source, target, _ in PAIRS]
    sides = [[side[0] for side in ids] for ids in zip(*pairs, strict=True)]
    padded = [
        pad_sequence(s, batch_first=True, padding_value=v) for s, v in zip(sides, (EOS, EOS, IGNORED), strict=True)
    ]
    batch = dict(zip(("source", "inputs", "targets"), padded, strict=True))
    batch["source_lengths"] = torch.tensor([len(source) for source in sides[0]])
    subject = type(subject)(**{**vars(subject), "batches": [batch], "tokenizer": TOKENIZER})
    found = CrossAlignment()(subject, tmp_path)

    table = columns_of(found.tables["alignment"])
    for half, column in ((0, "choosing"), (1, "tested")):
        for model, of_network in (("trained", network), ("untrained", other)):
            hits = [[] for _ in range(4)]
            for pair, (*_, words) in list(zip(pairs, PAIRS, strict=True))[:-1][half::2]:
                weights = capture_pair(of_network, pair)["cross"].layers[0].weights[0]
                for row, place, length in words:
                    for i in range(length):
                        for head in range(4):
                            at = max(range(pair.source.shape[1]), key=weights[head, row + i].tolist().__getitem__)
                            hits[head].append(at == place + i)
            shares = [table[column][row] for row in range(8) if table["model"][row] == model]
            assert shares == pytest.approx([sum(of_head) / len(of_head) for of_head in hits])
    for first, model in ((0, "trained"), (4, "untrained")):
        choosing, chosen = table["choosing"][first : first + 4], table["chosen"][first : first + 4]
        assert chosen == tuple(head == choosing.index(max(choosing)) for head in range(4))
        share = table["tested"][first + chosen.index(True)]
        assert found.scalars[f"analysis/{model}/copied_tokens_hit"] == share


def test_an_ablated_head_is_never_the_best(tmp_path):
    ablated = loud_encoder_decoder(ablated_heads=[["cross", 0, head] for head in (0, 1, 3)])
    for seed in range(3):
        subject = pair_subject(ablated, untrained=lambda: ablated)
        pairs = [pair_of(source, target) for source, target, _ in PAIRS[seed:]]
        sides = [[side[0] for side in ids] for ids in zip(*pairs, strict=True)]
        padded = [
            pad_sequence(s, batch_first=True, padding_value=v) for s, v in zip(sides, (EOS, EOS, IGNORED), strict=True)
        ]
        batch = dict(zip(("source", "inputs", "targets"), padded, strict=True))
        batch["source_lengths"] = torch.tensor([len(source) for source in sides[0]])
        subject = replace(subject, batches=[batch], tokenizer=TOKENIZER)
        table = columns_of(CrossAlignment()(subject, tmp_path).tables["alignment"])
        assert table["chosen"] == (False, False, True, False) * 2
        assert table["ablated"] == (True, True, False, True) * 2


def test_mistakes_are_named(tmp_path):
    with pytest.raises(ArgumentError, match=r"analysis=.*trained with task=seq2seq"):
        CrossAlignment()(make_subject(loud_transformer()), tmp_path)
    with pytest.raises(ArgumentError, match="needs at least two pairs with a copied word, and the sample has 0"):
        CrossAlignment(min_length=99)(pair_subject(loud_encoder_decoder()), tmp_path)
