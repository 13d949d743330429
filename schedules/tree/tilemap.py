"""The tile map: the element of the group that a tile coordinate represents.

It is stated once; the proof, the code generator and the interpreter read it.

An *axis* is an iterator of the group, or several that are aligned. Tiling writes it as a mixed-radix number whose
*digits*, most significant first, are b, c, p and so on. A *loop* of a statement runs an ordered tuple of digits
(several as one number, in any order); a statement's *view* is its loops. Sizes of digits may be symbols.

    Lemma (mixed radix). For sizes >= 1 the digits of x >= 0 are unique, every combination of digits below their sizes
    is an x, and x < y iff digits(x) <lex digits(y).

So equality and order of iterators are equality and lexicographic order of digits: affine for all sizes.

The lemma does not need parts of equal size. Three kinds of uneven parts occur (``balance``, ``even``, ``Lines``): a
block's range of n tiles, ``[n*b // B, n*(b+1) // B)``; tiles of nearly equal size, ``[n*c // C, n*(c+1) // C)``
elements; and runs of a line of L elements, ``[L*r // s, L*(r+1) // s)`` for s runs a line, counted over all lines, so
that line m begins with run ``m*s``. All are consecutive and cover ``[0, n)``. They have at most ``ceil(n/B)``
members, runs ``ceil(L/s)``, so digits stay unique and their order stays the order of elements. Only the start of a part
changes; ``origins`` and ``shares`` define it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from polydyn.schedules.errors import ScheduleError, ScheduleNameError
from polydyn.schedules.index import ONE, ZERO, Index, maximum, minimum, product
from polydyn.schedules.tree.names import Coord, End, Role

V = Index.of


class When(Enum):
    """When the size of a digit becomes a number."""

    BUILD = "when the kernel's text is made"
    LAUNCH = "an argument of the kernel"
    COUNT = "the most significant digit: ceil(extent / what is below)"


@dataclass(frozen=True)
class Digit:
    """One digit of an axis. ``size`` is a number or an expression; for the top digit it is the count."""

    axis: str
    name: str
    size: Index
    when: When = When.BUILD

    def __repr__(self) -> str:
        return f"{self.name}:{self.size}"


@dataclass(frozen=True)
class Loop:
    """A loop of one statement: the digits that it runs, most significant first.

    ``at``: the statement has no such digits; it runs only at the first or last step (the solved shift).
    """

    coord: Coord
    digits: tuple[Digit, ...]
    at: End | None = None

    @property
    def extent(self) -> Index:
        """The number of its steps."""
        return product(d.size for d in self.digits)


@dataclass(frozen=True)
class View:
    """A statement in tile space.

    ``hidden``: digits that a single instance covers, as one instruction does. ``guard``: (loop, low, short): the
    statement runs only for ``low <= loop < extent - short``.
    """

    loops: tuple[Loop, ...]
    role: Role
    hidden: tuple[Digit, ...] = ()
    guard: tuple[tuple[Coord, int, int], ...] = ()

    def loop(self, coord: Coord) -> Loop | None:
        """Return the loop of that name, or None."""
        return next((x for x in self.loops if x.coord == coord), None)

    @property
    def digits(self) -> tuple[Digit, ...]:
        """All digits of an instance."""
        return tuple(d for x in self.loops if not x.at for d in x.digits) + self.hidden


@dataclass(frozen=True)
class Lines:
    """The lines of an axis of ``extent`` elements, and their runs. The last line may be shorter than ``length``.

    A line has as few runs as it needs, of nearly equal sizes and at most ``most`` elements. No run crosses a line. A
    tile consists of ``runs`` consecutive runs; the last one may have fewer.
    """

    extent: Index
    length: Index
    most: int
    runs: int

    @property
    def runs_per_line(self) -> Index:
        """The number of runs of a line."""
        return maximum(1, self.length.ceildiv(self.most))

    @property
    def all_runs(self) -> Index:
        """The number of runs of the axis."""
        return self.extent.ceildiv(self.length) * self.runs_per_line

    @property
    def longest(self) -> Index:
        """The elements of the longest run."""
        return self.length.ceildiv(self.runs_per_line)

    def start(self, run: Index) -> Index:
        """Return the first element of a run; run r has the elements ``[start(r), start(r+1))``."""
        return minimum(self.extent, run * self.length // self.runs_per_line)

    def first_run(self, tile: Index) -> Index:
        """Return the first run of a tile."""
        return minimum(tile * self.runs, self.all_runs)


@dataclass(frozen=True)
class Origin:
    """The starts of the tiles of an axis.

    ``tile``: the digit that counts tiles. Kernels keep the first element of the current tile in ``symbol``. ``even``:
    tiles have nearly equal sizes; otherwise the digits below determine the size. ``lines``: even tiles consist of runs
    that do not cross a line.
    """

    tile: Digit
    symbol: str
    even: bool = False
    lines: Lines | None = None


@dataclass(frozen=True)
class Share:
    """The nearly equal distribution of an axis' tiles over blocks.

    ``tiles`` and ``elements``: the kernels' symbols for the first tile and the first element of a block. A loop over
    tiles alone counts along the whole axis, not from the block's first one.
    """

    block: Digit
    tiles: str
    elements: str


@dataclass(frozen=True)
class TileMap:
    """The relation between coordinates and elements.

    ``axes``: digits of each axis, most significant first; ``extents``: axis -> extent; ``iterators``: (statement,
    iterator) -> axis; ``views``: statement -> view; ``origins`` and ``shares``: axis -> the starts of its parts.
    ``derived``: iterators of the group before it was rewritten, as functions of its current iterators. ``joined``: axes
    that a rewrite split, as functions of the axes of their parts. The axes in ``open`` run past their extents; the
    rewrite defines the computation there.
    """

    axes: Mapping[str, tuple[Digit, ...]]
    extents: Mapping[str, Index]
    iterators: Mapping[tuple[str, str], str]
    views: Mapping[str, View]
    origins: Mapping[str, Origin]
    shares: Mapping[str, Share]
    derived: Mapping[str, Index] = field(default_factory=dict)
    joined: Mapping[str, Index] = field(default_factory=dict)
    open: frozenset[str] = frozenset()

    # -- what it answers -----------------------------------------------------------------------------------------

    def parts(self, axis: str) -> tuple[str, ...]:
        """Return the axes that an axis consists of: itself, unless a rewrite split it."""
        return tuple(sorted(self.joined[axis].symbols() & self.axes.keys())) if axis in self.joined else (axis,)

    def element(self, statement: str, axis: str, without: Collection[Digit] = ()) -> Index:
        """Return the element of an axis that an instance represents, in the statement's coordinates.

        ``without``: digits that count as 0, which gives the offset inside a block, a tile or a buffer. ScheduleError:
        the statement does not run a digit that counts.
        """
        if axis in self.joined:
            return self.joined[axis].subs({x: self.element(statement, x, without) for x in self.parts(axis)})
        start, digits = self._start(statement, axis, without)
        values, out, weight = self.values(statement), ZERO, ONE
        for d in reversed(digits):
            if d in without:
                continue
            if d not in values:
                raise ScheduleNameError(f"{statement} has no digit {d} of axis {axis}", node=statement, rule="tile map")
            out, weight = out + values[d] * weight, weight * d.size
        return start + out

    def _start(self, statement: str, axis: str, without: Collection[Digit]) -> tuple[Index, tuple[Digit, ...]]:
        """Return the start of the part that contains an instance, and the digits of the offset inside the part."""
        digits, origin, share = self.axes[axis], self.origins.get(axis), self.shares.get(axis)
        if share is not None and share.block in without and origin is None:
            return ZERO, digits[1:]
        if origin is not None and origin.tile not in without:
            below = digits[digits.index(origin.tile) + 1 :]
            if self._alone(statement, origin.tile):
                inside = share is not None and share.block in without
                return V(origin.symbol) - (share.elements if inside and share else 0), below
            if share is None or not origin.even:
                return ZERO, digits
            at = self._joint(statement, (origin.tile, *below))
            return at + (0 if share.block in without else share.elements), ()
        if share is not None and share.block not in without:
            below = digits[1:]
            return V(share.tiles) * product(d.size for d in digits[2:]), below
        return ZERO, digits

    def _alone(self, statement: str, digit: Digit) -> bool:
        return any(x.digits == (digit,) and not x.at for x in self.views[statement].loops)

    def _joint(self, statement: str, digits: tuple[Digit, ...]) -> Index:
        """Return the loop that runs these digits as one number of elements of a block."""
        for x in self.views[statement].loops:
            if x.digits == digits:
                return V(x.coord)
        raise ScheduleNameError(f"{statement} has no loop over {digits} as one number", node=statement, rule="tile map")

    def values(self, statement: str) -> dict[Digit, Index]:
        """Return each digit as a function of the statement's coordinates; hidden digits are their own symbols."""
        view = self.views[statement]
        out: dict[Digit, Index] = {}
        first = {self.axes[ax][1]: x.tiles for ax, x in self.shares.items()}
        for x in (x for x in view.loops if not x.at):
            rest = V(x.coord) - (first[x.digits[0]] if len(x.digits) == 1 and x.digits[0] in first else 0)
            for d in reversed(x.digits[1:]):
                out[d], rest = rest % d.size, rest // d.size
            if x.digits:
                out[x.digits[0]] = rest
        return out | {d: V(d.name) for d in view.hidden}

    def environment(self, statement: str) -> dict[str, Index]:
        """Return iterator -> its element, for all iterators whose digits the statement runs."""
        run = set(self.views[statement].digits)
        out = {
            it: self.element(statement, axis)
            for (s, it), axis in self.iterators.items()
            if s == statement and run.issuperset(self.axes[axis])
        }
        return out | {it: e.subs(out) for it, e in self.derived.items() if e.symbols() & out.keys()}

    # -- sizes ---------------------------------------------------------------------------------------------------

    def lines(self, axis: str) -> Lines | None:
        """Return the lines that the tiles of an axis respect, or None if they may cross them."""
        return self.origins[axis].lines if axis in self.origins else None

    def tiles(self, axis: str) -> Index:
        """Return the number of tiles of an axis that has shares or an origin."""
        if (lines := self.lines(axis)) is not None:
            return lines.all_runs.ceildiv(lines.runs)
        tile = self.origins[axis].tile if axis in self.origins else self.axes[axis][1]
        below = product(d.size for d in self.axes[axis][self.axes[axis].index(tile) + 1 :])
        return self.extents[axis].ceildiv(below)

    def share(self, axis: str, block: Index) -> Index:
        """Return the first tile of a block; block b has the tiles ``[share(b), share(b+1))``."""
        return self.tiles(axis) * block // self.shares[axis].block.size

    def origin(self, axis: str, tile: Index) -> Index:
        """Return the first element of a tile; tile c has the elements ``[origin(c), origin(c+1))``."""
        origin, n = self.origins[axis], self.tiles(axis)
        if origin.lines is not None:
            return origin.lines.start(origin.lines.first_run(tile))
        if origin.even:
            return tile * self.extents[axis] // n
        return tile * product(d.size for d in self.axes[axis][self.axes[axis].index(origin.tile) + 1 :])

    def first(self, axis: str, block: Index) -> Index:
        """Return the first element of a block's share of even tiles."""
        if self.lines(axis) is not None:
            return self.origin(axis, self.share(axis, block))
        return self.share(axis, block) * self.extents[axis] // maximum(1, self.tiles(axis))

    def sizes(self) -> dict[str, tuple[When, Index]]:
        """Return every symbolic size of a digit: when it becomes a number, and its value then."""
        out: dict[str, tuple[When, Index]] = {}
        for axis, digits in self.axes.items():
            below = ONE
            for d in reversed(digits):
                if d.size.constant is None:
                    out[str(d.size)] = d.when, self._count(axis, d, below) if d.when is When.COUNT else d.size
                below = below * d.size
        return out

    def _count(self, axis: str, digit: Digit, below: Index) -> Index:
        n, share = self.extents[axis].ceildiv(below), self.shares.get(axis)
        if self.lines(axis) is not None and digit == self.origins[axis].tile:
            n = self.tiles(axis)
        if self._stepped(digit):
            return maximum(1, n)  # the step of a sunk statement exists
        return n.ceildiv(share.block.size) if share else n

    def _stepped(self, digit: Digit) -> bool:
        """Whether a statement runs at the first or last step of a digit."""
        return any(x.at and digit in x.digits for w in self.views.values() for x in w.loops)

    def has_empty_step(self, axis: str) -> bool:
        """Whether an axis without elements has a step, the first and last one of a sunk statement."""
        return self.extents[axis].constant is None and self._stepped(self.axes[axis][0])

    # -- edits, for transformations --------------------------------------------------------------------------------

    def refine(self, old: Digit, new: tuple[Digit, ...]) -> TileMap:
        """Split ``old`` into several digits, everywhere; loops do not change."""

        def split(ds: tuple[Digit, ...]) -> tuple[Digit, ...]:
            return tuple(y for d in ds for y in (new if d == old else (d,)))

        views = {
            n: replace(w, loops=tuple(replace(x, digits=split(x.digits)) for x in w.loops), hidden=split(w.hidden))
            for n, w in self.views.items()
        }
        return replace(self, axes={n: split(ds) for n, ds in self.axes.items()}, views=views)

    def digit(self, axis: str, name: str) -> Digit:
        """Return the digit of that name. ScheduleError: the axis has none."""
        for d in self.axes.get(axis, ()):
            if d.name == name:
                return d
        raise ScheduleError(f"axis {axis} has the digits {self.axes.get(axis)}, no {name}", rule="tile map")
