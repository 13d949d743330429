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
DONE = Call("pd_cluster_arrive")
"""A thread reaches no other block any more."""
MEETING: Body = (DONE, Call("pd_cluster_wait"))
"""All blocks of a cluster have stored what others read, or have read what others leave."""
TURN = "turn"
"""The mbarrier of tiles whose steps are all issued, where consumers take tiles in turn: a phase for each tile."""


@dataclass(frozen=True)
class Ring:
    """Buffers in shared memory that asynchronous copies fill in turn, ``size`` bytes at a time; two mbarriers for each.

    ``loop``: iteration n of it fills slot ``n % stages``. A slot is *full* when its bytes have come, *empty* when all
    consumers have released it. One stage without a loop is filled once and never empty. ``before``: iterations of the
    loop in earlier tiles, whose slots these follow. ``blocks``: those of a cluster, of which each copies into the
    slots of all: a slot is empty when the consumers of all blocks have released it.
    """

    name: str
    stages: int
    size: int
    loop: For | None = None
    before: Index = ZERO
    blocks: int = 1

    def slot(self, at: IndexLike) -> Index:
        """The slot of an iteration."""
        return (self.before + at) % self.stages

    def _bar(self, which: str, at: IndexLike) -> Value:
        return Pointer("uint64", which + self.name, self.slot(at))

    def full(self, at: IndexLike = 0) -> Value:
        """The mbarrier that the copies of an iteration count their bytes on."""
        return self._bar("full", at)

    def _parity(self, at: Index) -> Index:
        return (self.before + at - self.loop.lo) // self.stages % 2 if self.loop else ZERO

    def fill(self, copies: Body) -> Body:
        """What the producer does in an iteration."""
        at = V(self.loop.var) if self.loop else ZERO
        ready = (Call("pd_mbar_wait", (self._bar("empty", at), _number(1 - self._parity(at)))),) if self.loop else ()
        return (*ready, Call("pd_mbar_expect_tx", (self.full(at), _number(self.size))), *copies)

    def wait(self, at: Index = ZERO) -> Call:
        """Until the copies of iteration ``at`` have come."""
        return Call("pd_mbar_wait", (self.full(at), _number(self._parity(at))))

    def release(self, at: Index, *where: Compare) -> If:
        """A consumer no longer reads the slot of iteration ``at``: a thread says so to each block, if ``where``."""
        empty = self._bar("empty", at)
        if self.blocks == 1:
            return If((*where, _first_thread()), (Call("pd_mbar_arrive", (empty,)),))
        thread = V("tid") % WARPGROUP
        arrive = Call("pd_mbar_arrive_at", (empty, _number(thread)))
        return If((*where, Compare("<", thread, V(self.blocks))), (arrive,))

    def barriers(self, consumers: int) -> tuple[tuple[str, int], ...]:
        """(name, arrivals) of its mbarriers."""
        return ((f"full{self.name}", 1), *(((f"empty{self.name}", consumers * self.blocks),) if self.loop else ()))


@dataclass(frozen=True)
class Product:
    """A product that is issued as a group: its text, the ring it reads, what is written or held while it runs."""

    body: Body
    ring: Ring
    keep: Body

    def issue(self, at: Index) -> Body:
        """The group of iteration ``at`` of the ring's loop."""
        assert self.ring.loop is not None
        body = substitute(self.body, {self.ring.loop.var: at})
        return (self.ring.wait(at), Call("pd_wgmma_fence"), *body, Call("pd_wgmma_commit"))

    def retire(self, at: Index, later: int) -> Body:
        """Waits for it, of which ``later`` groups were issued behind it, and releases what it has read."""
        return (Call(f"pd_wgmma_wait<{later}>"), *self.keep, self.ring.release(at))


