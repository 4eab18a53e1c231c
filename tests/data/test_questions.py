"""Questions about contexts: the windows and batches of them, where answers are, and SQuAD's files."""

import json
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from tinyformer.data import (
    BPETokenizer,
    ByteTokenizer,
    Question,
    QuestionFormat,
    Questions,
    SourceDataModule,
    SquadFiles,
    TextTokenizer,
    tokenise_questions,
)

BYTES = ByteTokenizer().build([])
EOS = BYTES.eos_id
CONTEXT = "The Café opened in 1999; the café closed in 2001."


def lower_case() -> TextTokenizer:
    """Words without case and accents, as BERT's: tokens are not the text that they stand for."""
    words = ["[UNK]", "[SEP]", "the", "cafe", "opened", "closed", "in", "##19", "1999", "2001", ".", ";"]
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return TextTokenizer(tokenizer)


# Answers and tokens.


@pytest.mark.parametrize(
    "tokenizer", [BYTES, BPETokenizer(270).build([CONTEXT]), lower_case()], ids=["byte", "bpe", "wordpiece"]
)
@pytest.mark.parametrize("answer", ["Café", "1999", "The Café opened", "2001", CONTEXT])
def test_the_tokens_of_an_answer_stand_for_its_text(tokenizer, answer):
    start = CONTEXT.index(answer)
    split = tokenise_questions([Question("When?", CONTEXT, [answer, "The"], [start, 0])], tokenizer).cut(200)
    first, last = split.spans[0].tolist()
    assert split.texts_of([(first, last)]) == [answer]
    (offsets,) = tokenizer.offsets([CONTEXT])
    shared = [i for i, (begin, end) in enumerate(offsets) if begin < start + len(answer) and end > start]
    assert shared == list(range(first, last + 1))


# Windows and batches.


def test_batches_by_hand():
    questions = [Question("ab", "cdefgh", ["fg"], [3]), Question("xyz", "uv", [], []), Question("q", "w", ["w"], [0])]
    split = tokenise_questions(questions, BYTES).cut(8, max_question_length=2, stride=2)
    assert split.window_rows.tolist() == [0, 0, 1, 2]
    assert (split.num_documents, split.num_windows, split.num_truncated, split.num_unanswerable) == (3, 4, 1, 1)
    batch = {name: tensor.tolist() for name, tensor in Questions(split).__getitems__([0, 1, 2, 3]).items()}
    letters = ["<ab<cdef", "<ab<efgh", "<xy<uv<<", "<q<w<<<<"]
    assert batch == {
        "inputs": [[EOS if letter == "<" else ord(letter) for letter in row] for row in letters],
        "lengths": [8, 8, 6, 4],
        "contexts": [4, 4, 4, 3],
        "starts": [0, 5, 0, 3],  # the answer is not whole in the first window
        "ends": [0, 6, 0, 3],
        "answerable": [True, True, False, True],
        "rows": [0, 1, 2, 3],
    }
    assert split.num_tokens == 26


@given(
    sizes=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 60)), min_size=1, max_size=5),
    max_length=st.integers(4, 40),
    max_question=st.integers(1, 30),
    stride=st.none() | st.integers(1, 39),
)
def test_windows_read_every_token_of_a_context(sizes, max_length, max_question, stride):
    texts = [Question("q" * asked, "".join(chr(97 + i % 26) for i in range(size)), [], []) for asked, size in sizes]
    split = tokenise_questions(texts, BYTES).cut(max_length, max_question, stride)
    assert split.sizes.max() <= max_length
    assert split.lengths[:, 0].min() >= 1
    for row, (_, size) in enumerate(sizes):
        own = split.window_rows == row
        read = [range(b, b + n) for b, n in zip(split.window_starts[own], split.window_lengths[own], strict=True)]
        assert set().union(*read) == set(range(size))
        assert all(len(part) and part.stop <= size for part in read)
        assert all(one.stop < other.stop for one, other in pairwise(read))  # each reads on
    every = Questions(split).__getitems__(list(range(split.num_windows)))
    for window in range(split.num_windows):
        row, begin = split.window_rows[window], split.window_starts[window]
        part = every["inputs"][window, every["contexts"][window] : every["lengths"][window]].tolist()
        assert bytes(part).decode() == texts[row].context[begin : begin + len(part)]


@pytest.mark.parametrize(
    ("stride", "max_length", "lost"),  # windows of nine letters; with a stride of 9 they share none
    [(9, None, ["hi", "abcdefghijkl"]), (8, None, ["abcdefghijkl"]), (None, 1, ["hi", "abcdefghijkl"])],
)
def test_answers_that_no_window_holds_whole_are_counted(stride, max_length, lost):
    context = "-abcdefghijklmnopqrs"
    asked = [Question("q", context, [text], [context.index(text)]) for text in ("i", "hi", "abcdefghijkl")]
    split = tokenise_questions([*asked, Question("q", context, [], [])], BYTES).cut(12, stride=stride)
    assert split.num_lost(max_length) == len(lost)
    if max_length is None:
        every = Questions(split).__getitems__(list(range(split.num_windows)))
        taught = {int(split.window_rows[row]) for row in every["rows"][every["starts"] > 0]}
        assert [split.answers()[row][0] for row in range(3) if row not in taught] == lost
    assert split.first(1).num_lost() == 0


