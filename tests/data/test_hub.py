"""The Hub, replaced by a server on this machine: downloads, streams, joined rows, and work without a network."""

import io
import json
import random
import subprocess
import sys
import textwrap
from itertools import chain

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import ClassLabel, Dataset, Features, Value
from hub_server import HubServer

from tinyformer.data import ByteTokenizer
from tinyformer.data.hub_dataset import join_rows, take_characters

PLAY = "First Citizen:\nBefore we proceed any further, hear me speak.\n\nAll:\nSpeak, speak.\n" * 20
ARTICLES = [f" = Title {i} = \n \n Some text about {i} . \n = = Section = = \n x = 1 = y \n" for i in range(6)]


def parquet(texts, column="text"):
    file = io.BytesIO()
    pq.write_table(pa.table({"id": list(range(len(texts))), column: texts}), file)
    return file.getvalue()


def labelled(texts, labels, names=("negative", "positive")):
    file = io.BytesIO()
    features = Features({"idx": Value("int32"), "sentence": Value("string"), "label": ClassLabel(names=list(names))})
    columns = {"idx": list(range(len(texts))), "sentence": texts, "label": labels}
    Dataset.from_dict(columns, features).to_parquet(file)
    return file.getvalue()


def random_text(seed):
    return "".join(random.Random(seed).choices("abcdefghij \n", k=20_000))


def lines(text):
    return text.splitlines(keepends=True)


PARTS = [[random_text(100 * part + row) for row in range(20)] for part in range(8)]
REPOSITORIES = {
    "datasets/owner/large": {
        **{f"data/train-{i:05d}-of-00008.parquet": parquet(texts) for i, texts in enumerate(PARTS)},
        "data/validation-00000-of-00001.parquet": parquet(["one", None, "two"]),
    },
    "datasets/owner/play": {
        "default/train/0000.parquet": parquet([PLAY[:1000]]),
        "default/validation/0000.parquet": parquet([PLAY[1000:1100]]),
        "default/test/0000.parquet": parquet([PLAY[1100:]]),
    },
    "datasets/owner/articles": {"train.parquet": parquet(lines("".join(ARTICLES)), "line")},
    "datasets/owner/reviews": {
        "data/train-00000-of-00001.parquet": labelled([f"review {i}" for i in range(40)], [i % 2 for i in range(40)]),
        "data/validation-00000-of-00001.parquet": labelled(["good", None], [1, 0]),
        "data/test-00000-of-00001.parquet": labelled(["one", "two"], [-1, -1]),
    },
    "datasets/owner/partly": {"train.parquet": labelled(["a", "b", "c"], [1, -1, -1])},
    "datasets/owner/pairs": {
        "train.jsonl": b'{"b": "two", "a": "one", "gold": 3}\n{"b": null, "a": "x", "gold": 10}\n'
    },
    "models/owner/model": {"tokenizer.json": ByteTokenizer().build([]).to_json().encode()},
    "models/owner/bare": {"config.json": b"{}"},
}


@pytest.fixture(scope="module")
def hub():
    with HubServer(REPOSITORIES) as server:
        yield server


