"""A file may set choices and plain values at keys of our YAML, and nothing else of a config."""

import copy
import functools
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from tinyformer.checkpoint.file import Checkpoint
from tinyformer.checkpoint.format import FORMAT, KEY, write_raw
from tinyformer.config import conf
from tinyformer.config.admission import (
    NotAdmittedError,
    admit_config,
    admit_override,
    describe_config,
    recorded_sources,
)
from tinyformer.config.conf import AXES, STORED, choices_of, config_dir
from tinyformer.config.launch import compose_run, inherit_architecture, offer_stored_run
from tinyformer.errors import ArgumentError
from tinyformer.run.starting_checkpoint import InitialCheckpoint

Plain = dict[str, Any]
CALL = {"_target_": "torch.utils.collect_env.run", "_args_": ["touch it-ran"]}


@functools.cache
def _composed(*overrides: str) -> Plain:
    config, invocation = compose_run("train", overrides)
    plain: Any = OmegaConf.to_container(config, resolve=False)
    return {"config": {name: plain[name] for name in STORED if name in plain}, "choices": invocation.choices}


def composed(*overrides: str) -> Plain:
    """The part of a run's unresolved config that a checkpoint keeps, as Hydra composes it."""
    return copy.deepcopy(_composed(*overrides)["config"])


def described(*overrides: str) -> Plain:
    """The config that the checkpoint of a run stores."""
    return describe_config(composed(*overrides), _composed(*overrides)["choices"])


def checkpoint(overrides: Plain, num_layers: int = 4, d_model: int = 128) -> Checkpoint:
    stacks = ("encoder", "decoder")
    weights = {f"{stack}.layers.{n}.norm.weight": torch.ones(1) for stack in stacks for n in range(num_layers)}
    weights["encoder.token_embedding.weight"] = torch.zeros(3, d_model)
    return Checkpoint(Path("x.ckpt"), weights, overrides, None, {}, 1)


def stored(*overrides: str, **changes: Any) -> Checkpoint:
    """The checkpoint of a run, with other overrides by key."""
    return checkpoint(described(*overrides) | changes)


LEFT_OUT = ("data=text", "data=hub", "tokenizer=file")
OF_ALL_RUNS = [axis for axis in AXES if axis not in ("network", "cross_attention")]
CHOSEN = [[f"{axis}={choices_of(axis)[n % len(choices_of(axis))]}" for axis in OF_ALL_RUNS] for n in range(12)]
RUNS = [[word for word in run if word not in LEFT_OUT] for run in CHOSEN]
OVERRIDES = [
    ["attention=gqa", "attention.num_kv_heads=2", "attention.window=[16,16,null,8]", "seed=5", "deterministic=true"],
    ["position=rotary", "position.relative=null", "block.attention_residual.skip=[1,0,1,0.5]", "model.d_ff=100"],
    ["task=classification", "task.labels=[no,yes,'$5 {or} 6']", "task.readout.pooling=cls", "data.batch_size=3"],
    ["position=none", "position.relative={_target_: tinyformer.nn.ALiBi, _partial_: true}"],
    ["norm._target_=tinyformer.nn.RMSNorm", "~norm.bias", "~attention.dropout", "attention.position=null"],
    ["attention.score=additive", "attention.ablated_heads=[[0,1],[2,3]]", "model.pruned_heads=[[1,1]]"],
    ["attention=[gqa,mla]", "attention.kinds.mla.kv_rank=7", "position=[rotary,none]", "position.relative.base=500"],
    ["task=seq2seq", "cross_attention=mla", "cross_attention.kv_rank=7", "model.num_encoder_layers=4"],
]


@pytest.mark.parametrize("overrides", [*RUNS, *OVERRIDES])
def test_the_config_of_a_run_is_made_again(overrides: list[str]) -> None:
    config = composed(*overrides)
    sizes = (config["model"]["num_layers"], config["model"]["d_model"])
    assert admit_config(checkpoint(described(*overrides), *sizes)) == config


