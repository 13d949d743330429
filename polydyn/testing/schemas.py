"""Walk over ONNX's schemas: every operator, version, type and attribute must be right, or rejected by name.

Run: ``python -m polydyn.testing.schemas [operator ...] [--share 20] [--seed 0]``. Models are derived from ONNX's node
cases: the same node in every version that its inputs and attributes fit, in every type that the version allows, with
each attribute at its default and at other values. Nothing is compiled: they are imported and evaluated in numpy. A
right result equals ONNX's reference evaluator, or ONNX Runtime, in the types of ONNX's inference; if both fail,
anything except an internal error is right. ``--share``: run one model of this many, chosen by the seed.
"""

from __future__ import annotations

import argparse
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import onnx
import onnx.defs
import onnx.shape_inference
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from polydyn.errors import PolydynError
from polydyn.graph.check import type_name
from polydyn.graph.dtypes import numpy_dtype
from polydyn.testing.conformance import MADE_OF_SIZES, as_array, by_reference, cases, decided

Array = Any
Schema = Any
RANDOM = {
    "Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Dropout",
}  # fmt: skip
"""Operators whose numbers come from a random generator."""
SEEDS = 3
"""Number of node cases per operator, the ones with the fewest elements."""
MAX_CASE_ELEMENTS = 4096
"""Cases with more elements are left out."""


@dataclass(frozen=True)
class Model:
    """A model of one node, its feeds, and its name in errors."""

    proto: onnx.ModelProto
    feeds: Mapping[str, Array]
    name: str


@cache
def seeds() -> dict[str, list[Any]]:
    """Map each operator to its smallest node cases of one node, of tensors only."""
    found: dict[str, list[tuple[int, str, Any]]] = {}
    for case in cases():
        nodes = case.model.graph.node
        arrays = [as_array(x) for x in case.data_sets[0][0]]
        if len(nodes) != 1 or len(case.data_sets) != 1 or any(a is None or a.dtype == object for a in arrays):
            continue
        size = sum(a.size for a in arrays)
        if size <= MAX_CASE_ELEMENTS and nodes[0].op_type not in RANDOM and not decided(case):
            key = f"{nodes[0].domain}::{nodes[0].op_type}" if nodes[0].domain else nodes[0].op_type
            found.setdefault(key, []).append((size, case.name, case))
    return {op: [c for _, _, c in sorted(some, key=lambda x: x[:2])[:SEEDS]] for op, some in found.items()}


@cache
def versions(op: str) -> list[Schema]:
    """Return all schemas of an operator, oldest first."""
    domain, _, name = op.rpartition("::")
    every = onnx.defs.get_all_schemas_with_history()
    return sorted((s for s in every if (s.domain, s.name) == (domain, name)), key=lambda s: s.since_version)


def models(op: str, chosen: Callable[[], bool] = lambda: True) -> Iterator[Model]:
    """Yield the models of one operator that ``chosen`` selects."""
    for case in seeds().get(op, []):
        (node,) = case.model.graph.node
        names = [x.name for x in case.model.graph.input]
        feeds = dict(zip(names, map(as_array, case.data_sets[0][0]), strict=True))
        for schema in versions(op):
            fitted = _fitted(node, schema, feeds)
            if fitted is None:
                continue
            older, left = fitted
            place, kinds = f"{op}-{schema.since_version} of {case.name}", _types(older, schema, left)
            for kind in (k for k in kinds if chosen()):
                typed = {n: _as(x, kind) if n in _inputs_of_same_type(older, schema) else x for n, x in left.items()}
                yield _model(older, schema, typed, f"{place} in {kind}")
            for changed, what in (c for c in _changed(older, schema) if chosen()) if kinds else ():
                yield _model(changed, schema, left, f"{place} with {what}")


