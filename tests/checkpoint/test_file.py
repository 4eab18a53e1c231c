"""Checkpoints: damaged and foreign files, weights that do not fit, untrusted configs, random states."""

import os
import pickle
import random
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from nn.model_cases import make_transformer
from safetensors.torch import load_file

from tinyformer.checkpoint.file import (
    load_checkpoint,
    load_raw,
    load_weights,
    random_state,
    restore_random_state,
    save_network,
    start_from,
)
from tinyformer.checkpoint.format import FORMAT, KEY, read_raw, write_raw
from tinyformer.errors import ArgumentError

OVERRIDES = {"seed": 3}


def whole(network=None):
    """The contents of a checkpoint as a run writes it."""
    state = {f"network.{name}": tensor for name, tensor in (network or make_transformer()).state_dict().items()}
    ours = {"format": FORMAT, "overrides": OVERRIDES, "tokenizer": "{}", "facts": {"precision": "32-true"}}
    own = {"set": {1, 2}, "bytes": b"\xff\x00", "none": None}  # plain values, which a callback may store
    state |= {"sums.nats.value": torch.zeros(())}
    return {"state_dict": state, "global_step": 7, "callbacks": {"own": own}, KEY: ours}


def save(path, network=None, **changes):
    """A checkpoint as a run writes it, but for some changes of its contents."""
    write_raw(path, whole(network) | changes)
    return path


def error_of(path):
    with pytest.raises(ArgumentError) as caught:
        load_checkpoint(path)
    message = str(caught.value)
    assert message.startswith(f"path={str(path)!r}: ")
    assert "\n" not in message
    return message


def test_a_path_that_is_not_a_file(tmp_path):
    assert error_of(tmp_path / "none.ckpt").endswith("does not exist; a run writes RUN/checkpoints/last.ckpt.")
    newest, old = save(tmp_path / "a" / "last.ckpt"), save(tmp_path / "b" / "last.ckpt")
    os.utime(old, (1, 1))
    assert error_of(tmp_path).endswith(f"is a folder; path={str(newest)!r} works.")


def test_a_damaged_file(tmp_path):
    """Wherever it is cut or changed, the file is refused where it is read whole, and never with another exception."""
    whole, path = save(tmp_path / "whole.ckpt").read_bytes(), tmp_path / "damaged.ckpt"
    for share in (0.0, 0.001, 0.1, 0.5, 0.9, 0.999):
        size = int(len(whole) * share)
        path.write_bytes(whole[:size])
        assert "cut short" in error_of(path)
        path.write_bytes(whole[:size] + bytes(300) + whole[size + 300 :])
        with pytest.raises(ArgumentError, match="damaged"):
            load_raw(path)


def test_what_is_written_is_read(tmp_path):
    """Values that JSON lacks, and a tensor with two names, which is stored once."""
    tied = torch.arange(6.0).view(2, 3)
    state = {"a": tied, "b": tied, "part": tied[:, 1], "none": torch.zeros(0), "scalar": torch.tensor(True)}
    own = {3: (1, [2.5, {"$x": b"\xff"}]), "set": {1, 2}, "half": torch.ones(2, dtype=torch.bfloat16), "nan": None}
    write_raw(tmp_path / "a.ckpt", {"state_dict": state, "own": own})
    read = read_raw(tmp_path / "a.ckpt")
    assert load_file(tmp_path / "a.ckpt").keys() == {"a", "none", "own.half", "part", "scalar"}
    assert read["state_dict"].pop("a") is read["state_dict"].pop("b")
    assert all(torch.equal(tensor, state[name]) for name, tensor in read["state_dict"].items())
    assert torch.equal(read["own"].pop("half"), own.pop("half"))
    assert read["own"] == own
    assert read_raw(tmp_path / "a.ckpt", "own.")["state_dict"]["a"] is None
    with pytest.raises(TypeError, match=r"own\.here is a PosixPath, which no checkpoint can hold"):
        write_raw(tmp_path / "b.ckpt", {"own": {"here": tmp_path}})


def test_a_file_of_another_kind(tmp_path):
    path = tmp_path / "notes.txt"
    for contents in (b"# Notes\n" * 50, bytes(1000), b"PK\x03\x04 not a zip", bytes(range(256)), b"{}", b"\x80\x05]."):
        path.write_bytes(contents)
        assert "not a checkpoint" in error_of(path)
    state = {"state_dict": {}, "global_step": 1}
    ours = {"overrides": OVERRIDES, "tokenizer": "", "facts": {}}
    for contents in (state, {}, state | {KEY: OVERRIDES}, {KEY: ours}, state | {KEY: 3}):
        write_raw(path, contents)
        assert "was not written by tinyformer" in error_of(path)
    torch.save(state, path)
    assert "is a PyTorch archive; checkpoints before format 2" in error_of(path)


