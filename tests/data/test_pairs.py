"""Pairs of a source and a target: their batches, what is too long, and files that hold no pairs."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tinyformer.batch import IGNORED
from tinyformer.data import ByteTokenizer, Docstrings, PairDataModule, Pairs, SpecialTokens, TextFiles
from tinyformer.errors import ArgumentError

EOS = ByteTokenizer().build([]).eos_id
ROWS = [("ab", "x"), ("c", "yzw"), ("defg", "v"), ("h", "u")]


def write(folder: Path, rows=ROWS, name: str = "pairs.tsv") -> str:
    path = folder / name
    path.write_text("\n".join("\t".join(row) for row in [("source", "target"), *rows]) + "\n")
    return str(path)


def prepared(folder: Path, files: str, seq_len: int = 16, **options) -> PairDataModule:
    fractions = {"validation_fraction": 0, "test_fraction": 0} | options
    columns = {name: fractions.pop(name) for name in ("source_column", "target_column") if name in fractions}
    tokenizer = fractions.pop("tokenizer", ByteTokenizer())
    data = PairDataModule(
        TextFiles(files, **columns), tokenizer, seq_len, 2, cache_dir=str(folder / "cache"), **fractions
    )
    data.prepare()
    return data


def test_a_batch_holds_sources_what_the_decoder_reads_and_what_it_predicts(tmp_path):
    split = prepared(tmp_path, write(tmp_path)).splits["train"]
    batch = {name: tensor.tolist() for name, tensor in Pairs(split).__getitems__([2, 1]).items()}
    d, c, y, v = (ord(letter) for letter in "dcyv")
    assert batch == {
        "source": [[d, d + 1, d + 2, d + 3, EOS], [c, EOS, EOS, EOS, EOS]],
        "source_lengths": [5, 2],
        "inputs": [[EOS, v, EOS, EOS], [EOS, y, y + 1, ord("w")]],
        "targets": [[v, EOS, IGNORED, IGNORED], [y, y + 1, ord("w"), EOS]],
        "rows": [2, 1],
    }
    assert (split.source(2), split.target(1), split.num_documents, split.num_tokens) == ("defg", "yzw", 4, 10)
    assert split.num_targets == 10 + 12


@pytest.mark.parametrize(("too_long", "rows"), [("truncate", [("def", "v"), ("c", "yzw")]), ("skip", [("ab", "x")])])
def test_pairs_longer_than_the_context(tmp_path, too_long, rows):
    split = prepared(tmp_path, write(tmp_path), seq_len=4 if too_long == "truncate" else 3, too_long=too_long).splits
    found = [(split["train"].source(row), split["train"].target(row)) for row in range(split["train"].num_documents)]
    assert set(rows) <= set(found)
    assert (split["train"].num_truncated, split["train"].num_skipped) == ((1, 0) if too_long == "truncate" else (0, 2))
    batch = Pairs(split["train"]).__getitems__([0])
    assert (batch["source"][0, -1], batch["targets"][0, -1]) == (EOS, EOS)


def test_every_pair_is_read_once_an_epoch_beside_pairs_of_similar_length(tmp_path):
    rows = [("a" * (1 + n % 9), "b" * (1 + n * 7 % 11)) for n in range(60)]
    data = prepared(tmp_path, write(tmp_path, rows))
    batches = list(data.train_dataloader())
    assert sorted(row for batch in batches for row in batch["rows"].tolist()) == list(range(60))
    padding = sum(int((batch["targets"] == IGNORED).sum()) for batch in batches)
    shuffled = np.random.default_rng(0).permutation(60).reshape(-1, 2)
    lengths = data.splits["train"].lengths[:, 1]
    assert padding < 0.5 * sum(abs(int(lengths[a]) - int(lengths[b])) for a, b in shuffled)


def test_evaluation_reads_the_longest_batch_first_and_every_pair_once(tmp_path):
    rows = [("a" * (1 + n % 9), "b" * (1 + n * 7 % 11)) for n in range(60)]
    batches = list(prepared(tmp_path, write(tmp_path, rows)).evaluation_dataloader("train"))
    assert sorted(row for batch in batches for row in batch["rows"].tolist()) == list(range(60))
    longest = [max(batch["source"].shape[1], batch["inputs"].shape[1]) for batch in batches]
    assert longest[0] == max(longest)
    assert longest[1:] != sorted(longest[1:], reverse=True)


def as_jsonl(folder: Path, rows: list[dict]) -> str:
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return str(folder / "pairs.jsonl")


def as_parquet(folder: Path, rows: list[dict]) -> str:
    pq.write_table(pa.Table.from_pylist(rows), folder / "pairs.parquet")
    return str(folder / "pairs.parquet")


MISTAKES = {
    "source_column='es': ": lambda folder: {"files": write(folder), "source_column": "es"},
    "target_column='en': ": lambda folder: {"files": as_jsonl(folder, [{"source": "a"}]), "target_column": "en"},
    "row 2 of": lambda folder: {"files": write(folder, [("a", "b"), ("c", " ")])},
    "holds 3 there, not text": lambda folder: {"files": as_jsonl(folder, [{"source": "a", "target": 3}])},
    "has no text there; remove": lambda folder: {
        "files": as_parquet(folder, [{"source": "a", "target": "b"}, {"source": None, "target": "d"}])
    },
    "must not be the column of the sources": lambda folder: {"files": write(folder), "target_column": "source"},
    "pair 3 of the train split has texts of 4 and 1 tokens, and 3 fit": lambda folder: {
        "files": write(folder),
        "seq_len": 4,
        "too_long": "error",
    },
    "must be at least 2": lambda folder: {"files": write(folder), "seq_len": 1},
}


@pytest.mark.parametrize("message", MISTAKES)
def test_mistakes(tmp_path, message):
    with pytest.raises(ArgumentError) as caught:
        prepared(tmp_path, **MISTAKES[message](tmp_path))
    assert message in str(caught.value)


def test_a_source_without_pairs():
    with pytest.raises(ArgumentError, match="has no pairs of a source and a target"):
        PairDataModule(Docstrings(), ByteTokenizer(), 16, 2)


def test_the_tokens_around_texts_are_those_of_the_model(tmp_path):
    """As BART's: the decoder starts with one token, and every text with another."""
    special = SpecialTokens(decoder_start=250, bos=251, eos=252)
    split = prepared(tmp_path, write(tmp_path), seq_len=5, special_tokens=special).splits["train"]
    batch = {name: tensor.tolist() for name, tensor in Pairs(split).__getitems__([2, 1]).items()}
    d, c, y, v = (ord(letter) for letter in "dcyv")
    assert batch == {
        "source": [[251, d, d + 1, d + 2, 252], [251, c, 252, 252, 252]],
        "source_lengths": [5, 3],
        "inputs": [[250, 251, v, 252, 252], [250, 251, y, y + 1, ord("w")]],
        "targets": [[251, v, 252, IGNORED, IGNORED], [251, y, y + 1, ord("w"), 252]],
        "rows": [2, 1],
    }
    assert (split.source(2), split.target(1), split.num_truncated) == ("def", "yzw", 1)
    tokens = split.tokens
    assert (tokens.source([1, 2, 3, 4], 5), tokens.inputs([1])) == ([251, 1, 2, 3, 252], [250, 251, 1])
    for options in ({"eos": -1}, {"suppressed": [3, -2]}):
        with pytest.raises(ArgumentError, match="must be at least 0"):
            SpecialTokens(**options)
    with pytest.raises(ArgumentError, match=r"^special_tokens='?int'?: must be"):
        SpecialTokens.of(251)
    with pytest.raises(ArgumentError, match="bos=251: must be below 200"):
        SpecialTokens(bos=251).require_known(200)