def test_a_checkpoint_outlives_other_defaults_and_formulas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later versions may state, compute or add what they like: what a run was made with stays."""
    words = ("attention=gqa", "attention.num_kv_heads=1")
    config, overrides = composed(*words), described(*words)
    later = shutil.copytree(config_dir(), tmp_path / "conf")
    for file, before, after in (
        ("model/_shared.yaml", "dropout: 0.0 ", "dropout: 0.1 "),
        ("model/_shared.yaml", "d_ff: null ", "d_ff: ${default_num_kv_heads:${model.d_model}} "),
        ("attention/gqa.yaml", "${default_num_kv_heads:${model.num_heads}}", "${model.num_heads}"),
        ("attention/_shared.yaml", "gate: false", "gate: true\nlater: 1"),
        ("train.yaml", "- norm: layer_norm", "- norm: rms_norm"),
    ):
        text = (later / file).read_text()
        assert before in text
        (later / file).write_text(text.replace(before, after))
    caches = (conf.files, conf.programs, conf.read, conf.values_of_keys)
    monkeypatch.setattr(conf, "config_dir", lambda: later)
    try:
        for cache in caches:
            cache.cache_clear()
        admitted = admit_config(checkpoint(overrides))
    finally:
        for cache in caches:
            cache.cache_clear()
    assert admitted["attention"].pop("later") == 1
    assert admitted == config


def test_sources_are_recorded_and_not_followed() -> None:
    file = stored("data=text", "data.files=book.txt", "data.cache_dir=/here", "tokenizer=file", "tokenizer.path=t")
    admitted = admit_config(file)
    assert (admitted["data"]["files"], admitted["data"]["cache_dir"]) == ("???", None)
    assert admitted["tokenizer"] == {"_target_": "tinyformer.data.ByteTokenizer"}
    assert recorded_sources(file.overrides) == {"data.files": "book.txt"}
    with pytest.raises(ArgumentError, match=r"its data\.source\.files follows from data\.files"):
        admit_config(stored("data=text", "data.files=book.txt", **{"data.source.files": "/etc/passwd"}))
    assert recorded_sources(described("data=tinystories")) == {}
    assert recorded_sources(described("data=tinystories", "data.path=owner/name")) == {"data.path": "owner/name"}


VALUES: Plain = {  # key: value that a checkpoint may not bring there
    "x1": "$",
    "network._args_": ["${x1}${x2}"],
    "model.d_model": "${oc.create:{_target_:os.system}}",
    "model.d_ff": CALL,
    "model.pruned_heads": [CALL],
    "attention._partial_": False,
    "attention": 3,
    "norm": "../../etc/passwd",
    "block": "_shared",
    "position.absolute.d_model": 1,  # a key of another choice
    "hydra.run.dir": "x",
    "model.dropout": float("nan"),
    "model.num_layers": 9999,
    "position.absolute.max_seq_len": 2**40,
    "data.source.files": "/etc/passwd",
    "block.attention.num_heads": 2,
    "~norm": None,
    "~norm._target_": None,
    "~attention.rope_head_dim": None,  # a key of another choice
}


@pytest.mark.parametrize("key", VALUES)
def test_what_is_no_plain_value_at_a_key_of_ours_is_refused_by_name(key: str) -> None:
    with pytest.raises(ArgumentError, match=rf"^path='x\.ckpt': its {key.lstrip('~')} ") as caught:
        admit_config(stored(**{key: VALUES[key]}))
    assert "\n" not in str(caught.value)


NAMES = """
    os.system builtins.eval torch.nn.Linear tinyformer.checkpoint.file.torch.load
    tinyformer.checkpoint.file.pickle.Unpickler
    tinyformer.checkpoint.file.Path tinyformer.checkpoint.file.load_checkpoint tinyformer.nn.AttentionMask.dense
    tinyformer.none.Class tinyformer.nn.NoSuchClass tinyformer tinyformer. tinyformers.Class tinyformer.training.AdamW
