"""Take files that pages link to from elsewhere in the repository into the site.

A page links to `../../benchmarks/results/peers.png`, which is right where the page is read on GitHub; in the site the
file is `repository/benchmarks/results/peers.png`.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\]\(\.\./\.\./([^)#\s]+)")
LINK_OF_A_COPY = re.compile(r"\]\((?:\.\./)*docs/pages/")  # of CONTRIBUTING.md, or of a file in a folder


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add every file that a page links to outside of the documentation, and the pages of the navigation."""
    pages = [path.read_text(encoding="utf-8") for path in Path(config.docs_dir).glob("*.md")]
    linked = {path for page in pages for path in LINK.findall(page)}
    for path in sorted(linked | {"CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "benchmarks/LOG.md"}):
        files.append(File.generated(config, f"repository/{path}", abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point the links at the copies, and those of the copies at the pages; in a search, guides come first."""
    if page.file.src_uri.startswith(("api/", "repository/")):  # with titles, which weigh a thousand times a text
        page.meta["search"] = {"boost": 0.0001}
    up = posixpath.relpath(".", posixpath.dirname(page.file.src_uri) or ".")
    if page.file.src_uri.startswith("repository/"):
        return LINK_OF_A_COPY.sub(f"]({up}/", markdown)
    return LINK.sub(lambda link: f"]({up}/repository/{link[1]}", markdown)
