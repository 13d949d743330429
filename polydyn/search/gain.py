"""The gain of a search: the selected tiles compared with the kernel that a group has without tuning."""

from __future__ import annotations

import math
from collections.abc import Callable

from polydyn.search.backbone import Shape, Tile
from polydyn.search.bench import Bench
from polydyn.search.finals import MAX_TOTAL_LAUNCHES, PICOSECONDS, sizes_to_measure
from polydyn.search.strategies import MEASURED_SECONDS, Tuned

GAIN = "gain"
"""The kind of the record of a gain, and the name of its value."""
ROUNDS = 3
"""Number of alternating rounds at a size; the minimum time counts."""


def gain_over(default: Callable[[Shape], Tile], tuned: Tuned, bench: Bench) -> float | None:
    """Return the time of the ``default`` at each size over that of the selected tiles: a weighted mean over sizes drawn
    as for the finals. Return None if neither ran, or if every size takes too long.
    """
    tiles = [tuned.kernels[k].tile for k in tuned.assigned]
    work = [tuned.backbone.flops(s) for s in tuned.instances]
    rates = [tuned.table[k, i] for i, k in enumerate(tuned.assigned)]
    seconds = [w / r / PICOSECONDS if r else math.inf for w, r in zip(work, rates, strict=True)]
    chosen = sizes_to_measure(seconds, tuned.weights, MEASURED_SECONDS, MAX_TOTAL_LAUNCHES * MEASURED_SECONDS / 2)
    spent = [bench.seconds([tiles[i], default(tuned.instances[i])], tuned.instances[i], ROUNDS) for i in chosen]
    ran = [(tuned.weights[i], a, b) for i, (a, b) in zip(chosen, spent, strict=True) if math.isfinite(a + b) and a > 0]
    total = sum(w for w, _, _ in ran)
    return math.exp(sum(w * math.log(b / a) for w, a, b in ran) / total) if total else None
