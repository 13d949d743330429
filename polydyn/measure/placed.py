"""Tasks at their sites in a model: the loop sizes of a group that follow from the model's sizes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from polydyn.errors import InputError
from polydyn.schedules.index import Index
from polydyn.schedules.names import internal_name
from polydyn.search.select import Instance, expected_shapes
from polydyn.search.tasks.cpu import Task
from polydyn.shapes.sizes import Dims, Sizes, sizes_by_name

Seen = tuple[Mapping[str, int], float]
"""A shape of a model (every symbol's size), and how often it occurred or is expected."""
T = TypeVar("T", bound=Task[Any])


@dataclass(frozen=True)
class PlacedTask(Generic[T]):
    """A task and its first site in a model. ``extents`` maps a loop to its extent over the model's symbols."""

    label: str
    task: T
    extents: dict[str, Index]

    def expected(self, dims: Dims | None) -> list[Seen]:
        """Return the shapes that ``dims`` makes likely; empty if it describes no size that the group depends on."""
        used = {s for x in self.task.backbone.loops if x.extent is None for s in self.extents[x.name].symbols()}
        known = {internal_name(n): s for n, s in sizes_by_name(dims).items()}
        if not used & set(known):
            return []
        return [(s, p) for s, p in expected_shapes({s: known.get(s, Sizes()) for s in sorted(used)})]

    def instances(self, seen: Iterable[Seen]) -> tuple[tuple[Instance, ...], tuple[float, ...]]:
        """Return the sizes of the group's dynamic loops for the model's shapes, with weights: count times operations.

        Shapes with count 0, or without work for the group, are left out. InputError: a size is missing.
        """
        backbone = self.task.backbone
        dynamic = [x.name for x in self.task.backbone.loops if x.extent is None]
        counts: dict[Instance, float] = {}
        needed = {s for n in dynamic for s in self.extents[n].symbols()}
        for shape, count in seen:
            dims = {internal_name(n): size for n, size in shape.items()}
            if needed - set(dims):
                raise InputError(
                    f"the shape {dict(shape)} lacks a size of {min(needed - set(dims))}",
                    rule="a log of shapes gives every symbol of the model",
                    remedy="take Program.save_shapes of this very model",
                )
            instance = tuple((n, self.extents[n].evaluate(dims)) for n in dynamic)
            counts[instance] = counts.get(instance, 0.0) + count
        work = {s: backbone.flops(backbone.sizes(dict(s))) for s in counts}
        used = tuple(s for s in sorted(counts) if work[s] and counts[s] > 0)
        return used, tuple(counts[s] * work[s] for s in used)
