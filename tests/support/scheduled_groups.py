"""Scheduled groups with the names that kernels use, and numbers to interpret them: shared by tests of schedules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from polydyn.codegen.kernel import WORKSPACE
from polydyn.codegen.split import STATISTICS, partial_attention
from polydyn.schedules.expr import Load, Value, const, op, transform
from polydyn.schedules.group.dependence import Dependences, analyse
from polydyn.schedules.group.polyhedra import context
from polydyn.schedules.index import Index, IndexLike
from polydyn.schedules.interpret import interpret
from polydyn.schedules.laws.online_softmax import Softmax
from polydyn.schedules.model import SHARES, Group, Statement
from polydyn.schedules.solution.schedule import schedule_contract
from polydyn.schedules.tiling import AttentionParts, Roles
from polydyn.schedules.tree.scheduled import Scheduled
from tests.support.polyhedral_groups import F, array, ld
from tests.support.polyhedral_groups import group as make
from tests.support.polyhedral_groups import statement as bare


def statement(
    name: str, iters: dict[str, IndexLike], target: str, index: str, value: Any, reduce: str | None, role: str
) -> Statement:
    s = bare(name, iters, target, index, value, reduce)
    return Statement(s.name, s.iters, s.array, s.index, s.value, s.reduce, role)


def single() -> Group:
    """Build ``product`` with one reduction iterator: the sum of a tensor map or a lane."""
    g = product()
    a, w = array("A", "input", "B", "M", "K"), array("W", "input", "K", "N")
    term = op("mul", ld("A", "n", "i", "k"), ld("W", "k", "j"))

    def one(s: Statement) -> Statement:
        return replace(s, iters=tuple(x for x in s.iters if x[0] != "r"), value=term) if s.reduce else s

    arrays = {**g.arrays, "A": a, "W": w}
    return replace(g, params=("B", "M", "N", "K"), arrays=arrays, statements=tuple(map(one, g.statements)))


def product() -> Group:
    """Build {batched matmul, bias + relu, and the sums themselves}; the reduction has two iterators."""
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
    """Return dependences for sizes >= 1, as in schedule solving."""
    return analyse(group, positive=False).under(context(group))


def roles(group: Group) -> Roles:
    """Return the roles of ``product``, or ``single``, with the steps of its solved matrix."""
    inner = ("r",) * ("r" in group.backbone.iterators)
    return schedule_contract(group, Roles(("n",), "i", "j", "k", inner), positive(group))[0]


def run_product(
    t: Scheduled, sizes: Mapping[str, int], M: int = 5, N: int = 7, K: int = 3, R: int = 2, B: int = 2
) -> bool:
    """Return whether a schedule of ``product`` (or ``single``) computes it, interpreted at these sizes."""
    rng = np.random.default_rng(0)
    R = R if len(t.group.arrays["A"].shape) == 4 else 1
    a, w, c = rng.standard_normal((B, M, K, R)), rng.standard_normal((K, R, N)), rng.standard_normal(N)
    memory = {"A": a, "W": w, "C": c, "E": np.full((B, M, N), np.nan), "G": np.full((B, M, N), np.nan)}
    if "R" not in t.group.params:
        memory |= {"A": a[..., 0], "W": w[:, 0]}
    interpret(t, {"B": B, "M": M, "N": N, "K": K, "R": R, "steps": K * R, **sizes}, memory)
    sums = np.einsum("bikr,krj->bij", a, w)
    return np.allclose(memory["G"], sums) and np.allclose(memory["E"], np.maximum(sums + c, 0))


def attention() -> tuple[Group, AttentionParts]:
    """Build softmax(q k) v on blocks of rows, with arrays of all rows; return the parts with solved steps and phases.
    """
    ij: dict[str, IndexLike] = {"n": "B", "i": "M", "j": "L"}
    i: dict[str, IndexLike] = {"n": "B", "i": "M"}
    il: dict[str, IndexLike] = {**i, "j0": "L"}
    wide: dict[str, IndexLike] = {**i, "d": "D"}
    weight = op("exp", op("sub", ld("scores", "n", "i", "j0"), ld("m", "n", "i")))
    one = op("mul", ld("q", "n", "i", "k"), ld("keys", "n", "k", "j"))
    two = op("mul", ld("w", "n", "i", "l"), ld("v", "n", "l", "d"))
    scores = [statement("A_INIT", ij, "s1", "n i j", const(0.0, F), None, "init"),
              statement("A_ACC", {**ij, "k": "K"}, "s1", "n i j", one, "sum", "backbone"),
              statement("A_DONE0", ij, "scores", "n i j", ld("s1", "n", "i", "j"), None, "epilogue")]  # fmt: skip
    rows = [statement("M0", i, "m", "n i", const(float("-inf"), F), None, "map"),
            statement("M1", il, "m", "n i", ld("scores", "n", "i", "j0"), "max", "map"),
            statement("Z0", i, "z", "n i", const(0.0, F), None, "map"),
            statement("Z1", il, "z", "n i", weight, "sum", "map"),
            statement("W", il, "w", "n i j0", op("div", weight, ld("z", "n", "i")), None, "map")]  # fmt: skip
    values = [statement("B_INIT", wide, "s2", "n i d", const(0.0, F), None, "init"),
              statement("B_ACC", {**wide, "l": "L"}, "s2", "n i d", two, "sum", "backbone"),
              statement("B_DONE0", wide, "o", "n i d", ld("s2", "n", "i", "d"), None, "epilogue")]  # fmt: skip
    shapes = {"q": "BMK", "keys": "BKL", "v": "BLD", "s1": "BML", "scores": "BML", "m": "BM", "z": "BM", "w": "BML",
              "s2": "BMD", "o": "BMD"}  # fmt: skip
    role = {"q": "input", "keys": "input", "v": "input", "o": "output"}
    arrays = [array(n, role.get(n, "local"), *x) for n, x in shapes.items()]
    g = make("attention", "B M L K D", arrays, [*scores, *rows, *values])
    phases = {"M0": 0, "M1": 0, "Z0": 1, "Z1": 1, "W": 2}
    ends = [tuple((f"{x}_{n}", side) for n, side in (("INIT", "first"), ("DONE0", "last"))) for x in "AB"]
    first, second = Roles(("n",), "i", "j", "k", (), ends[0]), Roles(("n",), "i", "d", "l", (), ends[1])
    stitch = Group("rows", g.params, g.arrays, tuple(rows))
    return g, AttentionParts(g, first, stitch, ("n", "i"), phases, g, second)


def run_attention(t: Scheduled, sizes: Mapping[str, int], M: int = 5, L: int = 7, K: int = 3, D: int = 6) -> bool:
    """Return whether a schedule of ``attention`` computes it, interpreted at these sizes."""
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((2, M, K)), rng.standard_normal((2, K, L)), rng.standard_normal((2, L, D))
    memory = {"q": q, "keys": k, "v": v, "o": np.full((2, M, D), np.nan)}
    interpret(t, {"B": 2, "M": M, "L": L, "K": K, "D": D, **sizes}, memory)
    e = np.exp(q @ k)
    return bool(np.allclose(memory["o"], (e / e.sum(2, keepdims=True)) @ v))


def online_parts(depth: int, width: int) -> tuple[AttentionParts, Softmax]:
    """Build CUDA's softmax(q k / 2) v, heads of constant sizes; the second result is the logit over the scores."""
    group, parts = attention()
    env = {"K": Index.of(depth), "D": Index.of(width)}

    def weights(v: Value) -> Value:
        return replace(v, buffer="weights") if isinstance(v, Load) and v.buffer == "w" else v

    def part(label: str) -> Group:
        statements = tuple(
            replace(s, iters=tuple((n, e.subs(env)) for n, e in s.iters), value=transform(s.value, weights))
            for s in group.statements if s.name.startswith(label)
        )  # fmt: skip
        arrays = {n: replace(a, shape=tuple(e.subs(env) for e in a.shape)) for n, a in group.arrays.items()}
        return replace(group, params=("B", "M", "L"), arrays=arrays, statements=statements)

    softmax = Softmax(op("mul", ld("s1", "n", "i", "j"), const(0.5, F)))
    return replace(parts, scores=part("A_"), values=part("B_")), softmax


