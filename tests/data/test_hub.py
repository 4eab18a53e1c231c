"""The Hub, replaced by a server on this machine: downloads, streams, joined rows, and work without a network."""

import io
import json
import random
import subprocess
import sys
import textwrap

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hub_server import HubServer

from tinyformer.data import ByteTokenizer, HubDataset
from tinyformer.data.sources import hub
from tinyformer.data.sources.hub_dataset import join_rows
from tinyformer.errors import ArgumentError

PLAY = "First Citizen:\nBefore we proceed any further, hear me speak.\n\nAll:\nSpeak, speak.\n" * 20
ARTICLES = [f" = Title {i} = \n \n Some text about {i} . \n = = Section = = \n x = 1 = y \n" for i in range(6)]
LINES = "".join(ARTICLES).splitlines(keepends=True)
STRING = {"dtype": "string", "_type": "Value"}
TITLE = r" = [^=].* = $"
PARTS = [
    ["".join(random.Random(100 * part + row).choices("abcdefghij \n", k=20_000)) for row in range(20)]
    for part in range(8)
]


def parquet(features=None, **columns):
    """A file of these columns, with a description of them as `datasets` writes it."""
    table, file = pa.table(columns), io.BytesIO()
    if features:
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    pq.write_table(table, file)
    return file.getvalue()


def labelled(texts, labels):
    label = {"names": ["negative", "positive"], "_type": "ClassLabel"}
    return parquet({"sentence": STRING, "label": label}, sentence=texts, label=labels)


def squad(texts, starts):
    """Rows as in `rajpurkar/squad`."""
    answers = [{"text": text, "answer_start": start} for text, start in zip(texts, starts, strict=True)]
    return parquet(title=["t", "t"], context=["a b c"] * 2, question=["q0", "q1"], answers=answers)


REPOSITORIES = {
    "datasets/owner/large": {
        **{f"data/train-{i:05d}-of-00008.parquet": parquet(text=texts) for i, texts in enumerate(PARTS)},
        "data/validation-00000-of-00001.parquet": parquet(text=["one", None, "two"]),
    },
    "datasets/owner/play": {
        "default/train/0000.parquet": parquet(text=[PLAY[:1000]]),
        "default/validation/0000.parquet": parquet(text=[PLAY[1000:1100]]),
        "default/test/0000.parquet": parquet(text=[PLAY[1100:]]),
    },
    "datasets/owner/reviews": {
        "data/train-00000-of-00001.parquet": labelled([f"review {i}" for i in range(40)], [i % 2 for i in range(40)]),
        "data/validation-00000-of-00001.parquet": labelled(["good", None], [1, 0]),
        "data/test-00000-of-00001.parquet": labelled(["one", "two"], [-1, -1]),
    },
    "datasets/owner/pairs": {
        "train.jsonl": b'{"b": "two", "a": "one", "gold": 3}\n{"b": null, "a": "x", "gold": 10}\n'
    },
    "datasets/owner/books": {
        "train.jsonl": b'{"id": 1, "translation": {"en": "A cat.", "fr": "Un chat."}}\n'
        b'{"id": 2, "translation": {"en": "A dog.", "fr": "Un chien."}}\n'
    },
    "datasets/owner/squad": {
        "plain_text/train-00000-of-00001.parquet": squad([["b c"], ["a"]], [[2], [0]]),
        "plain_text/validation-00000-of-00001.parquet": squad([[], ["a b", "b"]], [[], [0, 2]]),
    },
    "models/owner/model": {"tokenizer.json": ByteTokenizer().build([]).to_json().encode()},
}

HELPERS = """
import json, os
from tinyformer.data import *
cache = os.environ["CACHE"]
ENGLISH = {"source_column": "translation.en"}
def splits(path, rows="texts", **source):
    loaded = HubDataset(path, **source, cache_dir=cache).load(rows)
    return {name: table.to_dict() for name, table in loaded.items()}
def sentence(call):
    try:
        return call()
    except ValueError as error:
        return str(error)
"""


