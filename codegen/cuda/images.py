"""Im2col operands: an image with a tensor map in im2col mode.

TMA loads columns of pixels, one tap of a convolution each.

The rows of a convolution are pixels of the result, a mixed-radix number of (n, d, h, w). Its steps are taps, then
channels. A row reads the image at ``step * pixel + apart * tap + first`` along each side, zeros outside. TMA traverses
the image in the same way: it visits the pixels that the first tap reads, image after image, and adds the tap's offsets.
So the column that it copies from a row's pixel on is what this row and the following ones read at a tap, provided that
no tile of steps has two taps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from math import gcd

from polydyn.codegen.cuda.boxes import ALIGN, Taps, TensorOperand, tensor_operand
from polydyn.codegen.ir import Call, Compare, Parameter, Pointer
from polydyn.codegen.kernel import PixelBoxOf, TensorMapOf
from polydyn.codegen.passes.widen import multiples
from polydyn.schedules.errors import Declined
from polydyn.schedules.expr import (
    ITEMSIZE,
    Const,
    FromIndex,
    Load,
    Op,
    Value,
    at_least_zero,
    conjuncts,
    map_index,
)
from polydyn.schedules.index import ONE, ZERO, Atom, Index, polynomial_division, product
from polydyn.schedules.model import Group
from polydyn.schedules.ranges import is_nonnegative
from polydyn.schedules.tiling import Roles

V = Index.of
BITS = {1: 16, 2: 8, 3: 5}
"""Number of sides -> bits of the corners of a box of pixels, and of the offsets of a tap."""
MAX_PIXEL_STEP = 8
"""Maximum elements between successive pixels of TMA's traversal."""


@dataclass(frozen=True)
class Digit:
    """A digit of a row's or step's number; ``name`` is its symbol in expressions."""

    name: str
    weight: Index
    extent: Index

    @property
    def value(self) -> Index:
        """The digit in expressions over digits."""
        return ZERO if self.extent == ONE else V(self.name)

    def of(self, number: Index) -> Index:
        """Return its value in a number."""
        return number // self.weight % self.extent


@dataclass(frozen=True)
class Side:
    """A side of the image: ``size`` elements with pitch ``pitch``, read at ``step * pixel + apart * tap + first``."""

    pixel: Digit
    tap: Digit
    step: int
    apart: int
    first: Index
    size: Index
    pitch: Index

    @property
    def place(self) -> Index:
        """The coordinate that a row reads at a step, over the digits."""
        return self.pixel.value * self.step + self.tap.value * self.apart + self.first

    @property
    def upper(self) -> Index:
        """The last coordinate that the first tap reads, relative to the last one of the image."""
        return (self.pixel.extent - 1) * self.step + self.first - (self.size - 1)


@dataclass(frozen=True)
class _Read:
    """The read of a row operand, over digits and batch iterators: ``address``, if all ``guards`` are >= 0."""

    address: Index
    guards: tuple[Index, ...]
    rows: tuple[Digit, ...]
    steps: tuple[Digit, ...]
    batch: Mapping[str, Index]

    @property
    def ranges(self) -> dict[str, Index]:
        """Extents of digits."""
        return {d.name: d.extent for d in (*self.rows, *self.steps)}

    def strides(self) -> tuple[dict[str, Index], Index] | None:
        """Return the stride along each digit and iterator, and the rest; None if addresses are not linear."""
        rest, strides = self.address, dict[str, Index]()
        for x in (*self.ranges, *self.batch):
            strides[x], rest = rest.split(x)
        linear = not any(i.symbols() & strides.keys() for i in (rest, *strides.values()))
        return (strides, rest) if linear else None


