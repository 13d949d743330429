"""Groups lowered from models, and their CUDA kernels run on the emulator."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from polydyn.codegen.cuda_kernel import CudaKernel
from polydyn.codegen.printers.cuda import PRELUDE
from polydyn.fusion.grouping import fuse
from polydyn.fusion.plan import FusionPlan
from polydyn.gpu.emulator import Counters, EmulatedModule, compile_emulated
from polydyn.graph.dtypes import numpy_dtype
from polydyn.graph.expand import import_model
from polydyn.graph.fold import fold
from polydyn.lowering.cuda import CudaBuilder, PlacedCuda

Arrays = dict[str, np.ndarray[Any, Any]]
TYPES = {
    "float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16,
    "int64": TensorProto.INT64,
}  # fmt: skip
SHARED = 227 * 1024


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
def module(*texts: str) -> EmulatedModule:
    """Kernels compiled together: most of a compilation is the header."""
    return EmulatedModule(compile_emulated(PRELUDE + "".join(t.removeprefix(PRELUDE) for t in texts)))


def placed(plan: FusionPlan) -> tuple[PlacedCuda, ...]:
    """The kernels of a plan, in launch order."""
    builder = CudaBuilder(plan)
    return tuple(p for g in plan.groups for p in builder.place(g))


def version(p: PlacedCuda, word: str) -> CudaKernel:
    """The version whose name begins with a word."""
    return next(k for k in p.versions if k.version.startswith(word))


def first_fit(p: PlacedCuda, env: dict[str, int]) -> CudaKernel:
    return next(k for k in p.versions if k.fits(env, SHARED))


def run(
    plan: FusionPlan,
    feeds: Arrays,
    choose: Callable[[PlacedCuda, dict[str, int]], CudaKernel] = first_fit,
    kernels: tuple[PlacedCuda, ...] | None = None,
    reverse: bool = False,
    together: bool = True,
) -> tuple[Arrays, list[Counters]]:
    """All launches of a plan on the emulator: the outputs, and the counters of each launch.

    ``together``: all versions of a kernel are compiled at once.
    """
    graph = plan.graph
    dims = {s.symbol: feeds[s.input].shape[s.axis] for s in graph.sources}
    memory: Arrays = {n: np.ascontiguousarray(feeds[n]) for n in feeds}
    counters = []

    def array(name: str) -> np.ndarray[Any, Any]:
        if name not in memory:
            t = graph.tensors[name]
            if name in graph.constants:
                memory[name] = np.ascontiguousarray(graph.constants[name])
            else:
                memory[name] = np.empty([i.evaluate(dims) for i in t.shape], numpy_dtype(t.dtype))
                memory[name].reshape(-1).view(np.uint8).fill(0xFF)
        return memory[name]

    for p in kernels or placed(plan):
        env = {n: i.evaluate(dims) for n, i in p.lowered.params.items()}
        k = choose(p, env)
        assert k.fits(env, SHARED)
        grid, smem = k.grid.evaluate(env), k.smem.evaluate(env)
        args = [array(p.lowered.buffers[a]) for a in k.buffers] + [np.int64(env[s]) for s in k.symbols]
        if grid > 0:
            built = module(*(v.text for v in p.versions)) if together else module(k.text)
            counters.append(built.launch(k.name, grid, k.threads, args, smem=smem, reverse=reverse))
    return {n: array(n) for n in graph.outputs}, counters
