"""Regret curves of the explorers, replayed on fully recorded spaces.

    python -m benchmarks.explorers                            # the recorded spaces in benchmarks/results
    python -m benchmarks.explorers --records spaces.json.gz   # another table of benchmarks.spaces
    python -m benchmarks.explorers --simulated                # three simulated groups: no machine is needed

Prints, per group and explorer, the mean regret (best so far over the optimum, minus 1) after some numbers of trials
with its standard error over the seeds, and the number of trials until a tile within 0.1 % of the optimum was found.
Writes all curves to explorers.json and draws them. The replay depends only on the table and the seeds. With the
recorded spaces it exits with an error if the trust region does not beat both others at 100 trials.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks import record
from benchmarks.spaces import Recorded, load
from polydyn.search.backbone import Backbone, Tile
from polydyn.search.explorers.explore import Explorer, Trial, aligned_order, in_order
from polydyn.search.explorers.trust_region import trust_region
from polydyn.search.hardware import Hardware, cpu
from polydyn.search.spaces.loop_model import loop_model
from polydyn.search.spaces.space import Space
from polydyn.testing.machines import A100, T4
from polydyn.testing.simulated import Simulated, gemm, random_search, regret

AT, JUDGED_TRIALS = (25, 50, 100, 200), 100
NEAR = 1e-3
"""A tile with at most this regret counts as the optimum."""
TABLE = record.RESULTS / "spaces_1t.json.gz"
RANDOM, ALIGNED_FIRST, REGIONS = "random", "aligned only", "trust region"
Curves = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Replayed:
    """The curves of a group: maps an explorer to its regret (seeds x trials), and to the seconds per trial."""

    group: Recorded
    curves: Mapping[str, Curves]
    seconds: Mapping[str, float]

    @property
    def beaten(self) -> bool:
        """Whether the trust region's mean regret after ``JUDGED_TRIALS`` trials is below random's and aligned-only's.

        If a baseline always finds the optimum by then, the mean regret on the way decides.
        """
        until = {n: c[:, :JUDGED_TRIALS].mean(0) for n, c in self.curves.items()}
        reached = {n: (float(c[-1]), float(c.mean())) for n, c in until.items()}
        return reached[REGIONS] < min(reached[RANDOM], reached[ALIGNED_FIRST])


def simulated(noise: float) -> Iterator[Recorded]:
    """Yield the groups of a simulated machine."""
    groups: list[tuple[Backbone, Hardware]] = [
        (gemm(None, 3072, 1024, dtype="float16", item=2), A100),
        (gemm(None, 2304, 768), T4),
        (gemm(None, 768, 768), cpu(2)),
    ]
    for backbone, hardware in groups:
        space = loop_model(backbone, hardware)
        costs = Simulated(backbone, hardware, noise).per_operation(space.tiles)
        order = aligned_order(space, backbone, hardware)
        yield Recorded(hardware.name, order, dict(zip(space.tiles, costs, strict=True)))


def explorers_of(order: Sequence[Tile]) -> dict[str, Explorer]:
    """Return the explorers by name; ``order``: tiles, aligned ones first."""
    return {
        RANDOM: random_search,
        ALIGNED_FIRST: in_order(order),
        REGIONS: trust_region(order),
        "trust region, random starts": trust_region(),
    }


class _Found(Exception):
    """The optimum was measured, so the curve no longer changes."""


def curve(explorer: Explorer, space: Space, costs: Mapping[Tile, float], trials: int, seed: int) -> list[float]:
    """Return the regret after each trial; ends with the batch that has the optimum."""
    optimum = min(costs.values())
    trials_so_far: list[Trial] = []

    def objective(tiles: Sequence[Tile]) -> list[float]:
        trials_so_far.extend(Trial(t, costs[t]) for t in tiles)
        if any(costs[t] == optimum for t in tiles):
            raise _Found
        return [costs[t] for t in tiles]

    with suppress(_Found):
        explorer(space, objective, trials, seed)
    return regret(trials_so_far, optimum)


def replay(group: Recorded, seeds: int, trials: int) -> Replayed:
    """Replay every explorer with every seed (a deterministic explorer once)."""
    space, curves, seconds = group.space, {}, {}
    for label, explorer in explorers_of(group.order).items():
        start = time.perf_counter()
        rows = [curve(explorer, space, group.costs, trials, s) for s in range(1 if label == ALIGNED_FIRST else seeds)]
        seconds[label] = (time.perf_counter() - start) / sum(map(len, rows))
        curves[label] = np.array([row + row[-1:] * (trials - len(row)) for row in rows])
    return Replayed(group, curves, seconds)


def error(curves: Curves) -> Curves:
    """Return the standard error of the mean over the seeds, after each trial."""
    return np.asarray(curves.std(0, ddof=min(1, len(curves) - 1)) / len(curves) ** 0.5)


def needed(curves: Curves) -> npt.NDArray[np.int64]:
    """Return, per seed, the trials until a tile within ``NEAR`` of the optimum was found, or all trials plus one."""
    return np.asarray((curves > NEAR).sum(1) + 1)


def show(replayed: Replayed) -> None:
    """Print a group's table."""
    heading = f"{replayed.group.name}: {len(replayed.group.order)} tuples"
    print(f"\n{heading}\n{'explorer':28}" + "".join(f"{n:>17}" for n in AT) + "  trials to 0.1 %  found  ms/trial")
    for label, curves in replayed.curves.items():
        mean, spread, trials = curves.mean(0), error(curves), needed(curves)
        figures = "".join(f"{mean[n - 1]:9.3%} ±{spread[n - 1]:6.3%}" for n in AT if n <= len(mean))
        share, spent = (trials <= len(mean)).mean(), 1e3 * replayed.seconds[label]
        print(f"{label:28}{figures}{np.median(trials):17.0f}{share:7.0%}{spent:10.1f}", flush=True)


