"""The description of a group for tuning: a backbone of loops, its operands, and tile configurations.

Sizes are counted in loop iterations and bytes. The extent of a dynamic loop is the symbol with the loop's name. Code
with access to the model's symbols substitutes them (``estimate.subs({"i": batch * length})``).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256

from polydyn.schedules.index import Index

Shape = Mapping[str, int]
"""Maps a loop name to its extent at run time."""


@dataclass(frozen=True)
class Loop:
    """A loop of the backbone. ``extent``: None if known only in a call. ``kind``: ``parallel`` or ``reduction``."""

    name: str
    extent: int | None
    kind: str = "parallel"


@dataclass(frozen=True)
class Operand:
    """A tensor that the backbone accesses.

    ``dims``: for each dimension the (loop, coefficient) pairs of its affine subscript. For example, the convolution
    window ``2*h + r`` is ``(("h", 2), ("r", 1))``. ``bytes``: size of an element. ``written``: False for inputs.
    """

    name: str
    dims: tuple[tuple[tuple[str, int], ...], ...]
    bytes: int = 4
    written: bool = False

    def elements(self, sizes: Shape) -> int:
        """Return the elements accessed by a tile of the given sizes (a loop that is not named counts as 1)."""
        return math.prod(
            1 + sum(abs(c) * (sizes.get(name, 1) - 1) for name, c in dim) if _some(dim, sizes) else 0
            for dim in self.dims
        )

    def footprint(self, sizes: Shape) -> int:
        """Return the bytes accessed by a tile of the given sizes."""
        return self.bytes * self.elements(sizes)


def _some(dim: Iterable[tuple[str, int]], sizes: Shape) -> bool:
    return all(sizes.get(name, 1) > 0 for name, _ in dim)


@dataclass(frozen=True)
class Backbone:
    """The loop nest that determines a group's speed. ``ops``: arithmetic operations per innermost iteration."""

    loops: tuple[Loop, ...]
    operands: tuple[Operand, ...]
    dtype: str = "float32"
    ops: int = 2

    @property
    def parallel(self) -> tuple[Loop, ...]:
        """The parallel loops, outermost first."""
        return tuple(x for x in self.loops if x.kind == "parallel")

    @property
    def reduction(self) -> tuple[Loop, ...]:
        """The reduction loops, outermost first."""
        return tuple(x for x in self.loops if x.kind == "reduction")

    @property
    def inputs(self) -> tuple[Operand, ...]:
        """The operands that are read."""
        return tuple(o for o in self.operands if not o.written)

    @property
    def outputs(self) -> tuple[Operand, ...]:
        """The operands that are written."""
        return tuple(o for o in self.operands if o.written)

    def extent(self, name: str) -> Index:
        """Return the extent of a loop: its constant, or the symbol of its name. KeyError: no such loop."""
        for x in self.loops:
            if x.name == name:
                return Index.of(x.name if x.extent is None else x.extent)
        raise KeyError(name)

    def sizes(self, shape: Shape) -> dict[str, int]:
        """Return the extents at run time, including static ones. KeyError: ``shape`` lacks a dynamic loop."""
        return {x.name: shape[x.name] if x.extent is None else x.extent for x in self.loops}

    def flops(self, sizes: Shape) -> int:
        """Return the operations for the given extents or tile sizes."""
        return self.ops * math.prod(sizes.get(x.name, 1) for x in self.loops)

    def bytes_moved(self, sizes: Shape) -> tuple[int, int]:
        """Return the bytes read and the bytes written by a tile, if each operand is accessed once."""
        return sum(o.footprint(sizes) for o in self.inputs), sum(o.footprint(sizes) for o in self.outputs)


ROW = "row: "
"""Prefix of the name of a parameter that names a row of a table of kernels."""


