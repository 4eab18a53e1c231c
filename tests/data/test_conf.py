"""The config files: every choice composes, and builds what it names."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

import tinyformer.data

CONF = Path(__file__).parents[2] / "conf"
REQUIRED = {
    "text": ["data.files=[a.txt,b.txt]"],
    "hub": ["data.path=owner/name"],
    "file": ["tokenizer.path=t.json"],
}


def choices(group):
    return sorted(path.stem for path in (CONF / group).glob("*.yaml") if not path.stem.startswith("_"))


def build(group, choice, monkeypatch, *overrides):
    monkeypatch.delenv("TINYFORMER_CACHE", raising=False)
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose(overrides=[f"+{group}={choice}", *REQUIRED.get(choice, []), *overrides])
    return config


@pytest.mark.parametrize("choice", sorted({*choices("data")} - {"induction"}))
def test_every_data_choice_builds_a_source(choice, monkeypatch):
    config = build("data", choice, monkeypatch)
    assert isinstance(instantiate(config.data.source), tinyformer.data.Source)
    shared = build("data", "_shared", monkeypatch).data
    assert set(shared) < set(config.data)
    assert config.data.cache_dir == "data/cache"
    assert config.data.max_tokens is None or isinstance(config.data.max_tokens, int)


@pytest.mark.parametrize("choice", choices("tokenizer"))
def test_every_tokenizer_choice_builds_a_recipe(choice, monkeypatch):
    recipe = instantiate(build("tokenizer", choice, monkeypatch).tokenizer)
    assert isinstance(recipe, tinyformer.data.TokenizerRecipe)


@pytest.mark.parametrize("path", sorted(CONF.glob("data/*.yaml")) + sorted(CONF.glob("tokenizer/*.yaml")), ids=str)
def test_every_choice_describes_itself_in_its_first_line(path):
    first = path.read_text().splitlines()[0]
    assert first.startswith("# ")
    assert first.endswith(".")


def test_induction_is_drawn_and_has_none_of_the_knobs_of_text(monkeypatch):
    config = build("data", "induction", monkeypatch, "+seed=0", "+model.max_seq_len=256")
    assert isinstance(instantiate(config.data.module), tinyformer.data.InductionDataModule)
    text = build("data", "_shared", monkeypatch).data
    assert {*text} & {*config.data} == {"batch_size", "num_workers", "module"}


def test_knobs_reach_the_source(monkeypatch):
    source = instantiate(build("data", "hub", monkeypatch, "data.text_column=body", "data.revision=v1").data.source)
    assert (source.path, source.text_column, source.revision) == ("owner/name", "body", "v1")
