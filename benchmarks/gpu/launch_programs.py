"""Programs of slow additions for ``launch_order``, written by hand.

Two chains from one input, ``o = x + 1 + ... + 1`` and ``p = x + 2 + ... + 2``. One after the other their intermediates
take turns in few places, so a launch overwrites what the last but one read; side by side they are branches of a graph.
Blocks end at different times and write last: who does not wait reads what the call before has left. Every other launch
may be one of clusters, whose blocks write what their neighbours have computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle, pairwise

from benchmarks.gpu.launch_order import DEPTH, EMULATION
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
PAIRED = """PD_KERNEL_CLUSTER(paired, 256, 1, 2)(const float *x, float *y, int64_t n, int64_t by, int64_t spin,
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
BLOCKS = {"slow": Block(256), "paired": Block(256, "sm_90a", cluster=2)}
TASKS = {"slow": N.ceildiv(256), "paired": N.ceildiv(512) * 2}
SCRATCH = {"slow": Index.of(0), "paired": Index.of(1024)}
TEXTS = {"slow": PRELUDE + SLOW, "paired": HOPPER_PRELUDE + PAIRED}


def _chain(output: str, by: int, spin: int, kernels: tuple[str, ...]) -> list[Launch]:
    names = ["x", *(f"{output}{k}" for k in range(1, DEPTH)), output]
    numbers = (N, *map(Index.of, (by, spin, 1)))
    made = (
        Candidate(k, pair, numbers, TASKS[k], scratch=SCRATCH[k], block=BLOCKS[k])
        for k, pair in zip(cycle(kernels), pairwise(names), strict=False)
    )
    return [Launch((c,), N, N, label=c.buffers[1], writes=c.buffers[1:]) for c in made]


def plan(side_by_side: bool, spin: int = SPIN, kernels: tuple[str, ...] = ("slow",)) -> HostPlan:
    """Both chains, one after the other or in waves of two; ``kernels``: which launches of a chain take in turn."""
    first, second = _chain("o", 1, spin, kernels), _chain("p", 2, spin, kernels)
    turns = [x for pair in zip(first, second, strict=True) for x in pair]
    launches = turns if side_by_side else [*first, *second]
    roles = {"x": "input", "o": "output", "p": "output"}
    names = ["x", *(x.label for x in launches)]
    return HostPlan(
        name="launches", inputs=("x",), outputs=("o", "p"), constants={}, guards=(), launches=tuple(launches),
        buffers={b: Buffer(b, "float32", (N,), roles.get(b, "intermediate")) for b in names},
        sources=(SymbolSource("N", "x", 0),), waves=(2,) * DEPTH if side_by_side else (),
        kernels=tuple(Kernel(k, ("n", "by", "spin", "one"), TASKS[k], text=TEXTS[k], buffers=("x", "y"),
                             scratch=SCRATCH[k], block=BLOCKS[k]) for k in kernels),
        headers=dict(device_headers()), place="cuda",
    )  # fmt: skip


def programs(target: str) -> Iterator[tuple[str, Artifact]]:
    """Name -> artifact of the plans that the target can run; BuildError: no compiler."""
    spin = 0 if target == EMULATION else SPIN
    plans = {"chains": plan(False, spin), "branches": plan(True, spin)}
    if target in (EMULATION, f"cuda:{BLOCKS['paired'].arch}"):
        plans["clusters"] = plan(True, spin, ("slow", "paired"))
    for name, made in plans.items():
        yield name, build_artifact(made, target)[0]
