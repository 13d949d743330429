"""Coverage of a campaign: operators with their types and kernel families, families by target, passes, cells.

A row is a tuple whose first word is its kind; a ``Counter`` has the number of models that reached it. ``kernel`` rows
are made from the groups of each plan: (operator, type, family, target). ``node`` rows: (operator, version, type) of
nodes whose model compiled. ``pass`` rows: passes that changed a graph or its groups. ``cell`` rows: (dimension, value).
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import onnx
from onnx import helper

import polydyn.compiler as compiler
from polydyn.backends import launches
from polydyn.backends.base import Kernels
from polydyn.fusion.pipeline import PASSES
from polydyn.graph.operators.registry import OPERATORS
from polydyn.graph.propagate import load_operators
from polydyn.testing.operator_cases import LEFT_OUT

Row = tuple[str, ...]
FAMILIES: Mapping[str, tuple[str, ...]] = {
    "cpu": ("contract", "few", "dot", "matrix", "window", "turned", "split", "nest", "attention", "serial", "order",
            "written"),
    "cuda": ("contract", "nest", "attention"),
}  # fmt: skip
"""Kind of target -> the first word of the names of its kernels."""
NAME = re.compile(r"[A-Za-z0-9]+")


def family(kernel: str) -> str:
    """Return the family of a kernel by its name."""
    return kernel.partition("_")[0]


@contextmanager
def kernels_counted(into: Counter[Row], target: str) -> Iterator[None]:
    """Count the families of kernels of the plans that are made inside, with the operators and types of their groups."""
    plan = getattr(compiler, "host_plan", launches.host_plan)  # others may have replaced it already

    def counted(graph: Any, kernels: Kernels, *more: Any) -> Any:
        into.update(set(_kernels(kernels, target)))
        return plan(graph, kernels, *more)

    with mock.patch.object(compiler, "host_plan", counted):
        yield


def _kernels(kernels: Kernels, target: str) -> Iterator[Row]:
    tensors = kernels.plan.graph.tensors
    for placed in kernels.placed:
        for n in placed.fused.nodes:
            dtype = tensors[n.output].dtype if n.output in tensors else "?"
            found = NAME.match(n.origin or "?")
            for k in placed.kernels:
                yield ("kernel", found[0] if found else "?", dtype, family(k.name), target)


def nodes_of(model: onnx.ModelProto) -> set[Row]:
    """Return the rows of the nodes of a model, outside of bodies."""
    opset = next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), 1)
    try:
        inferred = onnx.shape_inference.infer_shapes(model).graph
    except Exception:  # the types that the model declares are what is left
        inferred = model.graph
    values = (*inferred.value_info, *inferred.input, *inferred.output)
    types = {v.name: v.type.tensor_type.elem_type for v in values} | {c.name: c.data_type for c in inferred.initializer}
    rows: set[Row] = set()
    for n in model.graph.node:
        known = next((types[x] for x in (*n.input, *n.output) if types.get(x)), 0)
        dtype = str(helper.tensor_dtype_to_np_dtype(known)) if known else "?"
        rows.add(("node", n.op_type, str(_version(n, opset)), dtype))
    return rows


def _version(node: onnx.NodeProto, opset: int) -> int:
    try:
        return int(onnx.defs.get_schema(node.op_type, opset, node.domain).since_version)
    except onnx.defs.SchemaError:
        return 0


class Coverage:
    """The table of a campaign."""

    def __init__(self, reached: Mapping[Row, int]) -> None:
        self.reached = reached

    def _kind(self, kind: str) -> list[tuple[Row, int]]:
        return [(row[1:], n) for row, n in sorted(self.reached.items()) if row[0] == kind]

    def _sums(self, kind: str, *columns: int) -> Counter[Row]:
        sums: Counter[Row] = Counter()
        for row, n in self._kind(kind):
            sums[tuple(row[c] for c in columns)] += n
        return sums

    def never(self) -> dict[str, list[str]]:
        """Return what was never reached: operators with rules here, families of kernels, passes."""
        operators = {name for name, *_ in (row for row, _ in self._kind("node"))}
        load_operators()
        known = {name for name in OPERATORS if "::" not in name}
        families = {(t.partition(":")[0], f) for f, t in self._sums("kernel", 2, 3)}
        passes = {name for name, *_ in (row for row, _ in self._kind("pass"))}
        return {
            "operators": sorted(known - operators - LEFT_OUT),
            "operators that no generator makes": sorted((known & LEFT_OUT) - operators),
            "kernel families": [f"{f} ({t})" for t, every in FAMILIES.items() for f in every if (t, f) not in families],
            "passes": [p.name for p in PASSES if _changes(p) and p.name not in passes],
        }

    def to_json(self) -> dict[str, Any]:
        """Return all rows and what was never reached, as plain data."""
        kinds = sorted({row[0] for row in self.reached})
        return {"never reached": self.never(), **{k: [[*row, n] for row, n in self._kind(k)] for k in kinds}}

    def to_markdown(self) -> str:
        """Return the tables as text."""
        families: dict[str, Counter[str]] = defaultdict(Counter)
        for (operator, _, name, _), n in self._kind("kernel"):
            families[operator][name] += n
        types: dict[str, Counter[str]] = defaultdict(Counter)
        versions: dict[str, set[int]] = defaultdict(set)
        for (operator, version, dtype), n in self._kind("node"):
            types[operator][dtype] += n
            versions[operator].add(int(version))
        rows = [
            (name, sum(types[name].values()), _numbers(versions[name]), _counts(types[name]), _counts(families[name]))
            for name in sorted(types)
        ]
        targets: dict[str, Counter[str]] = defaultdict(Counter)
        for (name, target), n in self._sums("kernel", 2, 3).items():
            targets[name][target] += n
        lines = [*_table(("operator", "models", "versions", "types", "kernel families"), rows), ""]
        lines += [*_table(("kernel family", "targets"), [(f, _counts(c)) for f, c in sorted(targets.items())]), ""]
        lines += [*_table(("pass", "changed models"), [(row[0], n) for row, n in self._kind("pass")]), ""]
        lines += [*_table(("cell", "models"), [(f"{row[0]}={row[1]}", n) for row, n in self._kind("cell")]), ""]
        never = [(what, len(names), ", ".join(names) or "none") for what, names in self.never().items()]
        return "\n".join([*lines, *_table(("never reached", "number", "names"), never)]) + "\n"


def _changes(p: Any) -> bool:
    return bool(p.graph or p.groups or p.join)


def _counts(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {n}" for name, n in counts.most_common())


def _numbers(versions: set[int]) -> str:
    return " ".join(map(str, sorted(versions)))


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    line: Callable[[Sequence[Any]], str] = lambda cells: "| " + " | ".join(map(str, cells)) + " |"  # noqa: E731
    return [line(head), line(["---"] * len(head)), *map(line, rows)]
