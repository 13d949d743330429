"""Software pipelining of a product: copies run ahead in a ring, fragment loads run ahead of instructions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from polydyn.codegen.ir import Body, Call, Compare, For, If
from polydyn.codegen.passes.bind import fold
from polydyn.schedules.index import Index, maximum

COMMIT, BARRIER = Call("pd_cp_async_commit"), Call("pd_syncthreads")


@dataclass(frozen=True)
class PipelinedLoop:
    """The parts of a product's loop, as functions of the iteration.

    ``copies``: from memory into slot ``iteration % stages``; its second argument tells whether all steps exist.
    ``whole``: earlier iterations have all their steps. ``uses``: the readers of the slot, as pairs (loads, products).
    The products of a pair need only its loads, and successive pairs (the first follows the last one) use different
    registers. If there is one pair, its loads are not pipelined.
    """

    copies: Callable[[Index, bool], Body]
    uses: Callable[[Index], Sequence[tuple[Body, Body]]]
    whole: Index


def software_pipeline(loop: For, stages: int, pipelined: PipelinedLoop) -> Body:
    """Pipeline a loop with asynchronous copies (TSCompiler 5.4) and fragment loads.

    Before: ``for t: copies(t); for (loads, products) of uses(t): loads; products``. After: copies of ``stages - 1``
    iterations; then a loop without bounds checks, as all its copies exist, and one that ends the reduction. Before its
    last products, an iteration waits for the copies of the next one and loads that one's first fragments. So neither a
    wait nor a load is between products.

    An iteration copies into the slot of the previous iteration, whose last loads precede a barrier. The last loads of
    the loop precede one too, and no copy is in flight then: after the loops the ring is free.
    """
    wait, t = Call(f"pd_cp_async_wait<{stages - 2}>"), Index.of(loop.var)
    lo, hi = loop.lo, loop.hi
    apart = len(pipelined.uses(t)) > 1

    def if_more(at: Index, body: Body) -> Body:
        return (If((Compare("<", at, hi),), body),) if body else ()

    def iteration(steady: bool) -> Body:
        at = t + (stages - 1)
        copies = (*(pipelined.copies(at, True) if steady else if_more(at, pipelined.copies(at, False))), COMMIT)
        if not apart:
            return (wait, BARRIER, *copies, *(n for pair in pipelined.uses(t) for body in pair for n in body))
        (_, products), *others = pipelined.uses(t)
        out = copies
        for loads, following in others:
            out, products = (*out, *loads, *products), following
        first = pipelined.uses(t + 1)[0][0]
        return (*out, wait, BARRIER, *(first if steady else if_more(t + 1, first)), *products)

    before = tuple(n for s in range(stages - 1) for n in (*if_more(lo + s, pipelined.copies(lo + s, False)), COMMIT))
    first = (wait, BARRIER, *if_more(lo, pipelined.uses(lo)[0][0])) if apart else ()
    end = maximum(lo, pipelined.whole - (stages - 1))
    loops = (replace(loop, hi=end, body=iteration(True)), replace(loop, lo=end, body=iteration(False)))
    done = () if apart else (Call("pd_cp_async_wait<0>"),)
    return fold((*before, *first, *loops, *done))
