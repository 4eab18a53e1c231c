"""Preparing: exact streams, built once, never half-written, rebuilt when damaged."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from tinyformer.data import ByteTokenizer, CharTokenizer, TextRecipe, cache, prepare_text
from tinyformer.data.documents import from_texts


class Texts:
    """A source in memory that counts how often it is loaded."""

    name = "texts"

    def __init__(self, *texts, **own_splits):
        self.splits = {"train": list(texts)} | own_splits
        self.loads = 0
        self.asked_for = None

    def fingerprint(self):
        return json.dumps(self.splits)

    def load(self, max_characters=None):
        self.loads += 1
        self.asked_for = max_characters
        return {name: from_texts(texts) for name, texts in self.splits.items()}


def folders(path):
    return sorted(entry.name for entry in path.iterdir() if not entry.name.endswith(".lock"))


def test_a_stream_has_one_eos_before_each_document(tmp_path):
    split = prepare_text(TextRecipe(Texts("ab", "", "é", "c"), ByteTokenizer()), tmp_path).splits["train"]
    assert split.ids.tolist() == [256, 97, 98, 256, 0xC3, 0xA9, 256, 99]
    assert split.offsets.tolist() == [0, 3, 6, 8]
    assert (split.num_documents, split.num_tokens, split.num_bytes, split.num_characters) == (3, 7, 5, 4)
    assert split.ids.dtype == np.uint16


def test_one_document_has_as_many_scored_tokens_as_tokens(tmp_path):
    split = prepare_text(TextRecipe(Texts("abc"), ByteTokenizer()), tmp_path).splits["train"]
    assert split.num_tokens == 3


def test_unknown_characters_are_counted_and_learned_from_training_text_only(tmp_path):
    prepared = prepare_text(TextRecipe(Texts("abab", validation=["axy"]), CharTokenizer()), tmp_path)
    assert prepared.tokenizer.vocab_size == 4
    assert (prepared.splits["train"].num_unknown, prepared.splits["validation"].num_unknown) == (0, 2)
    assert prepared.own_validation


def test_the_training_split_comes_first_whatever_the_source_begins_with(tmp_path):
    source = Texts()
    source.splits = {"test": ["tt"], "train": ["a" * 9], "validation": ["vv"]}
    prepared = prepare_text(TextRecipe(source, CharTokenizer(), max_tokens=5), tmp_path)
    assert prepared.tokenizer.labels(range(prepared.tokenizer.vocab_size)) == ["<unk>", "<eos>", "a"]
    lengths = {name: split.num_tokens for name, split in prepared.splits.items()}
    assert lengths == {"train": 5, "validation": 2, "test": 2}


def test_a_second_call_opens_and_does_not_load(tmp_path):
    source = Texts("some text" * 100)
    first = prepare_text(TextRecipe(source, CharTokenizer(), 0.1), tmp_path)
    again = prepare_text(TextRecipe(source, CharTokenizer(), 0.1), tmp_path)
    assert source.loads == 1
    assert isinstance(again.splits["train"].ids, np.memmap)
    assert first.fingerprint == again.fingerprint
    for name, split in first.splits.items():
        assert split.ids.tolist() == again.splits[name].ids.tolist()
        assert replace(split, ids=again.splits[name].ids, offsets=again.splits[name].offsets) == again.splits[name]


@pytest.mark.parametrize(
    "change",
    [
        {"source": Texts("other" * 30)},
        {"tokenizer": ByteTokenizer()},
        {"tokenizer": CharTokenizer().build(["abc"])},
        {"validation_fraction": 0.2},
        {"test_fraction": 0.2},
        {"seed": 1},
        {"group_near_copies": True},
        {"max_tokens": 50},
        {"whole": True},
    ],
    ids=lambda change: next(iter(change)),
)
def test_everything_that_shapes_the_result_is_in_the_key(change):
    recipe = TextRecipe(Texts("text" * 30), CharTokenizer(), 0.1)
    assert replace(recipe, **change).key() != recipe.key()
    assert replace(recipe).key() == recipe.key()


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 6, 100])
def test_max_tokens_bounds_the_training_split(tmp_path, limit):
    source = Texts("aé", "bc", "d", validation=["long validation"])
    splits = prepare_text(TextRecipe(source, CharTokenizer(), max_tokens=limit), tmp_path).splits
    whole = [1, 2, 6, 1, 3, 4, 1, 5]  # eos a é eos b c eos d
    assert splits["train"].num_tokens <= limit
    kept = splits["train"].ids.tolist()
    assert kept == whole[: len(kept)]
    assert limit - 1 <= splits["train"].num_tokens or len(kept) == len(whole)
    text = "".join(splits_text(splits["train"], "aébcd"))
    assert (splits["train"].num_characters, splits["train"].num_bytes) == (len(text), len(text.encode()))
    assert splits["validation"].num_tokens == len("long validation")
    assert source.asked_for >= limit


def splits_text(split, characters):
    letters = sorted(characters)
    return [letters[token - 2] for token in split.ids.tolist() if token > 1]


def test_whole_is_one_split_of_all_documents(tmp_path):
    recipe = TextRecipe(Texts("ab", validation=["c"], test=["d"]), ByteTokenizer(), whole=True)
    splits = prepare_text(recipe, tmp_path).splits
    assert {name: split.ids.tolist() for name, split in splits.items()} == {"all": [256, 97, 98, 256, 99, 256, 100]}


def test_documents_of_any_size_are_written_in_order(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "_BATCH", 100)
    texts = ["x" * length for length in (1, 99, 250, 3, 0, 100, 7)]
    split = prepare_text(TextRecipe(Texts(*texts), ByteTokenizer()), tmp_path).splits["train"]
    assert np.diff(split.offsets).tolist() == [2, 100, 251, 4, 101, 8]


@pytest.mark.parametrize("damage", ["short", "missing", "no meta", "cut meta"])
def test_a_damaged_folder_is_built_again(tmp_path, damage):
    source = Texts("some text" * 1000)
    recipe = TextRecipe(source, ByteTokenizer())
    folder = prepare_text(recipe, tmp_path).folder
    expected = (folder / "train.npy").read_bytes()
    os.truncate(folder / "train.npy", 500) if damage == "short" else None
    (folder / "train.offsets.npy").unlink() if damage == "missing" else None
    (folder / "meta.json").unlink() if damage == "no meta" else None
    (folder / "meta.json").write_text('{"splits"') if damage == "cut meta" else None
    prepare_text(recipe, tmp_path)
    assert source.loads == 2
    assert (folder / "train.npy").read_bytes() == expected


def test_an_error_leaves_nothing_behind(tmp_path, monkeypatch):
    calls = []

    def fail_at_the_second_batch(self, texts):
        calls.append(texts)
        if len(calls) == 2:
            raise RuntimeError("out of luck")
        return [[1] for _ in texts]

    monkeypatch.setattr(cache, "_BATCH", 10)
    recipe = TextRecipe(Texts(*["0123456789"] * 5), ByteTokenizer())
    with monkeypatch.context() as patch:
        patch.setattr(cache.TextTokenizer, "encode_batch", fail_at_the_second_batch)
        with pytest.raises(RuntimeError, match="out of luck"):
            prepare_text(recipe, tmp_path)
    assert 2 <= len(calls) <= 3  # the next one may have begun
    assert folders(tmp_path) == []
    assert prepare_text(recipe, tmp_path).splits["train"].num_documents == 5


SLOW_BUILD = textwrap.dedent("""
    import sys, time
    from tinyformer.data import ByteTokenizer, TextFiles, TextRecipe, cache, prepare_text
    encode = cache.TextTokenizer.encode_batch
    def slow(self, texts):
        print("tokenising", flush=True)
        time.sleep(float(sys.argv[3]))
        return encode(self, texts)
    cache.TextTokenizer.encode_batch = slow
    prepare_text(TextRecipe(TextFiles(sys.argv[1]), ByteTokenizer()), sys.argv[2])
