"""Control flow as steps of the host: one of two models, or one model again and again (docs/adr/0027-parts.md).

Standard library and numpy only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from polydyn.errors import InputError
from polydyn.runtime.host_steps import Array, Call, Result, step
from polydyn.runtime.native import address_of, new_output
from polydyn.runtime.program import Program, numpy_dtype
from polydyn.runtime.repeats import ENDED, ROOM, SHAPE, Repeats


class Body:
    """A compiled body. ``made``: the outputs of its program; other results are inputs passed on."""

    def __init__(self, call: Call, role: str, settings: Mapping[str, Any]) -> None:
        self.program: Program = call.bodies[role]
        self.formals: list[str] = settings["formals"]
        self.results: list[str] = settings["results"]
        self.captured: list[tuple[str, int]] = settings["captured"]
        self.sizes: list[tuple[str, int]] = settings["sizes"]
        self.made = self.program.outputs.keys()

    def around(self, call: Call) -> dict[str, Array]:
        """What it reads from around it, by the name of its input."""
        found = {name: call.held[k][0] for name, k in self.captured}
        return found | {name: np.empty(call.dims[place], np.uint8) for name, place in self.sizes}

    def run(self, call: Call, arrays: Sequence[Array]) -> list[Array]:
        """The results for these inputs; those that are inputs are the same arrays."""
        feeds = self.around(call) | dict(zip(self.formals, arrays, strict=True))
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
    taken = {id(h[0]) for h in call.held}
    own = []
    for r in results:
        own.append(r.copy() if id(r) in taken else r)
        taken.add(id(r))
    return own, [n for a in own for n in a.shape]


@step("iterate")
def iterate(call: Call) -> Result:
    """Runs a body while count and condition say so, or for every slice of inputs; gives carried tensors, then rows."""
    if "loop" not in call.kept:
        call.kept["loop"] = Loop(call)
    work = Iteration(call.kept["loop"], call)
    try:
        work.run()
    except InputError as e:
        raise InputError(f"{e}\n  in iteration {work.k}") from e
    s = call.settings
    made = [r.whole(work.k, d) for r, d in zip(work.rows, s["row_dtypes"], strict=True)]
    axes = [a for a, _, _ in s["scans"]]
    made = [np.ascontiguousarray(np.moveaxis(x, 0, a)) if a else x for x, a in zip(made, axes, strict=True)]
    return _given(call, [*work.carried, *made])


AT_ONCE = 1 << 16
"""So many iterations run without a look at the process's signals."""
FIRST_ROWS = 64
"""Rows that an output has room for at first, where their number is not known."""
FIRST_ROOM = 4096
"""Bytes for what grows, beside twice what the first iteration makes of it."""


class Loop:
    """What stays from call to call: the body, its number of iteration and condition, where its results lie."""

    def __init__(self, call: Call) -> None:
        self.body, self.counts = Body(call, "body", call.settings), bool(call.settings["loop"])
        self.number, self.condition = np.zeros((), np.int64), np.array(True)
        self.places = Places.of(self.body, self.counts, call.settings["carried"])
        self.repetition: Repetition | None = None


class Iteration:
    """The iterations of one call: ``k`` of them so far, what is carried, the rows, and whether there is another one."""

    def __init__(self, loop: Loop, call: Call) -> None:
        s, arrays = call.settings, call.arrays
        self.loop, self.call, self.k = loop, call, 0
        end = 2 + s["carried"]
        self.carried = [_dense(a) for a in arrays[2:end]]
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

    def run(self) -> None:
        """All iterations, in C where that can be: it nearly always can."""
        while self.more:
            if self.loop.places is None or not self._repeat(self.loop.places):
                self._once()

    def _arrays(self) -> list[Array]:
        """The inputs of the body in iteration ``k``."""
        loop = self.loop
        loop.number[...], loop.condition[...] = self.k, True
        first = [loop.number, loop.condition] if loop.counts else []
        return [*first, *self.carried, *(x[self.k] for x in self.slices)]

    def _once(self) -> None:
        """One iteration by a call of its own."""
        arrays = self._arrays()
        moving = {id(a) for a in (*arrays[: 2 * int(self.loop.counts)], *arrays[len(arrays) - len(self.slices) :])}
        results = self.loop.body.run(self.call, arrays)
        first, count = int(self.loop.counts), len(self.carried)
        self.going = not first or bool(results[0].reshape(-1)[0])
        # a body may hand on what is another one in the next iteration: the number, a slice
        self.carried = [a.copy() if id(a) in moving else _dense(a) for a in results[first : first + count]]
        for r, row in zip(self.rows, results[first + count :], strict=True):
            r.add(self.k, row)
        self.k += 1

    def _repeat(self, places: Places) -> bool:
        """All that are left in C; False where the next one needs Python."""
        loop, call = self.loop, self.call
        forms = [call.dims, [h[2] for h in call.held], [(a.shape, a.strides) for a in self.carried]]
        work, loop.repetition = loop.repetition, None  # where something fails it is not used again
        if work is None or work.forms != forms:
            feeds = loop.body.around(call) | dict(zip(loop.body.formals, self._arrays(), strict=True))
            work = Repetition(self, places, Repeats(loop.body.program, feeds), forms)
        if work.fits:
            work.run(self)
        loop.repetition = work
        return work.fits and not self.more


