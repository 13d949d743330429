"""Groups lowered from small models, and their CUDA kernels run on the emulator."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from polydyn.codegen.cuda_kernel import CudaKernel
from polydyn.fusion.grouping import fuse
from polydyn.fusion.plan import FusionPlan
from polydyn.gpu.emulator import Counters, EmulatedModule, compile_emulated
from polydyn.graph.expand import import_model
from polydyn.graph.fold import fold
from polydyn.lowering.group import LoweredGroup

Arrays = dict[str, np.ndarray[Any, Any]]
TYPES = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "int64": TensorProto.INT64}


def plan_of(
    nodes: list[onnx.NodeProto],
    inputs: Mapping[str, tuple[Any, ...]],
    outputs: list[str],
    constants: Arrays | None = None,
    dtype: str = "float32",
) -> FusionPlan:
    """The fusion plan of a small model; ``inputs``: name -> dims."""
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info(n, TYPES[dtype], list(s)) for n, s in inputs.items()],
        [helper.make_empty_tensor_value_info(o) for o in outputs],
        [onnx.numpy_helper.from_array(a, n) for n, a in (constants or {}).items()],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    return fuse(fold(import_model(model)))


@functools.cache
def module(text: str) -> EmulatedModule:
    return EmulatedModule(compile_emulated(text))


@dataclass(frozen=True)
class Placed:
    """A version of a kernel with what its names stand for."""

    plan: FusionPlan
    lowered: LoweredGroup
    kernel: CudaKernel

    def run(self, dims: Mapping[str, int], arrays: Arrays, reverse: bool = False) -> tuple[Arrays, Counters]:
        """The outputs for given inputs, and the emulator's counters."""
        k, graph = self.kernel, self.plan.graph
        env = {p: i.evaluate(dims) for p, i in self.lowered.params.items()}
        assert k.fits(env, 227 * 1024)
        data: Arrays = {}
        for a in k.buffers:
            name = self.lowered.buffers[a]
            t = graph.tensors[name]
            if name in graph.constants:
                data[a] = np.ascontiguousarray(graph.constants[name])
            elif self.lowered.group.arrays[a].role == "output":
                data[a] = np.zeros([i.evaluate(dims) for i in t.shape], np.dtype(t.dtype))
                data[a].view(np.uint8).fill(0xFF)
            else:
                data[a] = np.ascontiguousarray(arrays[name])
        args = [data[a] for a in k.buffers] + [np.int64(env[s]) for s in k.symbols]
        grid = k.grid.evaluate(env)
        counters = module(k.text).launch(k.name, grid, k.threads, args, smem=k.smem.evaluate(env), reverse=reverse)
        groups = self.lowered.group.arrays
        return {self.lowered.buffers[a]: data[a] for a in k.buffers if groups[a].role == "output"}, counters
