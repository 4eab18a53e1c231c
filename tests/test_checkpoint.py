"""Checkpoints: what cannot be read, what does not fit, what is not trusted, and random states."""

import os
import pickle
import random
import zipfile
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from nn.model_cases import make_transformer

from tinyformer.checkpoint import (
    KEY,
    load_checkpoint,
    load_weights,
    random_state,
    require_trusted,
    restore_random_state,
)


def save(path, network=None, **changes):
    """A checkpoint as a run writes it."""
    network = network or make_transformer()
    contents = {
        "state_dict": {f"network.{name}": tensor for name, tensor in network.state_dict().items()}
        | {"sums.nats.value": torch.zeros(())},
        "global_step": 7,
        KEY: {"config": {"seed": 0}, "tokenizer": "{}", "facts": {"precision": "32-true"}},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(contents | changes, path)
    return path


def error_of(path, **key):
    with pytest.raises(ValueError, match=r"^\S+=") as caught:
        load_checkpoint(path, **key)
    message = str(caught.value)
    assert message.startswith(f"{key.get('key', 'checkpoint')}={path}")
    assert "\n" not in message
    return message


# Reading.


def test_reads_what_was_written(tmp_path):
    network = make_transformer()
    checkpoint = load_checkpoint(str(save(tmp_path / "last.ckpt", network)))
    assert checkpoint.step == 7
    assert checkpoint.config == {"seed": 0}
    assert checkpoint.facts == {"precision": "32-true"}
    assert checkpoint.weights.keys() == network.state_dict().keys()
    other = make_transformer()
    load_weights(other, checkpoint)
    for name, tensor in other.state_dict().items():
        assert torch.equal(tensor, network.state_dict()[name])


def test_a_missing_file_names_where_a_run_writes_it(tmp_path):
    assert "RUN/checkpoints/last.ckpt" in error_of(tmp_path / "none.ckpt", key="init_from")


def test_a_folder_names_the_checkpoint_in_it(tmp_path):
    save(tmp_path / "run" / "checkpoints" / "best.ckpt")
    last = save(tmp_path / "run" / "checkpoints" / "last.ckpt")
    assert f"init_from={last} works" in error_of(tmp_path / "run", key="init_from")


def test_a_folder_names_the_newest_checkpoint_in_it(tmp_path):
    new = save(tmp_path / "a" / "last.ckpt")
    old = save(tmp_path / "b" / "last.ckpt")
    os.utime(old, (1, 1))
    assert f"checkpoint={new} works" in error_of(tmp_path)


def test_an_empty_folder_names_where_a_run_writes_it(tmp_path):
    assert "RUN/checkpoints/last.ckpt" in error_of(tmp_path)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.5, 0.9, 0.999])
def test_a_file_cut_short(tmp_path, share):
    whole = save(tmp_path / "whole.ckpt").read_bytes()
    (tmp_path / "cut.ckpt").write_bytes(whole[: int(len(whole) * share)])
    assert "cut short" in error_of(tmp_path / "cut.ckpt")


@pytest.mark.parametrize("position", [0.1, 0.3, 0.6, 0.9])
def test_a_damaged_file_is_refused_or_read(tmp_path, position):
    """Never another exception: zeros in the weights are not noticed, elsewhere they are."""
    whole = bytearray(save(tmp_path / "whole.ckpt").read_bytes())
    start = int(len(whole) * position)
    whole[start : start + 300] = bytes(300)
    (tmp_path / "damaged.ckpt").write_bytes(whole)
    with suppress(ValueError):
        load_checkpoint(tmp_path / "damaged.ckpt")


def test_a_damaged_pickle_inside_the_archive(tmp_path):
    whole = save(tmp_path / "whole.ckpt")
    with zipfile.ZipFile(whole) as old, zipfile.ZipFile(tmp_path / "damaged.ckpt", "w") as new:
        for name in old.namelist():
            data = old.read(name)
            new.writestr(name, data[:50] if name.endswith("data.pkl") else data)
    assert "damaged" in error_of(tmp_path / "damaged.ckpt")


@pytest.mark.parametrize(
    "contents",
    [
        b"# Notes\n" * 50,
        b"\x00" * 1000,
        "Ελληνικά".encode(),
        b"PK\x03\x04 not a zip",
        bytes(range(256)),
        b"{}",
        b"X",
        b"\x80\x05].",
    ],
    ids=["text", "zeros", "greek", "half-a-zip", "bytes", "json", "letter", "pickle"],
)
def test_no_checkpoint_at_all(tmp_path, contents):
    (tmp_path / "notes.txt").write_bytes(contents)
    error_of(tmp_path / "notes.txt")


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


@pytest.mark.parametrize(
    "contents",
    [
        {"state_dict": {}, "global_step": 1, "hyper_parameters": {}},
        [1, 2],
        torch.zeros(3),
        {KEY: {"config": {}}, "state_dict": {}, "global_step": 1},
        {KEY: {"config": {}, "tokenizer": "", "facts": {}}},
        {KEY: 3},
    ],
    ids=["lightning", "list", "tensor", "without-tokenizer", "without-weights", "number"],
)
def test_a_foreign_checkpoint(tmp_path, contents):
    torch.save(contents, tmp_path / "foreign.ckpt")
    assert "was not written by tinyformer" in error_of(tmp_path / "foreign.ckpt")


