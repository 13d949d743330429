"""One proof for all groups of a skeleton: sharing, rejections, and unchanged kernel texts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from polydyn.compiler import plan_program
from polydyn.schedules.errors import LegalityError
from polydyn.schedules.expr import Value, const, op
from polydyn.schedules.group import dependence
from polydyn.schedules.group.polyhedra import reads
from polydyn.schedules.group.skeleton import Skeleton, accesses, check_instance, form, skeleton
from polydyn.schedules.index import Index, IndexLike, fetch
from polydyn.schedules.model import Group
from polydyn.schedules.proof import prove as module
from polydyn.schedules.proof.obligations import vectors_inside
from polydyn.schedules.proof.proven import Proven
from polydyn.schedules.solution.reuse import Solver
from polydyn.schedules.tiling import Roles
from polydyn.schedules.tree.strategies import CpuTile, cpu_product, nest
from tests.support.marks import slow
from tests.support.polyhedral_groups import F, array, group, ld, statement
from tests.support.stored import path_of, planned

V = Index.of


def product(m: IndexLike, n: IndexLike, k: IndexLike, extra: str = "", value: str = "max") -> Group:
    """Build {MatMul, Bias + Relu} with extents that may be numbers."""
    ij: dict[str, IndexLike] = {"i": m, "j": n}
    g = group(
        "product", f"M N K {extra}".strip(),
        [array("A", "input", m, k), array("B", "constant", k, n), array("C", "constant", n),
         array("D", "local", m, n), array("E", "output", m, n)],
        [statement("INIT", ij, "D", "i j", const(0, F)),
         statement("ACC", {**ij, "k": k}, "D", "i j", op("mul", ld("A", "i", "k"), ld("B", "k", "j")), "sum"),
         statement("DONE0", ij, "E", "i j", op(value, op("add", ld("D", "i", "j"), ld("C", "j")), const(0, F)))],
    )  # fmt: skip
    roles = ("init", "backbone", "epilogue")
    return replace(g, statements=tuple(replace(s, role=r) for s, r in zip(g.statements, roles, strict=True)))


ROLES = Roles((), "i", "j", "k", ())


def prove(g: Group) -> None:
    solver = Solver(g)
    module.prove(cpu_product(g, solver.contract(ROLES), CpuTile(4, 2, 4, 8), pack=True))
    assert solver.reused == 1


def test_one_proof_serves_all_constants() -> None:
    prove(product("M", 24, 40))
    before = module._prove.cache_info().misses
    for n, k in ((32, 100), (7, 64), (129, 9)):
        prove(product("M", n, k, "Q", "min"))
    assert module._prove.cache_info().misses == before
    prove(product("M", 64, 64))  # equal extents: a separate skeleton
    assert module._prove.cache_info().misses == before + 1


def with_epilogue(value: Value) -> Group:
    """Build a product whose epilogue computes ``value`` from the sums ``D`` and the array ``R``."""
    g = product("M", 24, 40)
    arrays = {**g.arrays, "R": array("R", "input", "M", 24)}
    return replace(g, arrays=arrays, statements=(*g.statements[:2], replace(g.statements[2], value=value)))


def test_one_proof_serves_epilogues_that_read_the_same_sums() -> None:
    total, other = ld("D", "i", "j"), ld("R", "i", "j")
    prove(with_epilogue(op("exp", total)))
    proofs, analyses = module._prove.cache_info().misses, dependence._flows.cache_info().misses
    prove(with_epilogue(op("add", op("mul", total, op("tanh", total)), other)))
    assert module._prove.cache_info().misses == proofs
    guarded = op("where", op("lt", other, const(0, F)), total, other)
    prove(with_epilogue(guarded))
    assert module._prove.cache_info().misses == proofs + 1, "a read that may not happen is another access"
    assert dependence._flows.cache_info().misses == analyses + 1, "scheduling and proving share one analysis"
    forms = [skeleton(with_epilogue(v)).form for v in (op("exp", total), guarded)]  # type: ignore[union-attr]
    assert [[r.guarded for r in reads(accesses(f).statements[2])] for f in forms] == [[False], [True]]


def test_a_proof_is_not_accepted_outside_its_facts() -> None:
    s = skeleton(product("M", 24, 40))
    assert s is not None and {str(f) for f in s.facts} == {"k0 >= 0", "k1 >= 0"}
    check_instance(s, product("M", 24, 40))
    with pytest.raises(LegalityError, match="is not an instance of its skeleton"):
        check_instance(s, product("M", 24, 48))
    other = replace(s, env=tuple((n, V(48) if e == 40 else e) for n, e in s.env))
    check_instance(other, product("M", 24, 48))
    with pytest.raises(LegalityError, match="is not an instance"):
        check_instance(other, product("M", 48, 48 + 1))
    negative = replace(s, env=tuple((n, V(-1) if e == 40 else e) for n, e in s.env))
    with pytest.raises(LegalityError, match="the proof assumes k1 >= 0"):
        check_instance(negative, product("M", 24, -1))


def test_an_empty_reduction_is_an_ordinary_size() -> None:
    prove(product("M", 24, 0))


def heads(width: int) -> Group:
    """Build an intermediate of 12 x 64 elements that is read as one row of ``width``."""
    x = V("x")
    return group(
        "heads", "R",
        [array("a", "input", "R", 12, 64), array("t", "local", "R", 12, 64), array("y", "output", "R", width)],
        [statement("S0", {"r": "R", "h": 12, "d": 64}, "t", "r h d", op("exp", ld("a", "r", "h", "d"))),
         statement("S1", {"r": "R", "x": width}, "y", "r x", op("neg", ld("t", "r", x // 64, x % 64)))],
    )  # fmt: skip


def test_a_relation_between_constants_is_proven_for_these_constants() -> None:
    solver = Solver(heads(768))
    s = solver.nest()
    Proven(nest(solver.group, s.band, s.phases, False), vectors_inside(solver.group, s.band, s.phases))
    assert s.phases == {"S0": 0, "S1": 1} and solver.reused == 0
    wide = Solver(heads(769))
    with pytest.raises(LegalityError, match="t is read before anything is written there"):
        wide.nest()


def test_results_read_at_positions_known_only_at_run_time_have_no_skeleton() -> None:
    arrays = [array("x", "input", "M"), array("p", "input", "M"), array("y", "output", "M"), array("z", "output", "M")]
    place = fetch("p", ["i"])
    written = replace(statement("S0", {"i": "M"}, "y", "i", ld("x", "i")), index=(place,))
    assert skeleton(group("scatter", "M", arrays[:3], [written])) is not None, "updates are in order"
    read = statement("S1", {"i": "M"}, "z", "i", ld("y", place))
    assert skeleton(group("gather", "M", arrays, [replace(written, index=(Index.of("i"),)), read])) is None


@pytest.mark.parametrize("name", ["bert_tiny", slow("vit_tiny")])
def test_kernels_are_the_same_text_without_reuse(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = planned(name, "cpu:avx2")
    monkeypatch.setattr("polydyn.schedules.solution.reuse.skeleton", lambda g: None)
    own = "polydyn.schedules.proof.prove.skeleton"
    monkeypatch.setattr(own, lambda g: Skeleton(form(g), (), ()) if form(g) else None)
    assert plan_program(path_of(name), target="cpu:avx2").kernels == shared.kernels
