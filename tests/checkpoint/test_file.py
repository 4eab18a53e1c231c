"""Checkpoints: damaged and foreign files, weights that do not fit, untrusted configs, random states."""

import codecs
import os
import pickle
import random
import re
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from nn.model_cases import make_transformer

from tinyformer.checkpoint.file import (
    FORMAT,
    KEY,
    load_checkpoint,
    load_weights,
    random_state,
    require_plain,
    restore_random_state,
    save_network,
    start_from,
)
from tinyformer.errors import ArgumentError

OVERRIDES = {"seed": 3}


def whole(network=None):
    """The contents of a checkpoint as a run writes it."""
    network = network or make_transformer()
    return {
        "state_dict": {f"network.{name}": tensor for name, tensor in network.state_dict().items()}
        | {"sums.nats.value": torch.zeros(())},
        "global_step": 7,
        KEY: {"format": FORMAT, "overrides": OVERRIDES, "tokenizer": "{}", "facts": {"precision": "32-true"}},
    }


def save(path, network=None, contents=None):
    """A checkpoint as a run writes it."""
    contents = contents or whole(network)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(contents, path)
    return path


def error_of(path):
    with pytest.raises(ArgumentError) as caught:
        load_checkpoint(path)
    message = str(caught.value)
    assert message.startswith(f"path={str(path)!r}: ")
    assert "\n" not in message
    return message


# Reading and writing.


def test_a_path_that_is_not_a_file(tmp_path):
    assert error_of(tmp_path / "none.ckpt").endswith("does not exist; a run writes RUN/checkpoints/last.ckpt.")
    assert error_of(tmp_path).endswith("is a folder; a run writes RUN/checkpoints/last.ckpt.")
    newest, old = save(tmp_path / "a" / "last.ckpt"), save(tmp_path / "b" / "last.ckpt")
    os.utime(old, (1, 1))
    assert error_of(tmp_path).endswith(f"is a folder; path={str(newest)!r} works.")
    (tmp_path / "config.json").touch()
    assert f"`tinyformer convert hf {tmp_path} imported.ckpt`" in error_of(tmp_path)


def test_a_damaged_file(tmp_path):
    """Wherever it is cut or changed, the file is refused, and never with another exception."""
    whole, path = save(tmp_path / "whole.ckpt").read_bytes(), tmp_path / "damaged.ckpt"
    for share in (0.0, 0.001, 0.1, 0.5, 0.9, 0.999):
        path.write_bytes(whole[: int(len(whole) * share)])
        assert "cut short" in error_of(path)
    for share in (0.1, 0.3, 0.6, 0.9):
        start = int(len(whole) * share)
        path.write_bytes(whole[:start] + bytes(300) + whole[start + 300 :])
        assert "damaged" in error_of(path)
    with zipfile.ZipFile(tmp_path / "whole.ckpt") as old, zipfile.ZipFile(path, "w") as new:
        for name in old.namelist():
            data = old.read(name)
            new.writestr(name, data[:50] if name.endswith("data.pkl") else data)
    assert "damaged" in error_of(path)


def test_a_file_of_another_kind(tmp_path):
    path = tmp_path / "notes.txt"
    for contents in (b"# Notes\n" * 50, bytes(1000), b"PK\x03\x04 not a zip", bytes(range(256)), b"{}", b"\x80\x05]."):
        path.write_bytes(contents)
        assert "not a checkpoint" in error_of(path)
    state = {"state_dict": {}, "global_step": 1}
    ours = {"overrides": OVERRIDES, "tokenizer": "", "facts": {}}
    for contents in (state, [1, 2], torch.zeros(3), state | {KEY: OVERRIDES}, {KEY: ours}, state | {KEY: 3}):
        torch.save(contents, path)
        assert "was not written by tinyformer" in error_of(path)


WEIGHT = "network.encoder.layers.0.attention.q_proj.weight"


class Cast:
    """A few bytes that are a large tensor once it has another dtype."""

    def __reduce__(self):
        cast = torch._utils._rebuild_device_tensor_from_cpu_tensor
        return cast, (torch.zeros(1).expand(10**6), torch.float64, "cpu", False)


class Encoded:
    """Text that doubles each time it is encoded."""

    def __reduce__(self):
        return codecs.encode, ("61", "hex" + "-" * 50)


