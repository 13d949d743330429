"""Check the built site: every link and anchor leads somewhere, nothing is loaded from elsewhere, the search has pages.

    python -m docs.site_check FOLDER

The exit code is 1 if a fault is found. ``docs/site_browser.py`` looks at pages in a browser.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = {("script", "src"), ("img", "src"), ("iframe", "src"), ("source", "src"), ("link", "href")}
"""Attributes whose files a browser loads with the page."""


class Page(HTMLParser):
    """The links of a page, its anchors, and the addresses of what it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect the attributes of a tag."""
        for name, value in attrs:
            if name in ("id", "name") and value:
                self.anchors.add(value)
            elif (tag, name) in LOADED and value:
                self.loaded.append(value)
            elif tag == "a" and name == "href" and value:
                self.links.append(value)


def faults(site: Path) -> Iterator[str]:
    """Yield a sentence for every fault of the site in a folder."""
    pages = {p: Page(p.read_text()) for p in sorted(site.rglob("*.html")) if p.name != "404.html"}
    if not pages:
        yield f"{site} has no pages"
    for path, page in pages.items():
        name = path.relative_to(site)
        for address in (*page.links, *page.loaded):
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                if address in page.loaded:
                    yield f"{name} loads {address}"
                continue
            aim = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not aim.is_file():
                yield f"{name} links to {address}: there is no such file"
            elif parts.fragment and aim in pages and unquote(parts.fragment) not in pages[aim].anchors:
                yield f"{name} links to {address}: there is no such section"
    yield from _search_faults(site, set(pages))


def _search_faults(site: Path, pages: set[Path]) -> Iterator[str]:
    index = site / "search.js"  # the index that pages opened from disk load
    if not index.exists():
        yield "search.js is missing: pages that are opened from disk have no search"
        return
    items = json.loads(index.read_text().partition("=")[2].strip().rstrip(";"))["items"]
    found = {(site / x["location"].partition("#")[0]).resolve() for x in items}
    yield from (f"{p.relative_to(site)} is not in the search" for p in sorted(pages - found))


if __name__ == "__main__":
    problems = list(faults(Path(sys.argv[1]).resolve()))
    print("\n".join(problems) or "no faults")
    sys.exit(bool(problems))
