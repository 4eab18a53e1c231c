"""Relations on lines: a head that links two words, controls recomputed by hand, and networks that link none."""

import csv
import itertools
import json
import random
from dataclasses import replace

import pytest
import torch

from analysis.contexts import columns_of, loud_transformer, make_context
from analysis.test_words import HEAD, TOKENIZER, linked_transformer
from tinyformer.analysis import HeadRelations
from tinyformer.analysis.texts.relation_lines import Line, RelationLines, compare, holm, read_lines
from tinyformer.data import make_lines
from tinyformer.errors import ArgumentError
from tinyformer.measures import Words, capture_weights
from tinyformer.nn import AttentionMask


def lines_of(number):
    """Lines in which c belongs to a and not to d; both are anywhere before it, and so are others."""
    rng = random.Random(0)
    lines = []
    for _ in range(number):
        words = ["a" * rng.randint(1, 3), "d" * rng.randint(1, 3), *rng.sample("efgh", 3)]
        rng.shuffle(words)
        ends = ["c", rng.choice("ijkl") * rng.randint(1, 3)]
        chosen = sorted(words, key=lambda word: "ad".find(word[0]) % 9)[:2]
        lines.append(Line(" ".join([*words, *ends]), "c", *chosen))
    return lines


def write(path, lines):
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([Line._fields, *lines])
    return str(path)


def context_of(network, **parts):
    return replace(make_context(network), **{"tokenizer": TOKENIZER, "untrained": longer} | parts)


@pytest.fixture
def lines(tmp_path):
    return write(tmp_path / "a_of_c.csv", lines_of(40))


def longer(further=0):
    return linked_transformer(max_seq_len=32)


def random_network(seed=0):
    return loud_transformer(seed=seed, max_seq_len=32)


def test_the_head_that_links_two_words_and_its_verdict(lines, tmp_path):
    context = context_of(longer(), untrained=random_network)
    found = HeadRelations(file=lines, num_windows=4)(context, tmp_path)
    table = columns_of(found.tables["relations"])
    # Of " c", the space attends evenly and c to each a alone; the other heads attend evenly.
    assert table["tested"] == table["choosing"] == (0.5,) * HEAD + (1.0,) + (0.5,) * (7 - HEAD)
    assert (table["low"][HEAD], table["high"][HEAD], table["low"][0]) == (1, 1, 0.5)
    assert table["chosen"] == tuple(at == HEAD for at in range(8))
    assert (table["p_value"][HEAD] < 1e-4, min(table["p_value"][:HEAD])) == (True, 1)
    assert found.lines["relation"] == "a_of_c: 20 lines choose the head, 20 others test it"
    assert found.lines["  verdict"].startswith(
        f"layer 0 head {HEAD} links query to key in 100 % of 20 lines (100 to 100; a fixed"
    )
    assert found.lines["  all heads"].startswith("1 of 8 prefer the key more often")
    assert found.lines[f"  layer 0 head {HEAD}"].endswith(" of 8")  # its label, and its importance among all heads
    assert found.scalars["analysis/relation/exceeds_controls"] == 1
    assert len(found.tables["relation_lines"][1]) == 40


def test_controls_by_hand(lines):
    network = random_network()
    relation = RelationLines(context_of(network), lines, lines_of(40), False)
    maps = [
        torch.cat(list(capture_weights(network, torch.tensor([line.ids]), AttentionMask(causal=True))), dim=1)[0]
        for line in relation.placed
    ]

    def mean(at, queries, keys, head):
        return sum(float(maps[at][head, q, k]) for q, k in itertools.product(queries, keys)) / len(queries) / len(keys)

    assert {len(side) for line in relation.placed for side in line[1:]} == {1, 2, 3, 4}  # tokens, with the space
    preferred = relation.preferred(relation.maps)
    for index in (0, 7):
        line, head = relation.placed[index], 5
        text = lines_of(40)[index].text
        assert [text[side[0] - 1 : side[-1]].strip() for side in line[1:]] == [*lines_of(40)[index][1:]]
        assert preferred[index][head] == (
            mean(index, line.query, line.key, head) > mean(index, line.query, line.distractor, head)
        )
        places = []
        for other, shift in itertools.product(range(40), range(-30, 30)):
            query, key, distractor = ([at + shift for at in side] for side in line[1:])
            end = len(relation.placed[other].ids)
            if {*query, *key, *distractor} <= {*range(1, end)} and not {*query} & {*relation.placed[other].query}:
                places.append(mean(other, query, key, head) > mean(other, query, distractor, head))
        assert len(places) > 40
        assert relation.elsewhere(index)[head] == pytest.approx(sum(places) / len(places))
    # The best rule on the first half, among all offsets.
    gaps = [[abs((side[0] + side[-1] - x.query[0] - x.query[-1]) / 2) for side in x[2:]] for x in relation.placed]
    shares = {
        k: sum(0.5 if abs(a - k) == abs(d - k) else abs(a - k) < abs(d - k) for a, d in gaps[::2]) / 20
        for k in range(40)
    }
    offset, tested = relation.best_offset()
    assert shares[-offset] == max(shares.values())
    near = [(abs(a + offset), abs(d + offset)) for a, d in gaps[1::2]]
    assert tested.tolist() == [0.5 if a == d else a < d for a, d in near]


