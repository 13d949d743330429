"""Small models and their kernels for the tests of CUDA code generation: fused, placed, launched on the emulation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import onnx
from onnx import TensorProto, helper

from polydyn.backends.cuda import Cuda
from polydyn.codegen.cuda.attention import ATTENTIONS
from polydyn.codegen.cuda.emit import LONG_SUFFIX
from polydyn.codegen.kernel import COUNTERS, MOST_COUNTERS, WORKSPACE, Kernel, TensorMapOf
from polydyn.codegen.printers.cuda import HOPPER_PRELUDE, PRELUDE
from polydyn.fusion.pipeline import fusion_plan
from polydyn.fusion.plan import FusionPlan
from polydyn.gpu.emulator import Counters, EmulatedModule, compile_emulated
from polydyn.graph.dtypes import numpy_dtype
from polydyn.graph.expand import import_model
from polydyn.graph.fold import fold
from polydyn.lowering.pack import pack
from polydyn.lowering.place import PlacedGroup
from polydyn.lowering.place_cuda import CudaBuilder
from polydyn.runtime.cuda.tensormap import PixelBox, TensorMap, element_type

Arrays = dict[str, np.ndarray[Any, Any]]
SHARED_BYTES = 227 * 1024
"""Maximum bytes of shared memory per block on the emulated device (as on an H200)."""
MULTIPROCESSORS, ARCH = 132, "sm_90a"
"""Number of SMs and architecture of the emulated device."""
TYPES = {
    "float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16,
    "int64": TensorProto.INT64, "int8": TensorProto.INT8, "uint8": TensorProto.UINT8, "bool": TensorProto.BOOL,
}  # fmt: skip


def plan_of(
    nodes: list[onnx.NodeProto],
    inputs: Mapping[str, tuple[Any, ...]],
    outputs: list[str],
    constants: Arrays | None = None,
    dtype: str | Mapping[str, str] = "float32",
) -> FusionPlan:
    """Return the fusion plan of a small model.

    ``inputs`` maps names to dims; ``dtype``: type of all inputs, or per input.
    """
    of = {n: dtype if isinstance(dtype, str) else dtype[n] for n in inputs}
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info(n, TYPES[of[n]], list(s)) for n, s in inputs.items()],
        [helper.make_empty_tensor_value_info(o) for o in outputs],
        [onnx.numpy_helper.from_array(a, n) for n, a in (constants or {}).items()],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    return fusion_plan(fold(import_model(model)), Cuda.unused, cuda=True)


def with_bugs(kernel: Kernel, bugs: Mapping[str, tuple[str, str]]) -> tuple[Kernel, ...]:
    """Return a version of the kernel for each planted bug (old text, new text): compiling them together is much faster.
    """
    out = []
    for i, (bug, (old, new)) in enumerate(bugs.items()):
        assert old in kernel.text, f"the planted bug '{bug}' no longer fits the kernel"
        name = f"{kernel.name}_bug{i}"
        text = kernel.text.replace(old, new).replace(kernel.name, name)
        out.append(replace(kernel, name=name, text=text, version=f"bug {i}"))
    return tuple(out)


@functools.cache
def module(*texts: str) -> EmulatedModule:
    """Compile kernels together: the header takes most of a compilation."""
    hopper = any(t.startswith(HOPPER_PRELUDE) for t in texts)
    bodies = (t.removeprefix(PRELUDE).removeprefix(HOPPER_PRELUDE) for t in texts)
    text = (HOPPER_PRELUDE if hopper else PRELUDE) + "".join(bodies)
    return EmulatedModule(compile_emulated(text, arch=90 if hopper else 80))


def dims_of(plan: FusionPlan, feeds: Arrays) -> dict[str, int]:
    """Return the model's symbols at a shape of its inputs."""
    return {s.symbol: feeds[s.input].shape[s.axis] for s in plan.graph.sources}


def params_of(p: PlacedGroup, dims: Mapping[str, int]) -> dict[str, int]:
    """Return the group's parameters for the model's symbols."""
    return {n: i.evaluate(dims) for n, i in p.lowered.params.items()}


def placed(
    plan: FusionPlan, arch: str = "sm_80", tf32: bool = False, rows: Collection[str] = ()
) -> tuple[PlacedGroup, ...]:  # fmt: skip
    """Return the kernels of a plan, in launch order. ``rows``: only these rows of the table of attentions, if given."""
    builder = CudaBuilder(plan, arch, tf32)
    some = tuple(x for x in ATTENTIONS if x.name in rows or not rows)
    with mock.patch("polydyn.codegen.cuda.attention.ATTENTIONS", some):
        return tuple(p for g in plan.groups for p in builder.place(g))


