"""Control flow as steps of the host: one of two models, or one model again and again (docs/adr/0027-parts.md).

Standard library and numpy only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from polydyn.errors import InputError
from polydyn.runtime.host_steps import Array, Call, Result, step
from polydyn.runtime.native import address_of, new_output
from polydyn.runtime.program import Program, numpy_dtype
from polydyn.runtime.repeats import ENDED, ROOM, SHAPE, Repeats, repeats


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
    try:
        work.run()
    except InputError as e:
        raise InputError(f"{e}\n  in iteration {work.k}") from e
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


class Iteration:
    """The iterations of one call: ``k`` of them so far, what is carried, the rows, and whether there is another one."""

    def __init__(self, call: Call, body: Body) -> None:
        s = call.settings
        self.body, self.counts, self.k = body, bool(s["loop"]), 0
        self.carried = [_dense(a) for a in call.arrays[2 : 2 + s["carried"]]]
        rest = call.arrays[2 + s["carried"] :]
        slices = [_along(x, a, back) for x, (a, back) in zip(rest, s["slices"], strict=False)]
        self.slices = [_aligned(x) for x in slices]
        given = None if call.arrays[0] is None else int(call.arrays[0].reshape(-1)[0])
        self.trips = len(self.slices[0]) if self.slices else given
        every = self.trips if self.slices else None
        self.rows = [Rows(every, back, tail) for _, back, tail in s["scans"]]
        self.going = call.arrays[1] is None or bool(call.arrays[1].reshape(-1)[0])
        self.number, self.condition = np.zeros((), np.int64), np.array(True)

    @property
    def more(self) -> bool:
        """Whether there is another iteration."""
        return self.going and (self.trips is None or self.k < self.trips)

    def run(self) -> None:
        """All iterations, in C where that can be: it nearly always can."""
        body = self.body
        if body.program not in PLACES:
            PLACES[body.program] = Places.of(body, self.counts, len(self.carried))
        places = PLACES[body.program]
        while self.more:
            if places is None or not self._repeat(places):
                self._once()

    def _feeds(self) -> dict[str, Array]:
        """The inputs of the body in iteration ``k``."""
        self.number[...] = self.k
        first = [self.number, self.condition] if self.counts else []
        return dict(zip(self.body.formals, [*first, *self.carried, *(x[self.k] for x in self.slices)], strict=True))

    def _once(self) -> None:
        """One iteration by a call of its own."""
        self.condition[...] = True
        results = self.body.run(list(self._feeds().values()))
        first, count = int(self.counts), len(self.carried)
        self.going = not self.counts or bool(results[0].reshape(-1)[0])
        self.carried = [_dense(a) for a in results[first : first + count]]
        for r, row in zip(self.rows, results[first + count :], strict=True):
            r.add(self.k, row)
        self.k += 1

    def _repeat(self, places: Places) -> bool:
        """All that are left in C; False where the next one needs Python."""
        feeds = {n: _aligned(a) for n, a in (self.body.around | self._feeds()).items()}
        with repeats(self.body.program, feeds) as c:
            rows = [n for j, n in places.carried.items() if n in places.rows and c.shapes[n] != self.carried[j].shape]
            if rows or (places.condition and c.shapes[places.condition] not in ((), (1,))):
                return False
            work = Repetition(self, places, c, feeds)
            while self.more and c.state != SHAPE:
                work.run()
            work.finish()
        return not self.more


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


PLACES: WeakKeyDictionary[Program, Places | None] = WeakKeyDictionary()
"""Of bodies that have run."""


class Repetition:
    """Where what is carried and the rows lie while ``pd_repeat`` runs.

    What is carried goes to and fro between two arrays, so nothing is copied; what is also a row is read from the row.
    What grows at its end stays in one array, whose room is doubled when it is full.
    """

    def __init__(self, work: Iteration, places: Places, c: Repeats, feeds: Mapping[str, Array]) -> None:
        """``feeds``: of the first iteration."""
        self.work, self.places, self.c, self.feeds, self.first = work, places, c, feeds, work.k
        manifest, first = work.body.program.manifest, 2 * int(work.counts)
        described = {o["name"]: o for o in manifest["outputs"]}
        self.ends = {n for n, o in described.items() if not o["strided"]}  # what grows, grows along the first axis
        for name, r in zip(places.rows, work.rows, strict=True):
            r.reserve(work.k, c.shapes[name], numpy_dtype(described[name]["dtype"]), work.trips)
        rows = dict(zip(places.rows, work.rows, strict=True))
        self.formals = work.body.formals[first : first + len(work.carried)]
        self.sliced = work.body.formals[first + len(work.carried) :]
        self.changing = {j: n for j, n in places.carried.items() if c.shapes[n] != work.carried[j].shape}
        self.rows = {j: rows[n] for j, n in places.carried.items() if n in rows and j not in self.changing}
        self.pairs: dict[int, tuple[Array, Array]] = {}
        for j, n in places.carried.items():
            if j not in self.rows:
                itemsize = work.carried[j].itemsize
                bytes_ = itemsize * max(prod(c.shapes[n]), work.carried[j].size)
                self.pairs[j] = self._pair(j, 2 * bytes_ + FIRST_ROOM if j in self.changing else bytes_)
                if self._in_place(j):
                    self.pairs[j][0][: work.carried[j].nbytes] = work.carried[j].reshape(-1).view(np.uint8)
        self.reads = {n: (a, a, 0, 0) for n, x in feeds.items() for a in [address_of(x)]}
        for name, x in zip(self.sliced, work.slices, strict=True):
            at = x.__array_interface__["data"][0]
            self.reads[name] = at, at, 0, x.strides[0]
        at = address_of(work.condition)
        self.condition = at if places.condition else None
        self.writes = {places.condition: (at, at, 0, 0)} if places.condition else {}

    def _in_place(self, j: int) -> bool:
        """Whether something carried only grows at its end, along its first axis."""
        name = self.changing.get(j, "")
        return name in self.ends and self.work.body.program.appendable.get(name) == self.formals[j]

    def _pair(self, j: int, room: int) -> tuple[Array, Array]:
        """Two arrays of bytes, or the same one twice."""
        even = new_output((room,), np.dtype(np.uint8))
        return even, even if self._in_place(j) else new_output((room,), np.dtype(np.uint8))

    def run(self) -> None:
        """As many iterations as there is room for."""
        work, c = self.work, self.c
        for r in work.rows:
            r.grow(work.k)
        self._point()
        end = min([len(r.data) for r in work.rows if r.data is not None] or [work.k + AT_ONCE])
        end = min(end, work.k + AT_ONCE) if work.trips is None else min(end, work.k + AT_ONCE, work.trips)
        number = address_of(work.number) if work.counts else None
        grown = [(self.formals[j], n, self.pairs[j][0].nbytes) for j, n in self.changing.items()]
        try:
            c.run(self.reads, self.writes, work.k, end, number, self.condition, grown)
        finally:
            work.k = c.next
        work.going = c.state != ENDED
        if c.state == ROOM:
            self._enlarge()

    def _point(self) -> None:
        """Where the next iterations find and put everything."""
        work, begins = self.work, self.work.k == self.first
        for name, r in zip(self.places.rows, work.rows, strict=True):
            self.writes[name] = r.start, r.start, 0, r.step
        for j, pair in self.pairs.items():
            even, odd = map(address_of, pair)
            given = address_of(self.feeds[self.formals[j]]) if begins and not self._in_place(j) else 0
            self.reads[self.formals[j]] = even, odd, given, 0
            self.writes[self.places.carried[j]] = odd, even, 0, 0
        for j, r in self.rows.items():
            given = address_of(self.feeds[self.formals[j]]) if begins else 0
            self.reads[self.formals[j]] = r.start - r.step, r.start - r.step, given, r.step

    def _enlarge(self) -> None:
        """Doubles the room of what grows."""
        for j in self.changing:
            old, now = self.pairs[j], self.work.k % 2
            self.pairs[j] = self._pair(j, 2 * old[0].nbytes)
            self.pairs[j][now][: old[now].nbytes] = old[now]

    def finish(self) -> None:
        """What was carried out of the last iteration."""
        work = self.work
        for j, pair in self.pairs.items() if work.k > self.first else ():
            shape = self.c.shape(self.formals[j]) if j in self.changing else work.carried[j].shape
            work.carried[j] = np.ndarray(shape, work.carried[j].dtype, pair[work.k % 2])
        for j, r in self.rows.items() if work.k > self.first else ():
            work.carried[j] = r.row(work.k - 1).copy()


def _aligned(x: Array) -> Array:
    """The array, or a copy of one that is not aligned to its elements."""
    return x if x.flags.aligned else np.require(x, requirements="A")


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

    def grow(self, k: int) -> None:
        """Room for row k, behind ``reserve``."""
        if self.data is not None and k >= len(self.data):
            grown = new_output((2 * k, *self.data.shape[1:]), self.data.dtype)
            grown[:k] = self.data
            self._take(grown)

    def _take(self, data: Array) -> None:
        self.data = data
        forwards = self.row(0).__array_interface__["data"][0] if len(data) else 0
        self.start, self.step = forwards, -data.strides[0] if self.backwards else data.strides[0]

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
        return np.empty((0, *self.tail), numpy_dtype(dtype)) if self.data is None else self.data[:count]
