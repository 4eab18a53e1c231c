"""What config files compute, and whether their values can work."""

import re
from typing import Any, Literal

import pytest

from tinyformer.config.checks import check_types, check_value
from tinyformer.config.errors import ConfigError
from tinyformer.config.invocation import config_dir, default_num_kv_heads, describe_axes
from tinyformer.config.sweep import compose_run

CONF = config_dir()
CHOICES = [path for path in sorted(CONF.glob("*/[!_]*.yaml")) if path.parent.name != "finding"]


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


def test_values_that_fit():
    fitting = {"size": [3, {"_target_": "some.Node"}], "share": [0.5, 1], "name": [None, "x"], "flag": [True]}
    fitting |= {"kind": ["b"], "scales": [2.0, [1.0, 2]], "anything": [object()]}
    for name, values in fitting.items():
        for value in values:
            check_value(Part, name, value, f"part.{name}")
    check_value(Open, "sizes", 1, "part.sizes")


UNFIT = [
    ("share", "abc", "=abc: should be a valid number; part.share=0.5 is the default."),
    ("share", None, "=null: should be a valid number; part.share=0.5 is the default."),
    ("name", 3, "=3: should be a valid string"),
    ("flag", "yes", "=yes: should be a valid boolean; part.flag=false is the default."),
    ("kind", "c", "=c: should be 'a' or 'b'; part.kind=a is the default."),
]


def test_values_that_do_not_fit():
    for name, value, message in UNFIT:
        with pytest.raises(ValueError, match=f"^part.{name}{re.escape(message)}"):
            check_value(Part, name, value, f"part.{name}")


MISTAKES = {
    "model.num_layers=null": r"^model.num_layers=null: .*integer",
    "optimizer.adamw_betas=[a,b]": r"^optimizer.adamw_betas=\[a,b\]: .*number",
    "seed=x": r"^seed=x: ",
    "+norm.epsilon=1": r"^norm.epsilon: LayerNorm has no argument epsilon",
}


def test_mistakes_are_reported_where_the_user_writes_them():
    for override, message in MISTAKES.items():
        with pytest.raises(ConfigError, match=message):
            check_types(compose_run("train", [override])[0])


def test_the_config_of_a_run_comes_with_what_its_command_line_says():
    config, invocation = compose_run("train", ["attention=gqa", "tokenizer=char"])
    assert "hydra" not in config
    assert invocation.choices["attention"] == "gqa"
    assert invocation.overridden("token") == ["tokenizer=char"]
    assert not invocation.is_sweep