@pytest.fixture
def run(tmp_path):
    """Run code in a new process that uses this Hub, and return what it assigned to `answer`."""

    def run_code(hub, code):
        preamble = "import json\nfrom tinyformer.data import *\n"
        script = preamble + textwrap.dedent(code) + "\nprint(json.dumps(answer))"
        environment = hub.environment(tmp_path / "hf") | {"CACHE": str(tmp_path / "cache")}
        done = subprocess.run(
            [sys.executable, "-c", script],
            env=environment,
            capture_output=True,
            text=True,
            timeout=50,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run_code


HELPERS = """
import os
cache = os.environ["CACHE"]
def texts(**source):
    return {k: list(v["text"]) for k, v in HubDataset(**source, cache_dir=cache).load().items()}
def sentence(call):
    try:
        call()
    except ValueError as error:
        return str(error)
"""


@pytest.mark.slow
def test_downloads_joins_and_refuses(hub, run):
    answer = run(
        hub,
        HELPERS
        + """
answer = [
    texts(path="owner/large"),
    texts(path="owner/play", revision="refs/convert/parquet", rejoin_splits=True),
    texts(path="owner/articles", text_column="line", document_start=" = [^=].* = $"),
    HubTokenizer("owner/model").build([]).encode("hé"),
    sentence(lambda: texts(path="owner/none")),
    sentence(lambda: texts(path="owner/large", name="other")),
    sentence(lambda: texts(path="owner/large", text_column="body")),
    sentence(lambda: HubTokenizer("owner/none").key()),
    sentence(lambda: HubTokenizer("owner/bare").key()),
]
""",
    )
    large, play, articles, ids, *sentences = answer
    assert large["train"] == list(chain.from_iterable(PARTS))
    assert large["validation"] == ["one", None, "two"]
    assert play == {"train": [PLAY]}
    assert articles == {"train": ARTICLES}
    assert ids == [0x68, 0xC3, 0xA9]
    assert sentences[0].startswith("path='owner/none': this dataset does not exist on the Hub, or is private;")
    assert sentences[1].startswith("name='other': owner/large: BuilderConfig 'other' not found")
    assert sentences[2] == "text_column='body': owner/large has no such column; it has id, text."
    assert sentences[3].startswith("path='owner/none': this model does not exist on the Hub")
    assert sentences[4].startswith("path='owner/bare': this repository has no tokenizer.json; path='openai-com")


PREPARE = (
    HELPERS
    + """
def module(path="owner/large"):
    return TextDataModule(
        HubDataset(path, cache_dir=cache), HubTokenizer("owner/model"), seq_len=16, batch_size=4,
        test_fraction=0, max_tokens=100_000, group_near_copies=False, cache_dir=cache,
    )
prepared = module()
prepared.prepare()
tokens = {name: split.num_tokens for name, split in prepared.splits.items()}
text = prepared.tokenizer.decode(prepared.splits["train"].ids[1:1000])
"""
)


@pytest.mark.slow
def test_a_budget_streams_a_part_and_the_result_works_offline(run):
    with HubServer(REPOSITORIES) as hub:
        answer = run(hub, PREPARE + "answer = [tokens, text, prepared.has_own_validation]")
        whole = sum(len(content) for content in REPOSITORIES["datasets/owner/large"].values())
        assert hub.bytes_served < whole / 2
    tokens, text, own_validation = answer
    assert tokens == {"train": 100_000, "validation": len("one") + 1 + len("two")}
    assert text == PARTS[0][0][:999]
    assert own_validation

    # Without the server, what was prepared opens, the tokenizer included; anything else fails quickly and clearly.
    offline = (
        PREPARE
        + """
import time
start = time.monotonic()
sentences = [
    sentence(lambda: module("owner/play").prepare()),
    sentence(lambda: HubTokenizer("owner/other").key()),
    sentence(prepared.source.load),
]
answer = [tokens, sentences, time.monotonic() - start]
"""
    )
    tokens_again, sentences, seconds = run(hub, offline)
    assert tokens_again == tokens
    assert sentences[0].startswith("source.path='owner/play': the Hugging Face Hub cannot be reached (")
    assert sentences[0].endswith("; local files work without a network.")
    assert sentences[1].startswith("path='owner/other': the Hugging Face Hub cannot be reached")
    assert sentences[2].startswith("path='owner/large': the Hugging Face Hub cannot be reached")
    assert seconds < 10


def test_rows_are_joined_where_a_document_starts():
    rows = lines("".join(ARTICLES))
    assert list(join_rows(rows, r" = [^=].* = $")) == ARTICLES
    assert list(join_rows(["preface", *rows], r" = [^=].* = $")) == ["preface", *ARTICLES]
    assert list(join_rows(rows, None)) == rows


def test_taking_characters_stops_at_the_document_that_reaches_them():
    read = []
    texts = (read.append(text) or text for text in ["abc", "de", "f", "g"])
    assert list(take_characters(texts, 4)) == ["abc", "de"]
    assert read == ["abc", "de"]
    assert list(take_characters(["a", "b"], None)) == ["a", "b"]


@pytest.mark.slow
def test_labels_of_the_hub(hub, run):
    answer = run(
        hub,
        HELPERS
        + """
def examples(path, **settings):
    splits = HubDataset(path, **settings, cache_dir=cache).load_examples()
    return {name: rows.to_dict() for name, rows in splits.items()}

def module(path, **settings):
    source = HubDataset(path, text_column="sentence", label_column="label", cache_dir=cache)
    return LabelledDataModule(source, ByteTokenizer(), 16, 4, cache_dir=cache, test_fraction=0, **settings)

reviews = module("owner/reviews")
reviews.prepare()
counts = {name: split.label_counts for name, split in reviews.splits.items()}
pairs = dict(path="owner/pairs", text_column=["a", "b"])
text = HubDataset(**pairs, label_column="gold", cache_dir=cache).load()["train"]
texts_of_pairs = [f"{row['text']}|{row['pair']}" for row in text]
streamed = HubDataset(**pairs, cache_dir=cache).load(max_characters=5)["train"]["text"]
answer = [
    examples("owner/reviews", text_column="sentence", label_column="label")["test"],
    [reviews.labels, counts, [reviews.splits["validation"].text(row) for row in range(2)]],
    examples(**pairs, label_column="gold"),
    texts_of_pairs,
    list(streamed),
    sentence(module("owner/partly").prepare),
    sentence(lambda: examples("owner/reviews", text_column="sentence")),
    sentence(lambda: examples("owner/reviews", text_column="sentence", label_column="class")),
    len({HubDataset("owner/reviews", label_column=c, cache_dir=cache).fingerprint() for c in (None, "label", "idx")}),
]
""",
    )
    test, reviews, pairs, texts, streamed, partly, unnamed, unknown, prints = answer
    assert test == {"text": ["one", "two"], "label": [None, None]}
    assert reviews[0] == ["negative", "positive"]
    assert reviews[1] == {
        "train": {"negative": 20, "positive": 20},
        "validation": {"negative": 1, "positive": 1},
    }
    assert reviews[2] == ["good", ""]
    assert pairs == {"train": {"text": ["one", "x"], "pair": ["two", None], "label": ["3", "10"]}}
    assert texts == ["one|two", "x|None"]
    assert streamed == ["one\ntwo"]
    assert partly.startswith(
        "source.label_column='label': row 2 of the split train of owner/partly has no label, the first of 2 among 3"
    )
    assert unnamed.startswith("label_column=None: ")
    assert unknown == "label_column='class': owner/reviews has no such column; it has idx, sentence, label."
    assert prints == 3
