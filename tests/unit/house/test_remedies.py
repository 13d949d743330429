"""Remedies of errors are sentences that say what to do, not values."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.support.paths import ROOT

VALUES = ("a ", "an ", "one of", "the number", "None", "True", "False", "'", *"0123456789")
"""Beginnings of remedies that only name a value. ``pass None or 'x'`` says what to do with it."""


def literal_beginnings() -> Iterator[tuple[str, str]]:
    """Yield the place and the first words of the remedies that are written where an error is raised, outside of the
    rooms of schedules and lowering."""
    for path in sorted(p for p in (ROOT / "polydyn").rglob("*.py") if "lowering" not in p.parts):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.keyword) or node.arg != "remedy":
                continue
            value = node.value
            if isinstance(value, ast.JoinedStr) and value.values:
                value = value.values[0]
            place = f"{path.relative_to(ROOT)}:{node.value.lineno}"
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield place, value.value
            if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr == "join":
                yield place, "'"


def test_remedies_say_what_to_do() -> None:
    beginnings = [*literal_beginnings()]
    assert len(beginnings) > 300, "remedies were not found"
    assert not [(place, text) for place, text in beginnings if text.startswith(VALUES)]
