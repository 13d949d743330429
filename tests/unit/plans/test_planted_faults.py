"""Faults planted in the sources (``testing/planted.py``): what is changed, and what counts as found."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from polydyn.testing import planted
from polydyn.testing.planted import LAYERS, ROOT, changed, copied, faults_in, first_found, sample

FILE = "polydyn/graph/passes/tidy.py"


def all_lines(file: str) -> set[int]:
    return set(range(1, 1 + len((ROOT / file).read_text().splitlines())))


@pytest.mark.parametrize(
    ("before", "after"),
    [("a < b", "a <= b"), ("a + b", "a - b"), ("a and b", "a or b"), ("not a", "a"), ("x if a else y", "y if a else x"),
     ("1", "2"), ("a in b", "a not in b"), ("7", ""), ("f(a)", ""), ("True", ""), ("a < b < c", "")],
)  # fmt: skip
def test_one_operation_is_changed(before: str, after: str) -> None:
    made = changed(ast.parse(before, mode="eval").body)
    assert (ast.unparse(made) if made else "") == after


def test_faults_are_in_executed_lines_and_leave_valid_sources(tmp_path: Path) -> None:
    every = list(faults_in("fusion", FILE, all_lines(FILE)))
    assert len(every) > 20
    some = {every[3].line, every[9].line}
    assert {f.line for f in faults_in("fusion", FILE, some)} == some
    target = tmp_path / FILE
    target.parent.mkdir(parents=True)
    for fault in every:
        fault.plant(tmp_path)
        ast.parse(target.read_text())
        assert target.read_text() != (ROOT / FILE).read_text()
    every[0].remove(tmp_path)
    assert target.read_text() == (ROOT / FILE).read_text()


def test_every_layer_has_its_share() -> None:
    files = {"import": "polydyn/graph/operators/shape_ops.py", "fusion": FILE, "plan": "polydyn/program/host.py",
             "loop IR": "codegen/passes/tiles.py", "run time": "polydyn/runtime/artifact.py"}  # fmt: skip
    lines = {f: all_lines(f) for f in files.values()}
    found = sample(lines, 12, 5)
    assert found == sample(lines, 12, 5) != sample(lines, 12, 6)
    assert [sum(f.layer == layer for f in found) for layer in LAYERS] == [3, 3, 2, 2, 2]


def test_a_copy_is_complete(tmp_path: Path) -> None:
    root = copied(tmp_path)
    assert (root / "polydyn" / "schedules" / "index.py").exists() and (root / "codegen" / "device").is_dir()


def test_what_the_unchanged_sources_fail_too_is_no_find(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seeds 2 and 5 fail without a fault; with it, 5 is wrong and no longer rejected."""
    kinds = {"clean": {2: "error: a", 5: "rejects: b"}, "copy": {2: "error: c", 5: "wrong: d"}}
    runs: list[str] = []

    def run(root: Path, seeds: Sequence[int], cell: str, known: Mapping[int, str]) -> tuple[int, str]:
        runs.append(root.name)
        fails = kinds["copy" if root.name == "copy" else "clean"]
        for s in seeds:
            text = fails.get(s, "")
            if text and text.partition(":")[0] != known.get(s, "").partition(":")[0]:
                return s, text
        return seeds[-1], ""

    monkeypatch.setattr(planted, "_run", run)
    known: dict[int, str] = {}
    assert first_found(Path("copy"), range(9), "array", known) == (5, "wrong: d")
    assert known == {2: "error: a", 5: "rejects: b"} and runs == ["copy", ROOT.name, "copy", ROOT.name]
    assert first_found(Path("copy"), range(5), "array", known) is None
    json.dumps(known)
