"""Run the notebooks of `examples`. `python tests/notebooks.py` runs each and stores its displays in it."""

import copy
import re
from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

FOLDER = Path(__file__).parents[1] / "examples"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def executed(path: Path, folder: Path, max_steps: int | None = None) -> NotebookNode:
    """The notebook after it ran from top to bottom in a kernel of its own, in a folder, for as many steps."""
    notebook, resources = nbformat.read(path, as_version=4), {"metadata": {"path": str(folder)}}
    for cell in notebook.cells if max_steps else ():
        cell.source = re.sub(r"max_steps=\d+", f"max_steps={max_steps}", cell.source)
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources=resources).execute()
    return notebook


def is_result(output: NotebookNode) -> bool:
    return output.output_type == "execute_result" or "image/png" in output.get("data", {})


def as_stored(notebook: NotebookNode) -> NotebookNode:
    """The notebook with the outputs that the repository holds: the results of cells, such as tables and charts.

    The text that a run prints, with the speed of a machine, is left out; so is the atlas of a hundred kilobytes, whose
    picture GitHub shows.
    """
    stored = copy.deepcopy(notebook)
    for cell in stored.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [part for part in cell.outputs if is_result(part)]
            for output in cell.outputs:
                if "<iframe" in output.data.get("text/html", ""):
                    del output.data["text/html"]
    stored.metadata.language_info = {"name": "python"}
    return stored


if __name__ == "__main__":
    for path in NOTEBOOKS:
        with TemporaryDirectory() as folder:
            nbformat.write(as_stored(executed(path, Path(folder))), path)
        print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")
