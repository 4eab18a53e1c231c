"""What a checkpoint keeps of a config, and what it may bring: plain values at keys of our YAML, and nothing else."""

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from tinyformer.app.start import has_same_readout
from tinyformer.app.stored_config import AXES, SECTIONS, admit_config, choices_of, describe_config, recorded_sources
from tinyformer.app.sweep import compose_run
from tinyformer.checkpoint import Checkpoint, UntrustedTargetError
from tinyformer.errors import ArgumentError

FILE = Path("x.ckpt")


@functools.cache
def _composed(*overrides: str) -> dict[str, Any]:
    config, _ = compose_run("train", overrides)
    plain: Any = OmegaConf.to_container(config, resolve=False)
    return {name: plain[name] for name in (*AXES, *SECTIONS) if name in plain}


def composed(*overrides: str) -> dict[str, Any]:
    """The part of a run's unresolved config that a checkpoint keeps, as Hydra composes it."""
    return copy.deepcopy(_composed(*overrides))


def checkpoint(stored: dict[str, Any], num_layers: int = 4, d_model: int = 128) -> Checkpoint:
    stacks = ("encoder", "decoder")
    weights = {f"{stack}.layers.{n}.norm.weight": torch.ones(1) for stack in stacks for n in range(num_layers)}
    weights["encoder.token_embedding.weight"] = torch.zeros(3, d_model)
    return Checkpoint(FILE, weights, stored, None, {}, 1)


RUNS = [[f"{axis}={choices_of(axis)[index % len(choices_of(axis))]}" for axis in AXES] for index in range(12)]
RUNS = [[word for word in run if word not in ("data=text", "data=hub", "tokenizer=file")] for run in RUNS]
OF_PAIRS = ("network=encoder_decoder", "task=seq2seq")
RUNS = [
    [
        word
        for word in run
        if word != "network=transformer" and ({*OF_PAIRS} & {*run} or not word.startswith("cross_attention="))
    ]
    for run in RUNS
]
OVERRIDES = [
    ["attention=gqa", "attention.num_kv_heads=2", "attention.window=[16,16,null,8]", "seed=5", "deterministic=true"],
    ["position=rotary", "position.relative=null", "block.attention_residual.skip=[1,0,1,0.5]", "model.d_ff=100"],
    ["task=classification", "task.labels=[no,yes,'$5 {or} 6']", "task.readout.pooling=cls", "data.batch_size=3"],
    ["position=none", "position.relative={_target_: tinyformer.nn.ALiBi, _partial_: true}"],
    ["norm._target_=tinyformer.nn.RMSNorm", "~norm.bias", "~attention.dropout"],
    ["attention.score=additive", "attention.ablated_heads=[[0,1],[2,3]]", "model.pruned_heads=[[1,1]]"],
]


@pytest.mark.parametrize("overrides", [*RUNS, *OVERRIDES])
def test_the_config_of_a_run_is_made_again(overrides: list[str]) -> None:
    config = composed(*overrides)
    known = describe_config(config, dict(word.split("=", 1) for word in overrides if "=" in word))
    for stored in (known, describe_config(config)):
        assert admit_config(checkpoint(stored, config["model"]["num_layers"], config["model"]["d_model"])) == config


def test_a_value_that_others_determine_is_kept_only_where_it_was_overridden() -> None:
    values = describe_config(composed("model=tiny", "attention=gqa"))["values"]
    assert values["model.num_heads"] == 6
    assert "attention.num_heads" not in values
    assert "attention.num_kv_heads" not in values
    overridden = describe_config(composed("attention=gqa", "attention.num_kv_heads=1", "model.d_ff='${model.d_model}'"))
    assert (overridden["values"]["attention.num_kv_heads"], overridden["values"]["model.d_ff"]) == (1, 128)