@pytest.fixture
def run(tmp_path):
    """Run code in a new process that uses this Hub, and return what it assigned to `answer`."""

    def run_code(server, code):
        script = HELPERS + textwrap.dedent(code) + "\nprint(json.dumps(answer))"
        environment = server.environment(tmp_path / "hf") | {"CACHE": str(tmp_path / "cache")}
        command = [sys.executable, "-c", script]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=50, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run_code


BOOKS = 'splits("owner/books", "pairs", **ENGLISH, '
REVIEWS = 'splits("owner/reviews", "examples", text_column="sentence", label_column="label")'
ASKED = {"text": ["q0", "q1"], "pair": ["a b c", "a b c"]}
READ = {
    'splits("owner/large")': {
        "train": {"text": [text for part in PARTS for text in part]},
        "validation": {"text": ["one", None, "two"]},
    },
    'splits("owner/play", revision="refs/convert/parquet", rejoin_splits=True)': {"train": {"text": [PLAY]}},
    'HubTokenizer("owner/model").build([]).encode("hé")': [0x68, 0xC3, 0xA9],
    'splits("owner/none")': "path='owner/none': the Hub has no such dataset that you can access (",
    'splits("owner/large", text_column="body")': "text_column='body': owner/large has no such column; it has text.",
    # pairs, from two columns or from two keys of one
    f'{BOOKS} target_column="translation.fr")': {
        "train": {"text": ["A cat.", "A dog."], "pair": ["Un chat.", "Un chien."]}
    },
    f'{BOOKS} target_column="translation.de")': "target_column='translation.de': owner/books has no such column",
    # questions, in the layout of SQuAD
    'splits("owner/squad", "questions")': {
        "train": ASKED | {"answers": [["b c"], ["a"]], "starts": [[2], [0]]},
        "validation": ASKED | {"answers": [[], ["a b", "b"]], "starts": [[], [0, 2]]},
    },
    'splits("owner/squad", text_column=["question", "context"])["train"]': ASKED,
    # labels, with their names
    f'{REVIEWS}["test"]': {"text": ["one", "two"], "label": [None, None]},
    f'{REVIEWS}["validation"]': {"text": ["good", None], "label": ["positive", "negative"]},
    'splits("owner/pairs", "examples", text_column=["a", "b"], label_column="gold")': {
        "train": {"text": ["one", "x"], "pair": ["two", None], "label": ["3", "10"]}
    },
}
"""The rows that are read, or the beginning of the error."""


@pytest.mark.slow
def test_texts_pairs_questions_and_labels_are_downloaded(run):
    with HubServer(REPOSITORIES) as server:
        answers = run(server, f"answer = [sentence(lambda: eval(call)) for call in {list(READ)}]")
    for (call, expected), answer in zip(READ.items(), answers, strict=True):
        assert (answer[: len(expected)] if isinstance(expected, str) else answer) == expected, call


@pytest.mark.slow
def test_a_stream_is_read_as_far_as_asked_into_a_memory_map(run):
    code = """
        import pyarrow
        loaded = HubDataset("owner/large", cache_dir=cache).load(max_characters=500_000)
        answer = [{split: list(rows["text"]) for split, rows in loaded.items()}, pyarrow.total_allocated_bytes()]
        books = HubDataset("owner/books", text_column="translation.en", cache_dir=cache).load(max_characters=9)
        answer += [list(books["train"]["text"])]
    """
    with HubServer(REPOSITORIES) as server:
        texts, allocated, nested = run(server, code)
        assert server.bytes_served < 0.5 * sum(map(len, REPOSITORIES["datasets/owner/large"].values()))
    assert texts == {"train": [text for part in PARTS for text in part][:25], "validation": ["one", "", "two"]}
    assert (allocated < 100_000, nested) == (True, ["A cat.", "A dog."])


