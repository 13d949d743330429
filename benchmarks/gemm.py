"""Times the listed products (benchmarks/ops/gemm_list.json), compared with ONNX Runtime, torch and numpy.

usage: python -m benchmarks.gemm [--threads 1 2] [--rounds N] [--seconds S] [--only FAMILY ...]
                               [--also openvino] [--quick]

x[M, K] @ constant[K, N], M symbolic: each (N, K) is compiled once and that program serves all its M. ``batched``:
a[B, M, K] @ b[B, K, N], all sizes symbolic, one program. Protocol: benchmarks/protocol.py. Times are whole calls from
Python, into existing memory; the minimum cost of such a call is printed first (M = N = K = 1) and not subtracted. The
limit of a case is its operations at the FMA peak or its bytes at the bandwidth of the level where they fit (cache or
memory), whichever is longer; for M, N, K >= 48 the summary has the share of the FMA peak too. ``--quick``: three
rounds, the first row count of every fourth weight. After every weight benchmarks/results/gemm.json is written, or
benchmarks/out/results/gemm.json for quick runs; a new measurement of a weight on a number of threads replaces the
earlier one. A plot is written next to the file at the end.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks import arguments, record, report
from benchmarks.limits import Limits, measure
from benchmarks.ops import draw
from benchmarks.rows import Effort, Field, Row, Shape, progress
from polydyn.testing import models

Sizes = tuple[int, int, int, int]
"""B, M, N, K of a batched product."""
MIN_COMPUTE_BOUND_SIZE = 48
"""If every size is at least this large, arithmetic alone should determine the time."""


def cost(shape: Shape, n: int, k: int) -> tuple[float, float]:
    """Return operations and bytes of a product, each operand moved once; B operands if the shape has B."""
    b, m = shape.get("B", 1), shape["M"]
    return 2.0 * b * m * n * k, 4.0 * b * (m * k + n * k + m * n)


def constant_rows(field: Field, g: draw.Gemm, effort: Effort, limits: Limits) -> Iterator[Row]:
    """Yield the rows of one weight, loaded once, at its row counts."""
    with tempfile.TemporaryDirectory() as folder:
        field.load(models.save(models.gemm(g.n, g.k), Path(folder)))
    for m in g.ms:
        flops, size = cost({"M": m}, g.n, g.k)
        row = field.measure({"M": m}, effort, limits.seconds_again(flops, size), flops)
        yield named(row, f"{g.family} N={g.n} K={g.k}", g.family, (m, g.n, g.k), limits)


def batched_rows(field: Field, sizes: Sequence[Sizes], effort: Effort, limits: Limits) -> Iterator[Row]:
    """Yield the rows of one program with all sizes symbolic."""
    with tempfile.TemporaryDirectory() as folder:
        field.load(models.save(models.batched_gemm(), Path(folder)))
    for b, m, n, k in sizes:
        shape = {"B": b, "M": m, "N": n, "K": k}
        flops, size = cost(shape, n, k)
        row = field.measure(shape, effort, limits.seconds_again(flops, size), flops)
        yield named(row, "batched", "batched", (m, n, k), limits)


def named(row: Row, case: str, family: str, sizes: tuple[int, int, int], limits: Limits) -> Row:
    """Return the row with its names; if M, N, K >= MIN_COMPUTE_BOUND_SIZE, also with its share of the FMA peak."""
    row |= {"case": case, "family": family}
    if min(sizes) >= MIN_COMPUTE_BOUND_SIZE and "polydyn" in row["seconds"]:
        row["of_peak"] = row["flops"] / row["seconds"]["polydyn"] / limits.flops
    return row


def call_overhead(field: Field, effort: Effort) -> dict[str, float]:
    """Return the seconds of a call that has nothing to compute, per player."""
    with tempfile.TemporaryDirectory() as folder:
        field.load(models.save(models.gemm(1, 1), Path(folder)))
    seconds: dict[str, float] = field.measure({"M": 1}, effort, 0.0)["seconds"]
    return seconds


def main() -> None:
    """See the module's docstring."""
    parser = arguments.parser(__doc__, seconds=2)
    parser.add_argument("--only", nargs="+", metavar="FAMILY", help="families of the list, or batched")
    args = parser.parse_args()
    weights, sizes = draw.read()
    if args.only:
        weights = [g for g in weights if g.family in args.only]
        sizes = sizes if "batched" in args.only else []
    if args.quick:
        weights = [draw.Gemm(g.family, g.n, g.k, g.ms[:1]) for g in weights[::4]]
        sizes = sizes[::4]
    arguments.finish([path for threads in args.threads for path in run(weights, sizes, threads, args)])


def run(weights: Sequence[draw.Gemm], sizes: Sequence[Sizes], threads: int, args: argparse.Namespace) -> list[Path]:
    """Measure the list on one number of threads and write it weight by weight; then print the table."""
    effort, limits = arguments.effort(args), measure(threads, caches=True)
    rows: list[Row] = []
    with Field(arguments.rivals(threads, args.also, "torch", "numpy"), threads) as field:
        overhead = call_overhead(field, effort)
        print("a call with nothing to do:", ", ".join(f"{n} {s * 1e6:.2f} us" for n, s in overhead.items()))
        results = record.Results("gemm", arguments.folder(args))
        parts = [constant_rows(field, g, effort, limits) for g in weights]
        if sizes:
            parts.append(batched_rows(field, sizes, effort, limits))
        for part in parts:
            of_part = []
            for row in part:
                progress(row)
                of_part.append(row)
            results.add(of_part[0]["case"], threads, of_part, limits=vars(limits), call=overhead, **field.about())
            rows += of_part
    report.show_all(rows, "products", limits)
    return [results.path]


if __name__ == "__main__":
    main()
