"""Facts about sizes that follow from a program's guards. Every call is checked against the guards before any launch."""

from __future__ import annotations

from contextlib import suppress
from functools import lru_cache

from polydyn.errors import ShapeError
from polydyn.graph.ir import Guard
from polydyn.schedules.group.addresses import SizeFacts
from polydyn.schedules.index import Index
from polydyn.shapes.context import ShapeContext


@lru_cache(maxsize=64)
def facts_of(guards: tuple[Guard, ...]) -> ShapeContext:
    """Return the facts that follow from the guards. All programs with these guards share them, so do not change them.

    A guard that no call can satisfy adds no fact, because the code that it guards never runs.
    """
    facts = ShapeContext()
    learn = {"==": facts.unify, "<=": facts.at_most, "%==": facts.assume_multiple}
    for g in guards:
        with suppress(ShapeError):
            learn[g.relation](g.left, g.right, g.message)
    return facts


def same_size(guards: tuple[Guard, ...], a: Index, b: Index) -> bool:
    """Check whether two sizes are equal in every call: ``2 * (L // 2)`` is ``L`` if a guard requires L to be even."""
    return a == b or facts_of(guards).canonical(a - b) == 0


@lru_cache(maxsize=64)
def size_facts(guards: tuple[Guard, ...]) -> SizeFacts:
    """Return the same facts as ``facts_of`` in the form that proofs about addresses use."""
    facts = facts_of(guards)
    return SizeFacts(facts.nonnegative, facts.canonical, tuple((g.left, g.relation, g.right) for g in guards))
