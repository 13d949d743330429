"""Tasks at their places in a model: what the model's sizes mean for the loops of a group."""

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
"""A shape of a model (every symbol's size) and how often it was met, or is expected."""
T = TypeVar("T", bound=Task[Any])


@dataclass(frozen=True)
class PlacedTask(Generic[T]):
    """A task and its first place in a model: ``extents``: loop -> extent over the model's symbols."""

    label: str
    task: T
    extents: dict[str, Index]

    def expected(self, dims: Dims | None) -> list[Seen]:
        """Shapes by what the user knows of the sizes that the group depends on; none when that is nothing."""
        used = {s for x in self.task.backbone.loops if x.extent is None for s in self.extents[x.name].symbols()}
        known = {internal_name(n): s for n, s in sizes_by_name(dims).items()}
        if not used & set(known):
            return []
        return [(s, p) for s, p in expected_shapes({s: known.get(s, Sizes()) for s in sorted(used)})]

    def instances(self, seen: Iterable[Seen]) -> tuple[tuple[Instance, ...], tuple[float, ...]]:
        """What the model's shapes mean for the group's dynamic loops, with weights: count times operations.

        Shapes that leave the group nothing to compute, or never came, say nothing of kernels. InputError: a size is
        missing.
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
            at = tuple((n, self.extents[n].evaluate(dims)) for n in dynamic)
            counts[at] = counts.get(at, 0.0) + count
        work = {s: backbone.flops(backbone.sizes(dict(s))) for s in counts}
        found = tuple(s for s in sorted(counts) if work[s] and counts[s] > 0)
        return found, tuple(counts[s] * work[s] for s in found)
