"""Pages inside notebooks."""

import html

HEIGHT = 720
"""Height of the frame in pixels; dragging its corner changes it."""

LARGEST = 24_000_000
"""Largest number of characters of a page in a notebook, whose file stores each page."""


THEME = """\
(() => {
  const root = document.documentElement, body = document.body, frame = document.currentScript.previousElementSibling;
  const named = `${body.dataset.vscodeThemeKind ?? root.getAttribute("theme") ?? ""}`;
  const isDark = body.dataset.jpThemeLight === "false" || /dark$|contrast$/.test(named);
  if (!isDark && !named && !body.dataset.jpThemeLight) return;
  const themed = frame.cloneNode(true);  // Chromium may not paint a frame whose page changes while it loads
  themed.srcdoc = frame.srcdoc.replace("<html", `<html data-theme="${isDark ? "dark" : "light"}"`);
  frame.replaceWith(themed);
})()"""
"""Script that gives the page the theme of JupyterLab, VS Code or Colab, which may differ from the system's."""


def framed(page: str) -> str:
    """A page in a frame that needs no server, for JupyterLab, VS Code and Colab.

    The frame holds the whole page (`srcdoc`) and is sandboxed: its scripts run, but cannot access the notebook. A
    notebook that is not trusted shows a sentence in its place.

    Args:
        page: the HTML of the page, whose root element takes its theme from `data-theme`.
    """
    if len(page) > LARGEST:
        size = f"{len(page) / 1e6:,.0f} MB"
        return f"<p>The page has {size}, too much for a notebook: <code>maps.save('atlas.html')</code> writes it.</p>"
    style = f"display:block;width:100%;height:{HEIGHT}px;border:0;resize:vertical;overflow:auto"
    frame = f'<iframe srcdoc="{html.escape(page)}" sandbox="allow-scripts" style="{style}" title="Attention atlas">'
    return f"<div>{frame}Trust this notebook to see the attention maps.</iframe><script>{THEME}</script></div>"
