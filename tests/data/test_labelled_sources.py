"""Labelled files: each label stays with its text, and what cannot be read is named with its place."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tinyformer.data import LabelledSource, LocalOrHub, Source, TextFiles
from tinyformer.data.labels import natural_order

ROWS = [
    ('line\r\nline\n\ttab "quoted", comma\u2028', "2"),
    ("", "10"),
    ("مرحبا 世界 👩‍👩‍👧 é", "1"),
    ("None", "NA"),
]


def write_table(path, rows, columns=("text", "label")):
    """Rows in the file format that the path's extension names, between other columns."""
    quoted = [['"' + value.replace('"', '""') + '"' for value in row] for row in rows]
    table = {"id": [7] * len(rows), **{name: [row[i] for row in rows] for i, name in enumerate(columns)}}
    objects = [dict(zip(table, values, strict=True)) for values in zip(*table.values(), strict=True)]

    def separated(delimiter):
        lines = [["id", *columns], *(["7", *row] for row in quoted)]
        return "\r\n".join(delimiter.join(line) for line in lines).encode()

    writers = {
        ".csv": lambda: path.write_bytes(separated(",")),
        ".tsv": lambda: path.write_bytes(separated("\t")),
        ".json": lambda: path.write_text(json.dumps(objects)),
        ".jsonl": lambda: path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in objects)),
        ".parquet": lambda: pq.write_table(pa.table(table), path),
    }
    writers[path.suffix]()


def examples(path, **settings):
    splits = TextFiles(str(path), **{"label_column": "label", **settings}).load_examples()
    return {name: list(zip(*rows.to_dict().values(), strict=True)) for name, rows in splits.items()}


@pytest.mark.parametrize("kind", [".csv", ".tsv", ".json", ".jsonl", ".parquet"])
def test_every_text_keeps_its_label(tmp_path, kind):
    write_table(tmp_path / f"rows{kind}", ROWS)
    assert examples(tmp_path / f"rows{kind}") == {"train": ROWS}


@pytest.mark.parametrize("kind", [".csv", ".tsv", ".json", ".jsonl", ".parquet"])
def test_pairs_whatever_the_order_of_the_columns(tmp_path, kind):
    pairs = [("premise", "hypothesis", "yes"), ("", "x", "no"), ("y", "", "no")]
    write_table(tmp_path / f"rows{kind}", [row[::-1] for row in pairs], ("gold", "second", "first"))
    settings = {"text_column": ["first", "second"], "label_column": "gold"}
    assert examples(tmp_path / f"rows{kind}", **settings) == {"train": pairs}
    lines = TextFiles(str(tmp_path / f"rows{kind}"), **settings).load()["train"]["text"]
    assert list(lines) == ["premise\nhypothesis", "\nx", "y\n"]


def test_the_text_of_examples_is_the_same_without_labels(tmp_path):
    rows = [{"text": "a", "label": 1}, {"text": None, "label": 0}, {"text": "b", "label": 1}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    source = TextFiles(str(tmp_path / "a.jsonl"), label_column="label")
    assert list(source.load()["train"]["text"]) == ["a", "", "b"]
    assert examples(tmp_path / "a.jsonl") == {"train": [("a", "1"), ("", "0"), ("b", "1")]}


def test_a_file_without_a_header_says_each_row_and_quotes_are_characters(tmp_path):
    lines = ['"unbalanced at the beginning', 'an " in the middle', '"all of it"', "''", "text,label"]
    (tmp_path / "train.tsv").write_text("".join(f"{line}\t{i % 2}\n" for i, line in enumerate(lines)))
    (tmp_path / "validation.tsv").write_bytes(b'"\t1\r\n\t0\r\n')
    found = examples(tmp_path, columns=["text", "label"], quoted=False)
    assert found["train"] == [(line, str(i % 2)) for i, line in enumerate(lines)]
    assert found["validation"] == [('"', "1"), ("", "0")]


def test_quotation_marks_that_do_not_match_swallow_no_rows(tmp_path):
    for i, text in enumerate(('"unbalanced', '"half" quoted')):
        (tmp_path / f"{i}.tsv").write_text(f"text\tlabel\nfirst\t1\n{text}\t0\nthird\t1\n")
        with pytest.raises(
            ValueError, match=rf"data.files=.*{i}.tsv: a quotation mark near line [34] .*data.quoted=false"
        ):
            examples(tmp_path / f"{i}.tsv")
        found = examples(tmp_path / f"{i}.tsv", quoted=False)["train"]
        assert found == [("first", "1"), (text, "0"), ("third", "1")]


@pytest.mark.parametrize("values", [[1, 0, 10], [1.5, 2.0, -1.0], [True, False, True], ["a ", " b", "c d"]], ids=str)
def test_labels_are_names(tmp_path, values):
    pq.write_table(pa.table({"text": ["x"] * 3, "label": values}), tmp_path / "a.parquet")
    assert [label for _, label in examples(tmp_path / "a.parquet")["train"]] == [str(value).strip() for value in values]


def test_names_are_sorted_as_a_reader_would():
    names = ["10", "9", "b", "a10", "a9", "-1", "0", "É"]
    assert sorted(names, key=natural_order) == ["0", "9", "10", "-1", "a9", "a10", "b", "É"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", "text,label\nx,1\ny,\nz\nw,0\n"),
        ("a.jsonl", '{"text": "x", "label": 1}\n{"text": "y", "label": null}\n{"text": "z", "label": ""}\n'),
        ("a.tsv", 'text\tlabel\n"two\nlines"\t1\ny\t\nz\n'),
    ],
)
def test_missing_labels_are_counted_and_the_first_is_found(tmp_path, name, content):
    (tmp_path / "train.csv").write_text("text,label\nx,1\n")
    (tmp_path / name).write_text(content)
    total = {"a.csv": 5, "a.jsonl": 4, "a.tsv": 4}[name]
    with pytest.raises(
        ValueError, match=rf"row 2 of .*{name} has no label, the first of 2 among {total} rows; give each"
    ):
        examples(tmp_path)


