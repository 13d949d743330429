"""A case: the text of its inputs, a function that writes its nodes, and sizes of its symbols."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper, numpy_helper

from polydyn.graph.dtypes import numpy_dtype

Array: TypeAlias = npt.NDArray[Any]
Sizes: TypeAlias = Sequence[tuple[int, ...]]
MICROSOFT = "com.microsoft"
ML = "ai.onnx.ml"
OPSET = 22
DTYPES = {
    "f32": "float32", "f16": "float16", "f64": "float64", "bf16": "bfloat16", "i64": "int64", "i32": "int32",
    "i16": "int16", "i8": "int8", "u8": "uint8", "u32": "uint32", "u64": "uint64", "b": "bool",
}  # fmt: skip
"""Short names of element types. ``T`` in the text of an input is the type of the case."""


class Net:
    """Grows a model: ``net.Pad(x, [0, 1], mode="edge")`` adds a node and returns the name of its output.

    An operand is a name, None for an absent one, or a constant: a list of int is int64, a float has the type of the
    case, an array its own. ``outputs=3`` returns a tuple of names.
    """

    def __init__(self, name: str, kind: str) -> None:
        self.kind = numpy_dtype(kind)
        self.numbers = np.random.default_rng(zlib.crc32(name.encode()))
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []

    def __getattr__(self, operator: str) -> Callable[..., Any]:
        if operator.startswith("_"):
            raise AttributeError(operator)
        return lambda *operands, **attributes: self._add(operator, operands, attributes)

    def _add(self, operator: str, operands: Sequence[Any], attributes: dict[str, Any]) -> Any:
        count = attributes.pop("outputs", 1)
        names = [f"t{len(self.nodes)}", *(f"t{len(self.nodes)}_{k}" for k in range(1, count))]
        inputs = [self._operand(x) for x in operands]
        self.nodes.append(helper.make_node(operator, inputs, names, **attributes))
        return tuple(names) if count > 1 else names[0]

    def _operand(self, x: Any) -> str:
        if x is None or isinstance(x, str):
            return x or ""
        name = f"c{len(self.constants)}"
        array = np.asarray(x, self.kind if isinstance(x, float) else None)
        self.constants.append(numpy_helper.from_array(array, name))
        return name

    def weight(self, *shape: int, kind: str = "") -> Array:
        """Return normal numbers over the square root of the depth; integers from 1 to 4."""
        dtype = numpy_dtype(DTYPES[kind]) if kind else self.kind
        if dtype.kind in "iu":
            return self.numbers.integers(1, 5, shape).astype(dtype)
        depth = max(1, int(np.prod(shape[1:]))) ** 0.5
        return np.asarray(self.numbers.standard_normal(shape) / depth, dtype)


@dataclass(frozen=True)
class Input:
    """An input. ``values``: "" for normal numbers or small integers, ``+`` positive, ``~`` in (-1, 1), ``<N`` integers
    below a number or a symbol, ``!`` a permutation of ``range`` in each row.
    """

    name: str
    dtype: str
    dims: tuple[int | str, ...]
    values: str = ""

    def array(self, sizes: Mapping[str, int], numbers: np.random.Generator) -> Array:
        """Return random elements at the sizes."""
        shape = [sizes[d] if isinstance(d, str) else d for d in self.dims]
        dtype = numpy_dtype(self.dtype)
        if self.values.startswith("<"):
            limit = self.values[1:]
            return numbers.integers(0, sizes[limit] if limit in sizes else int(limit), shape).astype(dtype)
        if self.values == "!":
            return np.argsort(numbers.random(shape), axis=-1).astype(dtype)
        if dtype == np.bool_:
            return np.asarray(numbers.random(shape) < 0.5)
        if dtype.kind in "iu":
            wide = dtype.itemsize == 1
            low = (0 if dtype.kind == "u" else -128 if wide else -50) if self.values != "+" else 1
            return numbers.integers(low, np.iinfo(dtype).max if wide else 50, shape).astype(dtype)
        x = numbers.standard_normal(shape, np.float32)
        x = np.abs(x) + np.float32(0.1) if self.values == "+" else np.tanh(x) * np.float32(0.99) if self.values else x
        return x.astype(dtype)


@dataclass(frozen=True)
class Case:
    """``build``: takes a ``Net`` and the names of the inputs, returns the name of the result, or several names."""

    name: str
    kind: str
    inputs: tuple[Input, ...]
    build: Callable[..., Any]
    sizes: tuple[Mapping[str, int], ...]
    opset: int = OPSET
    exact: bool = True
    """Whether results can be compared: False where a result may be one of several."""

    def model(self) -> onnx.ModelProto:
        """Return the ONNX model."""
        net = Net(self.name, self.kind)
        results = self.build(net, *(x.name for x in self.inputs))
        names = [results] if isinstance(results, str) else list(results)
        values = [
            helper.make_tensor_value_info(x.name, helper.np_dtype_to_tensor_dtype(numpy_dtype(x.dtype)), x.dims)
            for x in self.inputs
        ]
        outputs = [helper.make_empty_tensor_value_info(n) for n in names]
        graph = helper.make_graph(net.nodes, "one", values, outputs, net.constants)
        sets = [helper.make_opsetid("", self.opset), helper.make_opsetid(MICROSOFT, 1), helper.make_opsetid(ML, 3)]
        return helper.make_model(graph, opset_imports=sets, ir_version=10)

    def feeds(self, sizes: Mapping[str, int], seed: int = 0) -> dict[str, Array]:
        """Return random inputs at the sizes."""
        numbers = np.random.default_rng([seed, zlib.crc32(self.name.encode())])
        return {x.name: x.array(sizes, numbers) for x in self.inputs}

    def operators(self) -> set[str]:
        """Return the operators, with their domains, as docs/operators.md names them."""
        return {f"{n.domain}::{n.op_type}" if n.domain else n.op_type for n in self.model().graph.node}


def parsed(text: str, kind: str) -> tuple[Input, ...]:
    """Parse ``f32 N,64; i64<64 N``: an element type of ``DTYPES`` (or ``T``) with values of ``Input``, and dims."""
    found = []
    for k, part in enumerate(text.split(";")):
        first, _, dims = part.strip().partition(" ")
        cut = min((first.index(c) for c in "+~<!" if c in first), default=len(first))
        dtype = kind if first[:cut] == "T" else DTYPES[first[:cut]]
        each = tuple(int(d) if d.lstrip("-").isdigit() else d for d in dims.split(",") if d)
        found.append(Input(f"x{k}", dtype, each, first[cut:]))
    return tuple(found)


def cases(
    name: str, inputs: str, build: Callable[..., Any], sizes: Sizes, types: str = "f32", **options: Any
) -> Iterator[Case]:
    """Yield a case for each of the types. ``sizes``: of the symbols, in the order of their first appearance."""
    for kind in types.split():
        found = parsed(inputs, DTYPES[kind])
        symbols = dict.fromkeys(d for x in found for d in x.dims if isinstance(d, str))
        each = tuple(dict(zip(symbols, s, strict=True)) for s in sizes)
        yield replace(Case(f"{name} {kind}", DTYPES[kind], found, build, each), **options)
