"""Distances to float64 of polydyn and of ONNX Runtime: models at stored shapes, and kernels by family.

usage: python -m benchmarks.numerics [MODEL.onnx | FOLDER ...] [--shapes K ...] [--families] [--only WORD ...]
                                   [--record]

The same model with doubles in place of floats (``benchmarks/exact.py``, ONNX's reference) is exact beside both. For
each model and family: the largest and the mean difference over the largest value of an output, the ratio of the means
(polydyn's over ONNX Runtime's, below 1 if polydyn is nearer), and the share of elements by ulp of the exact value.
Models run at all eight stored shapes, or at those of the numbers ``--shapes`` (0 to 7; float64 is slow).
``--families``: the float32 cases of ``benchmarks/single`` by family; ``--only`` selects them by name. The exit code is
1 if a model's ratio exceeds LIMIT or the geometric mean of the ratios of models exceeds 1. ``--record``: results go to
benchmarks/results/numerics.json.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from benchmarks import record
from benchmarks.exact import in_float64
from benchmarks.single.__main__ import selected
from benchmarks.single.case import Case
from benchmarks.single.measure import runtime
from polydyn.testing.accuracy import ULP, Distance, distance
from polydyn.testing.inputs import feeds, shapes

LIMIT = 1.5
"""Largest ratio of the mean errors of a model."""
FAMILIES: Mapping[str, tuple[str, ...]] = {
    "product": ("MatMul", "Gemm f32", "Einsum", "linear"),
    "convolution": ("Conv ", "ConvTranspose"),
    "attention": ("attention written", "Attention", "masked softmax"),
    "softmax": ("Softmax", "softmax written", "log-sum-exp"),
    "norm": ("norm", "Normalization"),
    "reduction": ("Reduce", "variance", "GlobalAveragePool", "AveragePool"),
    "cumulative sum": ("CumSum", "CumProd"),
    "GELU": ("Gelu", "GELU"),
    "recurrence": ("LSTM", "GRU", "RNN"),
    "resize": ("Resize linear", "Resize cubic"),
    "transform": ("DFT", "STFT"),
    "Exp, Log": ("Exp f32", "Log f32", "Softplus", "Mish"),
    "Tanh, Sigmoid": ("Tanh f32", "Sigmoid f32", "Sinh", "Cosh", "Atanh", "Asinh", "Acosh"),
    "Erf": ("Erf f32",),
    "Sin, Cos": ("Sin f32", "Cos f32", "Tan f32", "Asin f32", "Acos f32", "Atan f32"),
    "Pow, Sqrt": ("Pow", "Sqrt", "Reciprocal"),
    "arithmetic": ("Add same", "Sub same", "Mul same", "Div same", "Mean of"),
}
"""Words in the names of the cases of each family; the first family that fits has the case."""


def three(model: onnx.ModelProto, program: Any, session: Any, given: Mapping[str, Any]) -> list[Distance | None]:
    """Return the distances of polydyn and of ONNX Runtime to the model in float64."""
    names = [o.name for o in session.get_outputs()]
    theirs = dict(zip(names, session.run(None, dict(given)), strict=True))
    exact = dict(zip(names, (np.asarray(x) for x in in_float64(model, given)), strict=True))
    ours = {n: np.asarray(x) for n, x in program.run(dict(given)).items()}
    return [distance(ours, exact), distance(theirs, exact)]


def combined(found: Sequence[Sequence[Distance | None]]) -> dict[str, Any]:
    """Return one row from the distances of several calls: the largest, the mean of means, sums of counts."""
    row: dict[str, Any] = {"calls": len(found)}
    for who, each in zip(("polydyn", "onnxruntime"), zip(*found, strict=True), strict=True):
        good = [d for d in each if d]
        ulp = np.sum([d.ulp for d in good], axis=0)
        row[who] = {
            "largest": max(d.largest for d in good),
            "mean": sum(d.mean for d in good) / len(good),
            "ulp": [int(n) for n in ulp],
        }
    ours, theirs = row["polydyn"]["mean"], row["onnxruntime"]["mean"]
    return row | {"ratio": ours / theirs if theirs else (1.0 if not ours else math.inf)}


def of_model(path: Path, numbers: Sequence[int]) -> dict[str, Any]:
    """Return the row of a model at its stored shapes of these numbers."""
    import polydyn

    model = onnx.load(path)
    program, session = polydyn.compile(str(path), threads=1), runtime(model)
    chosen = [shapes(path.stem)[k] for k in numbers]
    found = [three(model, program, session, feeds(model, s)) for s in chosen]
    if not all(all(pair) for pair in found):
        raise ValueError("a shape differs, or a float is not finite where the exact one is")
    return combined(found) | {"shapes": [dict(s) for s in chosen]}


def family_of(case: Case) -> str:
    """Return the family of a case, or "" for none."""
    return next((f for f, words in FAMILIES.items() if any(w in case.name for w in words)), "")


def of_case(case: Case) -> list[Distance | None] | None:
    """Return the distances of a case at its second sizes, or None if one of the three does not run it."""
    import polydyn

    model, given = case.model(), case.feeds(case.sizes[min(1, len(case.sizes) - 1)])
    try:
        found = three(model, polydyn.compile(model, threads=1), runtime(model), given)
    except Exception as e:  # of many classes: ONNX's reference or ONNX Runtime lacks it in this form
        print(f"  {case.name}: {type(e).__name__}: {str(e).splitlines()[0][:120]}", flush=True)
        return None
    return found if all(found) else None


def families(words: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a row for each family of kernels, with the worst case by ratio."""
    kinds: dict[str, list[Case]] = defaultdict(list)
    for case in selected(words, ["f32"]):
        kinds[family_of(case)].append(case)
    for name in FAMILIES:
        pairs = [(c.name, d) for c in kinds[name] if (d := of_case(c))]
        if pairs:
            worst = max(((combined([d])["ratio"], n) for n, d in pairs))
            yield name, combined([d for _, d in pairs]) | {"worst": worst[1], "worst_ratio": worst[0]}


