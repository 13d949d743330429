"""Host plans with hand-written kernels, shared by the tests of the runtime."""

from __future__ import annotations

from typing import Any

import numpy as np

from polydyn.codegen.kernel import Block, Kernel
from polydyn.graph.ir import Guard, SymbolSource
from polydyn.program.plan import Buffer, Candidate, HostPlan, Launch
from polydyn.schedules.index import ONE, Index

B, L = Index.of("B"), Index.of("L")

SIGNATURE = "(void *const *buf, const int64_t *sym, int64_t begin, int64_t end, void *scratch)"


def kernel(name: str, buffers: int, symbols: int, body: str) -> Kernel:
    return kernel_of_text(name, f"void {name}{SIGNATURE} {{\n{body}\n}}\n", buffers, symbols)


def kernel_of_text(name: str, text: str, buffers: int, symbols: int, block: Block | None = None) -> Kernel:
    """Build a hand-written kernel; its parameters have numbers."""
    names = [tuple(f"{x}{n}" for n in range(count)) for x, count in (("b", buffers), ("s", symbols))]
    return Kernel(name, names[1], ONE, text=text, buffers=names[0], block=block)


ADD = kernel(
    "add", 3, 0, """const float *a = buf[0], *b = buf[1]; float *c = buf[2];
for (int64_t i = begin; i < end; i++) c[i] = a[i] + b[i];""",
)  # fmt: skip
SCALE = kernel(
    "scale", 3, 1, """const float *a = buf[0], *w = buf[1]; float *c = buf[2]; int64_t n = sym[0];
for (int64_t i = begin; i < end; i++) for (int64_t j = 0; j < n; j++) c[i*n+j] = a[i*n+j] * w[j % 4];""",
)  # fmt: skip
ROW_SUM = kernel(
    "row_sum", 2, 1, """const float *a = buf[0]; float *c = buf[1], *s = scratch; int64_t n = sym[0];
for (int64_t i = begin; i < end; i++) {
    float t = 0;
    for (int64_t j = 0; j < n; j++) s[j] = a[i*n+j];
    for (int64_t j = 0; j < n; j++) t += s[j];
    c[i] = t;
}""",
)  # fmt: skip

WEIGHTS = np.array([1, 2, 3, 4], np.float32)


def launch(kernel: Kernel, buffers: str, symbols: Any, tasks: Any, work: Any, scratch: Any = 0) -> Launch:
    only = Candidate(
        kernel.name, tuple(buffers.split()), tuple(map(Index.of, symbols)), Index.of(tasks), Index.of(scratch)
    )
    return Launch(
        (only,), Index.of(tasks), Index.of(work), label=f"{kernel.name}:{buffers}", flops=Index.of(work),
        bytes=Index.of(work) * 4,
    )  # fmt: skip


def buffers(*rows: Any) -> dict[str, Buffer]:
    return {n: Buffer(n, t, tuple(map(Index.of, s)), r) for n, t, s, r in rows}


def example(guards: tuple[Guard, ...] = ()) -> HostPlan:
    """Plan ``total[B] = row sums of (x + y) * w + x``, ``scaled[B, L] = (x + y) * w``, and ``w`` itself as an output.
    """
    f = "float32"
    return HostPlan(
        name="example",
        inputs=("x", "y"),
        outputs=("total", "scaled", "w"),
        buffers=buffers(
            ("x", f, (B, L), "input"),
            ("y", f, (B, L), "input"),
            ("w", f, (4,), "constant"),
            ("t0", f, (B, L), "intermediate"),
            ("t1", f, (B, L), "intermediate"),
            ("scaled", f, (B, L), "output"),
            ("total", f, (B,), "output"),
        ),
        constants={"w": WEIGHTS},
        sources=(SymbolSource("B", "x", 0), SymbolSource("L", "x", 1)),
        guards=guards,
        kernels=(ADD, SCALE, ROW_SUM),
        launches=(
            launch(ADD, "x y t0", (), B * L, B * L),
            launch(SCALE, "t0 w scaled", (L,), B, B * L * 10),
            launch(ADD, "scaled x t1", (), B * L, B * L),
            launch(ROW_SUM, "t1 total", (L,), B, B * L * 10, scratch=L * 4),
        ),
    )


def expected(x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> dict[str, np.ndarray[Any, Any]]:
    w = WEIGHTS[np.arange(x.shape[1]) % 4]
    scaled = (x + y) * w
    return {"total": (scaled + x).sum(1), "scaled": scaled, "w": WEIGHTS}


def feeds(b: int, length: int, seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    r = np.random.default_rng(seed + 1000 * b + length)
    return {n: r.integers(-8, 8, (b, length)).astype(np.float32) for n in ("x", "y")}
