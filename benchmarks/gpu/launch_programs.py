"""Programs of slow additions for ``launch_order``, written by hand.

Two chains from one input, ``o = x + 1 + ... + 1`` and ``p = x + 2 + ... + 2``. One after the other their intermediates
take turns in few places, so a launch overwrites what the last but one read; side by side they are branches of a graph.
Blocks end at different times and write last: who does not wait reads what the call before has left. In ``joins`` every
launch reads what both of the step before have written.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from benchmarks.gpu.launch_order import ADDED, DEPTH, EMULATION
from polydyn.codegen.kernel import Block, Kernel
from polydyn.codegen.printers.cuda import PRELUDE
from polydyn.gpu.compiler import device_headers
from polydyn.graph.ir import SymbolSource
from polydyn.program.assemble import build_artifact
from polydyn.program.plan import Buffer, Candidate, HostPlan, Launch
from polydyn.runtime.artifact import Artifact
from polydyn.schedules.index import Index

SPIN = 500
"""Rounds of a loop that computes nothing, for each block up to four times as many."""
SLOW = """PD_KERNEL(slow, 256, 1)(const float *x, float *y, int64_t n, int64_t by, int64_t spin, int64_t one) {
  pd_grid_begin();
  const int64_t at = pd_bid_x() * (int64_t)256 + pd_tid();
  float v = at < n ? pd_ldg(x + at) : 0.f;
  for (int64_t i = 0; i < spin * (1 + pd_bid_x() % 4); i++) v = v * (float)one;
  if (at < n) pd_stg(y + at, v + (float)by);
}
PD_EXPORT(slow, 256);
"""
MEAN = (
    SLOW.replace("slow", "mean")
    .replace("const float *x, ", "const float *x, const float *z, ")
    .replace("pd_ldg(x + at)", "(pd_ldg(x + at) + pd_ldg(z + at)) * .5f")
)


def _chain(output: str, by: int, spin: int) -> list[Launch]:
    n = Index.of("N")
    names = ["x", *(f"{output}{k}" for k in range(1, DEPTH)), output]
    numbers = (n, *map(Index.of, (by, spin, 1)))
    made = (Candidate("slow", pair, numbers, n.ceildiv(256), block=Block(256)) for pair in pairwise(names))
    return [Launch((c,), n, n, label=c.buffers[1], writes=c.buffers[1:]) for c in made]


def _mean(k: int, output: str, by: int, spin: int) -> Launch:
    """The mean of both results of step ``k``, and ``by``."""
    n, numbers = Index.of("N"), (Index.of("N"), *map(Index.of, (by, spin, 1)))
    names = [f"{x}{k}" if k else "x" for x in "op"] + [f"{output}{k + 1}" if k + 1 < DEPTH else output]
    c = Candidate("mean", tuple(names), numbers, n.ceildiv(256), block=Block(256))
    return Launch((c,), n, n, label=names[-1], writes=(names[-1],))


def plan(name: str, spin: int = SPIN) -> HostPlan:
    """Both chains, one after the other or in waves of two; or ``joins``."""
    first, second = _chain("o", 1, spin), _chain("p", 2, spin)
    turns = [x for pair in zip(first, second, strict=True) for x in pair]
    side_by_side = name != "chains"
    launches = turns if side_by_side else [*first, *second]
    if name == "joins":
        launches = [_mean(k, x, by, spin) for k in range(DEPTH) for x, by in (("o", 1), ("p", 2))]
    n = Index.of("N")
    roles = {"x": "input", "o": "output", "p": "output"}
    names = ["x", *(x.label for x in launches)]
    return HostPlan(
        name="launches", inputs=("x",), outputs=("o", "p"), constants={}, guards=(), launches=tuple(launches),
        buffers={b: Buffer(b, "float32", (n,), roles.get(b, "intermediate")) for b in names},
        sources=(SymbolSource("N", "x", 0),), waves=(2,) * DEPTH if side_by_side else (),
        kernels=tuple(
            Kernel(k, ("n", "by", "spin", "one"), n.ceildiv(256), text=PRELUDE + text, buffers=b, block=Block(256))
            for k, text, b in (("slow", SLOW, ("x", "y")), ("mean", MEAN, ("x", "z", "y")))
        ),
        headers=dict(device_headers()), place="cuda",
    )  # fmt: skip


def programs(target: str) -> Iterator[tuple[str, Artifact]]:
    """Name -> artifact of all plans; BuildError: no compiler."""
    for name in ADDED:
        yield name, build_artifact(plan(name, 0 if target == EMULATION else SPIN), target)[0]
