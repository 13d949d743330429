"""Verify that intermediates may share memory as planned. Live ranges come from the kernels, not from the planner."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod

from polydyn.errors import PolydynError
from polydyn.program.accesses import launch_accesses
from polydyn.program.memory import Slot
from polydyn.program.plan import Buffer, HostPlan
from polydyn.schedules.expr import ITEMSIZE

SIZES = (0, 1, 7, 100)
"""Values of all symbols at which a slot must be as large as its tenants."""


def verify_slots(plan: HostPlan, slots: Iterable[Slot]) -> None:
    """Raise PolydynError unless every intermediate that a launch uses is in exactly one slot, the slot is large enough
    for it, and no two tenants of a slot are alive in one wave.

    An intermediate is alive from the first to the last wave that uses it: the text of a kernel takes it, or an index
    check reads it.
    """
    alive = _alive(plan)
    placed: set[str] = set()
    for slot in slots:
        for k, name in enumerate(slot.tenants):
            if name not in plan.buffers or name in placed or not _fits(plan.buffers[name], slot):
                raise PolydynError("the memory plan places it wrongly", tensor=name, rule=f"one slot each: {slot}")
            placed.add(name)
            for other in slot.tenants[:k]:
                lives = [alive[x] for x in (name, other) if x in alive]
                if len(lives) == 2 and min(end for _, end in lives) >= max(begin for begin, _ in lives):
                    raise PolydynError(f"it shares memory with '{other}', alive at the same time", tensor=name)
    if alive.keys() - placed:
        raise PolydynError("the memory plan has no slot for it", tensor=min(alive.keys() - placed))


def _alive(plan: HostPlan) -> Mapping[str, tuple[int, int]]:
    """Return the first and the last wave of every intermediate."""
    wave_of = [w for w, count in enumerate(plan.waves or (1,) * len(plan.launches)) for _ in range(count)]
    touched = [(wave_of[k], b) for k, a in enumerate(launch_accesses(plan)) for b in a.read | a.written]
    touched += [(wave_of[min(c.launch, len(wave_of) - 1)], c.buffer) for c in plan.index_checks if wave_of]
    waves: dict[str, list[int]] = {}
    for wave, name in touched:
        if plan.buffers[name].role == "intermediate":
            waves.setdefault(name, []).append(wave)
    return {name: (min(every), max(every)) for name, every in waves.items()}


def _fits(buffer: Buffer, slot: Slot) -> bool:
    """Return whether the slot is at least as large as the buffer at each of ``SIZES``."""
    names: Sequence[str] = sorted({s for i in (*buffer.shape, *slot.sizes) for s in i.symbols()})
    for n in SIZES:
        env = dict.fromkeys(names, n)
        size = prod(i.evaluate(env) for i in buffer.shape) * ITEMSIZE[buffer.dtype]
        if size > max((s.evaluate(env) for s in slot.sizes), default=0):
            return False
    return True
