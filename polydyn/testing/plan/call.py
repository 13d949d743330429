"""Simulate one call of a host plan: all launches in the order of the plan, then the outputs of the caller."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from polydyn.codegen.kernel import WORKSPACE, Kernel
from polydyn.codegen.split import combining_group, partial_group
from polydyn.lowering.place import PlacedGroup
from polydyn.program.plan import Candidate, Launch
from polydyn.schedules.expr import Array
from polydyn.schedules.model import SHARE, SHARES, Group
from polydyn.testing.plan.arithmetic import choice, holds, size_of
from polydyn.testing.plan.bodies import Body
from polydyn.testing.plan.faults import Fault, Faults
from polydyn.testing.plan.loops import Loops
from polydyn.testing.plan.memory import CALLER, Memory, Touched
from polydyn.testing.plan.orders import conflicts, replays, required
from polydyn.testing.plan.planned import Planned
from polydyn.testing.plan.tables import check_tables
from polydyn.testing.plan.tensors import Tensors, difference


class Call:
    """A call at ``sizes``: values of the model's symbols and of ``nth``.

    ``in_place``: an appended input and its output share one cache. ``loops``: also trace the addresses of the loop IR
    of every kernel (slow). ``traced`` counts the kernels whose loops were compared, and the reasons for the others.
    """

    def __init__(
        self, planned: Planned, sizes: Mapping[str, int], feeds: Mapping[str, Array], *, in_place: bool = False,
        loops: bool = False, seed: int = 0,
    ) -> None:  # fmt: skip
        self.planned, self.plan, self.loops, self.seed = planned, planned.plan, loops, seed
        self.sizes, self.faults = dict(sizes), Faults()
        self.traced: Counter[str] = Counter()
        pairs = [x.skip_if_same for x in self.plan.launches if x.skip_if_same] if in_place else []
        once = dict(reversed(pairs))
        self.shared = {o: i for i, o in once.items()}
        self.memory = Memory(self.plan, planned.slots, self.sizes, self.shared, self.faults)
        self.asked = Tensors((planned.source,), self.sizes, feeds)
        self.tensors = Tensors(planned.later, self.sizes, feeds, planned.inside)
        for name in self.plan.inputs:
            array = feeds[name].reshape(-1)
            self.memory.write(name, self.memory.elements(name), array, self.plan.buffers[name].dtype)

    def run(self) -> list[Fault]:
        """Run the call and return all its faults."""
        check_tables(self.planned, self.faults)
        if sum(self.plan.waves) not in (0, len(self.plan.launches)):
            self.faults.add("tables", "", f"waves of {sum(self.plan.waves)} launches of {len(self.plan.launches)}")
        traces: list[tuple[Array, Array]] = []
        for k, x in enumerate(self.plan.launches):
            self.memory.now, self.memory.touched, self.faults.launch = CALLER, Touched(), "index check"
            self._look(k)
            self.memory.now, self.faults.launch = k, x.label
            self._launch(x)
            traces.append(self.memory.touched.settled())
        self.memory.now, self.faults.launch = CALLER, "end"
        self._look(len(self.plan.launches))
        for name in self.plan.outputs:
            got = self.memory.read(name, self.memory.elements(name), self.plan.buffers[name].dtype)
            if error := difference(got, self.asked[name], self.planned.rounding):
                self.faults.add("output", name, error)
        before = required(self.plan, self.memory)
        conflicts(self.plan, before, traces, self.memory, self.faults)
        replays(self.plan, before, traces, self.memory, self.seed, self.faults)
        return list(self.faults)

    def _look(self, launch: int) -> None:
        """Read the buffers whose integers the host checks before a launch."""
        for c in self.plan.index_checks:
            if c.launch == launch:
                self.memory.read(c.buffer, self.memory.elements(c.buffer), self.plan.buffers[c.buffer].dtype)

    # -- a launch ----------------------------------------------------------------------------------------------------

    def _launch(self, x: Launch) -> None:
        """Run the candidate that the decision selects. A split-K reduction is two launches."""
        if size_of(x.elements, self.sizes) <= 0 or (x.skip_if_same and x.skip_if_same[1] in self.shared):
            return
        allowed = [k for k, c in enumerate(x.candidates) if self._allowed(c)]
        at = choice(x.decision, self.sizes, allowed)
        p, adds = self.planned.place_of(x)
        if at is None or not 0 <= at < len(x.candidates) or p is None:
            self.faults.add("choice", "", f"candidate {at} of {allowed} that may run, of {len(x.candidates)}")
            return
        self._run(p, x.candidates[at], adds)

    def _allowed(self, c: Candidate) -> bool:
        return all(holds(size_of(a, self.sizes), r, size_of(b, self.sizes)) for a, r, b in c.conditions)

    def _run(self, p: PlacedGroup, c: Candidate, adds: bool) -> None:
        kernel = next(k for k in self.plan.kernels if k.name == c.kernel)
        given = zip(c.names, c.symbols, strict=True)
        sizes = {n: size_of(e, self.sizes) for n, e in (*p.lowered.params.items(), *given)}
        part = WORKSPACE in kernel.buffers and not adds and not self.plan.on_device
        group = self.planned.groups.get(c.kernel, p.lowered.group)
        group = combining_group(group)[0] if adds else partial_group(group) if part else group
        buffers = self._buffers(c)
        for share in range(sizes[SHARES] if part else 1):  # slice 0 has the whole sum
            some = tuple(s for s in group.statements if not (share and s.reduce))
            body = Body(
                self.memory, replace(group, statements=some), self.planned.forms.get(p.key), buffers,
                sizes | {SHARE: share} if part else sizes,
            )  # fmt: skip
            body.run()
            if not part:
                body.compare(p.fused.outputs, self.tensors.__getitem__, self.planned.rounding)
        self._in_place(body.serial)
        if self.loops and not self.plan.on_device:
            self._trace(c, kernel, buffers, group)

    def _trace(self, c: Candidate, kernel: Kernel, buffers: Mapping[str, str], group: Group) -> None:
        """Compare the accesses of the kernel's loops with the accesses of its statements."""
        body = self.planned.loops.get(kernel.name)
        if body is None:
            self.traced["no loops"] += 1
            return
        named = {a: b for a, b in buffers.items() if b in self.memory.places}
        types = {
            a: group.arrays[a].dtype if a in group.arrays else self.plan.buffers[b].dtype for a, b in named.items()
        }
        loops = Loops(self.memory, c, kernel.symbols, named, types, kernel.lanes or self.planned.width)
        self.traced[loops.compare(body) or "traced"] += 1

    def _buffers(self, c: Candidate) -> dict[str, str]:
        """Map arrays to buffers. On a device this includes the kernels after the first one, and bound tensor maps."""
        found: dict[str, str] = {}
        for one in c.sequence:
            kernel = next(k for k in self.plan.kernels if k.name == one.kernel)
            found |= zip(kernel.buffers, one.buffers, strict=True)
            if one.block is not None:
                bound = zip(kernel.device.maps, one.block.maps, strict=True)
                found |= {m.buffer: b.buffer for m, b in bound}
        return found

    def _in_place(self, serial: bool) -> None:
        """Add a fault if a launch reads cells that it writes, unless its steps run one after another."""
        reads, writes = self.memory.touched.settled()
        if serial or not reads.size or not writes.size:
            return
        here = reads[_member(reads, writes)]
        if here.size:
            owner = self.memory.names[int(self.memory.owner[here[0]])]
            self.faults.add("in-place", owner, f"reads {here.size} cells that it writes")


def _member(some: Array, members: Array) -> Array:
    """Return a mask of the cells in ``some`` that are also in ``others``. Both are sorted."""
    at = members.searchsorted(some)
    return np.asarray(members[at.clip(max=len(members) - 1)] == some)
