"""Docstrings and their packages: a small library of our own, and the one of this Python."""

from collections import Counter

import pytest

from tinyformer.data import ByteTokenizer, Docstrings, LabelledDataModule, near_copy_groups
from tinyformer.data.docstrings import mask_names, names_package

LIBRARY = {
    "alpha/__init__.py": '"""The Alpha package: alphas, alphabet, test_alpha and alpha.beta."""',
    "alpha/inner/deep.py": '"""Deep inside."""\ndef f():\n    "Twice."\ndef g():\n    "Twice."',
    "beta.py": '"""Beta of io, not Bio."""\nclass A:\n    "In two packages."\n    def f(self):\n        "Only here."',
    "_pyio.py": '"""IO."""\nclass A:\n    "In two packages."',
    "io.py": 'def f():\n    "Like _pyio."',
    "_pyrepl.py": '"""A shell."""',
    "small.py": '"""Small and alone."""',
    "broken.py": "def (",
    "test/alpha.py": '"""A test of alpha."""',
}


@pytest.fixture
def library(tmp_path, monkeypatch):
    for name, content in LIBRARY.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    return tmp_path


def examples(**settings):
    rows = Docstrings(**settings).load_examples()["train"]
    return dict(zip(rows["text"], rows["label"], strict=True))


def test_a_docstring_belongs_to_the_top_of_its_path(library):
    assert examples(num_packages=3) == {
        "The package package: package, alphabet, test_package and package.package.": "alpha",
        "Deep inside.": "alpha",
        "Twice.": "alpha",
        "package of package, not Bio.": "beta",
        "Only here.": "beta",
        "package.": "io",
        "Like package.": "io",
    }
    assert set(examples(num_packages=9).values()) == {"alpha", "beta", "io", "_pyrepl", "small"}


def test_its_text_is_what_a_language_model_reads(library):
    source = Docstrings(num_packages=3)
    assert list(source.load()["train"]["text"]) == list(examples(num_packages=3))
    assert source.load()["train"].column_names == ["text"]


def test_the_fingerprint_follows_library_and_number(library):
    before = [Docstrings(n).fingerprint() for n in (2, 3)]
    (library / "small.py").write_text('"""Smaller."""')
    after = [Docstrings(n).fingerprint() for n in (2, 3)]
    assert len({*before, *after}) == 4


def test_names_are_masked_as_words_and_parts_of_names():
    for text, masked in [
        ("email emails Email _email_ email.mime (EMAIL)", "package package package _package_ package.mime (package)"),
        ("emailed female email2 xemail", "emailed female email2 xemail"),
        ("http.client, _pyemail, https", "package.client, package, package"),
        ("nothing", "nothing"),
    ]:
        assert mask_names(text, ["email", "http"]) == masked


def test_a_masked_text_does_not_name_its_package():
    for text in ["an email", "Emails", "test_email", "_pyemail", "email.mime"]:
        assert names_package(text, "email")
        assert not names_package(text, "mail")
        assert not names_package(mask_names(text, ["email"]), "email")


@pytest.mark.slow
def test_the_library_here_names_no_package_and_no_near_copy_crosses(tmp_path, monkeypatch):
    source = Docstrings()
    rows = source.load_examples()["train"]
    assert sorted(Counter(rows["label"]).values())[0] > 50
    assert len(rows) > 3000
    assert not any(names_package(text, label) for text, label in zip(rows["text"], rows["label"], strict=True))

    monkeypatch.setattr(source, "load_examples", lambda: {"train": rows})  # parsing the library again takes seconds
    fractions = {"validation_fraction": 0.1, "test_fraction": 0.1}
    module = LabelledDataModule(source, ByteTokenizer(), 2**20, 32, **fractions, cache_dir=str(tmp_path))
    module.prepare()
    assert len(module.labels) == 20
    assert {"asyncio", "email", "unittest"} < set(module.labels)
    group_of = dict(zip(rows["text"], near_copy_groups(list(rows["text"])).tolist(), strict=True))
    groups = []
    for split in module.splits.values():
        assert split.num_truncated == 0
        assert 0.05 < split.majority_share < 0.25
        assert split.num_documents > 200
        groups.append({group_of[split.text(row)] for row in range(split.num_documents)})
    train, validation, test = groups
    assert not train & validation
    assert not train & test
    assert not validation & test
    assert sum(map(len, groups)) < len(rows)  # there are near-copies
