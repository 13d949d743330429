"""The memory plan: intermediates with disjoint live ranges share slots of the arena.

Time is counted in waves: the launches of a wave are simultaneous. The order of waves is static, so live ranges are
known at compile time although sizes are not. Tensors are coloured into slots, and a slot is as large as its largest
tenant. The offsets of slots are a prefix sum that the host program evaluates for every new shape.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from polydyn.schedules.index import Index

SAMPLES = (61, 384)
"""Values of all symbols at which sizes are compared while colouring. They affect only the quality of the plan."""


@dataclass(frozen=True)
class LiveRange:
    """The live range of an intermediate: bytes over the symbols, first and last wave that uses it (inclusive)."""

    name: str
    bytes: Index
    first: int
    last: int

    def overlaps(self, other: LiveRange) -> bool:
        """Whether both are alive in some wave. An output never shares memory with an input of its wave."""
        return self.first <= other.last and other.first <= self.last


@dataclass(frozen=True)
class Slot:
    """One region of the arena and its tenants."""

    tenants: tuple[str, ...]
    sizes: tuple[Index, ...]


def live_ranges(sizes: Mapping[str, Index], waves: Iterable[Iterable[str]]) -> tuple[LiveRange, ...]:
    """Return the live range of every tensor in ``sizes``, given the tensors that each wave uses, in order.

    A tensor that no wave uses has no live range and gets no memory.
    """
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for i, touched in enumerate(waves):
        for name in touched:
            if name in sizes:
                first.setdefault(name, i)
                last[name] = i
    return tuple(LiveRange(n, sizes[n], first[n], last[n]) for n in sizes if n in first)


def _estimate(size: Index) -> int:
    return sum(size.evaluate(dict.fromkeys(size.symbols(), s)) for s in SAMPLES)


def plan_slots(lives: Iterable[LiveRange]) -> tuple[Slot, ...]:
    """Colour live ranges into slots, largest first. Each goes to the slot that has to grow least.

    Guarantees (``verify_memory.verify_slots``): every live range is in one slot, and tenants of a slot do not overlap.
    """
    ordered = sorted(lives, key=lambda life: (-_estimate(life.bytes), life.first, life.name))
    slots: list[list[LiveRange]] = []
    for life in ordered:
        free = [s for s in slots if not any(life.overlaps(t) for t in s)]
        same = [s for s in free if any(t.bytes == life.bytes for t in s)]
        if free:
            min(same or free, key=lambda s: _estimate(s[0].bytes)).append(life)
        else:
            slots.append([life])
    return tuple(Slot(tuple(t.name for t in s), tuple(dict.fromkeys(t.bytes for t in s))) for s in slots)


def arena_estimate(slots: Iterable[Slot]) -> int:
    """Return the bytes of all slots, summed over the sample sizes, to compare plans."""
    return sum(max(s.evaluate(dict.fromkeys(s.symbols(), n)) for s in slot.sizes) for slot in slots for n in SAMPLES)
