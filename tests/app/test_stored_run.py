"""`checkpoint=FILE`: the stored config is the ground of an evaluation's."""

from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from tinyformer.app.config import register_resolvers
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
        contents = {"config": config, "tokenizer": "{}", "facts": {}}
        torch.save({"state_dict": {}, "global_step": 1, KEY: contents}, tmp_path / name)
        return tmp_path / name

    return write


def evaluated(path, *overrides):
    arguments = [f"checkpoint={path}", *overrides]
    offer_stored_run(arguments)
    return composed("evaluate", *arguments)


def test_the_runs_choices_are_kept(store):
    config = evaluated(store("attention=gqa", "model=tiny", "model.num_layers=3", "optimizer=muon", "seed=5"))
    assert config.model.num_layers == 3
    assert config.attention.num_kv_heads == 3
    assert config.network.encoder.block.attention.num_heads == 6
    assert config.seed == 5


def test_an_override_acts_on_what_depends_on_it(store):
    config = evaluated(store("attention.backend=flash"), "attention.backend=eager", "model.d_model=64")
    assert config.network.encoder.block.attention.backend == "eager"
    assert config.network.encoder.d_model == config.network.encoder.block.attention.d_model == 64


def test_a_value_that_is_no_group_can_be_another(store):
    assert evaluated(store("seed=5"), "seed=6").seed == 6


def test_an_evaluation_has_its_own_trainer_and_prompt(store):
    run = store("trainer.max_steps=7", "trainer=cpu", "generate.prompt=once", "logger=wandb", "resume=null")
    config = evaluated(run)
    assert config.trainer.accelerator == "auto"
    assert config.generate.prompt is None
    assert config.logger == {}
    assert "resume" not in config


def test_other_data_replace_the_runs_whole(store):
    config = evaluated(store("data=hub", "data.path=owner/name"), "data=text", "data.files=x.txt")
    assert config.data.source._target_ == "tinyformer.data.TextFiles"
    assert "path" not in config.data
    assert config.datamodule.source.files == "x.txt"


def test_without_a_checkpoint_one_is_asked_for():
    with pytest.raises(ValueError, match=r"checkpoint is needed, such as checkpoint=outputs/"):
        offer_stored_run(["data=text"])
    with pytest.raises(ValueError, match=r"^chekpoint: there is no such key\. Did you mean checkpoint\?$"):
        offer_stored_run(["chekpoint=last.ckpt"])


def test_help_needs_no_checkpoint():
    assert offer_stored_run(["--help"]) is None


def test_a_missing_checkpoint_is_told(tmp_path):
    with pytest.raises(ValueError, match=r"none.ckpt'?: does not exist"):
        offer_stored_run([f"checkpoint={tmp_path / 'none.ckpt'}"])


@pytest.mark.parametrize("quote", ["'", '"'])
def test_a_path_in_quotes_is_found(store, quote):
    path = store(name="my run, last.ckpt")
    arguments = [f"checkpoint={quote}{path}{quote}"]
    assert offer_stored_run(arguments).path == path


# A stored config is data.


def sets(path, value):
    *parts, last = path.split(".")

    def change(config):
        for part in parts:
            config = config[part]
        config[last] = value

    return change


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("norm._target_", "os.system"),
        ("attention.score", "os.system"),
        ("tokenizer", {"_target_": "subprocess.run", "args": ["true"]}),
        ("tokenizer", "${oc.create:{_target_:subprocess.run,args:[true]}}"),
        ("attention.ablated_heads", [[{"_target_": "os.system"}]]),
    ],
)
def test_a_target_that_is_not_ours_is_refused(store, path, value):
    with pytest.raises(ValueError, match=r"checkpoint=\S+: (would call|contains) "):
        offer_stored_run([f"checkpoint={store(change=sets(path, value))}"])


def test_a_target_that_the_user_names_is_taken(store):
    path = store(change=sets("norm._target_", "torch.nn.LayerNorm"))
    with pytest.raises(ValueError, match=r"add norm\._target_=torch\.nn\.LayerNorm"):
        offer_stored_run([f"checkpoint={path}"])
    assert evaluated(path, "norm._target_=torch.nn.LayerNorm").norm._target_ == "torch.nn.LayerNorm"


def test_what_an_evaluation_does_not_use_needs_no_trust(store):
    path = store(change=sets("callbacks.mine", {"_target_": "somebody.Callback"}))
    assert "mine" not in evaluated(path).callbacks
