"""Files and folders are written whole or not at all."""

import contextlib
from pathlib import Path

from tinyformer.files import atomic_write


def test_a_file_is_replaced_only_by_a_whole_one(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text("old")
    with contextlib.suppress(KeyError), atomic_write(path) as temporary:
        temporary.write_text("half")
        assert temporary.parent == tmp_path  # on the same file system, where renaming is atomic
        assert path.read_text() == "old"
        raise KeyError
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("table.csv", "old")]
    with atomic_write(path) as temporary:
        temporary.write_text("new")
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("table.csv", "new")]


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
