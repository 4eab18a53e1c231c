"""Sources without a download: dates in many languages, and texts of a small library of our own and of this Python's."""

import datetime
import re
from collections import Counter
from functools import partial

import pytest

from tinyformer.data import Dates, DocstringQuestions, Docstrings, Pydoc, Summaries
from tinyformer.data.sources.dates import LOCALES, PATTERNS, written
from tinyformer.data.sources.pydoc import Library

from .test_sources import write


@pytest.fixture
def library(tmp_path, monkeypatch):
    """Write files into a folder that takes the place of the standard library."""
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))

    return partial(write, tmp_path)


def differ(library, *sources):
    """Return True if the fingerprints of sources differ, and change with the library."""
    prints = {source().fingerprint() for source in sources}
    assert sources[0]().fingerprint() in prints
    library({"new.py": '"""New."""'})
    return len({*prints, sources[0]().fingerprint()}) == len(sources) + 1


def test_docstrings_and_topics(library):
    module = '"""Module."""\nclass A:\n    """Class.\n\n    More.\n    """\n    if True:\n        async def f(self):\n'
    library(
        {
            "a.py": module + '            "Method."\n',
            "bad.py": "def (",
            "odd.py": b"\xff\xfe",
            "escape.py": '"""Esc \\d."""',
            "twice.py": '"""Module."""',
            "test/b.py": '"""A test."""',
            "pydoc_data/topics.py": '# comment\ntopics = {"b": "\\nB topic\\n", "a": "A topic"}\n',
        }
    )
    texts = ["A topic", "B topic", "Module.", "Class.\n\nMore.", "Method.", "Esc \\d."]
    assert list(Pydoc().load()["train"]["text"]) == texts
    assert differ(library, Pydoc)


# Labels.

PACKAGES = {
    "alpha/__init__.py": '"""The Alpha package: alphas, (ALPHA), _alpha_, test_alpha, alpha.b; not alphabet, nalpha"""',
    "alpha/inner/deep.py": '"""Deep inside."""\ndef f():\n    "Twice."\ndef g():\n    "Twice."',
    "beta.py": '"""Beta of io, not Bio."""\nclass A:\n    "In two packages."\n    def f(self):\n        "Only here."',
    "_pyio.py": '"""IO."""\nclass A:\n    "In two packages."',
    "io.py": 'def f():\n    "Like _pyio."',
    "_pyrepl.py": '"""A shell."""',
    "small.py": '"""Small and alone."""',
}


def test_a_docstring_belongs_to_the_top_of_its_path(library):
    library(PACKAGES)

    def labels(number):
        rows = Docstrings(number).load("examples")["train"]
        return dict(zip(rows["text"], rows["label"], strict=True))

    assert labels(3) == {
        "The package package: package, (package), _package_, test_package, package.b; not alphabet, nalpha": "alpha",
        "Deep inside.": "alpha",
        "Twice.": "alpha",
        "package of package, not Bio.": "beta",
        "Only here.": "beta",
        "package.": "io",
        "Like package.": "io",
    }
    assert set(labels(9).values()) == {"alpha", "beta", "io", "_pyrepl", "small"}
    assert Docstrings(3).load()["train"].to_dict() == {"text": [*labels(3)]}
    assert differ(library, lambda: Docstrings(3), lambda: Docstrings(2))


# Questions.

FUNCTIONS = "".join(
    f'def function_{i}():\n    """Returns the number {i} as it is.{" Twice." * (i == 7)}\n\n    More."""\n'
    for i in range(40)
)
FUNCTIONS += '''
class Kept:
    """No function, this one."""
    async def method(self):
        "Reads the number 4 as it is."
    def function_3(self):
        "Seen before, under this name."
    def same(self):
        "Returns the number 5 as it is."
    def similar(self):
        "Returns a number 6 as it is"
    def __init__(self):
        "Makes an object of it."
    def short(self):
        "Two words."
    def broken(self):
        """A summary that goes
        on in the next line."""
'''


def test_the_answer_is_the_summary_of_the_function_that_is_asked_about(library):
    library({"numbers.py": FUNCTIONS})
    splits, names = DocstringQuestions(600, 3, 10).load("questions"), {}
    for split, rows in splits.items():
        names[split] = set()
        for question, context, answers, starts in zip(*(rows[name] for name in rows.column_names), strict=True):
            name = re.fullmatch(r"What does (\w+) do\?", question)[1]
            summary_of = dict(re.fullmatch(r"def (\w+): (.+)", line).groups() for line in context.splitlines())
            assert len(summary_of) == 3
            assert answers == [summary_of[name]]
            assert context[starts[0] :].splitlines()[0] == answers[0]
            names[split] |= summary_of.keys()
        if split != "train":  # all three functions of a context are asked about
            asked = {*zip(rows["pair"], rows["text"], strict=True)}
            assert {*Counter(context for context, _ in asked).values()} == {3}
    assert [len(splits[split]) for split in ("train", "validation", "test")] == [600, 30, 30]
    functions = {*(f"function_{i}" for i in range(40)), "method"}
    assert set.union(*names.values()) == functions  # `same` and `similar` have those of others, the rest none
    assert sum(map(len, names.values())) == len(functions)
    assert [len(names[split]) for split in ("validation", "test")] == [4, 4]
    train = zip(splits["train"]["pair"], splits["train"]["starts"], strict=True)
    place = Counter(context[:start].count("\n") for context, (start,) in train)
    assert all(abs(number - 200) < 50 for number in place.values())  # any function of a context is asked about


# The library of this Python.


@pytest.mark.slow
def test_summaries_of_this_python(monkeypatch):
    """A summary is the first line of a docstring."""
    docstrings = [*Library().docstrings()]
    monkeypatch.setattr(Library, "docstrings", lambda library: docstrings)
    rows = Summaries().load("pairs")["train"]
    summary_of = dict(zip(rows["text"], rows["pair"], strict=True))
    body = next(body for body in summary_of if body.startswith("The text first has its whitespace collapsed."))
    assert summary_of[body] == "Collapse and truncate the given text to fit in the given width."
    assert all("\n" not in summary and len(body.split()) >= 20 for body, summary in summary_of.items())
    assert len(Summaries(5).load("pairs")["train"]) > len(rows)


# Dates.


def test_targets_are_the_dates_that_the_sources_say_and_held_out_dates_and_formats_are_new():
    of_dates = Dates(3000, 200).load("pairs")
    for rows in of_dates.values():
        for source, target in zip(rows["text"], rows["pair"], strict=True):
            date = datetime.date.fromisoformat(target)
            assert {int(number) for number in re.findall(r"\d+", source)} == {date.day, date.year}
    assert written(datetime.date(2031, 3, 12), "de", "d. MMMM y") == "12. März 2031"
    trained, validation, test = (set(of_dates[name]["pair"]) for name in ("train", "validation", "test"))
    assert not trained & (validation | test)
    assert not validation & test
    dates = [datetime.date.fromisoformat(date) for date in of_dates["test"]["pair"][:30]]
    formats = [{written(date, *names) for date in dates} for names in ((x, y) for x in LOCALES for y in PATTERNS)]
    used = [texts for texts in formats if texts & set(of_dates["test"]["text"][:30])]
    assert len(used) < len(formats) / 3  # languages share some of their months
    assert all(len(rows) == len(set(rows["text"])) for rows in of_dates.values())
