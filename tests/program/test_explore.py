"""Exploration: plans as graphs, sizes as expressions of sympy."""

from __future__ import annotations

import sys
from dataclasses import replace

import networkx as nx
import numpy as np
import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

import polydyn
from polydyn.compiler import plan_graph
from polydyn.errors import InputError, UnsupportedError
from polydyn.explore import condition, kernel_graph, symbol, to_sympy
from polydyn.fusion.pipeline import fusion_plan
from polydyn.graph.expand import import_model
from polydyn.graph.ir import Guard
from polydyn.program.plan import size_bytes
from polydyn.schedules.index import Index, fetch, floordiv, maximum, minimum
from tests.support.programs import example
from tests.support.stored import planned
from tests.support.tiny import model, node

N, M = Index.of("n"), Index.of("m")


# -- graphs ------------------------------------------------------------------------------------------------------------


def test_a_plan_is_a_graph_of_its_launches() -> None:
    plan = planned("bert_tiny")
    g = kernel_graph(plan)
    launches = {x.label: x for x in plan.launches}
    assert [n for n, kind in g.nodes(data="kind") if kind not in ("input", "output")] == list(launches)
    assert {n for n, kind in g.nodes(data="kind") if kind == "input"} == set(plan.inputs)
    assert nx.is_directed_acyclic_graph(g)
    for a, b, edge in g.edges(data=True):
        for name, size in edge["buffers"].items():
            assert name in (plan.outputs if g.nodes[b]["kind"] == "output" else launches[b].buffers)
            assert size == size_bytes(plan.buffers[name])
        assert edge["bytes"] == sum(edge["buffers"].values(), Index.of(0)) and edge["flops"] == g.nodes[a]["flops"]


def test_it_can_be_asked() -> None:
    plan = planned("bert_tiny")
    sizes = {"B": 2, "L": 7}
    g = kernel_graph(plan, sizes)
    flops = {x.label: x.flops.evaluate(sizes) for x in plan.launches}
    assert {n: g.nodes[n]["flops"] for n in flops} == flops
    path = nx.dag_longest_path(g, weight="flops")
    assert g.nodes[path[0]]["kind"] == "input" and path[-1] in plan.outputs
    assert 0 < nx.path_weight(g, path, "flops") <= sum(flops.values())
    masked = nx.descendants(g, "attention_mask")
    assert any(n.startswith("attention") for n in masked) and not masked >= set(flops)
    assert nx.descendants(g, "input_ids") | nx.descendants(g, "attention_mask") == {*flops, *plan.outputs}
    with pytest.raises(InputError, match="no size is given for L"):
        kernel_graph(plan, {"B": 2})


def test_edges_are_who_reads_what() -> None:
    plan = example()
    g = kernel_graph(replace(plan, launches=tuple(replace(x, writes=x.buffers[-1:]) for x in plan.launches)))
    first, scale, second, rows = (x.label for x in plan.launches)
    between = {("x", first), ("y", first), (first, scale), (scale, second), ("x", second), (second, rows)}
    assert set(g.edges) == between | {(scale, "scaled"), (rows, "total")}
    assert g.nodes["w"] == {"kind": "output", "shapes": {"w": (4,)}, "flops": 0, "bytes": 0, "reasons": ()}
    assert g.edges[scale, second]["buffers"] == {"scaled": Index.of("B") * Index.of("L") * 4}


def test_fusion_plans_and_concatenations() -> None:
    """Groups write directly into their part of a concatenation; its readers depend on all of them."""
    nodes = [node("Relu", "x", "a"), node("Neg", "y", "b"), node("Concat", "a b", "c", axis=1)]
    nodes.append(node("MatMul", "c w", "z"))
    x = {name: ("float32", ["N", 4]) for name in ("x", "y")}
    graph = import_model(model(nodes, x, ["z"], {"w": np.ones((8, 3), np.float32)}))
    plan = fusion_plan(graph)
    assert set(plan.windows) == {"a", "b"}
    g = kernel_graph(plan)
    first, second, last = (f"{k.kind} {k.outputs[0]}" for k in plan.groups)
    assert set(g.edges) == {("x", first), ("y", second), (first, last), (second, last), (last, "z")}
    rows = Index.of("N")
    assert g.edges[first, last]["buffers"] == {"c": rows * 32} and g.nodes[first]["bytes"] == rows * 32
    assert g.nodes[last]["flops"] == rows * 2 * 8 * 3 and g.nodes[last]["reasons"] == plan.groups[2].reasons
    assert set(kernel_graph(fusion_plan(graph, cuda=True))) >= {"x", "y", "z"}
    assert set(kernel_graph(plan_graph(graph, target="cuda:sm_80"))) == set(kernel_graph(plan_graph(graph)))
    with pytest.raises(UnsupportedError, match=r"(?s)host plan for cpu.*draw the fusion plan"):
        kernel_graph(example())


