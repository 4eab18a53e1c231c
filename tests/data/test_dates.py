"""Dates in many languages: pairs without a download."""

import datetime
import importlib.metadata
import re
from unittest import mock

import pytest

from tinyformer.data import Dates
from tinyformer.data.sources.dates import LOCALES, PATTERNS, written
from tinyformer.errors import ArgumentError


@pytest.fixture(scope="module")
def splits():
    return Dates(3000, 200).load("pairs")


def test_targets_are_the_dates_that_the_sources_say(splits):
    for rows in splits.values():
        for source, target in zip(rows["text"], rows["pair"], strict=True):
            date = datetime.date.fromisoformat(target)
            assert {int(number) for number in re.findall(r"\d+", source)} == {date.day, date.year}
    assert written(datetime.date(2031, 3, 12), "de", "d. MMMM y") == "12. März 2031"


def test_held_out_dates_and_formats_are_new(splits):
    trained, validation, test = (set(splits[name]["pair"]) for name in ("train", "validation", "test"))
    assert not trained & (validation | test)
    assert not validation & test
    dates = [datetime.date.fromisoformat(date) for date in splits["test"]["pair"][:30]]
    formats = [{written(date, *names) for date in dates} for names in ((x, y) for x in LOCALES for y in PATTERNS)]
    used = [texts for texts in formats if texts & set(splits["test"]["text"][:30])]
    assert len(used) < len(formats) / 3  # languages share some of their months
    assert all(len(rows) == len(set(rows["text"])) for rows in splits.values())


def test_the_arguments_determine_the_dates(splits):
    assert Dates(3000, 200).load("pairs")["test"]["text"] == splits["test"]["text"]
    assert Dates(3000, 200, seed=1).load("pairs")["test"]["text"] != splits["test"]["text"]
    assert len({Dates(*sizes).fingerprint() for sizes in ((5,), (6,), (5, 7), (5, 7, 1))}) == 4


def test_the_extra_package_is_asked_for(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", mock.Mock(side_effect=importlib.metadata.PackageNotFoundError))
    with pytest.raises(ArgumentError, match=r"pip install 'tinyformer\[dates\]'"):
        Dates()
