"""Build the documentation as a site: pages of the repository, executed notebooks, a reference from docstrings.

    python docs/site.py OUT [--pages] [--quick]

Markdown is written to ``OUT/source``, and mkdocs-material (extra ``[docs]``) turns it into ``OUT/html``: pages that
load nothing from other sites; they and their search also work from disk. ``--pages``: Markdown only. ``--quick``:
notebooks are not executed.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html import escape
from importlib import import_module
from pathlib import Path
from typing import Any

from polydyn.errors import PolydynError
from polydyn.testing.notebooks import run_cell

ROOT = Path(__file__).resolve().parent.parent
FIRST = ["quickstart", "python", "concepts", "comparison"]
BACKGROUND = [
    "glossary",
    "papers",
    "polyhedral",
    "cpu",
    "gpu-audit",
    "measurements",
    "limits",
    "versions",
    "licences",
    "ROADMAP",
]
"""Pages of docs/ that are background, not guides."""
CONTRIBUTING = ["first_pull_request.md"]
MODULES = ("", ".session", ".ort", ".explore", ".explore.pictures", ".extend", ".errors")
"""The public modules, without ``polydyn``."""
WIDTH = 88
"""Columns of a signature on one line."""
LINK = re.compile(r"(!?)\[([^\]\n]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")
CONFIG = """site_name: polydyn
site_description: A polyhedral compiler for deep-learning models whose shapes are unknown until run time
docs_dir: source
site_dir: html
use_directory_urls: false
theme:
  name: material
  font: false
  palette:
    - {media: "(prefers-color-scheme: light)", scheme: default, toggle: {icon: material/weather-night, name: dark}}
    - {media: "(prefers-color-scheme: dark)", scheme: slate, toggle: {icon: material/weather-sunny, name: light}}
  features: [navigation.sections, navigation.top, content.code.copy, search.highlight]
