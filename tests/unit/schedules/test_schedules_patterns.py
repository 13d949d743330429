"""Patterns: the one that answers, its answer, the reasons of others; any answer computes the group."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polydyn.schedules.errors import LegalityError
from polydyn.schedules.expr import Value, const, op
from polydyn.schedules.group.dependence import analyse
from polydyn.schedules.group.polyhedra import reads
from polydyn.schedules.index import Index, IndexLike, fetch
from polydyn.schedules.model import Group, Statement
from polydyn.schedules.proof.order import band_properties
from polydyn.schedules.solution.patterns import Choice, choose
from tests.support.polyhedral_groups import (
    PAD_CONV_FACTS,
    F,
    array,
    group,
    layer_norm,
    ld,
    matmul,
    pad_conv,
    softmax,
    statement,
)
from tests.support.schedule_checks import check_legal, schedule_map, time_of


def answer(g: Group, facts: tuple[object, ...] = ()) -> Choice:
    d = analyse(g, facts)  # type: ignore[arg-type]
    c = choose(g, d)
    check_legal(g, d, schedule_map(c.solved, g))
    return c


def test_matmul_like() -> None:
    c = answer(matmul())
    assert c.pattern.name == "matmul-like" and c.pattern.dims == ("i", "j", "k") and not c.declined
    assert c.pattern.roles == {"S2": "init", "S3": "backbone", "S4": "epilogue"}
    assert c.solved.exprs("S4")[2] == Index.of("K") - 1


def test_a_statement_before_the_sum_is_no_contraction() -> None:
    c = answer(pad_conv(), PAD_CONV_FACTS)
    assert c.declined[0] == ("contraction", "S1 runs before the sum and is not its initialiser")
    assert c.pattern.name == "reduce" and c.pattern.phases["S1"] < c.pattern.phases["S3"]


def conv(spatial: int, stride: int, dilation: int, grouped: bool) -> Group:
    """Build {Conv, Bias + Relu} with 1 to 3 spatial dims, the filter's extents and channels symbolic."""
    names = "hwd"[:spatial]
    out: dict[str, IndexLike] = {"n": "N", **({"g": "G"} if grouped else {}), "o": "O", **{x: x.upper() for x in names}}
    red: dict[str, IndexLike] = {"c": "I", **{f"r{x}": f"R{x}" for x in names}}
    at, front = list(out), ["n", "g"] if grouped else ["n"]
    window = [Index.of(x) * stride + Index.of(f"r{x}") * dilation for x in names]
    big = [Index.of(x.upper()) * stride + Index.of(f"R{x}") * dilation for x in names]
    weights = [*(["g"] if grouped else []), "o", *red]
    shape = list(out.values())
    params = [str(e) for e in (*out.values(), *red.values())]
    extents = {**out, **red}
    return group(
        "conv", " ".join(params),
        [array("X", "input", *(extents[x] for x in front), "I", *big),
         array("F", "constant", *(extents[x] for x in weights)), array("B", "constant", "O"),
         array("D", "local", *shape), array("Y", "output", *shape)],
        [statement("S2", out, "D", " ".join(at), const(0, F)),
         statement("S3", {**out, **red}, "D", " ".join(at),
                   op("mul", ld("X", *front, "c", *window), ld("F", *weights)), "sum"),
         statement("S4", out, "Y", " ".join(at), op("max", op("add", ld("D", *at), ld("B", "o")), const(0, F)))],
    )  # fmt: skip


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize(("spatial", "stride", "dilation"), [(1, 1, 1), (1, 3, 2), (2, 2, 1), (2, 1, 2), (3, 2, 3)])
def test_a_convolution_is_a_contraction(spatial: int, stride: int, dilation: int, grouped: bool) -> None:
    g = conv(spatial, stride, dilation, grouped)
    c = answer(g)
    assert c.pattern.name == "matmul-like" and not c.declined
    own = ("n", *(["g"] if grouped else []), "o", *"hwd"[:spatial])
    assert c.pattern.dims == (*own, "c", *(f"r{x}" for x in "hwd"[:spatial])) and c.pattern.band == len(own)
    last = (Index.of("I") - 1, *(Index.of(f"R{x}") - 1 for x in "hwd"[:spatial]))
    assert c.solved.exprs("S4")[len(own) :] == last
    assert c.solved.exprs("S2")[len(own) :] == (0,) * len(last)


