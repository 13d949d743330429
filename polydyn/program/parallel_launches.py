"""Waves: launches that need nothing of each other run in one fork-join (TSCompiler 4.2, BladeDISC 4.3, horizontally).

The launches of a wave follow each other and none of them reads what another one writes; the memory plan treats them as
simultaneous. On a CPU they are of one kind, so that their work counts can be compared: threads get tasks of all of
them, see ``runtime/waves.c``. On a device they are branches of a run's graph, see ``runtime/cuda_nodes.c``. Launches
may be reordered topologically to enlarge waves: a launch moves towards its first reader, and a launch without readers
runs as early as possible.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from polydyn.errors import PolydynError
from polydyn.program.accesses import launch_accesses
from polydyn.program.memory import LiveRange, arena_estimate, live_ranges, plan_slots
from polydyn.program.plan import HostPlan, IndexCheck, Launch, size_bytes

MEMORY_FACTOR = 1.25
"""Maximum arena size of a plan with waves (at ``memory.SAMPLES``), relative to sequential launches."""


def join_waves(plan: HostPlan) -> HostPlan:
    """Group launches into waves, in the first order whose arena is small enough.

    The order by levels is tried first, then the given order. A launch with unknown ``writes`` keeps its position and
    runs alone. Returns the plan unchanged if both arenas are too large.
    """
    before = _after(plan.launches)
    limit = MEMORY_FACTOR * _arena(plan)
    kinds = ["" if plan.on_device else launch.kind for launch in plan.launches]
    for waves in (_by_level(plan.launches, kinds, before), _in_order(plan.launches, kinds, before)):
        joined = _arranged(plan, waves)
        if _arena(joined) <= limit:
            verify_waves(joined)
            return joined
    return plan


def wave_ranges(plan: HostPlan) -> tuple[range, ...]:
    """Return the launches of every wave. Raises PolydynError if the waves do not cover the launches exactly."""
    counts = plan.waves or (1,) * len(plan.launches)
    if any(n < 1 for n in counts) or sum(counts) != len(plan.launches):
        raise PolydynError(f"waves of {counts} launches, the plan has {len(plan.launches)}")
    ends = [sum(counts[: k + 1]) for k in range(len(counts))]
    return tuple(range(e - n, e) for n, e in zip(counts, ends, strict=True))


def touched_by_wave(plan: HostPlan) -> list[list[str]]:
    """Return the buffers that the launches of each wave use."""
    return [[b for k in wave for b in plan.launches[k].buffers] for wave in wave_ranges(plan)]


def verify_waves(plan: HostPlan) -> None:
    """Raise PolydynError unless

    - every launch is in one wave, and one whose ``writes`` are not known is alone in its wave;
    - a launch writes only the buffers that its ``writes`` name;
    - all writers of a buffer come before its readers, in earlier waves.

    Reads and writes are taken from the texts of the kernels (``program/accesses.py``); ``Launch.reads`` is not used.
    Launches with unknown ``writes`` are assumed to be in a correct order.
    """
    waves = wave_ranges(plan)
    accesses = launch_accesses(plan)
    writers: dict[str, list[int]] = {}
    for wave in waves:
        for k in wave:
            launch = plan.launches[k]
            if launch.writes is None:
                if len(wave) > 1:
                    raise PolydynError(f"the writes of launch '{launch.label}' are unknown, so it must run alone")
                continue
            undeclared = accesses[k].written - set(launch.writes)
            if undeclared:
                raise PolydynError(
                    f"launch '{launch.label}' has undeclared writes", tensor=min(undeclared), rule="writes are complete"
                )
            for b in (*launch.writes, *accesses[k].written):
                writers.setdefault(b, []).append(k)
    wave_of = {k: w for w, wave in enumerate(waves) for k in wave}
    for k, launch in enumerate(plan.launches):
        for b in sorted(accesses[k].read) if launch.writes is not None else ():
            late = [j for j in writers.get(b, ()) if j != k and wave_of[j] >= wave_of[k]]
            if late:
                raise PolydynError(
                    f"wave {wave_of[k]} reads a buffer that wave {wave_of[late[0]]} writes",
                    node=launch.label,
                    tensor=b,
                    rule="all writers run before all readers",
                )


def _reads(launch: Launch) -> list[str]:
    if launch.reads is not None:
        return list(launch.reads)
    return [b for b in dict.fromkeys(launch.buffers) if b not in (launch.writes or ())]


def _after(launches: Sequence[Launch]) -> list[set[int]]:
    """Return the direct dependences of every launch on earlier launches.

    Writers of different parts of one buffer are independent, unless one of them also reads the buffer. A launch with
    unknown writes keeps its order with all other launches.
    """
    writers: dict[str, list[int]] = {}
    readers: dict[str, list[int]] = {}
    before: list[set[int]] = []
    barrier: int | None = None
    for k, launch in enumerate(launches):
        if launch.writes is None:
            before.append(set(range(k)))
            barrier = k
        else:
            earlier = {j for b in _reads(launch) for j in writers.get(b, [])}
            earlier |= {j for b in launch.writes for j in readers.get(b, [])}
            before.append(earlier | ({barrier} if barrier is not None else set()))
            for b in launch.writes:
                writers.setdefault(b, []).append(k)
            for b in _reads(launch):
                readers.setdefault(b, []).append(k)
    return before


def _by_level(launches: Sequence[Launch], kinds: Sequence[str], before: Sequence[set[int]]) -> list[list[int]]:
    """Return waves by (level, kind). The level precedes the first reader's; without readers it is minimal."""
    early: list[int] = []
    for earlier in before:
        early.append(1 + max((early[j] for j in earlier), default=-1))
    late: dict[int, int] = {}
    for k in reversed(range(len(launches))):
        level = late.setdefault(k, early[k])
        for j in before[k]:
            late[j] = min(late.get(j, level - 1), level - 1)
    waves: dict[tuple[int, str], list[int]] = {}
    for k, launch in enumerate(launches):
        kind = f"?{k}" if launch.writes is None else kinds[k]
        waves.setdefault((late[k], kind), []).append(k)
    order = sorted(waves, key=lambda key: (key[0], waves[key][0]))
    return [waves[key] for key in order]


