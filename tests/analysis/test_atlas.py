"""The file of an atlas: its data, and the arguments that it refuses."""

import math

import pytest

from analysis.atlas_pages import MAPS, NAMES, TOKENS, random_maps, stored
from tinyformer.analysis import Axes, write_atlas
from tinyformer.errors import ArgumentError


def test_a_kind_of_attention_without_heads_is_left_out(tmp_path):
    kinds, addresses = dict.fromkeys(["encoder", "cross"], Axes(TOKENS, TOKENS)), [("encoder", 0), ("cross", 0)]
    path = write_atlas(tmp_path / "atlas.html", [MAPS[0], MAPS[1][:0]], kinds, {}, addresses=addresses)
    assert [kind["name"] for kind in stored(path)["kinds"]] == ["encoder"]


def test_invisible_characters_of_tokens_are_made_visible(tmp_path):
    tokens = [" ", "\n", "\t", "a b", "\x00", "\u202e", "\ud800", "", "é", "漢", "🙂", "·⏎"]
    data = stored(write_atlas(tmp_path / "atlas.html", random_maps([1], 12), tokens, {}))
    assert data["kinds"][0]["keys"] == ["␣", "⏎", "⇥", "a␣b", r"\x00", r"\u202e", r"\ud800", "∅", "é", "漢", "🙂", "·⏎"]


WRONG = {
    "no token": ({"maps": MAPS, "tokens": []}, "tokens=[]: must hold at least one token."),
    "too few tokens": ({"tokens": TOKENS[1:]}, "maps[0]=[2, 19, 19]: must be maps of [18, 18] for 18 tokens."),
    "scores": ({"maps": [MAPS[0], MAPS[1] * 3, MAPS[2]]}, "maps[1]=[3, 19, 19]: must hold attention weights"),
    "nan": ({"maps": [MAPS[0], MAPS[1] * math.nan, MAPS[2]]}, "maps[1]=[3, 19, 19]: must hold attention weights"),
    "heads": ({"measures": {"m": [[1.0], [1.0] * 3, [1.0]]}}, "measures['m']=[1, 3, 1]: must have as many entries"),
    "no head": ({"maps": [MAPS[0][:0]]}, "maps=[[0, 19, 19]]: must hold the map of at least one head."),
    "names": ({"names": NAMES[:2]}, "names=[2, 3]: must have as many entries per layer as maps, [2, 3, 1]."),
    "equal names": ({"names": [["0", "0"], *NAMES[1:]]}, "names[0]=['0', '0']: must be unique within a layer."),
}


@pytest.mark.parametrize(("changed", "message"), WRONG.values(), ids=WRONG)
def test_arguments_of_different_sizes_are_refused(tmp_path, changed, message):
    with pytest.raises(ArgumentError) as caught:
        write_atlas(tmp_path / "atlas.html", **{"maps": MAPS, "tokens": TOKENS, "measures": {}} | changed)
    assert str(caught.value).startswith(message)
    assert not (tmp_path / "atlas.html").exists()