def test_reductions_get_phases() -> None:
    c = answer(softmax())
    assert c.pattern.name == "multi-reduce" and c.pattern.dims == ("r", "", "l")
    assert c.pattern.phases == {"M0": 0, "M1": 0, "D0": 1, "D1": 1, "Y": 2}
    assert c.declined == (("contraction", "2 reductions, not one"),)
    assert answer(layer_norm()).pattern.phases == {"M0": 0, "M1": 0, "V0": 1, "V1": 1, "Y": 2}


def test_matmul_then_row_maximum_keeps_the_rows() -> None:
    """Attention's first half: the second reduction runs over a loop of the first, only rows stay common."""
    i: dict[str, IndexLike] = {"i": "M"}
    ij: dict[str, IndexLike] = {"i": "M", "j": "N"}
    g = group(
        "scores", "M N K",
        [array("A", "input", "M", "K"), array("B", "input", "N", "K"), array("S", "local", "M", "N"),
         array("m", "output", "M")],
        [statement("S0", ij, "S", "i j", const(0, F)),
         statement("S1", {**ij, "k": "K"}, "S", "i j", op("mul", ld("A", "i", "k"), ld("B", "j", "k")), "sum"),
         statement("M0", i, "m", "i", const(float("-inf"), F)),
         statement("M1", ij, "m", "i", ld("S", "i", "j"), "max")],
    )  # fmt: skip
    c = answer(g)
    assert c.pattern.name == "multi-reduce" and c.pattern.dims == ("i", "", "j", "k")
    assert c.pattern.phases == {"S0": 0, "S1": 0, "M0": 1, "M1": 1}


def elementwise(second: Value) -> Group:
    ij: dict[str, IndexLike] = {"i": "M", "j": "M"}
    return group(
        "two", "M", [array("x", "input", "M", "M"), array("t", "local", "M", "M"), array("y", "output", "M", "M")],
        [statement("A", ij, "t", "i j", op("exp", ld("x", "i", "j"))), statement("B", ij, "y", "i j", second)],
    )  # fmt: skip


def test_elementwise() -> None:
    c = answer(elementwise(ld("t", "i", "j")))
    assert c.pattern.name == "element-wise" and c.pattern.dims == ("i", "j")


def test_siblings_that_share_an_input_share_loops() -> None:
    r: dict[str, IndexLike] = {"r": "R"}
    g = group(
        "siblings", "R L", [array("x", "input", "R", "L"), array("m", "output", "R"), array("d", "output", "R")],
        [statement("M0", r, "m", "r", const(0, F)),
         statement("M1", {**r, "l": "L"}, "m", "r", ld("x", "r", "l"), "max"),
         statement("D0", {"q": "R"}, "d", "q", const(0, F)),
         statement("D1", {"q": "R", "k": "L"}, "d", "q", ld("x", "q", "k"), "sum")],
    )  # fmt: skip
    c = answer(g)
    assert c.pattern.name == "multi-reduce" and set(c.pattern.phases.values()) == {0}
    assert c.pattern.dims == ("r", "l") and c.solved.exprs("D1") == (Index.of("q"), Index.of("k"))


