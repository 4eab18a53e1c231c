"""An `ArgumentError` about a value that the caller passed on, in the names of the caller."""

import pytest

from tinyformer.errors import ArgumentError, argument_path


def test_a_value_that_the_caller_passed_on_is_the_callers_argument() -> None:
    with pytest.raises(ArgumentError) as caught, argument_path("position", passed={"head_dim": "rope_head_dim"}):
        raise ArgumentError("head_dim", 5, "must be even", {"head_dim": 6})
    assert str(caught.value) == "rope_head_dim=5: must be even; rope_head_dim=6 works."
