"""Text that was trained on is recognised in other data, whatever their files, order and format."""

import json

import numpy as np
import pytest

from tinyformer.data import (
    ByteTokenizer,
    ExampleFormat,
    PairFormat,
    QuestionFormat,
    Recipe,
    SquadFiles,
    TextFiles,
    WindowFormat,
)
from tinyformer.data.trained_on import LENGTH, cut_out, fingerprints, fingerprints_of_all

RNG = np.random.default_rng(0)
TEXT = "".join(map(chr, RNG.integers(97, 123, 3000)))
NEW = "".join(map(chr, RNG.integers(65, 91, 1500)))


def test_blocks_of_known_text_are_cut_out_wherever_they_stand():
    known, beside = fingerprints_of_all(["short", TEXT[:2000]]), LENGTH - 1
    for text, left in {
        TEXT: [TEXT[2000 + beside :]],
        NEW + TEXT[:2000] + NEW: [NEW[:-beside], NEW[beside:]],
        NEW: [NEW],
        "short": [],
        "shor": ["shor"],
        NEW + "short": [NEW + "short"],
        TEXT[1:LENGTH]: [TEXT[1:LENGTH]],
        TEXT[1 : 2 * LENGTH]: [],
        TEXT[5:999] + TEXT[1005:1999]: [],
    }.items():
        assert cut_out(text, known) == left
    rows = ["short", TEXT[:2000], TEXT[1:2000], "", "shor", TEXT[:1999]]
    assert [fingerprints(row) <= set(known.tolist()) for row in rows] == [True, True, False, False, False, False]


def row_of(kind, i):
    """A row in the columns of a kind of data."""
    context = f"context {i}. " * 20
    answers = {"text": [str(i)], "answer_start": [context.index(str(i))]}
    return {
        WindowFormat: {"text": f"row {i} " * 40},
        ExampleFormat: {"text": f"row {i}", "label": i % 2},
        PairFormat: {"source": f"row {i}", "target": f"fila {i} " * 30},
        QuestionFormat: {"question": f"which {i}?", "context": context, "answers": answers},
    }[kind]


@pytest.mark.parametrize("kind", [WindowFormat, ExampleFormat, PairFormat, QuestionFormat])
def test_rows_of_the_training_split_are_left_out_of_every_other_split(tmp_path, kind):
    def recipe(name, numbers, **settings):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n".join(json.dumps(row_of(kind, i)) for i in numbers))
        source = SquadFiles(str(path)) if kind is QuestionFormat else TextFiles(str(path), label_column="label")
        return Recipe(source, ByteTokenizer(), kind(16), 0.2, 0.2, **settings)

    def numbers(prepared, split):
        ids = np.asarray(prepared.splits[split].ids)
        texts = bytes(np.where(ids == 256, 10, ids).astype(np.uint8)).decode()
        return {int(word.strip(".?")) for word in texts.split() if word.strip(".?").isdecimal()}

    run = recipe("run.jsonl", range(60))
    own = run.prepare(tmp_path)
    trained, known = numbers(own, "train"), own.trained_on
    assert len(trained) in range(30, 40)
    moved = recipe("there/moved.jsonl", range(60))
    assert (moved.content, moved.key) == (run.content, run.key)
    changed = recipe("changed.jsonl", reversed(range(70)))
    assert changed.content != run.content
    whole = recipe("changed.jsonl", reversed(range(70)), whole=True, without=known).prepare(tmp_path)
    assert numbers(whole, "all") == {*range(70)} - trained
    assert sum(whole.facts["left_out"]["all"].values()) >= len(trained)
    divided = recipe("changed.jsonl", reversed(range(70)), seed=3, without=known).prepare(tmp_path)
    for split in ("validation", "test"):
        assert not numbers(divided, split) & trained
    assert numbers(divided, "train") & trained
