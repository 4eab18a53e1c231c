"""Sources of text on this machine: every character survives, and each label stays with its text."""

import csv
import gzip
import math

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import ClassLabel, Dataset, Features, Value

from tinyformer.data import ByteTokenizer, ExampleFormat, SourceDataModule, TextFiles, WindowFormat
from tinyformer.run.results import describe_data

AWKWARD = 'line\r\nline\rline\r\r\n\n\ttab "quoted", comma\u2028\x85é 😀\x0b\x0c end'
AS_READ = 'line\nline\nline\n\n\n\ttab "quoted", comma\u2028\x85é 😀\x0b\x0c end'
COMPRESS = {".gz": gzip.compress, ".zst": lambda content: pa.compress(content, codec="zstd", asbytes=True)}


def write(folder, contents):
    for name, content in contents.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def write_table(path, rows, columns=("text", "label")):
    """Rows in the format that the path's extension names, after a column of numbers."""
    columns = dict(zip(columns, map(list, zip(*rows, strict=True)), strict=True))
    table = Dataset.from_dict({"id": [7] * len(rows)} | columns)
    if path.suffix in (".csv", ".tsv"):
        separator = {".csv": ",", ".tsv": "\t"}[path.suffix]
        table.to_csv(path, sep=separator, quoting=csv.QUOTE_NONNUMERIC, lineterminator="\r\n")
    elif path.suffix == ".parquet":
        table.to_parquet(path)
    else:
        table.to_json(path, lines=path.suffix == ".jsonl", force_ascii=path.suffix == ".json")


def texts_of(path, **settings):
    return {split: list(rows["text"]) for split, rows in TextFiles(path, **settings).load().items()}


def examples(path, **settings):
    splits = TextFiles(str(path), **{"label_column": "label"} | settings).load("examples")
    return {name: list(zip(*rows.to_dict().values(), strict=True)) for name, rows in splits.items()}


@pytest.mark.parametrize("kind", [".csv", ".tsv", ".json", ".jsonl", ".parquet"])
def test_every_text_survives_with_its_label_or_target(tmp_path, kind):
    rows = [(AWKWARD, "2"), ("", "10"), ("مرحبا 世界 👩‍👩‍👧 é", "1"), ("None", "NA"), ("  spaces  ", "x")]
    path = tmp_path / f"rows{kind}"
    write_table(path, rows)
    assert examples(path) == {"train": [(AS_READ, "2"), *rows[1:]]}
    assert texts_of(str(path)) == {"train": [AS_READ, *(text for text, _ in rows[1:])]}
    assert texts_of(str(path), text_column="label") == {"train": [label for _, label in rows]}
    for suffix, compress in COMPRESS.items() if kind != ".parquet" else ():
        write(tmp_path, {f"{suffix}/train{kind}{suffix}": compress(path.read_bytes())})
        write(tmp_path, {f"{suffix}/a/dev.txt{suffix.upper()}": compress(AWKWARD.encode())})
        splits = {"train": [AS_READ, *(text for text, _ in rows[1:])], "validation": [AS_READ]}
        assert texts_of(str(tmp_path / suffix)) == splits
    write_table(path, [(AWKWARD, "a\r\nb")], ("source", "target"))
    assert TextFiles(str(path)).load("pairs")["train"].to_dict() == {"text": [AS_READ], "pair": ["a\nb"]}
    triples = [("premise", "hypothesis", "yes"), ("", "x", "no"), ("y", "", "no")]
    reordered = [row[::-1] for row in triples]
    write_table(path, reordered, ("gold", "second", "first"))
    settings = {"text_column": ["first", "second"], "label_column": "gold"}
    assert examples(path, **settings) == {"train": triples}
    assert texts_of(str(path), **settings) == {"train": ["premise\nhypothesis", "\nx", "y\n"]}


