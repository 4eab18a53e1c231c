"""Local files and Python's documentation: every character survives, every mistake has its sentence."""

import json
import sys
import warnings

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tinyformer.data import Pydoc, TextFiles

AWKWARD = 'line\r\nline\rline\n\n\ttab "quoted", comma\u2028\x85é 😀\x0b\x0c end'


def texts_of(splits):
    return {name: list(split["text"]) for name, split in splits.items()}


def write(folder, contents):
    for name, content in contents.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def write_rows(path, rows, column="text"):
    """Rows in the file format that the path's extension names."""
    quoted = ['"' + row.replace('"', '""') + '"' for row in rows]
    writers = {
        ".csv": lambda: path.write_bytes("\r\n".join(["id," + column, *("7," + q for q in quoted)]).encode()),
        ".tsv": lambda: path.write_bytes("\n".join([column + "\tid", *(q + "\t7" for q in quoted)]).encode()),
        ".json": lambda: path.write_text(json.dumps([{column: row} for row in rows])),
        ".jsonl": lambda: path.write_text("\n".join(json.dumps({column: r}, ensure_ascii=False) for r in rows)),
        ".parquet": lambda: pq.write_table(pa.table({column: rows, "id": [7] * len(rows)}), path),
    }
    writers[path.suffix]()


@pytest.mark.parametrize("kind", [".csv", ".tsv", ".json", ".jsonl", ".parquet"])
def test_a_row_is_a_document_and_every_character_survives(tmp_path, kind):
    rows = [AWKWARD, "None", "NA", "", "  spaces  "]
    write_rows(tmp_path / f"rows{kind}", rows)
    assert texts_of(TextFiles(str(tmp_path / f"rows{kind}")).load()) == {"train": rows}


def test_a_text_file_is_one_document(tmp_path):
    (tmp_path / "a.txt").write_bytes(AWKWARD.encode())
    assert texts_of(TextFiles(str(tmp_path / "a.txt")).load()) == {"train": [AWKWARD]}


def test_a_byte_order_mark_is_dropped_at_the_beginning_only(tmp_path):
    write(tmp_path, {"a.txt": b"\xef\xbb\xbfone\xef\xbb\xbftwo"})
    assert texts_of(TextFiles(str(tmp_path / "a.txt")).load()) == {"train": ["one\ufefftwo"]}


def test_rows_without_text_are_left_out(tmp_path):
    write(tmp_path, {"a.jsonl": '{"text": "a"}\n\n{"text": null}\n{"text": "b"}\n'})
    assert texts_of(TextFiles(str(tmp_path / "a.jsonl")).load()) == {"train": ["a", "b"]}


def test_another_column_can_be_named(tmp_path):
    write_rows(tmp_path / "a.csv", ["hello"], column="body")
    assert texts_of(TextFiles(str(tmp_path / "a.csv"), text_column="body").load()) == {"train": ["hello"]}


def test_paths_patterns_and_folders(tmp_path):
    write(tmp_path, {"b.txt": "b", "a.txt": "a", "sub/c.txt": "c", "notes.md": "no text"})
    paths = {
        str(tmp_path): ["a", "b", "c"],
        str(tmp_path / "*.txt"): ["a", "b"],
        str(tmp_path / "**" / "*.txt"): ["a", "b", "c"],
    }
    for path, texts in paths.items():
        assert texts_of(TextFiles(path).load()) == {"train": texts}
    named = [str(tmp_path / "b.txt"), str(tmp_path / "a.txt"), str(tmp_path / "*.txt")]
    assert texts_of(TextFiles(named).load()) == {"train": ["b", "a"]}


@pytest.mark.parametrize("validation", ["validation", "valid", "val", "dev"])
def test_files_named_after_splits_are_these_splits(tmp_path, validation):
    for name in ("train-00000-of-00002", "train-00001-of-00002", validation, "my_test"):
        write_rows(tmp_path / f"{name}.parquet", [name])
    assert texts_of(TextFiles(str(tmp_path)).load()) == {
        "train": ["train-00000-of-00002", "train-00001-of-00002"],
        "validation": [validation],
        "test": ["my_test"],
    }


