"""A folder is written whole or not at all, text is UTF-8; files are tested where they are written."""

import ast
import re
from pathlib import Path

from commands import ROOT

from tinyformer.files import atomic_write


def test_a_folder_appears_whole(tmp_path: Path) -> None:
    folder = tmp_path / "tokens"
    (tmp_path / "tokens.partial").mkdir()  # left by a process that was killed
    (tmp_path / "tokens.partial" / "stale").touch()
    with atomic_write(folder) as temporary:
        temporary.mkdir()
        (temporary / "train").touch()
        assert not folder.exists()
    assert [file.name for file in folder.iterdir()] == ["train"]
    assert list(tmp_path.iterdir()) == [folder]


def opens_text(call: ast.Call) -> bool:
    """Return true if a call reads or writes a text file; `open` of other objects has arguments that are no modes."""
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    values = [*call.args, *(word.value for word in call.keywords if word.arg == "mode")]
    modes = [str(value.value) for value in values if isinstance(value, ast.Constant)]
    is_file = isinstance(call.func, ast.Name) or not call.args or bool(modes)
    is_opened = name == "open" and is_file and not any(re.fullmatch("[rwxa+]*b[rwxa+]*", mode) for mode in modes)
    return is_opened or (isinstance(call.func, ast.Attribute) and name in ("read_text", "write_text"))


def test_no_text_file_has_the_encoding_of_the_locale() -> None:
    """Ruff's `unspecified-encoding` sees only paths of which it knows the type, a half of them."""
    assert [
        f"{path.relative_to(ROOT)}:{call.lineno}"
        for folder in ("tinyformer", "benchmarks", "docs")
        for path in (ROOT / folder).rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call) and opens_text(call) and "encoding" not in {word.arg for word in call.keywords}
    ] == []
