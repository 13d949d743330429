"""Control flow over bodies with steps in Python: one of two models, or one again and again (docs/adr/0027-parts.md).

Other bodies run in C (``control.c``). Standard library and numpy only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from polydyn.errors import InputError
from polydyn.runtime.host_steps import Array, Call, Result, step
from polydyn.runtime.native import new_output
from polydyn.runtime.program import Program, numpy_dtype


class Body:
    """A compiled body. ``made``: the outputs of its program; other results are inputs passed on."""

    def __init__(self, call: Call, role: str, settings: Mapping[str, Any]) -> None:
        self.program: Program = call.bodies[role]
        self.formals: list[str] = settings["formals"]
        self.results: list[str] = settings["results"]
        self.captured: list[tuple[str, int]] = settings["captured"]
        self.sizes: list[tuple[str, int]] = settings["sizes"]
        self.made = self.program.outputs.keys()

    def run(self, call: Call, arrays: Sequence[Array]) -> list[Array]:
        """The results for these inputs; those that are inputs are the same arrays."""
        feeds = {name: call.arrays[k] for name, k in self.captured}
        feeds |= {name: np.empty(call.dims[place], np.uint8) for name, place in self.sizes}
        feeds |= dict(zip(self.formals, arrays, strict=True))
        made = self.program.run(feeds) if self.made else {}
        return [made[n] if n in self.made else feeds[n] for n in self.results]


@step("branch")
def branch(call: Call) -> Result:
    """Runs one of two bodies."""
    condition = call.arrays[0]
    if condition.size != 1:
        raise InputError(f"a condition with {condition.size} elements", rule="one element")
    role = "then_branch" if condition.reshape(-1)[0] else "else_branch"
    if role not in call.kept:
        call.kept[role] = Body(call, role, call.settings[role])
    return _given(call, call.kept[role].run(call, ()))


def _given(call: Call, results: Sequence[Array]) -> Result:
    """Results, none of which is an array that came in or another result; and all their sizes."""
    taken = {id(a) for a in call.arrays}
    own = []
    for r in results:
        own.append(r.copy() if id(r) in taken else r)
        taken.add(id(r))
    return own, [n for a in own for n in a.shape]


@step("iterate")
def iterate(call: Call) -> Result:
    """Runs a body while count and condition say so, or for every slice of inputs; gives carried tensors, then rows."""
    s = call.settings
    if "body" not in call.kept:
        call.kept["body"] = Body(call, "body", s)
    work = Iteration(call.kept["body"], call)
    try:
        while work.more:
            work.once()
    except InputError as e:
        raise InputError(f"{e}\n  in iteration {work.k}") from e
    made = [r.whole(work.k, d) for r, d in zip(work.rows, s["row_dtypes"], strict=True)]
    axes = [a for a, _, _ in s["scans"]]
    made = [np.ascontiguousarray(np.moveaxis(x, 0, a)) if a else x for x, a in zip(made, axes, strict=True)]
    return _given(call, [*work.carried, *made])


FIRST_ROWS = 64
"""Rows that an output has room for at first, where their number is not known."""


class Iteration:
    """The iterations of one call: ``k`` of them so far, what is carried, the rows, and whether there is another one."""

    def __init__(self, body: Body, call: Call) -> None:
        s, arrays = call.settings, call.arrays
        self.body, self.call, self.k, self.counts = body, call, 0, bool(s["loop"])
        end = 2 + s["carried"]
        self.carried: Sequence[Array] = arrays[2:end]
        self.slices = [_along(x, a, back) for x, (a, back) in zip(arrays[end:], s["slices"], strict=False)]
        given = None if arrays[0] is None else int(arrays[0].reshape(-1)[0])
        self.trips = len(self.slices[0]) if self.slices else given
        every = self.trips if self.slices else None
        self.rows = [Rows(every, back, tail) for _, back, tail in s["scans"]]
        self.going = arrays[1] is None or bool(arrays[1].reshape(-1)[0])

    @property
    def more(self) -> bool:
        """Whether there is another iteration."""
        return self.going and (self.trips is None or self.k < self.trips)

    def once(self) -> None:
        """One iteration."""
        counted = [np.array(self.k, np.int64), np.array(True)] if self.counts else []
        slices = [x[self.k] for x in self.slices]
        results = self.body.run(self.call, [*counted, *self.carried, *slices])
        first, count = int(self.counts), len(self.carried)
        self.going = not first or bool(results[0].reshape(-1)[0])
        moving = {id(x) for x in slices}  # a body may hand one on
        self.carried = [a.copy() if id(a) in moving else a for a in results[first : first + count]]
        for r, row in zip(self.rows, results[first + count :], strict=True):
            r.add(self.k, row)
        self.k += 1


def _along(x: Array, axis: int, backwards: bool) -> Array:
    """The axis in front, from its end where it is gone through backwards."""
    moved = np.moveaxis(x, axis, 0) if axis else x
    return moved[::-1] if backwards else moved


class Rows:
    """The rows of a scan output in one array, the last one first where ``backwards``; doubled where it is full."""

    def __init__(self, every: int | None, backwards: bool, tail: Sequence[int]) -> None:
        """``every``: how many there will be, None: not known. ``tail``: of a row that no iteration shows."""
        self.every, self.backwards, self.tail = every, backwards, tuple(tail)
        self.data: Array | None = None

    def add(self, k: int, row: Array) -> None:
        """Puts row k in its place. InputError: it has another shape than those before."""
        if self.data is None:
            self.data = new_output((FIRST_ROWS if self.every is None else self.every, *row.shape), row.dtype)
        elif row.shape != self.data.shape[1:]:
            what = f"iteration {k} gives a row of shape {row.shape} after rows of {self.data.shape[1:]}"
            raise InputError(what, rule="all rows of an output have one shape")
        if k == len(self.data):
            grown = new_output((2 * k, *row.shape), row.dtype)
            grown[:k] = self.data
            self.data = grown
        self.data[len(self.data) - 1 - k if self.backwards else k, ...] = row

    def whole(self, count: int, dtype: str) -> Array:
        """All rows."""
        if self.data is None:
            return np.empty((0, *self.tail), numpy_dtype(dtype))
        return self.data if count == len(self.data) else self.data[:count]
