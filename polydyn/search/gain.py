"""What a search gained: the tiles that it selected beside the kernel that a group has without it."""

from __future__ import annotations

import math

from polydyn.search.backbone import Tile
from polydyn.search.bench import Bench
from polydyn.search.finals import LONG, PICOSECONDS, sizes_to_measure
from polydyn.search.strategies import MEASURED_SECONDS, Tuned

GAIN = "gain"
"""Kind of the record of a gain, and of its value."""
TURNS = 3
"""How often both are launched at a size, in turns; the least time counts."""


def gain_over(default: Tile, tuned: Tuned, bench: Bench) -> float | None:
    """Time of ``default`` over that of the selected tiles: the mean over sizes by their weights, of sizes drawn as the
    finals draw them. None where neither ran, or every size takes too long.
    """
    tiles = [tuned.kernels[k].tile for k in tuned.assigned]
    work = [tuned.backbone.flops(s) for s in tuned.instances]
    rates = [tuned.table[k, i] for i, k in enumerate(tuned.assigned)]
    seconds = [w / r / PICOSECONDS if r else math.inf for w, r in zip(work, rates, strict=True)]
    chosen = sizes_to_measure(seconds, tuned.weights, MEASURED_SECONDS, LONG * MEASURED_SECONDS / 2)
    spent = [bench.seconds([tiles[i], default], tuned.instances[i], TURNS) for i in chosen]
    ran = [(tuned.weights[i], a, b) for i, (a, b) in zip(chosen, spent, strict=True) if math.isfinite(a + b) and a > 0]
    total = sum(w for w, _, _ in ran)
    return math.exp(sum(w * math.log(b / a) for w, a, b in ran) / total) if total else None
