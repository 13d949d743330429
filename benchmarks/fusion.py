"""Kernels and bytes moved after each fusion pass: the gain of every pass.

usage: python -m benchmarks.fusion MODEL.onnx | FOLDER ... [--shape B=1,L=128] [--gemms] [--save NAME]

For each model the passes are added one after another, from none to all: first the passes that remove views, because
other rewritings leave views; then all others in the order of the pipeline. ``kernels``: launches. ``MB``: distinct
bytes read and written, launch by launch, of each tensor no more than the loads can touch. ``GEMMs``: kernels around a
sum of products. Works on the fusion plan: nothing is compiled. Without ``--shape`` the last stored shape is used. For
transformers the kernels per layer and outside of layers are counted too (extra kernels of the first layer count as
outside). ``--gemms``: also the GEMMs with attention off, before and after merging.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks import record
from polydyn.cli.parsing import sizes
from polydyn.graph.expand import import_model
from polydyn.runtime.explain import text_table
from polydyn.testing.inputs import shapes
from polydyn.testing.plans import Row, gemms, layers, plan_without, table


def measure(path: Path, shape: Mapping[str, int], count_gemms: bool) -> dict[str, object]:
    """Print the table of one model and return it as data."""
    graph = import_model(path)
    rows = table(graph, shape)
    print(f"{path.stem} at {', '.join(f'{k}={v}' for k, v in shape.items())}")
    print(text_table(("after pass", "", "kernels", "GEMMs", "MB"), _cells(rows)))
    out: dict[str, object] = {"model": path.stem, "shape": dict(shape), "rows": [asdict(r) for r in rows]}
    layers_of = layers(plan_without(graph, ()))
    if layers_of:
        out["kernels_per_layer"], out["kernels_outside"] = layers_of
        print(f"kernels of a layer: {layers_of[0]}, outside of layers: {layers_of[1]}")
    if count_gemms:
        apart = ("attention", "merge", "batch")
        before, after = gemms(plan_without(graph, apart)), gemms(plan_without(graph, apart[:1]))
        out["gemms_unmerged"], out["gemms_merged"] = before, after
        print(f"GEMM kernels with attention off: {before} before merging, {after} after")
    print(flush=True)
    return out


def _cells(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    return [(r.after, "", str(r.kernels), str(r.gemms), f"{r.bytes / 1e6:.3f}") for r in rows]


def main() -> int:
    """Print a table for each model and write them to benchmarks/results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--shape", type=sizes, help="sizes of the dims, for example B=1,L=128")
    parser.add_argument("--gemms", action="store_true", help="count GEMM kernels with attention off")
    parser.add_argument("--save", default="fusion", help="name of the file in benchmarks/results")
    args = parser.parse_args()
    paths = [p for m in args.models for p in (sorted(m.glob("*.onnx")) if m.is_dir() else [m])]
    results = [measure(p, args.shape or shapes(p.stem)[-1], args.gemms) for p in paths]
    print(f"written: {record.save(args.save, models=results).name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
