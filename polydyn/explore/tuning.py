"""Search the numbers of all schedules of a file, each on the first group of a model that it fits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from polydyn.backends.options import Options
from polydyn.errors import InputError
from polydyn.explore.handmade import Schedule, rebuilt
from polydyn.explore.schedules import groups
from polydyn.explore.search import Found, search
from polydyn.graph.importer import ModelLike
from polydyn.lowering.handmade import OTHER_KERNELS
from polydyn.schedules.handmade.document import Source, read_schedules
from polydyn.shapes.sizes import Dims, Sizes, sizes_by_name

UNTOLD = (8, 61, 256)
"""Sizes of a dim about which nothing is known."""
MOST_INSTANCES = 1 << 30
"""Maximum instances of the main statement of a launch at sizes that nobody named."""


def tune_schedules(
    model: ModelLike, schedules: Source | Iterable[Source], dims: Dims | None = None, trials: int = 32, seed: int = 0,
    seen: Sequence[tuple[Mapping[str, int], int]] = (), options: Options | None = None, target: str = "cpu",
) -> list[Found[Schedule]]:  # fmt: skip
    """Search other numbers for schedules of a model's groups, each on the first group that it fits.

    ``seen``: shapes of the model with their counts (``Program.shapes_seen``). Without them the likely sizes in ``dims``
    are used, and without those, ``UNTOLD``. InputError: a schedule fits no group.
    """
    known: dict[str, Schedule] = {}
    for group in groups(model, dims, options, target):
        if group.fused.kind not in OTHER_KERNELS:
            s = group.schedule()
            known.setdefault(s.written.group, s)
    out = []
    for x in read_schedules(schedules):
        if x.group not in known:
            remedy = "it was written for another model, dims or options: polydyn.explore.groups(model) lists the groups"
            raise InputError(f"the schedule of {x.label} fits no group of this model", rule="schedules", remedy=remedy)
        s = rebuilt(known[x.group].group, x)
        sizes, weights = _sizes_of(s, sizes_by_name(dims), seen)
        out.append(search(s, sizes, trials, seed, weights))
    return out


def _sizes_of(
    s: Schedule, dims: Mapping[str, Sizes], seen: Sequence[tuple[Mapping[str, int], int]]
) -> tuple[list[dict[str, int]], list[float]]:
    """Return sizes of the dims of a schedule's group, and their weights. Larger launches than ``MOST_INSTANCES`` are
    left out, unless all are larger."""
    names, counts = s.dims, dict[tuple[int, ...], float]()
    for shape, count in seen:
        if set(names) <= shape.keys():
            key = tuple(shape[n] for n in names)
            counts[key] = counts.get(key, 0) + count
    if not counts:
        lists = [_likely(dims.get(n)) for n in names]
        most = max(map(len, lists), default=1)
        every = [tuple(x[k % len(x)] for x in lists) for k in range(most)]
        small = [key for key in every if s.instances(**dict(zip(names, key, strict=True))) <= MOST_INSTANCES]
        counts = dict.fromkeys(small or every[:1], 1)
    return [dict(zip(names, key, strict=True)) for key in counts], list(counts.values())


def _likely(sizes: Sizes | None) -> Sequence[int]:
    """Return the sizes of one dim at which kernels are timed."""
    if sizes is None:
        return UNTOLD
    allowed = [n for n in UNTOLD if sizes.holds(n)]
    return sizes.likely or allowed or [sizes.bounds[0]]