def test_a_constant_distance_is_a_fixed_offset(tmp_path):
    made = [Line(f"{x}{y} aa {z} dd c", "c", "aa", "dd") for x, y, z in itertools.permutations("efgh", 3)]
    context = context_of(longer(), untrained=longer)
    found = HeadRelations(file=write(tmp_path / "near.csv", made), importance=False)(context, tmp_path)
    assert found.scalars["analysis/relation/fixed_offset"] == 1
    # " c" is 2½ tokens behind " dd" and 7½ behind " aa", which is the one nearer to k = -6.
    sentence = "no head does better than a fixed offset of -6 tokens or untrained weights (best of 5 seeds): the best"
    assert found.lines["  verdict"].startswith(sentence)
    assert set(columns_of(found.tables["relations"])["importance"]) == {None}


def test_the_query_that_predicts_a_word(lines):
    relation, ahead = (RelationLines(context_of(longer()), lines, lines_of(40), flag) for flag in (False, True))
    for line, before in zip(relation.placed, ahead.placed, strict=True):
        assert [at - 1 for at in line.query] == [*before.query]
        assert line[2:] == before[2:]
    assert Words(("<eos>", "a"), (0, 1, 1)).predicted() == Words(("<eos>", "a", ""), (1, 1, 2))


def test_phrases_are_one_word():
    words = Words(("The", "fox", "didn't", "jump", "over", "jump", "over"), (0, 1, 1, 2, 3, 4, 5, 6))
    assert (words.find("jump over:2"), words.find("fox didn't")) == (range(5, 7), range(1, 3))
    assert words.tokens(1, 2) == range(1, 4)
    score = Words(("3", ":", "1", ",", "3", ":", "2", "3"), tuple(range(8)))  # phrases are found first
    assert [score.find(asked) for asked in ("3:1", "3:2", "3:3")] == [range(3), range(4, 7), range(7, 8)]
    pieces = Words(("a", "part", "don", "'", "t", "apart", " "), tuple(range(7)))
    assert [*map(pieces.find, ("don't", "a part", "apart"))] == [range(2, 5), range(2), range(5, 6)]
    joined = words.joined(range(3, 5))
    assert joined == Words(("The", "fox", "didn't", "jump over", "jump", "over"), (0, 1, 1, 2, 3, 3, 4, 5))
    context, pair = context_of(longer()), ["cc", "bb aa"]
    found = HeadRelations("dd bb aa cc", [pair], importance=False)(context)
    table = columns_of(found.tables["relations"])
    assert table["query"][0], table["key"][0] == pair
    assert table["num_words"] == (4,) * 8
    # Of " cc", the space attends evenly, and both c to the two a alone.
    even = sum(6 / n for n in (10, 11, 12)) / 3
    assert table["weight"] == pytest.approx([even] * HEAD + [(6 / 10 + 2) / 3] + [even] * (7 - HEAD), abs=1e-4)


def test_p_values_and_intervals():
    assert holm(torch.tensor([0.01, 0.04, 0.03, 0.005])).tolist() == pytest.approx([0.03, 0.06, 0.06, 0.02])
    values = torch.tensor([1.0, 0.0, 1.0, torch.nan])
    assert compare(values).mean == pytest.approx(2 / 3)
    assert [*vars(compare(values, values)).values()] == [0, 0, 0]


GOOD = {"text": "bb aa dd cc", "query": "cc", "key": "aa", "distractor": "dd"}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"text": "bb"}], r"file='\S*lines.jsonl': row 1 of \S* has no column query; it has text"),
        ([GOOD | {"key": None}], "file=.*: line 1: the text has no ; its words are <eos> bb"),
        ([GOOD, GOOD | {"query": "aa dd bb"}], "file=.*: line 2: the text has no aa dd bb; its words are <eos> bb"),
        ([GOOD | {"query": "bb"}] * 9, "file=.*: the query sees both words in 0 of 9 lines.*task=masked_lm"),
        ([GOOD | {"text": "bb aa dd cc " + "e" * 89}], "file=.*: line 1 has 102 tokens; at most 32 fit"),
    ],
)
def test_mistakes(rows, message, tmp_path):
    file = tmp_path / "lines.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ArgumentError, match=message):
        HeadRelations(file=str(file))(context_of(longer()))


def test_a_name_of_lines_is_a_set_or_a_file():
    assert read_lines("verb_object") == make_lines("verb_object")
    with pytest.raises(ArgumentError, match=r"file='none.csv': is no \.csv.*, nor one of .*verb_object"):
        HeadRelations(file="none.csv")