def test_a_lone_file_is_training_text_whatever_its_name(tmp_path):
    write(tmp_path, {"test.txt": "text"})
    assert texts_of(TextFiles(str(tmp_path / "test.txt")).load()) == {"train": ["text"]}


def test_words_within_a_file_name_are_no_splits(tmp_path):
    write(tmp_path, {"latest.txt": "a", "a-test-b.txt": "b", "train.txt": "c"})
    assert set(TextFiles(str(tmp_path)).load()) == {"train"}


def test_the_fingerprint_follows_the_content(tmp_path):
    write(tmp_path, {"one/a.txt": "text", "two/b.txt": "text", "three/a.txt": "texT"})
    one, two, three = (TextFiles(str(tmp_path / name)).fingerprint() for name in ("one", "two", "three"))
    assert one == two != three


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.txt", None, r"data.files=.*none.txt: there is no such file"),
        ("empty.txt", b"", r"data.files=.*empty.txt: the file is empty"),
        ("a.docx", b"x", r"data.files=.*a.docx: unknown kind of file '.docx'; .txt, .csv"),
        ("latin.txt", "né".encode("latin1"), r"data.files=.*latin.txt: not UTF-8, at byte 1;"),
        ("a.csv", b"id,body\n1,x\n", r"data.text_column=text: .*a.csv has no such column; it has id, body"),
        ("a.jsonl", b'{"body": "x"}\n', r"data.text_column=text: .*has no such column; it has body"),
        ("b.jsonl", b'{"text": 3}\n', r"data.text_column=text: .* holds 3 there"),
        ("c.json", b"[1, 2]", r"data.files=.*c.json: holds 1; each row must be an object"),
        ("d.json", b"[1, ", r"data.files=.*d.json: no JSON"),
        ("e.parquet", b"PAR1", r"data.files=.*e.parquet: no parquet file"),
    ],
)
def test_mistakes_are_named(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        TextFiles(str(tmp_path / name)).load()


def test_a_folder_without_text_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"data.files=.*: the folder holds no .txt, .csv"):
        TextFiles(str(tmp_path)).load()


@pytest.mark.slow
def test_pydoc_is_english_and_imports_nothing():
    before = set(sys.modules)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        texts = list(Pydoc().load()["train"]["text"])
    assert not {"antigravity", "this", "turtle"} & (set(sys.modules) - before)
    assert 1_500_000 < sum(map(len, texts)) < 4_000_000
    assert len(texts) == len(set(texts)) > 5000
    assert any('"try" statement' in text for text in texts)  # the language reference
    assert any(text.startswith("Encode the bytes-like object s using Base64") for text in texts)  # a docstring
    assert Pydoc().fingerprint() == Pydoc().fingerprint()


def test_pydoc_reads_what_parses(tmp_path, monkeypatch):
    write(
        tmp_path,
        {
            "a.py": '"""Module."""\nclass A:\n    """Class.\n\n    More.\n    """\n'
            '    if True:\n        async def f(self):\n            "Method."\n',
            "bad.py": "def (",
            "odd.py": b"\xff\xfe",
            "escape.py": '"""Esc \\d."""',
            "twice.py": '"""Module."""',
            "test/b.py": '"""A test."""',
            "pydoc_data/topics.py": '# comment\ntopics = {"b": "\\nB topic\\n", "a": "A topic"}\n',
        },
    )
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    source = Pydoc()
    expected = ["A topic", "B topic", "Module.", "Class.\n\nMore.", "Method.", "Esc \\d."]
    assert list(source.load()["train"]["text"]) == expected
    before = source.fingerprint()
    write(tmp_path, {"a.py": '"""Module!"""'})
    assert Pydoc().fingerprint() != before
