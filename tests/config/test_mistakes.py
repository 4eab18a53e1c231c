"""Mistakes in a config are told by the keys that the user sets, before anything is read or computed; bugs are not."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from omegaconf import OmegaConf

from tinyformer.config.checks import check_early
from tinyformer.config.conf import values_of_keys
from tinyformer.config.errors import BUG, USER_MISTAKE, config_keys, describe, report
from tinyformer.config.launch import compose_run
from tinyformer.data import ByteTokenizer
from tinyformer.errors import argument_path
from tinyformer.nn import AttentionMask
from tinyformer.run.data import make_task
from tinyformer.run.network import make_network
from tinyformer.run.settings import Options, check_config, make_generation, make_settings
from tinyformer.run.trainer import make_callbacks, training_trainer

SMALL = ("model.num_layers=2", "model.num_heads=2", "model.d_model=16", "model.max_seq_len=16", "model.vocab_size=10")


CURE = re.compile(r"""((?:[\w.]+=(?:'[^']*'|"[^"]*"|[^\s;'"])+ )+)works\.""")
"""The overrides that a sentence says would work."""


def suggested(told: str, command: str) -> Iterator[str]:
    """The commands that a sentence suggests in place of the one that it is about."""
    key, _, value = told.partition(": ")[0].lstrip("+-~").partition("=")
    wrong = value or key
    for cure in CURE.findall(told) + re.findall(r" is needed, such as (\S+)\.$", told):
        yield re.sub(rf"\b{re.escape(key)}=\S+$", "", command) + f" {cure}"
    for cure in re.findall(r"VALUE, such as (\S+?)[.,](?: |$)", told):
        yield re.sub(rf"{wrong}( \w\S*)?$", cure, command)
    yield from re.findall(r"as in ('.*')\.$", told)
    for words in re.findall(r"leave (\S+) out", told):
        yield command.replace(words, "")
    for name in (name for names in re.findall(r"Did you mean (.*?)\?", told) for name in names.split(" or ")):
        if wrong in command:
            meant = name + "=" * (name in values_of_keys())
            yield re.sub(rf"[+-]*{wrong}(?: ?=| (?=\d))?", meant, command.removeprefix("--multirun "))
        else:  # in a mapping, the last part of the key
            yield command.replace(wrong.rpartition(".")[2], name.rpartition(".")[2])


def mistake_in(*overrides: str) -> str:
    """The sentence about a config: what the steps of a run before its data say, and its data's constructor."""
    try:
        config, _ = compose_run("train", [*SMALL, *overrides])
        with config_keys(config):
            check_early(config)
            check_config(config)
            values = OmegaConf.to_container(config, resolve=True)
            generation = make_generation(values["generate"])
            training_trainer(make_settings(values["trainer"], Options.of(values)), Path(), [], [])
            make_callbacks(config.callbacks)
            instantiate(config.optimizer, _convert_="all"), instantiate(config.schedule)
            with torch.device("meta"):
                network = make_network(config, None)
            with argument_path("network"):
                network.resolve_backends("cpu", torch.float32, AttentionMask(causal=True), True)
            data = instantiate(config.datamodule, _convert_="all")
            data.tokenizer = ByteTokenizer().build([])
            make_task(config, data, generation)
    except Exception as error:
        return describe(error, "train") or f"a bug: {error!r}"
    return "none"


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ("seed=0", "none"),
        ("model.num_heads=abc", "model.num_heads=abc: should be a valid integer, such as model.num_heads=12."),
        ("model.dropout=null", "model.dropout=null: should be a valid number, such as model.dropout=0.0."),
        ("+callbacks.attention.thresholds.sink=0.5", "callbacks.attention.thresholds=sink: must be one of previous*"),
        ("trainer.precision=half", "trainer.precision=half: *bf16-mixed*"),
        ("+trainer.max_stepz=1", "trainer.max_stepz: Trainer has no argument max_stepz. Did you mean trainer.max_st*"),
        ("trainer.max_steps=0", "trainer.max_steps=0: must be at least 1, *; trainer.max_steps=2000 works."),
        # Told by Hydra, in words of its own.
        ("attention=gqaa", "attention=gqaa: there is no such choice. Did you mean gqa? Choices: by_layer, conv, *"),
        ("num_heads=4", "num_heads: there is no such key. Did you mean model.num_heads*"),
        ("block.attention_residual.learnt=true", "*: there is no such key. Did you mean *_residual.learned?"),
        ("data.files=a.txt", "data.files: there is no such key. It belongs to data=squad or data=squad_v2 or *"),
        ("--epochs 5", "--epochs: is no option; *. Did you mean trainer.max_epochs or trainer.max_steps?"),
        ("--multirun --lr=0.1", "--lr: is no option; values are set by KEY=VALUE. Did you mean optimizer.lr?"),
        ("seed=0 attention gqa", "attention: is no KEY=VALUE, such as attention=gqa."),
        ("generate.prompt=A cat", "cat: is no KEY=VALUE, and a text *quoted, as in 'generate.prompt=A cat'."),
        ("qqqqq=1", "qqqqq: there is no such key. --help lists the axes.*"),
        ("model.d_ff=1,2", "model.d_ff=1,2: several values need -m, which makes a run of each value."),
        ("analysis=heads", "analysis: there is no such key here; evaluate.py has it."),
        ("~network", "~network: a run needs this axis; leave ~network out, or choose, as in network=*"),
        # Raised deep inside of the network, told by the key that the user sets.
        ("model.num_heads=3", "model.num_heads=3: must divide model.d_model=16; model.num_heads=* works."),
        ("attention.backend=flash attention.dropout=0.1", "attention.backend=flash: *attention.backend=* works."),
        ("attention.ablated_heads=[[2,0]]", "attention.ablated_heads=*[2,0]*"),
        ("data=text data.files=???", "data.files is needed, such as data.files=book.txt."),
        ("attention=[mha,foo]", "attention.pattern=[mha,foo]: must be a list of the kinds mha, *=[mha] works."),
        ("attention=[]", "attention.pattern=[]: must have a value for at least one layer; *=[mha] works."),
        ("attention=[mha,mla] attention.kinds.mla.kv_rank=0", "attention.kinds.mla.kv_rank=0: must be at least 1; *"),
        ("attention=[mha,lstm] attention.window=abc", "attention.window=abc: should be a valid integer*"),
        ("position=[learned,none]", "position=[learned,none]: learned is the same for all layers, *=learned works."),
        (
            "norm=[layer_norm,none]",
            "norm=[layer_norm,none]: only attention and position*=layer_norm works.",
        ),
        (
            "position.relative.base=[]",
            "position.relative.base=[]: must have a value*; *=10000.0 works.",
        ),
        ("attention.value_residual=2", "*value_residual=2*: must be from 0 to 1; attention.value_residual=0.5 works."),
        (
            "attention=mla attention.value_embedding=true",
            "attention.value_embedding=true: mixes values; *; attention.value_embedding=false works.",
        ),
        ("attention=lstm model.pruned_heads=[[0,1]]", "model.pruned_heads=[[0,1]]: *LSTM has no heads; *=[] works."),
        ("generate.top_k=0", "generate.top_k=0: must be *; generate.top_k=* works."),
        ("generate.prompt_file=none.txt", "generate.prompt_file=none.txt: cannot be read as UTF-8 text *"),
        # What Lightning, torch or Hydra would refuse later, in words of their own.
        ("trainer.strategy=abc", "trainer: You selected an invalid strategy name: `strategy='abc'`*; `--cfg job*"),
        ("trainer.num_nodes=2", "trainer.num_nodes=2: needs a process on each node, *; trainer.num_nodes=1 works."),
        ("+trainer.fast_dev_run=true", "trainer.fast_dev_run=true: is not an argument that a run accepts; remove it."),
        ("trainer.val_check_interval=0.5", "none"),
        ("trainer.val_check_interval=0", "trainer.val_check_interval=0: must be above 0*=100 works."),
        ("task=masked_lm task.masking=null", "task.masking=null: MaskedLM predicts masked tokens; choose task=mask*"),
        ("norm._target_=tinyformer.nn.NoNorm", "*_target_=tinyformer.nn.NoNorm: cannot be imported from here; *"),
    ],
)
def test_a_mistake_is_reported_by_its_key(overrides: str, sentence: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    told = mistake_in(*overrides.split())
    assert re.fullmatch(".*".join(map(re.escape, sentence.split("*"))), told), told
    (tmp_path / "book.txt").write_text("a book", encoding="utf-8")
    for command in suggested(told, overrides):
        assert re.fullmatch("none|init_from=.* does not exist; .*", mistake_in(*shlex.split(command))), (told, command)


def test_a_bug_of_a_library_is_no_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InstantiationException) as of_a_library:
        instantiate({"_target_": "decimal.Decimal", "value": "abc"})
    assert describe(of_a_library.value, "train") is None
    assert report(MisconfigurationException("1\n2"), "train") == USER_MISTAKE == 2
    assert capsys.readouterr() == ("", "Error: 1\n2\n")
    assert report(KeyError("x"), "train") == BUG
    assert capsys.readouterr().err == "KeyError: 'x'\n"