WEIGHT = "network.encoder.layers.0.attention.q_proj.weight"


NO_WEIGHTS = "text", torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.complex64)
MALFORMED = [
    ("state_dict", {"state_dict": {3: torch.zeros(1)}}, {}),
    *(("not a tensor of real", {"state_dict": {WEIGHT: weight}}, {}) for weight in NO_WEIGHTS),
    ("its global_step is -1", {"global_step": -1}, {}),
    ("its fact precision is a list", {}, {"facts": {"precision": []}}),
    ("its fact precision is '${oc.env:HOME}'", {}, {"facts": {"precision": "${oc.env:HOME}"}}),
    ("its overrides is not a mapping from names", {}, {"overrides": {("x",): 3}}),
    ("is of format 3, but", {}, {"format": 3}),
]
"""A part of the sentence, changes of the contents, and changes of our own part of them."""


@pytest.mark.parametrize(("said", "changes", "ours"), MALFORMED)
def test_malformed_contents_are_reported_in_one_sentence(tmp_path, said, changes, ours):
    assert said in error_of(save(tmp_path / "malformed.ckpt", **{KEY: whole()[KEY] | ours} | changes))


def test_code_in_a_file_does_not_run(tmp_path):
    path, trace = tmp_path / "evil.ckpt", tmp_path / "it-ran"

    class Call:
        """Is pickled as a call of a function."""

        def __reduce__(self):
            return Path.touch, (trace,)

    contents = {KEY: Call(), "state_dict": {}, "global_step": 0}
    for write in (torch.save, partial(torch.save, _use_new_zipfile_serialization=False), pickle.dump):
        with path.open("wb") as file:
            write(contents, file)
        error_of(path)
        assert not trace.exists()
    pickle.loads(path.read_bytes())
    assert trace.exists()


def test_weights_that_do_not_fit(tmp_path):
    checkpoint = load_checkpoint(save(tmp_path / "last.ckpt"))
    for reason, changes in {
        r"encoder\.layers\.0\.\S+k_proj\.weight has shape \[32, 32\], but in the model \[16, 32\]": {"num_kv_heads": 2},
        r"it lacks encoder\.layers\.2\.": {"num_layers": 3},
        r"it also has encoder\.layers\.1\.": {"num_layers": 1},
    }.items():
        with pytest.raises(ArgumentError, match=rf"^checkpoint='\S+last.ckpt': does not fit this model: {reason}"):
            load_weights(make_transformer(**changes), checkpoint)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("with_readout", [True, False])
def test_the_readout_starts_anew_where_asked_and_new_tokens_everywhere(tmp_path, tied, with_readout):
    original, network = make_transformer(tied=tied), make_transformer(tied=tied, vocab_size=51)
    stored, initial = ({name: x.clone() for name, x in each.state_dict().items()} for each in (original, network))
    start_from(network, load_checkpoint(save(tmp_path / "last.ckpt", original)), with_readout)
    for name, tensor in network.state_dict().items():
        is_kept = with_readout or tied or not name.startswith("readout.")
        expected = [*stored[name], *initial[name][len(stored[name]) :]] if is_kept else initial[name]
        assert all(map(torch.equal, tensor, expected)), name


def numbers():
    return [*torch.rand(3).tolist(), *np.random.rand(3), np.random.randn(), random.random(), random.gauss(0, 1)]


def test_random_numbers_continue_from_a_saved_state(tmp_path):
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    for _ in range(701):  # after an odd number of normals, the generators keep one in store
        torch.rand(1), np.random.randn(), random.gauss(0, 1)
    write_raw(tmp_path / "state.ckpt", random_state())
    expected = numbers()
    torch.manual_seed(6), np.random.seed(6), random.seed(6)
    assert numbers() != expected
    restore_random_state(read_raw(tmp_path / "state.ckpt"))
    assert numbers() == expected
    state = random_state()
    state["numpy"][2] = 2**31 - 1  # NumPy would read past the end of its state
    with pytest.raises(ValueError, match="position is 2147483647"):
        restore_random_state(state)


def test_saving_a_network_replaces_the_file_as_a_whole(tmp_path):
    path = save(tmp_path / "pruned.ckpt")
    checkpoint, number = load_checkpoint(path), path.stat().st_ino
    save_network(path, make_transformer(), checkpoint, OVERRIDES)
    assert path.stat().st_ino != number  # another file, which `atomic_write` has renamed
