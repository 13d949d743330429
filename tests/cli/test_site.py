"""The documentation's site: pages, navigation, reference, links, width of code; and the check of the built site."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from tests.support.paths import ROOT

DOCS = ROOT / "docs"
CONFIG = (ROOT / "zensical.toml").read_text()
MODULES = ("", ".session", ".ort", ".explore", ".explore.pictures", ".extend", ".errors")
"""The public modules, without ``polydyn``."""
COLUMNS = 88
PAGES = sorted(p for p in DOCS.rglob("*.md"))
TABLES = ("adr", "notes")
"""Folders whose pages are reached through their README.md."""


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


site = script("site")


def test_every_page_is_in_the_navigation_once() -> None:
    listed = Counter(re.findall(r'"([\w/.-]+\.md)"', CONFIG))
    pages = {str(p.relative_to(DOCS)) for p in PAGES if p.parent.name not in TABLES or p.name == "README.md"}
    assert set(listed) == pages and set(listed.values()) == {1}


def test_every_link_of_a_page_leads_to_a_page() -> None:
    for page in PAGES:
        text = re.sub(r"^```.*?^```", "", site.expanded(page.read_text(), page), flags=re.MULTILINE | re.DOTALL)
        for target in re.findall(r"\]\(([^)\s#]+)(?:#[^)\s]*)?\)", text):
            aim = Path(os.path.normpath(page.parent / target))
            assert "://" in target or (aim.is_file() and aim.is_relative_to(DOCS)), f"{page} links to {target}"


def test_files_outside_docs_have_their_page() -> None:
    """Links to them lead there; links to files without a page become text."""
    page = DOCS / "adr" / "0028-pictures.md"
    text = site.expanded("[a](../../CONTRIBUTING.md#style) [b](../../setup.cfg) [c](../adr)", page)
    assert text == "[a](../contributing.md#style) b [c](README.md)"
    assert site.expanded("`[a](../../setup.cfg)`\n```\n[a](../../setup.cfg)\n```", page).count("setup.cfg") == 1
    shown = site.expanded((DOCS / "contributing.md").read_text(), DOCS / "contributing.md")
    assert shown.startswith("# Contributing") and "](first_pull_request.md)" in shown


def test_notebooks_are_pages_with_their_outputs() -> None:
    page = DOCS / "notebooks" / "3_changing_a_schedule.md"
    text = site.expanded(page.read_text(), page)
    assert text.startswith("# Writing a schedule") and "```python\nimport tempfile" in text
    assert text.count("<div><svg") == 6 and re.search("```text\n[^`]*for example ACC", text)
    assert not re.search(r"<svg(?:(?!</svg>).)*\n\n", text, re.DOTALL), "an empty line ends HTML in Markdown"


def test_pictures_are_part_of_the_page() -> None:
    """They take their colours from variables that the style sheet sets for each theme."""
    text = site.expanded("![the kernels](pictures/fusion.svg)", DOCS / "concepts.md")
    assert text.startswith("<div><svg") and "var(--jp-content-font-color0" in text and "\n\n" not in text
    assert (DOCS / "site.css").read_text().count("--jp-content-font-color0:") == 2


def test_sessions_in_docstrings_are_code() -> None:
    text = site.expanded("Of:\n\n>>> a = f(\n...     1)  # doctest: +SKIP\n\nEnd.", DOCS / "api" / "polydyn.md")
    assert text == "Of:\n\n```pycon\n>>> a = f(\n...     1)\n```\n\nEnd."


def test_every_public_name_is_described_once() -> None:
    """A class has a page of its own, exceptions share one, functions are on the page of their module."""
    described = {p: re.findall(r"^::: (polydyn[\w.]*)$", p.read_text(), re.MULTILINE) for p in DOCS.glob("api/*.md")}
    homes: dict[int, str] = {}
    for m in reversed(MODULES):  # what two modules have belongs to the shorter one, but exceptions to polydyn.errors
        module = importlib.import_module(f"polydyn{m}")
        for name in module.__all__:
            x = getattr(module, name)
            error = inspect.isclass(x) and issubclass(x, Exception)
            if not inspect.ismodule(x) and not (error and id(x) in homes):
                homes[id(x) if callable(x) else hash((m, name))] = f"polydyn{m}.{name}"
    found = Counter(name for names in described.values() for name in names)
    modules = {f"polydyn{m}" for m in MODULES}
    assert set(found) - modules == set(homes.values()) and set(found.values()) == {1}
    for page, names in described.items():
        if not page.stem.startswith("polydyn"):
            assert [n.rpartition(".")[2] for n in names] == [page.stem]


def test_the_site_loads_nothing_from_elsewhere() -> None:
    """The search from disk needs a script, which Zensical would load from the network if none had this name."""
    assert "[project.plugins.offline]" in CONFIG and 'polyfills = ["iframe-worker.js"]' in CONFIG
    assert "IFrameWorker" in (DOCS / "iframe-worker.js").read_text()
    assert "://" not in CONFIG and "font = false" in CONFIG


def blocks(text: str) -> Iterator[str]:
    """Yield blocks that a reader types or reads as code: no output, no diff, no C that the compiler wrote."""
    kinds = "python|cpp|console|yaml|json|toml|bash|dockerfile|cmake"
    yield from re.findall(rf"^ *```(?:{kinds})\n(.*?)```", text, re.DOTALL | re.MULTILINE)


def wide(text: str) -> list[str]:
    sources = ("def cpu_product", "def gpu_product")  # docs/schedules.md repeats them
    return [x for b in blocks(text) if not b.startswith(sources) for x in b.splitlines() if len(x) > COLUMNS]


def test_code_fits_next_to_the_navigation() -> None:
    for page in (*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"):
        assert not wide(page.read_text()), page


def test_code_that_is_too_wide_is_found() -> None:
    assert wide(f"```python\n{'x' * 89}\n```\n") and not wide(f"```text\n{'x' * 89}\n```\n")


def test_code_of_notebooks_fits_too() -> None:
    for path in sorted(ROOT.glob("notebooks/*.ipynb")):
        cells = [c for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "code"]
        assert not [x for c in cells for x in "".join(c["source"]).splitlines() if len(x) > COLUMNS], path


def test_the_front_page_answers_three_questions() -> None:
    text = (DOCS / "index.md").read_text()
    heads = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert heads[:3] == ["Does my model run?", "Is it faster?", "What do I type?"]


def test_faults_of_a_built_site_are_found(tmp_path: Path) -> None:
    """A lost page, a lost section, a script from elsewhere, a page that the search does not have."""
    check = script("site_check")
    (tmp_path / "a.html").write_text('<h1 id="top">A</h1><a href="b.html#part">b</a><a href="https://x.org">x</a>')
    (tmp_path / "b.html").write_text('<h1 id="part">B</h1><script src="a.js"></script><a href="#part">part</a>')
    (tmp_path / "a.js").write_text("")
    index = {"items": [{"location": "a.html"}, {"location": "b.html#part"}]}
    (tmp_path / "search.js").write_text(f"var __index = {json.dumps(index)};")
    assert list(check.faults(tmp_path)) == []
    (tmp_path / "b.html").write_text(
        '<script src="https://x.org/y.js"></script><a href="c.html">c</a><a href=".">.</a>'
    )
    (tmp_path / "search.js").write_text('var __index = {"items": [{"location": "a.html"}]}')
    assert list(check.faults(tmp_path)) == [
        "a.html links to b.html#part: there is no such section",
        "b.html links to c.html: there is no such file",
        "b.html links to .: there is no such file",
        "b.html loads https://x.org/y.js",
        "b.html is not in the search",
    ]
    (tmp_path / "search.js").unlink()
    assert "search.js is missing" in list(check.faults(tmp_path))[-1]


def test_every_dependency_has_its_licence() -> None:
    module = script("licences")
    page = (DOCS / "licences.md").read_text()
    rows = {line.split("|")[1].strip(): line for line in page.splitlines() if line.startswith("| ")}
    assert set(rows) - {"package"} == set(module.dependencies()), "python docs/licences.py"
    assert not [r for r in rows.values() if "not installed" in r or "not said" in r]
