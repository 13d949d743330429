"""Times the listed products (benchmarks/ops/gemm_list.json) beside ONNX Runtime, torch and numpy.

usage: python -m benchmarks.gemm [--threads N] [--rounds N] [--only FAMILY ...] [--quick]

x[M, K] @ constant[K, N], M symbolic: each (N, K) is compiled once and that program serves all its M. ``batched``:
a[B, M, K] @ b[B, K, N], all sizes symbolic, one program. Protocol: benchmarks/protocol.py. Times are whole calls from
Python, into memory that exists; what such a call costs at least is printed first (M = N = K = 1) and not subtracted.
The limit of a case is its operations at the FMA peak or its bytes at the bandwidth of where they fit (cache or
memory), whichever is longer. ``--quick``: three rounds, the first row count of every fourth weight. Results go
to benchmarks/results, those of a part of the list to benchmarks/out/results.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks import record
from benchmarks.limits import Limits, measure
from benchmarks.ops import draw, models
from benchmarks.rows import Field, Row, Shape, show, show_summary, summary

Work = tuple[str, str, Sequence[Shape]]
"""Family, file name's stem, shapes."""


def kinds(threads: int) -> list[str]:
    """Who plays; ONNX Runtime with a spinning pool and without where there is a pool."""
    return ["onnxruntime", *(["onnxruntime-nospin"] if threads > 1 else []), "torch", "numpy", "polydyn"]


def cost(shape: Shape, n: int, k: int) -> tuple[float, float]:
    """Operations and bytes of a product, each operand moved once; B operands where the shape has B."""
    b, m = shape.get("B", 1), shape["M"]
    return 2.0 * b * m * n * k, 4.0 * b * (m * k + n * k + m * n)


def constant_rows(field: Field, weights: Sequence[draw.Gemm], rounds: int, limits: Limits) -> Iterator[Row]:
    """Every weight, loaded once, at its row counts."""
    for g in weights:
        with tempfile.TemporaryDirectory() as folder:
            field.load(models.save(models.gemm(g.n, g.k), Path(folder)))
        for m in g.ms:
            flops, size = cost({"M": m}, g.n, g.k)
            row = field.measure({"M": m}, rounds, limits.seconds_again(flops, size), flops)
            yield row | {"case": f"{g.family} N={g.n} K={g.k}", "family": g.family, "shape": {"M": m}}


def batched_rows(
    field: Field, sizes: Sequence[tuple[int, int, int, int]], rounds: int, limits: Limits
) -> Iterator[Row]:
    """One program with every size symbolic."""
    with tempfile.TemporaryDirectory() as folder:
        field.load(models.save(models.batched_gemm(), Path(folder)))
    for b, m, n, k in sizes:
        shape = {"B": b, "M": m, "N": n, "K": k}
        flops, size = cost(shape, n, k)
        row = field.measure(shape, rounds, limits.seconds_again(flops, size), flops)
        yield row | {"case": "batched", "family": "batched"}


def call_overhead(field: Field, rounds: int) -> dict[str, float]:
    """Seconds of a call that has nothing to compute, per player."""
    with tempfile.TemporaryDirectory() as folder:
        field.load(models.save(models.gemm(1, 1), Path(folder)))
    seconds: dict[str, float] = field.measure({"M": 1}, rounds, 0.0)["seconds"]
    return seconds


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", nargs="+", metavar="FAMILY", help="families of the list, or batched")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    weights, sizes = draw.read()
    if args.only:
        weights = [g for g in weights if g.family in args.only]
        sizes = sizes if "batched" in args.only else []
    if args.quick:
        args.rounds = 3
        weights = [draw.Gemm(g.family, g.n, g.k, g.ms[:1]) for g in weights[::4]]
        sizes = sizes[::4]

    limits = measure(args.threads, caches=True)
    rows: list[Row] = []
    with Field(kinds(args.threads), args.threads) as field:
        overhead = call_overhead(field, args.rounds)
        print("a call with nothing to do:", ", ".join(f"{n} {s * 1e6:.2f} us" for n, s in overhead.items()))
        for row in constant_rows(field, weights, args.rounds, limits):
            rows.append(row)
            _progress(row)
        if sizes:
            for row in batched_rows(field, sizes, args.rounds, limits):
                rows.append(row)
                _progress(row)
    title = (
        f"products, {args.threads} threads; peak {limits.flops / 1e9:.0f} GFLOP/s, {limits.bandwidth / 1e9:.1f} GB/s"
    )
    show(rows, title, limits)
    found = {f: summary([r for r in rows if r["family"] == f]) for f in dict.fromkeys(r["family"] for r in rows)}
    for family, of_family in found.items():
        print(f"{family}: ", end="")
        show_summary(of_family)
    print("all: ", end="")
    show_summary(summary(rows))
    partial = args.quick or args.only
    path = record.save(
        f"gemm_{args.threads}t",
        folder=record.SCRATCH if partial else record.RESULTS,
        threads=args.threads,
        rounds=args.rounds,
        call_overhead=overhead,
        limits=vars(limits),
        summary=summary(rows),
        families=found,
        rows=rows,
    )
    print(f"written: {path.relative_to(record.RESULTS.parent.parent)}")


def _progress(row: Row) -> None:
    ours = row["seconds"].get("polydyn")
    ratio = f"{row['ratio']:.2f}" if "ratio" in row else "refused"
    print(f"  {row['case']} {row['shape']} {ours * 1e6 if ours else 0:.1f} us, ratio {ratio}", flush=True)


if __name__ == "__main__":
    main()