def test_sources_are_recorded_and_not_followed() -> None:
    config = composed(
        "data=text", "data.files=book.txt", "data.cache_dir=/somewhere", "tokenizer=file", "tokenizer.path=t"
    )
    stored = checkpoint(describe_config(config))
    admitted = admit_config(stored)
    assert (admitted["data"]["files"], admitted["data"]["cache_dir"]) == ("???", None)
    assert admitted["tokenizer"] == {"_target_": "tinyformer.data.ByteTokenizer"}
    assert recorded_sources(stored) == {"data.files": "book.txt"}
    assert recorded_sources(checkpoint(describe_config(composed("data=tinystories")))) == {}
    theirs = describe_config(composed("data=tinystories", "data.path=owner/name"))
    assert recorded_sources(checkpoint(theirs)) == {"data.path": "owner/name"}


CALL = {"_target_": "torch.utils.collect_env.run", "_args_": ["touch it-ran"]}
VALUES: dict[str, Any] = {  # key: value that a file may not bring there
    "x1": "$",
    "network._args_": ["${x1}${x2}"],
    "model.d_model": "${oc.create:{_target_:os.system}}",
    "model.num_heads": "${oc.env:HOME}",
    "model.d_ff": CALL,
    "model.pruned_heads": [CALL],
    "model.init_std": [[[1]]],
    "attention._target_": "os.system",
    "attention._partial_": False,
    "block._recursive_": False,
    "norm._args_": [1],
    "attention": 3,
    "attention.nope": 1,
    "trainer.callbacks": 1,
    "callbacks.mine._target_": "os.system",
    "optimizer.lr": 1,
    "hydra.run.dir": "x",
    "model": None,
    "model.dropout": float("nan"),
    "seed": 10**30,
    "task.labels": ["x" * 2000],
    "model.num_layers": 10**7,
    "model.max_seq_len": 10**12,
    "model.vocab_size": 10**12,
    "model.d_model.deeper": 1,
    "data.text_column": "${x}",
    "data.source.files": "/etc/passwd",
    "data.module.cache_dir": "/tmp",
    "network.encoder.num_layers": 4,
    "task.objective": None,
    "attention.score": 5,
    "datamodule": None,
    "deterministic": 1,
    "position.absolute.max_seq_len": 2**40,
    "attention.window": [2**40],
    "position.relative": [0],
}


@pytest.mark.parametrize("key", VALUES)
def test_what_is_no_plain_value_at_a_key_of_ours_is_refused_by_name(key: str) -> None:
    stored = describe_config(composed())
    stored["values"][key] = VALUES[key]
    with pytest.raises(ArgumentError, match=rf"^path='x\.ckpt': its {key}") as caught:
        admit_config(checkpoint(stored))
    assert "\n" not in str(caught.value)


NAMES = """
    os.system builtins.eval torch.nn.Linear tinyformer.checkpoint.torch.load tinyformer.checkpoint.pickle.Unpickler
    tinyformer.checkpoint.Path tinyformer.checkpoint.load_checkpoint tinyformer.nn.AttentionMask.dense
    tinyformer.none.Class tinyformer.nn.NoSuchClass tinyformer tinyformer. tinyformers.Class
"""


def test_a_class_of_another_package_is_made_only_where_it_is_named() -> None:
    for name in (*NAMES.split(), "", 3, True, ["os.system"], CALL):
        stored = describe_config(composed())
        stored["classes"]["norm"] = name
        with pytest.raises((UntrustedTargetError, ArgumentError)) as caught:
            admit_config(checkpoint(stored))
        if isinstance(name, str):
            assert isinstance(caught.value, UntrustedTargetError)
            assert (caught.value.location, caught.value.target) == ("norm._target_", name)
            admitted = admit_config(
                checkpoint(stored), lambda key, named, name=name: (key, named) == ("norm._target_", name)
            )
            assert admitted["norm"]["_target_"] == name
    for key, name in {"data.source": "tinyformer.data.TextFiles", "norm": "tinyformer.training.AdamW"}.items():
        with pytest.raises(UntrustedTargetError):
            admit_config(checkpoint(describe_config(composed()) | {"classes": {key: name}}))
    with pytest.raises(ArgumentError, match=r"its nowhere\.at\.all is"):
        admit_config(
            checkpoint(describe_config(composed()) | {"classes": {"nowhere.at.all": "tinyformer.nn.Attention"}})
        )


