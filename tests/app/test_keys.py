"""Arguments of classes become the keys that the user sets, and values what the user would type."""

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from tinyformer.app.keys import format_value, key_of_argument

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
        "network": {"encoder": "${encoder}"},
        "encoder": {"_target_": "app.test_keys.Encoder", "block": "${block}", "num_layers": "${model.num_layers}"},
        "data": {"files": "a.txt", "source": {"files": "${data.files}"}, "module": {"source": "${data.source}"}},
        "task": {"datamodule": "${data.module}"},
        "datamodule": "${task.datamodule}",
        "seed": 0,
    }
)
WRITTEN = OmegaConf.to_container(CONFIG, resolve=False)


@pytest.mark.parametrize(
    ("path", "key"),
    [
        ("network.encoder.block.attention.num_heads", "model.num_heads"),
        ("network.encoder.block.attention.kv", "attention.kv"),
        ("network.encoder.block.attention.num_layers", "model.num_layers"),  # set by the encoder
        ("network.encoder.block.attention.seed", "seed"),  # a name that no node around it sets: no key
        ("datamodule.source.files", "data.files"),
        ("seed", "seed"),
    ],
)
def test_an_argument_is_named_by_the_key_that_sets_it(path, key):
    assert key_of_argument(WRITTEN, path.split(".")) == key


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (True, "true"),
        (None, "null"),
        ([16, 16, None], "[16,16,null]"),
        (((0, 1), (1, 0)), "[[0,1],[1,0]]"),
        ("outputs/2026-01-31/last.ckpt", "outputs/2026-01-31/last.ckpt"),
        ("a, b", "'a, b'"),
        ("it's", r"'it\'s'"),
        ("", "''"),
        ("true", "'true'"),
        ("1e-3", "'1e-3'"),
        ("9.", "'9.'"),
        ("-nan", "'-nan'"),
        ("é", "'é'"),
        ("\\\n", "'\\\n'"),
        ({"a": [1]}, "{a:[1]}"),
    ],
    ids=str,
)
def test_a_value_is_shown_as_hydra_reads_it(value, text):
    assert format_value(value) == text
    (override,) = OverridesParser.create().parse_overrides([f"key={text}"])
    read = override.value()
    assert read == ([list(row) for row in value] if isinstance(value, tuple) else value)