def _in_order(launches: Sequence[Launch], kinds: Sequence[str], before: Sequence[set[int]]) -> list[list[int]]:
    """Return waves of consecutive launches, in the given order."""
    waves: list[list[int]] = []
    for k, launch in enumerate(launches):
        last = waves[-1] if waves else []
        fits = last and launches[last[0]].writes is not None and launch.writes is not None
        if fits and kinds[last[0]] == kinds[k] and before[k].isdisjoint(last):
            last.append(k)
        else:
            waves.append([k])
    return waves


def _arranged(plan: HostPlan, waves: Sequence[Sequence[int]]) -> HostPlan:
    order = [k for wave in waves for k in wave]
    launches = tuple(plan.launches[k] for k in order)
    checks = tuple(sorted((_moved(c, plan, order) for c in plan.index_checks), key=lambda c: c.launch))
    moved = (replace(d, launch=order.index(d.launch), check=_moved(d.check, plan, order)) for d in plan.device_checks)
    device_checks = tuple(sorted(moved, key=lambda d: d.launch))
    waves_of = tuple(map(len, waves))
    return replace(plan, launches=launches, waves=waves_of, index_checks=checks, device_checks=device_checks)


def _moved(check: IndexCheck, plan: HostPlan, order: Sequence[int]) -> IndexCheck:
    """Return the check at its position in the new order of launches.

    On a CPU it precedes the first launch that reads the buffer, among the launches that followed the check before. A
    check after all launches stays there. On a device no launch waits for the check, so it stays with its launch.
    """
    if not 0 <= check.launch < len(order):
        return check
    if plan.on_device:
        return replace(check, launch=order.index(check.launch))
    readers = (n for n, k in enumerate(order) if k >= check.launch and check.buffer in plan.launches[k].buffers)
    return replace(check, launch=min(readers))


def intermediate_lives(plan: HostPlan) -> tuple[LiveRange, ...]:
    """Return the live range of every intermediate of the plan, in waves."""
    sizes = {b.name: size_bytes(b) for b in plan.buffers.values() if b.role == "intermediate"}
    touched = touched_by_wave(plan)
    at_end = [c.buffer for c in plan.index_checks if c.launch == len(plan.launches)]
    return live_ranges(sizes, [*touched[:-1], [*touched[-1], *at_end]] if touched else touched)


def _arena(plan: HostPlan) -> int:
    return arena_estimate(plan_slots(intermediate_lives(plan)))