def line(name: str, row: Mapping[str, Any]) -> str:
    """Return a row of the table."""
    parts = []
    for who in ("polydyn", "onnxruntime"):
        r = row[who]
        share = " ".join(f"{100 * n / max(1, sum(r['ulp'])):5.1f}" for n in r["ulp"])
        parts.append(f"{r['largest']:.1e} {r['mean']:.1e} | {share} |")
    worst = f" worst: {row['worst']} {row['worst_ratio']:.2f}" if "worst" in row else ""
    return f"{name:22} {row['ratio']:6.2f} | {' '.join(parts)}{worst}"


def main() -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--shapes", nargs="+", type=int, default=range(8), metavar="K")
    parser.add_argument("--families", action="store_true")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD")
    parser.add_argument("--record", action="store_true")
    args = parser.parse_args()
    paths = [p for m in args.models for p in (sorted(Path(m).glob("*.onnx")) if Path(m).is_dir() else [Path(m)])]
    results = record.Results("numerics", record.RESULTS if args.record else record.SCRATCH)
    limits = " ".join(f"<={x:<3g}" for x in ULP[:-1])
    print(f"ratio of the means; each: largest, mean, then % of elements by ulp: {limits} more; polydyn | ONNX Runtime")
    ratios = []
    for path in paths:
        try:
            row = of_model(path, args.shapes)
        except Exception as e:  # of many classes: ONNX's reference lacks an operator
            print(f"{path.stem:22} no distance: {type(e).__name__}: {str(e).splitlines()[0][:150]}", flush=True)
            continue
        ratios.append(row["ratio"])
        print(line(path.stem, row), flush=True)
        results.add(path.stem, 1, [row])
    for name, row in families(args.only) if args.families else ():
        print(line(name, row), flush=True)
        results.add(f"family {name}", 1, [row])
    if not ratios:
        return 0
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    print(f"{len(ratios)} models: ratios {min(ratios):.2f} to {max(ratios):.2f}, geometric mean {mean:.3f}")
    return int(max(ratios) > LIMIT or mean > 1)


if __name__ == "__main__":
    sys.exit(main())
