"""Check all orders of launches that a plan allows, on the recorded accesses of one run.

On a CPU the launches of a wave may run in any order or side by side, and waves follow each other. On a device a launch
waits for earlier launches that access the same memory, unless both only read it or both write parts of one buffer.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import numpy as np

from polydyn.program.plan import HostPlan
from polydyn.schedules.expr import Array
from polydyn.testing.plan.faults import Faults
from polydyn.testing.plan.memory import NOBODY, Memory

RANDOM = 20
"""Number of random orders."""
Before = Sequence[frozenset[int]]
"""The launches that each launch must wait for, directly or indirectly."""
Traces = Sequence[tuple[Array, Array]]
"""The (read, written) cells of each launch."""


def required(plan: HostPlan, memory: Memory) -> Before:
    """Return the launches that each launch waits for in this plan."""
    if plan.on_device:
        return _on_device(plan, memory)
    out: list[frozenset[int]] = []
    for n in plan.waves or (1,) * len(plan.launches):
        out += [frozenset(range(len(out)))] * n
    return out


def _on_device(plan: HostPlan, memory: Memory) -> Before:
    """Return the dependences of a device run: launches depend through the start address of their buffers."""
    latest: dict[int, tuple[str, set[int], set[int], set[int]]] = {}
    out: list[frozenset[int]] = []
    for k, x in enumerate(plan.launches):
        if x.writes is None:
            out.append(frozenset(range(k)))
            continue
        waits: set[int] = set()
        for b in x.buffers:
            if plan.buffers[b].role == "constant" or b not in memory.places:
                continue
            at, written = memory.places[b].address, b in x.writes
            buffer, before, writers, readers = latest.get(at, (b, set(), set(), set()))
            if buffer != b:
                before, writers, readers = writers | readers, set(), set()
            waits |= before if written or not writers else writers
            waits |= readers if written else set()
            latest[at] = (b, before, writers | ({k} if written else set()), readers | (set() if written else {k}))
        waits.discard(k)  # a launch that has a buffer twice, as a concatenation of equal parts
        every = {j for j, y in enumerate(plan.launches[:k]) if y.writes is None} | waits
        out.append(frozenset(every.union(*(out[j] for j in every))))
    return out


def conflicts(plan: HostPlan, before: Before, traces: Traces, memory: Memory, faults: Faults) -> None:
    """Add a fault if one of two concurrent launches writes cells that the other reads or writes."""
    here = np.zeros(len(memory.writer), bool)
    for a, (_, writes) in enumerate(traces):
        beside = [b for b in range(len(traces)) if b != a and a not in before[b] and b not in before[a]]
        if not beside or not writes.size:
            continue
        here[writes] = True
        for b in beside:
            for what, cells in zip(("reads", "writes"), traces[b], strict=True):
                hit = cells[here[cells]]
                if hit.size and (what == "reads" or a < b):
                    faults.launch = plan.launches[a].label
                    text = f"writes {hit.size} cells that launch '{plan.launches[b].label}', beside it, {what}"
                    faults.add("conflict", _owner(memory, hit), text)
        here[writes] = False


def replays(plan: HostPlan, before: Before, traces: Traces, memory: Memory, seed: int, faults: Faults) -> None:
    """Replay the accesses in other allowed orders. Every launch must read the same writers' values each time."""
    first = _sources(range(len(traces)), traces, len(memory.writer))
    for order in orders(before, seed):
        if order == list(range(len(traces))):
            continue
        for k, (now, then) in enumerate(zip(_sources(order, traces, len(memory.writer)), first, strict=True)):
            wrong = traces[k][0][now != then]
            if wrong.size:
                faults.launch = plan.launches[k].label
                at = int(np.argmax(now != then))
                got, other = memory.who(int(now[at])), memory.who(int(then[at]))
                faults.add("order", _owner(memory, wrong), f"reads what {got} wrote, and not {other}, in another order")


def _owner(memory: Memory, cells: Array) -> str:
    """Return the last owner of a cell."""
    owner = int(memory.owner[cells[0]])
    return memory.names[owner] if owner >= 0 else "?"


def _sources(order: Sequence[int], traces: Traces, cells: int) -> list[Array]:
    """Return the writer of each cell that a launch reads, for all launches."""
    writer, found = np.full(cells, NOBODY, np.int32), list[Array]([np.zeros(0, np.int32)] * len(traces))
    for k in order:
        reads, writes = traces[k]
        found[k] = writer[reads]
        writer[writes] = k
    return found


def orders(before: Before, seed: int) -> Iterator[list[int]]:
    """Yield allowed orders: each launch as early as possible, as late as possible, last launch first, and random."""
    n, numbers = len(before), random.Random(seed)
    early: list[int] = []
    for k in range(n):
        early.append(1 + max((early[j] for j in before[k]), default=-1))
    late = [n] * n
    for k in reversed(range(n)):
        for j in before[k]:
            late[j] = min(late[j], late[k] - 1)
    yield _ordered(before, [(early[k], k) for k in range(n)])
    yield _ordered(before, [(late[k], k) for k in range(n)])
    yield _ordered(before, [(0, -k) for k in range(n)])
    for _ in range(RANDOM):
        yield _ordered(before, [(0, x) for x in numbers.sample(range(n), n)])


def _ordered(before: Before, rank: Sequence[tuple[int, int]]) -> list[int]:
    """Return the order that always runs the ready launch of lowest rank."""
    order: list[int] = []
    waiting = sorted(range(len(before)), key=lambda k: rank[k])
    done: set[int] = set()
    while waiting:
        k = next(x for x in waiting if before[x] <= done)
        waiting.remove(k)
        order.append(k)
        done.add(k)
    return order