def specialise(
    rings: Sequence[tuple[Ring, Body]], consumers: int, consume: Body, registers: tuple[int, int] = (40, 232),
    walk: Callable[[For], Body] = lambda loop: (loop,), barriers: Sequence[tuple[str, int]] = (), beside: Body = (),
    early: Body = (),
) -> Body:  # fmt: skip
    """Warp specialisation: a warpgroup's first thread runs the copies of all rings, the others ``consume``.

    ``rings``: with the copies of an iteration; all loops are the same, and what has none is filled first.
    ``registers``: of a thread of both kinds, which ``setmaxnreg`` deals. ``walk``: what becomes of the producer's loop.
    ``barriers``: more mbarriers, with their arrivals; ``beside``: what all producers do in the end. Blocks of a cluster
    begin when all their mbarriers are initialised, and none leaves before all threads have said ``DONE``: ``consume``
    says so behind its last release. Barriers are made while the launch before may still run; ``early`` is done then,
    too, and reads nothing that a launch writes.
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
    produce: Body = (Call(f"pd_reg_dec<{registers[0]}>"), only, *[DONE] * clusters, *beside)
    work: Body = (Call(f"pd_reg_inc<{registers[1]}>"), *consume)
    split = If((Compare("<", thread, V(WARPGROUP)),), produce, work)
    out: Body = (start, Call("pd_grid_begin"), meet, split, *[Call("pd_cluster_wait")] * clusters)
    for name in reversed(dict.fromkeys(name for name, _, _ in bars)):
        slots = 1 + max(slot for of, slot, _ in bars if of == name)
        out = (Alloc(name, "uint64", V(slots), "shared", out),)
    return out


def first_round(ring: Ring, copies: Body, copied: str, fetched: str) -> Body:
    """The statements ``copied`` of the first copies into each slot, as statements ``fetched``."""
    assert ring.loop is not None
    some = tuple(n for n in copies if {x.statement for x in walk((n,)) if isinstance(x, Inst)} == {copied})
    body = rewrite(some, lambda x: Inst(fetched, x.args, x.coords) if isinstance(x, Inst) else x)
    return (replace(ring.loop, hi=minimum(ring.loop.hi, ring.loop.lo + ring.stages), body=body),)


def accumulate(ring: Ring, uses: Body, before: Body, after: Body, add: Body = (), issued: Body = ()) -> Body:
    """A consumer of ``before; for step: uses; after`` whose steps add to one sum.

    A step's wgmma are one group. The slot of the step before is released once that has retired. Without steps nothing
    happens. ``add``: what adds the sums of a step to those so far, where these are not the instructions' own: then each
    step is waited for, while other warpgroups multiply. ``issued``: what is done once all steps are issued, where the
    ring goes on with other tiles: then the last slot is released too.
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
    # ptxas keeps wgmma asynchronous only when it sees that no path around the loop reads the accumulators
    return (*before, If((Compare(">", loop.hi, loop.lo),), (replace(loop, body=use), *last, *after)))


def in_turn(tile: Index, consumers: int, consume: Callable[[Body], Body]) -> Body:
    """What a consumer does in tile number ``tile`` of a block, where consumers take tiles in turn (ping-pong).

    ``consume``: the tile, given what says that all of its steps are issued. Only then the next one begins to multiply:
    its slots of the ring are behind this one's, and a parity does not tell a phase from the one before the last. So the
    epilogue of one runs beside the products of the other.
    """
    turn = Pointer("uint64", TURN, ZERO)
    wait = Call("pd_mbar_wait", (turn, _number((tile + 1) % 2)))
    done = If((_first_thread(),), (Call("pd_mbar_arrive", (turn,)),))
    mine = Compare("==", tile % consumers, V("tid") // WARPGROUP - 1)
    return (If((mine,), (wait, *consume((done,)))),)


def stagger(tiles: For, first: Product, second: Product, beside: Body, behind: Body, fence: Body) -> Body:
    """A consumer of ``for tiles: first; beside; behind; second``, where there is at least one.

    Both products of neighbouring steps are in flight together, and ``beside`` runs while the second one of the step
    before does: it meets nothing that this one does, ``behind`` does. ``fence``: what keeps a compiler from moving
    ``beside`` behind the wait.
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
    """Whether a thread is the first one of its warpgroup."""
    return Compare("==", V("tid") % WARPGROUP, ZERO)


def _number(i: IndexLike) -> Value:
    return FromIndex("int32", V(i))
