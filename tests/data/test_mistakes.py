"""Every mistake has one sentence that names the argument, the value, the reason and mostly a value that works."""

import json

import pytest

from tinyformer.data import (
    BPETokenizer,
    ByteTokenizer,
    ExampleFormat,
    LocalOrHub,
    Masking,
    Pydoc,
    SourceDataModule,
    SquadFiles,
    TextFiles,
    TokenizerFile,
    WindowFormat,
)
from tinyformer.errors import ArgumentError


def refused(call, sentence, **settings):
    """Check the sentence, a regular expression, of the error that a call raises; what it says works has to."""
    with pytest.raises(ArgumentError, match=f"^{sentence}") as caught:
        call(**settings)
    if settings and caught.value.works:
        call(**settings | caught.value.works)


@pytest.fixture
def labelled(tmp_path):
    (tmp_path / "rows.csv").write_text("text,label\nx,1\ny,0\n")
    return TextFiles(str(tmp_path / "rows.csv"), label_column="label")


def module(**changes):
    return SourceDataModule(**{"tokenizer": ByteTokenizer(), "row_format": WindowFormat(8), "batch_size": 2} | changes)


ARGUMENTS = [
    (module, {"validation_fraction": 1.0}, "validation_fraction=1.0: must be .* than 1; validation_fraction=0.05 w"),
    (module, {"validation_fraction": 0.5, "test_fraction": 0.5}, "test_fraction=0.5: leaves no text to train on; "),
    (module, {"row_format": ExampleFormat(8), "source": Pydoc()}, "source='pydoc': its texts have no class labels; "),
    (Masking, {"mask_share": 0.8, "random_share": 0.3}, "random_share=0.3: must be at most 1 - mask_share, .*=0.8; ma"),
    (BPETokenizer, {"vocab_size": 256}, "vocab_size=256: must be at least 257, for the 256 .*; vocab_size=2048 works"),
]


def test_arguments(labelled):
    for call, settings, sentence in ARGUMENTS:
        refused(call, sentence, **({"source": labelled} if call is module else {}) | settings)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
FILES = [
    ("none.txt", None, {}, r"files='.*none.txt': the file does not exist\.$"),
    ("a.docx", b"x", {}, "files='.*a.docx': the format '.docx' is not supported; .txt, .csv, .* are"),
    (
        "latin.txt",
        "né".encode("latin1"),
        {},
        "files='.*latin.txt': is not UTF-8 at byte 1; convert it: .*`iconv",
    ),
    ("a.csv", b"id,a,b\n1,x,y\n", {}, "text_column='text': .*; it has id, a, b, its first row; .* set columns.$"),
    ("a.jsonl", b'{"body": "x"}\n', {}, r"text_column='text': row 1 .* such column; it has body\.$"),
    ("a.jsonl", b'{"text": "\\ud800"}', {}, r"text='.ud800': contains half of a surrogate pair"),
    *((f"a.{kind}", POINTER, {}, "files=.* is a pointer of Git LFS, .*`git lfs pull`") for kind in ("txt", "parquet")),
    ("a.csv", b"text,text\na,b\n", {}, "text_column='text': .*a.csv has 2 columns of this name"),
    ("a.jsonl", b'{"text": "x"}\n{"text": "y", "text": "z"}', {}, r"files=.*\(line 2: the keys text, text are not all"),
    ("a.txt", "a cat".encode("utf-16le"), {}, "files='.*a.txt': contains NUL bytes"),
    ("a.jsonl", b'{"text": "x"}\n\n' * 70 + b"{,", {}, r"files=.*\(line 141: Expecting .*, column 2 \(char 1\)\)"),
    ("a.jsonl", b'{"t": {"en": "x"}}', {"text_column": "t.fr"}, r"text_column='t.fr': .*; it has t.en, t\.$"),
]
L = {"label_column": "label"}
LABELS = [
    ("a.csv", b"text,id,mood\nx,1,1\n", {}, "label_column='label': .* it has text, id, mood.$"),
    ("a.csv", b"text,label\nx,1\ny, and z,0\n", L, r"files=.*line 3 has 3 fields, but .* 2 columns \(text, label\)"),
    ("a.csv", b"text,label\nx,1\n", {"columns": ["text", "label"]}, "columns=.* header row .*; columns=None works"),
    ("a.jsonl", b'{"text": "x", "label": 1}\n{"text": "x"}', L, "label_column='label': row 2 of .* has no such column"),
    (
        "a.csv",
        b"text,label\nx,1\ny,\nz\nw,0\n",
        L,
        "label_column=.*: 2 of 4 rows have no label, the first is row 2 of .*a.csv",
    ),
    ("a.tsv", b'text\tlabel\n\nx\t1\n"open\t0\nz\t1\n', L, "files=.*: a quotation mark .* line 4 opens .*; quoted=F"),
]
PAIRS = [
    (
        "a.csv",
        b"source,target\nuno,one\ndos, \n",
        {},
        "target_column='target': row 2 of .* has no text in this column",
    ),
    (
        "a.jsonl",
        b'{"source": null, "target": "b"}',
        {},
        "source_column='source': .* has no text in this column",
    ),
]