@dataclass(frozen=True)
class Places:
    """What the results of a body are: outputs of its program, each for one purpose.

    ``condition``: the output that says whether to go on, "" where that is always so. ``carried``: what is carried ->
    its output; others are passed on as they came in. ``rows``: the output of each row, which may also be carried.
    """

    condition: str
    carried: Mapping[int, str]
    rows: Sequence[str]

    @staticmethod
    def of(body: Body, counts: bool, count: int) -> Places | None:
        """None where a result is no output of the body's program, or one is needed in two places."""
        if not body.program.one_part or not body.made:
            return None
        first = int(counts)
        conditions, carried = body.results[:first], body.results[first : first + count]
        rows = body.results[first + count :]
        formals = body.formals[2 * first : 2 * first + count]
        own = {j: n for j, (n, f) in enumerate(zip(carried, formals, strict=True)) if n != f}
        made = [*(n for n in conditions if n != body.formals[1]), *own.values()]
        once = len(set(made)) == len(made) and len(set(rows)) == len(rows) and not set(conditions) & set(rows)
        if not once or not {*made, *rows} <= body.made:
            return None
        return Places("".join(n for n in conditions if n in body.made), own, rows)


class Repetition:
    """Where what is carried and the rows lie while ``pd_repeat`` runs, for tensors of some shapes.

    What is carried goes to and fro between two arrays, so nothing is copied; what is also a row is read from the row.
    What grows at its end stays in one array, whose room is doubled when it is full. The arrays stay for later calls.
    """

    def __init__(self, work: Iteration, places: Places, c: Repeats, forms: list[Any]) -> None:
        """``forms``: sizes, shapes and strides that all this is for."""
        self.places, self.c, self.forms = places, c, forms
        loop, self.count = work.loop, len(work.carried)
        body, first = loop.body, 2 * int(loop.counts)
        described = {o["name"]: o for o in body.program.manifest["outputs"]}
        ends = {n for n, o in described.items() if not o["strided"]}  # what grows, grows along the first axis
        self.formals = body.formals[first:]
        self.changing = {j: n for j, n in places.carried.items() if c.shapes[n] != work.carried[j].shape}
        appendable = body.program.appendable
        self.in_place = {j for j, n in self.changing.items() if n in ends and appendable.get(n) == self.formals[j]}
        self.rows = {j: places.rows.index(n) for j, n in places.carried.items() if n in places.rows}
        self.row_forms = [(c.shapes[n], numpy_dtype(described[n]["dtype"])) for n in places.rows]
        one = not places.condition or c.shapes[places.condition] in ((), (1,))
        self.fits = one and not self.rows.keys() & self.changing.keys()
        """Whether the program can run again and again: one condition, and rows of one shape."""
        self.condition = address_of(loop.condition) if places.condition else None
        self.number = address_of(loop.number) if loop.counts else None
        for name, at in zip(body.formals[:first], (self.number, address_of(loop.condition)), strict=False):
            c.read(name, at or 0)
        for name, _ in body.sizes:
            c.read(name, 0)
        if self.condition:
            c.write(places.condition, self.condition)
        self.pairs: dict[int, tuple[Array, Array]] = {}
        for j, n in places.carried.items():
            if j not in self.rows:
                x = work.carried[j]
                most = x.itemsize * max(prod(c.shapes[n]), x.size)
                self._place(j, 2 * most + FIRST_ROOM if j in self.changing else most)

    def _place(self, j: int, room: int) -> None:
        """Two arrays of bytes for something carried, or the same one twice."""
        even = new_output((room,), np.dtype(np.uint8))
        odd = even if j in self.in_place else new_output((room,), np.dtype(np.uint8))
        self.pairs[j] = even, odd
        a, b = address_of(even), address_of(odd)
        self.c.read(self.formals[j], a, b)
        self.c.write(self.places.carried[j], b, a)

    def run(self, work: Iteration) -> None:
        """The iterations of a call, until one has other shapes."""
        c, first = self.c, work.k
        c.start()
        self._begin(work)
        while work.more and c.state != SHAPE:
            for k, r in enumerate(work.rows):
                if r.grow(work.k) or work.k == first:
                    self._point(k, r)
            grown = [(self.formals[j], n, self.pairs[j][0].nbytes) for j, n in self.changing.items()]
            try:
                c.run(work.k, self._end(work), self.number, self.condition, grown)
            finally:
                work.k = c.next
            work.going = c.state != ENDED
            if c.state == ROOM:
                self._enlarge(work.k)
            for j in self.places.carried:
                c.first(self.formals[j], 0)
        if work.k > first:
            self._finish(work)

    def _end(self, work: Iteration) -> int:
        """Behind the last iteration for which there is room."""
        most = work.k + AT_ONCE if work.trips is None else min(work.k + AT_ONCE, work.trips)
        return min([most, *(len(r.data) for r in work.rows if r.data is not None)])

    def _begin(self, work: Iteration) -> None:
        """Where the first iteration finds everything."""
        call, c = work.call, self.c
        for name, k in work.loop.body.captured:
            c.read(name, call.held[k][1])
        for name, x in zip(self.formals[self.count :], work.slices, strict=True):
            at = address_of(x) if x.size else 0
            c.read(name, at, at, x.strides[0])
        for j, x in enumerate(work.carried):
            name = self.formals[j]
            if j in self.in_place:
                self.pairs[j][0][: x.nbytes] = x.reshape(-1).view(np.uint8)
            elif j in self.places.carried:
                c.first(name, address_of(x))
            else:
                c.read(name, address_of(x))
        for r, (shape, dtype) in zip(work.rows, self.row_forms, strict=True):
            r.reserve(work.k, shape, dtype, work.trips)

    def _point(self, k: int, r: Rows) -> None:
        """Row k of the body goes where ``r`` has it."""
        self.c.write(self.places.rows[k], r.start, r.start, r.step)
        for j, row in self.rows.items():
            if row == k:
                self.c.read(self.formals[j], r.start - r.step, r.start - r.step, r.step)

    def _enlarge(self, k: int) -> None:
        """Doubles the room of what grows, before iteration ``k``."""
        for j in self.changing:
            old = self.pairs[j]
            self._place(j, 2 * old[0].nbytes)
            self.pairs[j][k % 2][: old[k % 2].nbytes] = old[k % 2]

    def _finish(self, work: Iteration) -> None:
        """What was carried out of the last iteration, in arrays of its own."""
        for j, pair in self.pairs.items():
            x = work.carried[j]
            shape = self.c.shape(self.formals[j]) if j in self.changing else x.shape
            work.carried[j] = np.ndarray(shape, x.dtype, pair[work.k % 2]).copy()
        for j, r in self.rows.items():
            work.carried[j] = work.rows[r].row(work.k - 1).copy()


