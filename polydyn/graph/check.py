"""Check names and nodes against the ONNX specification before any operator's rule runs.

The rules of operators may then rely on inputs, attributes and their types. Operators without an onnx schema are left to
the registry, which reports all unknown ones together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import onnx
import onnx.defs

from polydyn.errors import PLACES, ModelError, PolydynError, failed_plan
from polydyn.graph.operators.registry import OnnxNode
from polydyn.schedules.expr import DTYPES, FLOATS

_CHECKER = "onnx.checker.check_model(model, full_check=True) says more; export the model again"
_TYPES: Mapping[Any, tuple[type, ...]] = {
    onnx.defs.OpSchema.AttrType.INT: (int,),
    onnx.defs.OpSchema.AttrType.FLOAT: (float,),
    onnx.defs.OpSchema.AttrType.STRING: (str,),
    onnx.defs.OpSchema.AttrType.TENSOR: (np.ndarray,),
    onnx.defs.OpSchema.AttrType.INTS: (tuple,),
    onnx.defs.OpSchema.AttrType.FLOATS: (tuple,),
    onnx.defs.OpSchema.AttrType.STRINGS: (tuple,),
}
"""Python types of imported attributes."""


@dataclass(frozen=True)
class _Formal:
    """An input of an operator. ``variable`` names a type that several inputs share, ``kinds`` the allowed kinds."""

    name: str
    required: bool
    variable: str
    kinds: frozenset[str]


@dataclass(frozen=True)
class _Schema:
    inputs: tuple[_Formal, ...]
    input_counts: tuple[int, int]
    output_counts: tuple[int, int]
    types: Mapping[str, tuple[type, ...]]
    required: tuple[str, ...]


def check_names(graph: onnx.GraphProto, *, outputs: bool) -> None:
    """Check that inputs, initializers (and outputs) have names, else ModelError. Those of inputs and of initializers
    are unique; the same tensor may be listed as two outputs.
    """
    check_text(graph.name, "the graph")
    initializers = [*graph.initializer, *(t.values for t in graph.sparse_initializer)]
    groups: dict[str, Iterable[Any]] = {"input": graph.input, "initializer": initializers}
    for kind, values in (groups | {"output": graph.output} if outputs else groups).items():
        seen: set[str] = set()
        for v in values:
            check_text(v.name, f"an {kind}")
            if not v.name or (v.name in seen and kind != "output"):
                why = f"the {kind} {v.name} is there twice" if v.name else f"an {kind} has no name"
                raise ModelError(why, tensor=v.name or None, rule="every tensor has one name", remedy=_CHECKER)
            seen.add(v.name)


def check_text(name: object, subject: str) -> None:
    """Raise ModelError for a name that is not text. Protobuf returns bytes for invalid UTF-8."""
    if not isinstance(name, str):
        raise ModelError(f"the name of {subject} is not text: {name!r}", remedy="the file is damaged; export it again")


def check_node(node: OnnxNode) -> None:
    """Raise ModelError unless a node has the inputs, outputs and attributes that ONNX defines for its operator."""
    schema = _schema(node.op, node.opset)
    if schema is None:
        return
    for kind, names, (low, high) in (
        ("inputs", node.inputs, schema.input_counts), ("outputs", node.outputs, schema.output_counts)
    ):  # fmt: skip
        if not low <= len(names) <= high:
            expected = str(low) if low == high else f"at least {low}" if high > 1 << 20 else f"{low} to {high}"
            raise _wrong(node, f"it has {len(names)} {kind}, {node.op} has {expected}")
    for i, name in enumerate(node.inputs):
        formal = schema.inputs[min(i, len(schema.inputs) - 1)]
        if not name and formal.required:
            raise _wrong(node, f"its input {i} ({formal.name}) is absent, but not optional")
    for name in schema.required:
        if name not in node.attributes:
            raise _wrong(node, f"its attribute {name} is missing")
    for name, value in node.attributes.items():
        if name in schema.types and not isinstance(value, schema.types[name]):
            raise _wrong(node, f"its attribute {name} is a {type(value).__name__}: {value!r:.60}")


def check_types(node: OnnxNode, dtypes: Mapping[str, str]) -> None:
    """Raise ModelError unless the types of a node's inputs are of kinds that ONNX allows and agree where required.

    Kinds are floats, integers, booleans. Within a kind any type is accepted in every opset, because later opsets allow
    more types.
    """
    schema = _schema(node.op, node.opset)
    if schema is None:
        return
    seen: dict[str, str] = {}
    for i, name in enumerate(node.inputs):
        if not name:
            continue
        formal = schema.inputs[min(i, len(schema.inputs) - 1)]
        dtype = dtypes[name]
        if formal.kinds and _kind(dtype) not in formal.kinds:
            raise _wrong(node, f"its input {name} is {dtype}, {node.op} takes {' or '.join(sorted(formal.kinds))}")
        first = seen.setdefault(formal.variable, name) if formal.variable else name
        if dtypes[first] != dtype:
            raise _wrong(node, f"its inputs {first} and {name} are {dtypes[first]} and {dtype}, they must agree")


def with_node(problem: Exception, node: OnnxNode) -> PolydynError:
    """Return the exception of a node's rule as an error that names the node."""
    place = f"{node.name} ({node.op})"
    if not isinstance(problem, PolydynError):
        if isinstance(problem, RULE_FAILURES):
            return _rule_error(node, problem)
        return failed_plan(problem, "import", (place,))
    if problem.node is not None:
        return problem
    places: dict[str, Any] = {k: getattr(problem, k) for k in PLACES if k != "node"}
    lines = [line for line in str(problem).split("\n") if not line.startswith(tuple(f"  {k}: " for k in PLACES))]
    return type(problem)("\n".join(lines), node=place, **places)