def squad(text: str) -> bytes:
    asked = {"question": "When?", "answers": [{"text": text, "answer_start": 19}]}
    context = "The Café opened in 1999"
    return json.dumps({"data": [{"paragraphs": [{"context": context, "qas": [asked]}]}]}).encode()


QUESTIONS = [
    ("a.json", squad("1998"), {}, "files='.*a.json': .*the context of question 1 has no answer '1998' at character 19"),
    ("a.json", POINTER, {}, "files='.*a.json': is a pointer of Git LFS"),
    ("a.json", b'[{"question": "q", "context": "c"}]', {}, "files='answers': row 1 of .* has no such column"),
    ("a.txt", b"text", {}, "files='.*a.txt': cannot hold questions; .json"),
]


@pytest.mark.parametrize(
    ("rows", "cases"), [("texts", FILES), ("examples", LABELS), ("pairs", PAIRS), ("questions", QUESTIONS)]
)
def test_contents_of_files(rows, cases, tmp_path):
    kind = SquadFiles if rows == "questions" else TextFiles
    for number, (name, content, settings, sentence) in enumerate(cases):
        folder = tmp_path / str(number)
        folder.mkdir()
        if content is not None:
            (folder / name).write_bytes(content)
        refused(lambda **given: kind(**given).load(rows), sentence, files=str(folder / name), **settings)


def test_what_a_module_finds_in_its_source_and_tokenizer(tmp_path, labelled):
    """The path leads from the module's argument to that of the object at fault."""
    text, examples = TextFiles(str(tmp_path / "rows.csv")), ExampleFormat(4)
    remote = LocalOrHub("none.txt", lambda files: TextFiles(files, label_column="label"), labelled)
    wrong = LocalOrHub(labelled.files, lambda files: TextFiles(files, label_column="gold"), labelled)
    fractions = {"validation_fraction": 0, "test_fraction": 0, "cache_dir": str(tmp_path)}
    for settings, sentence in [
        ({"source": TextFiles(f"{tmp_path}/row.csv")}, r"source.files=.*: the file does not exist\.$"),
        ({"source": text, "tokenizer": TokenizerFile("none.json")}, "tokenizer.path='none.json': the file does not"),
        ({"source": TextFiles(text.files, label_column="gold"), "row_format": examples}, "source.label_column='gold'"),
        ({"source": remote, "row_format": examples}, "source.files='none.txt'"),
        ({"source": wrong, "row_format": examples}, "source.local.label_column='gold'"),
        ({"source": text, "row_format": WindowFormat(9)}, "row_format.seq_len=9: the .* too short: it has 3 t.* 9.$"),
    ]:
        refused(module(**settings | fractions).prepare, sentence)
    local = LocalOrHub(str(tmp_path / "rows.csv"), SquadFiles, text)
    refused(lambda: module(source=local, row_format=examples), "source='text': its texts have no class labels")
