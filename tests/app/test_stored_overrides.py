"""`.hydra/overrides.yaml` of a run folder: overrides that a file brings are data, and written anew."""

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from tinyformer.app.stored_overrides import NotDataError, admit_override, num_values

DATA = """
    attention=gqa|model.num_layers=3|attention.window=[16,16,null]|experiment=sst2_cpu|callbacks=default|logger=null
    data.files='my book, $5.txt'|position.relative._target_=tinyformer.nn.ALiBi|+callbacks.averaged.decay=0.9
    +callbacks.averaged={_target_:lightning.pytorch.callbacks.EMAWeightAveraging,decay:0.9}|optimizer.lr=0.001
    ~callbacks.attention|~seed=0|task.labels=[a,b]|attention.score=additive|attention.score=tinyformer.nn.ScaledDotScore
    data.files=''|data.files=C:/books|callbacks.finite={action:skip,max_skipped:3}|trainer.max_time='00:00:30:00'
"""


COUNTS = {
    "seed=1,2": 2,
    "seed=range(3)": 3,
    "seed=range(10,0,-3)": 4,
    "optimizer.lr=range(0,1,0.25)": 4,
    "seed=shuffle(range(1,1000000000000))": 10**12 - 1,
    "seed=range(3,1)": 0,
    "attention=glob(m*)": 3,
    "attention=glob([[a]])": 0,
    "seed=1": 1,
}


@pytest.mark.parametrize(("entry", "number"), COUNTS.items())
def test_values_are_counted_without_being_made(entry: str, number: int) -> None:
    assert num_values(entry) == number


def words(table: str) -> list[str]:
    return [word.strip() for line in table.strip().splitlines() for word in line.split("|")]


@pytest.mark.parametrize("entry", words(DATA))
def test_what_a_run_stores_is_taken(entry: str) -> None:
    parse = OverridesParser.create().parse_override
    ours, theirs = parse(admit_override(entry)), parse(entry)
    assert (ours.type, ours.key_or_group, ours.value()) == (theirs.type, theirs.key_or_group, theirs.value())


HOSTILE = {
    "calls": """
        norm._target_=os.system|norm._target_=3|norm._target_=[os.system]
        attention.score=mine.Score|callbacks.finite._target_=tinyformer.checkpoint.torch.load
        callbacks.finite._target_=tinyformer.training.AttentionTelemetry|data.module._target_=tinyformer.nn.ALiBi
        logger._target_=tinyformer.training.AdamW
    """,
    "is not admitted: the value": """
        seed='${oc.create:{_target_:os.system}}'|seed='${oc.env:HOME}'|seed='${a}${b}'|model.d_ff='${model.d_model}'
        attention.score='${evil}'|data.files=[['${now:%Y}']]|callbacks.finite.action=['${x}']|data.files=[{a:b}]
        data.num_workers=1000|trainer.devices=1000|model.d_model=1e30|optimizer.lr=inf|seed=-10000000000000000000000
    """,
    "sets": """
        +callbacks.e={_target_:torch.utils.collect_env.run,_args_:[ls]}|+callbacks.b=[{c:{_target_:os.system}}]
        callbacks.finite._args_=[1]|network._args_=[1]|+trainer.plugins=[mine]|++trainer.default_root_dir=x
        +foo=../../evil|++foo=x|foo=../evil|+model/foo=../evil|model/foo=x|+foo.bar=1|~model/foo|model.defaults=[x]
        ++resume=x|+Norm=../../evil|+NORM/x=y|norm.Eps=1
    """,
    "changes Hydra": """
        hydra.run.dir=x|hydra/launcher=joblib|+hydra.callbacks.e._target_=os.system|hydra.searchpath=[pkg://e]
        hydra={run:{dir:x}}|+Hydra/launcher=x|+HYDRA.run.dir=x
    """,
    "moves a config file": "data@task.data=text",
    "makes a folder": "data.cache_dir=conf/foo|data.source={cache_dir:x}|data.module.cache_dir=x",
    "sends the run": "logger.entity=theirs|++logger.entity=theirs",
    "chooses a file": "attention=../../evil|attention=_shared|attention=nope|attention=[a]|norm={_target_:os.system}",
    "has several values": "seed=1,2|seed=range(3)|attention=mha,gqa",
    "is not an override": "seed|data..files=x|seed=[|--multirun|seed={a",
}


@pytest.mark.parametrize(("said", "entry"), [(said, word) for said, table in HOSTILE.items() for word in words(table)])
def test_what_is_no_data_is_refused(said: str, entry: str) -> None:
    with pytest.raises(NotDataError, match=f"^{said}"):
        admit_override(entry)


SWEPT = {
    "seed=1,2": "seed=1,2",
    "seed=range(3)": "seed=0,1,2",
    "attention=mha,gqa": "attention=mha,gqa",
    "attention=glob(m*)": "attention=glob([m*],exclude=[])",
    "attention=glob([m*,g?a],exclude=mqa)": "attention=glob([m*,g?a],exclude=[mqa])",
    "+model.pruned_heads=[[0]],null": "+model.pruned_heads=[[0]],null",
    "task.labels=[a,'b, c'],null": "task.labels=[a,'b, c'],null",
    "data.files='a,b',c": "data.files='a,b',c",
}


@pytest.mark.parametrize(("entry", "written"), SWEPT.items())
def test_a_sweep_keeps_its_jobs(entry: str, written: str) -> None:
    assert admit_override(entry, in_sweep=True) == written


HOSTILE_SWEEPS = {
    "calls": "norm._target_=tinyformer.nn.RMSNorm,os.system|attention.score=dot,mine.Score",
    "sets": "+foo=1,2",
    "is not admitted: the value": "seed=1,'${oc.env:HOME}'",
    "chooses a file": "attention=mha,../evil",
    "shuffles its values": "seed=shuffle(1,2)|seed=shuffle(range(1,1000000000000))",
    "makes more than": "seed=range(0,1000000000000)",
    "is no list": """
        seed=range(0,nan)|seed=range(1,10,0)|model.d_model=glob(*)|model.d_model=interval(1,2)
        attention=glob(../*)|attention=glob('a b')|attention=glob(x*)|seed=range(3,1)|attention=glob([[a]])
    """,
    "changes Hydra": "hydra.run.dir=a,b|hydra/launcher=joblib,basic",
}


@pytest.mark.parametrize(
    ("said", "entry"), [(said, word) for said, table in HOSTILE_SWEEPS.items() for word in words(table)]
)
def test_each_value_of_a_sweep_is_checked(said: str, entry: str) -> None:
    with pytest.raises(NotDataError, match=f"^{said}"):
        admit_override(entry, in_sweep=True)