def test_siblings_that_share_addresses_with_symbolic_strides_share_loops() -> None:
    """Products of symbols are no affine subscripts: the two reductions were one nest after the other, in scalars."""
    r: dict[str, IndexLike] = {"r": "R"}
    address = Index.of("r") * Index.of("L") + Index.of("l")
    other = address.subs({"r": Index.of("q"), "l": Index.of("k")})
    g = group(
        "flat", "R L N", [array("x", "input", "N"), array("m", "output", "R"), array("d", "output", "R")],
        [statement("M0", r, "m", "r", const(0, F)),
         statement("M1", {**r, "l": "L"}, "m", "r", ld("x", address), "max"),
         statement("D0", {"q": "R"}, "d", "q", const(0, F)),
         statement("D1", {"q": "R", "k": "L"}, "d", "q", ld("x", other), "min")],
    )  # fmt: skip
    c = answer(g)
    assert c.pattern.name == "multi-reduce" and c.solved.exprs("D1") == (Index.of("q"), Index.of("k"))


def test_transposed_reuse_is_one_nest() -> None:
    c = answer(elementwise(ld("t", "j", "i")))
    assert c.pattern.name == "element-wise"
    assert c.solved.exprs("B") == (Index.of("j"), Index.of("i"))


def test_reuse_in_two_orders_falls_to_the_original_order() -> None:
    c = answer(elementwise(op("add", ld("t", "i", "j"), ld("t", "j", "i"))))
    assert c.pattern.name == "total" and c.pattern.phases == {"A": 0, "B": 1}
    assert [n for n, _ in c.declined] == ["contraction", "stitch"]
    assert not c.solved.shifts


def test_opaque_reuse_is_refused_by_fusing_patterns() -> None:
    c = answer(elementwise(ld("t", fetch("x", ["i", "j"]), "j")))
    assert c.pattern.name == "total"
    assert c.declined[1] == ("stitch", "B reads t at positions known only at run time")


def test_scalar_statement() -> None:
    g = group("one", "M", [array("y", "output")], [statement("A", {}, "y", "", const(1, F))])
    assert answer(g).pattern.name == "total"


def test_full_reduction_of_products_has_no_parallel_loop() -> None:
    g = group(
        "dot", "K", [array("x", "input", "K"), array("w", "input", "K"), array("d", "output")],
        [statement("A", {}, "d", "", const(0, F)),
         statement("B", {"k": "K"}, "d", "", op("mul", ld("x", "k"), ld("w", "k")), "sum")],
    )  # fmt: skip
    c = answer(g)
    assert c.pattern.name == "matmul-like" and c.pattern.dims == ("k",)


# -- brute force -----------------------------------------------------------------------------------------------------


def run(g: Group, env: dict[str, int], key: object) -> dict[tuple[object, ...], int]:
    """Return the final memory if instances run in the order of ``key(statement, env)``; values are hashes of their
    history.
    """
    instances = []
    for k, s in enumerate(g.statements):
        for point in itertools.product(*(range(e.evaluate(env)) for _, e in s.iters)):
            at = {**env, **dict(zip(s.iterators, point, strict=True))}
            instances.append(((*key(s, at), k), s, at))  # type: ignore[operator]
    memory: dict[tuple[object, ...], int] = {}
    for _, s, at in sorted(instances, key=lambda x: x[0]):
        seen = []
        for r in reads(s):
            cell = (r.access.array, *(i.evaluate(at) for i in r.access.index))
            seen.append(memory.get(cell, hash(cell)))
        value = [s.name if s.reduce is None else "+", *((i.evaluate(at)) for i in s.index), *seen]
        memory[(s.array, *(i.evaluate(at) for i in s.index))] = hash(tuple(value))
    return memory


def original(g: Group, env: dict[str, int]) -> dict[tuple[object, ...], int]:
    order = {s.name: k for k, s in enumerate(g.statements)}
    return run(g, env, lambda s, at: (order[s.name], *(at[i] for i in s.iterators), *([0] * (3 - len(s.iters)))))


