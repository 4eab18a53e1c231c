"""What config files compute, and whether their values can work."""

import re
from typing import Any, Literal

import pytest

from tinyformer.app.checks import check_types, check_value
from tinyformer.app.config import config_dir, default_num_kv_heads, describe_axes
from tinyformer.app.errors import ConfigError
from tinyformer.app.sweep import compose_run

CONF = config_dir()
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


# The default of grouped queries, and the axes.


def test_kv_heads_are_the_largest_divisor_up_to_half():
    sizes = {1: 1, 2: 1, 3: 1, 4: 2, 6: 3, 7: 1, 9: 3, 12: 6, 16: 8}
    assert {num_heads: default_num_kv_heads(num_heads) for num_heads in sizes} == sizes
    for invalid in (0, -4, "abc", None, 2.5):  # left for the check of num_heads
        assert default_num_kv_heads(invalid) == invalid


def test_axes_list_every_choice_with_its_first_comment():
    axes, axis = {}, None
    for line in describe_axes(CONF).splitlines():
        if not line.startswith(" "):
            axes[axis := line] = {}
        else:
            choice, _, purpose = line.strip().partition(" ")
            axes[axis][choice] = purpose.strip()
    assert {(axis, choice) for axis, choices in axes.items() for choice in choices} == {
        (path.parent.name, path.stem) for path in CHOICES
    }
    for path in CHOICES:
        first = next(line for line in path.read_text().splitlines() if not line.startswith("# @package"))
        assert axes[path.parent.name][path.stem] == first.removeprefix("# ")
        assert 10 < len(first) <= 120
    assert describe_axes(CONF, ["norm"]).splitlines()[0::10] == ["norm"]


def test_axes_of_another_folder(tmp_path):
    (tmp_path / "mask").mkdir()
    (tmp_path / "mask" / "causal.yaml").write_text("# sees the past\na: 1\n")
    (tmp_path / "mask" / "empty.yaml").write_text("")
    (tmp_path / "mask" / "_shared.yaml").write_text("# hidden\n")
    (tmp_path / "train.yaml").write_text("# no axis\n")
    lines = [line.split(maxsplit=1) for line in describe_axes(tmp_path).splitlines()]
    assert lines == [["mask"], ["causal", "sees the past"], ["empty"]]


# One value.


def test_values_that_fit():
    fitting = {"size": [3, {"_target_": "some.Node"}], "share": [0.5, 1], "name": [None, "x"], "flag": [True]}
    fitting |= {"kind": ["b"], "scales": [2.0, [1.0, 2]], "anything": [object()]}
    for name, values in fitting.items():
        for value in values:
            check_value(Part, name, value, f"part.{name}")
    check_value(Open, "sizes", 1, "part.sizes")


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


def test_without_a_default_the_config_files_give_the_example():
    for key, works in {"model.num_heads": "; model.num_heads=6 works", "part.x": ""}.items():
        message = f"{key}=abc: should be a valid integer{works}."
        with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
            check_value(Part, "size", "abc", key, CHOSEN)


def test_an_unknown_argument_is_named():
    for name, hint in {"sizes": " Did you mean part.size?", "zzz": ""}.items():
        with pytest.raises(ConfigError, match=f"^{re.escape(f'part.{name}: Part has no argument {name}.{hint}')}$"):
            check_value(Part, name, 1, f"part.{name}")


# A whole config; `test_mistakes` has the sentences about others.


def composed(*overrides):
    return compose_run("train", overrides)[0]


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["attention=gqa", "position=rotary", "optimizer=muon", "schedule=wsd"],
        ["block.attention_residual.skip=[0,1]"],
    ],
    ids=["default", "others", "list"],
)
def test_our_configs_fit_our_classes(overrides):
    check_types(composed(*overrides))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.d_model=2.5", r"^model.d_model=2.5: .*integer"),
        ("model.num_layers=null", r"^model.num_layers=null: .*integer"),
        ("attention.qk_norm=3", r"^attention.qk_norm=3: .*boolean"),
        ("optimizer.betas=[a,b]", r"^optimizer.betas=\[a,b\]: .*number"),
        ("+attention.num_kv_head=2", r"^attention.num_kv_head: .*Did you mean attention.num_kv_heads\?"),
        ("seed=x", r"^seed=x: "),
        ("+norm.epsilon=1", r"^norm.epsilon: LayerNorm has no argument epsilon"),
    ],
)
def test_mistakes_are_told_where_the_user_writes_them(override, message):
    with pytest.raises(ConfigError, match=message):
        check_types(composed(override), choices=CHOSEN)


def test_the_config_of_a_run_comes_with_what_its_command_line_says():
    config, invocation = compose_run("train", ["attention=gqa", "tokenizer=char"])
    assert "hydra" not in config
    assert invocation.choices["attention"] == "gqa"
    assert invocation.overridden("token") == ["tokenizer=char"]
    assert not invocation.is_sweep
