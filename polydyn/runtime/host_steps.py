"""What Python does between the parts of a program: sizes that data decide, and what has no schedule tree.

Other steps run in C (``sequence.KINDS``). A step is a function of a ``Call``; it gives arrays and sizes. Order is
ascending and ties go to the lower place, so results do not depend on threads. Standard library and numpy only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from polydyn.runtime.program import Program

Array = npt.NDArray[Any]


class Call(NamedTuple):
    """What a step is given: arrays, aligned to their elements, None for an absent one; sizes, settings, the models that
    it may run.

    ``kept``: for what the step needs again in the next call; no two calls have it at the same time. Arrays are those of
    this call: a result may not be one of them, nor a view.
    """

    arrays: Sequence[Any]
    dims: Sequence[int]
    settings: Mapping[str, Any]
    bodies: Mapping[str, Program]
    kept: dict[str, Any]


Result = tuple[Sequence[Array], Sequence[int]]
Step = Callable[[Call], Result]

STEPS: dict[str, Step] = {}
"""Kind -> its function."""


def step(kind: str) -> Callable[[Step], Step]:
    """Registers the function of a kind of step."""

    def register(f: Step) -> Step:
        STEPS[kind] = f
        return f

    return register


@step("unique")
def unique(call: Call) -> Result:
    """Different elements, or slices along an axis: they, the first place of each, the number of each element, counts.

    Sorted, or in the order of their first places. NaNs count as equal.
    """
    x, axis = call.arrays[0], call.settings["axis"]
    values, first, inverse, counts = np.unique(x, True, True, True, axis=axis)
    inverse = inverse.reshape(-1)
    if not call.settings["sorted"]:
        order = np.argsort(first, kind="stable")
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        values = np.take(values, order, axis=0 if axis is None else axis)
        first, inverse, counts = first[order], place[inverse], counts[order]
    found = (values, *(a.astype(np.int64, copy=False) for a in (first, inverse, counts)))
    return found, [len(first)]
