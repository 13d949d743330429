"""Selection of kernels from a table of throughputs.

``table[m, i]``: throughput of kernel m on instance i (any unit; 0 if it cannot run), measured or estimated.
``weights[i]``: importance of instance i (probability times operations). Ties are broken by position.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt

from polydyn.errors import ScheduleError
from polydyn.search.backbone import Backbone, Tile
from polydyn.shapes.sizes import Sizes

Table = npt.NDArray[np.float64]
Instance = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Selection:
    """Selected kernels (rows of the table) and the kernel assigned to each instance."""

    kernels: tuple[int, ...]
    assigned: tuple[int, ...]


def shares(table: Table) -> Table:
    """Return each entry relative to the best of its instance (1 if no kernel runs at all)."""
    best = table.max(0)
    return np.where(best > 0, table / np.where(best > 0, best, 1.0), 1.0)


def quality(table: Table, selection: Selection, weights: Sequence[float]) -> tuple[float, float]:
    """Return the weighted mean and the minimum of the relative throughput that the selection reaches."""
    reached = shares(table)[list(selection.assigned), range(table.shape[1])]
    return float(np.average(reached, weights=weights)), float(reached.min())


def assign(table: Table, kernels: Sequence[int]) -> Selection:
    """Assign every instance to its best selected kernel. ScheduleError: no selected kernel can run an instance."""
    rows = sorted(set(kernels))
    part = table[rows]
    served = part.max(0) > 0
    if not served.all():
        raise ScheduleError(
            f"none of the {len(rows)} selected kernels can run {int((~served).sum())} instances",
            rule="a selection is total",
            remedy="select a kernel without guards",
        )
    return Selection(tuple(rows), tuple(rows[int(i)] for i in part.argmax(0)))


def vote(table: Table, weights: Sequence[float], k: int = 1) -> Selection:
    """Select by weighted voting (DietCode 5.1-5.2).

    Each instance votes for its k best kernels. The kernel with the largest sum of weight times throughput over its
    voters (Eq. 1, throughput relative to the instance's best) becomes a category and takes them. This repeats until
    every instance has a category. Each instance is assigned to its best selected kernel.
    """
    share = shares(table)
    order = np.argsort(-share, axis=0, kind="stable")[:k]
    votes = np.zeros_like(share, bool)
    votes[order, np.arange(share.shape[1])] = True
    votes &= share > 0
    open_ = np.ones(share.shape[1], bool)
    kernels: list[int] = []
    while open_.any():
        sums = (share * votes * (np.asarray(weights) * open_)).sum(1)
        m = int(sums.argmax())
        if not (votes[m] & open_).any():  # the remaining weights are 0: take any kernel with votes
            m = int((votes & open_).sum(1).argmax())
        kernels.append(m)
        open_ &= ~votes[m]
    return assign(table, kernels)


def relative_size(perf: float, binaries: int) -> float:
    """Return the default g of DietCode Eq. 2: each binary must gain half a per cent of mean performance."""
    return perf - 0.005 * binaries


def joint(
    table: Table, weights: Sequence[float], objective: Callable[[float, int], float] = relative_size
) -> tuple[Selection, int]:
    """Return (selection, k) for the k (votes per instance) that maximises G = g(Perf(k), BinarySize(k)) (DietCode
    5.2)."""
    best: tuple[float, int, Selection] | None = None
    for k in range(1, table.shape[0] + 1):
        selection = vote(table, weights, k)
        g = objective(quality(table, selection, weights)[0], len(selection.kernels))
        if best is None or g > best[0]:
            best = (g, k, selection)
        if len(selection.kernels) == 1:  # a larger k would repeat one category with lower performance
            break
    if best is None:
        raise ScheduleError("there is no kernel to select from", rule="DietCode Eq. 2")
    return best[2], best[1]


def near_best(table: Table, share: float = 0.97) -> npt.NDArray[np.bool_]:
    """Return which kernels reach ``share`` of the best on which instance (BladeDISC 5.2.2: 97 %)."""
    return np.asarray((shares(table) >= share) & (table > 0))


def top_n(table: Table, n: int = 5, share: float = 0.97, weights: Sequence[float] | None = None) -> Selection:
    """Select the n kernels that are near best most often; each instance gets the best of them (BladeDISC 5.2.2)."""
    w = np.ones(table.shape[1]) if weights is None else np.asarray(weights)
    counts = (near_best(table, share) * w).sum(1)
    return assign(table, [int(m) for m in np.argsort(-counts, kind="stable")[:n]])


def cover(
    table: Table, weights: Sequence[float], tiles: Sequence[Tile], binaries: int = 8, tuples: int = 24
) -> Selection:
    """Select greedily the kernel that adds most to the mean plus half the minimum relative throughput (polydyn).

    ``binaries`` limits the number of compile-time parts, ``tuples`` the number of tiles. The selection ends when no
    kernel adds 0.1 per cent. Unlike frequency (top-n), it avoids two kernels that are good for the same instances.
    """
    share, w = shares(table), np.asarray(weights) / np.sum(weights)
    kernels: list[int] = []
    reached = np.zeros(table.shape[1])

    def value(r: Table) -> float:
        return float(r @ w) + 0.5 * float(r.min())

    while len(kernels) < tuples:
        built = {tiles[m].compile for m in kernels}
        allowed = [m for m in range(len(tiles)) if len(built | {tiles[m].compile}) <= binaries and m not in kernels]
        gains = [(value(np.maximum(reached, share[m])) - value(reached), -m) for m in allowed]
        if not gains or max(gains)[0] < 1e-3:
            break
        kernels.append(-max(gains)[1])
        reached = np.maximum(reached, share[kernels[-1]])
    return assign(table, kernels)


def winners(table: Table) -> Selection:
    """Select every kernel that is best on some instance: Vortex keeps all kernels that its model can choose."""
    return assign(table, [int(m) for m in table.argmax(0)])


def fastest(table: Table, n: int = 24) -> Selection:
    """Select the first n kernels (TSCompiler: the best of the replayed explorations; rows have that order)."""
    return assign(table, range(min(n, len(table))))


def top_ranked(table: Table, n: int = 24, depth: int = 10) -> Selection:
    """Select the n kernels that are most often among the ``depth`` best of an instance (FTuner 5-B)."""
    order = np.argsort(-table, axis=0, kind="stable")[:depth]
    counts = np.bincount(order.ravel(), minlength=len(table))
    return assign(table, [int(m) for m in np.argsort(-counts, kind="stable")[:n]])


# -- instances and their weights ---------------------------------------------------------------------------

_SAMPLE_SIZES = (1, 2, 3, 5, 8, 13, 16, 23, 31, 32, 47, 64, 97, 128, 197, 256, 389, 512, 787, 1024, 1531, 2048, 4096)
"""Sizes of a dynamic loop that are tried if nothing is known: spaced by ratio, with and without alignment."""


def sample_free_shapes(
    backbone: Backbone, max_count: int = 256, flops: float | None = None
) -> tuple[tuple[Instance, ...], tuple[float, ...]]:
    """Return instances with equal weights if the user describes none: sizes spaced by ratio, up to saturation.

    With several dynamic loops, the product is thinned evenly to at most ``max_count``. ``flops``: maximum operations.
    """
    names = [x.name for x in backbone.loops if x.extent is None]
    every = [tuple(zip(names, sizes, strict=True)) for sizes in product(_SAMPLE_SIZES, repeat=len(names))]
    if flops is not None:
        every = [s for s in every if backbone.flops(backbone.sizes(dict(s))) <= flops] or every[:1]
    step = max(1, math.ceil(len(every) / max_count))
    shapes = tuple(every[::step])
    return shapes, (1.0,) * len(shapes)


LIKELY_SHARE = 0.9
"""Total weight of the sizes that the user calls likely; all other allowed sizes share the rest."""


def sampled_sizes(sizes: Sizes) -> list[tuple[int, float]]:
    """Return sizes that represent all allowed sizes of a dim, with probabilities: likely ones, and ones spaced by
    ratio."""
    low, high = sizes.bounds
    m = sizes.multiple
    ends = [low] if high is None else [low, high]
    spaced = sorted({n for x in (*_SAMPLE_SIZES, *ends) for n in [-(-x // m) * m] if n > 0 and sizes.holds(n)} or {low})
    rest = 1 - LIKELY_SHARE if sizes.likely else 1.0
    weights = dict.fromkeys(spaced, rest / len(spaced))
    for k, n in enumerate(sizes.likely):
        share = sizes.probabilities[k] if sizes.probabilities else 1 / len(sizes.likely)
        weights[n] = weights.get(n, 0.0) + LIKELY_SHARE * share
    return sorted(weights.items())


def expected_shapes(dims: Mapping[str, Sizes], max_count: int = 256) -> list[tuple[dict[str, int], float]]:
    """Return shapes of a model's symbols with probabilities; sizes are assumed independent. At most ``max_count``
    shapes are drawn evenly.

    Sizes spaced by ratio are as dense among small numbers as among large ones. With the operations as a further weight
    (DietCode's w_i), all sizes of a range are equally important.
    """
    every = list(product(*(sampled_sizes(s) for s in dims.values())))
    chances = np.array([math.prod(p for _, p in row) for row in every])
    if len(every) > max_count:
        drawn = np.searchsorted(np.cumsum(chances), (np.arange(max_count) + 0.5) / max_count * chances.sum())
        chances = np.bincount(drawn, minlength=len(every)) / max_count
    rows = zip(every, chances, strict=True)
    return [(dict(zip(dims, (n for n, _ in row), strict=True)), float(p)) for row, p in rows if p > 0]