def _fitted(
    node: onnx.NodeProto, schema: Schema, feeds: Mapping[str, Array]
) -> tuple[onnx.NodeProto, dict[str, Array]] | None:
    """Return the node in the form of a version, or None if that version has no such node.

    Inputs that were attributes in that version become attributes.
    """
    out, left = onnx.NodeProto(), dict(feeds)
    out.CopyFrom(node)
    for position, name in reversed(list(enumerate(node.input))):
        if position < len(schema.inputs) or (schema.inputs and _is_variadic(schema.inputs[-1])):
            continue
        newest = versions(f"{node.domain}::{node.op_type}" if node.domain else node.op_type)[-1]
        formal = newest.inputs[min(position, len(newest.inputs) - 1)].name.lower()
        del out.input[position]
        if not name:
            continue
        if formal not in schema.attributes or name not in left:
            return None
        value = left.pop(name)
        integer = schema.attributes[formal].type in (onnx.defs.OpSchema.AttrType.INT, onnx.defs.OpSchema.AttrType.INTS)
        numbers = [int(x) if integer else float(x) for x in value.reshape(-1)]
        single = schema.attributes[formal].type in (onnx.defs.OpSchema.AttrType.INT, onnx.defs.OpSchema.AttrType.FLOAT)
        if single and len(numbers) != 1:
            return None
        code = int(schema.attributes[formal].type.value)
        out.attribute.append(helper.make_attribute(formal, numbers[0] if single else numbers, attr_type=code))
    kept = [a for a in out.attribute if a.name in schema.attributes and a.type == schema.attributes[a.name].type.value]
    if len(kept) != len(out.attribute) or not schema.min_input <= len(out.input) <= schema.max_input:
        return None
    if any(a.required and name not in {k.name for k in kept} for name, a in schema.attributes.items()):
        return None
    return (out, left) if len(out.output) <= schema.max_output else None


def _is_variadic(formal: Any) -> bool:
    return bool(formal.option == onnx.defs.OpSchema.FormalParameterOption.Variadic)


def _formal(schema: Schema, position: int) -> Any:
    return schema.inputs[min(position, len(schema.inputs) - 1)]


def _inputs_of_same_type(node: onnx.NodeProto, schema: Schema) -> set[str]:
    """Return the inputs that share the first one's type."""
    first = _formal(schema, 0).type_str
    return {n for k, n in enumerate(node.input) if n and _formal(schema, k).type_str == first}


def _types(node: onnx.NodeProto, schema: Schema, feeds: Mapping[str, Array]) -> list[str]:
    """Return the types of the first input that the version allows, its own among them."""
    if not node.input or not node.input[0]:
        return ["its types"]
    found = {type_name(t) for t in _formal(schema, 0).types}
    own = str(feeds[node.input[0]].dtype)
    return sorted(t for t in found if t) if own in found else []


def _as(x: Array, kind: str) -> Array:
    if kind == "its types":
        return x
    if kind == "bool":
        return x > np.median(x) if x.size and x.dtype.kind != "b" else x.astype(bool)
    if kind.startswith("u") and x.dtype.kind in "if":
        x = np.abs(x)
    with np.errstate(all="ignore"):
        return np.asarray(x).astype(numpy_dtype(kind))


def _changed(node: onnx.NodeProto, schema: Schema) -> Iterator[tuple[onnx.NodeProto, str]]:
    """Yield the node with one attribute omitted, or at another value."""
    given = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    kinds = onnx.defs.OpSchema.AttrType
    for name, a in sorted(schema.attributes.items()):
        others: list[Any] = [None] if name in given and not a.required else []
        now = given.get(name, helper.get_attribute_value(a.default_value) if a.default_value.name else None)
        if a.type == kinds.INT and isinstance(now, int):
            others += [1 - now] if now in (0, 1) else [now - 1]
        elif a.type == kinds.FLOAT and isinstance(now, float):
            others.append(now / 2 + 0.25)
        elif a.type == kinds.INTS and now:
            others += [[now[0] + 1, *now[1:]], list(now)[::-1]]
        for value in others:
            out = onnx.NodeProto()
            out.CopyFrom(node)
            del out.attribute[:]
            out.attribute.extend(x for x in node.attribute if x.name != name)
            if value is not None:
                out.attribute.append(helper.make_attribute(name, value))
            yield out, f"{name}={'default' if value is None else value}"


def _model(node: onnx.NodeProto, schema: Schema, feeds: Mapping[str, Array], name: str) -> Model:
    """Build a model; axes, shapes and similar inputs are constants, as in shipped models, the first input is an input.
    """
    first = 0 if node.op_type in MADE_OF_SIZES else 1
    inputs = [n for n in dict.fromkeys(node.input) if n]
    constant = [
        n for k, n in enumerate(inputs)
        if (k >= first and feeds[n].ndim <= 1 and feeds[n].dtype.kind == "i") or n in ("scales", "roi", "depth")
    ]  # fmt: skip
    infos = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(feeds[n].dtype), feeds[n].shape)
        for n in inputs if n not in constant
    ]  # fmt: skip
    outputs = [helper.make_empty_tensor_value_info(o) for o in node.output if o]
    graph = helper.make_graph([node], "one", infos, outputs, [numpy_helper.from_array(feeds[n], n) for n in constant])
    opsets = [helper.make_opsetid(schema.domain, schema.since_version)]
    proto = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return Model(proto, {n: feeds[n] for n in inputs if n not in constant}, name)