def _dense(x: Array) -> Array:
    """The array, or a dense and aligned copy."""
    return x if x.flags.c_contiguous and x.flags.aligned else np.require(x, requirements=("C", "A"))


def _along(x: Array, axis: int, backwards: bool) -> Array:
    """The axis in front, from its end where it is gone through backwards."""
    moved = np.moveaxis(x, axis, 0) if axis else x
    return moved[::-1] if backwards else moved


class Rows:
    """The rows of a scan output in one array, the last one first where ``backwards``; doubled where it is full.

    ``start``, ``step``: row k begins at ``start + k * step``.
    """

    def __init__(self, every: int | None, backwards: bool, tail: Sequence[int]) -> None:
        """``every``: how many there will be, None: not known. ``tail``: of a row that no iteration shows."""
        self.every, self.backwards, self.tail = every, backwards, tuple(tail)
        self.data: Array | None = None
        self.start = self.step = 0

    def reserve(self, k: int, shape: tuple[int, ...], dtype: np.dtype[Any], trips: int | None) -> None:
        """Room for row k. InputError: it has another shape than those before."""
        if self.data is None:
            few = FIRST_ROWS if trips is None else min(trips, FIRST_ROWS)
            self._take(new_output((few if self.every is None else self.every, *shape), dtype))
        elif shape != self.data.shape[1:]:
            what = f"iteration {k} gives a row of shape {shape} after rows of {self.data.shape[1:]}"
            raise InputError(what, rule="all rows of an output have one shape")

    def grow(self, k: int) -> bool:
        """Room for row k, behind ``reserve``; True: the rows lie elsewhere now."""
        if self.data is None or k < len(self.data):
            return False
        grown = new_output((2 * k, *self.data.shape[1:]), self.data.dtype)
        grown[:k] = self.data
        self._take(grown)
        return True

    def _take(self, data: Array) -> None:
        self.data, self.start, self.step = data, address_of(data), data.strides[0]
        if self.backwards:
            self.start, self.step = self.start + (len(data) - 1) * self.step, -self.step

    def row(self, k: int) -> Array:
        """Row k, as it lies there."""
        assert self.data is not None
        row: Array = self.data[len(self.data) - 1 - k if self.backwards else k, ...]
        return row

    def add(self, k: int, row: Array) -> None:
        """Puts row k in its place. InputError: it has another shape than those before."""
        self.reserve(k, row.shape, row.dtype, None)
        self.grow(k)
        self.row(k)[...] = row

    def whole(self, count: int, dtype: str) -> Array:
        """All rows."""
        if self.data is None:
            return np.empty((0, *self.tail), numpy_dtype(dtype))
        return self.data if count == len(self.data) else self.data[:count]
