"""Every notebook of `examples` runs from top to bottom, in a kernel of its own, and shows what is stored in it."""

import subprocess
import sys

import nbformat
import pytest
from notebooks import NOTEBOOKS, as_stored, executed

from tinyformer.model import TextMaps


def displays(notebook):
    """The kinds of the outputs of each cell, such as "image/png"."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [[sorted(output.data) for output in cell.outputs] for cell in code]


@pytest.mark.slow
def test_the_script_trains_and_draws_a_map(tmp_path):
    (tmp_path / "book.txt").write_text("The value of a name is bound to the name. " * 99)
    command = [sys.executable, NOTEBOOKS[0].with_name("train.py"), "book.txt"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    losses = [float(line.split()[3]) for line in ended.stdout.splitlines() if "loss" in line]
    assert losses[-1] < 0.05 < losses[0]
    assert "<html" in (tmp_path / "maps.html").read_text()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_with_its_charts_and_without_the_atlas(path):
    assert f"(examples/{path.name})" in (path.parents[1] / "README.md").read_text()
    notebook = nbformat.read(path, as_version=4)
    assert notebook == as_stored(notebook)
    assert "image/png" in str(displays(notebook))
    assert path.stat().st_size < 300_000


LONGEST = ("lesson", "why")


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[pytest.mark.nightly] if path.stem in LONGEST else []) for path in NOTEBOOKS],
    ids=lambda path: path.stem,
)
def test_a_notebook_runs_and_shows_what_it_stores(path, tmp_path):
    notebook = executed(path, tmp_path, max_steps=10)
    assert displays(as_stored(notebook)) == displays(nbformat.read(path, as_version=4))
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    shown = [output.get("data", {}) for output in outputs]
    has_maps = TextMaps.__name__ in str([data.get("text/plain") for data in shown])
    assert ("<iframe" in str([data.get("text/html") for data in shown])) == has_maps
    assert not [output for output in outputs if output.get("name") == "stderr"]
