"""Every mistake has one sentence that names the argument, the value, the reason and mostly a value that works."""

import gzip
import io
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tinyformer.data import (
    BPETokenizer,
    ByteTokenizer,
    ExampleFormat,
    LocalOrHub,
    Masking,
    Pydoc,
    QuestionFormat,
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
    (module, {"validation_fraction": 0.5, "test_fraction": 0.5}, "test_fraction=0.5: leaves no text to train on, with"),
    (module, {"row_format": ExampleFormat(8), "source": Pydoc()}, "source='pydoc': its texts have no class labels; "),
    (QuestionFormat, {"seq_len": 32, "stride": 29}, "stride=29: must be less than 29, or no two windows of seq_len=32"),
    (WindowFormat, {"seq_len": 8, "device": "cuda", "masking": Masking()}, "device='cuda': .*; device='auto' works"),
    (Masking, {"mask_share": 0.8, "random_share": 0.3}, "random_share=0.3: must be at most 1 - mask_share, .*=0.8; ma"),
    (BPETokenizer, {"vocab_size": 256}, "vocab_size=256: must be at least 257, for the 256 .*; vocab_size=2048 works"),
]


def test_arguments(labelled):
    for call, settings, sentence in ARGUMENTS:
        refused(call, sentence, **({"source": labelled} if call is module else {}) | settings)


def parquet(*columns: list[str]) -> bytes:
    pq.write_table(pa.table([*columns], ["text"] * len(columns)), file := io.BytesIO())
    return file.getvalue()


WHOLE = parquet([f"line {n}" * 50 for n in range(200)])
DAMAGED = WHOLE[:40] + bytes(360) + WHOLE[400:]  # pages are cut to pieces; the description at the end is whole
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
FILES = [
    ("none.txt", None, {}, r"files='.*none.txt': the file does not exist; .*0 has no .txt, .csv, .* file\.$"),
    ("a.docx", b"x", {}, "files='.*a.docx': the format '.docx' is not supported; .txt, .csv, .* are"),
    ("latin.txt", "né".encode("latin1"), {}, "files='.*latin.txt': not UTF-8, at byte 1; convert it, e.g. with `iconv"),
    ("a.csv", b"id,a,b\n1,x,y\n", {}, "text_column='text': .* which names the columns, is id, a, b; .* set columns.$"),
    ("a.csv", b"body\tlabel\nx\t1\n", {}, "text_column='text': .* is body, label; .* text_column='body' works"),
    ("a.csv", b"A cat.;1\n", {}, r"text_column='text': .* is A cat., 1; .*=\['text', 'column_2'\] works"),
    ("a.jsonl", b'{"body": "x"}\n', {}, "text_column='text': row 1 .* such column; it has body; text_column='body' w"),
    ("a.jsonl", b'{"text": "\\ud800"}', {}, r"text='.ud800': holds half of a surrogate pair"),
    ("a.parquet", DAMAGED, {}, "files='.*a.parquet': cannot be read as parquet"),
    ("a.txt.gz", gzip.compress(b"cut off")[:-1], {}, "files='.*a.txt.gz': cannot be read .*[Tt]runcated"),
    ("a.txt.gz", gzip.compress(b""), {}, "files='.*a.txt.gz': the file is empty"),
    *((f"a.{kind}", POINTER, {}, "files=.* is a pointer of Git LFS, .*`git lfs pull`") for kind in ("txt", "parquet")),
    ("a.csv", b"text,text\na,b\n", {}, "text_column='text': .*a.csv has 2 columns of this name"),
    ("a.parquet", parquet(["a"], ["b"]), {}, "text_column='text': .*a.parquet has 2 columns of this name"),
    ("a.jsonl", b'{"text": "x"}\n{"text": "y", "text": "z"}', {}, r"files=.*\(line 2: the keys text, text are not all"),
    ("a.txt", "a cat".encode("utf-16le"), {}, "files='.*a.txt': holds NUL bytes"),
    ("a.jsonl", b'{"text": "x"}\n\n' * 70 + b"{,", {}, r"files=.*\(line 141: Expecting .*, column 2 \(char 1\)\)"),
    ("a.jsonl", b'{"t": {"en": "x"}}', {"text_column": "t.fr"}, r"text_column='t.fr': .*; it has t.en, t\.$"),
]
L = {"label_column": "label"}
LABELS = [
    ("a.csv", b"review,mood\nx,1\n", {}, "text_column='text': .*; text_column='review' label_column='mood' works"),
    ("a.csv", b"text,mood\nx,1\n", {}, "label_column='label': .* it has text, mood; label_column='mood' works"),
    ("a.csv", b"text,id,mood\nx,1,1\n", {}, "label_column='label': .* it has text, id, mood.$"),
    ("a.csv", b"text,label\nx,1\ny, and z,0\n", L, r"files=.*line 3 has 3 fields, but .* 2 columns \(text, label\)"),
    ("a.csv", b"text,label\nx,1\n", {"columns": ["text", "label"]}, "columns=.* header row .*; columns=None works"),
    ("a.csv", b"Good,1\n", L, r"text_column='text': .* is Good, 1; .* header row; columns=\['text', 'label'\] works"),
    ("a.csv", b'"text","label"\nx,1\n', {"quoted": False}, "text_column='text': .* header in quot.*quoted=True works"),
    ("a.jsonl", b'{"text": "x", "label": 1}\n{"text": "x"}', L, "label_column='label': row 2 of .* has no such column"),
    ("a.csv", b"text,label\nx,1\ny,\nz\nw,0\n", L, "label_column='label': row 2 of .*a.csv has no label, .* 2 among 4"),
    ("a.tsv", b'text\tlabel\n\nx\t1\n"open\t0\nz\t1\n', L, "files=.*: a quotation mark .* line 4 opens .*; quoted=F"),
]
PAIRS = [
    ("a.tsv", b"uno\tone\t3\n", {}, r"source_column='source': .* header row; columns=.*'target', 'column_3'\] works"),
    ("a.csv", b"source,target\nuno,one\ndos, \n", {}, "target_column='target': row 2 of .* has no text there; remove"),
    ("a.jsonl", b'{"source": null, "target": "b"}', {}, "source_column='source': .* has no text there; remove"),
]
CONTEXT = "The Café opened in 1999"


