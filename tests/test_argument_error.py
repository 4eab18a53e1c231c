"""The sentence of an `ArgumentError`, in the names of whoever reads it."""

import pytest

from tinyformer.errors import ArgumentError, argument_path, require_at_least, require_choice


def raised_inside() -> ArgumentError:
    """An error from two factories deep, whose cure lies in another argument."""
    with pytest.raises(ArgumentError) as caught, argument_path("encoder", "block"), argument_path("attention"):
        raise ArgumentError("num_heads", 3, "must divide `d_model`=8", {"d_model": 9})
    return caught.value


def test_in_python_the_sentence_names_the_path_of_each_argument() -> None:
    assert str(raised_inside()) == (
        "encoder.block.attention.num_heads=3: must divide encoder.block.attention.d_model=8; "
        "encoder.block.attention.d_model=9 works."
    )


def test_a_program_names_its_own_keys_and_writes_values_its_own_way() -> None:
    keys = {"num_heads": "model.num_heads", "d_model": "model.d_model"}
    sentence = raised_inside().describe(lambda path: keys[path[-1]], lambda value: f"<{value}>")
    assert sentence == "model.num_heads=<3>: must divide model.d_model=8; model.d_model=<9> works."


def test_a_value_that_the_caller_passed_on_is_the_callers_argument() -> None:
    with pytest.raises(ArgumentError) as caught, argument_path("position", passed={"head_dim": "rope_head_dim"}):
        raise ArgumentError("head_dim", 5, "must be even", {"head_dim": 6})
    assert str(caught.value) == "rope_head_dim=5: must be even; rope_head_dim=6 works."
    with pytest.raises(ArgumentError) as caught, argument_path("position", passed={"head_dim": "rope_head_dim"}):
        raise ArgumentError("base", 0, "must be positive")
    assert str(caught.value) == "position.base=0: must be positive."


def test_the_frequent_checks_let_their_bounds_through_and_refuse_what_lies_beyond() -> None:
    require_at_least(1, a=1, b=None, c=2.5)
    require_choice("mode", "zero", ("zero", "mean"))
    with pytest.raises(ArgumentError, match=r"^b=0: must be at least 1; b=8 works\.$"):
        require_at_least(1, {"b": 8}, a=1, b=0)
    with pytest.raises(ArgumentError, match=r"^mode='max': must be one of zero, mean\.$"):
        require_choice("mode", "max", ("zero", "mean"))