def test_text_files_and_missing_texts(tmp_path):
    write(tmp_path, {"awkward.txt": AWKWARD, "mark.txt": b"\xef\xbb\xbfone\xef\xbb\xbftwo"})
    assert texts_of(str(tmp_path / "awkward.txt")) == {"train": [AS_READ]}
    assert texts_of(str(tmp_path / "mark.txt")) == {"train": ["one\ufefftwo"]}  # a mark at the beginning only
    rows = '{"text": "a", "label": 1}\n\n{"text": null, "label": 0}\n{"text": "b", "label": 1}\n'
    write(tmp_path, {"a.jsonl": rows})
    assert texts_of(str(tmp_path / "a.jsonl")) == {"train": ["a", "", "b"]}
    assert examples(tmp_path / "a.jsonl") == {"train": [("a", "1"), ("", "0"), ("b", "1")]}


NOT_NAMED = ("03 acid test", "04 night dev", "latest", "my_test", "test-my", "train of thought", "val-00-notes")


def test_only_files_and_folders_that_are_named_so_are_splits(tmp_path):
    for word in ("validation", "valid", "val", "dev", "Dev", "dev-v2.0"):
        names = ("train-00000-of-00002", "train-00001-of-00002-a09b74b3ef9c3b56", word, "test1", *NOT_NAMED)
        write(tmp_path, {f"{word}/{name}.txt": name for name in names})
        splits = texts_of(str(tmp_path / word))
        assert (splits["validation"], splits["test"]) == ([word], ["test1"])
        assert sorted(splits["train"]) == sorted({*names} - {word, "test1"})
    assert texts_of(str(tmp_path / "dev" / "test1.txt")) == {"train": ["test1"]}  # no split without training text
    names = ("train/a/1", "train/test", "test/b/2", "c", ".test/3", "val/.4")
    write(tmp_path, {f"f/{name}.txt": name for name in names})
    splits = {split: sorted(texts) for split, texts in texts_of(str(tmp_path / "f")).items()}
    assert splits == {"test": ["test/b/2", "train/test"], "train": ["c", "train/a/1"]}  # the name of a file comes first
    folders = [str(tmp_path / "f" / name) for name in ("train/a", "test", "c.txt")]
    assert texts_of(folders) == {"train": ["train/a/1", "c"], "test": ["test/b/2"]}


def test_folders_patterns_and_lists_of_the_same_files_give_the_same_splits(tmp_path, monkeypatch):
    """Links are followed, once; a file that a link puts into a split is in no other."""
    monkeypatch.chdir(tmp_path)
    names = ("train/x/1", "test/x/2", "store/3", "4")
    write(tmp_path, {f"f/{name}.txt": name for name in names})
    for link, target in {"valid": "store", "loop": ".", "gone.txt": "nowhere"}.items():
        (tmp_path / "f" / link).symlink_to(target)
    files = [f"{tmp_path}/f/{name}.txt" for name in (*names, "valid/3")]
    for given in ("f", "f/**/*.txt", "./f/../f", f"{tmp_path}/*/**/*", files, ["f/t*/x/*.txt", "f/valid", "f/4.txt"]):
        splits = {split: sorted(texts) for split, texts in texts_of(given).items()}
        assert splits == {"train": ["4", "train/x/1"], "validation": ["store/3"], "test": ["test/x/2"]}
    assert texts_of(["f/store/3.txt", "f/4.txt", "f/s*/*.txt", "f/*.txt"]) == {"train": ["store/3", "4"]}


def test_the_delimiter_is_found(tmp_path):
    """It is the one by which the file has the columns."""
    rows = ["text{}label", "an; odd | text{}1", '"a, quoted{}text"{}0', "an odd text{}1"]
    for delimiter in ",;\t|":
        content = "\r\n".join(row.replace("{}", delimiter) for row in rows).replace("an; odd |", "an odd")
        write(tmp_path, {"rows.csv": b"\xef\xbb\xbf" + content.encode(), "rows.tsv": content})
        expected = [("an odd text", "1"), (f"a, quoted{delimiter}text", "0"), ("an odd text", "1")]
        for name in ("rows.csv", "rows.tsv"):
            assert examples(tmp_path / name) == {"train": expected}
            assert texts_of(str(tmp_path / name)) == {"train": [text for text, _ in expected]}
        # Without a header, the number of fields tells it.
        write(tmp_path, {"rows.csv": content.partition("\r\n")[2]})
        found = texts_of(str(tmp_path / "rows.csv"), columns=["text", "label"])
        assert found == {"train": [text for text, _ in expected]}


