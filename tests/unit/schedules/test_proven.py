"""Only a proven schedule becomes loops: the modules that may prove, and that may make the tree for code generation."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from polydyn.codegen.cpu.rows import NestKernel
from polydyn.codegen.cpu.target import AVX2
from polydyn.codegen.pipeline import loops
from polydyn.schedules.errors import LegalityError
from polydyn.schedules.proof.proven import Proven
from polydyn.schedules.tree.scheduled import Scheduled
from polydyn.schedules.tree.strategies import nest
from tests.support.polyhedral_groups import layer_norm, softmax

ROOT = Path(__file__).parents[3]
PROVEN = "schedules/proof/proven.py"
EXPLORE = {"polydyn/explore/pictures/trees.py"}
"""Draws the loops of schedules that need no proof; its result is text."""
PHASES = {"M0": 0, "M1": 0, "D0": 1, "D1": 1, "Y": 2}
WRONG_PHASES = {**PHASES, "Y": 1}


@cache
def product_files() -> tuple[tuple[str, str], ...]:
    """Return the product's files and their texts. The links inside ``polydyn/`` are the same files again."""
    found = []
    for folder in ("codegen", "schedules", "polydyn"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if not name.startswith(("polydyn/codegen", "polydyn/schedules", "polydyn/testing")):
                found.append((name, path.read_text()))
    return tuple(found)


def calls(name: str) -> set[str]:
    """Return the files that call a function or a method of that name."""

    def is_one(n: ast.AST) -> bool:
        return isinstance(n, ast.Call) and name in (getattr(n.func, "id", ""), getattr(n.func, "attr", ""))

    return {f for f, text in product_files() if f"{name}(" in text and any(map(is_one, ast.walk(ast.parse(text))))}


def test_only_a_proof_makes_a_tree_for_code_generation() -> None:
    assert calls("tiled") - EXPLORE == {PROVEN}
    imported = re.compile(r"from polydyn\.codegen\.isl_ast import .*\bgenerate\b")
    assert {f for f, text in product_files() if imported.search(text)} - EXPLORE == {"codegen/pipeline.py"}


def test_one_pipeline_builds_every_kernel() -> None:
    """Only it and the walk over keys of an attention request loops; parts of a body may have separate passes."""
    imported = re.compile(r"from polydyn\.codegen\.pipeline import .*\bloops\b")
    assert {f for f, text in product_files() if imported.search(text)} == {"codegen/family.py", "codegen/cuda/keys.py"}
    counted = {f for f, text in product_files() if "task_count(" in text and f.startswith("codegen/c")}
    assert not counted, "the band becomes tasks in the pipeline"


def test_kernels_leave_the_proof_to_the_type() -> None:
    while_it_is_written = {"polydyn/explore/schedules.py", "schedules/handmade/steps.py"}
    assert calls("prove") - while_it_is_written == {PROVEN}


def test_nobody_else_makes_a_proven_without_a_proof() -> None:
    made = re.compile(r"(__new__|copy|replace)\(\s*(Proven|proven|self\.proven)\b")
    assert {file for file, text in product_files() if made.search(text)} == {PROVEN}


@pytest.mark.parametrize("tiled", [False, True])
def test_a_schedule_that_does_not_compute_its_group_becomes_no_kernel(tiled: bool) -> None:
    wrong = NestKernel("wrong", softmax(), ("r",), WRONG_PHASES, AVX2, tiled=tiled)
    with pytest.raises(LegalityError):
        wrong.build()
    assert NestKernel("right", softmax(), ("r",), PHASES, AVX2, tiled=tiled).build().text


def test_loops_take_nothing_but_a_proven_schedule() -> None:
    t = nest(softmax(), ("r",), PHASES, False)
    assert loops("softmax", Proven(t))
    for other in (t, t.tiled()):
        with pytest.raises(AttributeError):
            loops("softmax", other)  # type: ignore[arg-type]


def test_an_obligation_that_fails_leaves_nothing_proven() -> None:
    def refuse(t: Scheduled) -> None:
        raise LegalityError(f"{t.group.name} has no room")

    t = nest(layer_norm(), ("r",), dict.fromkeys((s.name for s in layer_norm().statements), 0), False)
    with pytest.raises(LegalityError):
        Proven(t, refuse)
    with pytest.raises(LegalityError, match="has no room"):
        Proven(nest(softmax(), ("r",), PHASES, False), refuse)


def test_what_is_proven_does_not_change() -> None:
    proven = Proven(nest(softmax(), ("r",), PHASES, False))
    with pytest.raises(AttributeError, match="does not change"):
        proven.tiled = replace(proven.tiled, params=())  # type: ignore[misc]
