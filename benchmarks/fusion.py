"""Kernels and bytes moved after each fusion pass: what every pass is good for.

usage: python -m benchmarks.fusion MODEL.onnx | FOLDER ... [--shape B=1,L=128] [--gemms] [--save NAME]

For each model the passes are added one after another, from none to all: those that remove views first, since views are
what other rewritings leave behind, then all others in the order of the pipeline. ``kernels``: launches. ``MB``:
distinct bytes read and written, launch by launch, of each tensor no more than the loads can touch. ``GEMMs``: kernels
around a sum of products. Works on the fusion plan: nothing is compiled. Without ``--shape`` the last stored shape is
taken. For transformers the kernels of a layer and outside of layers are counted too (what the first layer has
more than the others counts as outside). ``--gemms``: also the GEMMs with attention off, before and after merging.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import record
from benchmarks.models.inputs import shapes
from polydyn.cli.inputs import sizes
from polydyn.fusion.pipeline import FUSION, PASSES, fusion_plan, rewrite_graph
from polydyn.fusion.plan import FusionPlan
from polydyn.fusion.traffic import bytes_at
from polydyn.graph.expand import import_model
from polydyn.graph.ir import Graph
from polydyn.program.explain import text_table

LAYER = re.compile(r"/(?:layer|block|h|layers|albert_layers)\.(\d+)/")

ON_PLANS = [p for p in PASSES if (p.graph or p.groups or p.join) and not p.cuda]
ADDED = tuple(p.name for p in sorted(ON_PLANS, key=lambda p: not (p in FUSION and p.graph)))


@dataclass(frozen=True)
class Row:
    """One line: after which pass, launches, kernels around sums of products, bytes moved."""

    after: str
    kernels: int
    gemms: int
    bytes: int


def plan_without(graph: Graph, off: Collection[str]) -> FusionPlan:
    """The fusion plan of an imported graph without some passes."""
    return fusion_plan(rewrite_graph(graph, off), off)


def table(graph: Graph, shape: Mapping[str, int]) -> list[Row]:
    """A row for no pass at all, then one for each pass added in order."""
    return [row_without(graph, ADDED[k:], shape, after) for k, after in enumerate(("nothing", *ADDED))]


def row_without(graph: Graph, off: Collection[str], shape: Mapping[str, int], after: str = "") -> Row:
    """The row of a pipeline without some passes."""
    plan = plan_without(graph, off)
    return Row(after, len(plan.groups), gemms(plan), sum(bytes_at(plan, g, shape) for g in plan.groups))


def gemms(plan: FusionPlan) -> int:
    """Kernels around a sum of products; an attention does two."""
    return sum({"contract": 1, "attention": 2}.get(g.kind, 0) for g in plan.groups)


def layers(plan: FusionPlan) -> tuple[int, int] | None:
    """(kernels of a layer, kernels outside of layers) of a transformer, by the names that exporters give to nodes.

    None where the names do not tell layers apart (ALBERT's share theirs with their weights).
    """
    if not any(g.kind == "attention" for g in plan.groups):
        return None
    where: Counter[str] = Counter()
    for g in plan.groups:
        names = [m.group(1) for n in g.nodes for m in [LAYER.search(n.origin)] if m]
        where[names[0] if names else ""] += 1
    inside = [count for layer, count in where.items() if layer]
    return (min(inside), len(plan.groups) - min(inside) * len(inside)) if len(inside) > 1 else None


def measure(path: Path, shape: Mapping[str, int], count_gemms: bool) -> dict[str, object]:
    """The table of one model, printed and as data."""
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
    """Prints a table for each model and writes them to benchmarks/results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--shape", type=sizes, help="sizes of the dims, as in B=1,L=128")
    parser.add_argument("--gemms", action="store_true", help="count GEMM kernels with attention off")
    parser.add_argument("--save", default="fusion", help="name of the file in benchmarks/results")
    args = parser.parse_args()
    paths = [p for m in args.models for p in (sorted(m.glob("*.onnx")) if m.is_dir() else [m])]
    results = [measure(p, args.shape or shapes(p.stem)[-1], args.gemms) for p in paths]
    print(f"written: {record.save(args.save, models=results).name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
