"""One-node models: built, imported, evaluated by the reference evaluator and by onnx's own."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper
from onnx.reference import ReferenceEvaluator

from polydyn import reference
from polydyn.errors import ShapeError, UnsupportedError
from polydyn.graph.ir import Compute, Concat, Graph, Node, SymbolSource, Tensor
from polydyn.graph.operators import registry
from polydyn.graph.operators.registry import Inferred, OnnxNode
from polydyn.schedules.expr import Array, Value
from polydyn.schedules.index import Index


def model_of(
    op: str,
    inputs: Mapping[str, tuple[str, Sequence[int | str]] | Array],
    attributes: Mapping[str, Any] | None = None,
    opset: int = 18,
    outputs: Sequence[str] = ("y",),
    names: Sequence[str] | None = None,
) -> onnx.ModelProto:
    """A model of one node. An input is (dtype, dims) or the array of an initializer; ``""`` in ``names`` is absent."""
    node = helper.make_node(op, list(names or inputs), list(outputs), name=f"the_{op}", **(attributes or {}))
    graph = helper.make_graph(
        [node],
        "one",
        [
            helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(reference.numpy_dtype(x[0])), list(x[1]))
            for n, x in inputs.items()
            if isinstance(x, tuple)
        ],
        [helper.make_empty_tensor_value_info(o) for o in outputs if o],
        [onnx.numpy_helper.from_array(x, n) for n, x in inputs.items() if not isinstance(x, tuple)],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])


def expected(model: onnx.ModelProto, feeds: Mapping[str, Array]) -> list[Array]:
    """What onnx's reference evaluator gives."""
    with np.errstate(all="ignore"):
        return list(ReferenceEvaluator(model).run(None, dict(feeds)))


def check(
    model: onnx.ModelProto, feeds: Mapping[str, Array], tolerance: float = 1e-5, graph: Graph | None = None
) -> None:
    """The reference evaluator of the imported graph agrees with onnx's."""
    got = reference.evaluate(graph or import_one(model), feeds)
    for (name, array), want in zip(got.items(), expected(model, feeds), strict=True):
        assert array.dtype == want.dtype, (name, array.dtype, want.dtype)
        assert array.shape == want.shape, (name, array.shape, want.shape)
        np.testing.assert_allclose(array.astype(np.float64), want.astype(np.float64), tolerance, tolerance)


def import_one(model: onnx.ModelProto) -> Graph:
    """Infers and expands the nodes in order, with the smallest contexts that do."""
    package = importlib.import_module("polydyn.graph.operators")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
    return _Contexts(model).graph()


class _Contexts:
    """InferContext and ExpandContext at once: dims are equal when they are the same, or are learned to be."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.model = model
        self.constants: dict[str, Array] = {i.name: onnx.numpy_helper.to_array(i) for i in model.graph.initializer}
        self.inferred: dict[str, Inferred] = {}
        self.tensors: dict[str, Tensor] = {}
        self.nodes: list[Node] = []
        self.learned: dict[str, Index] = {}
        self.sources: dict[str, SymbolSource] = {}
        for n, a in self.constants.items():
            self.inferred[n] = Inferred(str(a.dtype), tuple(map(Index.of, a.shape)))
        for x in model.graph.input:
            t = x.type.tensor_type
            dims = [d.dim_param or d.dim_value for d in t.shape.dim]
            dtype = str(helper.tensor_dtype_to_np_dtype(t.elem_type))
            self.inferred[x.name] = Inferred(dtype, tuple(map(Index.of, dims)))
            for axis, d in enumerate(dims):
                if isinstance(d, str):
                    self.sources.setdefault(d, SymbolSource(d, x.name, axis))

    def tensor(self, name: str) -> Tensor:
        if name in self.tensors:
            return self.tensors[name]
        i = self.inferred[name]
        return Tensor(name, i.dtype, tuple(d.subs(self.learned) for d in i.shape))

    def value(self, name: str) -> Array | None:
        c = self.constants.get(name)
        return None if c is None else np.array([Index.of(int(x)) for x in c.flat], object).reshape(c.shape)

    def constant(self, name: str) -> Array | None:
        return self.constants.get(name)

    def equal(self, a: Index, b: Index) -> bool | None:
        d = (a - b).subs(self.learned).constant
        return None if d is None else d == 0

    def unify(self, a: Index, b: Index, why: str) -> Index:
        equal = self.equal(a, b)
        if equal is False:
            raise ShapeError(why)
        if equal is None:
            old, new = (a, b) if a.is_symbol else (b, a)
            self.learned[str(old)] = new
        return a.subs(self.learned)

    def broadcast(self, a: Index, b: Index, why: str) -> Index:
        return b if a == 1 else a if b == 1 else self.unify(a, b, why)

    def fresh(self, hint: str) -> Index:
        raise UnsupportedError(hint)

    def compute(
        self,
        shape: tuple[Index, ...],
        body: Value,
        *,
        output: str | None = None,
        reduction: tuple[Index, ...] = (),
        reduce: str | None = None,
    ) -> str:
        name = output or f"t{len(self.nodes)}"
        self.nodes.append(Compute(name, body, reduction, reduce))
        self.tensors[name] = Tensor(name, body.dtype, tuple(d.subs(self.learned) for d in shape))
        return name

    def concat(self, parts: tuple[str, ...], axis: int, *, output: str | None = None) -> str:
        name = output or f"t{len(self.nodes)}"
        self.nodes.append(Concat(name, parts, axis))
        return name

    def alias(self, output: str, source: str) -> None:
        raise NotImplementedError

    def new_constant(self, array: Array, hint: str) -> str:
        name = f"{hint}{len(self.constants)}"
        self.constants[name] = array
        self.inferred[name] = Inferred(str(array.dtype), tuple(map(Index.of, array.shape)))
        return name

    def graph(self) -> Graph:
        graph = self.model.graph
        for n in graph.node:
            attributes = {a.name: _attribute(a) for a in n.attribute}
            opset = self.model.opset_import[0].version
            node = OnnxNode(n.name, n.op_type, tuple(n.input), tuple(n.output), attributes, opset)
            if n.op_type not in registry.OPERATORS:
                raise UnsupportedError(n.op_type, node=n.name)
            entry = registry.OPERATORS[n.op_type]
            for o, i in zip(node.outputs, entry.infer(node, self), strict=False):
                self.inferred[o] = i
            entry.expand(node, self)
        inputs = tuple(x.name for x in graph.input)
        tensors = {n: self.tensor(n) for n in (*self.inferred, *self.tensors)}
        sources = tuple(self.sources.values())
        outputs = tuple(o.name for o in graph.output)
        return Graph("one", inputs, outputs, tensors, self.constants, tuple(self.nodes), sources)


def _attribute(a: onnx.AttributeProto) -> Any:
    value = helper.get_attribute_value(a)
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, onnx.TensorProto):
        return onnx.numpy_helper.to_array(value)
    return [v.decode() for v in value] if a.type == onnx.AttributeProto.STRINGS else value