NO_WEIGHTS = 3.0, "text", None, [0.0], *(torch.zeros(2).to(kind) for kind in (torch.int64, torch.complex64))
MALFORMED = [
    ("state_dict", {"state_dict": [1]}, {}),
    ("state_dict", {"state_dict": {3: torch.zeros(1)}}, {}),
    *(("not a dense tensor of real", {"state_dict": {WEIGHT: weight}}, {}) for weight in NO_WEIGHTS),
    ("contains torch._utils _rebuild_sparse_tensor", {"state_dict": {WEIGHT: torch.eye(2).to_sparse()}}, {}),
    ("not finite (NaN or infinity), encoder.layers.0", {"state_dict": {WEIGHT: torch.tensor([0, torch.nan])}}, {}),
    ("not finite", {"state_dict": {WEIGHT: torch.tensor([0, -torch.inf])}}, {}),
    ("more elements than the file holds", {"state_dict": {WEIGHT: torch.zeros(1).expand(10**13)}}, {}),
    ("its weights share memory", {"state_dict": dict.fromkeys(map("network.{}".format, "abcd"), torch.zeros(9))}, {}),
    ("its global_step is", {"global_step": "7"}, {}),
    ("its global_step is -1", {"global_step": -1}, {}),
    ("its global_step is True", {"global_step": True}, {}),
    ("its global_step is nan", {"global_step": float("nan")}, {}),
    ("contains torch._utils _rebuild_meta_tensor", {"x": torch.zeros(2, device="meta")}, {}),
    ("_rebuild_device_tensor_from_cpu_tensor, which no run writes", {"x": Cast()}, {}),
    ("contains the codec hex-", {"x": Encoded()}, {}),
    ("its tokenizer is a list", {}, {"tokenizer": []}),
    ("its facts is a list", {}, {"facts": []}),
    ("its fact precision is a list", {}, {"facts": {"precision": []}}),
    ("its fact precision is '${oc.env:HOME}'", {}, {"facts": {"precision": "${oc.env:HOME}"}}),
    ("its overrides is a list", {}, {"overrides": [1]}),
    ("its overrides is not a mapping from names", {}, {"overrides": {("x",): 3}}),
    ("is of format 2, but", {}, {"format": 2}),
    ("is of format a list, but", {}, {"format": []}),
]
"""What is said, changes of the contents, and changes of what we add to them."""


def test_malformed_contents_are_reported_in_one_sentence(tmp_path):
    for said, changes, ours in MALFORMED:
        raw = whole()
        message = error_of(save(tmp_path / "malformed.ckpt", contents=raw | {KEY: raw[KEY] | ours} | changes))
        assert said in message, (said, message)


