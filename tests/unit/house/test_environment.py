"""docs/environment.md lists the environment variables that the sources read, and the subjects of the log."""

from __future__ import annotations

import re

from polydyn.logs import SUBJECTS
from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "environment.md").read_text()
PYTHON = re.compile(r"environ(?:\.\w+)?[\[(]\"(\w+)\"|\"((?:POLYDYN|PDEMU)_[A-Z_]+)\"")
C = re.compile(r"(?:getenv|setting)\(\"(\w+)\"")
PRODUCT = ("polydyn", "schedules", "codegen", "tests/conftest.py", "tests/unit")
SET_FOR_CHILDREN = {"PYTHONPATH"}


def variables(text: str, pattern: re.Pattern[str]) -> set[str]:
    """Return the variables that a source reads."""
    return {next(filter(None, found.groups())) for found in pattern.finditer(text)}


def test_reading_is_recognised() -> None:
    text = 'os.environ.get("A"); os.environ["B"]; LACKING = "POLYDYN_X"; "not POLYDYN_Y"'
    assert variables(text, PYTHON) == {"A", "B", "POLYDYN_X"}
    assert variables('getenv("A"); setting("B", 0)', C) == {"A", "B"}


def test_every_variable_is_on_the_page_and_no_other() -> None:
    read: set[str] = set()
    for path in (p for name in PRODUCT for p in ([ROOT / name] if name.endswith(".py") else (ROOT / name).rglob("*"))):
        own = path.name != "test_environment.py"
        if path.suffix in (".py", ".c", ".h", ".cpp") and own and "unit/gpu" not in str(path):
            read |= variables(path.read_text(), PYTHON if path.suffix == ".py" else C)
    rows = [line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| `")]
    listed = {n for row in rows for n in re.findall(r"`([A-Z_]+)`", row)}
    assert read - SET_FOR_CHILDREN == listed


def test_the_subjects_of_the_log_are_on_the_page() -> None:
    rows = [line.split("|")[1].strip(" `") for line in PAGE.partition("## Logs")[2].partition("## For")[0].splitlines()
            if line.startswith("| `")]  # fmt: skip
    assert rows == [*SUBJECTS]
