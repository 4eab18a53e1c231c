"""Tokenising in shards gives the files of one piece, and continues with the shard in which it was stopped."""

import itertools
from types import SimpleNamespace
from unittest import mock

import pyarrow as pa
import pytest

from tinyformer.data import CharTokenizer, Recipe, WindowFormat, cache, shards, stream
from tinyformer.data.sources import documents
from tinyformer.data.sources.documents import from_columns, iterate_texts, map_texts, text_lengths
from tinyformer.data.stream import encode, write_split
from tinyformer.errors import ArgumentError

TEXTS = ["abc " * 9, "", "é😀", *(f"{n} cats " * (n % 7 + 1) for n in range(60))]
WHOLE = sum(len(text) + 1 for text in TEXTS if text)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(shards, "SHARD_BYTES", 300)
    monkeypatch.setattr(stream, "_BATCH", 80)


def texts_of(rows):
    return filter(None, iterate_texts(rows))


def written(encoded, tokenizer, folder):
    folder.mkdir()
    counts = write_split(encoded, tokenizer, folder, "train")
    return counts, {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("limit", [None, 1, 36, 37, 38, 500, "a shard", WHOLE - 1, WHOLE])
def test_the_files_are_those_of_one_piece(limit, tmp_path):
    """Of rows in an order of their own, with characters that the vocabulary lacks."""
    tokenizer = CharTokenizer().build(TEXTS[3:])
    rows = from_columns(text=[*reversed(TEXTS)]).select(range(len(TEXTS))[::-1])
    if limit == "a shard":
        first = rows.shard(shards.num_shards(rows), 0, contiguous=True)
        limit = sum(len(text) + 1 for text in texts_of(first))
    assert shards.num_shards(rows) > 5
    expected = written(encode(texts_of(rows), tokenizer, limit), tokenizer, tmp_path / "one")
    encoded = shards.encode_shards(rows, texts_of, tokenizer, "train", tmp_path / "kept", limit)
    assert written(encoded, tokenizer, tmp_path / "shards") == expected
    assert expected[0]["num_unknown"] > 0 or limit == 1


def test_a_stopped_preparation_continues_with_the_shard_in_which_it_was_stopped(tmp_path, monkeypatch):
    """With the tokenizer that it had learned, and leaves nothing beside its files in the end."""
    encoded, encode_batch = [], shards.TextTokenizer.encode_batch

    def noted(self, texts):
        if is_stopped and texts[0].startswith("30 "):
            raise KeyboardInterrupt
        encoded.extend(texts)
        return encode_batch(self, texts)

    monkeypatch.setattr(shards.TextTokenizer, "encode_batch", noted)
    monkeypatch.setattr("tinyformer.data.cache.draw", lambda *_: [])  # which encodes a sample again
    rows = from_columns(text=TEXTS[3:])
    source = SimpleNamespace(name="rows", fingerprint=lambda: "", load=lambda max_characters: {"train": rows})
    recipe, is_stopped = Recipe(source, CharTokenizer(), WindowFormat(8)), True
    with mock.patch.object(CharTokenizer, "build", autospec=True, side_effect=CharTokenizer.build) as build:
        with pytest.raises(KeyboardInterrupt):
            recipe.prepare(tmp_path)
        before, is_stopped = encoded[:], False
        encoded.clear()
        prepared = recipe.prepare(tmp_path)
    assert build.call_count == 1
    again = [text for text in encoded if text in before]
    assert len(before) > 20
    assert sum(map(len, again)) <= shards.SHARD_BYTES
    assert sorted(path.suffix for path in tmp_path.iterdir()) == ["", ".lock"]
    assert prepared.splits["train"].num_characters == sum(map(len, TEXTS[3:]))


def test_what_is_damaged_of_a_stopped_preparation_is_made_again(tmp_path):
    rows = from_columns(text=TEXTS)
    source = SimpleNamespace(name="rows", fingerprint=lambda: "", load=lambda max_characters: {"train": rows})
    recipe = Recipe(source, CharTokenizer(), WindowFormat(8))
    whole = {path.name: path.read_bytes() for path in recipe.prepare(tmp_path / "whole").folder.iterdir()}

    def stop(encoded, *_):
        assert len(list(encoded)) > 5
        raise KeyboardInterrupt

    damages = [
        lambda data: data[: len(data) // 2],
        lambda data: bytes(len(data)),
        lambda data: data.replace(b"a", b"b"),
    ]
    for number, (damage, name) in enumerate(itertools.product(damages, ["*.npz", "tokenizer.json"])):
        with mock.patch.object(cache, "write_split", stop), pytest.raises(KeyboardInterrupt):
            recipe.prepare(tmp_path / str(number))
        for path in (tmp_path / str(number)).rglob(name):
            path.write_bytes(damage(path.read_bytes()))
        folder = recipe.prepare(tmp_path / str(number)).folder
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == whole


def test_texts_in_a_memory_map_take_no_memory(tmp_path):
    before = pa.total_allocated_bytes()
    rows = map_texts(("é" * 10**6 for _ in range(50)), tmp_path)
    assert pa.total_allocated_bytes() - before < 10**6
    assert text_lengths(rows).tolist() == [10**6] * 50
    assert rows[49]["text"] == "é" * 10**6
    assert list(tmp_path.iterdir()) == []
    assert len(map_texts([], tmp_path)) == 0


def test_a_full_disk_names_the_folder_of_the_memory_map(tmp_path):
    with open("/dev/full", "wb", buffering=0) as full, mock.patch.object(documents.tempfile, "TemporaryFile") as made:
        made.return_value = full
        with pytest.raises(ArgumentError, match=f"^cache_dir='{tmp_path}': cannot be written .No space left"):
            map_texts(["a" * 10**6], tmp_path)


@pytest.mark.parametrize("columns", [("text",), ("text", "pair")])
def test_lengths_are_those_of_the_texts(columns):
    rows = from_columns(**{name: ["é😀", None, "", "a\nb"] for name in columns}).select([3, 0, 1, 2])
    assert text_lengths(rows).tolist() == [len(text) for text in iterate_texts(rows)]


@pytest.mark.parametrize(("texts", "number"), [(["a" * 250], 1), (["a" * 900], 1), (["a" * 200] * 4, 3)])
def test_a_text_is_in_one_shard(texts, number):
    assert shards.num_shards(from_columns(text=texts)) == number