plugins: [search, offline]
extra_css: [wide.css]
extra: {polyfills: [frame_worker.js]}
markdown_extensions: [tables, admonition, md_in_html, pymdownx.details, pymdownx.superfences, {toc: {permalink: true}}]
"""


STYLE = """.md-grid { max-width: 76rem } .md-typeset pre > code { font-size: .68rem }
[data-md-color-scheme=default] { --jp-content-font-color0: #1b1e24; --jp-layout-color0: #fff }
[data-md-color-scheme=slate] { --jp-content-font-color0: #e6e8ec; --jp-layout-color0: #15171c }
"""
"""Makes pages wide enough for 120 columns of code between both navigation lists, and gives pictures the colours of the
site's theme, whatever the system prefers: they use the variables of JupyterLab."""


def write_pages(source: Path, execute: bool) -> list[Any]:
    """Write all pages as Markdown below ``source`` and return mkdocs' navigation. ``execute``: run the notebooks."""
    source.mkdir(parents=True)
    shutil.copytree(ROOT / "docs" / "pictures", source / "pictures")
    (source / "wide.css").write_text(STYLE)
    shutil.copyfile(ROOT / "docs" / "frame_worker.js", source / "frame_worker.js")  # for the search from disk
    pages = {"index.md": ROOT / "README.md"}
    pages |= {f"{name.lower()}.md": ROOT / f"{name}.md" for name in ("CONTRIBUTING", "SECURITY", "CHANGELOG")}
    pages |= {p.name: p for p in sorted((ROOT / "docs").glob("*.md"))}
    for folder in ("adr", "notes"):
        pages |= {f"{folder}/{p.name}": p for p in sorted((ROOT / "docs" / folder).glob("*.md"))}
    notebooks = sorted((ROOT / "notebooks").glob("*.ipynb"))
    places = {path: name for name, path in pages.items()}
    places |= {p: f"notebooks/{p.stem}.md" for p in notebooks}
    for name, path in pages.items():
        _write(source / name, _linked(path.read_text(), path, name, places))
    for p in notebooks:
        _write(source / places[p], _linked("\n".join(_notebook(p, execute)), p, places[p], places))
    references = reference()
    for name, text in references.items():
        _write(source / name, text)
    background = [f"{n}.md" for n in BACKGROUND]
    first = [f"{n}.md" for n in FIRST]
    listed = background + first + CONTRIBUTING
    guides = [p.name for p in sorted((ROOT / "docs").glob("*.md")) if p.name not in listed]
    return [
        {"Start": ["index.md", *first]}, {"Tutorials": [{_title(source / places[p]): places[p]} for p in notebooks]},
        {"Guides": guides}, {"Reference": [{"polydyn" + m: _reference_page(m)} for m in MODULES]},
        {"Background": background}, {"Contributing": ["contributing.md", *CONTRIBUTING, "security.md", "changelog.md"]},
        {"Decisions": [n for n in pages if n.startswith("adr/")]},
        {"Notes": [n for n in pages if n.startswith("notes/")]},
    ]  # fmt: skip


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _title(path: Path) -> str:
    return path.read_text().partition("\n")[0].lstrip("# ")


def _linked(text: str, path: Path, name: str, places: dict[Path, str]) -> str:
    """Return the text with links to pages of the site; links to other files of the repository become plain text."""

    def link(m: re.Match[str]) -> str:
        image, shown, target, part = m[1], m[2], m[3], m[4] or ""
        if "://" in target:
            return m[0]
        aim = (path.parent / target).resolve()
        up = "../" * name.count("/")
        if aim in places:
            return f"[{shown}]({up}{places[aim]}{part})"
        if image and aim.parent == ROOT / "docs" / "pictures" and aim.suffix == ".svg":
            return f"<div>{aim.read_text().strip()}</div>"  # an image would not see the page's theme
        if image and aim.parent == ROOT / "docs" / "pictures":
            return f"![{shown}]({up}pictures/{aim.name})"
        if aim in (ROOT / "docs" / "adr", ROOT / "docs" / "notes"):
            return f"[{shown}]({up}{aim.name}/README.md)"
        return shown

    return LINK.sub(link, text)


def _notebook(path: Path, execute: bool) -> Iterator[str]:
    """Yield a notebook as Markdown, with the output of its cells if ``execute`` is set."""
    scope: dict[str, Any] = {"__name__": "__main__"}
    before = Path.cwd()
    os.chdir(path.parent)
    try:
        for cell in json.loads(path.read_text())["cells"]:
            text = "".join(cell["source"])
            if cell["cell_type"] == "markdown":
                yield text + "\n"
                continue
            yield f"```python\n{text}\n```\n"
            if execute:
                yield from _shown(cell, scope, path.name)
    finally:
        os.chdir(before)


def _shown(cell: dict[str, Any], scope: dict[str, Any], name: str) -> Iterator[str]:
    shown = run_cell(cell, scope, name)
    if shown.printed.strip():
        yield f"```\n{shown.printed.rstrip()}\n```\n"
    if hasattr(shown.value, "_repr_html_"):
        yield f"<div>{shown.value._repr_html_()}</div>\n".replace("\n\n", "\n")


def _reference_page(module: str) -> str:
    return f"reference{module.replace('.', '_')}.md"


def reference() -> dict[str, str]:
    """Return the pages of the public modules as Markdown: names with their signatures and docstrings, each once."""
    pages: dict[str, str] = {}
    places: dict[int, str] = {}
    for m in MODULES:
        module = import_module(f"polydyn{m}")
        public = getattr(module, "__all__", None) or vars(module)["_LAZY"]
        parts = [f"# polydyn{m}\n", _prose(inspect.getdoc(module) or "")]
        for n in sorted(public):
            x = getattr(module, n)
            if not (inspect.isclass(x) or inspect.isfunction(x)):
                continue
            parts.append(f"## {n}\n")
            if id(x) in places:
                parts.append(f"The same as [polydyn.{n}]({places[id(x)]}#{n.lower()}).\n")
                continue
            places[id(x)] = _reference_page(m)
            parts += _entry(n, x)
        pages[_reference_page(m)] = "\n".join(parts)
    return pages


def _entry(name: str, x: Any) -> Iterator[str]:
    """Yield a function, or a class with its methods and properties."""
    yield _code(_signature(name, x))
    yield _prose(inspect.getdoc(x) or "")
    if not inspect.isclass(x):
        return
    if issubclass(x, PolydynError) and x is not PolydynError:
        yield f"[What it looks like, and what to do](errors.md#{name.lower()})\n"
    for member, f in sorted(vars(x).items()):
        if member.startswith("_") or not inspect.getdoc(f):
            continue
        if isinstance(f, property):
            kind = inspect.signature(f.fget).return_annotation if f.fget else ""
            yield f"### {name}.{member}\n\n{_code(f'{member}: {kind}')}\n{_prose(inspect.getdoc(f) or '')}"
        elif isinstance(f, (classmethod, staticmethod)) or inspect.isfunction(f):
            text = _signature(member, getattr(x, member))
            yield f"### {name}.{member}\n\n{_code(text)}\n{_prose(inspect.getdoc(f) or '')}"


def _prose(doc: str) -> str:
    """Return a docstring as Markdown: double backticks become code, an indented block or a session a block of code."""
    lines, block = [], False
    for line in doc.splitlines():
        code = line.startswith((">>>", "...", "    ")) or (block and line.strip() == "")
        if code != block and (code or line.strip()):
            lines.append("```python" if code else "```")
            block = code
        texts = line.replace("``", "`").split("`")
        lines.append(line if block else "`".join(t if k % 2 else escape(t, False) for k, t in enumerate(texts)))
    return "\n".join([*lines, "```"] if block else lines) + "\n"


def _code(text: str) -> str:
    return f"```python\n{text}\n```\n"


def _signature(name: str, x: Any) -> str:
    """Return a name with its parameters and their types, one a line if they do not fit on one."""
    try:
        signature = inspect.signature(x)
    except (TypeError, ValueError):
        return name
    text = f"{name}{signature}".replace("'", "")
    if len(text) <= WIDTH:
        return text
    parameters, bare = [], False
    for p in signature.parameters.values():
        if p.kind is p.KEYWORD_ONLY and not bare:
            parameters.append("*")
        bare = bare or p.kind in (p.KEYWORD_ONLY, p.VAR_POSITIONAL)
        whole = str(p).replace("'", "")
        parameters.append(whole if len(whole) <= WIDTH else f"{whole.partition(' = ')[0]} = ...")
    result = signature.return_annotation
    arrow = "" if result is inspect.Signature.empty else f" -> {result}".replace("'", "")
    return f"{name}(\n{''.join(f'    {p},{chr(10)}' for p in parameters)}){arrow}"


def main() -> None:
    """Build the site."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--pages", action="store_true")
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    if arguments.out.exists() and any(x.name not in ("source", "html", "mkdocs.yml") for x in arguments.out.iterdir()):
        sys.exit(f"{arguments.out} holds something else; name an empty folder")
    shutil.rmtree(arguments.out, ignore_errors=True)
    nav = write_pages(arguments.out / "source", not arguments.quick)
    (arguments.out / "mkdocs.yml").write_text(f"{CONFIG}nav: {json.dumps(nav)}\n")
    if not arguments.pages:
        command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--config-file", arguments.out / "mkdocs.yml"]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
