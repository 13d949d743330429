"""What shared memory and registers hold when a bound GPU tree reads them.

A proof says for each statement which cells of which storage it writes and reads, over the coordinates of its instances,
and for each storage the *epoch* in which its contents are meant: coordinates that writer and reader must share (a tile
is of one block of the reduction, a fragment of one step of it). Every read must find something written, in its epoch.
"""

from __future__ import annotations

from collections.abc import Sequence

import islpy as isl

from polydyn.schedules.errors import LegalityError
from polydyn.schedules.index import Index, IndexLike
from polydyn.schedules.isl_util import Condition, frame, maps, pair, union_maps
from polydyn.schedules.proof.witness import flow_error
from polydyn.schedules.tree import TileStatement, Tree, to_isl

Cell = Sequence[IndexLike]
Names = tuple[str, ...]
Where = Sequence[Condition]


class Storage:
    """Reads and writes of a bound tree, to be checked together."""

    def __init__(self, tree: Tree, statements: Sequence[TileStatement], names: tuple[str, ...], ctx: isl.Set) -> None:
        self.names, self.ctx = names, ctx
        self.coords = {s.name: s.coords for s in statements}
        schedule = to_isl(tree, statements, names)
        self.domain = schedule.get_domain().intersect_params(ctx)
        self.order = schedule.get_map().intersect_domain(self.domain)
        self.epoch: dict[str, tuple[str, ...]] = {}
        self._writes: list[isl.Map] = []
        self._reads: list[isl.Map] = []

    def writes(self, s: str, array: str, cell: Cell, more: Names = (), inside: Where = ()) -> None:
        """``s`` writes the cell, for all values of the coordinates ``more`` that lie ``inside``."""
        self._writes.append(self._map(s, array, cell, more, inside))

    def reads(self, s: str, array: str, cell: Cell, more: Names = (), inside: Where = ()) -> None:
        """``s`` reads the cell, likewise."""
        self._reads.append(self._map(s, array, cell, more, inside))

    def updates(self, s: str, array: str, cell: Cell, more: Names = (), inside: Where = ()) -> None:
        """``s`` reads and writes the cell, likewise."""
        self.reads(s, array, cell, more, inside)
        self.writes(s, array, cell, more, inside)

    def check(self) -> None:
        """LegalityError names the statement, the storage and one instance."""
        reads, writes = (union_maps(x, self.names).intersect_domain(self.domain) for x in (self._reads, self._writes))
        found = isl.UnionAccessInfo.from_sink(reads).set_must_source(writes).set_schedule_map(self.order).compute_flow()
        for m in maps(found.get_must_no_source()):
            if not m.is_empty():
                s, array = pair(m)
                raise flow_error(f"{s} reads {array} where nothing was written", m, s, array, self.ctx)
        for m in maps(found.get_full_must_dependence()):
            self._same_epoch(m)

    def check_before(self, first: str, then: str, key: tuple[str, ...]) -> None:
        """All instances of ``first`` come before those of ``then`` with the same coordinates ``key``."""
        same = self._key(first, key).apply_range(self._key(then, key).reverse())
        times = {pair(m)[0]: m for m in maps(self.order)}
        if first not in times or then not in times:
            raise LegalityError(f"{first} or {then} never runs", node=then, rule="tile-space data flow")
        late = times[first].lex_ge_map(times[then]).intersect(same)
        if not late.is_empty():
            raise flow_error(f"{first} runs after {then}", late, f"{first} -> {then}", first, self.ctx)

    def _key(self, s: str, key: tuple[str, ...]) -> isl.Map:
        return frame(s, self.coords[s], self.names).map_to("", [Index.of(x) for x in key])

    def _same_epoch(self, m: isl.Map) -> None:
        array, (s, t) = pair(m.range().unwrap())[1], (pair(m)[0], pair(m.range().unwrap())[0])
        edge, key = m.range_factor_domain(), self.epoch[array]
        bad = edge.subtract(self._key(s, key).apply_range(self._key(t, key).reverse()))
        if not bad.is_empty():
            what = f"{t} reads {array} of another tile or step, which {s} wrote"
            raise flow_error(what, bad, f"{s} -> {t}", array, self.ctx)

    def _map(self, s: str, array: str, cell: Cell, more: Names, inside: Where) -> isl.Map:
        wide = frame(s, (*self.coords[s], *more), self.names)
        m = wide.map_to(array, [Index.of(i) for i in cell]).intersect_domain(wide.where(inside))
        return m.apply_domain(wide.map_to(s, [Index.of(c) for c in self.coords[s]]))