@st.composite
def groups(draw: st.DrawFn) -> Group:
    """Draw 2 to 5 maps and reductions over (i, j), which read earlier results at plain, transposed or shifted
    positions.
    """
    arrays = [array("x", "input", "M", "M"), array("z", "input", "M")]
    statements: list[Statement] = []
    for n in range(draw(st.integers(2, 5))):
        rank = draw(st.integers(1, 2))
        loops = "ij" if rank == 2 or draw(st.booleans()) else "i"
        name = f"t{n}"
        iters: dict[str, IndexLike] = dict.fromkeys(loops, "M")
        value: Value = const(1, F)
        for k in range(draw(st.integers(1, 2))):
            a = draw(st.sampled_from(arrays)) if k or n == 0 else arrays[-1]
            odd = draw(st.integers(0, 5)) == 5  # mostly plain subscripts, so that patterns other than total answer
            plain = [Index.of(v) for v in (loops if len(a.shape) == 2 and len(loops) == 2 else "ii")]
            far = [Index.of(draw(st.sampled_from(loops))) + draw(st.integers(-1, 1)) for _ in a.shape]
            index = far if odd else plain[: len(a.shape)]
            value = op("where", const(True, "bool"), op("add", value, ld(a.name, *index)), value)
        if rank == 1 and loops == "ij":
            statements.append(statement(f"I{n}", {"i": "M"}, name, "i", const(0, F)))
            statements.append(statement(f"S{n}", iters, name, "i", value, "sum"))
        else:
            statements.append(statement(f"S{n}", iters, name, " ".join(loops), value))
        arrays.append(array(name, "output", *(["M"] * (rank if loops == "ij" else 1))))
    return group("random", "M", arrays, statements)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(groups())
def test_chosen_schedules_compute_the_group(g: Group) -> None:
    d = analyse(g)
    c = choose(g, d)
    check_legal(g, d, schedule_map(c.solved, g))
    rows = {s.name: c.solved.exprs(s.name) for s in g.statements}
    first = {n: r[:1] for n, r in rows.items()}
    (coincident,), _ = band_properties(g, d, {}, first)
    for size in (1, 2, 4):
        env = {"M": size}
        want = original(g, env)
        assert run(g, env, lambda s, at, env=env: time_of(c.solved, s.name, at)) == want
        if coincident:  # then the outermost loop may run in any order

            def reverse(s: Statement, at: dict[str, int]) -> tuple[int, ...]:
                t = time_of(c.solved, s.name, at)
                return (-t[0], *t[1:])

            assert run(g, env, reverse) == want


@settings(max_examples=60, deadline=None, derandomize=True)
@given(groups())
def test_the_total_pattern_computes_any_group(g: Group) -> None:
    d = analyse(g)
    c = choose(g, d, ("total",))
    assert c.pattern.name == "total" and not c.declined and not c.solved.shifts
    check_legal(g, d, schedule_map(c.solved, g))
    for size in (1, 2, 4):
        env = {"M": size}
        assert run(g, env, lambda s, at, env=env: time_of(c.solved, s.name, at)) == original(g, env)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(groups(), st.data())
def test_accepted_schedules_compute_the_group(g: Group, data: st.DataObject) -> None:
    """Random rows, right or wrong: any that the checker accepts gives the same result."""
    rows: dict[str, list[Index]] = {}
    for s in g.statements:
        shifts = data.draw(st.lists(st.integers(-1, 2), min_size=3, max_size=3))
        loops = [Index.of(v) for v in s.iterators] + [Index.of(0)] * (2 - len(s.iters))
        rows[s.name] = [x + c for x, c in zip([Index.of(0), *loops], shifts, strict=True)]
    textual = {s.name: [*rows[s.name], Index.of(k)] for k, s in enumerate(g.statements)}
    try:
        check_legal(g, analyse(g), textual)
    except LegalityError:
        return
    for size in (1, 2, 4):
        env = {"M": size}
        assert run(g, env, lambda s, at: [r.evaluate(at) for r in rows[s.name]]) == original(g, env)
