"""A headless browser, for tests of HTML pages."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, sync_playwright

ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
ARGUMENTS += ["--disable-background-networking", "--disable-component-update"]


@contextmanager
def chromium() -> Iterator[Browser]:
    """The Chromium of the system or of Playwright; the test is skipped without either."""
    with sync_playwright() as playwright:
        path = shutil.which("chromium") or playwright.chromium.executable_path
        if not Path(path).exists():
            pytest.skip("needs Chromium: `apt-get install chromium` or `playwright install chromium`")
        browser = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        yield browser
        browser.close()


@contextmanager
def quiet_page(browser: Browser, width: int = 1280, scheme: str = "light") -> Iterator[Page]:
    """A page that fails the test if it logs an error or warning, or requests anything but files."""
    problems: list[str] = []

    def on_message(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            problems.append(message.text)

    def on_request(request: Request) -> None:
        if not request.url.startswith(("file:", "about:")):
            problems.append(f"request: {request.url[:100]}")

    page = browser.new_page(viewport={"width": width, "height": 860}, color_scheme=scheme)
    page.set_default_timeout(5000)
    page.on("console", on_message)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", on_request)
    yield page
    page.close()
    assert not problems, problems
