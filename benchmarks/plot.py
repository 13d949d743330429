"""Draws a result of cpu_all, gemm or stitch: python -m benchmarks.plot RESULT.json ... writes RESULT.png next to it.

A panel for each number of threads, one column per case: every baseline's time over polydyn's (above 1: polydyn is
faster), and the machine's limit over polydyn's time. The grey band is the spread of an A/A run. Cases are grouped by
family; long lists are sorted by ratio and have no names. The axis is logarithmic; limits far below the baselines are
omitted.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.rows import Row, names, times_ours

MAX_NAMED_CASES = 80
"""Maximum number of cases with names; above it the axis names families only."""

TICKS = (0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5, 7, 10, 15, 20, 30, 50, 100)
MARKS = {"torch": ("s", "tab:orange"), "torch-inductor": ("D", "tab:red"), "openvino": ("^", "tab:purple"),
         "numpy": ("v", "tab:green")}  # fmt: skip


def draw(result: Path) -> Path | None:
    """Write the plot and return its path; without matplotlib (extra [bench]) print a note and return None."""
    try:
        import matplotlib
    except ImportError:
        print("no plot: matplotlib is not installed (pip install -e .[bench])")
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [r for r in json.loads(result.read_text())["rows"] if "ratio" in r]
    if not rows:
        print(f"no plot: polydyn and a rival share no case in {result.name}")
        return None
    counts = sorted({r["threads"] for r in rows})
    figure, axes = pyplot.subplots(len(counts), 1, figsize=(15, 6 * len(counts)), squeeze=False, layout="constrained")
    for axis, threads in zip(axes[:, 0], counts, strict=True):
        _panel(axis, [r for r in rows if r["threads"] == threads])
        axis.set_title(f"{result.stem}, {threads} thread{'s' * (threads != 1)}", loc="left")
    path = result.with_suffix(".png")
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
    print(f"drawn: {path.name}")
    return path


def order(rows: Sequence[Row]) -> list[Row]:
    """Group rows by family; within a family keep the measured order, or sort by ratio if there are too many for names.
    """
    families = list(dict.fromkeys(r["family"] for r in rows))
    by_ratio = len(rows) > MAX_NAMED_CASES
    return sorted(rows, key=lambda r: (families.index(r["family"]), r["ratio"] if by_ratio else 0))


def _panel(axis: Any, rows: Sequence[Row]) -> None:
    from matplotlib.ticker import NullLocator

    rows = order(rows)
    at = list(range(len(rows)))
    axis.fill_between(
        at, [1 / (1 + r["spread"]) for r in rows], [1 + r["spread"] for r in rows], color="0.85", step="mid",
        label="A/A spread",
    )  # fmt: skip
    axis.axhline(1, color="black", lw=0.8)
    axis.plot(
        at, [r["bound"] / r["seconds"]["polydyn"] for r in rows], "_", ms=9, color="black", label="limit of the machine"
    )
    for name in (n for n in names(rows) if n in MARKS):
        mark, color = MARKS[name]
        played = [(i, times_ours(r, name)) for i, r in enumerate(rows) if name in r["seconds"]]
        axis.plot(*zip(*played, strict=True), mark, ms=4, mfc="none", color=color, label=name, alpha=0.8)
    axis.plot(at, [r["ratio"] for r in rows], "o", ms=5, color="tab:blue", label="ONNX Runtime")
    _name(axis, rows)
    ratios = [times_ours(r, n) for r in rows for n in r["seconds"]]
    axis.set_yscale("log")
    axis.set_ylim(0.7 * min(0.9, *ratios), 1.15 * max(ratios))
    axis.set_yticks([t for t in TICKS if axis.get_ylim()[0] < t < axis.get_ylim()[1]])
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_locator(NullLocator())
    axis.grid(axis="y", color="0.92")
    axis.set_axisbelow(True)
    axis.set_xlim(-1, len(rows))
    axis.set_ylabel("time / polydyn's time")
    axis.legend(ncols=7, loc="lower right", bbox_to_anchor=(1, 1), frameon=False)


def _name(axis: Any, rows: Sequence[Row]) -> None:
    """Write names below the axis, a line and a heading for each family."""
    start = 0
    for family in dict.fromkeys(r["family"] for r in rows):
        count = sum(r["family"] == family for r in rows)
        if start:
            axis.axvline(start - 0.5, color="0.6", lw=0.8)
        place = {"xy": (start + (count - 1) / 2, 0.01), "xycoords": ("data", "axes fraction")}
        axis.annotate(family, **place, ha="center", va="bottom", fontsize=9, fontweight="bold")
        start += count
    if len(rows) > MAX_NAMED_CASES:
        axis.set_xticks([])
        axis.set_xlabel("cases, within a family in the order of their ratio")
    else:
        axis.set_xticks(range(len(rows)), [_short(r) for r in rows], rotation=80, ha="right", rotation_mode="anchor")
        axis.tick_params(axis="x", labelsize=7)


def _short(row: Row) -> str:
    sizes = ",".join(str(v) for v in row["shape"].values())
    return sizes if row["case"] == row["family"] else f"{row['case']} {sizes}"


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        draw(Path(argument))