def squad(text="1999", start=19, question="When?", context=CONTEXT, **changes) -> bytes:
    asked = {"question": question, "answers": [{"text": text, "answer_start": start}]} | changes
    return json.dumps({"data": [{"paragraphs": [{"context": context, "qas": [asked]}]}]}).encode()


def row(answers) -> bytes:
    return json.dumps([{"question": "When?", "context": CONTEXT, "answers": answers}]).encode()


QUESTIONS = [
    ("a.json", content, {}, f"files='.*a.json': .*{sentence}")
    for content, sentence in [
        (squad(text="1998"), "the context of question 1 has no answer '1998' at character 19"),
        (squad(answers={"text": ["1999"], "answer_start": [19]}), "has no list of objects 'answers'"),
        (row({"text": ["1999"], "answer_start": []}), "the answers of row 1 are not two lists of"),
    ]
]
QUESTIONS += [
    ("a.json", POINTER, {}, "files='.*a.json': is a pointer of Git LFS"),
    ("a.json", b'[{"question": "q", "context": "c"}]', {}, "files='answers': .*; rows have the columns question, con"),
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
        ({"source": TextFiles(f"{tmp_path}/row.csv")}, r"source.files=.*: the file does not .* has rows.csv\.$"),
        ({"source": text, "tokenizer": TokenizerFile("none.json")}, "tokenizer.path='none.json': the file does not"),
        ({"source": TextFiles(text.files, label_column="gold"), "row_format": examples}, "source.label_column='gold'"),
        ({"source": remote, "row_format": examples}, "source.files='none.txt'"),
        ({"source": wrong, "row_format": examples}, "source.local.label_column='gold'"),
        ({"source": text, "row_format": WindowFormat(9)}, "row_format.seq_len=9: the .* too short: it has 3 t.* 9.$"),
    ]:
        refused(module(**settings | fractions).prepare, sentence)
    local = LocalOrHub(str(tmp_path / "rows.csv"), SquadFiles, text)
    refused(lambda: module(source=local, row_format=examples), "source='text': its texts have no class labels")
