"""The last step of every CUDA kernel: its loop IR, checked and printed, with 32-bit and with 64-bit indices."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from polydyn.capability import features_of
from polydyn.clock import timed
from polydyn.codegen.check import verify_body
from polydyn.codegen.cuda.sharing import IS_LAST_BLOCK, RANK
from polydyn.codegen.ir import Body, Compare
from polydyn.codegen.kernel import WORKSPACE, Kernel, with_block
from polydyn.codegen.passes.narrow import LIMIT, narrow_conditions
from polydyn.codegen.passes.threads import WARP
from polydyn.codegen.pipeline import finished
from polydyn.codegen.printers.cuda import THREAD, CudaPrinter, shared_bytes
from polydyn.codegen.printers.cuda_values import HALF
from polydyn.codegen.sharing import UNSHARED, Sharing
from polydyn.debug import Level, show
from polydyn.schedules.expr import FLOATS
from polydyn.schedules.index import Index, IndexLike
from polydyn.schedules.model import Array, stored

LONG_SUFFIX = " int64"
"""Suffix of the version names with 64-bit indices."""


def bound_names(arrays: Mapping[str, Array], symbols: Sequence[str]) -> tuple[str, ...]:
    """Return the names that every step of a kernel may use (``pipeline.run``)."""
    return (*symbols, *THREAD, *stored(arrays))


def without_rows(arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Return the arrays in memory; rows of scores stay in registers."""
    return {n: a for n, a in arrays.items() if a.role != "rows"}


@timed("printing")
def emit(
    kernel: Kernel, body: Body, arrays: Mapping[str, Array], limits: Mapping[str, IndexLike], blocks: int = 1,
    sharing: Sharing = UNSHARED,
) -> tuple[Kernel, ...]:  # fmt: skip
    """Return the kernel with its text: a version with 32-bit indices if they may suffice, then the general one.

    ``kernel`` has everything except text, buffers, shared memory and what ``sharing`` adds. ``limits``: upper bounds of
    block and tile numbers (``narrow_conditions``). ``blocks``: the targeted number of blocks per multiprocessor.
    """
    arrays, limits = {**arrays, **sharing.arrays(kernel.tasks)}, {**limits, RANK: sharing.parts, IS_LAST_BLOCK: 2}
    kernel = sharing.launched(kernel)
    buffers = stored(arrays)
    outputs = [n for n, a in arrays.items() if a.role == "output"]
    floats = {arrays[n].dtype for n in outputs if n != WORKSPACE} & set(FLOATS)
    verify_body(body, (*kernel.symbols, *THREAD), buffers)
    for printed in (kernel.name, kernel.name + "_long"):
        finished(printed, body)
    kernel, block = replace(kernel, buffers=tuple(buffers), scratch=shared_bytes(body)), kernel.device
    threads: dict[str, IndexLike] = {"tid": block.threads, "lane": WARP, "warp": block.threads // WARP}
    threads["bid"] = kernel.tasks
    bounds = {n: Index.of(i) for n, i in {**threads, **limits}.items()}
    guard = narrow_conditions(body, bounds)

    def print_kernel(name: str, index_type: str) -> str:
        printer = CudaPrinter(name, buffers, outputs, kernel.symbols, block.threads, index_type,
                              [m.name for m in block.maps], bool(floats) and floats <= set(HALF),
                              block.cluster)  # fmt: skip
        text = printer.kernel(body, blocks)
        show(Level.TEXTS, kernel.name, f"kernel_{index_type}", lambda: text, "cu")
        return text

    name = kernel.name + "_long"
    text = print_kernel(name, "int64_t")
    kernel = with_block(kernel, features=features_of(text))
    long = replace(kernel, name=name, text=text, version=kernel.version + LONG_SUFFIX)
    if guard is None:
        return (long,)
    arithmetic = kernel.tasks * 4  # of block numbers: sums of a few products, each at most the grid
    if arithmetic.constant is None:
        guard = (Compare("<=", arithmetic, Index.of(LIMIT)), *guard)
    short = replace(kernel, text=print_kernel(kernel.name, "int32_t"), conditions=(*kernel.conditions, *guard))
    return (short, long) if guard else (short,)


class UnbuiltVersion(Protocol):
    """A version before it is built."""

    @property
    def required_multiples(self) -> Collection[tuple[Index, int]]:
        """Pairs (expression, number): the copies require the expression to be a multiple of the number.

        Stores may add more.
        """

    def build(self) -> tuple[Kernel, ...]:
        """Build the kernel, with indices of both widths."""


def drop_covered_versions(
    forms: Iterable[UnbuiltVersion], others: Iterable[Collection[tuple[Index, int]]] = (), first: int | None = None
) -> list[Kernel]:
    """Drop each version whose requirements imply those of an earlier version.

    ``first`` keeps that many index widths per version. ``others``: the requirements of versions that exist already.
    """
    out: list[Kernel] = []
    earlier = [set(o) for o in others]
    for form in forms:
        if any(o <= set(form.required_multiples) for o in earlier):  # most do, and need not be built
            continue
        kernels = form.build()[:first]
        if kernels and not any(o <= set(kernels[0].multiples) for o in earlier):
            out += kernels
            earlier.append(set(kernels[0].multiples))
    return out


def narrow_indices_first(versions: Sequence[Kernel]) -> tuple[Kernel, ...]:
    """Sort versions with 32-bit indices to the front; otherwise keep the order."""
    return tuple(sorted(versions, key=lambda k: k.version.endswith(LONG_SUFFIX)))
