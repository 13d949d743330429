"""Times whole models on the CPU: models x shapes x threads, compared with ONNX Runtime and PyTorch.

usage: python -m benchmarks.cpu_all FOLDER | MODEL.onnx ... [--shapes B=1,L=8 ...] [--threads 1 2] [--rounds N]
                                    [--seconds S] [--also torch-inductor openvino] [--quick]

FOLDER stands for its bert_base, albert_base, gpt2, t5_small (encoder) and vit_base (``make models`` writes them).
Dynamic dims: B and L of text models, N of vit_base, all in one compilation, at the sizes of STANDARD; other models run
at their stored shapes (polydyn/testing/inputs.py) or at the sizes of ``--shapes``. Masks hold zeros if they are long
enough. On two or more threads ONNX Runtime runs with its spinning pool and without, and the faster counts. PyTorch runs
the module that the ONNX file was exported from, eager; models without one do not run in PyTorch. ``--also
torch-inductor`` adds torch.compile(dynamic=True), which compiles for a minute or two; ``--also openvino`` adds OpenVINO
in fp32 (pip install openvino). Contestants that do not support a model or a shape are named below the table. The limit
is computed by benchmarks/bound.py.

A case takes at most nine rounds and at most ``--seconds`` of measurements (10), but at least three rounds. After every
model benchmarks/results/cpu_models.json is written; a new measurement of a model on a number of threads replaces the
earlier one. With ``--quick`` (three rounds, every third shape), ``--shapes``, or a model that STANDARD does not list,
benchmarks/out/results/cpu_models.json is written instead. A plot is written next to the file at the end.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks import arguments, record, report
from benchmarks.bound import bound, products
from benchmarks.limits import Limits, measure
from benchmarks.rows import Effort, Field, Row, progress
from polydyn.testing.inputs import Shape, shapes

TEXT = [{"B": b, "L": n} for b, n in ((1, 1), (1, 8), (1, 32), (1, 61), (1, 128), (4, 61), (8, 128), (2, 509))]
PHOTOS = [{"N": 1, "H": h, "W": w} for h, w in ((224, 224), (193, 257))]
MODELS = ("bert_base", "albert_base", "gpt2", "t5_small", "vit_base")
STANDARD: dict[str, Sequence[Shape]] = {
    **dict.fromkeys(MODELS[:4], TEXT),
    "vit_base": [{"N": 1}, {"N": 3}],
    "resnet50": PHOTOS,
}
"""The sizes at which models are compared."""


def paths_of(arguments: Sequence[Path]) -> list[Path]:
    """Return model files, each folder replaced by its MODELS. FileNotFoundError names missing files."""
    paths = [f for p in arguments for f in ([p / f"{name}.onnx" for name in MODELS] if p.is_dir() else [p])]
    if missing := [str(p) for p in paths if not p.exists()]:
        raise FileNotFoundError(f"missing: {', '.join(missing)}; make models writes the models of the zoo")
    return paths


def shapes_of(model: str, requested: Sequence[Shape] | None) -> Sequence[Shape]:
    """Return the sizes at which a model is run. KeyError: none are stored for it."""
    return requested or STANDARD.get(model) or shapes(model)


def measured(field: Field, path: Path, at: Sequence[Shape], effort: Effort, limits: Limits) -> Iterator[Row]:
    """Yield one row per shape of one loaded model."""
    for shape in at:
        least, flops = bound(str(path), shape, limits), sum(p[0] for p in products(str(path), shape))
        row = field.measure(shape, effort, least, flops)
        row |= {"case": path.stem, "family": path.stem}
        progress(row)
        yield row


def main() -> None:
    """See the module's docstring."""
    parser = arguments.parser(__doc__, seconds=10)
    parser.add_argument("models", nargs="+", type=Path, metavar="FOLDER | MODEL.onnx")
    parser.add_argument("--shapes", nargs="+", type=arguments.parse_shape, metavar="B=1,L=8")
    args = parser.parse_args()
    try:
        plan = [(p, shapes_of(p.stem, args.shapes)) for p in paths_of(args.models)]
    except (FileNotFoundError, KeyError) as problem:
        parser.error(f"{problem.args[0]}; sizes may be given, as in --shapes B=1,L=8")

    written: list[Path] = []
    for threads in args.threads:
        written += run(plan, threads, args)
    arguments.finish(written)


def run(plan: Sequence[tuple[Path, Sequence[Shape]]], threads: int, args: argparse.Namespace) -> list[Path]:
    """Measure every model on one number of threads and write each one; then print the table."""
    limits = measure(threads, caches=True)
    rows: list[Row] = []
    written: list[Path] = []
    effort, step = arguments.effort(args), 3 if args.quick else 1
    with Field(arguments.rivals(threads, args.also, "torch"), threads) as field:
        for path, at in plan:
            limits = limits.or_better(measure(threads, caches=True))
            field.load(path)
            ready = ", ".join(f"{n} {p.seconds_to_load:.1f} s" for n, p in field.players.items())
            print(f"{path.stem}, {threads} threads, loaded: {ready}", flush=True)
            of_model = list(measured(field, path, at[::step], effort, limits))
            keep = not args.quick and not args.shapes and path.stem in STANDARD
            results = record.Results("cpu_models", record.RESULTS if keep else record.SCRATCH)
            results.add(path.stem, threads, of_model, limits=vars(limits), **field.about())
            written.append(results.path)
            rows += of_model
    report.show_all(rows, "models", limits)
    return written


if __name__ == "__main__":
    main()
