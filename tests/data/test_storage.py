"""The cache folder: chosen by the environment or the system."""

from pathlib import Path

import pytest

from tinyformer.data import ByteTokenizer, HubDataset, TextDataModule, TextFiles, default_cache_dir, storage

ROOT = Path(__file__).parents[2]


@pytest.fixture
def clean(monkeypatch, tmp_path):
    for name in ("TINYFORMER_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return monkeypatch


def test_an_installed_package_uses_the_users_cache_folder(clean, tmp_path):
    clean.setattr(storage, "_ROOT", tmp_path)
    assert default_cache_dir() == tmp_path / "home" / ".cache" / "tinyformer"
    clean.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_cache_dir() == tmp_path / "xdg" / "tinyformer"
    clean.setattr(storage.sys, "platform", "darwin")
    assert default_cache_dir() == tmp_path / "home" / "Library" / "Caches" / "tinyformer"


def test_the_environment_comes_before_both_and_an_argument_before_all(clean, tmp_path):
    clean.setenv("TINYFORMER_CACHE", "~/chosen")
    assert default_cache_dir() == tmp_path / "home" / "chosen"
    (tmp_path / "book.txt").write_text("A cat. " * 100)
    text = TextFiles(str(tmp_path / "book.txt"))
    TextDataModule(text, ByteTokenizer(), seq_len=8, batch_size=2).prepare()
    assert list((tmp_path / "home" / "chosen").glob("text-byte-*/train.npy"))
    assert HubDataset("owner/name")._commits_file == tmp_path / "home" / "chosen" / "hub_commits.json"
