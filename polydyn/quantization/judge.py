"""Run models to weigh errors: the mean squares of what products read, and the change of a model's outputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from polydyn.errors import InputError
from polydyn.graph.importer import LocatedModel, ModelLike
from polydyn.quantization.model_file import ModelFile
from polydyn.quantization.products import Product
from polydyn.runtime.program import Program
from polydyn.schedules.expr import Array

Feeds = Mapping[str, Any]
AXES_ARE_INPUTS = 13
"""Opset from which ReduceSum takes its axes as an input."""


def compiled(model: ModelLike) -> Program:
    """Compile a model without storing the program."""
    from polydyn.program_cache import compile as compile_model  # loads all passes

    return compile_model(model, cache=False)


def feeds_list(data: Iterable[Feeds] | Feeds, role: str) -> list[Feeds]:
    """Return calls as a list. InputError: there is none, or an element is not a mapping."""
    calls = [data] if isinstance(data, Mapping) else list(data)
    if not calls or not all(isinstance(x, Mapping) for x in calls):
        raise InputError(f"{role} has no inputs of a call", remedy="pass mappings from input names to arrays")
    return calls


def mean_squares(file: ModelFile, products: Sequence[Product], calls: Sequence[Feeds]) -> dict[str, Array]:
    """Return the mean square of each element of the rows that products of the main graph multiply, by tensor name.

    The float model runs once per call, compiled with these sums in place of its outputs.
    """
    rows = {p.node.input[0]: p.steps for p in products if p.scope.outer is None}
    if not rows:
        return {}
    proto = file.whole() if file.folder is None else onnx.ModelProto()
    if file.folder is not None:
        proto.CopyFrom(file.proto)
    del proto.graph.output[:]
    opset = next((o.version for o in proto.opset_import if o.domain in ("", "ai.onnx")), 1)
    taken = {x for n in proto.graph.node for x in (*n.input, *n.output)}
    first = "squares"
    while any(x.startswith(first) for x in taken):
        first += "_"
    by_input = opset >= AXES_ARE_INPUTS
    proto.graph.initializer.append(helper.make_tensor(f"{first}.axes", TensorProto.INT64, [1], [0]))
    for k, (name, steps) in enumerate(rows.items()):
        flat, square, total = (f"{first}.{k}.{x}" for x in ("flat", "square", "total"))
        shape = f"{first}.{k}.shape"
        proto.graph.initializer.append(helper.make_tensor(shape, TensorProto.INT64, [2], [-1, steps]))
        wide = f"{first}.{k}.float"
        proto.graph.node.extend([
            helper.make_node("Cast", [name], [wide], to=TensorProto.FLOAT),
            helper.make_node("Reshape", [wide, shape], [flat]),
            helper.make_node("Mul", [flat, flat], [square]),
            helper.make_node("ReduceSum", [square, f"{first}.axes"], [total], keepdims=0) if by_input
            else helper.make_node("ReduceSum", [square], [total], keepdims=0, axes=[0]),
        ])  # fmt: skip
        proto.graph.output.append(helper.make_tensor_value_info(total, TensorProto.FLOAT, [steps]))
    program = compiled(proto if file.folder is None else LocatedModel(proto, file.folder))
    sums = [program.run({n: x for n, x in c.items() if n in program.inputs}) for c in calls]
    totals = [np.sum([s[f"{first}.{k}.total"] for s in sums], axis=0, dtype=np.float64) for k in range(len(rows))]
    return dict(zip(rows, totals, strict=True))


def random_calls(program: Program, dims: Mapping[str, int]) -> list[Feeds]:
    """Return one call with seeded random inputs at the given sizes of symbols."""
    from polydyn.cli.inputs import feeds_for

    return [feeds_for(program, dims, {})]


def output_errors(
    before: ModelLike, after: ModelLike, calls: Iterable[Feeds] | Mapping[str, Any]
) -> dict[str, float]:  # fmt: skip
    """Return the relative error of every floating-point output over all calls.

    ``calls``: inputs of calls, or sizes of symbols for one call with random inputs.
    """
    sizes = isinstance(calls, Mapping) and all(isinstance(x, int) for x in calls.values())
    inputs = [] if sizes else feeds_list(calls, "compare")
    program = compiled(before)
    inputs = inputs or random_calls(program, calls)  # type: ignore[arg-type]
    expected = [program.run(x) for x in inputs]
    dtypes = {o["name"]: o["dtype"] for o in program.arguments("outputs")}
    del program
    program = compiled(after)
    after_dtypes = {i["name"]: i["dtype"] for i in program.arguments("inputs")}
    after_outputs = {o["name"]: o["dtype"] for o in program.arguments("outputs")}
    results = [program.run({n: _as_dtype(x, after_dtypes[n]) for n, x in c.items()}) for c in inputs]
    errors = {}
    for name, dtype in dtypes.items():
        if "float" in dtype and name in after_outputs:
            pairs = [(_wide(e[name], dtype), _wide(r[name], after_outputs[name]))
                     for e, r in zip(expected, results, strict=True)]  # fmt: skip
            energy = sum(float(np.vdot(e, e)) for e, _ in pairs)
            wrong = sum(float(np.vdot(e - r, e - r)) for e, r in pairs)
            errors[name] = float(np.sqrt(wrong / energy)) if energy else float(wrong > 0)
    return errors


def _wide(a: Array, dtype: str) -> Array:
    """Return the numbers of an output as float64. Infinite numbers become 0, in both models."""
    wide = (a.astype(np.uint32) << 16).view(np.float32) if dtype == "bfloat16" else a
    finite: Array = np.nan_to_num(wide.astype(np.float64), posinf=0, neginf=0)
    return finite


def _as_dtype(x: Any, dtype: str) -> Array:
    """Convert an input to the dtype that the converted model takes."""
    from polydyn.graph.dtypes import numpy_dtype

    a: Array = np.asarray(x)
    if str(a.dtype) != dtype and not (dtype == "bfloat16" and a.dtype == np.uint16):
        a = a.astype(numpy_dtype(dtype))
    return a.view(np.uint16) if dtype == "bfloat16" else a
