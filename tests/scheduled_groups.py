"""Groups in the names that kernels use, scheduled, with numbers to interpret them: shared by tests of schedules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from polydyn.schedules.dependence import Dependences, analyse
from polydyn.schedules.expr import const, op
from polydyn.schedules.index import IndexLike
from polydyn.schedules.interpret import interpret
from polydyn.schedules.model import Group, Statement
from polydyn.schedules.polyhedra import context
from polydyn.schedules.schedule import schedule_contract
from polydyn.schedules.tiling import Roles
from polydyn.schedules.tree.scheduled import Scheduled
from tests.polyhedral_groups import F, array, ld
from tests.polyhedral_groups import group as make
from tests.polyhedral_groups import statement as bare


def statement(
    name: str, iters: dict[str, IndexLike], target: str, index: str, value: Any, reduce: str | None, role: str
) -> Statement:
    s = bare(name, iters, target, index, value, reduce)
    return Statement(s.name, s.iters, s.array, s.index, s.value, s.reduce, role)


def product() -> Group:
    """{batched matmul, bias + relu, and the sums themselves}; the reduction has two iterators."""
    o: dict[str, IndexLike] = {"n": "B", "i": "M", "j": "N"}
    biased = op("add", ld("D", "n", "i", "j"), ld("C", "j"))
    term = op("mul", ld("A", "n", "i", "k", "r"), ld("W", "k", "r", "j"))
    return make(
        "product", "B M N K R",
        [array("A", "input", "B", "M", "K", "R"), array("W", "input", "K", "R", "N"), array("C", "constant", "N"),
         array("D", "local", "B", "M", "N"), array("E", "output", "B", "M", "N"), array("G", "output", "B", "M", "N")],
        [statement("INIT", o, "D", "n i j", const(0.0, F), None, "init"),
         statement("ACC", {**o, "k": "K", "r": "R"}, "D", "n i j", term, "sum", "backbone"),
         statement("DONE0", o, "E", "n i j", op("max", biased, const(0.0, F)), None, "epilogue"),
         statement("DONE1", o, "G", "n i j", ld("D", "n", "i", "j"), None, "epilogue")],
    )  # fmt: skip


def positive(group: Group) -> Dependences:
    """Dependences for sizes >= 1, as schedules are solved for."""
    return analyse(group, positive=False).under(context(group))


def roles(group: Group) -> Roles:
    """The roles of ``product`` with the steps of its solved matrix."""
    return schedule_contract(group, Roles(("n",), "i", "j", "k", ("r",)), positive(group))[0]


def run_product(
    t: Scheduled, sizes: Mapping[str, int], M: int = 5, N: int = 7, K: int = 3, R: int = 2, B: int = 2
) -> bool:
    """Whether a schedule of ``product`` computes it, interpreted at these sizes."""
    rng = np.random.default_rng(0)
    a, w, c = rng.standard_normal((B, M, K, R)), rng.standard_normal((K, R, N)), rng.standard_normal(N)
    memory = {"A": a, "W": w, "C": c, "E": np.full((B, M, N), np.nan), "G": np.full((B, M, N), np.nan)}
    interpret(t, {"B": B, "M": M, "N": N, "K": K, "R": R, "steps": K * R, **sizes}, memory)
    sums = np.einsum("bikr,krj->bij", a, w)
    return np.allclose(memory["G"], sums) and np.allclose(memory["E"], np.maximum(sums + c, 0))
