"""Sizes of a model at which the loops of a group have given extents.

A search launches kernels at extents of its own: whole tiles, few rows. The parameters of a convolution are more than
the extents of its loops: its rows are the pixels of an image, and its addresses need the image's width too. So sizes
of the model are found that give the loops these extents, of an image as square as possible.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from polydyn.schedules.evaluator import evaluator
from polydyn.schedules.index import Index
from polydyn.search.backbone import Shape

MOST = 1 << 40
"""No size is larger."""


def model_sizes(extents: Mapping[str, Index], shape: Shape) -> dict[str, int]:
    """Sizes of the symbols in ``extents`` (loop -> extent over a model's symbols) at which the loops have the extents
    in ``shape``, or the least extents above them that they can have together.
    """
    sizes: dict[str, int] = {}
    for loop in sorted(extents, key=lambda x: (len(extents[x].symbols()), x)):
        e = extents[loop].subs({n: Index.of(v) for n, v in sizes.items()})
        if names := sorted(e.symbols()):
            sizes |= _solve(e, names, shape[loop])
    return sizes


def _solve(e: Index, names: Sequence[str], goal: int) -> dict[str, int]:
    """Values at which an expression that grows with each symbol is ``goal``, or the least above it that was found."""
    run = evaluator(e)
    *others, last = names
    least = _first(lambda v: run(dict.fromkeys(names, v)) >= 1)
    side = _first(lambda v: run(dict.fromkeys(names, v)) >= goal)
    fixed, moving = dict.fromkeys(others[:-1], least), others[-1:]
    best: tuple[int, dict[str, int]] | None = None
    for width in range(side, least - 1, -1) if moving else (side,):
        at = fixed | dict.fromkeys(moving, width)
        high = _first(lambda v, at=at: run(at | {last: v}) >= goal)  # type: ignore[misc]
        found = at | {last: high}
        if high < MOST and (best is None or run(found) < best[0]):
            best = run(found), found
        if best is not None and best[0] == goal:
            break
    return best[1] if best is not None else dict.fromkeys(names, side)


def _first(holds: Callable[[int], bool]) -> int:
    """The least number from 1 on of which a monotonous condition holds; ``MOST`` where none does."""
    high = 1
    while high < MOST and not holds(high):
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
