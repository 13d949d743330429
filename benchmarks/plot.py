"""Draws a result of gemm, stitch or cpu_all: python -m benchmarks.plot RESULT.json ... writes RESULT.png beside it.

Per case, ONNX Runtime's time over polydyn's (above 1: polydyn is faster), with what an A/A run differs by as an error
bar, and how far the machine's limit would let the ratio go. Logarithmic; cases in the order of their ratio when they
are too many to be named.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

NAMED = 60
"""Above so many cases the axis carries no names."""


def draw(result: Path) -> Path | None:
    """Writes the plot and returns its path; says so and returns None without matplotlib (extra [bench])."""
    try:
        import matplotlib
    except ImportError:
        print("no plot: matplotlib is not installed (pip install -e .[bench])")
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [r for r in json.loads(result.read_text())["rows"] if "ratio" in r]
    counts = list(dict.fromkeys(r.get("threads") for r in rows))
    figure, axes = pyplot.subplots(len(counts), 1, figsize=(14, 5 * len(counts)), squeeze=False, layout="constrained")
    for axis, threads in zip(axes[:, 0], counts, strict=True):
        _panel(axis, [r for r in rows if r.get("threads") == threads])
        axis.set_title(result.stem if threads is None else f"{result.stem}, {threads} threads")
    path = result.with_suffix(".png")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    print(f"drawn: {path.name}")
    return path


def _panel(axis: Any, rows: Sequence[dict[str, Any]]) -> None:
    if len(rows) > NAMED:
        rows = sorted(rows, key=lambda r: r["ratio"])
    ratios = [r["ratio"] for r in rows]
    at = range(len(rows))
    axis.errorbar(at, ratios, [r["ratio"] * r["spread"] for r in rows], fmt="o", ms=4, lw=1, label="measured")
    limits = [r["ratio"] * r["seconds"]["polydyn"] / r["bound"] if r["bound"] else float("nan") for r in rows]
    axis.plot(at, limits, "_", color="gray", label="limit of the machine")
    axis.axhline(1, color="black", lw=0.8)
    axis.set_yscale("log")
    axis.set_ylabel("ONNX Runtime's time / polydyn's")
    if len(rows) > NAMED:
        axis.set_xlabel("cases in order of their ratio")
    else:
        names = [f"{r['case']} {','.join(str(v) for v in r['shape'].values())}" for r in rows]
        axis.set_xticks(list(at), names, rotation=70, ha="right", fontsize=8)
    axis.legend()


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        draw(Path(argument))
