"""FlexAttention on CPU as in `tests/nn`."""

from nn.conftest import _flex_runs_without_a_compiler

__all__ = ["_flex_runs_without_a_compiler"]