def asked(question="q", context="c", answer=None):
    """A row of a file, the answer, if there is one, where it first occurs."""
    answers = [] if answer is None else [answer]
    starts = [context.index(answer) for answer in answers]
    return {"question": question, "context": context, "answers": {"text": answers, "answer_start": starts}}


def prepared(folder, files, row_format=None, fraction=0, **settings):
    files = files if isinstance(files, str) else write(folder, "rows.jsonl", files)
    settings |= {"validation_fraction": fraction, "test_fraction": fraction, "cache_dir": str(folder / "cache")}
    data = SourceDataModule(SquadFiles(files), ByteTokenizer(), row_format or QuestionFormat(32), 2, **settings)
    data.prepare()
    return data


def test_every_window_is_trained_on_once_an_epoch(tmp_path):
    rows = [asked(context="abcde" * n) for n in range(1, 9)]
    data = prepared(tmp_path, rows)
    split = data.splits["train"]
    read = [row for batch in data.train_dataloader() for row in batch["rows"].tolist()]
    assert sorted(read) == list(range(split.num_windows))
    assert split.num_windows > 8
    again = prepared(tmp_path, rows, QuestionFormat(32, stride=3))
    assert (again.fingerprint, again.is_prepared(again.tokenizer)) == (data.fingerprint, True)  # cut when it is opened
    assert again.splits["train"].num_windows > split.num_windows
    three = QuestionFormat(32, max_examples=3)
    drawn = [prepared(tmp_path, rows, three, split_seed=seed).splits["train"] for seed in range(4)]
    assert [split.num_documents for split in drawn] == [3] * 4
    assert len({tuple(map(split.context, range(3))) for split in drawn}) > 1  # they are drawn at random


@pytest.mark.parametrize("group_near_copies", [True, False])
def test_questions_about_one_context_and_near_copies_of_it_are_held_out_together(tmp_path, group_near_copies):
    words = [[f"word{n}-{i}" for i in range(20)] for n in range(20)]
    contexts = [" ".join([*own[:19], last]) for own in words for last in ("one", "two")]
    # Questions are longer than contexts, whose near-copies alone count.
    rows = [asked(" ".join(f"{n}-{i}" for i in range(30)), contexts[n % 40]) for n in range(120)]
    splits = prepared(tmp_path, rows, fraction=0.2, group_near_copies=group_near_copies).splits.values()
    held = [{split.context(row) for row in range(split.num_documents)} for split in splits]
    assert [len(one) for one in held] == [24, 8, 8]
    assert len(set.union(*held)) == 40
    copies = [{context.split()[0] for context in one} for one in held]
    assert (sum(map(len, copies)) > 20) == (not group_near_copies)


# Files.


ASKED = "When did it open?"
ANSWERS = [{"text": "1999", "answer_start": 19}, {"text": "in 1999", "answer_start": 16}]
PLAUSIBLE = {"question": "Who?", "answers": [], "plausible_answers": [{"text": "x", "answer_start": 9}]}
PARAGRAPH = {"context": CONTEXT, "qas": [{"question": ASKED, "answers": ANSWERS, "is_impossible": False}, PLAUSIBLE]}
PUBLISHED = {"version": "v2.0", "data": [{"title": "t", "paragraphs": [PARAGRAPH]}]}
ROW = {"context": CONTEXT, "question": ASKED, "answers": {"text": ["1999", "in 1999"], "answer_start": [19, 16]}}
UNANSWERABLE = ROW | {"question": "Who?", "answers": {"text": [], "answer_start": []}}


def write(folder: Path, name: str, content) -> str:
    path = folder / name
    if path.suffix == ".jsonl" or name == "lines.json":
        path.write_text("\n".join(map(json.dumps, content)))
    elif path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(content), path)
    else:
        path.write_text(json.dumps(content))
    return str(path)


@pytest.mark.parametrize("name", ["train-v2.0.json", "rows.jsonl", "rows.json", "lines.json", "rows.parquet"])
def test_every_layout_holds_the_same_questions(tmp_path, name):
    rows = SquadFiles(write(tmp_path, name, PUBLISHED if "v2" in name else [ROW, UNANSWERABLE]))
    assert rows.load("questions")["train"].to_dict() == {
        "text": [ASKED, "Who?"],
        "pair": [CONTEXT, CONTEXT],
        "answers": [["1999", "in 1999"], []],
        "starts": [[19, 16], []],
    }
    assert rows.load()["train"].to_dict() == {"text": [CONTEXT]}
