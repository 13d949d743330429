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
    assert (tmp_path / "source" / "frame_worker.js").exists()
    assert {"index.md", "reference.md", "notebooks/3_changing_a_schedule.md", "adr/0028-pictures.md"} <= pages
    for name in pages:
        path = tmp_path / "source" / name
        for target in re.findall(r"\]\(([^)\s#]+)(?:#[^)\s]*)?\)", path.read_text()):
            assert "://" in target or (path.parent / target).exists(), f"{name} links to {target}"


def test_cells_show_what_they_print_and_draw(site: Any) -> None:
    scope: dict[str, Any] = {}

    def shown(text: str) -> list[str]:
        return list(site._shown({"id": "a", "source": [text]}, scope, "book"))

    assert shown("x = 2\nprint(x)") == ["```\n2\n```\n"]
    (picture,) = shown("from polydyn.explore import pictures\npictures.lines({})")
    assert picture.startswith("<div><svg")
    assert shown("x") == []


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
    """Each is described once, with its properties, in Markdown that wraps."""
    pages = site.reference()
    text = "\n".join(pages.values())
    for page, name in (("", "tune"), ("", "Program.kernel_count"), ("_explore_pictures", "domain"),
                       ("_extend", "c_operator"), ("_session", "InferenceSession.run")):  # fmt: skip
        level = "###" if "." in name else "##"
        assert f"\n{level} {name}\n" in pages["reference.md" if "InferenceSession" in name else f"reference{page}.md"]
    assert "``" not in text.replace("```", "") and "<pre>" not in text and text.count("\ntune(\n") == 1
    assert "The same as [polydyn.OrtValue](reference.md#ortvalue)" in pages["reference_session.md"]
    code = [line for block in text.split("```python\n")[1:] for line in block.partition("```")[0].splitlines()]
    assert max(map(len, code)) <= 120
    assert site._prose("Of ``a<b`` and <b>:\n\n    x = 1\n\nEnd.") == (
        "Of `a<b` and &lt;b&gt;:\n\n```python\n    x = 1\n\n```\nEnd.\n"
    )


def test_pictures_follow_the_theme_of_the_site(site: Any) -> None:
    """They are part of the page, and take their colours from variables that the style sheet sets for each theme."""
    page = ROOT / "docs" / "concepts.md"
    text = site._linked("![the kernels](pictures/fusion.svg)", page, "concepts.md", {})
    assert text.startswith("<div><svg") and "var(--jp-content-font-color0" in text and "\n\n" not in text
    assert site.STYLE.count("--jp-content-font-color0:") == 2


def test_the_site_and_its_search_load_nothing_from_elsewhere(site: Any) -> None:
    """The search from disk needs a script, which the plugin would load from the network."""
    assert "plugins: [search, offline]" in site.CONFIG and "polyfills: [frame_worker.js]" in site.CONFIG
    assert "IFrameWorker" in (ROOT / "docs" / "frame_worker.js").read_text() and "://" not in site.CONFIG


def test_every_error_class_of_the_reference_leads_to_its_section(site: Any) -> None:
    sections = re.findall(r"^### (\w+)$", (ROOT / "docs" / "errors.md").read_text(), re.MULTILINE)
    links = re.findall(r"\]\(errors\.md#(\w+)\)", "".join(site.reference().values()))
    assert {"modelerror", "missingnameerror", "legalityerror"} < set(links) <= {s.lower() for s in sections}