@dataclass(frozen=True, order=True)
class Tile:
    """A tile configuration: (name, value) pairs bound at compile time, and pairs bound at each launch.

    Names are ``level.loop`` (levels: ``b`` block or cache tile, ``w`` warp or register tile, ``v`` instruction), or a
    plain parameter such as ``stages``. Two tiles with equal ``compile`` share one binary. A tile of another row than
    the one whose tiles are searched begins with the pair (``ROW`` and the name of the row, 1).
    """

    compile: tuple[tuple[str, int], ...]
    launch: tuple[tuple[str, int], ...] = ()

    def __getitem__(self, name: str) -> int:
        for n, v in self.compile + self.launch:
            if n == name:
                return v
        raise KeyError(name)

    def get(self, name: str, default: int = 1) -> int:
        """Return the value of a parameter, or ``default`` if the tile does not have it."""
        return self[name] if any(n == name for n, _ in self.compile + self.launch) else default

    def level(self, level: str) -> dict[str, int]:
        """Return the sizes of one level, by loop."""
        return {n[len(level) + 1 :]: v for n, v in self.compile + self.launch if n.startswith(level + ".")}

    @staticmethod
    def of_row(row: str, built: Iterable[tuple[str, int]] = (), launch: Iterable[tuple[str, int]] = ()) -> Tile:
        """Return a tile of another row of the table, with sizes of the row; without sizes it has the row's defaults."""
        return Tile(((ROW + row, 1), *built), tuple(launch))

    @property
    def row(self) -> str:
        """The row of the table of kernels; empty for the row whose tiles are searched."""
        name = self.compile[0][0] if self.compile else ""
        return name[len(ROW) :] if name.startswith(ROW) else ""

    @property
    def sizes(self) -> tuple[tuple[str, int], ...]:
        """All pairs except the one that names a row."""
        return (*self.compile[bool(self.row) :], *self.launch)

    def __str__(self) -> str:
        return " ".join([*([self.row] if self.row else ()), *(f"{n}={v}" for n, v in self.sizes)])


@dataclass(frozen=True)
class GroupKey:
    """The facts that decide whether a measurement of one group is valid for another; weights are never included.

    ``structure``: canonical text of the fused statements. ``layout``, ``constraints`` (divisibility and ranges that the
    code relies on), ``flags``: ordered texts. ``generator``: version of the code generator.
    """

    structure: str
    dtype: str
    target: str
    layout: tuple[str, ...] = ()
    constraints: tuple[str, ...] = ()
    compiler: str = ""
    flags: tuple[str, ...] = ()
    generator: str = ""

    @property
    def digest(self) -> str:
        """Content hash of the key."""
        return digest_of(asdict(self))


def no_rule(tile: Tile) -> str | None:
    """Return None: every tile is allowed."""
    return None


@dataclass(frozen=True)
class Problem:
    """One tuning task.

    ``shapes`` are instances that represent the calls, each with a weight (probability times cost, in any unit).
    ``select.sample_free_shapes`` creates them if the user gives none. ``rule``: returns the name of a rule of
    the code generator that a tile breaks, in addition to the rules of every space. ``first``: tiles that are tried
    before any others. ``rows``: tiles of other rows of the group's table of kernels, for strategies with finals.
    """

    key: GroupKey
    backbone: Backbone
    shapes: tuple[tuple[tuple[str, int], ...], ...] = ()
    weights: tuple[float, ...] = ()
    rule: Callable[[Tile], str | None] = no_rule
    first: tuple[Tile, ...] = ()
    rows: tuple[Tile, ...] = ()

    def instances(self) -> list[dict[str, int]]:
        """Return the shapes as dicts, with static extents added."""
        return [self.backbone.sizes(dict(s)) for s in self.shapes]


def canonical(value: object) -> str:
    """Return the canonical JSON text of plain data: sorted keys, no spaces. ValueError: NaN or infinity."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest_of(value: object) -> str:
    """Return the content hash of plain data (32 hex digits)."""
    return sha256(canonical(value).encode()).hexdigest()[:32]
