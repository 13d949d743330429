"""Times whole models on the CPU: models x shapes x threads, beside ONNX Runtime and PyTorch.

usage: python -m benchmarks.cpu_all FOLDER [--models NAME ...] [--threads 1 2] [--rounds N] [--also KIND ...] [--quick]

FOLDER holds the models (``make models``). Dynamic dims: B and L of text models, both in one compilation, at the sizes
of TEXT; N of vit_base. Attention masks hold zeros where there is room. ONNX Runtime runs with its spinning pool and
without on two or more threads, and the faster counts. PyTorch runs the module that the ONNX file was exported from,
eager. ``--also torch-inductor`` adds torch.compile(dynamic=True), which compiles for half a minute and longer, ``--also
openvino`` OpenVINO in fp32 (pip install openvino). The limit is that of benchmarks/bound.py. Prints one table per
thread count and the mean share of the gap closed, each case clipped to [-1, 1]; writes
benchmarks/results/cpu_models.json and a plot beside it. ``--quick``: three rounds, every third shape, results in
benchmarks/out/results.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import plot, record
from benchmarks.bound import products
from benchmarks.limits import Limits, measure
from benchmarks.models.inputs import Shape, family
from benchmarks.rows import Field, Row, clipped, geomean, name_shape, show, show_summary, summary

MODELS = ("bert_base", "albert_base", "gpt2", "t5_small", "vit_base")
TEXT = [{"B": b, "L": n} for b, n in ((1, 1), (1, 8), (1, 32), (1, 61), (1, 128), (4, 61), (8, 128), (2, 509))]
IMAGES = [{"N": n} for n in (1, 3)]


def shapes_of(model: str) -> Sequence[Shape]:
    """The sizes at which a model is compared; a tiny model takes no more than 160 positions."""
    if family(model).startswith("vit"):
        return IMAGES
    return [s for s in TEXT if not model.endswith("_tiny") or s["L"] <= 160]


def kinds(threads: int, also: Sequence[str]) -> list[str]:
    """Who plays; polydyn last."""
    ort = ["onnxruntime", *(["onnxruntime-nospin"] if threads > 1 else [])]
    return [*ort, "torch", *also, "polydyn"]


def measured(field: Field, path: Path, step: int, rounds: int, limits: Limits) -> Iterator[Row]:
    """One row per shape of one model."""
    field.load(path)
    load = {name: p.seconds_to_load for name, p in field.players.items()}
    for shape in shapes_of(path.stem)[::step]:
        groups = products(str(path), shape)
        least = sum(limits.seconds(flops, size) for flops, size in groups)
        row = field.measure(shape, rounds, least, sum(flops for flops, _ in groups))
        row |= {"case": path.stem, "family": path.stem, "threads": limits.threads, "seconds_to_load": load}
        print(f"  {path.stem} {name_shape(shape)} ratio {row.get('ratio', float('nan')):.2f}", flush=True)
        yield row


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--also", nargs="+", default=[], choices=("torch-inductor", "openvino"))
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    paths = [args.folder / f"{name}.onnx" for name in args.models]
    if missing := [p.name for p in paths if not p.exists()]:
        parser.error(f"not in {args.folder}: {', '.join(missing)}; make models writes them")

    rounds, step = (3, 3) if args.quick else (args.rounds, 1)
    every: list[Row] = []
    found: dict[str, Any] = {}
    limits_found = []
    for threads in args.threads:
        limits = measure(threads)
        with Field(kinds(threads, args.also), threads) as field:
            rows = [row for path in paths for row in measured(field, path, step, rounds, limits)]
        title = f"{threads} threads; peak {limits.flops / 1e9:.0f} GFLOP/s, {limits.bandwidth / 1e9:.1f} GB/s"
        show(rows, title, limits)
        for model in dict.fromkeys(r["case"] for r in rows):
            of_model = [r for r in rows if r["case"] == model]
            print(f"{model}: {geomean(of_model):.3f}x onnxruntime, gap closed {clipped(of_model):.2f}")
        found[f"{threads} threads"] = summary(rows)
        show_summary(found[f"{threads} threads"])
        every += rows
        limits_found.append(vars(limits))

    whole = not args.quick and tuple(args.models) == MODELS
    folder = record.RESULTS if whole else record.SCRATCH
    path = record.save("cpu_models", folder=folder, rounds=rounds, limits=limits_found, summary=found, rows=every)
    print(f"written: {path.relative_to(record.RESULTS.parent.parent)}")
    plot.draw(path)


if __name__ == "__main__":
    main()