def as_json(replayed: Replayed) -> dict[str, Any]:
    """Return mean, tenth and ninetieth percentile over the seeds after each trial; standard errors after ``AT``."""

    def row(curves: Curves) -> dict[str, Any]:
        low, high = np.quantile(curves, (0.1, 0.9), axis=0)
        parts = {"mean": curves.mean(0), "low": low, "high": high}
        trials, spread = needed(curves), error(curves)
        return {n: [float(f"{x:.4g}") for x in v] for n, v in parts.items()} | {
            "error": {n: float(f"{spread[n - 1]:.2g}") for n in AT if n <= len(spread)},
            "near": {"median_trials": float(np.median(trials)), "found": float((trials <= curves.shape[1]).mean())},
        }

    return {
        "group": replayed.group.name, "tuples": len(replayed.group.order), "wins": replayed.beaten,
        "explorers": {n: row(c) for n, c in replayed.curves.items()},
    }  # fmt: skip


def draw(groups: Sequence[Mapping[str, Any]], path: Path) -> bool:
    """Draw the curves of ``as_json``, a panel for each group; return False without matplotlib (extra [bench])."""
    try:
        import matplotlib
    except ImportError:
        print("no plot: matplotlib is not installed (pip install -e .[bench])")
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(groups), figsize=(5 * len(groups), 4.5), squeeze=False, layout="constrained")
    for axis, group in zip(axes[0], groups, strict=True):
        for label, rows in group["explorers"].items():
            at = range(1, len(rows["mean"]) + 1)
            (line,) = axis.plot(at, [100 * x for x in rows["mean"]], label=label)
            low, high = ([100 * x for x in rows[n]] for n in ("low", "high"))
            axis.fill_between(at, low, high, color=line.get_color(), alpha=0.12)
        axis.set_title(f"{group['group']}: {group['tuples']} tuples")
        axis.set_xlabel("trials")
        axis.set_yscale("symlog", linthresh=1)
        axis.set_ylim(bottom=0)
    axes[0][0].set_ylabel("best so far over the optimum, per cent more")
    axes[0][0].legend()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    print(f"drawn: {path.name}")
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--records", type=Path, default=TABLE, help="a table of benchmarks.spaces")
    parser.add_argument("--simulated", action="store_true")
    parser.add_argument("--noise", type=float, default=0.03, help="noise of a tile's speed, relative")
    options = parser.parse_args()
    if not options.simulated and not options.records.exists():
        parser.error(f"there is no {options.records.name}: python -m benchmarks.spaces FILE records it")
    done = []
    for group in simulated(options.noise) if options.simulated else load(options.records):
        done.append(replay(group, options.seeds, max(AT)))
        show(done[-1])
    keep = not options.simulated and options.seeds >= 100 and options.records == TABLE
    rows = [as_json(r) for r in done]
    path = record.save("explorers", folder=record.RESULTS if keep else record.SCRATCH, seeds=options.seeds, groups=rows)
    draw(rows, path.with_suffix(".png"))
    lost = [] if options.simulated else [r.group.name for r in done if not r.beaten]
    print("\n".join(f"{name}: the trust region does not win" for name in lost))
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