@dataclass(frozen=True)
class Im2colOperand:
    """The row operand of a convolution, with a tensor map in im2col mode.

    ``channel``: the innermost digit of steps, of which ``channels`` exist; ``sides``: w, h and d, as far as they exist.
    Their pixels are the low digits of a row's number. Above them, and above the iterator ``batch`` if it is not empty,
    are ``images`` images, ``between`` elements apart.
    """

    buffer: str
    dtype: str
    offset: Index
    channel: Digit
    channels: Index
    sides: tuple[Side, ...]
    batch: str
    images: Index
    between: Index
    multiples: tuple[tuple[Index, int], ...] = ()
    conditions: tuple[Compare, ...] = ()

    @property
    def along_k(self) -> bool:
        """Whether the reduction is contiguous: channels are."""
        return True

    def tensor_map(self, name: str, mn: Index, k: Index, box: tuple[int, int], dtype: str = "") -> TensorMapOf:
        """Return the map of the image, in boxes of channels and pixels, of ``dtype`` if given."""
        dims = (self.channels, *(s.size for s in self.sides), self.images)
        strides = (*(s.pitch for s in self.sides), self.between)
        first, upper, steps = zip(*((s.first, s.upper, s.step) for s in self.sides), strict=True)
        pixels = PixelBoxOf(first, upper, steps)
        return TensorMapOf(name, self.buffer, dtype or self.dtype, self.offset, dims, strides, box, pixels)

    def load(
        self, name: str, place: Pointer, mn: Index, k: Index, a: Mapping[str, Index], full: Value, blocks: int = 1
    ) -> Call:
        """Copy the column that begins at row ``mn``, at the tap of step ``k``.

        Rows past the end belong to images that do not exist, which read as zeros.
        """
        assert blocks == 1, "blocks of a cluster do not share rows"
        pixels = {s.pixel.name: s.pixel.of(mn) for s in self.sides}
        at = (s.place.subs({**pixels, s.tap.name: ZERO}) for s in self.sides)
        image = mn // product(s.pixel.extent for s in self.sides) + (a[self.batch] if self.batch else ZERO)
        taps = (s.tap.of(k) * s.apart for s in self.sides)
        numbers = (FromIndex("int32", i) for i in (self.channel.of(k), *at, image, *taps))
        return Call(f"pd_tma_pixels_{len(self.sides) + 2}d", (place, Parameter("uint64", name), *numbers, full))


def im2col_operand(group: Group, v: Value, roles: Roles, step: int) -> Im2colOperand | Declined:
    """Return the im2col operand of a convolution's rows in tiles of ``step`` steps; declined if TMA cannot load it.

    Channels are the innermost steps, rows are pixels in order. A tile of steps has one tap: if there are several taps,
    the number of channels is a multiple of ``step``, which becomes a launch requirement if it is unknown.
    """
    load, read = _load(v), _read(group, v, roles)
    found = read.strides() if read else None
    if load is None or read is None or found is None or found[0][read.steps[0].name] != ONE:
        return Declined("it is not an image with channels last")
    (strides, rest), channel = found, read.steps[0]
    outer = [x for x in read.batch if strides[x] != ZERO]
    pairs, top = _pairs(read, strides, bool(outer))
    sides = tuple(s for pixel, tap in pairs if (s := _side(pixel, tap, read, strides)))
    if len(outer) > 1 or not 1 <= len(sides) <= len(BITS) or len(sides) < len(pairs):
        return Declined("its pixels and taps do not move along the sides of an image")
    offset = rest - sum((s.pitch * s.first for s in sides), ZERO)
    batch, images, between = "", ONE, sides[-1].pitch
    if outer:
        batch, images, between = outer[0], read.batch[outer[0]], strides[outer[0]]
    elif top:
        images, between = top.extent, strides[top.name]
    exist = next((g + channel.value + 1 for g in read.guards if g.symbols() == {channel.name}), channel.extent)
    made = Im2colOperand(load.buffer, load.dtype, offset, channel, exist, sides, batch, images, between)
    alignment = _alignment(made, step if read.steps[1:] else 1)
    limits = _limits(made, group, roles, read)
    if alignment is None or limits is None or mistake(made, group, v, roles):
        return Declined("its channels are not aligned to copies and tiles of steps")
    return replace(made, multiples=alignment, conditions=limits)


NO_TAPS = Declined("it has no taps whose last steps are 0")


def tapped_operand(group: Group, v: Value, roles: Roles, batch: Mapping[str, Index]) -> TensorOperand | Declined:
    """Return the tensor operand of columns that are 0 at the last steps of each tap; declined for others."""
    load, read = _load(v), _read(group, v, replace(roles, row=roles.col))
    if load is None or read is None or len(read.guards) != 1 or len(read.steps) != 2:
        return NO_TAPS
    channel, tap = read.steps
    exist = read.guards[0] + channel.value + 1
    if exist.constant is None:
        return NO_TAPS
    at = map_index(load, lambda i: _in_digits(i, roles.block, read.steps))
    made = tensor_operand(group, at, roles.col, channel.name, {**batch, tap.name: tap.extent})
    return made if isinstance(made, Declined) else replace(made, taps=Taps(tap.name, channel.extent, exist))


