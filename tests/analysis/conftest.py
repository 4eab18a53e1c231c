"""Atlases in a browser."""

from contextlib import ExitStack

import pytest
from browser import quiet_page

from analysis.atlas_pages import MAPS, MEASURES, NAMES, TOKENS
from tinyformer.analysis import write_atlas


@pytest.fixture
def open_atlas(tmp_path, browser):
    """Write an atlas and open it; the test fails if a page reports an error or requests anything."""
    with ExitStack() as pages:

        def write_and_open(
            maps=MAPS, tokens=TOKENS, measures=MEASURES, fragment="", width=1280, scheme="light", **rest
        ):
            path = write_atlas(tmp_path / "atlas.html", maps, tokens, measures, **rest)
            page = pages.enter_context(quiet_page(browser, width, scheme))
            page.goto(path.as_uri() + fragment)
            return page

        yield write_and_open


@pytest.fixture
def atlas(open_atlas):
    return open_atlas(names=NAMES, title="A cat", descriptions={"entropy": "Of a row, in nats."})
