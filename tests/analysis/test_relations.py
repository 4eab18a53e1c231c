"""Attention from word to word, in models whose weights link two words."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from nn.model_cases import make_transformer

from analysis.subjects import columns_of, loud_encoder_decoder, make_subject, pair_subject
from tinyformer.analysis import HeadRelations, TokenPair, capture_pair, decoded_pair
from tinyformer.analysis.relations import relate
from tinyformer.analysis.words import Words, merge_words, words_of
from tinyformer.data import CharTokenizer
from tinyformer.errors import ArgumentError
from tinyformer.nn import AttentionMaps, DifferentialAttention, prune_heads
from tinyformer.tasks import MaskedLM

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


def subject_of(network, **parts):
    return replace(make_subject(network), tokenizer=TOKENIZER, **parts)


def related(subject, *pairs, **options):
    found = HeadRelations(options.pop("text", TEXT), pairs, **options)(subject, Path())
    return found, columns_of(found.tables["relations"])


def test_one_head_links_two_words():
    found, table = related(subject_of(linked_transformer()), ["cc", "aa:2"], ["aa:2", "bb"])
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
    line = found.lines[f"  cc → aa:2: layer 0 head {HEAD}"]
    assert line == f"{weights[HEAD]:.4f}, rank 1 of 5; uniform {even:.4f}"
    # A bidirectional model sees later words.
    _, table = related(subject_of(linked_transformer(), task=MaskedLM()), ["aa:1", "cc"])
    assert table["weight"] == pytest.approx([3 / 12] * 8, abs=1e-4)
    assert table["num_words"] == (5,) * 8


def test_windows_pruned_and_ablated_heads_and_two_softmaxes():
    network = linked_transformer(window=[3, None], ablated_heads=[[0, 1]])
    prune_heads(network.encoder.layers[0].attention, [0])
    network.encoder.layers[1].attention = DifferentialAttention(32, 2, layer_index=1)
    _, table = related(subject_of(network), ["cc", "bb"])
    assert table["head"] == ("02", "03", "00a", "00b", "01a", "01b")
    assert table["weight"][:2] == table["uniform"][:2] == (0,) * 2
    assert table["rank"][:2] == (None,) * 2
    assert min(table["weight"][2:]) > 0.1


def test_the_rank_is_among_the_words_that_are_seen():
    weights = torch.tensor([[0.5, 0.3, 0.2, 0.0], [0.1, 0.2, 0.3, 0.4]])
    visible = torch.tensor([[True, True, True, False]] * 2 + [[True] * 4] * 2)
    logits = torch.zeros(4, 4).masked_fill(~visible, -torch.inf)
    maps = AttentionMaps(weights.repeat(2, 1)[None, None], logits[None, None])
    words = Words(("x", "y", "z"), (0, 1, 1, 2))
    found = relate(maps, words, words, 0, 1)
    assert (found.weights.tolist(), found.ranks.tolist()) == ([pytest.approx(0.5)], [1])  # a tie
    assert (found.num_words, found.uniform) == (2, pytest.approx(2 / 3))
    found = relate(maps, words, words, 1, 0)  # rows 1 and 2
    assert (found.weights.tolist(), found.ranks.tolist()) == ([pytest.approx(0.3)], [2])
    assert (found.num_words, found.uniform) == (3, pytest.approx((1 / 3 + 1 / 4) / 2))


@pytest.mark.parametrize("target", ["dd ee", None], ids=["given", "decoded"])
def test_words_of_the_target_and_of_the_source(target):
    network = loud_encoder_decoder()
    subject = replace(pair_subject(network), tokenizer=TOKENIZER)
    tokens, source = subject.task.special_tokens.around(TOKENIZER), TOKENIZER.encode("bb aa cc")
    if target is None:
        pair = decoded_pair(network, source, tokens, subject.task.beam)
    else:
        pair = TokenPair.of(source, TOKENIZER.encode(target), tokens, 16)
    queries = words_of(pair.predicted[0].tolist(), TOKENIZER)
    keys = Words(("bb", "aa", "cc", "<eos>"), (0, 0, 1, 1, 1, 2, 2, 2, 3))
    (weights,) = capture_pair(network, pair)["cross"]
    merged = merge_words(weights[0], queries, keys)
    _, table = related(subject, [queries.names[0], "aa"], [queries.names[0], "<eos>"], text="bb aa cc", target=target)
    assert table["weight"] == pytest.approx([*merged[:, 0, 1].tolist(), *merged[:, 0, 3].tolist()])
    assert table["uniform"] == pytest.approx((3 / 9,) * 4 + (1 / 9,) * 4)
    assert set(table["kind"]) == {"cross"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pairs": [["cat", "bb"]]}, r"cat is not a word of the text, whose words are <eos> bb aa aa cc"),
        ({"pairs": [["cc", "aa"]]}, r"the text has aa 2 times: aa:1 to aa:2; pairs=\[\['cc', 'aa:1'\]\] works"),
        ({"pairs": [["bb", "cc"]]}, r"bb does not see cc, which comes later in the text; .*task=masked_lm"),
        ({"window": 3}, r"cc does not see bb, which is outside of the window of every layer"),
    ],
)
def test_mistakes(options, message):
    options = {"text": TEXT, "pairs": [["cc", "bb"]], "window": None} | options
    subject = subject_of(linked_transformer(window=options.pop("window")))
    with pytest.raises(ArgumentError, match=message):
        HeadRelations(**options)(subject, Path())