def mistake(operand: Im2colOperand, group: Group, v: Value, roles: Roles) -> str:
    """Return why a column of TMA differs from the operand in some row, at some tap; empty if it does not.

    1. The pixels of the sides, the first the fastest, and the images above them are the digits of a row's number: the
    traversal goes from row to row. 2. The operand's address is that of its coordinates along the sides, of its channel
    and of its image. 3. The operand is 0 exactly if a coordinate is outside its side, or a channel does not exist: each
    guard is an end of a side or of the channels, and an end without a guard is never passed.
    """
    read, places = _read(group, v, roles), [s.place for s in operand.sides]
    if read is None:
        return f"{v} is not an element of an image"
    weight = ONE
    for s in operand.sides:
        if s.pixel.extent != ONE and s.pixel != next((d for d in read.rows if d.weight == weight), None):
            return f"the pixels {s.pixel} are not the next ones of a row's number, {read.rows}"
        weight = weight * s.pixel.extent
    above = [d for d in read.rows if d not in [s.pixel for s in operand.sides]]
    image = V(operand.batch) if operand.batch else above[0].value if above else ZERO
    images = read.batch.get(operand.batch, above[0].extent if above else ONE)
    if len(above) > (not operand.batch) or any(d.weight != weight for d in above) or operand.images != images:
        return f"{above} are not the {operand.images} images above {weight} pixels"
    taps = {s.tap for s in operand.sides if s.tap.extent != ONE}
    if operand.channel != read.steps[0] or not taps <= {*read.steps[1:]}:
        return f"{operand.channel} and the taps of {operand.sides} are not the digits of a step, {read.steps}"
    origin = operand.offset + operand.channel.value
    address = sum((p * s.pitch for p, s in zip(places, operand.sides, strict=True)), origin)
    if address + image * operand.between != read.address:
        return f"the operand is at {read.address}, the image's element at {address + image * operand.between}"
    ends = [e for p, s in zip(places, operand.sides, strict=True) for e in (p, s.size - 1 - p)]
    ends.append(operand.channels - 1 - operand.channel.value)
    wrong = [e for e in read.guards if e not in ends]
    wrong += [e for e in ends if e not in read.guards and not is_nonnegative(_least(e, read.ranges))]
    return f"the copy and the operand are not 0 together at the ends {wrong}" if wrong else ""


def _least(e: Index, ranges: Mapping[str, Index]) -> Index:
    """Return the smallest value over digits in which the expression is linear."""
    for x, extent in ranges.items():
        pace, _ = e.split(x)
        e = e.subs({x: ZERO if is_nonnegative(pace) else extent - 1})
    return e


def _load(v: Value) -> Load | None:
    """Return the load of the image, or None if the operand is neither a load nor a load with 0 outside."""
    if isinstance(v, Op) and v.name == "where" and isinstance(v.args[2], Const) and v.args[2].value == 0:
        v = v.args[1]
    return v if isinstance(v, Load) else None


def _read(group: Group, v: Value, roles: Roles) -> _Read | None:
    """Return the read of an operand over digits.

    Return None if it is not a load with comparisons as guards, or a number cannot be split into digits.
    """
    load = _load(v)
    if load is None:
        return None
    guards = [at_least_zero(c) for c in conjuncts(v.args[0])] if isinstance(v, Op) else []
    every = [group.arrays[load.buffer].address(load.index), *(g for g in guards if g is not None)]
    if len(every) <= len(guards):
        return None
    found = _over_digits(every, roles, dict(group.backbone.iters), ())
    cut = found and _overlap(found)
    return _over_digits(every, roles, dict(group.backbone.iters), (V(cut),)) if cut else found


def _over_digits(
    every: list[Index], roles: Roles, extents: Mapping[str, Index], cuts: tuple[Index, ...]
) -> _Read | None:
    """Return an address and its guards over digits; ``cuts``: additional weights of digits of the steps."""
    rows, steps = _digits(every, roles.row, extents[roles.row]), _digits(every, roles.block, extents[roles.block], cuts)
    if rows is None or steps is None:
        return None
    for x, digits in ((roles.row, rows), (roles.block, steps)):
        every = [_in_digits(i, x, digits) for i in every]
    return _Read(every[0], tuple(every[1:]), rows, steps, {x: extents[x] for x in roles.batch})


