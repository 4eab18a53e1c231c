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
    config = build("data", "induction", monkeypatch, "+seed=0", "+model.max_seq_len=256", "+task.masking=null")
    assert isinstance(instantiate(config.data.module), tinyformer.data.InductionDataModule)
    text = build("data", "_shared", monkeypatch).data
    assert {*text} & {*config.data} == {"batch_size", "num_workers", "module", "examples"}
    assert config.data.examples is None


LABELLED = {"docstrings": [], "sst2": [], "imdb": [], "ag_news": [], "text": ["data.label_column=label"]}


@pytest.mark.parametrize("choice", LABELLED)
def test_examples_with_labels_are_built_beside_the_text(choice, monkeypatch):
    config = build(
        "data",
        choice,
        monkeypatch,
        "+tokenizer=byte",
        "+seed=3",
        "+model.max_seq_len=64",
        "+task.labels=null",
        "+task.masking=null",
        "data.token_dropout=0.3",
        *LABELLED[choice],
    )
    examples = instantiate(config.data.examples, _convert_="all")
    assert isinstance(examples, tinyformer.data.LabelledDataModule)
    assert isinstance(examples.source, tinyformer.data.LabelledSource)
    assert (examples.seq_len, examples.batch_size, examples.seed) == (64, config.data.batch_size, 3)
    assert isinstance(instantiate(config.data.module, _convert_="all"), tinyformer.data.TextDataModule)


def test_sst2_reads_files_in_place_of_the_hub(monkeypatch, tmp_path):
    (tmp_path / "train.tsv").write_text('"quoted" or not\t1\nflat\t0\n')
    (tmp_path / "validation.tsv").write_text("dull\t0\n")
    config = build("data", "sst2", monkeypatch, f"data.files={tmp_path}")
    source = instantiate(config.data.source, _convert_="all")
    assert source.name == "sst2"
    examples = {name: rows.to_dict() for name, rows in source.load_examples().items()}
    assert examples == {
        "train": {"text": ['"quoted" or not', "flat"], "label": ["1", "0"]},
        "validation": {"text": ["dull"], "label": ["0"]},
    }


def test_knobs_reach_the_source(monkeypatch):
    source = instantiate(build("data", "hub", monkeypatch, "data.text_column=body", "data.revision=v1").data.source)
    assert (source.path, source.text_columns, source.revision) == ("owner/name", ["body"], "v1")