# -- expressions -------------------------------------------------------------------------------------------------------


def expressions() -> st.SearchStrategy[Index]:
    leaves = st.sampled_from([N, M, Index.of(0), Index.of(7), Index.of(-3)])
    divisors = [Index.of(1), Index.of(4), N, M + 1, N * M, M + N]
    return st.recursive(
        leaves,
        lambda x: st.one_of(
            st.tuples(x, x).map(lambda p: p[0] + p[1]),
            st.tuples(x, x).map(lambda p: p[0] - p[1]),
            st.tuples(x, x).map(lambda p: p[0] * p[1]),
            st.tuples(x, x).map(lambda p: minimum(*p)),
            st.tuples(x, x).map(lambda p: maximum(*p)),
            st.tuples(x, st.sampled_from(divisors)).map(lambda p: floordiv(*p)),
            st.tuples(x, st.sampled_from([1, 4, 6])).map(lambda p: p[0] % p[1]),
            st.tuples(x, st.sampled_from([1, 4, 6])).map(lambda p: p[0].ceildiv(p[1])),
        ),
        max_leaves=6,
    )


@settings(max_examples=40)
@given(expressions(), st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=4))
def test_values_agree(x: Index, sizes: list[tuple[int, int]]) -> None:
    expression = to_sympy(x)
    for n, m in [(0, 0), *sizes]:
        assert expression.subs({symbol("n"): n, symbol("m"): m}) == x.evaluate({"n": n, "m": m})


def test_expressions_are_sympys_own() -> None:
    n, m = symbol("n"), symbol("m")
    assert n.is_integer and n.is_nonnegative
    assert to_sympy(N % 8) == sympy.Mod(n, 8)
    assert to_sympy(M * (N % 8) + 3) == m * sympy.Mod(n, 8) + 3
    assert to_sympy(N.ceildiv(8)) == sympy.ceiling(n / 8)
    assert to_sympy(floordiv(N, Index.of(8))) == sympy.floor(n / 8)
    assert to_sympy(minimum(N, M + 1) * 2) == 2 * sympy.Min(n, m + 1)
    assert to_sympy(floordiv(N, M)) == sympy.Piecewise((0, sympy.Eq(m, 0)), (sympy.floor(n / m), True))
    assert to_sympy("n") == n and to_sympy(4) == 4
    with pytest.raises(UnsupportedError, match=r"(?s)read from a tensor.*tensor: ids"):
        to_sympy(fetch("ids", [N]) + 1)


def test_a_programs_sizes_can_be_solved_for() -> None:
    rows = {name: ("float32", shape) for name, shape in (("q", ["B", "L", 1]), ("k", ["B", 1, "L"]))}
    program = polydyn.compile(model([node("Add", "q k", "s"), node("Relu", "s", "y")], rows, ["y"]), threads=1)
    b, length = symbol("B"), symbol("L")
    total = sympy.expand(sum(to_sympy(x["flops"]) for x in program.manifest["launches"]))
    assert total == 2 * b * length**2
    assert total.subs({b: 2, length: 7}) == sum(x.flops for x in program.explain(B=2, L=7).launches)
    assert sympy.solve(sympy.Eq(total.subs(b, 2), 4 * 49), length) == [7]
    assert sympy.lambdify([b, length], total)(2, 7) == 4 * 49


@pytest.mark.parametrize("relation", ["==", "<=", "%=="])
def test_guards_are_conditions(relation: str) -> None:
    guard = Guard(N + 2, relation, M, "")
    for n in range(6):
        for m in range(6):
            wanted = {"==": n + 2 == m, "<=": n + 2 <= m, "%==": (n + 2) % m == 0 if m else False}[relation]
            assert bool(condition(guard).subs({symbol("n"): n, symbol("m"): m})) == wanted
    of_manifest = {"left": ["+", "n", 2], "relation": relation, "right": "m"}
    assert condition(of_manifest) == condition(guard)


@pytest.mark.parametrize("name", ["networkx", "sympy"])
def test_a_missing_package_names_its_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UnsupportedError, match=rf"(?s)needs {name}.*pip install 'polydyn\[explore\]'"):
        kernel_graph(planned("bert_tiny")) if name == "networkx" else to_sympy(N)
