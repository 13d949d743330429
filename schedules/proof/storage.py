"""The storage part of the proof, in digit space: the contents of buffers when they are read.

The cell of a buffer is its free digits, the epoch its fixed ones (``tree.scheduled.Buffer``). Both are those of the
tile map.
"""

from __future__ import annotations

import islpy as isl

from polydyn.schedules.errors import LegalityError
from polydyn.schedules.group.witness import flow_error
from polydyn.schedules.index import Index
from polydyn.schedules.isl_util import between, frame, maps, pair, union_maps
from polydyn.schedules.tree.names import Meets, Role
from polydyn.schedules.tree.scheduled import Buffer, Carried
from polydyn.schedules.tree.space import UNIT, Space
from polydyn.schedules.tree.tilemap import Digit

V = Index.of


class Storage:
    """The buffers of a scheduled group in its order of execution."""

    def __init__(self, space: Space, schedule: isl.Schedule) -> None:
        self.space, self.flow = space, space.x.flow
        self.buffers = {x.name: x for x in space.x.buffers}
        self.domain = schedule.get_domain().intersect_params(space.context)
        self.order = schedule.get_map().intersect_domain(self.domain)
        self.times = {pair(m)[0]: m for m in maps(self.order)}
        self._met: dict[tuple[str, str], isl.Map] = {}
        self._at: dict[tuple[str, tuple[str, ...]], isl.Map | None] = {}
        self.carried = {n: x for x in space.x.carried for n in (x.register, x.memory)}

    def check(self) -> None:
        """Run all checks. LegalityError names the statements, the buffer and an instance."""
        self._sources()
        for u in self.flow:
            if u.meets is Meets.UPDATES:
                self._around(u.statement, u.buffer)
        self._units()

    # -- cells and epochs ------------------------------------------------------------------------------------------

    def _digit(self, n: str, d: Digit) -> Index:
        if d.name not in self.space.coords[n] and d not in self.space.views[n].hidden:
            raise LegalityError(f"{n} accesses a buffer at digit {d.name}, which it lacks", node=n, rule="storage")
        return V(d.name)

    def _cells(self, n: str, x: Buffer) -> isl.Map:
        """Return instance -> the cells that it accesses."""
        if (n, x.name) not in self._met:
            self._met[n, x.name] = self._build_cells(n, x)
        return self._met[n, x.name]

    def _build_cells(self, n: str, x: Buffer) -> isl.Map:
        view = self.space.views[n]
        free = [d for ax in x.axes for d in self.space.axes[ax] if d not in x.fixed]
        scope = [V(d.name) for k in x.scope if (y := view.loop(k)) for d in y.digits]
        hidden = [d for d in free if d in view.hidden]
        coords = self.space.coords[n]
        wide = frame(n, (*coords, *(d.name for d in hidden)), self.space.params)
        inside = wide.where([c for d in hidden for c in between(0, d.name, d.size)])
        met = wide.map_to(x.place, scope + [self._digit(n, d) for d in free]).intersect_domain(inside)
        return met.apply_domain(wide.map_to(n, [V(k) for k in coords]))

    def _epoch(self, n: str, meets: Meets, x: Buffer) -> isl.Map:
        """Return instance -> the contents that it refers to: fixed digits, and for carried sums the progress."""
        out = [self._digit(n, d) for d in sorted(x.fixed, key=lambda d: d.name)]
        carried = self.carried.get(x.name)
        if carried is not None:
            out.append(self._progress(n, meets, x, carried))
        return frame(n, self.space.coords[n], self.space.params).map_to("", out)

    def _progress(self, n: str, meets: Meets, x: Buffer, carried: Carried) -> Index:
        loop = self.space.views[n].loop(carried.loop)
        assert loop is not None
        (step,) = loop.digits
        if x.name == carried.register:
            return V(step.name)
        role = self.space.views[n].role  # LOAD of a step reads what SAVE of the step before stored
        return V(step.name) + (role is Role.SAVE) if role in (Role.LOAD, Role.SAVE) else V(-1)

    # -- checks ----------------------------------------------------------------------------------------------------

    def _sources(self) -> None:
        """Check that every read gets the last write of its own cell and epoch."""
        met = {(f.statement, f.buffer): self._cells(f.statement, self.buffers[f.buffer]) for f in self.flow}

        def all_that(*kinds: Meets) -> isl.UnionMap:
            parts = [met[f.statement, f.buffer] for f in self.flow if f.meets in kinds]
            return union_maps(parts, self.space.params).intersect_domain(self.domain)

        info = isl.UnionAccessInfo.from_sink(all_that(Meets.READS, Meets.UPDATES))
        info = info.set_must_source(all_that(Meets.WRITES, Meets.UPDATES)).set_schedule_map(self.order)
        found = info.compute_flow()
        for m in maps(found.get_must_no_source()):
            if not m.is_empty():
                n, array = pair(m)
                raise flow_error(f"{n} reads {array} where nothing was written", m, n, array, self.space.context)
        for m in maps(found.get_full_must_dependence()):
            n, (r, array) = pair(m)[0], pair(m.range().unwrap())
            bad = m.range_factor_domain()
            for x in self._meant(n, r, array):
                same = self._epoch(n, Meets.WRITES, x).apply_range(self._epoch(r, Meets.READS, x).reverse())
                bad = bad.subtract(same)
            if not bad.is_empty():
                what = f"{r} reads {array} of another epoch, which {n} wrote"
                raise flow_error(what, bad, f"{n} -> {r}", array, self.space.context)

    def _meant(self, writer: str, reader: str, storage: str) -> list[Buffer]:
        """Return the buffers of a storage that one statement writes and the other reads."""
        wrote = {f.buffer for f in self.flow if f.statement == writer and f.meets is not Meets.READS}
        reads = {f.buffer for f in self.flow if f.statement == reader and f.meets is not Meets.WRITES}
        return [x for x in self.buffers.values() if x.place == storage and x.name in wrote & reads]

    def _around(self, update: str, name: str) -> None:
        """Check that writers precede all updates of the same cell and epoch, and readers follow all of them.

        The dependences of the group's own statements already imply this for them.
        """
        x, own = self.buffers[name], {s.name for s in self.space.group.statements}
        for f in self.flow:
            if f.buffer != name or f.meets is Meets.UPDATES or {f.statement, update} <= own:
                continue
            a, b = (f.statement, update) if f.meets is Meets.WRITES else (update, f.statement)
            if a not in self.times or b not in self.times:
                continue
            same = self._epoch(a, Meets.WRITES, x).apply_range(self._epoch(b, Meets.READS, x).reverse())
            cells = self._cells(a, x).apply_range(self._cells(b, x).reverse())
            bad = self.times[a].lex_ge_map(self.times[b]).intersect(same).intersect(cells)
            if not bad.is_empty():
                raise flow_error(f"{b} runs before {a} of the same sum", bad, f"{a} -> {b}", name, self.space.context)

    def _units(self) -> None:
        """Check that no unit accesses a cell that another unit of the block writes, because units run in parallel.

        Copies of a whole block have no unit; a barrier separates them from their readers.
        """
        tasks = tuple(dict.fromkeys(level for level, _ in self.space.x.parallel if level != UNIT))
        for f in self.flow:
            mine = self._places(f.statement, UNIT)
            if f.meets is Meets.READS or mine is None:
                continue
            for g in self.flow:
                other = self._places(g.statement, UNIT)
                if self.buffers[g.buffer].place == self.buffers[f.buffer].place and other is not None:
                    self._apart(
                        (f.statement, f.buffer), (g.statement, g.buffer), mine.apply_range(other.reverse()), tasks
                    )

    def _apart(self, f: tuple[str, str], g: tuple[str, str], one_unit: isl.Map, tasks: tuple[str, ...]) -> None:
        (n, name), (m, _) = f, g
        block = [self._places(k, *tasks) for k in (n, m)]
        assert block[0] is not None and block[1] is not None
        meet = self._cells(n, self.buffers[name]).apply_range(self._cells(m, self.buffers[g[1]]).reverse())
        bad = meet.intersect(block[0].apply_range(block[1].reverse())).subtract(one_unit)
        inside = [self.domain.extract_set(frame(k, self.space.coords[k], self.space.params).space) for k in (n, m)]
        bad = bad.intersect_params(self.space.context).intersect_domain(inside[0]).intersect_range(inside[1])
        if not bad.is_empty():
            raise flow_error(f"two units share a cell of {name}", bad, f"{n} -> {m}", name, self.space.context)

    def _places(self, n: str, *levels: str) -> isl.Map | None:
        """Return instance -> its unit or task, or None if it has none."""
        if (n, levels) not in self._at:
            self._at[n, levels] = self._build_places(n, levels)
        return self._at[n, levels]

    def _build_places(self, n: str, levels: tuple[str, ...]) -> isl.Map | None:
        places = [self.space.place(n, level) for level in levels]
        values = [v for x in places for v in x or ()]
        whole = frame(n, self.space.coords[n], self.space.params)
        return None if None in places else whole.map_to("", values)