def _overlap(read: _Read) -> int:
    """Return the gcd of a tap's steps and a pixel's stride if windows of adjacent pixels overlap.

    This is the case if the steps of several taps are contiguous in memory. Otherwise return 0.
    """
    found, steps = read.strides(), read.steps[0].extent.constant
    pixel = found[0][read.rows[0].name].constant if found else None
    if steps is None or not pixel or steps <= pixel or any(read.steps[0].name in g.symbols() for g in read.guards):
        return 0
    return gcd(int(steps), int(pixel))


def _in_digits(i: Index, x: str, digits: tuple[Digit, ...]) -> Index:
    """Return an expression over the digits of an iterator, with quotients by their weights resolved."""

    def quotient(a: Atom) -> Index:
        found = _quotient(a.args[0], a.args[1], digits) if a.kind == "floordiv" else None
        return a.normal() if found is None else found

    return i.subs({x: sum((d.value * d.weight for d in digits), ZERO)}).rebuild(quotient)


def _quotient(number: Index, by: Index, digits: tuple[Digit, ...]) -> Index | None:
    """Return ``number // by`` for a weight ``by``: lower digits are a remainder.

    Return None if the number has other parts.
    """
    above = next((n for n, d in enumerate(digits) if d.weight == by), None)
    out = ZERO
    for n, d in enumerate(digits if above is not None else ()):
        count, number = number.split(d.name)
        q, rest = polynomial_division(count, by)
        if rest.terms and (n >= (above or 0) or count != d.weight):
            return None
        out = out + (ZERO if rest.terms else q * d.name)
    return None if above is None or number.terms else out


