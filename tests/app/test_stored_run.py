"""`checkpoint=FILE`: the stored config is the ground of an evaluation's."""

from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from tinyformer.app.config import register_resolvers
from tinyformer.app.stored_config import describe_config
from tinyformer.app.stored_run import offer_stored_run
from tinyformer.checkpoint import KEY

CONF = Path(__file__).parents[2] / "conf"


def composed(name, *overrides):
    register_resolvers(CONF)
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), version_base=None):
        return compose(name, overrides=list(overrides))


@pytest.fixture
def store(tmp_path):
    """Writes a checkpoint of a run that was started with these overrides."""

    def write(*overrides, change=lambda config: None, name="last.ckpt"):
        config = OmegaConf.to_container(composed("train", *overrides), resolve=False)
        change(config)
        contents = {**describe_config(config), "tokenizer": "{}", "facts": {}}
        model, layer = config["model"], "network.encoder.layers.{}.norm.weight"
        state = {layer.format(index): torch.ones(1) for index in range(model["num_layers"])}
        state["network.encoder.token_embedding.weight"] = torch.ones(1, model["d_model"])
        torch.save({"state_dict": state, "global_step": 1, KEY: contents}, tmp_path / name)
        return tmp_path / name

    return write


def evaluated(path, *overrides):
    arguments = [f"checkpoint={path}", *overrides]
    offer_stored_run(arguments)
    return composed("evaluate", *arguments)


def test_the_runs_choices_are_kept(store):
    path = store("attention=gqa", "model=tiny", "model.num_layers=3", "optimizer=muon", "seed=5")
    config = evaluated(path)
    assert config.model.num_layers == 3
    assert config.attention.num_kv_heads == 3
    assert config.network.encoder.block.attention.num_heads == 6
    assert config.seed == 5
    assert evaluated(path, "seed=6").seed == 6


def test_an_override_acts_on_what_depends_on_it(store):
    config = evaluated(store("attention.backend=flash"), "attention.backend=eager", "model.d_model=64")
    assert config.network.encoder.block.attention.backend == "eager"
    assert config.network.encoder.d_model == config.network.encoder.block.attention.d_model == 64


def test_an_evaluation_has_its_own_trainer_and_prompt(store):
    run = store("trainer.max_steps=7", "trainer=cpu", "generate.prompt=once", "logger=wandb", "resume=null")
    config = evaluated(run)
    assert config.trainer.accelerator == "auto"
    assert config.generate.prompt is None
    assert config.logger == {}
    assert "resume" not in config


def test_without_a_checkpoint_one_is_asked_for():
    with pytest.raises(ValueError, match=r"checkpoint is needed, such as checkpoint=outputs/"):
        offer_stored_run(["data=text"])
    with pytest.raises(ValueError, match=r"^chekpoint: there is no such key\. Did you mean checkpoint\?$"):
        offer_stored_run(["chekpoint=last.ckpt"])


def test_a_path_in_quotes_is_found(store):
    path = store(name="my run, last.ckpt")
    for quote in ("'", '"'):
        assert offer_stored_run([f"checkpoint={quote}{path}{quote}"]).path == path


def test_a_target_that_the_user_names_is_taken(store):
    path = store(change=lambda config: config["norm"].update(_target_="torch.nn.LayerNorm"))
    with pytest.raises(ValueError, match=r"add norm\._target_=torch\.nn\.LayerNorm"):
        offer_stored_run([f"checkpoint={path}"])
    assert evaluated(path, "norm._target_=torch.nn.LayerNorm").norm._target_ == "torch.nn.LayerNorm"


def test_what_an_evaluation_does_not_use_needs_no_trust(store):
    path = store(change=lambda config: config["callbacks"].update(mine={"_target_": "somebody.Callback"}))
    assert "mine" not in evaluated(path).callbacks


def test_the_path_of_a_run_is_asked_for_and_not_followed(store):
    path = store("data=text", "data.files='my book.txt'")
    with pytest.raises(
        ValueError, match=r"its run read data\.files='my book\.txt', .*; add data\.files='my book\.txt',"
    ):
        offer_stored_run([f"checkpoint={path}"])
    assert evaluated(path, "data.files=other.txt").datamodule.source.files == "other.txt"
    assert evaluated(path, "data=pydoc").datamodule.source._target_ == "tinyformer.data.Pydoc"
