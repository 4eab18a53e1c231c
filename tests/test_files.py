"""A folder is written whole or not at all; files are tested where they are written."""

from pathlib import Path

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
