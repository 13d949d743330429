"""Passes for sm_90a: one thread lets TMA fill rings of buffers, warpgroups issue asynchronous products on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from polydyn.codegen.indices import substitute
from polydyn.codegen.ir import Alloc, Body, Call, Compare, For, If, Inst, Pointer, rewrite, walk
from polydyn.schedules.expr import FromIndex, Value
from polydyn.schedules.index import ONE, ZERO, Index, IndexLike, minimum

V = Index.of
WARPGROUP = 128
"""Threads of a warpgroup."""
CLUSTER_ARRIVE = Call("pd_cluster_arrive")
"""A thread announces that it accesses no other block any more."""
CLUSTER_BARRIER: Body = (CLUSTER_ARRIVE, Call("pd_cluster_wait"))
"""All blocks of a cluster synchronise: their stores are visible, and their reads are complete."""
PING_PONG_BARRIER = "turn"
"""The mbarrier of ping-pong tiles whose steps are all issued, with one phase per tile."""


@dataclass(frozen=True)
class Ring:
    """A ring of buffers in shared memory, filled by asynchronous copies of ``size`` bytes, with two mbarriers per slot.

    Iteration n of ``loop`` fills slot ``n % stages``. A slot is *full* when its bytes have arrived, *empty* when all
    consumers have released it. One stage without a loop is filled once and never empty. ``before``: iterations of the
    loop in earlier tiles, whose slots precede these. ``blocks``: blocks of a cluster; each block copies into the
    slots of all: a slot is empty when the consumers of all blocks have released it.
    """

    name: str
    stages: int
    size: int
    loop: For | None = None
    before: Index = ZERO
    blocks: int = 1

    def slot(self, at: IndexLike) -> Index:
        """Return the slot of an iteration."""
        return (self.before + at) % self.stages

    def _bar(self, which: str, at: IndexLike) -> Value:
        return Pointer("uint64", which + self.name, self.slot(at))

    def full(self, at: IndexLike = 0) -> Value:
        """Return the mbarrier on which the copies of an iteration count their bytes."""
        return self._bar("full", at)

    def _parity(self, at: Index) -> Index:
        return (self.before + at - self.loop.lo) // self.stages % 2 if self.loop else ZERO

    def fill(self, copies: Body) -> Body:
        """Return the producer's statements in an iteration."""
        at = V(self.loop.var) if self.loop else ZERO
        ready = (Call("pd_mbar_wait", (self._bar("empty", at), _number(1 - self._parity(at)))),) if self.loop else ()
        return (*ready, Call("pd_mbar_expect_tx", (self.full(at), _number(self.size))), *copies)

    def wait(self, at: Index = ZERO) -> Call:
        """Wait until the copies of iteration ``at`` have arrived."""
        return Call("pd_mbar_wait", (self.full(at), _number(self._parity(at))))

    def release(self, at: Index, *where: Compare) -> If:
        """Release the slot of iteration ``at`` by a consumer: one thread signals each block, if ``where`` holds."""
        empty = self._bar("empty", at)
        if self.blocks == 1:
            return If((*where, _first_thread()), (Call("pd_mbar_arrive", (empty,)),))
        thread = V("tid") % WARPGROUP
        arrive = Call("pd_mbar_arrive_at", (empty, _number(thread)))
        return If((*where, Compare("<", thread, V(self.blocks))), (arrive,))

    def barriers(self, consumers: int) -> tuple[tuple[str, int], ...]:
        """Return (name, arrivals) of its mbarriers."""
        return ((f"full{self.name}", 1), *(((f"empty{self.name}", consumers * self.blocks),) if self.loop else ()))


@dataclass(frozen=True)
class Product:
    """A product that is issued as a group: its body, its ring, registers that it uses while it runs."""

    body: Body
    ring: Ring
    keep: Body

    def issue(self, at: Index) -> Body:
        """Issue the group of iteration ``at`` of the ring's loop."""
        assert self.ring.loop is not None
        body = substitute(self.body, {self.ring.loop.var: at})
        return (self.ring.wait(at), Call("pd_wgmma_fence"), *body, Call("pd_wgmma_commit"))

    def retire(self, at: Index, later: int) -> Body:
        """Wait for the product, after which ``later`` groups were issued, and release its slot."""
        return (Call(f"pd_wgmma_wait<{later}>"), *self.keep, self.ring.release(at))