# Fitting.


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"d_model": 64}, r"token_embedding.weight is \[50, 32\] there and \[50, 64\] here"),
        ({"vocab_size": 51}, r"token_embedding.weight is \[50, 32\] there and \[51, 32\] here"),
        ({"num_kv_heads": 2}, r"layers.0.attention.k_proj.weight is \[32, 32\] there and \[16, 32\] here"),
        ({"num_layers": 3}, r"it has no encoder.layers.2."),
        ({"num_layers": 1}, r"it has encoder.layers.1.\S+ besides"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_named(tmp_path, changes, reason):
    checkpoint = load_checkpoint(save(tmp_path / "last.ckpt"))
    with pytest.raises(ValueError, match=rf"init_from=\S+last.ckpt does not fit this model: .*{reason}"):
        load_weights(make_transformer(**changes), checkpoint, "init_from")


# Trusting.


@pytest.mark.parametrize(
    "target",
    [
        "tinyformer.nn.Attention",
        "tinyformer.nn.multi_head.Attention",
        "tinyformer.training.AdamW",
        "tinyformer.data.Pydoc",
        "tinyformer.training.AttentionTelemetry",
    ],
)
def test_our_classes_are_trusted(target):
    require_trusted({"a": [{"_target_": target, "b": {"_target_": target}}]}, Path("x.ckpt"))


@pytest.mark.parametrize(
    "target",
    [
        "os.system",
        "builtins.eval",
        "torch.nn.Linear",
        "tinyformer.checkpoint.torch.load",
        "tinyformer.checkpoint.pickle.Unpickler",
        "tinyformer.checkpoint.Path",
        "tinyformer.checkpoint.load_checkpoint",
        "tinyformer.nn.AttentionMask.dense",
        "tinyformer.none.Class",
        "tinyformer.nn.NoSuchClass",
        "tinyformer",
        "tinyformer.",
        "tinyformers.Class",
        "",
        3,
        True,
        ["os.system"],
        {"_target_": "tinyformer.nn.Attention"},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "wrap",
    [
        lambda node: node,
        lambda node: {"a": {"b": node}},
        lambda node: {"a": [1, [node]]},
        lambda node: [[node]],
        lambda node: {"a": (node,)},
    ],
    ids=["top", "nested", "in-lists", "list", "in-a-tuple"],
)
def test_all_else_is_refused(target, wrap):
    with pytest.raises(ValueError, match=r"checkpoint=x.ckpt wants to call .*no class of tinyformer"):
        require_trusted(wrap({"_target_": target}), Path("x.ckpt"))


@pytest.mark.parametrize(
    "text",
    [
        '${oc.create:{_target_:os.system,command:"touch it-ran"}}',
        "${oc.decode:'{_target_: os.system, command: touch it-ran}'}",
        "${oc.${part}:{_target_:os.system}}",
        "${${part}:{_target_:os.system}}",
        "a ${oc.deprecated:b}",
    ],
)
def test_an_interpolation_that_makes_a_node_is_refused(text):
    """Resolved, it is a node with a target that was not there to be looked at."""
    with pytest.raises(ValueError, match=r"checkpoint=x.ckpt .*\$\{"):
        require_trusted({"network": {"encoder": text}}, Path("x.ckpt"))


@pytest.mark.parametrize(
    "text",
    [
        "${model.d_model}",
        "${.d_model}",
        "${default_num_kv_heads:${model.num_heads}}",
        "${oc.env:TINYFORMER_CACHE,data/cache}",
        "${seed}-${model.name}",
        "costs $5 {or} 6: a lot",
    ],
)
def test_the_interpolations_of_our_files_are_trusted(text):
    require_trusted({"a": text}, Path("x.ckpt"))


@pytest.mark.parametrize("score", ["os.system", "mine.Score", "${data.name}", "tinyformer.checkpoint.torch.load"])
def test_a_stored_score_is_one_of_ours(score):
    with pytest.raises(ValueError, match=r"NODE\.score="):
        require_trusted({"attention": {"_target_": "tinyformer.nn.Attention", "score": score}}, Path("x.ckpt"))


def test_scores_of_ours_are_trusted():
    for score in ("scaled_dot", "additive", "tinyformer.nn.ScaledDotScore", None):
        require_trusted({"attention": {"score": score}}, Path("x.ckpt"))
    require_trusted({"attention": {"score": "mine.Score"}}, Path("x.ckpt"), frozenset({"mine.Score"}))


def test_what_the_user_names_is_trusted():
    config = {"block": {"_target_": "mine.Block"}}
    require_trusted(config, Path("x.ckpt"), frozenset({"mine.Block"}))
    with pytest.raises(ValueError, match=r"'mine.Block', .* NODE._target_=mine.Block"):
        require_trusted(config, Path("x.ckpt"), frozenset({"mine.Other"}))


# Random states.


def numbers():
    return [
        *torch.rand(3).tolist(),
        *np.random.rand(3),
        np.random.randn(),
        random.random(),
        random.gauss(0, 1),
    ]


@pytest.mark.parametrize("drawn", [0, 1, 701])
def test_random_numbers_go_on_after_a_file(tmp_path, drawn):
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(5)
    for _ in range(drawn):  # an odd number of normals leaves one in store
        torch.rand(1), np.random.randn(), random.gauss(0, 1)
    torch.save(random_state(), tmp_path / "state.pt")
    expected = numbers()
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(6)
    assert numbers() != expected
    restore_random_state(torch.load(tmp_path / "state.pt", weights_only=True))
    assert numbers() == expected
