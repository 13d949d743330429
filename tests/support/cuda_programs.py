"""Small CUDA programs for tests, on the CPU libcuda."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

import polydyn
from polydyn.codegen.kernel import Block, Kernel
from polydyn.codegen.printers.cuda import PRELUDE
from polydyn.gpu.compiler import device_headers
from polydyn.graph.ir import SymbolSource
from polydyn.program.assemble import build_program
from polydyn.program.plan import Candidate, HostPlan, Launch
from polydyn.runtime.cuda.program import CudaProgram
from polydyn.schedules.decision import cheapest
from polydyn.schedules.index import Index
from tests.support.programs import B, buffers, kernel_of_text
from tests.support.tiny import model, node

EYE = np.eye(8, dtype=np.float32)
W = np.linspace(-1, 1, 8 * 36, dtype=np.float32).reshape(8, 36)


def softmax_and_gather() -> CudaProgram:
    """Compile ``y = softmax(x @ W)`` and ``z = table[i] + x``, for x of [B, 8] and i of [B]."""
    nodes = [
        node("MatMul", "x w", "t"), node("Softmax", "t", "y", axis=-1),
        node("Gather", "table i", "g", axis=0), node("Add", "g x", "z"),
    ]  # fmt: skip
    ins = {"x": ("float32", ["B", 8]), "i": ("int64", ["B"]), "table": ("float32", ["T", 8])}
    program = polydyn.compile(model(nodes, ins, ["y", "z"], {"w": W}), target="cuda:emulated")
    assert isinstance(program, CudaProgram)
    return program


def relu(target: str = "cuda:emulated") -> CudaProgram:
    """Compile ``y = relu(x) @ w`` with w the identity, for x of [N, 8]."""
    nodes = [node("Relu", "x", "t"), node("MatMul", "t w", "y")]
    program = polydyn.compile(model(nodes, {"x": ("float32", ["N", 8])}, ["y"], {"w": EYE}), target=target)
    assert isinstance(program, CudaProgram)
    return program


def check(program: CudaProgram, n: int) -> None:
    """Run the program on n rows and check its result."""
    x = np.arange(8.0 * n, dtype=np.float32).reshape(n, 8) - 5
    np.testing.assert_allclose(program.run({"x": x})["y"], np.maximum(x, 0))


# -- hand-written kernels: y = x + by, a block for each row of 32 ------------------------------------------------------

ADD = (
    PRELUDE
    + """PD_KERNEL(NAME, 32, 1)(const float *x, float *y, int64_t by) {
  pd_grid_begin();
  const int64_t at = pd_bid_x() * 32 + pd_tid();
  pd_stg(y + at, pd_ldg(x + at) + (float)by);
}
PD_EXPORT(NAME, 32);
"""
)


def add(name: str) -> Kernel:
    """Build one of the kernels."""
    return kernel_of_text(name, ADD.replace("NAME", name), 2, 1, Block(32))


def version(kernel: str, by: Index, *arrays: str) -> Candidate:
    """Return a candidate of a launch from x to y, both [B, 32]."""
    return Candidate(kernel, arrays or ("x", "y"), (by,), B, block=Block(32))


def with_block(c: Candidate, **fields: Any) -> Candidate:
    """Return the candidate with another block."""
    assert c.block is not None
    return replace(c, block=replace(c.block, **fields))


def one_launch(*versions: Candidate, kernels: tuple[Kernel, ...]) -> HostPlan:
    """Build a plan of one launch from x to y."""
    launch = Launch(versions, B, Index.of(1), cheapest(len(versions)), "l")
    row = Index.of(32)
    return HostPlan(
        name="p", inputs=("x",), outputs=("y",), launches=(launch,), kernels=kernels, guards=(), constants={},
        buffers=buffers(("x", "float32", (B, row), "input"), ("y", "float32", (B, row), "output")),
        sources=(SymbolSource("B", "x", 0),), headers=dict(device_headers()), place="cuda",
    )  # fmt: skip


# -- a hand-written kernel that fails ---------------------------------------------------------------------------------

SHIFT = f"""{PRELUDE}PD_KERNEL(shift, 32, 1)(const float *x, float *y, int64_t n, int64_t by) {{
  const int64_t at = pd_bid_x() * 32 + pd_tid();
  if (at < n) pd_stg(y + at + (at == 100 ? by : 0), pd_ldg(x + at));
}}
PD_EXPORT(shift, 32);
"""


def shift() -> CudaProgram:
    """Compile ``y = x`` with a kernel that stores out of bounds if there are more than 100 elements."""
    one, by = Index.of(1), Index.of(1 << 40)
    only = Candidate("shift", ("x", "y"), (B, by), B.ceildiv(32), name="only", block=Block(32))
    launch = Launch((only,), B, one, label="the shift")
    program = build_program(
        HostPlan(
            name="shift", inputs=("x",), outputs=("y",),
            buffers=buffers(("x", "float32", (B,), "input"), ("y", "float32", (B,), "output")),
            constants={}, sources=(SymbolSource("B", "x", 0),), guards=(),
            kernels=(kernel_of_text("shift", SHIFT, 2, 2, Block(32)),), launches=(launch,),
            headers=dict(device_headers()), place="cuda",
        ),
        target="cuda:emulated",
    )  # fmt: skip
    assert isinstance(program, CudaProgram)
    return program
