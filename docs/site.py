"""The text of a page of the documentation's site, from the Markdown in docs/; ``zensical.toml`` describes the site.

A page that is only the path of a file outside docs/ shows that file: Markdown, or a notebook with its stored outputs.
Links to such a file lead to its page; links to other files become text. Pictures in SVG become part of the page, so
that they take the colours of its theme. Sessions of Python (``>>>``) in docstrings are code.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
STUB = re.compile(r"\s*`(\S+\.(?:md|ipynb))`\s*")
SESSION = re.compile(r"(?:^(?:>>>|\.\.\.) .*\n?)+", re.MULTILINE)
LINK = re.compile(r"(!?)\[([^\]\n]*)\]\(([^)\s#:]+)(#[^)\s]*)?\)")


def expanded(text: str, page: Path) -> str:
    """Return the Markdown that the site shows for the text of a page. ``page``: its absolute path, below docs/."""
    origin = page
    if stub := STUB.fullmatch(text):
        origin = Path(os.path.normpath(page.parent / stub[1]))
        text = notebook(origin) if origin.suffix == ".ipynb" else origin.read_text()
    text = SESSION.sub(lambda m: f"```pycon\n{re.sub(' *# doctest:.*', '', m[0]).rstrip()}\n```\n", text)
    fenced = re.split(r"(^```.*?^```)", text, flags=re.MULTILINE | re.DOTALL)
    return "".join(t if k % 2 else LINK.sub(lambda m: _link(m, origin, page), t) for k, t in enumerate(fenced))


def _link(link: re.Match[str], origin: Path, page: Path) -> str:
    image, shown, target, part = link[1], link[2], link[3], link[4] or ""
    aim = Path(os.path.normpath(origin.parent / target))
    if image and aim.suffix == ".svg":
        return f"<div>{aim.read_text().strip()}</div>"
    aim = stubs().get(aim, aim)
    aim = aim / "README.md" if (aim / "README.md").exists() else aim
    if not aim.is_relative_to(DOCS) or not aim.is_file():
        return shown
    return f"{image}[{shown}]({os.path.relpath(aim, page.parent)}{part})"


@cache
def stubs() -> dict[Path, Path]:
    """Map each file outside docs/ to the page that shows it."""
    found = {p: STUB.fullmatch(p.read_text()) for p in DOCS.rglob("*.md")}
    return {Path(os.path.normpath(p.parent / m[1])): p for p, m in found.items() if m}


def notebook(path: Path) -> str:
    """Return a notebook as Markdown with its stored outputs."""
    cells = json.loads(path.read_text())["cells"]
    return "\n".join(part for cell in cells for part in _cell(cell))


def _cell(cell: dict[str, Any]) -> Iterator[str]:
    source = "".join(cell["source"])
    yield source + "\n" if cell["cell_type"] == "markdown" else f"```python\n{source}\n```\n"
    for output in cell.get("outputs", ()):
        if "text" in output:
            yield f"```text\n{''.join(output['text']).rstrip()}\n```\n"
        elif html := "".join(output["data"].get("text/html", ())):
            yield f"<div>{html}</div>\n".replace("\n\n", "\n")