""")


def start_build(tmp_path, seconds):
    command = [
        sys.executable,
        "-c",
        SLOW_BUILD,
        str(tmp_path / "a.txt"),
        str(tmp_path / "cache"),
        str(seconds),
    ]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


@pytest.mark.slow
def test_an_interrupted_build_leaves_nothing_behind(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    process = start_build(tmp_path, 1)
    assert process.stdout.readline() == "tokenising\n"
    process.send_signal(signal.SIGINT)
    assert process.wait(10) != 0
    process.stdout.close()
    assert folders(tmp_path / "cache") == []


def test_what_a_killed_build_left_is_cleared_away(tmp_path):
    recipe = TextRecipe(Texts("text"), ByteTokenizer())
    folder = prepare_text(recipe, tmp_path).folder
    (folder / "meta.json").unlink()
    folder.rename(f"{folder}.partial")
    assert prepare_text(recipe, tmp_path).splits["train"].num_tokens == 4
    assert folders(tmp_path) == [folder.name]


@pytest.mark.slow
def test_processes_and_threads_build_once(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    processes = [start_build(tmp_path, 0.5) for _ in range(2)]
    assert sum(process.communicate(timeout=60)[0].count("tokenising") for process in processes) == 1
    assert [process.returncode for process in processes] == [0, 0]

    class Slow(Texts):
        def load(self, max_characters=None):
            time.sleep(0.1)
            return super().load(max_characters)

    source = Slow("text")
    recipe = TextRecipe(source, ByteTokenizer())
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: prepare_text(recipe, tmp_path / "threads"), range(4)))
    assert source.loads == 1