def _digits(every: Iterable[Index], x: str, extent: Index, cuts: tuple[Index, ...] = ()) -> tuple[Digit, ...] | None:
    """Return the digits of an iterator, the fastest first, or None. The divisors of its quotients are the weights."""
    found = {*cuts, *(n for i in every for n in _divisors(i, x))}
    weights = sorted(found, key=lambda w: (len(max(w.terms, key=len)), w.constant or 0))
    sizes = []
    for low, high in pairwise((ONE, *weights)):
        size, rest = polynomial_division(high, low)
        if rest.terms:
            return None
        sizes.append(size)
    ends = (*sizes, extent // (weights[-1] if weights else ONE))
    return tuple(Digit(f"{x}_{n}", w, e) for n, (w, e) in enumerate(zip((ONE, *weights), ends, strict=True)))


def _divisors(i: Index, x: str) -> Iterator[Index]:
    """Yield the divisors of quotients of an iterator."""
    for a in i.atoms():
        if isinstance(a, Atom):
            if a.kind == "floordiv" and x in a.args[0].symbols():
                yield a.args[1]
            yield from (n for y in a.args for n in _divisors(y, x))


def _pairs(read: _Read, strides: Mapping[str, Index], batch: bool) -> tuple[list[tuple[Digit, Digit]], Digit | None]:
    """Return pairs of pixel and tap digits of the same side, in the order of pixels, and the digit of the image.

    The latter is None if there is no such digit or ``batch`` counts images. If a guard contains both a pixel and a tap,
    they are a pair. Otherwise their strides decide: a tap belongs to the pixel with the nearest stride.
    """
    free, taps = list(read.rows), dict[str, Digit]()
    for t in read.steps[1:]:
        both = [p for p in free if any({p.name, t.name} <= g.symbols() for g in read.guards)]
        ratios = {p.name: r for p in both or free if (r := _ratio(strides[p.name], strides[t.name]))}
        near = min(ratios, key=lambda p: max(ratios[p].numerator, ratios[p].denominator), default=None)
        taps[near or f"{t.name}_pixel"] = t
        free = [p for p in free if p.name != near]
    top = read.rows[-1]
    image = None if batch or top not in free or any(top.name in g.symbols() for g in read.guards) else top
    pixels = [p for p in read.rows if p != image]
    alone = [Digit(x, ONE, ONE) for x in taps if x not in {p.name for p in pixels}]
    none = Digit("", ONE, ONE)
    return [(p, taps.get(p.name, replace(none, name=f"{p.name}_tap"))) for p in (*pixels, *alone)], image


def _ratio(pixel: Index, tap: Index) -> Fraction | None:
    """Return the tap's stride in units of the pixel's, or None if it is not a positive number."""
    if not pixel.terms or pixel.terms.keys() != tap.terms.keys():
        return None
    ratios = {Fraction(tap.terms[m], c) for m, c in pixel.terms.items()}
    return ratios.pop() if len(ratios) == 1 and min(ratios) > 0 else None


def _side(pixel: Digit, tap: Digit, read: _Read, strides: Mapping[str, Index]) -> Side | None:
    """Return a side from the guards, or else from the strides; None if neither fits an image."""
    paces, low, high = set[tuple[int, int]](), set[Index](), set[Index]()
    for g in (g for g in read.guards if g.symbols() & {pixel.name, tap.name}):
        a, rest = g.split(pixel.name)
        b, rest = rest.split(tap.name)
        if a.constant is None or b.constant is None or rest.symbols() & read.ranges.keys():
            return None
        step, apart = int(a), int(b)
        (high if min(step, apart) < 0 else low).add(rest)
        paces.add((abs(step), abs(apart)))
    of_pixel, of_tap = (strides.get(d.name, ZERO) for d in (pixel, tap))
    ratio = _ratio(of_pixel, of_tap) or Fraction(1)
    step, apart = paces.pop() if paces else (ratio.denominator, ratio.numerator)
    pitches = {_exact(x, n) for x, n in ((of_pixel, step), (of_tap, apart)) if x.terms}
    pitch = pitches.pop() if pitches else None
    if paces or pitches or pitch is None or len(low) > 1 or len(high) > 1 or not 0 <= step <= MAX_PIXEL_STEP:
        return None
    first = next(iter(low), ZERO)
    last = (pixel.extent - 1) * step + (tap.extent - 1) * apart + first
    size = (next(iter(high)) + first if high else last) + 1
    return Side(pixel, tap, max(1, step), apart, first, size, pitch)


def _exact(x: Index, n: int) -> Index | None:
    """Return ``x / n``, or None if it is not a polynomial."""
    return Index({m: c // n for m, c in x.terms.items()}) if n and not any(c % n for c in x.terms.values()) else None


def _alignment(operand: Im2colOperand, step: int) -> tuple[tuple[Index, int], ...] | None:
    """Return the required multiples: bytes for the tensor map, channels for the tile.

    Return None if they can never hold.
    """
    required = dict[tuple[Index, int], None]()
    pitches = (operand.offset, operand.between, *(s.pitch for s in operand.sides))
    for i, n in ((operand.channel.extent, step), *((x, ALIGN // ITEMSIZE[operand.dtype]) for x in pitches)):
        more = multiples(i, n, ())
        if more is None:
            return None
        required |= dict.fromkeys(more)
    return tuple(required)


def _limits(operand: Im2colOperand, group: Group, roles: Roles, read: _Read) -> tuple[Compare, ...] | None:
    """Return the conditions on corners, offsets, pitches, rows and steps, or None if they never hold."""
    out, extents = dict[Compare, None](), dict(group.backbone.iters)
    for x, digits in ((roles.row, read.rows), (roles.block, read.steps)):
        whole = digits[-1].weight * digits[-1].extent
        if (extents[x] - whole).constant is None:
            out[Compare("<=", extents[x], whole)] = None
        elif extents[x] != whole:
            return None
    bits = BITS[len(operand.sides)]
    half = 1 << (bits - 1)
    bounds = [(s.tap.extent - 1) * s.apart for s in operand.sides]
    for i, low, high in (
        *((x, -half, half - 1) for s in operand.sides for x in (s.first, s.upper)),
        *((x, 0, 2 * half - 1) for x in bounds),
    ):  # fmt: skip
        if i.constant is None:
            out |= {Compare(">=", i, V(low)): None, Compare("<=", i, V(high)): None}
        elif not low <= int(i) <= high:
            return None
    # the manual requires increasing pixel coordinates
    apart, pitches = operand.sides[0].pitch - operand.channels, [operand.between, *(s.pitch for s in operand.sides[1:])]
    for i, least in ((apart, ZERO), *((i, ONE) for i in pitches)):
        if is_nonnegative(least - 1 - i):
            return None
        if not is_nonnegative(i):
            out[Compare(">=", i, least)] = None
    return tuple(out)
