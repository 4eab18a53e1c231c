"""Arguments of classes become the keys that the user sets, and values what the user would type."""

from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.utils import instantiate
from omegaconf import OmegaConf

from tinyformer.app.errors import ConfigError, config_keys
from tinyformer.app.keys import MAX_LENGTH, format_value, key_of, key_of_argument
from tinyformer.errors import ArgumentError, argument_path

CONFIG = OmegaConf.create(
    {
        "model": {"num_heads": 3, "num_layers": 2, "width": "${default_num_kv_heads:4}"},
        "attention": {
            "_target_": "app.test_keys.Attention",
            "_partial_": True,
            "num_heads": "${model.num_heads}",
            "kv": "${x:${model.num_heads}}",
        },
        "block": {"_target_": "app.test_keys.Block", "_partial_": True, "attention": "${attention}"},
        "network": {
            "encoder": {
                "_target_": "app.test_keys.Encoder",
                "block": "${block}",
                "num_layers": "${model.num_layers}",
            }
        },
        "data": {"files": "a.txt", "source": {"files": "${data.files}"}, "module": {"source": "${data.source}"}},
        "task": {"datamodule": "${data.module}"},
        "datamodule": "${task.datamodule}",
        "seed": 0,
    }
)
WRITTEN = OmegaConf.to_container(CONFIG, resolve=False)


class Attention:
    """Refuses every number of heads."""

    def __init__(self, *, num_heads, num_layers, kv=None):
        reason = "must divide `kv`, and `num_layers`, and `seed`"
        raise ArgumentError("num_heads", num_heads, reason, {"num_heads": [1, None], "kv": "a, b"})


class Block:
    """Has an attention."""

    def __init__(self, *, attention, num_layers):
        with argument_path("attention"):
            attention(num_layers=num_layers)


class Encoder:
    """Has a block."""

    def __init__(self, *, block, num_layers):
        with argument_path("block"):
            block(num_layers=num_layers)


@pytest.mark.parametrize(
    ("path", "key"),
    [
        ("network.encoder.block.attention.num_heads", "model.num_heads"),
        ("network.encoder.block.attention.kv", "attention.kv"),
        ("network.encoder.block.attention.num_layers", "model.num_layers"),  # set by the encoder
        ("network.encoder.block.attention.seed", "seed"),  # a name that no node around it sets: no key
        ("datamodule.source.files", "data.files"),
        ("datamodule.tokens", "tokens"),
        ("model.num_heads", "model.num_heads"),
        ("seed", "seed"),
        ("path", "path"),
    ],
)
def test_an_argument_is_named_by_the_key_that_sets_it(path, key):
    assert key_of_argument(WRITTEN, path.split(".")) == key


@pytest.mark.parametrize("path", ["network.decoder", "seed.x", "model.depth.x"])
def test_a_node_that_the_config_lacks_has_no_key(path):
    with pytest.raises(KeyError):
        key_of(WRITTEN, path)


def test_an_error_deep_inside_a_model_is_told_in_keys():
    told = (
        "model.num_heads=3: must divide attention.kv, and model.num_layers, and seed; "
        "model.num_heads=[1,null] attention.kv='a, b' works."
    )
    OmegaConf.register_new_resolver("x", lambda value: value, replace=True)
    with pytest.raises(ConfigError) as caught, config_keys(CONFIG):
        instantiate(CONFIG.network, _convert_="all")
    assert str(caught.value) == told
    found = pytest.raises(ConfigError, match=r"^data\.files=none\.txt: does not exist\.$")
    with found, config_keys(CONFIG), argument_path("datamodule"):
        raise ArgumentError("source.files", Path("none.txt"), "does not exist")


def test_other_errors_pass():
    with pytest.raises(ValueError, match=r"^mine$"), config_keys(CONFIG):
        raise ValueError("mine")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (True, "true"),
        (None, "null"),
        (0.1, "0.1"),
        ([16, 16, None], "[16,16,null]"),
        (((0, 1), (1, 0)), "[[0,1],[1,0]]"),
        ("flash", "flash"),
        ("outputs/2026-01-31/last.ckpt", "outputs/2026-01-31/last.ckpt"),
        ("two words", "two words"),
        ("a, b", "'a, b'"),
        ("it's", r"'it\'s'"),
        ("", "''"),
        ("true", "'true'"),
        ("1e-3", "'1e-3'"),
        ("12", "'12'"),
        ({"a": [1]}, "{a:[1]}"),
    ],
    ids=str,
)
def test_a_value_is_shown_as_hydra_reads_it(value, text):
    assert format_value(value) == text
    (override,) = OverridesParser.create().parse_overrides([f"key={text}"])
    read = override.value()
    assert read == ([list(row) for row in value] if isinstance(value, tuple) else value)


def test_a_long_value_is_cut_and_an_object_named_by_its_class():
    assert format_value("x" * 500) == "x" * MAX_LENGTH + "…"
    assert format_value(Encoder) == "type"
