"""Turn flat nodes into a polyhedral group with canonical names, so that equal structures share one kernel.

Parameters are named ``n0, n1, ...``, buffers ``a0, ...``, locals ``l0, ...`` in order of first use. The binding maps
each name to its meaning at one site of the model.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from polydyn.graph.ir import Graph
from polydyn.schedules.expr import Load, Value, map_index, transform
from polydyn.schedules.index import ONE, Atom, Index
from polydyn.schedules.model import Array, Group, Statement, row_major


@dataclass(frozen=True)
class Pack:
    """A constant laid out in panels: array of shape (batch.., ceil(col/width), reduction.., width).

    Element ``[b.., p, k.., l]`` is ``source`` at ``address`` with iterators ``batch``, ``col = p*width + l``,
    ``reduction``. Columns past the last are 0. All extents are constants. ``steps``: each element packs this many steps
    of the last reduction into 32 bits, in equal parts, the first step in the lowest bits and 0 past the last step;
    ``reduction`` counts single steps.

    ``vectors``: vectors of ``width`` columns per panel. If there is more than one, the last axis becomes two axes.
    ``scales``: a float constant over all but the last two reductions, whose bits follow the words of each. ``dtype``:
    dtype to which the elements are converted; the source's if empty.
    """

    source: str
    batch: tuple[tuple[str, int], ...]
    col: tuple[str, int]
    reduction: tuple[tuple[str, int], ...]
    address: Index
    width: int
    steps: int = 1
    vectors: int = 1
    scales: Pack | None = None
    dtype: str = field(default="", repr=False)  # kept out of repr: it would rename other panels

    @property
    def columns(self) -> int:
        """Columns of a panel."""
        return self.width * self.vectors

    @property
    def shape(self) -> tuple[int, ...]:
        """The array's shape."""
        steps = [e for _, e in self.reduction]
        if steps:
            steps[-1] = -(-steps[-1] // self.steps)
        if self.scales:
            steps[-2] += 1
        lanes = (self.vectors, self.width) if self.vectors > 1 else (self.width,)
        return (*(e for _, e in self.batch), -(-self.col[1] // self.columns), *steps, *lanes)

    @property
    def lanes(self) -> tuple[Index, ...]:
        """Subscripts of a column in its panel."""
        col = Index.of(self.col[0])
        return (col // self.width % self.vectors, col % self.width) if self.vectors > 1 else (col % self.width,)


@dataclass(frozen=True)
class TurnedWindow:
    """The group of a window over planes in a blocked layout: it copies its image and its sums, under the same names.

    ``pixels``: iterators of image rows and columns. They follow the iterators that all statements share, the last of
    which counts planes.
    """

    group: Group
    pixels: tuple[str, str]


@dataclass(frozen=True)
class LoweredGroup:
    """A canonical group and the meaning of its names.

    ``buffers`` maps an array to a buffer of the program (for a packed constant, the name of its ``Pack``). ``params``
    maps a parameter to an Index over the model's symbols. ``key``: content hash of the group and of everything else
    that shapes its kernel. ``blocked``: the blocked form of a window, whose vectors run over planes.
    """

    group: Group
    buffers: dict[str, str]
    params: dict[str, Index]
    packs: dict[str, Pack] = field(default_factory=dict)
    blocked: TurnedWindow | None = None

    def key(self, *more: object) -> str:
        """Return a content hash, equal for groups that may share a kernel."""
        text = repr((self.group, more))
        return hashlib.sha256(text.encode()).hexdigest()[:24]


class Canonical:
    """Assigns canonical names and records their meaning. No name depends on the names of dims in the model."""

    def __init__(self, graph: Graph) -> None:
        """``graph`` provides the program's buffers (a fetched index may have any integer dtype) and the order of
        sizes.
        """
        self.dtypes = {name: t.dtype for name, t in graph.tensors.items()}
        self._rank = {s.symbol: k for k, s in enumerate(graph.sources)}
        self.params: dict[str, Index] = {}
        self._by_value: dict[Index, str] = {}
        self.buffers: dict[str, str] = {}
        self.arrays: dict[str, Array] = {}
        self._by_buffer: dict[str, str] = {}

    def extent(self, e: Index) -> Index:
        """Return a constant, or the parameter that stands for the extent."""
        return e if e.constant is not None else Index.of(self._param(e))

    def _param(self, e: Index) -> str:
        if e not in self._by_value:
            name = f"n{len(self.params)}"
            self._by_value[e], self.params[name] = name, e
        return self._by_value[e]

    def factor(self, i: Index) -> Index:
        """Factor out the greatest common divisor of an expression as a parameter. A stride of 1 does not change."""
        divisor = math.gcd(*i.terms.values())
        if i == ONE:
            return i
        whole = Index({m: c // divisor for m, c in i.terms.items()}) if divisor else ONE
        return whole * self._param(Index.of(divisor))

    def index(self, i: Index, iterators: frozenset[str]) -> Index:
        """Replace model symbols by parameters, and rename fetched buffers."""
        ordered = sorted(i.symbols() - iterators, key=lambda s: (self._rank.get(s, len(self._rank)), s))
        env = {s: self._param(Index.of(s)) for s in ordered}
        return i.subs(env).rebuild(self._atom)

    def _atom(self, a: Atom) -> Index:
        return Index({(replace(a, name=self.buffer(a.name)) if a.kind == "fetch" else a,): 1})

    def buffer(self, name: str) -> str:
        """Return the array that stands for a buffer that is read at flat addresses."""
        if name not in self._by_buffer:
            array = f"a{len(self.buffers)}"
            self._by_buffer[name], self.buffers[array] = array, name
            self.arrays[array] = Array(array, self.dtypes[name], (ONE,), "input", (ONE,))
        return self._by_buffer[name]

    def output(self, name: str, dtype: str, shape: tuple[Index, ...], strides: tuple[Index, ...], offset: Index) -> str:
        """Add an array that is written at its own subscripts."""
        array = f"a{len(self.buffers)}"
        self.buffers[array] = name
        self.arrays[array] = Array(array, dtype, shape, "output", strides, offset)
        return array

    def packed(self, name: str, dtype: str, shape: tuple[Index, ...]) -> str:
        """Return the array that stands for a constant in panels."""
        if name not in self._by_buffer:
            array = f"a{len(self.buffers)}"
            self._by_buffer[name], self.buffers[array] = array, name
            self.arrays[array] = Array(array, dtype, shape, "constant", row_major(shape))
        return self._by_buffer[name]

    def local(self, dtype: str, shape: tuple[Index, ...]) -> str:
        """Add an array inside the kernel."""
        name = f"l{sum(a.role == 'local' for a in self.arrays.values())}"
        self.arrays[name] = Array(name, dtype, shape, "local", row_major(shape))
        return name

    def value(self, v: Value, iterators: frozenset[str], locals_: dict[str, tuple[str, tuple[Index, ...]]]) -> Value:
        """Return the expression in canonical names. ``locals_`` maps a tensor to (array, subscripts to prepend)."""

        def f(x: Value) -> Value:
            if not isinstance(x, Load):
                return x
            if x.buffer in locals_:
                name, front = locals_[x.buffer]
                return Load(x.dtype, name, (*front, *x.index))
            return Load(x.dtype, self.buffer(x.buffer), x.index)

        return transform(map_index(v, lambda i: self.index(i, iterators)), f)

    def group(self, statements: Iterable[Statement], packs: dict[str, Pack] | None = None) -> LoweredGroup:
        """Return the canonical group of statements in these names."""
        group = Group("group", tuple(self.params), dict(self.arrays), tuple(statements))
        return LoweredGroup(group, self.buffers, self.params, {} if packs is None else packs)
