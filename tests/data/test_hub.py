"""The Hub, played by a server on this machine: downloads, streams, joined rows, and life without it."""

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
from hub_server import HubServer

from tinyformer.data import ByteTokenizer
from tinyformer.data.sources import join_rows, take_characters

PLAY = "First Citizen:\nBefore we proceed any further, hear me speak.\n\nAll:\nSpeak, speak.\n" * 20
ARTICLES = [f" = Title {i} = \n \n Some text about {i} . \n = = Section = = \n x = 1 = y \n" for i in range(6)]


def parquet(texts, column="text"):
    file = io.BytesIO()
    pq.write_table(pa.table({"id": list(range(len(texts))), column: texts}), file)
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
    "models/owner/model": {"tokenizer.json": ByteTokenizer().build([]).to_json().encode()},
    "models/owner/bare": {"config.json": b"{}"},
}


@pytest.fixture(scope="module")
def hub():
    with HubServer(REPOSITORIES) as server:
        yield server


@pytest.fixture
def run(tmp_path):
    """Runs code in a fresh process that knows this Hub, and returns what it assigned to `answer`."""

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
    assert sentences[0].startswith("data.path=owner/none: the Hub has no such dataset")
    assert sentences[1].startswith("data.path=owner/large data.name=other: BuilderConfig 'other' not found")
    assert sentences[2] == "data.text_column=body: owner/large has no such column; it has id, text."
    assert sentences[3].startswith("tokenizer.path=owner/none: the Hub has no such model")
    assert sentences[4].startswith("tokenizer.path=owner/bare: it holds no tokenizer.json")


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

    # The server is gone: what was prepared opens, the tokenizer too; anything else fails quickly and clearly.
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
    assert sentences[0].startswith("data.path=owner/play: the Hugging Face Hub cannot be reached")
    assert "`data=pydoc` or `data=text data.files=...` work offline" in sentences[0]
    assert sentences[1].startswith("tokenizer.path=owner/other: the Hugging Face Hub cannot be reached")
    assert sentences[2].startswith("data.path=owner/large: the Hugging Face Hub cannot be reached")
    assert seconds < 10


def test_rows_are_joined_where_a_document_starts():
    rows = lines("".join(ARTICLES))
    assert list(join_rows(rows, r" = [^=].* = $")) == ARTICLES
    assert list(join_rows(["preface", *rows], r" = [^=].* = $")) == ["preface", *ARTICLES]
    assert list(join_rows(rows, None)) == rows


def test_taking_stops_reading_at_the_document_that_is_enough():
    read = []
    texts = (read.append(text) or text for text in ["abc", "de", "f", "g"])
    assert list(take_characters(texts, 4)) == ["abc", "de"]
    assert read == ["abc", "de"]
    assert list(take_characters(["a", "b"], None)) == ["a", "b"]