def _rule_error(node: OnnxNode, problem: Exception) -> ModelError:
    """Return the error for a node whose inputs or attributes broke its operator's rule."""
    return ModelError(
        f"{node.op} cannot take its inputs and attributes: {type(problem).__name__}: {problem}",
        node=f"{node.name} ({node.op})",
        remedy="if onnx.checker.check_model(model, full_check=True) finds nothing wrong, this is a bug in polydyn",
    )


RULE_FAILURES = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""Exceptions that a rule raises for an unexpected rank, attribute or value."""


def _wrong(node: OnnxNode, reason: str) -> ModelError:
    rule = f"{node.op} of ONNX, opset {node.opset}"
    return ModelError(f"{node.op} {node.name}: {reason}", node=node.name, rule=rule, remedy=_CHECKER)


@lru_cache(maxsize=1024)
def _schema(op: str, opset: int) -> _Schema | None:
    """Return the onnx schema of an operator, or None if there is none."""
    try:
        domain, _, name = op.rpartition("::")
        schema = onnx.defs.get_schema(name, opset, domain)
    except onnx.defs.SchemaError:
        return None
    single = onnx.defs.OpSchema.FormalParameterOption.Optional
    inputs = tuple(
        _Formal(
            f.name,
            f.option != single,
            "" if f.type_str.startswith(("tensor(", "seq(", "optional(")) or not f.is_homogeneous else f.type_str,
            frozenset(map(_kind_of_type, f.types)),
        )
        for f in schema.inputs
    )
    return _Schema(
        inputs,
        (schema.min_input, schema.max_input),
        (schema.min_output, schema.max_output),
        {name: _TYPES[a.type] for name, a in schema.attributes.items() if a.type in _TYPES},
        tuple(name for name, a in schema.attributes.items() if a.required),
    )


def _kind(dtype: str) -> str:
    return "floats" if dtype in FLOATS else "booleans" if dtype == "bool" else "integers"


def _kind_of_type(text: str) -> str:
    """Return the kind of ``tensor(float16)`` and similar types. A type that is not a numeric tensor is its own kind."""
    inner = text.removeprefix("tensor(").removesuffix(")")
    if inner == "bool":
        return "booleans"
    if inner.startswith(("float", "double", "bfloat")):
        return "floats"
    return "integers" if inner.startswith(("int", "uint")) else text


def type_name(text: str) -> str:
    """Return the dtype of ``tensor(double)`` and similar types, or "" for unsupported types."""
    inner = text.removeprefix("tensor(").removesuffix(")")
    known = {"float": "float32", "double": "float64", "float8e4m3fn": "float8_e4m3fn", "float8e5m2": "float8_e5m2"}
    name = known.get(inner, inner)
    return name if name in DTYPES else ""