def version(p: PlacedGroup, word: str) -> Kernel:
    """Return the version of a name, else the first whose name begins with it."""
    return min((k for k in p.kernels if k.version.startswith(word)), key=lambda k: k.version != word)


def encoded(m: TensorMapOf, a: np.ndarray[Any, Any], env: Mapping[str, int]) -> bytes:
    """Encode the tensor map of a kernel over an array."""
    _, size = element_type(m.dtype)
    dims, strides = (tuple(i.evaluate(env) for i in x) for x in (m.dims, m.strides))
    pixels = None
    if m.pixels:
        lower, upper = (tuple(i.evaluate(env) for i in x) for x in (m.pixels.lower, m.pixels.upper))
        pixels = PixelBox(lower, upper, m.pixels.steps)
    made = TensorMap(m.dtype, dims, tuple(s * size for s in strides), m.box, pixels=pixels)
    return made.emulated(a.ctypes.data + m.offset.evaluate(env) * size)


def _kind(k: Kernel) -> tuple[bool, bool, bool, str]:
    """Return a key by which tests choose among versions that compile slowly."""
    return k.version.endswith(LONG_SUFFIX), bool(k.after), k.version.startswith("attention_128"), k.device.arch


def first_fit(p: PlacedGroup, env: dict[str, int], arch: str = "sm_80") -> Kernel:
    """Return the best version for an architecture, on a device that otherwise has the emulated one's size."""
    return next(k for k in p.kernels if k.fits(env, SHARED_BYTES, MULTIPROCESSORS, arch))


def run(
    plan: FusionPlan,
    feeds: Arrays,
    choose: Callable[[PlacedGroup, dict[str, int]], Kernel] = first_fit,
    kernels: tuple[PlacedGroup, ...] | None = None,
    reverse: bool = False,
    compile_all: bool = True,
) -> tuple[Arrays, list[Counters]]:
    """Run all launches of a plan on the emulator; return the outputs, and the counters of each launch.

    ``compile_all``: all versions of a kernel are compiled at once.
    """
    graph = plan.graph
    dims = dims_of(plan, feeds)
    kernels = kernels or placed(plan)
    memory: Arrays = {n: np.ascontiguousarray(feeds[n]) for n in feeds}
    memory |= {n: pack(x, graph.constants) for p in kernels for n, x in p.lowered.packs.items()}
    counters: list[Counters] = []

    def array(name: str) -> np.ndarray[Any, Any]:
        if name not in memory:
            t = graph.tensors[name]
            if name in graph.constants:
                memory[name] = np.ascontiguousarray(graph.constants[name])
            else:
                memory[name] = np.empty([i.evaluate(dims) for i in t.shape], numpy_dtype(t.dtype))
                memory[name].reshape(-1).view(np.uint8).fill(0xFF)
        return memory[name]

    for p in kernels:
        env = params_of(p, dims)
        first, buffers = choose(p, env), p.lowered.buffers
        compiled_with = [v for v in p.kernels if _kind(v) == _kind(first)] if compile_all else [first]
        counters += launch(first, compiled_with, env, lambda a, of=buffers: array(of[a]), reverse)  # type: ignore[misc]
    return {n: array(n) for n in graph.outputs}, counters


def launch(
    first: Kernel,
    compiled_with: Sequence[Kernel],
    env: dict[str, int],
    array: Callable[[str], np.ndarray[Any, Any]],
    reverse: bool = False,
) -> list[Counters]:
    """Launch a version and its successors on the emulator; ``compiled_with``: versions to compile with it."""
    if not first.fits(env, SHARED_BYTES, MULTIPROCESSORS, ARCH):  # planted bugs raise AssertionError
        raise ValueError(f"{first.version} may not be launched at {env}")
    env = first.values(env, MULTIPROCESSORS)
    workspace = np.full(first.workspace.evaluate(env) // 4, np.nan, np.float32)
    counts = np.zeros(MOST_COUNTERS, np.uint32)
    counters = []
    for k in (first, *first.after):
        blocks, smem = k.tasks.evaluate(env), k.scratch.evaluate(env)
        args: list[Any] = [encoded(m, array(m.buffer), env) for m in k.device.maps]
        given = {WORKSPACE: workspace, COUNTERS: counts}
        args += [given[a] if a in given else array(a) for a in k.buffers]
        args += [np.int64(env[s]) for s in k.symbols]
        if blocks > 0:
            built = module(*(v.text for v in compiled_with)) if k is first else module(k.text)
            counters.append(built.launch(k.name, blocks, k.device.threads, args, smem=smem, reverse=reverse))
    return counters
