"""Schedules written by hand, against the kernels that groups get by default.

    python -m benchmarks.written MODEL.onnx B=1,L=128 [B=1,L=8 ...] [--trials 12] [--seed 0] [--out schedules.json]

Each distinct product of the model gets one schedule in register tiles (``template``), whose numbers are searched at
the given sizes. It is kept if it is faster than the default by 3 % in the geometric mean over the sizes. Then the whole
program is timed with and without the schedules that are kept: one thread, calls that alternate, medians.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
import time
from collections.abc import Mapping
from statistics import median

import numpy as np
import onnx

import polydyn
from polydyn.errors import LegalityError, ScheduleError
from polydyn.explore import Group, Schedule, groups, save_schedules
from polydyn.explore.search import search
from polydyn.testing.inputs import feeds

LEAST_GAIN = 1.03
"""Least gain of a schedule that is kept."""
ROUNDS = 21
"""Timed calls of a whole program at each of the sizes."""


def template(group: Group) -> Schedule | None:
    """Return a schedule of a product in register tiles, or None if it cannot have one."""
    lanes = group.compiled().processor.width
    try:
        s = group.schedule()
        with contextlib.suppress(ScheduleError):  # columns may be computed
            s = s.pack(lanes)
        s = s.tile(i=12 if lanes == 16 else 4, j=2 * lanes).even("i")
        batches = [x for x in s.axes if x not in ("i", "j", "k") and x.startswith("i")]
        s = s.reorder("j.0", "i.0").accumulate(at="i.0").unroll("i", "j").vectorize("j").parallel(*batches, "j", "i")
        s.compile()
    except (ScheduleError, LegalityError) as e:
        print(f"  {group.label}: {e.message}")
        return None
    return s


def gain(s: Schedule, sizes: list[Mapping[str, int]]) -> float:
    """Return the geometric mean of the default's time over the schedule's."""
    logs = [math.log(s.gain(60, **_own(s, dims))) for dims in sizes]
    return math.exp(sum(logs) / len(logs))


def _own(s: Schedule, dims: Mapping[str, int]) -> dict[str, int]:
    return {n: dims[n] for n in s.dims}


def whole(plain: polydyn.Program, written: polydyn.Program, given: Mapping[str, object]) -> tuple[float, float]:
    """Return the median seconds of both programs, from calls that alternate."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(ROUNDS):
        for program, into in zip((plain, written), times, strict=True):
            begin = time.perf_counter()
            program(given)
            into.append(time.perf_counter() - begin)
    return median(times[0]), median(times[1])


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("sizes", nargs="+")
    parser.add_argument("--trials", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="schedules.json")
    args = parser.parse_args()
    sizes = [{n: int(v) for n, v in (x.split("=") for x in s.split(","))} for s in args.sizes]
    done: dict[str, Schedule] = {}
    kept = []
    for group in (g for g in groups(args.model) if g.roles):
        key = repr(group.polyhedral)
        if key in done:
            continue
        s = template(group)
        if s is None:
            continue
        found = search(s, [_own(s, dims) for dims in sizes], args.trials, args.seed)
        done[key] = found.best
        faster = gain(found.best, sizes)
        print(f"{group.label}: {faster:.3f}, {found.best.steps[-6:-4]}", flush=True)
        kept += [found.best] if faster >= LEAST_GAIN else []
    print(f"{len(kept)} of {len(done)} schedules kept")
    if not kept:
        return 0
    save_schedules(args.out, *kept)
    plain = polydyn.compile(args.model, threads=1)
    written = polydyn.compile(args.model, schedules=kept, threads=1)
    proto = onnx.load(args.model)
    for dims in sizes:
        given = feeds(proto, dims, seed=args.seed)
        for n, value in plain(given).items():
            np.testing.assert_allclose(written(given)[n], value, rtol=1e-3, atol=1e-3)
        before, after = whole(plain, written, given)
        print(f"{dims}: {1e3 * before:.2f} ms by default, {1e3 * after:.2f} ms written, {before / after:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