# -- answers ---------------------------------------------------------------------------------------------------------


def verdict(model: Model) -> str:
    """Return ``right``, ``refused: ...``, ``nobody answers``, ``wrong: ...`` or ``internal: ...``."""
    try:
        got = by_reference(model.proto)(model.feeds)
    except PolydynError as e:
        said = " ".join(str(e).split())
        unforeseen = "a bug in polydyn" in said or not (e.node or e.tensor)
        return f"{'internal' if unforeseen else 'refused'}: {said[:200]}"
    except Exception as e:  # no caller should get these
        return f"internal: {type(e).__name__} {e}"[:200]
    types = _inferred(model.proto)
    why = []
    for ask in (_by_reference, _by_onnxruntime):
        if (wanted := ask(model)) is not None:
            pairs = zip(got.items(), wanted, strict=True)
            off = [f"{n} {d}" for (n, a), b in pairs if b is not None and (d := difference(a, b, types.get(n, "")))]
            if not off:
                return "right"
            why.append(off[0])
    return f"wrong: {why[0]}" if why else "nobody answers"


def _inferred(model: onnx.ModelProto) -> dict[str, str]:
    """Return the dtypes of outputs as ONNX infers them."""
    try:
        found = onnx.shape_inference.infer_shapes(model).graph.output
    except Exception:  # it has an opinion on more than types
        return {}
    types = {o.name: o.type.tensor_type.elem_type for o in found}
    return {n: str(helper.tensor_dtype_to_np_dtype(t)) for n, t in types.items() if t}


UNFIT = {("Softmax", 13), ("LogSoftmax", 13), ("Hardmax", 13)}
"""Operators that ONNX's reference gets wrong before an opset: it uses one axis, not all axes from it on."""


def _by_reference(model: Model) -> Sequence[Array] | None:
    op, opset = model.proto.graph.node[0].op_type, model.proto.opset_import[0].version
    if any(op == name and opset < first for name, first in UNFIT):
        return None
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        try:
            return list(ReferenceEvaluator(model.proto).run(None, dict(model.feeds)))
        except Exception:  # whatever its operators raise
            return None


def _by_onnxruntime(model: Model) -> Sequence[Array] | None:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(model.proto.SerializeToString(), options)
        return list(session.run(None, dict(model.feeds)))
    except Exception:  # it reports missing support in many ways
        return None


UNITS = {"float16": 2.0**-8, "bfloat16": 2.0**-5, "float32": 1e-4, "float64": 1e-4}


def difference(a: Array, b: Array, kind_of_onnx: str = "") -> str:
    """Return the difference of an answer from the authority's, or an empty string."""
    a, b = np.asarray(a), np.asarray(b)
    tolerance = max(UNITS.get(x.dtype.name, 0.0) for x in (a, b))
    if a.dtype != b.dtype and str(a.dtype) == kind_of_onnx:
        b = b.astype(a.dtype)
    if a.dtype != b.dtype or a.shape != b.shape:
        return f"is {a.dtype}{list(a.shape)}, not {b.dtype}{list(b.shape)}"
    kind: Any = np.float64 if tolerance or a.dtype.kind == "V" else a.dtype
    x, y = a.astype(kind), b.astype(kind)
    with np.errstate(all="ignore"):
        near = np.isclose(x, y, tolerance, tolerance, equal_nan=True) if kind is np.float64 else x == y
    if np.all(near):
        return ""
    return f"differs at {int((~near).sum())} of {near.size}: {x[~near].reshape(-1)[:3]}, not {y[~near].reshape(-1)[:3]}"


def walk(operators: Sequence[str] = (), share: int = 1, seed: int = 0) -> Iterator[tuple[str, str]]:
    """Yield (name of the model, verdict) of one model in ``share``."""
    numbers = np.random.default_rng(seed)
    for op in operators or sorted(seeds()):
        for model in models(op, lambda: bool(numbers.integers(share) == 0)):
            yield model.name, verdict(model)


def main() -> None:
    """Print errors and counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("operators", nargs="*")
    parser.add_argument("--share", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--refused", action="store_true", help="print rejections too")
    args = parser.parse_args()
    counts: Counter[str] = Counter()
    for name, said in walk(args.operators, args.share, args.seed):
        counts[said.split(":")[0]] += 1
        if said.startswith(("wrong", "internal")) or (args.refused and said.startswith("refused")):
            print(f"{name}: {said}", flush=True)
    print(dict(counts))


if __name__ == "__main__":
    main()
