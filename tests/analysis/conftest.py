"""FlexAttention on CPU as in `tests/nn`, and the page of an atlas in a browser."""

from contextlib import ExitStack

import pytest
from browser import quiet_page
from nn.conftest import _flex_runs_without_a_compiler

from tinyformer.report import write_atlas

__all__ = ["_flex_runs_without_a_compiler"]


@pytest.fixture
def open_page(tmp_path, browser):
    """Write an atlas and open it; the test fails if a page reports an error or requests anything."""
    with ExitStack() as pages:

        def write_and_open(maps, tokens, measures, fragment="", width=1280, scheme="light", **rest):
            path = write_atlas(tmp_path / "atlas.html", maps, tokens, measures, **rest)
            page = pages.enter_context(quiet_page(browser, width, scheme))
            page.goto(path.as_uri() + fragment)
            return page

        yield write_and_open
