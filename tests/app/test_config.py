"""What config files compute, and whether their values can work."""

import re
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from tinyformer.app.checks import check_types, check_value
from tinyformer.app.config import default_num_kv_heads, describe_axes, register_resolvers

CONF = Path(__file__).parents[2] / "conf"
CHOICES = sorted(CONF.glob("*/[!_]*.yaml"))


class Part:
    """What a config could name."""

    def __init__(
        self,
        *,
        size: int,
        share: float = 0.5,
        name: str | None = None,
        flag: bool = False,
        kind: Literal["a", "b"] = "a",
        pair: tuple[float, float] = (0.9, 0.95),
        scales: float | list[float] = 1.0,
        anything: Any = None,
    ) -> None: ...


class Open:
    """Takes whatever it is given."""

    def __init__(self, size: int = 1, **others: Any) -> None: ...


# The default of grouped queries.


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads"), [(1, 1), (2, 1), (3, 1), (4, 2), (6, 3), (7, 1), (9, 3), (12, 6), (16, 8)]
)
def test_kv_heads_are_the_largest_divisor_up_to_half(num_heads, num_kv_heads):
    assert default_num_kv_heads(num_heads) == num_kv_heads


@pytest.mark.parametrize("num_heads", [0, -4, "abc", None, 2.5], ids=str)
def test_what_is_no_number_of_heads_is_left_for_its_own_check(num_heads):
    assert default_num_kv_heads(num_heads) == num_heads


def test_the_resolver_is_known_to_config_files():
    register_resolvers(CONF)
    assert OmegaConf.create({"heads": 6, "kv": "${default_num_kv_heads:${heads}}"}).kv == 3


# The axes.


@pytest.mark.parametrize("path", CHOICES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_choice_is_described(path):
    lines = describe_axes(CONF).splitlines()
    axis = lines[lines.index(path.parent.name) + 1 :]
    axis = list(takewhile(lambda line: line.startswith(" "), axis))
    (line,) = [line for line in axis if line.split()[0] == path.stem]
    assert "@package" not in line
    if path.parent.name != "experiment":
        first = path.read_text().splitlines()[0]
        assert first.startswith("# ")
        assert line.split(maxsplit=1)[1] == first[2:]
        assert len(first) > 5


def test_axes_name_no_shared_files_and_can_be_picked():
    text = describe_axes(CONF)
    assert "_shared" not in text
    assert [line for line in text.splitlines() if line[0] != " "] == sorted({path.parent.name for path in CHOICES})
    picked = describe_axes(CONF, ["data", "trainer"])
    assert [line for line in picked.splitlines() if line[0] != " "] == ["data", "trainer"]


def test_axes_of_a_folder_of_ones_own(tmp_path):
    (tmp_path / "mask").mkdir()
    (tmp_path / "mask" / "causal.yaml").write_text("# sees the past\na: 1\n")
    (tmp_path / "mask" / "empty.yaml").write_text("")
    (tmp_path / "mask" / "_shared.yaml").write_text("# hidden\n")
    (tmp_path / "mask" / "window.yaml").write_text("# @package _global_\n# sees the last\n")
    (tmp_path / "train.yaml").write_text("# no axis\n")
    lines = [line.split(maxsplit=1) for line in describe_axes(tmp_path).splitlines()]
    assert lines == [["mask"], ["causal", "sees the past"], ["empty"], ["window", "sees the last"]]


# One value.


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("size", 3),
        ("share", 0.5),
        ("share", 1),  # an int is a float
        ("name", None),
        ("name", "x"),
        ("flag", True),
        ("kind", "b"),
        ("scales", 2.0),
        ("scales", [1.0, 2]),
        pytest.param("anything", object(), id="anything-object"),
        ("size", {"_target_": "some.Node"}),  # its own node
    ],
    ids=str,
)
def test_values_that_fit(name, value):
    check_value(Part, name, value, f"part.{name}")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("share", "abc", r"^part.share=abc: should be a valid number; part.share=0.5 works\.$"),
        ("share", None, r"^part.share=null: .*part.share=0.5 works\.$"),
        ("name", 3, r"^part.name=3: should be a valid string"),
        ("flag", "yes", r"^part.flag=yes: should be a valid boolean; part.flag=false works\.$"),
        ("kind", "c", r"^part.kind=c: should be 'a' or 'b'; part.kind=a works\.$"),
        ("scales", ["a"], r"^part.scales=\[a\]: .*valid number.*; part.scales=1.0 works\.$"),
    ],
)
def test_values_that_do_not_fit(name, value, message):
    with pytest.raises(ValueError, match=message):
        check_value(Part, name, value, f"part.{name}")


CHOSEN = {"model": "tiny", "attention": "gqa", "part": "none"}


@pytest.mark.parametrize(
    ("key", "works"),
    [
        ("model.num_heads", "; model.num_heads=6 works"),
        ("model.init_std", "; model.init_std=0.02 works"),
        ("part.x", ""),
    ],
)
def test_without_a_default_the_config_files_give_the_example(key, works):
    message = f"{key}=abc: should be a valid integer{works}."
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        check_value(Part, "size", "abc", key, CHOSEN)


@pytest.mark.parametrize(
    ("name", "hint"),
    [("sizes", " Did you mean part.size?"), ("nmae", " Did you mean part.name?"), ("zzz", "")],
)
def test_an_unknown_argument_is_named(name, hint):
    message = f"part.{name}: Part has no argument {name}.{hint}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        check_value(Part, name, 1, f"part.{name}")


def test_what_takes_anything_is_given_anything():
    check_value(Open, "sizes", 1, "part.sizes")


# A whole config.


def composed(*overrides):
    register_resolvers(CONF)
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), version_base=None):
        return compose("train", overrides=list(overrides))


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["attention=gqa", "position=rotary", "optimizer=muon", "schedule=wsd"],
        ["block.attention_residual.skip=[0,1,1,1]"],
    ],
    ids=["default", "others", "list"],
)
def test_our_configs_fit_our_classes(overrides):
    check_types(composed(*overrides), choices=CHOSEN)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.num_heads=abc", r"^model.num_heads=abc: .*integer; model.num_heads=6 works"),
        ("model.d_model=2.5", r"^model.d_model=2.5: .*integer"),
        ("optimizer.lr=fast", r"^optimizer.lr=fast: .*number; optimizer.lr=0.001 works"),
        ("schedule.warmup_steps=1.5", r"^schedule.warmup_steps=1.5: .*; schedule.warmup_steps=100 works"),
        ("attention.qk_norm=3", r"^attention.qk_norm=3: .*boolean"),
        ("optimizer.betas=[a,b]", r"^optimizer.betas=\[a,b\]: .*number"),
        ("+attention.num_kv_head=2", r"^attention.num_kv_head: .*Did you mean attention.num_kv_heads\?"),
        ("seed=x", r"^seed=x: "),
        ("data.batch_size=many", r"^data.batch_size=many: "),
        ("+norm.epsilon=1", r"^norm.epsilon: LayerNorm has no argument epsilon"),
        ("norm._target_=tinyformer.nn.NoNorm", r"^\S+_target_=tinyformer.nn.NoNorm: cannot be imported"),
    ],
)
def test_mistakes_are_told_where_the_user_writes_them(override, message):
    with pytest.raises(ValueError, match=message):
        check_types(composed(override), choices=CHOSEN | {"optimizer": "adamw", "schedule": "cosine"})
