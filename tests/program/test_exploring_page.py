"""docs/exploring.md and docs/writing-schedules.md: their scripts run and make the pictures that are stored with them.

``pytest tests/program/test_exploring_page.py --update-golden`` draws them again.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.support.paths import ROOT

PAGES = {n: ROOT / "docs" / f"{n}.md" for n in ("exploring", "writing-schedules")}
MAX_PICTURE_BYTES = 300_000
"""Maximum size of all stored pictures together."""


def title(path: Path) -> str:
    return ElementTree.fromstring(path.read_text()).get("aria-label") or ""


@pytest.mark.parametrize("page", PAGES)
def test_the_scripts_draw_the_pictures_of_the_page(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    text = PAGES[page].read_text()
    (tmp_path / "docs" / "pictures").mkdir(parents=True)
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    monkeypatch.chdir(tmp_path)
    scope: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(block, f"{page}.md", "exec"), scope)
    drawn = sorted((tmp_path / "docs" / "pictures").glob("*.svg"))
    assert set(re.findall(r"\]\(pictures/(\w+\.svg)\)", text)) == {p.name for p in drawn}
    for path in drawn:
        stored = ROOT / "docs" / "pictures" / path.name
        if request.config.getoption("--update-golden"):
            shutil.copyfile(path, stored)
        assert title(stored) == title(path), "run this file with --update-golden"


def test_stored_pictures_are_small_and_used() -> None:
    stored = sorted((ROOT / "docs" / "pictures").glob("*.svg"))
    texts = [page.read_text() for page in (*PAGES.values(), ROOT / "docs" / "trust.md")]
    assert all(any(f"pictures/{p.name}" in text for text in texts) for p in stored)
    assert 0 < sum(p.stat().st_size for p in stored) < MAX_PICTURE_BYTES
