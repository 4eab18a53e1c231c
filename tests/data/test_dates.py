"""Dates in many languages and docstrings with their summaries: pairs without a download."""

import datetime
import re

import pytest

from tinyformer.data import Dates, Summaries, hold_out
from tinyformer.data.sources import dates as module
from tinyformer.errors import ArgumentError


@pytest.fixture(scope="module")
def splits():
    return Dates(3000, 200).load_pairs()


def test_targets_are_the_dates_that_the_sources_say(splits):
    for rows in splits.values():
        for source, target in zip(rows["text"], rows["pair"], strict=True):
            date = datetime.date.fromisoformat(target)
            assert {int(number) for number in re.findall(r"\d+", source)} == {date.day, date.year}
    assert module.written(datetime.date(2031, 3, 12), "de", "d. MMMM y") == "12. März 2031"


def test_held_out_dates_and_formats_are_new(splits):
    trained, validation, test = (set(splits[name]["pair"]) for name in ("train", "validation", "test"))
    assert not trained & (validation | test)
    assert not validation & test
    some = [datetime.date.fromisoformat(date) for date in splits["test"]["pair"][:30]]
    written = {
        (locale, pattern): {module.written(date, locale, pattern) for date in some}
        for locale in module.LOCALES
        for pattern in module.PATTERNS
    }
    used = [key for key, texts in written.items() if texts & set(splits["test"]["text"][:30])]
    assert len(used) < len(written) / 3  # languages share some of their months
    assert all(len(rows) == len(set(rows["text"])) for rows in splits.values())


def test_the_same_arguments_give_the_same_dates(splits):
    assert Dates(3000, 200).load_pairs()["test"]["text"] == splits["test"]["text"]
    assert Dates(3000, 200, seed=1).load_pairs()["test"]["text"] != splits["test"]["text"]
    assert len({Dates(*sizes).fingerprint() for sizes in ((5,), (6,), (5, 7), (5, 7, 1))}) == 4


def test_mistakes(monkeypatch):
    with pytest.raises(ArgumentError, match="num_pairs=0"):
        Dates(0)
    monkeypatch.setattr(module.importlib.metadata, "version", _missing)
    with pytest.raises(ArgumentError, match=r"pip install 'tinyformer\[dates\]'"):
        Dates()


def _missing(name):
    raise module.importlib.metadata.PackageNotFoundError(name)


def test_the_share_of_held_out_forms_that_are_trained_on_is_told(splits):
    forms = {name: [re.sub(r"\d", "", text) for text in rows["text"]] for name, rows in splits.items()}
    held_out = [*forms["validation"], *forms["test"]]
    share = sum(len(form) > 0 and form in forms["train"] for form in held_out) / len(held_out)
    assert 0.3 < share < 0.7
    assert f", but {share:.0%} are written as" in Dates(3000, 200).caveat(splits)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_no_summary_is_both_held_out_and_trained_on(seed):
    parts, caveat = hold_out(Summaries().load_pairs(), 0.1, 0.1, seed, True, keep_whole=True, compared=("text", "pair"))
    assert caveat is None
    for column in ("text", "pair"):
        held_out = {*parts["validation"][column], *parts["test"][column]}
        assert not held_out & {*parts["train"][column]}


@pytest.mark.slow
def test_summaries_are_the_first_lines_of_docstrings():
    rows = Summaries().load_pairs()["train"]
    summary_of = dict(zip(rows["text"], rows["pair"], strict=True))
    found = next(body for body in summary_of if body.startswith("The text first has its whitespace collapsed."))
    assert summary_of[found] == "Collapse and truncate the given text to fit in the given width."
    assert all("\n" not in summary and len(body.split()) >= 20 for body, summary in summary_of.items())
    assert len(Summaries(5).load_pairs()["train"]) > len(rows)
    with pytest.raises(ArgumentError, match="min_words=0"):
        Summaries(0)