"""


def test_a_class_of_another_package_is_made_only_where_it_is_named() -> None:
    named = {"norm._target_": NAMES.split(), "data.source._target_": ["tinyformer.data.TextFiles"]}
    named |= {"attention.score": ["mine.Score"], "network._target_": ["os.system"]}
    for key, name in ((key, name) for key, names in named.items() for name in names):
        with pytest.raises(ArgumentError, match=rf"its {key} calls '{name}', .*; if you trust it, add {key}={name}\.$"):
            admit_config(stored(**{key: name}))
        with pytest.raises(ArgumentError, match=r"; if you trust it, name it in trusted\.$"):
            admit_config(stored(**{key: name}), remedy="name it in `trusted`")
        admitted = admit_config(stored(**{key: name}), lambda *given, pair=(key, name): given == pair)
        assert OmegaConf.select(OmegaConf.create(admitted), key) == name
    for key, other in (
        ("norm._target_", CALL),
        ("norm._target_", "${oc.env:HOME}.b"),
        ("attention.score", "${oc.env:HOME}.b"),
        ("nowhere.at.all._target_", "tinyformer.nn.ALiBi"),
    ):
        with pytest.raises(ArgumentError, match=f"its {key} "):
            admit_config(stored(**{key: other}), lambda key, name: True)


def test_a_users_class_brings_plain_arguments() -> None:
    words = "position=alibi", "position.relative._target_=mine.LogDistance", "+position.relative.base=2.5"
    config = composed(*words, "+position.relative.own=1")
    file = checkpoint(describe_config(config, {"position": "alibi"}))
    assert admit_config(file, lambda key, name: name == "mine.LogDistance")["position"] == config["position"]
    source = ["data.source._target_=mine.Texts", "+data.source.files=mine.txt"]  # data=text computes such a key
    config = composed(*source)
    assert admit_config(checkpoint(described(*source)), lambda key, name: name == "mine.Texts") == config
    file.overrides["position.relative._args_"] = [1]
    with pytest.raises(ArgumentError, match="_args_"):
        admit_config(file, lambda key, name: True)


def test_keys_are_names_and_nothing_can_be_built_from_them() -> None:
    keys = ["", "model.", "norm.eps=${now:%Y}\\", "model.d_ff\x1b[2J", "model..d_ff", "a b", "norm.a=b", "norm.a[0]"]
    for key in keys:
        with pytest.raises(ArgumentError, match="is not a key of the config files") as caught:
            admit_config(stored(**{"norm._target_": "tinyformer.nn.RMSNorm", key: 1}))
        assert str(caught.value).isprintable()


def test_what_is_small_in_a_file_and_huge_in_memory_is_refused() -> None:
    shared: Any = ["a"]
    for _ in range(60):
        shared = [shared, shared]
    for key, value in (("norm", shared), ("norm._target_", shared), ("norm.eps", shared)):
        with pytest.raises(ArgumentError):
            admit_config(stored(**{key: value}))


DATA = """
    attention=gqa|model.num_layers=3|attention.window=[16,16,null]|experiment=sst2_cpu|callbacks=default|logger=null
    data.files='my book, $5.txt'|position.relative._target_=tinyformer.nn.ALiBi|+callbacks.averaged.decay=0.9
    +callbacks.averaged={_target_:lightning.pytorch.callbacks.EMAWeightAveraging,decay:0.9}|optimizer.lr=0.001
    ~callbacks.attention|~seed=0|task.labels=[a,b]|attention.score=additive|attention.score=tinyformer.nn.ScaledDotScore
    data.files=''|data.files=C:/books|callbacks.finite={action:skip,max_skipped:3}|trainer.max_time='00:00:30:00'
