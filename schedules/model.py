"""The polyhedral model of a fused group: arrays, statements, the group.

A statement has iterators with extents, one write access and a value whose loads are its reads. An extent is a constant
or one parameter, because isl needs affine domains: a product such as ``B*L`` gets a parameter of its own. Subscripts
are logical coordinates. The layout (``Array.address``) maps them to memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from polydyn.schedules.errors import ScheduleError
from polydyn.schedules.expr import Value, indices, loads
from polydyn.schedules.index import ZERO, Index

SHARE, SHARES = "share", "shares"
"""The iterator over the slices of a split reduction, and the number of slices (a launch-time symbol)."""


@dataclass(frozen=True)
class Array:
    """A tensor in a group.

    ``role``: ``input``, ``output`` (global memory), ``constant`` (global, may be packed) or ``local`` (exists only
    inside the kernel). The ``address`` of subscripts ``i`` is ``offset + sum(i[d] * strides[d])`` in elements.
    """

    name: str
    dtype: str
    shape: tuple[Index, ...]
    role: str
    strides: tuple[Index, ...]
    offset: Index = ZERO

    def address(self, subscripts: tuple[Index, ...]) -> Index:
        """Return the element offset of logical subscripts."""
        return sum((i * s for i, s in zip(subscripts, self.strides, strict=True)), self.offset)


def stored(arrays: Mapping[str, Array]) -> dict[str, str]:
    """Return name -> dtype of the arrays that a kernel finds in memory: all except locals."""
    return {n: a.dtype for n, a in arrays.items() if a.role != "local"}


def row_major(shape: tuple[Index, ...]) -> tuple[Index, ...]:
    """Return the strides, in elements, of a dense row-major array."""
    out: list[Index] = []
    step = Index.of(1)
    for extent in reversed(shape):
        out.append(step)
        step = step * extent
    return tuple(reversed(out))


@dataclass(frozen=True)
class Access:
    """A relation from statement instances to elements: logical subscripts, affine unless ``opaque``.

    An opaque access (data dependent, or not affine) may touch any element of its array.
    """

    array: str
    index: tuple[Index, ...]
    opaque: bool = False


@dataclass(frozen=True)
class Statement:
    """``write = value`` (or ``write = combine(write, value)`` for a reduction) for every instance.

    ``iters``: (name, extent) pairs, outermost first; an extent is a constant or exactly one parameter.
    ``reduce``: a key of ``expr.REDUCTIONS`` or None. ``role``: ``init``, ``backbone``, ``epilogue`` or ``map``.
    """

    name: str
    iters: tuple[tuple[str, Index], ...]
    array: str
    index: tuple[Index, ...]
    value: Value
    reduce: str | None = None
    role: str = "map"

    @property
    def iterators(self) -> tuple[str, ...]:
        """Names of the iterators, outermost first."""
        return tuple(n for n, _ in self.iters)

    @property
    def write(self) -> Access:
        """The written element."""
        return Access(self.array, self.index, not _affine(self.index, self.iterators))

    @property
    def reads(self) -> tuple[Access, ...]:
        """The accumulator of a reduction, the loads of the value, and the integers that subscripts read from tensors.
        """
        own = (self.write,) if self.reduce else ()
        found = [(x.buffer, x.index) for x in loads(self.value)]
        fetched = {f for i in (*indices(self.value), *self.index) for f in i.fetches()}
        found += [(f.name, f.args) for f in sorted(fetched, key=str)]
        return own + tuple(Access(n, i, not _affine(i, self.iterators)) for n, i in found)


def touched(arrays: Mapping[str, Array], statements: Iterable[Statement]) -> dict[str, Array]:
    """Return the arrays that the statements write or read, in the order of ``arrays``."""
    names = {a.array for s in statements for a in (s.write, *s.reads)}
    return {n: a for n, a in arrays.items() if n in names}


def _affine(index: tuple[Index, ...], iterators: tuple[str, ...]) -> bool:
    return all(len(m) <= 1 and all(isinstance(a, str) for a in m) for i in index for m in i.terms)


@dataclass(frozen=True)
class Group:
    """The computation of one kernel: parameters (all >= 1 inside the kernel), arrays, statements in a valid order.

    The original order runs the statements one after another. Each statement runs over its whole domain, with its
    iterators in the given order. Consecutive statements that have the iterator ``around`` run one after another for
    each of its values.
    """

    name: str
    params: tuple[str, ...]
    arrays: dict[str, Array]
    statements: tuple[Statement, ...]
    around: str | None = field(default=None, repr=False)

    @property
    def backbone(self) -> Statement:
        """The first reduction: the accumulation of a matmul-like group. ScheduleError: no statement reduces."""
        for s in self.statements:
            if s.reduce:
                return s
        raise ScheduleError(f"no statement of group {self.name} reduces")

    @property
    def init(self) -> Statement:
        """The statement that initialises the backbone's sums. ScheduleError: there is none."""
        for s in self.statements:
            if s.role == "init":
                return s
        raise ScheduleError(f"no statement of group {self.name} is an initialiser")

    @property
    def epilogues(self) -> tuple[Statement, ...]:
        """The statements on the backbone's results, in order."""
        return tuple(s for s in self.statements if s.role == "epilogue")

    def statement(self, name: str) -> Statement:
        """Return the statement of that name. ScheduleError: there is none."""
        for s in self.statements:
            if s.name == name:
                return s
        raise ScheduleError(f"no statement {name} in group {self.name}")


def verify_group(group: Group) -> None:
    """Check the invariants of a group; ScheduleError otherwise.

    Names are unique. Extents are constants or single parameters. Accesses name known arrays with the right rank.
    Symbols are iterators or parameters. Locals are written before they are read.
    """
    written = {n for n, a in group.arrays.items() if a.role in ("input", "constant")}
    if len({s.name for s in group.statements}) != len(group.statements):
        raise ScheduleError(f"statement names repeat in group {group.name}")
    for s in group.statements:
        known = set(group.params) | set(s.iterators)
        for n, e in s.iters:
            if e.constant is None and not (e.is_symbol and str(e) in group.params):
                raise ScheduleError(f"{s.name}: extent {e} of {n} is neither a constant nor a parameter")
        if s.reduce is None or s.array in written:
            written.add(s.array)
        for a in (s.write, *s.reads):
            if a.array not in group.arrays:
                raise ScheduleError(f"{s.name}: unknown array {a.array}")
            if len(a.index) != len(group.arrays[a.array].shape):
                rank = len(group.arrays[a.array].shape)
                raise ScheduleError(f"{s.name}: {a.array} has rank {rank}, not {len(a.index)}")
            if a.array not in written:
                raise ScheduleError(f"{s.name}: {a.array} is read before it is written")
            for i in a.index:
                if i.symbols() - known:
                    raise ScheduleError(f"{s.name}: unknown symbols {sorted(i.symbols() - known)} in {a.array}[{i}]")
