"""Nothing is there in name only: every mechanism of the papers runs when a model is compiled or tuned, and shows."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from polydyn.explore import groups
from polydyn.schedules.solution.patterns import NAMES
from polydyn.search.dispatch.build import DISPATCHERS
from polydyn.search.strategies import STRATEGIES
from polydyn.testing.kernel_graphs import graph
from tests.support.paths import ROOT
from tests.support.reached import WAYS

PAGE = ROOT / "docs" / "mechanisms.md"
ENTRY, TEXT = re.compile(r"`([\w/]+\.py):([\w.]+)`"), re.compile(r"`([^`]+)`")
SEARCH_MODULES = (
    "spaces/*.py",
    "explorers/*.py",
    "dispatch/*.py",
    "select.py",
    "cost.py",
    "finals.py",
    "strategies.py",
)
"""Modules of ``polydyn/search`` whose public functions and classes must all run in some search."""
NEVER_CALLED = ("EmptySpaceError", "Strategy")
"""An error, and a class whose instances are made on import."""
QUICK = ("compile", "tune polydyn", "tune bladedisc")
"""Ways in every run of the tests; the others are slow."""


@dataclass(frozen=True)
class Mechanism:
    """A row of docs/mechanisms.md."""

    name: str
    where: tuple[tuple[str, str], ...]
    way: str
    effects: tuple[str, ...]


def mechanisms() -> list[Mechanism]:
    out = []
    for line in PAGE.read_text().splitlines():
        cells = [c.strip() for c in line.strip("|").split("|")]
        if line.startswith("| ") and len(cells) == 5 and cells[0] != "mechanism":
            out.append(Mechanism(cells[0], tuple(ENTRY.findall(cells[2])), cells[3], tuple(TEXT.findall(cells[4]))))
    return out


@dataclass(frozen=True)
class Trace:
    """The record of a way: functions as (file, first line, name), and all texts."""

    functions: frozenset[tuple[str, int, str]]
    text: str

    def ran(self, path: str, name: str) -> bool:
        """Return whether a function ran; of a class, whether one was made or a method ran."""
        node = definition(path, name)
        lines = {node.lineno, *(d.lineno for d in node.decorator_list)}
        if isinstance(node, ast.FunctionDef):
            return any((path, line, node.name) in self.functions for line in lines)
        inside = range(min(lines), (node.end_lineno or 0) + 1)
        return (path, 0, name) in self.functions or any(p == path and n in inside for p, n, _ in self.functions)


def definition(path: str, name: str) -> ast.FunctionDef | ast.ClassDef:
    body = ast.parse((ROOT / path).read_text()).body
    *outer, last = name.split(".")
    for part in outer:
        body = next(n for n in body if isinstance(n, ast.ClassDef) and n.name == part).body
    return next(n for n in body if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name == last)


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A compiler cache of these tests' own, so that nothing that a way compiles is found there before."""
    return tmp_path_factory.mktemp("mechanisms")


_TRACES: dict[str, Trace] = {}


def trace_of(way: str, folder: Path) -> Trace:
    if way not in _TRACES:
        env = {**os.environ, "POLYDYN_CACHE": str(folder / way.replace(" ", "_"))}
        command = [sys.executable, "-m", "tests.support.reached", way]
        out = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
        assert out.returncode == 0, out.stderr
        found = json.loads(out.stdout)
        _TRACES[way] = Trace(frozenset(tuple(x) for x in found["reached"]), found["text"])
    return _TRACES[way]


@pytest.mark.parametrize("way", [pytest.param(w, marks=[] if w in QUICK else pytest.mark.slow) for w in WAYS])
def test_what_a_way_names_runs_and_shows(way: str, caches: Path) -> None:
    rows = [m for m in mechanisms() if m.way == way]
    did = trace_of(way, caches)
    still = [f"{m.name}: {path}:{name}" for m in rows for path, name in m.where if not did.ran(path, name)]
    assert not still, f"{way} does not run: {still}"
    absent = [f"{m.name}: {text}" for m in rows for text in m.effects if text not in did.text]
    assert not absent, f"{way} does not write: {absent}"


@pytest.mark.slow
def test_every_term_of_a_paper_in_the_glossary_runs_somewhere(caches: Path) -> None:
    """A row may name several functions; each of them runs in some way."""
    did = [trace_of(w, caches) for w in WAYS]
    still = []
    for line in (ROOT / "docs" / "glossary.md").read_text().splitlines():
        cells = [c.strip() for c in line.strip("|").split("|")]
        if len(cells) == 4 and re.match(r"(TS|V|D|F|B)\b", cells[1]):
            still += [f"{cells[0]}: {p}:{n}" for p, n in ENTRY.findall(cells[3]) if not any(t.ran(p, n) for t in did)]
    assert not still, f"terms in name only: {still}"


def test_a_function_that_did_not_run_is_seen() -> None:
    nothing, something = Trace(frozenset(), ""), Trace(frozenset({("polydyn/search/select.py", 0, "Selection")}), "")
    assert not nothing.ran("polydyn/search/select.py", "vote")
    assert not nothing.ran("polydyn/search/select.py", "Selection")
    assert something.ran("polydyn/search/select.py", "Selection")
    (line,) = {definition("polydyn/search/select.py", "vote").lineno}
    assert Trace(frozenset({("polydyn/search/select.py", line, "vote")}), "").ran("polydyn/search/select.py", "vote")
    assert not Trace(frozenset({("polydyn/search/cost.py", line, "vote")}), "").ran("polydyn/search/select.py", "vote")


def test_every_row_names_code_a_way_and_an_effect() -> None:
    rows = mechanisms()
    assert len(rows) > 45
    empty = [m.name for m in rows if not m.where or m.way not in WAYS or not m.effects]
    assert not empty, empty


def test_every_name_that_one_can_choose_has_a_row() -> None:
    rows = mechanisms()
    patterns = {n for m in rows for n in TEXT.findall(m.name) if m.name.startswith("pattern")}
    assert patterns == set(NAMES)
    ways = {m.way.removeprefix("tune ") for m in rows}
    assert ways >= set(STRATEGIES), "a strategy that reaches no mechanism"
    assert {s.dispatcher for s in STRATEGIES.values()} == set(DISPATCHERS), "a dispatcher that no strategy names"


def test_every_pattern_answers_for_a_group() -> None:
    """A pattern that runs may decline; these are the patterns whose matrix is solved."""
    found = {g.choice().pattern.name for name in ("rows", "tables", "products") for g in groups(graph(name))}
    assert found == {"matmul-like", "element-wise", "reduce", "multi-reduce", "total"}


@pytest.mark.slow
def test_every_part_of_the_search_runs_in_some_search(caches: Path) -> None:
    did = [trace_of(w, caches) for w in WAYS if w.startswith("tune")]
    unused = []
    for pattern in SEARCH_MODULES:
        for file in sorted((ROOT / "polydyn" / "search").glob(pattern)):
            path = str(file.relative_to(ROOT))
            names = [
                n.name for n in ast.parse(file.read_text()).body
                if isinstance(n, ast.FunctionDef | ast.ClassDef) and not n.name.startswith("_")
            ]  # fmt: skip
            unused += [f"{path}:{n}" for n in names if n not in NEVER_CALLED and not any(t.ran(path, n) for t in did)]
    assert not unused, f"in name only: {unused}"
