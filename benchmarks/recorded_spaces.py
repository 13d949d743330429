"""Recorded search spaces as points, costs and an analytical order, from the two kinds of files that hold them.

``*.csv.gz``: one space per file; ``benchmarks.row_spaces`` writes those with several rows of a table. Lines that begin
with ``#`` describe the machine and the problem. The columns before ``rank`` are the sizes of a tile; ``rank`` is its
position in the analytical order. The columns after it are costs: ``sat`` on the tile's own saturating instance, the
others for full launches at one size each.
``*.json.gz``: several spaces with one cost per tile, written by ``benchmarks.spaces``.
"""

from __future__ import annotations

import csv
import gzip
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks import record
from benchmarks.spaces import Recorded, load
from polydyn.search.spaces.space import coordinates

Matrix = npt.NDArray[np.float64]
SPACES = record.RESULTS / "spaces"
TABLE = record.RESULTS / "spaces_1t.json.gz"
SATURATING = "sat"
SINGLE_COST = {
    "few": "M4", "conv": "P784", "window": "P28", "attention": "L128",
    "skinny": "M4", "pointwise": "P196", "tiles": "L256", "sums": "R8", "columns": "C64",
}  # fmt: skip
"""The cost that is searched alone, by name of a space; elsewhere the saturating instance, or the last column."""


@dataclass(frozen=True)
class RecordedSpace:
    """A measured space. ``points``: coordinates of the tiles. ``order``: rows by the analytical order, best first.
    ``costs`` maps a column to one cost per tile (``inf``: failed); ``single`` is the column that is searched alone."""

    name: str
    points: Matrix
    order: tuple[int, ...]
    costs: Mapping[str, Matrix]
    single: str

    def tables(self) -> dict[str, Matrix]:
        """Return the costs (tiles x classes) of the two searches: of one cost, and of all launches together."""
        launches = [c for n, c in self.costs.items() if n != SATURATING]
        several = {"several sizes": np.stack(launches, axis=1)} if len(launches) > 1 else {}
        return {"one cost": self.costs[self.single][:, None], **several}


def read_space(path: Path) -> RecordedSpace:
    """Read a ``csv.gz`` file."""
    with gzip.open(path, "rt") as lines:
        header, *rows = csv.reader(line for line in lines if not line.startswith("#"))
    cut, values = header.index("rank"), np.array(rows, float)
    name = path.name.partition(".")[0]
    costs = {n: values[:, cut + 1 + k] for k, n in enumerate(header[cut + 1 :])}
    single = SINGLE_COST.get(name) or (SATURATING if SATURATING in costs else header[-1])
    order = tuple(int(i) for i in np.argsort(values[:, cut], kind="stable"))
    return RecordedSpace(name, coordinates(values[:, :cut].astype(int).tolist()), order, costs, single)


def of_group(group: Recorded) -> RecordedSpace:
    """Convert a space of ``benchmarks.spaces``."""
    space = group.space
    costs = np.array([group.costs[t] for t in space.tiles])
    return RecordedSpace(
        group.name, space.points, tuple(space.position[t] for t in group.order), {SATURATING: costs}, SATURATING
    )


def read_spaces(paths: Sequence[Path]) -> list[RecordedSpace]:
    """Read files and folders of files."""
    out: list[RecordedSpace] = []
    for path in paths:
        for file in sorted(path.glob("*.gz")) if path.is_dir() else [path]:
            out += map(of_group, load(file)) if file.name.endswith(".json.gz") else [read_space(file)]
    return out
