"""polydyn as an ``onnx.backend.base.Backend``: ``prepare``, ``run_model``, ``run_node``, ``supports_device``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper
from onnx.backend.base import Backend, BackendRep, namedtupledict

from polydyn.compiler import compile
from polydyn.errors import UnsupportedError
from polydyn.graph.dtypes import numpy_dtype
from polydyn.runtime.program import Program


class PolydynRep(BackendRep):
    """A compiled model. ``run`` takes its inputs in order or by name, and returns its outputs in order."""

    def __init__(self, program: Program) -> None:
        self.program = program

    def run(self, inputs: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Compute the outputs. ``inputs``: a sequence in the model's order, a mapping, or the only array."""
        names = list(self.program.inputs)
        if isinstance(inputs, Mapping):
            feeds = dict(inputs)
        else:
            given = [inputs] if isinstance(inputs, np.ndarray) else list(inputs)
            feeds = dict(zip(names, given, strict=False))
            feeds |= {f"input {k}": x for k, x in enumerate(given[len(names) :], len(names))}  # rejected by name
        results = self.program.run({n: np.asarray(x) for n, x in feeds.items()})
        dtypes = {o["name"]: numpy_dtype(o["dtype"]) for o in self.program.manifest["outputs"]}
        results = {n: x.view(dtypes[n]) for n, x in results.items()}
        return tuple(namedtupledict("Outputs", list(results))(*results.values()))


class PolydynBackend(Backend):
    """ONNX's own interface to a runtime."""

    @classmethod
    def is_compatible(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> bool:
        """Return whether the model compiles: everything in it is supported."""
        try:
            cls.prepare(model, device, **kwargs)
        except UnsupportedError:
            return False
        return True

    @classmethod
    def prepare(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> PolydynRep:
        """Compile a model once, for every shape. ``kwargs``: see ``polydyn.compile``. Raises PolydynError if
        rejected.
        """
        if not cls.supports_device(device):
            raise UnsupportedError(f"device {device} is not built", rule="known devices", remedy="use CPU")
        return PolydynRep(compile(model, **kwargs))

    @classmethod
    def run_model(cls, model: onnx.ModelProto, inputs: Any, device: str = "CPU", **kwargs: Any) -> tuple[Any, ...]:
        """Call ``prepare`` and ``run``."""
        return cls.prepare(model, device, **kwargs).run(inputs)

    @classmethod
    def run_node(
        cls, node: onnx.NodeProto, inputs: Any, device: str = "CPU",
        outputs_info: Sequence[tuple[Any, tuple[int, ...]]] | None = None, **kwargs: Any,
    ) -> tuple[Any, ...]:  # fmt: skip
        """Run one node on arrays, given in the order of its inputs that are present.

        Integer vectors after the first input (shapes, axes, indices) become constants of the compiled model, because a
        compiler must know sizes.
        """
        names = [x for x in node.input if x]
        arrays = [np.asarray(a) for a in (inputs.values() if isinstance(inputs, Mapping) else inputs)]
        fixed = {n for n, a in list(zip(names, arrays, strict=True))[1:] if a.dtype.kind == "i" and a.ndim <= 1}
        dynamic = {n: a for n, a in zip(names, arrays, strict=True) if n not in fixed}
        graph = helper.make_graph(
            [node],
            node.name or node.op_type,
            [helper.make_tensor_value_info(n, _kind(a), a.shape) for n, a in dynamic.items()],
            [onnx.ValueInfoProto(name=o) for o in node.output if o],
            [numpy_helper.from_array(a, n) for n, a in zip(names, arrays, strict=True) if n in fixed],
        )
        opset = int(kwargs.pop("opset_version", min(onnx.defs.onnx_opset_version(), 20)))
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
        return cls.prepare(model, device, **kwargs).run(dynamic)

    @classmethod
    def supports_device(cls, device: str) -> bool:
        """Return whether the device is the CPU."""
        return device.upper().partition(":")[0] == "CPU"


def _kind(a: Any) -> int:
    return int(helper.np_dtype_to_tensor_dtype(a.dtype))


is_compatible = PolydynBackend.is_compatible
prepare = PolydynBackend.prepare
run_model = PolydynBackend.run_model
run_node = PolydynBackend.run_node
supports_device = PolydynBackend.supports_device
