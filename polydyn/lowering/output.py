"""Arrays that a group writes to memory."""

from __future__ import annotations

from polydyn.errors import CodegenError
from polydyn.lowering.flatten import FlatNode
from polydyn.lowering.group import Canonical
from polydyn.schedules.index import Index


def output_array(
    names: Canonical, n: FlatNode, iters: tuple[tuple[str, Index], ...], shared: bool = False
) -> tuple[str, tuple[Index, ...]]:
    """Declare the output of a node over its iterators. Return the array and the subscripts (the iterators).

    ``shared``: the offset of a window in its tensor becomes a parameter, so that one kernel writes all windows.
    """
    symbols = frozenset(x for x, _ in iters)
    rest = names.index(n.address, symbols)
    strides: list[Index] = []
    for x, _ in iters:
        stride, rest = rest.split(x)
        strides.append(stride)
    if rest.symbols() & symbols:
        raise CodegenError(f"{n.output} is not written at an affine address: {n.address}", tensor=n.output)
    if shared and n.buffer != n.output:
        strides, rest = [names.factor(s) for s in strides], names.factor(rest)
    array = names.output(n.buffer, n.dtype, tuple(e for _, e in iters), tuple(strides), rest)
    return array, tuple(Index.of(x) for x, _ in iters)
