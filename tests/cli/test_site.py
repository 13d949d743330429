"""The documentation's site: every page is in the navigation, every link leads to a page."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import ROOT


@pytest.fixture(scope="module")
def site() -> Any:
    spec = importlib.util.spec_from_file_location("site_of_docs", ROOT / "docs" / "site.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def named(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    return [p for x in (nav.values() if isinstance(nav, dict) else nav) for p in named(x)]


def test_every_page_is_there_and_every_link_leads_to_one(site: Any, tmp_path: Path) -> None:
    nav = site.write_pages(tmp_path / "source", execute=False)
    pages = {str(p.relative_to(tmp_path / "source")) for p in (tmp_path / "source").rglob("*.md")}
    assert set(named(nav)) == pages and len(named(nav)) == len(pages)
    assert {"index.md", "reference.md", "notebooks/3_changing_a_schedule.md", "adr/0028-pictures.md"} <= pages
    for name in pages:
        path = tmp_path / "source" / name
        for target in re.findall(r"\]\(([^)\s#]+)(?:#[^)\s]*)?\)", path.read_text()):
            assert "://" in target or (path.parent / target).exists(), f"{name} links to {target}"


def test_cells_show_what_they_print_and_draw(site: Any) -> None:
    scope: dict[str, Any] = {}
    assert list(site._shown("x = 2\nprint(x)", scope)) == ["```\n2\n```\n"]
    (shown,) = site._shown("from polydyn.explore import pictures\npictures.lines({})", scope)
    assert shown.startswith("<div><svg")
    assert list(site._shown("x", scope)) == []


def test_every_dependency_has_its_licence() -> None:
    spec = importlib.util.spec_from_file_location("licences_of_docs", ROOT / "docs" / "licences.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = (ROOT / "docs" / "licences.md").read_text()
    rows = {line.split("|")[1].strip(): line for line in page.splitlines() if line.startswith("| ")}
    assert set(rows) - {"package"} == set(module.dependencies()), "python docs/licences.py"
    assert not [r for r in rows.values() if "not installed" in r or "not said" in r]


def test_the_reference_has_the_public_names(site: Any) -> None:
    text = site.reference()
    for name in ("polydyn.compile", "polydyn.Program", "polydyn.explore.pictures.domain", "polydyn.extend.c_operator"):
        assert f"### {name}\n" in text, name
    assert "`run(self, feeds" in text


def test_every_error_class_of_the_reference_leads_to_its_section(site: Any) -> None:
    sections = re.findall(r"^### (\w+)$", (ROOT / "docs" / "errors.md").read_text(), re.MULTILINE)
    links = re.findall(r"\]\(errors\.md#(\w+)\)", site.reference())
    assert {"modelerror", "missingnameerror", "legalityerror"} < set(links) <= {s.lower() for s in sections}
