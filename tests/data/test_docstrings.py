"""Docstrings and their packages: a small library of our own, and the one of this Python."""

from collections import Counter

import pytest

from tinyformer.data import Docstrings
from tinyformer.data.sources.pydoc import mask_names

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
    source = Docstrings(num_packages=3)
    assert source.load()["train"].to_dict() == {"text": [*examples(num_packages=3)]}
    prints = {source.fingerprint(), Docstrings(num_packages=2).fingerprint()}
    (library / "small.py").write_text('"""Smaller."""')
    assert len({*prints, source.fingerprint()}) == 3


def test_names_are_masked_as_words_and_parts_of_names():
    for text, masked in [
        ("email emails Email _email_ email.mime (EMAIL)", "package package package _package_ package.mime (package)"),
        ("emailed female email2 xemail", "emailed female email2 xemail"),
        ("http.client, _pyemail, https", "package.client, package, package"),
        ("an email of emails", "an package of package"),
    ]:
        assert mask_names(text, ["email", "http"]) == masked


@pytest.mark.slow
def test_the_library_of_this_python_is_masked():
    rows = Docstrings().load_examples()["train"]
    assert min(Counter(rows["label"]).values()) > 50
    assert len(set(rows["text"])) == len(rows) > 3000
    assert all(mask_names(text, [label]) == text for text, label in zip(rows["text"], rows["label"], strict=True))
    assert len(set(rows["label"])) == 20
    assert {"asyncio", "email", "unittest"} < set(rows["label"])
