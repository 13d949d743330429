"""Regret of the tuner's search and of baselines, replayed on fully recorded spaces.

    python -m benchmarks.explorers                    # benchmarks/results/spaces and spaces_1t.json.gz, 50 seeds
    python -m benchmarks.explorers PATH ... --seeds 8 # other files or folders (benchmarks.recorded_spaces)

Regret is the best cost so far over the least cost of the space, minus 1, in per cent. With several sizes it is the mean
over the sizes of the regret of the best explored tile at each size. The command prints the mean over the seeds and half
of its 95 % interval after 16, 32, 64 and 128 trials, the mean over the spaces and the worst space, and how often
regions changed. A replay depends only on the files and the seeds: no clock is in it. The exit status is 1 if a
condition on the search does not hold (``unmet``).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.progress import track

from benchmarks import record
from benchmarks.recorded_spaces import SPACES, TABLE, Matrix, RecordedSpace, read_spaces
from polydyn.search.explorers.trust_region import Region, Rules, search_rows

AT, JUDGED_TRIALS = (16, 32, 64, 128), 64
NORMAL_95 = 1.96
"""Half of the 95 % interval of a normal distribution, in standard deviations."""
MAX_EXCESS = 0.5
"""The search may have this much more regret than the analytical order, in per cent."""
RANDOM, ORDER, EVOLUTION, EI, OURS = "random", "analytical order", "evolution", "GP with EI", "trust region"
Method = Callable[[RecordedSpace, Matrix, int, int], Sequence[int]]
"""Maps a space, its costs (tiles x classes), a number of trials and a seed to the rows in the order of measurement."""


def by_random(space: RecordedSpace, costs: Matrix, trials: int, seed: int) -> Sequence[int]:
    """Measure rows drawn without replacement."""
    return [int(i) for i in np.random.default_rng(seed).permutation(len(space.points))[:trials]]


def by_order(space: RecordedSpace, costs: Matrix, trials: int, seed: int) -> Sequence[int]:
    """Measure rows in the analytical order."""
    return space.order[:trials]


def by_evolution(space: RecordedSpace, costs: Matrix, trials: int, seed: int) -> Sequence[int]:
    """Evolve a population: random starts, then children of the eight best rows. A child takes one or two coordinates
    from a random row; the nearest row that is not measured is measured, eight per generation."""
    draw, points = np.random.default_rng(seed), space.points
    rows = [int(i) for i in draw.permutation(len(points))[: min(16, trials)]]
    relative = np.log(np.minimum(costs / costs.min(0), 1e3)).mean(1)
    while len(rows) < min(trials, len(points)):
        parents = sorted(rows, key=lambda r: (relative[r], r))[:8]
        for parent in parents:
            child = points[parent].copy()
            axes = draw.permutation(points.shape[1])[: draw.integers(1, 3)]
            child[axes] = points[draw.integers(len(points)), axes]
            distance = ((points - child) ** 2).sum(1)
            distance[rows] = np.inf
            if len(rows) < min(trials, len(points)):
                rows.append(int(np.argmin(distance)))
    return rows


def by_expected_improvement(space: RecordedSpace, costs: Matrix, trials: int, seed: int) -> Sequence[int]:
    """Measure ten random rows, then rows of most expected improvement in the whole space, four per round."""
    everywhere = Rules(starts=10, ordered=0, size=1 << 40)
    return search_rows(space.points, lambda rows: costs[list(rows)], trials, seed=seed, rules=everywhere).rows


def by_trust_region(space: RecordedSpace, costs: Matrix, trials: int, seed: int) -> Sequence[int]:
    """Run the search that ``tune`` runs."""
    return search_rows(space.points, lambda rows: costs[list(rows)], trials, order=space.order, seed=seed).rows


METHODS: Mapping[str, Method] = {
    RANDOM: by_random,
    ORDER: by_order,
    EVOLUTION: by_evolution,
    EI: by_expected_improvement,
    OURS: by_trust_region,
}


def regret(costs: Matrix, rows: Sequence[int], trials: int) -> Matrix:
    """Return the regret after each trial, in per cent. It stays constant once all rows are measured."""
    best = np.minimum.accumulate(costs[list(rows)] / costs.min(0) - 1, axis=0).mean(1)
    return np.asarray(100 * np.concatenate([best, np.repeat(best[-1:], trials - len(best))]))


@dataclass(frozen=True)
class Replayed:
    """The replays of one search of a space. ``curves`` maps a method to its regret (seeds x trials). ``regions``: for
    each seed the regions after ``JUDGED_TRIALS`` trials."""

    space: RecordedSpace
    search: str
    curves: Mapping[str, Matrix]
    regions: Sequence[Sequence[Region]] = field(default_factory=tuple)

    def mean(self, method: str, trials: int) -> tuple[float, float]:
        """Return the mean regret after some trials, and half of its 95 % interval."""
        values = self.curves[method][:, trials - 1]
        deviation = values.std(ddof=1) if len(values) > 1 else 0.0
        return float(values.mean()), float(NORMAL_95 * deviation / len(values) ** 0.5)

    def changes(self) -> npt.NDArray[np.int64]:
        """Return how often regions grew, shrank and began again (seeds x 3), over all classes."""
        return np.array([np.sum([(r.grown, r.shrunk, r.restarted) for r in x], axis=0) for x in self.regions])

    def unmet(self) -> list[str]:
        """Return the conditions that do not hold: the search has less regret than random in a space of more tiles than
        trials, at most ``MAX_EXCESS`` more than the analytical order, and its regions change in every run."""
        name, ours = f"{self.space.name}, {self.search}", self.mean(OURS, JUDGED_TRIALS)[0]
        drawn, ordered = (self.mean(m, JUDGED_TRIALS)[0] for m in (RANDOM, ORDER))
        out = []
        if len(self.space.points) > JUDGED_TRIALS and ours >= drawn:
            out.append(f"{name}: {ours:.2f} %, random {drawn:.2f} %")
        if ours > ordered + MAX_EXCESS:
            out.append(f"{name}: {ours:.2f} %, analytical order {ordered:.2f} %")
        if len(self.space.points) > JUDGED_TRIALS and (still := int((self.changes().sum(1) == 0).sum())):
            out.append(f"{name}: no region changed in {still} of {len(self.regions)} runs")
        return out


def replay(space: RecordedSpace, search: str, costs: Matrix, seeds: int) -> Replayed:
    """Replay every method with every seed; the analytical order once."""
    trials = max(AT)
    curves = {
        name: np.array([
            regret(costs, method(space, costs, trials, s), trials) for s in range(1 if name == ORDER else seeds)
        ])
        for name, method in METHODS.items()
    }  # fmt: skip
    regions = [
        search_rows(space.points, lambda rows: costs[list(rows)], JUDGED_TRIALS, order=space.order, seed=s).regions
        for s in range(seeds)
    ]
    return Replayed(space, search, curves, regions)


def table(replays: Sequence[Replayed]) -> str:
    """Return the Markdown table of one search: a row for each method and number of trials."""
    names = [f"{r.space.name} ({len(r.space.points)})" for r in replays]
    lines = [f"| trials | {replays[0].search} | {' | '.join(names)} |", "|" + "---|" * (len(names) + 2)]
    for trials in AT:
        for method in METHODS:
            cells = [(r.curves[method], *r.mean(method, trials)) for r in replays]
            row = [f"{m:.2f}" + (f" ± {half:.2f}" if len(curves) > 1 else "") for curves, m, half in cells]
            lines.append(f"| {trials} | {method} | {' | '.join(row)} |")
    return "\n".join(lines)


def summary(replays: Sequence[Replayed]) -> str:
    """Return the Markdown table of one search: the arithmetic mean of the regret over all spaces, and the worst one."""
    lines = ["| method | " + " | ".join(f"{n} trials" for n in AT) + " |", "|" + "---|" * (len(AT) + 1)]
    for method in METHODS:
        cells = []
        for trials in AT:
            means = {r.space.name: r.mean(method, trials)[0] for r in replays}
            worst = max(means, key=lambda n: means[n])
            cells.append(f"{sum(means.values()) / len(means):.2f}, {means[worst]:.2f} ({worst})")
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return "\n".join(lines)


def changes_table(replays: Sequence[Replayed]) -> str:
    """Return the Markdown table of the changes of regions per run."""
    title = f"changes per run of {JUDGED_TRIALS} trials"
    lines = [f"| {title} | grown | shrunk | begun again | runs without a change |", "|---|---|---|---|---|"]
    for r in replays:
        changes = r.changes()
        row = " | ".join(f"{x:.1f}" for x in changes.mean(0))
        still = f"{int((changes.sum(1) == 0).sum())} of {len(changes)}"
        lines.append(f"| {r.space.name}, {r.search} | {row} | {still} |")
    return "\n".join(lines)


def as_json(r: Replayed) -> dict[str, Any]:
    """Return means, intervals and changes as plain data."""
    means = {m: {n: [float(f"{x:.3g}") for x in r.mean(m, n)] for n in AT} for m in METHODS}
    changes = [float(f"{x:.3g}") for x in r.changes().mean(0)]
    return {"space": r.space.name, "tiles": len(r.space.points), "search": r.search, "regret": means,
            "changes": changes}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("paths", type=Path, nargs="*", default=[SPACES, TABLE], help="files or folders of spaces")
    parser.add_argument("--seeds", type=int, default=50)
    options = parser.parse_args()
    searches = [(s, name, costs) for s in read_spaces(options.paths) for name, costs in s.tables().items()]
    done = [replay(*x, options.seeds) for x in track(searches, description="replaying", transient=True)]
    for name in dict.fromkeys(r.search for r in done):
        some = [r for r in done if r.search == name]
        print(f"\nregret in per cent, {options.seeds} seeds\n\n{table(some)}")
        print(f"\n{name}: arithmetic mean over the spaces, and the worst space\n\n{summary(some)}")
    print(f"\n{changes_table(done)}")
    whole = options.seeds >= 50 and options.paths == [SPACES, TABLE]
    record.save(
        "explorers", folder=record.RESULTS if whole else record.SCRATCH, seeds=options.seeds,
        spaces=[as_json(r) for r in done],
    )  # fmt: skip
    unmet = [line for r in done for line in r.unmet()]
    print("\n".join(f"not met after {JUDGED_TRIALS} trials: {line}" for line in unmet))
    return 1 if unmet else 0


if __name__ == "__main__":
    sys.exit(main())
