"""Sizes of a model at which the loops of a group have given extents.

A search launches kernels at chosen extents: full tiles, few rows. A convolution has more parameters than loop extents:
its rows are the pixels of an image, but its addresses also need the image's width. So this module finds sizes of the
model that give the loops these extents, with an image that is as square as possible.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from polydyn.schedules.evaluator import evaluator
from polydyn.schedules.index import Index
from polydyn.search.backbone import Shape

MAX_SIZE, LARGE_SIZE = 1 << 40, 1 << 12
"""Maximum size, and a size at which no side of an image is negative."""


def model_sizes(extents: Mapping[str, Index], shape: Shape, lengths: Iterable[Index] = ()) -> dict[str, int]:
    """Return sizes of the symbols in ``extents`` (loop -> extent over a model's symbols) at which the loops have the
    extents in ``shape``, or the smallest possible larger extents.

    ``lengths``: expressions that are not negative at the sizes, such as the sides of an image: without them an image of
    -1 x -1 pixels would have one pixel. Those that are negative at large sizes are no lengths.
    """
    sizes: dict[str, int] = {}
    lengths = [e for e in lengths if e.symbols() and e.evaluate(dict.fromkeys(e.symbols(), LARGE_SIZE)) >= 0]
    for loop in sorted(extents, key=lambda x: (len(extents[x].symbols()), x)):
        e = extents[loop].subs({n: Index.of(v) for n, v in sizes.items()})
        if names := sorted(e.symbols()):
            whole = [x.subs({n: Index.of(v) for n, v in sizes.items()}) for x in lengths]
            sizes |= _solve(e, names, shape[loop], [x for x in whole if x.symbols() <= set(names)])
    return sizes


def _solve(e: Index, names: Sequence[str], goal: int, lengths: Sequence[Index]) -> dict[str, int]:
    """Return values at which an expression, increasing in each symbol, is ``goal``, or the smallest larger value
    found. No value of ``lengths`` is negative there."""
    run, sides = evaluator(e), list(map(evaluator, lengths))
    *others, last = names

    def reaches(values: Mapping[str, int], least: int) -> bool:
        return run(values) >= least and all(x(values) >= 0 for x in sides)

    low = _first(lambda v: reaches(dict.fromkeys(names, v), 1))
    side = _first(lambda v: reaches(dict.fromkeys(names, v), goal))
    fixed, moving = dict.fromkeys(others[:-1], low), others[-1:]
    best: tuple[int, dict[str, int]] | None = None
    for width in range(side, low - 1, -1) if moving else (side,):
        values = fixed | dict.fromkeys(moving, width)
        high = _first(lambda v, values=values: reaches(values | {last: v}, goal))  # type: ignore[misc]
        sizes = values | {last: high}
        if high < MAX_SIZE and (best is None or run(sizes) < best[0]):
            best = run(sizes), sizes
        if best is not None and best[0] == goal:
            break
    return best[1] if best is not None else dict.fromkeys(names, side)


def _first(holds: Callable[[int], bool]) -> int:
    """Return the smallest number, from 1 on, at which a monotonic condition holds; ``MAX_SIZE`` if there is none."""
    high = 1
    while high < MAX_SIZE and not holds(high):
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
