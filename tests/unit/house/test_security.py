"""SECURITY.md: every threat has a test that exists."""

from __future__ import annotations

import ast
import re

import pytest

from tests.support.paths import ROOT

ROWS = [
    line for line in (ROOT / "SECURITY.md").read_text().partition("## Threats")[2].partition("\n## ")[0].splitlines()
    if line.startswith("|")
][2:]  # fmt: skip


def problem(row: str) -> str:
    """Return what is wrong with a row's last column, or "" if it names tests that exist."""
    tests = re.findall(r"`([\w/]+\.py)::(\w+)`", row.strip("|").rpartition("|")[2])
    if not tests:
        return "no test"
    for file, name in tests:
        path = ROOT / file
        tree = ast.parse(path.read_text()) if path.exists() else ast.Module([], [])
        if name not in {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}:
            return f"{file}::{name} does not exist"
    return ""


@pytest.mark.parametrize("row", ROWS, ids=[r.split("|")[1].strip()[:40] for r in ROWS])
def test_every_threat_has_tests(row: str) -> None:
    assert not problem(row)


def test_a_threat_without_a_test_is_noticed() -> None:
    assert len(ROWS) > 15
    assert problem("| a | b | |") == "no test"
    assert "does not exist" in problem("| a | b | `tests/unit/house/test_security.py::test_nothing` |")
    assert "does not exist" in problem("| a | b | `tests/nothing.py::test_nothing` |")


def test_temporary_names_are_random() -> None:
    """No module writes to a fixed name in the system's folder for temporary files."""
    fixed = re.compile(r"""["']/(tmp|var/tmp|dev/shm)/|tempfile\.mktemp\(|gettempdir\(\)""")
    found = [
        f"{p.relative_to(ROOT)}:{k}"
        for folder in ("polydyn", "codegen", "schedules")
        for p in (ROOT / folder).rglob("*.py")
        for k, line in enumerate(p.read_text().splitlines(), 1)
        if fixed.search(line)
    ]
    assert not found
    assert fixed.search('open("/tmp/polydyn.log")') and not fixed.search('tempfile.mkstemp(prefix="a")')