def test_nan_is_no_label(tmp_path):
    pq.write_table(pa.table({"text": ["x", "y"], "label": [1.0, float("nan")]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"row 2 of .* has no label, the first of 1 among 2 rows"):
        examples(tmp_path / "a.parquet")


def test_a_split_without_any_label_has_none(tmp_path):
    write_table(tmp_path / "train.csv", [("x", "1")])
    write_table(tmp_path / "test.csv", [("y", ""), ("z", "")])
    assert examples(tmp_path)["test"] == [("y", None), ("z", None)]


@pytest.mark.parametrize(
    ("content", "settings", "message"),
    [
        ("text,label\nx,1\n", {"label_column": None}, r"data.label_column=null: .*data.label_column=label names it"),
        (
            "text,label\nx,1\n",
            {"label_column": "gold"},
            r"data.label_column=gold: .*no such column; it has text, label",
        ),
        (
            "text,label\nx,1\n",
            {"text_column": ["text", "b"]},
            r"data.text_column=b: .*no such column; it has text, label",
        ),
        (
            "text,label\nx,1\n",
            {"text_column": ["a", "b", "c"]},
            r"data.text_column=\['a', 'b', 'c'\]: must be one column",
        ),
        ("text,label\nx,1\n", {"text_column": ["text", "text"]}, r"data.text_column=.*: must be one column, or two"),
        ("text,label\nx,1\ny, and z,0\n", {}, r"row 2 has 3 fields, and there are 2 columns \(text, label\)"),
        ("x,1\n", {"columns": ["text"]}, r"row 1 has 2 fields|label_column=label: .*it has text"),
    ],
)
def test_mistakes_are_named(tmp_path, content, settings, message):
    (tmp_path / "a.csv").write_text(content)
    with pytest.raises(ValueError, match=message):
        examples(tmp_path / "a.csv", **settings)


def test_labels_need_columns_and_must_be_plain(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ValueError, match=r"data.label_column=label: .*a.txt has no columns; name a .csv"):
        examples(tmp_path / "a.txt")
    (tmp_path / "b.jsonl").write_text('{"text": "x", "label": ["a", "b"]}')
    with pytest.raises(ValueError, match=r"data.label_column=label: .*b.jsonl: holds \['a', 'b'\] there"):
        examples(tmp_path / "b.jsonl")
    (tmp_path / "c.jsonl").write_text('{"text": "x", "label": 1}\n{"text": "x"}')
    with pytest.raises(
        ValueError, match=r"data.label_column=label: row 2 of .*c.jsonl has no such column; it has text"
    ):
        examples(tmp_path / "c.jsonl")


def test_what_shapes_the_examples_shapes_the_fingerprint(tmp_path):
    (tmp_path / "a.tsv").write_text("text\tlabel\tother\nx\t1\ty\n")
    settings = [
        {},
        {"label_column": "label"},
        {"label_column": "other"},
        {"text_column": "other"},
        {"text_column": ["text", "other"]},
        {"columns": ["text", "label", "other"]},
        {"quoted": False},
    ]
    prints = [TextFiles(str(tmp_path / "a.tsv"), **chosen).fingerprint() for chosen in settings]
    assert len(set(prints)) == len(prints)


class Remote:
    """Stands for the Hub's data set: it is not asked for anything but its name."""

    name = "remote"

    def fingerprint(self):
        return "remote"

    def load(self, max_characters=None):
        raise AssertionError("not chosen")

    load_examples = load


def test_files_stand_in_for_the_hub(tmp_path):
    write_table(tmp_path / "train.csv", ROWS)
    local = LocalOrHub(str(tmp_path), lambda files: TextFiles(files, label_column="label"), Remote())
    assert isinstance(local, Source)
    assert isinstance(local, LabelledSource)
    assert local.load_examples()["train"].to_dict() == {"text": [t for t, _ in ROWS], "label": [n for _, n in ROWS]}
    assert list(local.load()["train"]["text"]) == [text for text, _ in ROWS]
    remote = LocalOrHub(None, TextFiles, Remote())
    assert local.name == remote.name == "remote"
    assert local.fingerprint() != remote.fingerprint() == "remote"
    assert not local.has_own_splits
    assert remote.has_own_splits
