"""A real browser without a window, for the pages that we write."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, sync_playwright

ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@contextmanager
def chromium() -> Iterator[Browser]:
    """The system's Chromium, or Playwright's own; without either the test is skipped."""
    with sync_playwright() as playwright:
        path = shutil.which("chromium") or playwright.chromium.executable_path
        if not Path(path).exists():
            pytest.skip("no Chromium: `apt-get install chromium` or `playwright install chromium` gets one")
        browser = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        yield browser
        browser.close()


@contextmanager
def quiet_page(browser: Browser, width: int = 1280, scheme: str = "light") -> Iterator[Page]:
    """A page that must not complain in its console, fail in a script, or ask for anything but files."""
    complaints: list[str] = []

    def hear(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            complaints.append(message.text)

    def see(request: Request) -> None:
        if not request.url.startswith(("file:", "about:")):
            complaints.append(f"request: {request.url[:100]}")

    page = browser.new_page(viewport={"width": width, "height": 860}, color_scheme=scheme)
    page.set_default_timeout(5000)
    page.on("console", hear)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", see)
    yield page
    page.close()
    assert complaints == []
