"""The kernels on a CUDA device: which one torch chooses for `sdpa`, and that every structure of `flex` is compiled."""

from .conftest import Run

# By mask and dtype, for own and shared K/V heads, with and without dropout. No call falls to plain matrix products, and
# none with a mask or a single query runs cuDNN's kernel.
KERNELS = {
    "full bf16": "cudnn",
    "full fp32": "efficient",
    "single bf16": "flash",
    "single fp32": "efficient",
    "causal bf16": "cudnn",
    "causal fp32": "efficient",
    "padded bf16": "efficient",
    "padded fp32": "efficient",
}


def test_sdpa_runs_fused_kernels(run: Run) -> None:
    ended = run("run_kernels.py", "sdpa")
    assert ended.code == 0, ended.text
    assert len(ended.values["sdpa"]) == 4 * len(KERNELS)
    for case, kernel in ended.values["sdpa"].items():
        mask, _, dtype, _ = case.split()
        assert kernel == KERNELS[f"{mask} {dtype}"], case


def test_each_structure_of_flex_is_one_graph(run: Run) -> None:
    """Of one function torch compiles eight, and runs the others unfused."""
    ended = run("run_kernels.py", "flex")
    assert ended.code == 0, ended.text
    assert ended.values["flex"] == 18