def shared_online_parts(depth: int, width: int) -> tuple[AttentionParts, Softmax]:
    """Build ``online_parts`` for split-KV."""
    parts, softmax = online_parts(depth, width)
    return replace(parts, values=partial_attention(parts.values, parts.value_roles)), softmax


def run_shares(t: Scheduled, depth: int, width: int, M: int, L: int) -> bool:
    """Return whether every split of ``shared_online_parts`` stores values, maximum and sum of a row; each has all keys.
    """
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((1, M, depth)), rng.standard_normal((1, depth, L)), rng.standard_normal((1, L, width))
    left = np.full((2, 1, M, width + STATISTICS), np.nan)
    with np.errstate(invalid="ignore"):
        interpret(t, {"B": 1, "M": M, "L": L, SHARES: 2}, {"q": q, "keys": k, "v": v, WORKSPACE: left})
    x = q @ k / 2
    top = x.max(2, keepdims=True, initial=-np.inf)
    weights = np.exp(x - top)
    want = np.concatenate([weights @ v, top, weights.sum(2, keepdims=True)], 2)
    return bool(np.isnan(left[..., width + 2 :]).all() and np.allclose(left[..., : width + 2], want))


def run_online(t: Scheduled, depth: int, width: int, M: int, L: int) -> bool:
    """Return whether a schedule of ``online_parts`` computes it, interpreted at these sizes; without keys it gives 0.
    """
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((1, M, depth)), rng.standard_normal((1, depth, L)), rng.standard_normal((1, L, width))
    memory = {"q": q, "keys": k, "v": v, "o": np.full((1, M, width), np.nan)}
    with np.errstate(invalid="ignore"):
        interpret(t, {"B": 1, "M": M, "L": L}, memory)
    e = np.exp(q @ k / 2)
    want = (e / e.sum(2, keepdims=True)) @ v if L else np.zeros((1, M, width))
    return bool(np.allclose(memory["o"], want))
