"""Control flow as steps of the host: one of two models, or one model again and again (docs/adr/0027-parts.md).

Standard library and numpy only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from polydyn.errors import InputError
from polydyn.runtime.host_steps import Array, Call, Result, step
from polydyn.runtime.program import Program, numpy_dtype


class Body:
    """A compiled body with what it reads from around it."""

    def __init__(self, call: Call, role: str, settings: Mapping[str, Any]) -> None:
        self.program: Program = call.bodies[role]
        self.formals: list[str] = settings["formals"]
        self.results: list[str] = settings["results"]
        self.around: dict[str, Array] = {name: call.arrays[k] for name, k in settings["captured"]}
        for name, place in settings["sizes"]:
            self.around[name] = np.empty(call.dims[place], np.uint8)
        self.made = self.program.outputs.keys()

    def run(self, arrays: Sequence[Array]) -> list[Array]:
        """The results for these inputs; those that are inputs are the same arrays."""
        feeds = self.around | dict(zip(self.formals, arrays, strict=True))
        made = self.program.run(feeds) if self.made else {}
        return [made[n] if n in self.made else feeds[n] for n in self.results]


@step("branch")
def branch(call: Call) -> Result:
    """Runs one of two bodies."""
    condition = call.arrays[0]
    if condition.size != 1:
        raise InputError(f"a condition with {condition.size} elements", rule="one element")
    role = "then_branch" if condition.reshape(-1)[0] else "else_branch"
    return _given(call, Body(call, role, call.settings[role]).run(()))


def _given(call: Call, results: Sequence[Array]) -> Result:
    """Results, none of which is an array that came in or another result; and all their sizes."""
    taken = {id(a) for a in call.arrays if a is not None}
    own = []
    for r in results:
        own.append(r.copy() if id(r) in taken else r)
        taken.add(id(r))
    return own, [n for a in own for n in a.shape]


@step("iterate")
def iterate(call: Call) -> Result:
    """Runs a body while count and condition say so, or for every slice of inputs; gives carried tensors, then rows."""
    s = call.settings
    work = Iteration(call, Body(call, "body", s))
    going = call.arrays[1] is None or bool(call.arrays[1].reshape(-1)[0])
    k = 0
    try:
        while going and (work.trips is None or k < work.trips):
            if k == 1 and (work.trips is None or work.trips >= REPEATED):
                work.fix()
            going = work.once(k) if work.bound is None else work.again(k)
            k += 1
    except InputError as e:
        raise InputError(f"{e}\n  in iteration {k}") from e
    made = [r.whole(d) for r, d in zip(work.rows, s["row_dtypes"], strict=True)]
    made = [np.ascontiguousarray(_back(x, a, back)) for x, (a, back, _) in zip(made, s["scans"], strict=True)]
    return _given(call, [*work.carried, *made])


REPEATED = 4
"""From so many iterations on, a body whose shapes stay is bound to its arrays."""


class Iteration:
    """The iterations of one call: what is carried, the rows so far, and the calls that are bound to their arrays."""

    def __init__(self, call: Call, body: Body) -> None:
        s = call.settings
        self.body, self.counts = body, bool(s["loop"])
        self.carried = list(call.arrays[2 : 2 + s["carried"]])
        rest = call.arrays[2 + s["carried"] :]
        self.slices = [_along(x, a, back) for x, (a, back) in zip(rest, s["slices"], strict=False)]
        given = None if call.arrays[0] is None else int(call.arrays[0].reshape(-1)[0])
        self.trips = len(self.slices[0]) if self.slices else given
        self.rows = [Rows(self.trips, tail) for _, _, tail in s["scans"]]
        self.bound: tuple[Bound, Bound] | None = None

    def once(self, k: int) -> bool:
        """One iteration; whether there may be another."""
        first = [np.array(k, np.int64), np.array(True)] if self.counts else []
        results = self.body.run([*first, *self.carried, *(x[k] for x in self.slices)])
        going = not self.counts or bool(results[0].reshape(-1)[0])
        self.carried = results[int(self.counts) :][: len(self.carried)]
        for r, row in zip(self.rows, results[int(self.counts) + len(self.carried) :], strict=True):
            r.add(row)
        return going

    def again(self, k: int) -> bool:
        """As ``once``, by a bound call: this is where loops spend their time."""
        assert self.bound is not None
        bound = self.bound[k & 1]
        if bound.count is not None:
            bound.count[...] = k
        for place, x in zip(bound.slices, self.slices, strict=True):
            place[...] = x[k]
        if bound.call is not None:
            bound.call()
        for r, row in zip(self.rows, bound.rows, strict=True):
            r.add(row)
        self.carried = bound.target
        return bound.condition is None or bool(bound.condition.item())

    def fix(self) -> None:
        """Binds two calls that read what the other wrote, where every iteration has the shapes of the last one."""
        body, first = self.body, int(self.counts)
        formals = body.formals[2 * first :][: len(self.carried)]  # behind the number and the condition
        names = body.results[first : first + len(self.carried)]
        made = [n for n in names if n in body.made]
        kept = all(n in body.made or n == f for n, f in zip(names, formals, strict=True))
        kept = kept and not (self.counts and body.results[0] in formals)  # a condition that is carried
        if not body.program.one_part or not kept or len(set(made)) < len(made):
            return
        here = [np.array(a) for a in self.carried]
        there = [np.empty_like(a) if n in body.made else a for a, n in zip(here, names, strict=True)]
        slices = [np.array(x[0]) for x in self.slices]
        try:
            self.bound = Bound(body, there, here, slices, first), Bound(body, here, there, slices, first)
        except InputError:  # other shapes than before: each call says for itself what is wrong
            return
        self.carried = here


class Bound:
    """A body bound to arrays: it reads carried tensors from one place and writes them to another.

    ``count``: where it reads the iteration's number, None where it has none; ``slices``: where it reads its slices;
    ``condition``: where it says whether to go on, None where that is always so; ``target``, ``rows``: its results.
    """

    def __init__(
        self, body: Body, carried: Sequence[Array], target: Sequence[Array], slices: Sequence[Array], first: int
    ) -> None:
        """InputError: the targets have not the shapes of the results."""
        self.slices = slices
        count: Array = np.zeros((), np.int64)
        self.count = count if first else None
        begin = [count, np.array(True)] if first else []
        feeds = {n: np.require(a, requirements="A") for n, a in body.around.items()}
        feeds |= dict(zip(body.formals, [*begin, *carried, *slices], strict=True))
        names = body.results[first : first + len(carried)]
        out = {n: a for n, a in zip(names, target, strict=True) if n in body.made}
        self.call = body.program.bind(feeds, out) if body.made else None
        made = {} if self.call is None else self.call.outputs
        results = [made[n] if n in body.made else feeds[n] for n in body.results]
        self.condition = results[0] if first and body.results[0] in body.made else None
        self.target = results[first : first + len(carried)]
        self.rows = results[first + len(carried) :]


def _along(x: Array, axis: int, backwards: bool) -> Array:
    """The axis in front, from its end where it is gone through backwards."""
    moved = np.moveaxis(x, axis, 0)
    return moved[::-1] if backwards else moved


def _back(x: Array, axis: int, backwards: bool) -> Array:
    return np.moveaxis(x[::-1] if backwards else x, 0, axis)


class Rows:
    """The rows of a scan output in one array, which grows by half where their number is not known."""

    def __init__(self, trips: int | None, tail: Sequence[int]) -> None:
        self.trips, self.tail, self.count = trips, tuple(tail), 0
        self.data: Array | None = None

    def add(self, row: Array) -> None:
        """Appends a row. InputError: it has another shape than those before."""
        if self.data is None:
            self.data = np.empty((16 if self.trips is None else self.trips, *row.shape), row.dtype)
        if row.shape != self.data.shape[1:]:
            what = f"iteration {self.count} gives a row of shape {row.shape} after rows of {self.data.shape[1:]}"
            raise InputError(what, rule="all rows of an output have one shape")
        if self.count == len(self.data):
            grown = np.empty((self.count + self.count // 2 + 1, *row.shape), row.dtype)
            grown[: self.count] = self.data
            self.data = grown
        self.data[self.count] = row
        self.count += 1

    def whole(self, dtype: str) -> Array:
        """All rows."""
        return np.empty((0, *self.tail), numpy_dtype(dtype)) if self.data is None else self.data[: self.count]