def repacked(path, source, name_of=lambda name: name):
    """Add the entries of an archive, perhaps under other names, to a file."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(path, "a") as new:
        for entry in old.infolist():
            new.writestr(name_of(entry.filename), old.read(entry))
    return path


def test_an_archive_with_two_lists_of_entries_is_refused(tmp_path):
    """Python takes the one before the end, and torch the one at the place that the end names."""
    path = save(tmp_path / "whole.ckpt", contents=whole())
    assert load_checkpoint(path)
    path.write_bytes(b"compressed entries, and their list" + path.read_bytes())
    with pytest.raises(ValueError, match="two lists"):
        require_plain(path)


def test_a_pickle_that_ends_with_an_archive_is_refused(tmp_path):
    """Torch reads the pickle."""
    path = tmp_path / "pickle.ckpt"
    torch.save(whole(), path, _use_new_zipfile_serialization=False)
    repacked(path, save(tmp_path / "whole.ckpt", contents=whole()))
    with pytest.raises(ValueError, match="no archive of torch"):
        require_plain(path)


def test_the_pickle_in_a_file_is_read_whatever_the_case_of_its_name(tmp_path):
    path = save(tmp_path / "cast.ckpt", contents=whole() | {"x": Cast()})
    upper = repacked(tmp_path / "upper.ckpt", path, lambda name: name.replace("data.pkl", "DATA.PKL"))
    assert "_rebuild_device_tensor_from_cpu_tensor" in error_of(upper)


def test_plain_values_of_a_callback_are_read(tmp_path):
    state = {"set": {1, 2}, "bytes": b"\xff\x00", "none": None}
    assert load_checkpoint(save(tmp_path / "whole.ckpt", contents=whole() | {"callbacks": {"mine": state}}))


def test_a_random_state_that_numpy_would_read_past_its_end_is_refused():
    state = random_state()
    state["numpy"][2] = 2**31 - 1
    with pytest.raises(ValueError, match="position is 2147483647"):
        restore_random_state(state)


class Code:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("writer", ["torch", "legacy", "pickle"])
def test_code_in_a_file_does_not_run(tmp_path, writer):
    path, trace = tmp_path / "evil.ckpt", tmp_path / "it-ran"
    contents = {KEY: Code(trace), "state_dict": {}, "global_step": 0}
    if writer == "pickle":
        path.write_bytes(pickle.dumps(contents))
    else:
        torch.save(contents, path, _use_new_zipfile_serialization=writer == "torch")
    error_of(path)
    assert not trace.exists()
    Code(trace).path.touch()  # the trace would have been seen
    assert trace.exists()


def test_saving_a_network_is_atomic(tmp_path, monkeypatch):
    path = save(tmp_path / "pruned.ckpt")
    checkpoint, before = load_checkpoint(path), path.read_bytes()

    def interrupted(contents, target):
        Path(target).write_bytes(b"half of it")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_network(path, make_transformer(), checkpoint, OVERRIDES)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
    monkeypatch.undo()
    network = make_transformer()
    save_network(path, network, checkpoint, {"seed": 5})
    saved = load_checkpoint(path)
    assert (saved.overrides, saved.step, saved.tokenizer) == ({"seed": 5}, 7, "{}")
    assert saved.facts == checkpoint.facts
    assert all(torch.equal(saved.weights[name], tensor) for name, tensor in network.state_dict().items())


# Weights and networks.


def test_weights_that_do_not_fit(tmp_path):
    checkpoint = load_checkpoint(save(tmp_path / "last.ckpt"))
    for changes, reason in (
        ({"num_kv_heads": 2}, "encoder.layers.0.attention.k_proj.weight has shape [32, 32] there and [16, 32] here"),
        ({"num_layers": 3}, "it lacks encoder.layers.2."),
        ({"num_layers": 1}, "it also has encoder.layers.1."),
    ):
        pattern = rf"^checkpoint='\S+last.ckpt': does not fit this model: {re.escape(reason)}"
        with pytest.raises(ArgumentError, match=pattern):
            load_weights(make_transformer(**changes), checkpoint)


def test_the_readout_starts_anew_where_asked(tmp_path):
    original = make_transformer(tied=False)
    checkpoint = load_checkpoint(save(tmp_path / "last.ckpt", original))
    for with_readout in (True, False):
        network = make_transformer(tied=False)
        initial = {name: tensor.clone() for name, tensor in network.state_dict().items()}
        start_from(network, checkpoint, with_readout)
        for name, tensor in network.state_dict().items():
            is_kept = with_readout or not name.startswith("readout.")
            assert torch.equal(tensor, original.state_dict()[name] if is_kept else initial[name]), name


@pytest.mark.parametrize("tied", [True, False])
def test_new_rows_of_a_vocabulary_keep_their_initialisation(tmp_path, tied):
    original = make_transformer(tied=tied)
    checkpoint = load_checkpoint(save(tmp_path / "last.ckpt", original))
    network = make_transformer(tied=tied, vocab_size=51)
    initial = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    start_from(network, checkpoint)
    for name in ("encoder.token_embedding.weight", "readout.proj.weight"):
        rows = network.state_dict()[name]
        assert torch.equal(rows[:50], original.state_dict()[name])
        assert torch.equal(rows[50:], initial[name][50:])


# Random states.


def numbers():
    return [*torch.rand(3).tolist(), *np.random.rand(3), np.random.randn(), random.random(), random.gauss(0, 1)]


def test_random_numbers_continue_from_a_saved_state(tmp_path):
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    for _ in range(701):  # after an odd number of normals, the generators keep one in store
        torch.rand(1), np.random.randn(), random.gauss(0, 1)
    torch.save(random_state(), tmp_path / "state.pt")
    expected = numbers()
    torch.manual_seed(6), np.random.seed(6), random.seed(6)
    assert numbers() != expected
    restore_random_state(torch.load(tmp_path / "state.pt", weights_only=True))
    assert numbers() == expected
