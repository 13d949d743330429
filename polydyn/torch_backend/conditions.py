"""Conditions on sizes under which torch exported a graph: its rules choose by sizes, as a pool by what divides them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP
from torch.utils._sympy.functions import Mod
from torch.utils._sympy.numbers import int_oo

from polydyn.errors import UnsupportedError
from polydyn.shapes.sizes import Sizes

TRIALS = 128
"""Number of sizes that an equation must hold for."""


@dataclass(frozen=True)
class Condition:
    """A condition on the sizes of the inputs that every call of an exported program must meet.

    ``text``: Python over ``L['t0']``, ``L['t1']``, ...: the sizes at ``places``, which are (input, axis). An empty text
    always holds.
    """

    text: str = ""
    places: tuple[tuple[int, int], ...] = ()
    code: CodeType | None = None

    @classmethod
    def of(cls, traced: Any) -> Condition:
        """Read the condition of an exported program, after all of its rules ran."""
        given = traced.graph_signature.user_inputs
        values = {n.name: n.meta.get("val") for n in traced.graph.nodes if n.op == "placeholder"}
        sizes = {
            (k, axis): size
            for k, name in enumerate(given) if isinstance(values.get(name), torch.Tensor)
            for axis, size in enumerate(values[name].shape) if isinstance(size, torch.SymInt)
        }  # fmt: skip
        if not sizes:
            return cls()
        environment = next(iter(sizes.values())).node.shape_env
        try:
            text = environment.produce_guards_expression(list(sizes.values())) or ""
        except AssertionError:  # a symbol that is no size of an input: only the example's sizes are known to be right
            text = " and ".join(f"L['t{k}'] == {v.node.hint}" for k, v in enumerate(sizes.values()))
        return cls(text, tuple(sizes), compile(text, "<sizes>", "eval") if text else None)

    def holds(self, shapes: Sequence[Sequence[int]]) -> bool:
        """Return whether inputs of these shapes meet the condition."""
        if self.code is None:
            return True
        sizes = {f"t{k}": shapes[i][axis] for k, (i, axis) in enumerate(self.places)}
        return bool(eval(self.code, SYMPY_INTERP, {"L": sizes}))


def allowed_sizes(traced: Any) -> tuple[dict[str, Sizes], dict[str, str]]:
    """Return the sizes, by torch's names, for which an exported program is right, and the names that are the same size
    as another. torch exports one way of a module that chooses by sizes. Raises UnsupportedError for an equation that
    holds neither for equal sizes, nor for multiples, nor from some size on, and for a size that follows from others.

    Sizes from 0 on are allowed where torch says from 2 on: it assumes so for any size. Inequalities of several sizes,
    and sizes that are excluded one by one, are not read: most are about strides.
    """
    found = {
        str(s): Sizes(int(r.lower) if bool(r.lower > 2) else 0, None if r.upper == int_oo else int(r.upper))
        for s, r in traced.range_constraints.items()
        if s.is_Symbol
    }
    shapes = [getattr(n.meta.get("val"), "shape", ()) for n in traced.graph.nodes if n.op == "placeholder"]
    sizes = [v for shape in shapes for v in shape if isinstance(v, torch.SymInt)]
    for size in sizes:
        if not (size.node.expr.is_Symbol or size.node.expr.is_Integer):  # its dim would have this text as a name
            raise _by_sizes(f"a size is always {size.node.expr}")
    environment: Any = sizes[0].node.shape_env if sizes else None
    same: dict[Any, Any] = {}
    for guard in environment.guards if sizes else ():
        condition = environment.simplify(guard.expr).xreplace(same)
        if not isinstance(condition, sympy.Eq):
            continue
        left, right = condition.args
        if pair := _equal(left - right):
            same = {old: new.xreplace(pair) for old, new in same.items()} | pair
            continue
        if isinstance(left, Mod) and left.args[0].is_Symbol and left.args[1].is_Integer and right == 0:
            old = found.get(name := str(left.args[0]), Sizes())
            found[name] = replace(old, multiple=math.lcm(old.multiple, int(left.args[1])))
            continue
        if len(symbols := sorted(condition.free_symbols, key=str)) != 1:
            raise _by_sizes(str(condition))
        old = found.get(name := str(symbols[0]), Sizes())
        found[name] = replace(old, low=_least(condition, symbols[0], old))
    return {name: sizes for name, sizes in found.items() if sizes != Sizes()}, {str(a): str(b) for a, b in same.items()}


def _equal(difference: Any) -> dict[Any, Any]:
    """Return the later of two symbols with the other one if their difference is 0, else nothing."""
    terms = sympy.expand(difference).as_coefficients_dict()
    if sorted(terms.values()) != [-1, 1] or not all(t.is_Symbol for t in terms):
        return {}
    first, second = sorted(terms, key=str)
    return {second: first}


def _least(condition: Any, symbol: Any, sizes: Sizes) -> int:
    """Return the size from which on an equation holds, as for the number of chunks; the present limit if it always
    holds. Equations are tried, not solved: one that holds for ``TRIALS`` sizes one after another counts as proven.
    """
    low = max(sizes.low, 2)
    last = low + 2 * TRIALS if sizes.high is None else min(sizes.high, low + 2 * TRIALS)
    failing = [n for n in range(low, last + 1) if not condition.subs(symbol, n)]
    if not failing:
        return sizes.low
    if failing[-1] > last - TRIALS:
        raise _by_sizes(str(condition))
    return int(failing[-1]) + 1


def _by_sizes(condition: str) -> UnsupportedError:
    return UnsupportedError(
        f"torch exported the module only for some sizes: {condition}", rule="torch.export chooses by sizes",
        remedy="fix these sizes, or write the module without a choice by sizes",
    )  # fmt: skip