def test_a_users_class_brings_plain_arguments() -> None:
    config = composed("position=alibi", "position.relative._target_=mine.LogDistance", "+position.relative.base=2.5")
    stored = describe_config(config)
    assert stored["classes"] == {"position.relative": "mine.LogDistance"}
    admitted = admit_config(checkpoint(stored), lambda key, name: name == "mine.LogDistance")
    assert admitted["position"] == config["position"]
    stored["values"]["position.relative._args_"] = [1]
    with pytest.raises(ArgumentError, match="_args_"):
        admit_config(checkpoint(stored), lambda key, name: True)


def test_a_node_or_a_size_cannot_be_deleted() -> None:
    for key in ("model.d_model", "norm", "norm._target_", "position.relative", "norm.nowhere", 3):
        with pytest.raises(ArgumentError):
            admit_config(checkpoint(describe_config(composed("position=rotary")) | {"deleted": [key]}))


def test_keys_are_names_and_nothing_can_be_built_from_them() -> None:
    for key in ("", "model.", "norm.eps=${now:%Y}\\", "model.d_ff\x1b[2J", "model..d_ff", "a b", 3, ("x",)):
        with pytest.raises(ArgumentError, match="is not a key of the config files"):
            admit_config(checkpoint(describe_config(composed()) | {"values": {key: 1}}))


def test_what_is_small_in_a_file_and_huge_in_memory_is_refused() -> None:
    shared: Any = ["a"]
    for _ in range(60):
        shared = [shared, shared]
    stored = describe_config(composed())
    many: Any = [[0] * 20_000] * 20_000
    for part, key, value in (
        ("choices", "norm", shared),
        ("classes", "norm", shared),
        ("values", "model.pruned_heads", many),
    ):
        with pytest.raises(ArgumentError):
            admit_config(checkpoint(stored | {part: stored[part] | {key: value}}))


def test_a_score_is_a_class_like_any_other() -> None:
    stored = describe_config(composed("attention.score=mine.Score"))
    with pytest.raises(UntrustedTargetError) as caught:
        admit_config(checkpoint(stored))
    assert (caught.value.location, caught.value.target) == ("attention.score", "mine.Score")
    assert admit_config(checkpoint(stored), lambda key, name: True)["attention"]["score"] == "mine.Score"


@pytest.mark.parametrize("choice", ["../../etc/passwd", "nope", None, 3, ["mha"], "_shared"])
def test_a_choice_is_one_of_ours(choice: Any) -> None:
    stored = describe_config(composed())
    stored["choices"]["attention"] = choice
    with pytest.raises(ArgumentError, match=r"its attention is .*, which is not a choice of this axis\.$"):
        admit_config(checkpoint(stored))


def test_a_readout_for_other_labels_is_another_readout() -> None:
    """Three classes with other names are other classes, though the weights would fit."""
    classes = "task=classification", "task.labels=[bad,fair,good]"
    stored = checkpoint(describe_config(composed(*classes)))
    others = ("task=classification", "task.labels=[cat,dog,bird]"), ("task=causal_lm",)
    for overrides, is_same in ((classes, True), *((other, False) for other in others)):
        config, _ = compose_run("train", overrides)
        assert has_same_readout(stored, config) is is_same, overrides


def test_sizes_are_those_of_the_weights() -> None:
    stored = describe_config(composed())
    for sizes, said in (({"num_layers": 2}, "num_layers is 4, but"), ({"d_model": 64}, "d_model is 128, but")):
        with pytest.raises(ArgumentError, match=rf"its model\.{said} its weights have {next(iter(sizes.values()))}"):
            admit_config(checkpoint(stored, **sizes))
