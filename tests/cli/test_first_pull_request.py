"""docs/first_pull_request.md: its edits apply to this repository, and the tests that it names pass then."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.patches import changes
from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "first_pull_request.md").read_text()
FOLDERS = ("polydyn", "schedules", "codegen", "tests", "benchmarks", "docs")


@pytest.fixture(scope="module")
def edited(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository with all edits of the page."""
    copy = tmp_path_factory.mktemp("first") / "polydyn"
    ignored = shutil.ignore_patterns("__pycache__", "out", "results")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignored)
    for name in ("setup.cfg", "pyproject.toml", "ruff.toml", "README.md", "Makefile"):
        shutil.copy(ROOT / name, copy / name)
    for change in changes(PAGE):
        change.apply(copy)
    return copy


def test_the_edits_apply(edited: Path) -> None:
    for path in ("operators/unfold.py", "passes/signs.py"):
        assert (edited / "polydyn" / "graph" / path).exists()
    assert '"exp2": OpInfo' in (edited / "schedules/expr.py").read_text()


@pytest.mark.slow
def test_the_tests_of_the_page_pass(edited: Path) -> None:
    commands = re.findall(r"^\$ \.venv/bin/python (-m pytest .*)$", PAGE, re.MULTILINE)
    assert len(commands) >= 7
    for command in commands:
        done = subprocess.run(
            [sys.executable, *shlex.split(command)], cwd=edited, env=os.environ | {"PYTHONPATH": str(edited)},
            capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"


def test_a_hunk_that_is_cut_is_noticed() -> None:
    whole = "```diff\n--- a/x\n+++ b/x\n@@ -1,2 +1,2 @@\n a\n-b\n+c\n```\n"
    (change,) = changes(whole)
    assert (change.path, change.line, change.before, change.after) == ("x", 1, ("a", "b"), ("a", "c"))
    with pytest.raises(ValueError, match="lines"):
        changes(whole.replace(" a\n", ""))
