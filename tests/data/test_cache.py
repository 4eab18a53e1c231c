"""Preparing text: exact streams, built once, never half-written, rebuilt when damaged."""

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from tinyformer.data import ByteTokenizer, CharTokenizer, ExampleRecipe, TextRecipe, storage, stream
from tinyformer.data.sources.documents import from_texts
from tinyformer.data.sources.hub_dataset import take_characters


class Texts:
    """A source in memory that counts how often it is loaded, and that stops where it may."""

    name = "texts"

    def __init__(self, *texts, **own_splits):
        self.splits = {"train": list(texts)} | own_splits
        self.loads = 0

    def fingerprint(self):
        return json.dumps(self.splits)

    def load(self, max_characters=None):
        self.loads += 1
        return {name: from_texts(take_characters(texts, max_characters)) for name, texts in self.splits.items()}


def folders(path):
    return sorted(entry.name for entry in path.iterdir() if not entry.name.endswith(".lock"))


def test_a_stream_has_one_eos_before_each_document(tmp_path):
    prepared = TextRecipe(Texts("ab", "", "é", "c"), ByteTokenizer()).prepare(tmp_path)
    split = prepared.splits["train"]
    assert split.ids.tolist() == [256, 97, 98, 256, 0xC3, 0xA9, 256, 99]
    assert split.offsets.tolist() == [0, 3, 6, 8]
    assert (split.num_documents, split.num_tokens, split.num_bytes, split.num_characters) == (3, 7, 5, 4)
    assert split.ids.dtype == np.uint16
    assert prepared.facts["left_out"]["train"] == {"without text (empty, null or cut short)": 1}


def test_a_second_call_opens_what_the_first_built(tmp_path):
    source = Texts("some text" * 100)
    first, second = (TextRecipe(source, CharTokenizer(), 0.1).prepare(tmp_path) for _ in range(2))
    assert source.loads == 1
    assert isinstance(second.splits["train"].ids, np.memmap)
    assert first.fingerprint == second.fingerprint
    for name, split in first.splits.items():
        assert split.ids.tolist() == second.splits[name].ids.tolist()
        assert replace(split, ids=second.splits[name].ids, offsets=second.splits[name].offsets) == second.splits[name]


@pytest.mark.parametrize(("kind", "limit"), [(TextRecipe, "max_tokens"), (ExampleRecipe, "max_examples")])
def test_everything_that_shapes_the_result_is_in_the_key(kind, limit):
    recipe = kind(Texts("text" * 30), CharTokenizer(), 0.1)
    changes = [
        {"source": Texts("other" * 30)},
        {"tokenizer": ByteTokenizer()},
        {"tokenizer": CharTokenizer().build(["abc"])},
        {"validation_fraction": 0.2},
        {"test_fraction": 0.2},
        {"seed": 1},
        {"group_near_copies": True},
        {limit: 50},
        {"whole": True},
    ]
    assert len({recipe.key, *(replace(recipe, **change).key for change in changes)}) == 1 + len(changes)
    assert replace(recipe).key == recipe.key


def test_max_tokens_are_reached_although_a_part_is_held_out(tmp_path):
    source = Texts(*(f"text {i:04}" for i in range(1000)))
    recipe = TextRecipe(source, CharTokenizer(), 0.3, 0.2, max_tokens=503)
    splits = recipe.prepare(tmp_path).splits
    assert splits["train"].num_tokens == 503
    assert sum(split.num_documents for split in splits.values()) < 200  # not all of the source was read


def test_ids_beyond_16_bits(tmp_path):
    text = "".join(map(chr, range(0x10000, 0x20100)))
    tokenizer = CharTokenizer().build([text])
    counts = stream.write_split([text], tokenizer, tmp_path, "train")
    assert tokenizer.vocab_size > 2**16
    ids = stream.open_split(tmp_path, "train", counts).ids
    assert tokenizer.decode(ids[1:].tolist()) == text


def flip(path, position):
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("sampled", [False, True])
def test_a_damaged_folder_is_built_again(tmp_path, monkeypatch, sampled, capsys):
    if sampled:
        monkeypatch.setattr(storage, "WHOLE_BYTES", 1000)
        monkeypatch.setattr(storage, "BLOCK_BYTES", 100)
    source = Texts("some text" * 1000)
    recipe = TextRecipe(source, ByteTokenizer())
    folder = recipe.prepare(tmp_path).folder
    expected = {path.name: path.read_bytes() for path in folder.iterdir()}
    middle = 9000 if not sampled else 0
    damages = [
        lambda: os.truncate(folder / "train.npy", 500),
        (folder / "train.offsets.npy").unlink,
        (folder / "meta.json").unlink,
        lambda: (folder / "meta.json").write_text('{"splits"'),
        lambda: flip(folder / "train.npy", middle),
        lambda: flip(folder / "train.npy", -1),
        lambda: flip(folder / "train.offsets.npy", -1),
        lambda: np.save(folder / "train.npy", np.full(9001, 60_000, np.uint16)),
        lambda: (folder / "tokenizer.json").write_text(CharTokenizer().build(["abc"]).to_json()),
        (folder / "checksums.json").unlink,
        lambda: (folder / "checksums.json").write_text("5"),
        lambda: (folder / "checksums.json").write_text("[" * 100_000),
    ]
    for loads, damage in enumerate(damages, start=2):
        damage()
        assert recipe.open(tmp_path) is None
        recipe.prepare(tmp_path)
        assert source.loads == loads
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == expected
        assert capsys.readouterr().err == f"{folder} is damaged, or has no checksums; it is built again.\n"


def test_an_error_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(stream, "_BATCH", 10)
    recipe = TextRecipe(Texts(*["0123456789"] * 5), ByteTokenizer())
    calls = iter([[[1]], RuntimeError("out of luck"), RuntimeError("the next batch may be encoded already")])

    def fail_at_the_second_batch(self, texts):
        if isinstance(result := next(calls), RuntimeError):
            raise result
        return result

    with monkeypatch.context() as patch:
        patch.setattr(stream.TextTokenizer, "encode_batch", fail_at_the_second_batch)
        with pytest.raises(RuntimeError, match="out of luck"):
            recipe.prepare(tmp_path)
    assert folders(tmp_path) == []
    assert recipe.prepare(tmp_path).splits["train"].num_documents == 5


def test_concurrent_calls_build_once(tmp_path):
    class Slow(Texts):
        def load(self, max_characters=None):
            time.sleep(0.1)
            return super().load(max_characters)

    source = Slow("text")
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: TextRecipe(source, ByteTokenizer()).prepare(tmp_path), range(4)))
    assert source.loads == 1
    assert len(folders(tmp_path)) == 1
