"""docs/exploring.md: its scripts run and make the pictures that are stored with it.

``pytest tests/program/test_exploring_page.py --update-golden`` draws them again.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "exploring.md"
MAX_PICTURE_BYTES = 250_000
"""Maximum size of all stored pictures together."""


def title(path: Path) -> str:
    return ElementTree.fromstring(path.read_text()).get("aria-label") or ""


def test_the_scripts_draw_the_pictures_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    text = PAGE.read_text()
    drawn = re.findall(r'\.save\("docs/pictures/(\w+\.svg)"\)', text)
    assert set(re.findall(r"\]\(pictures/(\w+\.svg)\)", text)) == set(drawn)
    (tmp_path / "docs" / "pictures").mkdir(parents=True)
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    monkeypatch.chdir(tmp_path)
    scope: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(block, PAGE.name, "exec"), scope)
    for name in drawn:
        stored = ROOT / "docs" / "pictures" / name
        if request.config.getoption("--update-golden"):
            shutil.copyfile(tmp_path / "docs" / "pictures" / name, stored)
        assert title(stored) == title(tmp_path / "docs" / "pictures" / name), "run this file with --update-golden"


def test_stored_pictures_are_small_and_used() -> None:
    stored = sorted((ROOT / "docs" / "pictures").glob("*.svg"))
    assert all(f"pictures/{p.name}" in PAGE.read_text() for p in stored)
    assert 0 < sum(p.stat().st_size for p in stored) < MAX_PICTURE_BYTES
