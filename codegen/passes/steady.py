"""The asynchronous pipeline of a product: copies run ahead in a ring, loads of fragments run ahead of instructions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from polydyn.codegen.ir import Body, Call, Compare, For, If
from polydyn.codegen.passes.bind import fold
from polydyn.schedules.index import Index, maximum

COMMIT, BARRIER = Call("pd_cp_async_commit"), Call("pd_syncthreads")


@dataclass(frozen=True)
class Stream:
    """What an iteration of a product's loop does, at the iteration given.

    ``copies``: from memory into slot ``iteration % stages``; its second argument says whether all the steps exist.
    ``whole``: iterations before this one have all their steps. ``uses``: what reads the slot, as pairs (loads,
    products): the products of a pair need the loads of it alone, and registers of two pairs that follow each other
    (the first follows the last one) are different. One pair: its loads are not taken apart.
    """

    copies: Callable[[Index, bool], Body]
    uses: Callable[[Index], Sequence[tuple[Body, Body]]]
    whole: Index


def stream(loop: For, stages: int, of: Stream) -> Body:
    """Multi-buffering with asynchronous copies (TSCompiler 5.4), and of fragments.

    Before: ``for t: copies(t); for (loads, products) of uses(t): loads; products``. After: copies of ``stages - 1``
    iterations; then a loop that asks for nothing, as all that it copies exists, and one that ends the reduction. An
    iteration waits for the copies of the next one before its last products and loads that one's first fragments; so
    neither a wait nor a load stands between the products.

    The slot that an iteration copies into is the one of the iteration before, whose last loads stand before a barrier;
    so do the last loads of all, and nothing is in flight then: behind the loops the ring is free.
    """
    wait, t = Call(f"pd_cp_async_wait<{stages - 2}>"), Index.of(loop.var)
    lo, hi = loop.lo, loop.hi
    apart = len(of.uses(t)) > 1

    def if_more(at: Index, body: Body) -> Body:
        return (If((Compare("<", at, hi),), body),) if body else ()

    def iteration(steady: bool) -> Body:
        at = t + (stages - 1)
        copies = (*(of.copies(at, True) if steady else if_more(at, of.copies(at, False))), COMMIT)
        if not apart:
            return (wait, BARRIER, *copies, *(n for pair in of.uses(t) for body in pair for n in body))
        (_, products), *others = of.uses(t)
        out = copies
        for loads, following in others:
            out, products = (*out, *loads, *products), following
        first = of.uses(t + 1)[0][0]
        return (*out, wait, BARRIER, *(first if steady else if_more(t + 1, first)), *products)

    before = tuple(n for s in range(stages - 1) for n in (*if_more(lo + s, of.copies(lo + s, False)), COMMIT))
    first = (wait, BARRIER, *if_more(lo, of.uses(lo)[0][0])) if apart else ()
    end = maximum(lo, of.whole - (stages - 1))
    loops = (replace(loop, hi=end, body=iteration(True)), replace(loop, lo=end, body=iteration(False)))
    done = () if apart else (Call("pd_cp_async_wait<0>"),)
    return fold((*before, *first, *loops, *done))
