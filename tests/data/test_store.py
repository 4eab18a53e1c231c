"""Preparing text: exact streams, built once, never half-written, also shard by shard; where the cache folder is."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest

import tinyformer.data.recipe
from tinyformer.data import (
    ByteTokenizer,
    CharTokenizer,
    ExampleFormat,
    HubDataset,
    Recipe,
    SourceDataModule,
    TextFiles,
    WindowFormat,
    default_cache_dir,
    stream,
)
from tinyformer.data.sources.documents import from_columns, text_lengths
from tinyformer.data.sources.hub_dataset import take_characters
from tinyformer.data.stream import map_texts
from tinyformer.errors import ArgumentError

WINDOWS = WindowFormat(8)


class Texts:
    """A source in memory that counts how often it is loaded, and that stops where it may."""

    name = "texts"

    def __init__(self, *texts):
        self.texts, self.loads = texts, 0

    def fingerprint(self):
        return json.dumps(self.texts)

    def load(self, max_characters=None):
        time.sleep(0.05)  # for concurrent calls
        self.loads += 1
        return {"train": from_columns(text=take_characters(list(self.texts), max_characters))}


def folders(path):
    return sorted(entry.name for entry in path.iterdir() if not entry.name.endswith(".lock"))


def test_a_stream_has_one_eos_before_each_document(tmp_path, monkeypatch):
    recipe = Recipe(Texts("ab", "", "é", "c"), ByteTokenizer(), WINDOWS)
    prepared = recipe.prepare(tmp_path)
    split = prepared.splits["train"]
    assert split.ids.tolist() == [256, 97, 98, 256, 0xC3, 0xA9, 256, 99]
    assert split.offsets.tolist() == [0, 3, 6, 8]
    assert (split.num_documents, split.num_tokens, split.num_bytes, split.num_characters) == (3, 7, 5, 4)
    assert (type(split.ids), split.ids.dtype) == (np.memmap, np.uint16)
    assert prepared.facts["left_out"]["train"] == {"without text (empty, null or cut short)": 1}
    assert len(prepared.trained_on) == 3
    monkeypatch.setattr(tinyformer.data.recipe, "MAX_FINGERPRINTS", 2)
    assert recipe.prepare(tmp_path / "beyond the limit").trained_on is None


@pytest.mark.parametrize(
    ("kind", "limit"), [(WindowFormat, "max_tokens"), (ExampleFormat, "max_examples")], ids=["windows", "examples"]
)
def test_everything_that_shapes_the_result_is_in_the_key(kind, limit):
    recipe = Recipe(Texts("text" * 30), CharTokenizer(), kind(8), 0.1)
    changes = [{"source": Texts("other" * 30)}, {"row_format": kind(8, **{limit: 50})}, {"whole": True}, {"seed": 1}]
    changes += [{"tokenizer": ByteTokenizer()}, {"tokenizer": CharTokenizer().build(["abc"])}]
    changes += [{"validation_fraction": 0.2}, {"test_fraction": 0.2}, {"group_near_copies": True}]
    assert len({recipe.key, *(replace(recipe, **change).key for change in changes)}) == 1 + len(changes)
    assert replace(recipe, row_format=kind(9)).key == recipe.key


def test_max_tokens_are_reached_although_a_part_is_held_out(tmp_path):
    source = Texts(*(f"text {i:04}" for i in range(1000)))
    splits = Recipe(source, CharTokenizer(), WindowFormat(8, max_tokens=503), 0.3, 0.2).prepare(tmp_path).splits
    assert splits["train"].num_tokens == 503
    assert sum(split.num_documents for split in splits.values()) < 200  # not all of the source was read


def test_an_error_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(stream, "_BATCH", 10)
    recipe = Recipe(Texts(*["0123456789"] * 5), ByteTokenizer(), WINDOWS)
    fails = mock.Mock(side_effect=[[[1]], RuntimeError("out of luck")])
    with mock.patch.object(stream.TextTokenizer, "encode_batch", fails), pytest.raises(RuntimeError, match="of luck"):
        recipe.prepare(tmp_path)
    assert folders(tmp_path) == []
    assert recipe.prepare(tmp_path).splits["train"].num_documents == 5


def test_text_that_changes_while_it_is_read_is_refused_and_content_is_that_of_the_tokens(tmp_path):
    file = tmp_path / "a.txt"

    class Changing(TextFiles):
        def load(self, *arguments, **named):
            file.write_text("new text")
            return super().load(*arguments, **named)

    file.write_text("old text")
    recipe = Recipe(Changing(str(file)), ByteTokenizer(), WINDOWS)
    with pytest.raises(ArgumentError, match=r"^source='text': changed while it was loaded; start again"):
        recipe.prepare(tmp_path / "cache")
    assert folders(tmp_path / "cache") == []
    settings = {"validation_fraction": 0, "test_fraction": 0, "cache_dir": str(tmp_path / "cache")}
    data = SourceDataModule(Changing(str(file)), ByteTokenizer(), WINDOWS, 1, **settings)
    data.prepare()
    content = data.content
    assert bytes(data.splits["train"].ids[1:].astype(np.uint8)) == b"new text"
    file.write_text("newer text")
    assert data.content == content


def test_concurrent_calls_build_once(tmp_path):
    source = Texts("text")
    with ThreadPoolExecutor(4) as pool:
        prepared = list(pool.map(lambda _: Recipe(source, ByteTokenizer(), WINDOWS).prepare(tmp_path), range(4)))
    assert source.loads == 1
    assert [one.folder.name for one in prepared] == folders(tmp_path) * 4


def test_the_cache_folder_is_the_environments_or_the_users(monkeypatch, tmp_path):
    for name in ("TINYFORMER_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_cache_dir() == Path(__file__).parents[2] / "data" / "cache"
    monkeypatch.setattr(stream, "_ROOT", tmp_path)  # an installed package
    assert default_cache_dir() == tmp_path / ".cache" / "tinyformer"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_cache_dir() == tmp_path / "xdg" / "tinyformer"
    monkeypatch.setenv("TINYFORMER_CACHE", "~/chosen")
    assert default_cache_dir() == tmp_path / "chosen"
    Recipe(Texts("A cat."), ByteTokenizer(), WINDOWS).prepare()
    assert list((tmp_path / "chosen").glob("texts-byte-*/train.npy"))
    assert HubDataset("owner/name")._commits_file == tmp_path / "chosen" / "hub_commits.json"


# Memory maps.


def test_texts_in_a_memory_map_take_no_memory(tmp_path):
    before = pa.total_allocated_bytes()
    rows = map_texts(("é" * 10**6 for _ in range(50)), tmp_path)
    assert pa.total_allocated_bytes() - before < 10**6
    assert text_lengths(rows).tolist() == [10**6] * 50
    assert rows[49]["text"] == "é" * 10**6
    assert list(tmp_path.iterdir()) == []
    assert len(map_texts([], tmp_path)) == 0
