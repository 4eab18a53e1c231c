"""What config files say, list and compute."""

from tinyformer.config.conf import config_dir, default_num_kv_heads, describe_axes

CONF = config_dir()
CHOICES = [path for path in sorted(CONF.glob("*/[!_]*.yaml")) if path.parent.name != "finding"]


def test_kv_heads_are_the_largest_divisor_up_to_half():
    sizes = {1: 1, 2: 1, 3: 1, 4: 2, 6: 3, 7: 1, 9: 3, 12: 6, 16: 8}
    assert {num_heads: default_num_kv_heads(num_heads) for num_heads in sizes} == sizes
    for invalid in (0, -4, "abc", None, 2.5):  # left for the check of num_heads
        assert default_num_kv_heads(invalid) == invalid


def test_axes_list_every_choice_with_its_first_comment():
    axes, axis = {}, None
    for line in describe_axes().splitlines():
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
    assert describe_axes(["norm"]).splitlines()[0::10] == ["norm"]
