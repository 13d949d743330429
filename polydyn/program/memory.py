"""The memory plan: intermediates share slots of the arena where their lives do not overlap.

Time is counted in waves: launches that run side by side are simultaneous. The order of waves is static, so live ranges
are known at compile time although sizes are not: tensors are coloured into slots, a slot is as large as its largest
tenant, and where slots begin is a prefix sum that the host program evaluates for every new shape.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from polydyn.schedules.index import Index

SAMPLES = (61, 384)
"""Every symbol's value when sizes are compared while colouring; any plan is right, a good one is small."""


@dataclass(frozen=True)
class Life:
    """An intermediate: bytes over the symbols, first and last wave that mentions it (inclusive)."""

    name: str
    bytes: Index
    first: int
    last: int

    def overlaps(self, other: Life) -> bool:
        """True when both are alive during one wave: an output never shares with an input of its wave."""
        return self.first <= other.last and other.first <= self.last


@dataclass(frozen=True)
class Slot:
    """One region of the arena and its tenants."""

    tenants: tuple[str, ...]
    sizes: tuple[Index, ...]


def live_ranges(sizes: Mapping[str, Index], waves: Iterable[Iterable[str]]) -> tuple[Life, ...]:
    """The life of every tensor in ``sizes``, given the tensors that each wave touches, in order.

    A tensor that no wave touches has no life and gets no memory.
    """
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for i, touched in enumerate(waves):
        for name in touched:
            if name in sizes:
                first.setdefault(name, i)
                last[name] = i
    return tuple(Life(n, sizes[n], first[n], last[n]) for n in sizes if n in first)


def _estimate(size: Index) -> int:
    return sum(size.evaluate(dict.fromkeys(size.symbols(), s)) for s in SAMPLES)


def plan_slots(lives: Iterable[Life]) -> tuple[Slot, ...]:
    """Colours lives into slots, largest first; each goes where the slot has to grow least.

    Guarantees (``verify_memory.verify_slots``): every life is in exactly one slot and no two tenants of a slot overlap.
    """
    ordered = sorted(lives, key=lambda life: (-_estimate(life.bytes), life.first, life.name))
    slots: list[list[Life]] = []
    for life in ordered:
        free = [s for s in slots if not any(life.overlaps(t) for t in s)]
        same = [s for s in free if any(t.bytes == life.bytes for t in s)]
        if free:
            min(same or free, key=lambda s: _estimate(s[0].bytes)).append(life)
        else:
            slots.append([life])
    return tuple(Slot(tuple(t.name for t in s), tuple(dict.fromkeys(t.bytes for t in s))) for s in slots)


def arena_estimate(slots: Iterable[Slot]) -> int:
    """Bytes of all slots, summed over the sample sizes: what two plans are compared by."""
    return sum(max(s.evaluate(dict.fromkeys(s.symbols(), n)) for s in slot.sizes) for slot in slots for n in SAMPLES)