SPACED = [
    ('text, label\n"a, b", "x"\nd, "y z"\n', {}, [("a, b", "x"), ("d", "y z")]),
    ("label; text\n1; a b\n", {}, [("a b", "1")]),
    ('"a, b", "x"\n', {"columns": ["text", "label"]}, [("a, b", "x")]),
    ("label,text\n1, a\n", {}, [(" a", "1")]),
    ('label\ttext\n1\t "a" b\n', {}, [(' "a" b', "1")]),
    ('text, label\n"a", "x"\n', {"quoted": False}, [('"a"', '"x"')]),
    ("text,label\n" + "a,b\n" * 120 + 'x, "y, z"\n', {}, [*[("a", "b")] * 120, ("x", "y, z")]),
    ('label,text\n1," ""a"" b"\n1,  c\n', {}, [(' "a" b', "1"), ("  c", "1")]),
]


def test_spaces_after_delimiters_are_kept_unless_the_header_or_quotation_marks_have_them(tmp_path):
    for content, settings, expected in SPACED:
        write(tmp_path, {"train.csv": content, "test.csv": content})
        assert examples(tmp_path, **settings) == {"train": expected, "test": expected}


def test_nested_columns_and_names_of_classes(tmp_path):
    kinds = {"a": {"en": Value("string"), "fr": Value("string")}, "y": ClassLabel(names=["no", "yes"])}
    columns = {"source_column": "q.a.en", "target_column": "q.a.fr", "text_column": "q.a.en"}
    for numbers, labels in (((1, 0), ("yes", "no")), ((-1, -1), (None, None))):
        rows = Dataset.from_list([{"q": {"a": {"en": f"t{n}", "fr": "u"}, "y": n}} for n in numbers], Features(q=kinds))
        rows.to_parquet(tmp_path / "a.parquet")
        rows.to_json(tmp_path / "a.jsonl")
        texts = [f"t{number}" for number in numbers]
        for path, classes in ((tmp_path / "a.parquet", labels), (tmp_path / "a.jsonl", map(str, numbers))):
            pairs = TextFiles(str(path), **columns).load("pairs")["train"]
            assert pairs.to_dict() == {"text": texts, "pair": ["u", "u"]}
            assert examples(path, **columns, label_column="q.y")["train"] == [*zip(texts, classes, strict=True)]


def test_a_split_without_labels_is_left_out_with_a_line(tmp_path, capsys):
    rows = "".join(f"w{i} x{i},{i % 2}\n" for i in range(20))
    write(tmp_path / "f", {"train.csv": f"text,label\n{rows}", "dev.csv": "id,text\n1,a\n", "test.txt": "b"})
    source = TextFiles(str(tmp_path / "f"))
    data = SourceDataModule(source, ByteTokenizer(), ExampleFormat(8), 1, cache_dir=str(tmp_path))
    data.prepare()
    assert capsys.readouterr().err.count("split has no labels in 'label' and is left out") == 2
    assert data.files == {"train": ["train.csv"], "validation": [], "test": [], "all": ["train.csv"]}


def test_a_separator_divides_documents(tmp_path):
    write(tmp_path, {"a.txt": "one\n<|end|>\r\ntwo\n\n three<|end|>\n", "b.jsonl": '{"text": "x<|end|>y"}'})
    assert texts_of(str(tmp_path), separator="<|end|>") == {"train": ["one", "two\n\n three", "x", "y"]}
    assert texts_of(str(tmp_path / "b.jsonl"), separator="") == {"train": ["x<|end|>y"]}
    assert texts_of(str(tmp_path / "a.txt"), separator=r"\n\n") == {"train": ["one\n<|end|>\ntwo", " three<|end|>"]}