"""


def words(table: str) -> list[str]:
    return [word.strip() for line in table.strip().splitlines() for word in line.split("|")]


@pytest.mark.parametrize("entry", words(DATA))
def test_what_a_run_stores_is_taken(entry: str) -> None:
    parse = OverridesParser.create().parse_override
    ours, theirs = parse(admit_override(entry)), parse(entry)
    assert (ours.type, ours.key_or_group, ours.value()) == (theirs.type, theirs.key_or_group, theirs.value())


HOSTILE = {
    "calls": """
        norm._target_=os.system|norm._target_=[os.system]|attention.score=mine.Score|logger._target_=tinyformer.training.AdamW
        callbacks.finite._target_=tinyformer.checkpoint.file.torch.load|data.module._target_=tinyformer.nn.ALiBi
    """,
    "is .*: an interpolation, which": """
        seed='${oc.create:{_target_:os.system}}'|seed='${a}${b}'|data.files=[['${now:%Y}']]|callbacks.finite.action=['${x}']
    """,
    "must be a finite number, a text": "optimizer.lr=inf|data.files=[{a:b}]|data.files=[[[a]]]",
    r"(sets [\w.]+, which )?is not a key of the config files": """
        +callbacks.e={_target_:torch.utils.collect_env.run,_args_:[ls]}|callbacks.finite._args_=[1]|+trainer.plugins=[mine]
        +callbacks.e={_target_:mine.Callback}|+foo=../../evil|+model/foo=../evil|~model/foo|model.defaults=[x]|++resume=x
        +Norm=../../evil|norm.Eps=1
    """,
    "sets callbacks.finite.nope, which is not a key": "callbacks.finite={nope:1}",
    "changes Hydra": """
        hydra.run.dir=x|hydra/launcher=joblib|hydra.searchpath=[pkg://e]|hydra={run:{dir:x}}|+HYDRA.run.dir=x
    """,
    "moves a config file": "data@task.data=text",
    "(sets .*, which )?makes a folder": "data.cache_dir=conf/foo|data.source={cache_dir:x}|data.module.cache_dir=x",
    "sends the run": "logger.entity=theirs|++logger.entity=theirs",
    "chooses": "attention=../../evil|attention=_shared|attention=[a]|norm={_target_:os.system}",
    "has several values": "seed=1,2|attention=mha,gqa",
    "is not an override": "seed|data..files=x|seed=[|--multirun",
}


@pytest.mark.parametrize(("said", "entry"), [(said, word) for said, table in HOSTILE.items() for word in words(table)])
def test_what_is_no_data_is_refused(said: str, entry: str) -> None:
    with pytest.raises(NotAdmittedError, match=f"^{said}"):
        admit_override(entry)


SWEPT = {
    "seed=1,2": "seed=1,2",
    "attention=glob(m*)": "attention=mha,mla,mqa",
    "attention=glob([m*,g?a],exclude=mqa)": "attention=gqa,mha,mla",
    "+model.pruned_heads=[[0]],null": "+model.pruned_heads=[[0]],null",
    "task.labels=[a,'b, c'],null": "task.labels=[a,'b, c'],null",
}
HOSTILE_SWEEPS = {
    "calls": "norm._target_=tinyformer.nn.RMSNorm,os.system|attention.score=dot,mine.Score",
    "is not a key": "+foo=1,2",
    "is .*: an interpolation": "seed=1,'${oc.env:HOME}'|attention.score=${data.text_column}",
    "shuffles its values": "seed=shuffle(1,2)",
    "is no list": "seed=range(0,nan)|seed=range(1,10,0)|seed=range(3,1)|attention=glob(../*)|attention=glob([[a]])",
}


def test_each_value_of_a_sweep_is_checked() -> None:
    assert {entry: admit_override(entry, in_sweep=True) for entry in SWEPT} == SWEPT
    for said, entry in ((said, word) for said, table in HOSTILE_SWEEPS.items() for word in words(table)):
        with pytest.raises(NotAdmittedError, match=f"^{said}"):
            admit_override(entry, in_sweep=True)


@pytest.fixture
def file(tmp_path: Path) -> Any:
    """Writes the checkpoint of a run that was started with these overrides."""

    def write(*overrides: str, name: str = "last.ckpt", **changes: Any) -> Path:
        contents = {"format": FORMAT, "overrides": described(*overrides) | changes, "tokenizer": "{}", "facts": {}}
        model = composed(*overrides)["model"]
        weights = checkpoint({}, model["num_layers"], model["d_model"]).weights
        state = {f"network.{name}": tensor for name, tensor in weights.items() if not name.startswith("decoder")}
        write_raw(tmp_path / name, {"state_dict": state, "global_step": 1, KEY: contents})
        return tmp_path / name

    return write


def evaluated(path: Path, *overrides: str) -> DictConfig:
    arguments = [f"checkpoint='{path}'", *overrides]
    offer_stored_run(arguments)
    return compose_run("evaluate", arguments)[0]


def test_an_evaluation_changes_what_its_words_say(file: Any) -> None:
    stored = ("attention=gqa", "model=tiny", "model.num_layers=3", "optimizer=muon", "seed=5", "logger=wandb")
    path = file(*stored, name="my run, last.ckpt")
    config = evaluated(path, "attention.backend=eager", "model.num_heads=2")
    assert (config.model.num_layers, config.attention.num_kv_heads, config.seed) == (3, 1, 5)
    attention = config.network.encoder.block.attention
    assert (attention.num_heads, attention.backend, attention.d_model) == (2, "eager", 384)
    assert evaluated(path, "seed=6").seed == 6
    assert (config.trainer.accelerator, config.generate.prompt, config.logger) == ("auto", None, {})
    assert "resume" not in config


def test_what_an_evaluation_would_follow_is_typed_again(file: Any) -> None:
    path = file(**{"norm._target_": "torch.nn.LayerNorm"})
    with pytest.raises(ValueError, match=r"add norm\._target_=torch\.nn\.LayerNorm"):
        evaluated(path)
    assert evaluated(path, "norm._target_=torch.nn.LayerNorm").norm._target_ == "torch.nn.LayerNorm"
    path = file("data=text", "data.files='my book.txt'")
    said = r"its run was trained on data\.files='my book\.txt', .*; add data\.files='my book\.txt',"
    with pytest.raises(ValueError, match=said):
        evaluated(path)
    assert evaluated(path, "data.files=other.txt").datamodule.source.files == "other.txt"
    assert evaluated(path, "data=pydoc").datamodule.source._target_ == "tinyformer.data.Pydoc"


def test_a_run_inherits_what_differs_in_the_architecture(file: Any) -> None:
    path = file("attention=gqa", "norm._target_=mine.Norm", "+norm.gain=2", "~norm.bias", "model.dropout=0.5", "seed=5")
    words = [f"init_from={path}", "norm._target_=mine.Norm"]
    inherited = inherit_architecture(words)
    assert inherited[-2:] == words
    assert [*inherited[:-2]] == [
        *("model=nano", "attention=gqa", "position=rotary", "block=pre_norm", "feed_forward=gelu", "norm=layer_norm"),
        *("+norm.gain=2", "~norm.bias"),
    ]
    config, _ = compose_run("train", words)
    assert config.norm == {"_target_": "mine.Norm", "_partial_": True, "eps": 1e-5, "gain": 2}
    with pytest.raises(ValueError, match=r"attention=mha: the checkpoint of init_from=.* has attention=gqa; leave"):
        inherit_architecture([*words, "attention=mha"])


def test_a_readout_for_other_labels_is_another_readout() -> None:
    """Three classes with other names are other classes, though the weights would fit."""
    classes, others = (("task=classification", f"task.labels={labels}") for labels in ("[bad,fair,good]", "[a,b,c]"))
    for overrides in (classes, others, ("task=causal_lm",)):
        config, _ = compose_run("train", overrides)
        assert InitialCheckpoint(stored(*classes), "init_from").has_same_readout(config.task) is (overrides == classes)
