"""Programs of slow additions for ``launch_order``, written by hand.

Two chains start at one input, ``o = x + 1 + ... + 1`` and ``p = x + 2 + ... + 2``. One after the other, their
intermediates alternate between few buffers, so a launch overwrites the data that the launch before the previous one
reads; in parallel they are branches of a graph. Blocks end at different times and write last: a launch that does not
wait reads data of the previous call. In ``joins`` every launch reads both results of the previous step. In ``clusters``
every other launch uses clusters: each block writes values of its neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle, pairwise

from benchmarks.gpu.launch_order import ADDENDS, DEPTH, EMULATION, ON_HOPPER
from polydyn.codegen.kernel import Block, Kernel
from polydyn.codegen.printers.cuda import HOPPER_PRELUDE, PRELUDE
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
PAIRED_KERNEL = """PD_KERNEL_CLUSTER(paired, 256, 1, 2)(const float *x, float *y, int64_t n, int64_t by, int64_t spin,
                                       int64_t one) {
  PD_DYN_SMEM(smem);
  pd_grid_begin();
  const int other = pd_bid_x() % 2 == 0;
  const int64_t at = pd_bid_x() * (int64_t)256 + pd_tid(), to = at + (other ? 256 : -256);
  float v = at < n ? pd_ldg(x + at) : 0.f;
  for (int64_t i = 0; i < spin * (1 + pd_bid_x() % 4); i++) v = v * (float)one;
  pd_sts<float>(smem + pd_tid() * 4, v + (float)by);
  pd_cluster_arrive();
  pd_cluster_wait();
  if (to < n) pd_stg(y + to, pd_lds_at((const float *)(smem + pd_tid() * 4), other));
  pd_cluster_arrive();
  pd_cluster_wait();
}
PD_EXPORT(paired, 256);
"""
N = Index.of("N")
NUMBERS = ("n", "by", "spin", "one")
KERNELS = {
    "slow": Kernel("slow", NUMBERS, N.ceildiv(256), text=PRELUDE + SLOW, buffers=("x", "y"), block=Block(256)),
    "mean": Kernel("mean", NUMBERS, N.ceildiv(256), text=PRELUDE + MEAN, buffers=("x", "z", "y"), block=Block(256)),
    "paired": Kernel("paired", NUMBERS, N.ceildiv(512) * 2, text=HOPPER_PRELUDE + PAIRED_KERNEL, buffers=("x", "y"),
                     scratch=Index.of(1024), block=Block(256, "sm_90a", cluster=2)),
}  # fmt: skip


def _launch(kernel: str, buffers: tuple[str, ...], by: int, spin: int) -> Launch:
    """Return a launch that adds ``by`` to the sum of the first buffers and writes it to the last one."""
    k, numbers = KERNELS[kernel], (N, *map(Index.of, (by, spin, 1)))
    c = Candidate(kernel, buffers, numbers, k.tasks, scratch=k.scratch, block=k.block)
    return Launch((c,), N, N, label=buffers[-1], writes=buffers[-1:])


def _chain(output: str, by: int, spin: int, kernels: tuple[str, ...]) -> list[Launch]:
    names = ["x", *(f"{output}{k}" for k in range(1, DEPTH)), output]
    return [_launch(k, pair, by, spin) for k, pair in zip(cycle(kernels), pairwise(names), strict=False)]


def _mean(k: int, output: str, by: int, spin: int) -> Launch:
    """Return a launch for the mean of both results of step ``k``, plus ``by``."""
    names = [f"{x}{k}" if k else "x" for x in "op"] + [f"{output}{k + 1}" if k + 1 < DEPTH else output]
    return _launch("mean", tuple(names), by, spin)


def plan(name: str, spin: int = SPIN) -> HostPlan:
    """Return a plan of both chains, one after the other or in waves of two; or ``joins``."""
    kernels = ("slow", "paired") if name == "clusters" else ("slow",)
    first, second = _chain("o", 1, spin, kernels), _chain("p", 2, spin, kernels)
    turns = [x for pair in zip(first, second, strict=True) for x in pair]
    side_by_side = name != "chains"
    launches = turns if side_by_side else [*first, *second]
    if name == "joins":
        launches = [_mean(k, x, by, spin) for k in range(DEPTH) for x, by in (("o", 1), ("p", 2))]
    roles = {"x": "input", "o": "output", "p": "output"}
    names = ["x", *(x.label for x in launches)]
    return HostPlan(
        name="launches", inputs=("x",), outputs=("o", "p"), constants={}, guards=(), launches=tuple(launches),
        buffers={b: Buffer(b, "float32", (N,), roles.get(b, "intermediate")) for b in names},
        sources=(SymbolSource("N", "x", 0),), waves=(2,) * DEPTH if side_by_side else (),
        kernels=tuple(KERNELS[k] for k in dict.fromkeys(x.candidates[0].kernel for x in launches)),
        headers=dict(device_headers()), place="cuda",
    )  # fmt: skip


def programs(target: str) -> Iterator[tuple[str, Artifact]]:
    """Yield (name, artifact) of the plans that the target can run; BuildError: no compiler."""
    for name in ADDENDS:
        if name not in ON_HOPPER or target in (EMULATION, "cuda:sm_90a"):
            yield name, build_artifact(plan(name, 0 if target == EMULATION else SPIN), target)[0]
