"""Checkpoints: damaged and foreign files, weights that do not fit, untrusted configs, random states."""

import os
import pickle
import random
import re
import zipfile
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from nn.model_cases import make_transformer

from tinyformer.app.scores import require_trusted_score
from tinyformer.checkpoint import (
    KEY,
    UntrustedTargetError,
    load_checkpoint,
    load_weights,
    random_state,
    require_trusted,
    restore_random_state,
    save_network,
    start_from,
)
from tinyformer.errors import ArgumentError

FILE = Path("x.ckpt")
TASK = {"readout": {"_target_": "tinyformer.nn.TokenReadout"}, "labels": None}


def save(path, network=None, task=TASK):
    """A checkpoint as a run writes it."""
    network = network or make_transformer()
    contents = {
        "state_dict": {f"network.{name}": tensor for name, tensor in network.state_dict().items()}
        | {"sums.nats.value": torch.zeros(())},
        "global_step": 7,
        KEY: {"config": {"task": task}, "tokenizer": "{}", "facts": {"precision": "32-true"}},
    }
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
    assert f"`python -m tinyformer.convert hf {tmp_path} imported.ckpt`" in error_of(tmp_path)


def test_a_damaged_file(tmp_path):
    """Zeros in the weights cannot be noticed; elsewhere the file is refused, and never with another exception."""
    whole, path = save(tmp_path / "whole.ckpt").read_bytes(), tmp_path / "damaged.ckpt"
    for share in (0.0, 0.001, 0.1, 0.5, 0.9, 0.999):
        path.write_bytes(whole[: int(len(whole) * share)])
        assert "cut short" in error_of(path)
    for share in (0.1, 0.3, 0.6, 0.9):
        start = int(len(whole) * share)
        path.write_bytes(whole[:start] + bytes(300) + whole[start + 300 :])
        with suppress(ArgumentError):
            load_checkpoint(path)
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
    whole = {"config": {}, "tokenizer": "", "facts": {}}
    for contents in (state, [1, 2], torch.zeros(3), state | {KEY: {"config": {}}}, {KEY: whole}, state | {KEY: 3}):
        torch.save(contents, path)
        assert "was not written by tinyformer" in error_of(path)


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
        save_network(path, make_transformer(), checkpoint, {})
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
    monkeypatch.undo()
    network = make_transformer()
    save_network(path, network, checkpoint, {"a": 1})
    saved = load_checkpoint(path)
    assert (saved.config, saved.step, saved.tokenizer, saved.facts) == ({"a": 1}, 7, "{}", checkpoint.facts)
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


def test_the_readout_starts_anew_for_another_readout_or_other_labels(tmp_path):
    """Three classes with other names are other classes, though the weights would fit."""
    labels = {**TASK, "labels": ["bad", "fair", "good"]}
    original = make_transformer(tied=False)
    checkpoint = load_checkpoint(save(tmp_path / "last.ckpt", original, labels))
    for task, readout_is_kept in (
        (labels, True),
        ({**labels, "labels": ["cat", "dog", "bird"]}, False),
        ({**labels, "readout": {"_target_": "tinyformer.nn.ClassReadout"}}, False),
    ):
        network = make_transformer(tied=False)
        initial = {name: tensor.clone() for name, tensor in network.state_dict().items()}
        start_from(network, checkpoint, task)
        for name, tensor in network.state_dict().items():
            is_kept = readout_is_kept or not name.startswith("readout.")
            assert torch.equal(tensor, original.state_dict()[name] if is_kept else initial[name]), name


@pytest.mark.parametrize("tied", [True, False])
def test_new_rows_of_a_vocabulary_keep_their_initialisation(tmp_path, tied):
    original = make_transformer(tied=tied)
    checkpoint = load_checkpoint(save(tmp_path / "last.ckpt", original))
    network = make_transformer(tied=tied, vocab_size=51)
    initial = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    start_from(network, checkpoint, TASK)
    for name in ("encoder.token_embedding.weight", "readout.proj.weight"):
        rows = network.state_dict()[name]
        assert torch.equal(rows[:50], original.state_dict()[name])
        assert torch.equal(rows[50:], initial[name][50:])


# Trust.


def test_every_class_of_another_package_is_refused():
    known = {"_target_": "tinyformer.nn.Attention"}
    require_trusted({"a": [{"_target_": "tinyformer.training.AdamW", "b": known}]}, FILE)
    names = """
    os.system builtins.eval torch.nn.Linear tinyformer.checkpoint.torch.load tinyformer.checkpoint.pickle.Unpickler
    tinyformer.checkpoint.Path tinyformer.checkpoint.load_checkpoint tinyformer.nn.AttentionMask.dense
    tinyformer.none.Class tinyformer.nn.NoSuchClass tinyformer tinyformer. tinyformers.Class
    """
    for target in (*names.split(), "", 3, True, ["os.system"], known):
        node = {"_target_": target}
        for config, key in (
            (node, "_target_"),
            ({"a": {"b": node}}, "a.b._target_"),
            ({"a": [1, [node]]}, "a.1.0._target_"),
            ([[node]], "0.0._target_"),
            ({"a": (node,)}, "a.0._target_"),
        ):
            with pytest.raises(UntrustedTargetError, match=r"^path='x\.ckpt': would call .* not a class of") as caught:
                require_trusted(config, FILE)
            assert (caught.value.location, caught.value.target) == (key, target)


def test_interpolations_that_could_create_a_node_are_refused():
    """Resolved, they are nodes with a target that was not there to be checked."""
    for text in (
        '${oc.create:{_target_:os.system,command:"touch it-ran"}}',
        "${oc.decode:'{_target_: os.system, command: touch it-ran}'}",
        "${oc.${part}:{_target_:os.system}}",
        "${${part}:{_target_:os.system}}",
        "a ${oc.deprecated:b}",
    ):
        with pytest.raises(ArgumentError, match=r"^path='x\.ckpt': contains .*\$\{.* \(network\.encoder\)"):
            require_trusted({"network": {"encoder": text}}, FILE)
    for text in (
        "${model.d_model}",
        "${default_num_kv_heads:${model.num_heads}}",
        "${oc.env:TINYFORMER_CACHE,data/cache}",
        "costs $5 {or} 6: a lot",
    ):
        require_trusted({"a": text}, FILE)
    require_trusted({"block": {"_target_": "mine.Block"}}, FILE, frozenset({"mine.Block"}))


def test_a_score_is_checked_like_a_target():
    trusted = frozenset({"mine.Known"})
    for score in ("os.system", "mine.Score", "tinyformer.checkpoint.torch.load"):
        with pytest.raises(UntrustedTargetError, match=r"attention\.score"):
            require_trusted_score({"attention": {"_target_": "tinyformer.nn.Attention", "score": score}}, FILE, trusted)
    for score in ("scaled_dot", "additive", "tinyformer.nn.ScaledDotScore", "mine.Known", "${data.name}", None):
        require_trusted_score({"attention": {"score": score}}, FILE, trusted)


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
