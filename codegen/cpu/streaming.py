"""When a kernel's stores bypass the caches, and the order in which it then runs its tasks.

A cached store first reads the line, later writes it back, and evicts another one. For tensors larger than the caches
this traffic is useless; a streaming store writes whole lines only. The decision is made at run time: the launch passes
the bytes that it moves, and the kernel compares them with the machine's last-level cache.
"""

from __future__ import annotations

from polydyn.codegen.ir import Compare
from polydyn.schedules.expr import ITEMSIZE, loads
from polydyn.schedules.index import ONE, ZERO, Index, minimum, product
from polydyn.schedules.model import Group

STREAM = "stream_bytes"
"""Launch-time symbol: bytes moved. Stores bypass the caches if it is at least the size of the last level."""
CACHE = Index.of("PD_CACHE_BYTES")
STREAMS = Compare(">=", Index.of("stream"), ONE)
MAX_TRAFFIC_RATIO = 3
"""Maximum ratio of bytes moved to bytes written. Launches that write less gain little."""
SAMPLE = 1000
"""The size that all symbols get when strides are compared to find the outer axis."""


def moved_bytes(group: Group) -> Index:
    """Return the bytes that one launch reads and writes, counting the elements that its accesses reach once per tensor.
    """
    read: dict[str, Index] = {}
    for s in group.statements:
        for r in loads(s.value):
            a = group.arrays[r.buffer]
            if a.role != "local":
                iterators = a.address(r.index).symbols()
                read[r.buffer] = product(e for x, e in s.iters if x in iterators) * ITEMSIZE[a.dtype]
    outputs = (a for a in group.arrays.values() if a.role == "output")
    written = sum((product(a.shape) * ITEMSIZE[a.dtype] for a in outputs), ZERO)
    return minimum(sum(read.values(), written), written * MAX_TRAFFIC_RATIO)


def reading_order(group: Group, head: tuple[str, ...]) -> tuple[str, ...]:
    """Return the iterators ``head`` in the memory order of the operands, outermost first.

    Return an empty tuple if that is the given order, or if the operands disagree or cannot be ordered. Operands that
    lack one of the iterators do not count. The order is only a preference: strides are compared at one sample of the
    sizes.
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
