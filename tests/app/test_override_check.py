"""`.hydra/overrides.yaml` of a run folder: overrides that a file brings are data."""

import pytest

from tinyformer.app.override_check import problem_of_override

DATA = """
    attention=gqa|model.num_layers=3|attention.window=[16,16,null]|experiment=sst2_cpu|callbacks=default|logger=null
    model.d_ff='${model.d_model}'|data.files='my book, $5.txt'|position.relative._target_=tinyformer.nn.ALiBi
    +callbacks.mine._target_=tinyformer.training.AttentionTelemetry
    +callbacks.ema={_target_:lightning.pytorch.callbacks.EMAWeightAveraging,decay:0.9}
    ~callbacks.attention|task.labels=[a,b]|attention.score=additive|optimizer._partial_=true
"""


def words(table: str) -> list[str]:
    return [word.strip() for line in table.strip().splitlines() for word in line.split("|")]


@pytest.mark.parametrize("entry", words(DATA))
def test_what_a_run_stores_is_taken(entry: str) -> None:
    assert problem_of_override(entry) is None


HOSTILE = {
    "calls": """
        +callbacks.e={_target_:torch.utils.collect_env.run,_args_:[ls]}|norm._target_=os.system
        +callbacks.b=[{c:{_target_:os.system}}]|+callbacks.e={_target_:[os.system]}|attention.score=mine.Score
        +callbacks.e._target_=tinyformer.checkpoint.torch.load|+callbacks.c._target_=tinyformer.training.callbacks.Checkpoints|+callbacks.e._target_=lightning.pytorch.Trainer|+callbacks.e._target_=3
    """,
    "contains _args_": "+callbacks.e={_args_:[1]}|network._args_=[1]",
    "computes": """
        attention.score='${evil}'|seed='${oc.create:{_target_:os.system}}'|seed='${oc.env:HOME}'|seed='${a}${b}'|seed='${${a}}'|+callbacks.a=[{b:'${now:%Y}'}]
    """,
    "changes the program": """
        hydra.run.dir=x|hydra/launcher=joblib|+hydra.callbacks.e._target_=os.system|hydra.searchpath=[pkg://e]
        hydra={run:{dir:x}}|data@task.data=text|+Norm=../../evil|+NORM/x=y|+Hydra/launcher=x|+HYDRA.run.dir=x
    """,
    "sets": "+foo=../../evil|++foo=x|foo=../evil|+model/foo=../evil|model/foo=x|+foo.bar=1|~model/foo",
    "makes a folder": "data.cache_dir=conf/foo|data.source={cache_dir:x}|datamodule.cache_dir=x",
    "sends the run": "logger.entity=theirs|++logger.entity=theirs",
    "chooses a file": "attention=../../evil|attention=_shared|attention=nope|experiment=[a,b]|attention=3",
    "has several values": "seed=1,2|seed=range(3)|attention=mha,gqa",
    "is no override": "seed|=3|seed=[|--multirun|seed={a",
}


@pytest.mark.parametrize(("said", "entry"), [(said, word) for said, table in HOSTILE.items() for word in words(table)])
def test_what_is_no_data_is_refused(said: str, entry: str) -> None:
    assert (problem_of_override(entry) or "").startswith(said), problem_of_override(entry)


SWEPT = {
    "seed=1,2|seed=range(3)|attention=mha,gqa|attention=glob(m*)|model.pruned_heads=[[0]],null": None,
    "norm._target_=tinyformer.nn.RMSNorm,os.system|attention.score=dot,mine.Score": "calls",
    "seed=1,'${oc.env:HOME}'": "computes",
    "attention=mha,../evil": "chooses a file",
    "seed=shuffle(1,2)": "draws its values anew",
    "seed=range(0,1000000000000)": "makes more than",
    "model.d_model=glob(*)|model.d_model=interval(1,2)": "is no list",
    "hydra.run.dir=a,b|hydra/launcher=joblib,basic": "changes the program",
}


@pytest.mark.parametrize(("said", "entry"), [(said, word) for table, said in SWEPT.items() for word in words(table)])
def test_each_value_of_a_sweep_is_checked(said: str | None, entry: str) -> None:
    problem = problem_of_override(entry, in_sweep=True)
    assert problem is None if said is None else (problem or "").startswith(said), problem