def test_the_fingerprint_depends_on_content_and_settings_and_not_on_paths(tmp_path):
    rows = "text\tlabel\nx\t1\n"
    write(tmp_path, {"one/a.tsv": rows, "two/b.tsv": rows, "three/a.tsv": "text\nx\n"})
    one, two, three = (TextFiles(str(tmp_path / name)).fingerprint() for name in ("one", "two", "three"))
    assert one == two != three
    settings = [{"label_column": "label"}, {"text_column": "other"}, {"text_column": ["text", "other"]}]
    settings += [{"label_column": "other"}, {"columns": ["text", "label"]}, {"quoted": False}, {"separator": "x"}]
    prints = [TextFiles(str(tmp_path / "one"), **changes).fingerprint() for changes in settings]
    assert len({one, *prints}) == 1 + len(settings)


def test_without_a_header_and_quotes_each_line_is_a_row(tmp_path):
    lines = ['"unbalanced at the beginning', 'an " in the middle', '"all of it"', "''", "text,label"]
    write(tmp_path, {"train.tsv": "".join(f"{line}\t{i % 2}\n" for i, line in enumerate(lines))})
    write(tmp_path, {"validation.tsv": b'"\t1\r\n\t0\r\n'})
    splits = examples(tmp_path, columns=["text", "label"], quoted=False)
    assert splits["train"] == [(line, str(i % 2)) for i, line in enumerate(lines)]
    assert splits["validation"] == [('"', "1"), ("", "0")]


def test_labels_are_names(tmp_path):
    """In every format; 1 and 1.0 have one name, and NaN has none."""
    for values, names in (
        ([1, 0, 10], ["1", "0", "10"]),
        ([1.5, 2.0, -1.0], ["1.5", "2", "-1"]),
        (["1.0", "1", "1.10"], ["1", "1", "1.10"]),
        ([True, False], ["True", "False"]),
        (["a ", " b", "c d"], ["a", "b", "c d"]),
        ([math.nan], [None]),
        (["NaN", "nan", ""], [None] * 3),
    ):
        for kind in (".csv", ".jsonl", ".parquet"):
            write_table(tmp_path / f"a{kind}", [("x", value) for value in values])
            assert [label for _, label in examples(tmp_path / f"a{kind}")["train"]] == names, (values, kind)
    categories = {name: pa.array(["x", None, "x"]).dictionary_encode() for name in ("text", "label")}
    pq.write_table(pa.table(categories), tmp_path / "a.parquet")
    assert texts_of(str(tmp_path / "a.parquet"), text_column=["text", "label"]) == {"train": ["x\nx", "", "x\nx"]}


def test_what_a_split_leaves_out_is_counted(tmp_path):
    """By hand: of the training rows one is short and two are empty; of validation, one is null and one is empty."""
    contents = {
        "train/a.csv": 'id,text\n1,one\n2\n3,\n4,""\n\n5,two\n',
        "val/a.jsonl": '{"text": null}\n{"text": "three"}\n\n{"text": ""}\n',
        "test/a.txt": "four",
        "train/._a.csv": b"\0\5\x16\7",
        ".git/packed.txt": "no text",
        "notes/a.md": "no text",
    }
    write(tmp_path / "texts", contents)
    (tmp_path / "texts" / "gone.txt").symlink_to("nowhere")
    source = TextFiles(str(tmp_path / "texts"))
    data = SourceDataModule(source, ByteTokenizer(), WindowFormat(2), 1, cache_dir=str(tmp_path))
    data.prepare()
    lines = {fact.label: fact.line for fact in describe_data(data, [*data.splits]) if fact.line}
    reason = "without text (empty, null or cut short)"
    assert lines.pop("data").endswith("; not read: 2 hidden files, 1 broken link, 1 other file")
    assert lines == {
        "train": f"1 file (a.csv), 2 documents, 7 tokens; left out: 3 {reason}",
        "validation": f"1 file (a.jsonl), 1 document, 5 tokens; left out: 2 {reason}",
        "test": "1 file (a.txt), 1 document, 4 tokens",
    }