CARDS = {
    "plain": ("[{config_name: default, data_files: [{split: train, path: a.txt}], version: 1.0.0}]", None),
    "pattern": ("[{config_name: en, default: true, data_files: '**/a.txt'}]", None),
    "removes": ("[{config_name: default, version: '../../../../victim::file://', data_files: a.txt}]", "version="),
    "absolute": ("[{config_name: default, version: 'VICTIM::file://', data_files: a.txt}]", "version='/"),
    "file": ("[{config_name: default, data_files: [{split: train, path: [/etc/passwd]}]}]", "data_files="),
    "parent": ("[{config_name: default, data_dir: x/../..}]", "data_dir='x/../..'"),
    "server": ("[{config_name: default, data_files: 'github://a:b@c/d.txt'}]", "data_files='github:"),
    "chain": ("[{config_name: default, data_files: 'simplecache::a.txt'}]", "data_files='simplecache:"),
    "engine": ("[{config_name: default, data_files: a.txt, engine: python}]", "engine='python'"),
    "no-list": ("{a: 1}", "has no list of configurations"),
}
"""Configurations in a README, and what is said of those that are refused."""


def card(configs, end="\n"):
    return f"{end.join(['---', f'configs: {configs}', '---'])}\n# A data set\n".encode()


@pytest.mark.slow
def test_a_card_chooses_files_of_its_own_repository_alone(run, tmp_path):
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "thesis.txt").write_text("years of work")
    cards = {name: {"README.md": card(text.replace("VICTIM", str(victim)))} for name, (text, _) in CARDS.items()}
    cards["returns"] = {"README.md": card(CARDS["removes"][0], "\r")}
    cards["bom"] = {"README.md": b"\xef\xbb\xbf" + card(CARDS["removes"][0])}
    cards["other-file"] = {".huggingface.yaml": b"configs: [{config_name: default, version: /x}]"}
    cards["infos"] = {"dataset_infos.json": b"[1]"}
    repositories = {f"datasets/owner/{name}": files | {"a.txt": b"one\ntwo\n"} for name, files in cards.items()}
    picture = {"bytes": None, "path": "http://127.0.0.1:9/x.png"}  # on a server that does not exist
    pictures = parquet({"text": STRING, "picture": {"_type": "Image"}}, text=["one"] * 9, picture=[picture] * 9)
    repositories["datasets/owner/pictures"] = {"train.parquet": pictures}
    code = f"""
        list(HubDataset("owner/pictures").load(max_characters=10)["train"])
        list(HubDataset("owner/pictures", document_start="x").load()["train"])
        answer = {{name: sentence(lambda: splits(name)) for name in {[r[9:] for r in repositories]}}}
    """
    with HubServer(repositories) as server:
        said = run(server, code)
    assert (victim / "thesis.txt").read_text() == "years of work"
    assert [path.name for path in tmp_path.glob("victim*")] == ["victim"]
    expected = {name: problem for name, (_, problem) in CARDS.items()} | {
        "returns": "version='../",
        "bom": "version='../",
        "other-file": "its .huggingface.yaml has the option version='/x'",
        "infos": "has no attribute",
    }
    for name, problem in expected.items():
        answer = said[f"owner/{name}"]
        assert answer == {"train": {"text": ["one", "two"]}} if problem is None else problem in answer, (name, answer)


def test_the_fingerprint_covers_the_commit_and_how_it_is_read(monkeypatch, tmp_path):
    commit = ["one"]
    monkeypatch.setattr(hub, "resolve", lambda path, revision, repo_type: commit[0])

    def fingerprint(**settings):
        return HubDataset(**({"path": "owner/name", "cache_dir": str(tmp_path)} | settings)).fingerprint()

    changes = [{}, {"path": "other/name"}, {"name": "small"}, {"text_column": "body"}, {"label_column": "label"}]
    changes += [{"text_column": ["a", "b"]}, {"rejoin_splits": True}, {"document_start": "x"}]
    prints = {fingerprint(**change) for change in changes}
    assert fingerprint() in prints
    commit[0] = "two"
    assert len({*prints, fingerprint()}) == len(changes) + 1


def test_rows_are_joined_where_a_document_starts():
    assert list(join_rows(LINES, TITLE)) == ARTICLES
    assert list(join_rows(["preface", *LINES], TITLE)) == ["preface", *ARTICLES]
    assert list(join_rows(LINES, None)) == LINES


def test_a_folder_of_the_same_name_is_not_read_in_its_place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    with pytest.raises(ArgumentError, match="path='owner/name': is also a folder here"):
        HubDataset("owner/name").fingerprint()
