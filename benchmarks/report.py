"""Prints the tables of a result of cpu_all, gemm or stitch again: python -m benchmarks.report RESULT.json ..."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.limits import Limits
from benchmarks.rows import Row, show, show_summary, summary


def show_all(rows: Sequence[Row], title: str, limits: Limits) -> None:
    """Print the table of rows of one number of threads, a summary for each family, and one over all of them."""
    threads = f"{limits.threads} thread{'s' * (limits.threads != 1)}"
    show(rows, f"{title}, {threads}; peak {limits.flops / 1e9:.0f} GFLOP/s, {limits.bandwidth / 1e9:.1f} GB/s")
    families = list(dict.fromkeys(r["family"] for r in rows))
    for family in families:
        print(f"{family}, {threads}: ", end="")
        show_summary(summary([r for r in rows if r["family"] == family]))
    if len(families) > 1:
        print(f"all, {threads}: ", end="")
        show_summary(summary(rows))


def main(results: Sequence[str]) -> None:
    """Print every result, by number of threads."""
    for result in results:
        content = json.loads(Path(result).read_text())
        for threads in dict.fromkeys(r["threads"] for r in content["rows"]):
            rows = [r for r in content["rows"] if r["threads"] == threads]
            limits = [p["limits"] for p in content["parts"] if p["threads"] == threads]
            flops, bandwidth = (max(x[key] for x in limits) for key in ("flops", "bandwidth"))
            show_all(rows, Path(result).stem, Limits(threads, flops, bandwidth))


if __name__ == "__main__":
    main(sys.argv[1:])
