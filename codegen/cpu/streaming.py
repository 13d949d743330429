"""When a kernel's stores go around the caches, and in which order it then runs its tasks.

A line that is stored to is first read, later written back, and drives another one out. For tensors that the caches
cannot hold anyway that is traffic for nothing; a streaming store writes whole lines only. Whether a launch streams is
asked at run time: the launch says how many bytes it moves, the kernel compares with the machine's last-level cache.
"""

from __future__ import annotations

from polydyn.codegen.ir import Compare
from polydyn.schedules.expr import ITEMSIZE, loads
from polydyn.schedules.index import ONE, ZERO, Index, minimum, product
from polydyn.schedules.model import Group

STREAM = "stream_bytes"
"""Launch-time symbol: stores go around the caches when it is no less than the last level holds."""
CACHE = Index.of("PD_CACHE_BYTES")
STREAMS = Compare(">=", Index.of("stream"), ONE)
MOST_MOVED = 3
"""Bytes moved count up to so many times those written: where little is written there is little to save."""
SAMPLE = 1000
"""What sizes are taken to be where strides are compared to find out which axis lies outside."""


def moved_bytes(group: Group) -> Index:
    """Bytes that one launch reads and writes, each tensor once, as far as its accesses reach."""
    read: dict[str, Index] = {}
    for s in group.statements:
        for r in loads(s.value):
            a = group.arrays[r.buffer]
            if a.role != "local":
                iterators = a.address(r.index).symbols()
                read[r.buffer] = product(e for x, e in s.iters if x in iterators) * ITEMSIZE[a.dtype]
    outputs = (a for a in group.arrays.values() if a.role == "output")
    written = sum((product(a.shape) * ITEMSIZE[a.dtype] for a in outputs), ZERO)
    return minimum(sum(read.values(), written), written * MOST_MOVED)


def reading_order(group: Group, head: tuple[str, ...]) -> tuple[str, ...]:
    """The iterators ``head`` as the operands lie in memory, outermost first.

    Empty when they lie as they stand, disagree, or cannot be ordered. Operands that lack one of them do not count. An
    order is a preference, never a question of right: strides are compared at one sample of the sizes.
    """
    orders = set()
    for s in group.statements:
        for r in (r for r in loads(s.value) if group.arrays[r.buffer].role != "local"):
            address = group.arrays[r.buffer].address(r.index)
            parts = {x: address.split(x) for x in head}
            if any(x in a.symbols() | rest.symbols() for x, (a, rest) in parts.items()):
                return ()
            at = {x: a.subs(dict.fromkeys(a.symbols(), SAMPLE)).constant or 0 for x, (a, _) in parts.items()}
            if all(at.values()):
                orders.add(tuple(sorted(head, key=lambda x: -at[x])))
    order = orders.pop() if len(orders) == 1 else ()
    return () if order == head else order