def specialise(
    rings: Sequence[tuple[Ring, Body]], consumers: int, consume: Body, registers: tuple[int, int] = (40, 232),
    walk: Callable[[For], Body] = lambda loop: (loop,), barriers: Sequence[tuple[str, int]] = (), beside: Body = (),
    early: Body = (),
) -> Body:  # fmt: skip
    """Warp specialisation: a warpgroup's first thread runs the copies of all rings, the other warpgroups ``consume``.

    ``rings``: with the copies of an iteration; all loops are equal, and rings without a loop are filled first.
    ``registers``: registers of a producer's and a consumer's thread, which ``setmaxnreg`` redistributes. ``walk``:
    transforms the producer's loop. ``barriers``: further mbarriers, with their arrivals; ``beside``: final statements
    of all producers. Blocks of a cluster begin after all their mbarriers are initialised, and none exits before all
    threads have executed ``CLUSTER_ARRIVE``, which ``consume`` does after its last release. Barriers are initialised
    while the previous launch may still run. ``early`` runs then, too, and reads nothing that a launch writes.
    """
    thread, clusters = V("tid"), any(ring.blocks > 1 for ring, _ in rings)
    meet = Call("pd_cluster_start" if clusters else "pd_syncthreads")
    bars = [(name, slot, count) for ring, _ in rings for slot in range(ring.stages)
            for name, count in ring.barriers(consumers)] + [(name, 0, count) for name, count in barriers]  # fmt: skip
    init = (Call("pd_mbar_init", (Pointer("uint64", name, V(slot)), _number(count))) for name, slot, count in bars)
    once = tuple(n for ring, copies in rings if ring.loop is None for n in ring.fill(copies))
    loop = next(ring.loop for ring, _ in rings if ring.loop is not None)
    fill = tuple(n for ring, copies in rings if ring.loop is not None for n in ring.fill(copies))
    rolled = replace(loop, kind="unroll1", body=fill)  # copies of several steps at once would spill its few registers
    only = If((Compare("==", thread, ZERO),), (*once, *walk(rolled)))
    start = If((Compare("==", thread, ZERO),), (*init, Call("pd_fence_mbar_init"), *early))
    produce: Body = (Call(f"pd_reg_dec<{registers[0]}>"), only, *[CLUSTER_ARRIVE] * clusters, *beside)
    work: Body = (Call(f"pd_reg_inc<{registers[1]}>"), *consume)
    split = If((Compare("<", thread, V(WARPGROUP)),), produce, work)
    out: Body = (start, Call("pd_grid_begin"), meet, split, *[Call("pd_cluster_wait")] * clusters)
    for name in reversed(dict.fromkeys(name for name, _, _ in bars)):
        slots = 1 + max(slot for of, slot, _ in bars if of == name)
        out = (Alloc(name, "uint64", V(slots), "shared", out),)
    return out


def first_round(ring: Ring, copies: Body, copied: str, fetched: str) -> Body:
    """Return the statements ``copied`` of the first copies into each slot, as statements ``fetched``."""
    assert ring.loop is not None
    some = tuple(n for n in copies if {x.statement for x in walk((n,)) if isinstance(x, Inst)} == {copied})
    body = rewrite(some, lambda x: Inst(fetched, x.args, x.coords) if isinstance(x, Inst) else x)
    return (replace(ring.loop, hi=minimum(ring.loop.hi, ring.loop.lo + ring.stages), body=body),)


def accumulate(ring: Ring, uses: Body, before: Body, after: Body, add: Body = (), issued: Body = ()) -> Body:
    """Return a consumer for ``before; for step: uses; after`` whose steps add to one sum.

    A step's wgmma are one group. The slot of the previous step is released when its group has retired. Without steps
    nothing happens. ``add``: adds the sums of a step to the sums so far, if the instructions do not: then each step is
    waited for, while other warpgroups multiply. ``issued``: statements after the last issue, if the ring continues with
    other tiles: then the last slot is released too.
    """
    loop = ring.loop
    assert loop is not None
    at = V(loop.var)
    issue = (ring.wait(at), Call("pd_wgmma_fence"), *uses, Call("pd_wgmma_commit"))
    last: Body
    if add:
        use = (*issue, Call("pd_wgmma_wait<0>"), ring.release(at), *add)
        last = ()
    else:
        done = ring.release(at + (ring.stages - 1), Compare(">", at, loop.lo))
        use = (*issue, Call("pd_wgmma_wait<1>"), done)
        last = (*issued, Call("pd_wgmma_wait<0>"))
        last += (ring.release(loop.hi - 1),) if issued else ()
    # ptxas keeps wgmma asynchronous only if it sees that no path around the loop reads the accumulators
    return (*before, If((Compare(">", loop.hi, loop.lo),), (replace(loop, body=use), *last, *after)))


def in_turn(tile: Index, consumers: int, consume: Callable[[Body], Body]) -> Body:
    """Return a consumer's statements for tile number ``tile`` of a block in the ping-pong form.

    ``consume``: builds the tile, given the statement that signals that all of its steps are issued. Only then the next
    tile begins to multiply: its slots of the ring follow this one's, and a parity does not distinguish a phase from the
    one before the last. So the epilogue of one tile overlaps the products of the other.
    """
    turn = Pointer("uint64", PING_PONG_BARRIER, ZERO)
    wait = Call("pd_mbar_wait", (turn, _number((tile + 1) % 2)))
    done = If((_first_thread(),), (Call("pd_mbar_arrive", (turn,)),))
    mine = Compare("==", tile % consumers, V("tid") // WARPGROUP - 1)
    return (If((mine,), (wait, *consume((done,)))),)


def stagger(tiles: For, first: Product, second: Product, beside: Body, behind: Body, fence: Body) -> Body:
    """Return a consumer for ``for tiles: first; beside; behind; second``, with at least one tile.

    Both products of adjacent steps are in flight at the same time, and ``beside`` runs during the second product of the
    previous step: it accesses nothing of that product, but ``behind`` does. ``fence`` keeps the compiler from moving
    ``beside`` after the wait.
    """
    at, last = V(tiles.var), tiles.hi - 1
    begin = substitute((*beside, *behind), {tiles.var: tiles.lo})
    step = (
        *first.issue(at), *second.issue(at - 1), *first.retire(at, 1), *beside, *fence, *second.retire(at - 1, 0),
        *behind,
    )  # fmt: skip
    return (
        *first.issue(tiles.lo), *first.retire(tiles.lo, 0), *begin,
        replace(tiles, lo=tiles.lo + ONE, body=step),
        *second.issue(last), *second.retire(last, 0),
    )  # fmt: skip


def _first_thread() -> Compare:
    """Return the condition for the first thread of its warpgroup."""
    return Compare("==", V("tid") % WARPGROUP, ZERO)


def _number(i: IndexLike) -> Value:
    return FromIndex("int32", V(i))
