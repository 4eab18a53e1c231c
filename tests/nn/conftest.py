"""FlexAttention on CPU as torch means it to be debugged: the same function without a compiler in between.

Torch's compiler does not pass through the type checker that wraps the package's functions in tests;
`test_compiled_flex_equals_eager` runs the real way.
"""

import pytest
from torch.nn.attention import flex_attention


@pytest.fixture(autouse=True)
def _flex_runs_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
