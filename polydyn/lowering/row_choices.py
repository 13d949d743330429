"""What a search may choose of the rows of the CPU tables: a row at any size, and its own sizes (``RowChoice``).

The rows' functions (``cpu_tables.py``) decide by constants that were fitted by hand. A search compares the same kernels
by measurements, so a constant is only the default.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

from polydyn.codegen.cpu.choices import Choices, with_default
from polydyn.codegen.cpu.product import ContractKernel
from polydyn.codegen.cpu.rows import NestKernel
from polydyn.codegen.cpu.shares import LEAST_SHARES
from polydyn.codegen.cpu.split import SplitKernel, SplitNest
from polydyn.codegen.passes.prefetch import LINE
from polydyn.lowering.alternatives import RowChoice
from polydyn.schedules.errors import Declined, first_refusal
from polydyn.schedules.index import Index, maximum, minimum, product
from polydyn.schedules.model import Group

SLICES = "slices"
"""The number of slices of a split reduction, a size of a launch."""
SLICE_COUNTS = (2, 4, 8, 16, 32, 64, 128)
"""Search choices instead of the number that follows from the sizes. ``LEAST_SHARES`` is tried first."""
MIN_SLICE_LINES = 8
"""Minimum cache lines of a row in a slice, if the steps are a constant: a shorter slice is mostly its own start."""
MAX_PARTIAL_SUMS = 1 << 22
"""Maximum number of partial sums (16 MiB). With more results there are fewer slices than the chosen number."""
SplitBuilder: TypeAlias = SplitKernel | SplitNest
NO_SIZES = Choices({}, {})


def without_sizes(prefix: str, group: Group, build: Callable[[str], Any]) -> RowChoice:
    """Return a row whose kernel has no size to choose. ``build``: maps a name to its builder."""
    return RowChoice(group, prefix, NO_SIZES, lambda name, _: build(name), lambda kernel, _: dict(launch_of(kernel)))


def launch_of(kernel: Any) -> Mapping[str, Index]:
    """Return the default launch of a builder; a kernel of planes in lanes has no launch-time symbols."""
    launch: Mapping[str, Index] = getattr(kernel, "launch", {})
    return launch


def with_sizes(prefix: str, kernel: Any) -> RowChoice:
    """Return a row whose kernel offers sizes itself, such as a window."""
    return RowChoice(kernel.group, prefix, kernel.choices(), kernel.resized, lambda k, sizes: k.launched(sizes))


def in_tiles(prefix: str, kernel: ContractKernel, build: Callable[[str, int], ContractKernel]) -> RowChoice:
    """Return a row of register tiles, whose width in vectors is chosen. ``build``: maps a name and a width."""
    own = kernel.plan.vectors
    vectors = with_default(own, (v for _, v in kernel.target.tiles))

    def builder(name: str, sizes: Mapping[str, int]) -> ContractKernel:
        return build(name, sizes.get("vectors", own))

    return RowChoice(kernel.group, prefix, Choices({"vectors": vectors}, {}), builder, lambda k, _: dict(k.launch))


def in_slices(group: Group, steps: Index, build: Callable[[str], SplitBuilder]) -> RowChoice | Declined:
    """Return the row of a split reduction; declined if its steps are too few for two slices. ``build``: maps a name."""
    lines, results = steps.ceildiv(LINE), product(e for _, e in group.statements[0].iters)
    limit = lines.constant
    counts = [n for n in SLICE_COUNTS if limit is None or limit >= n * MIN_SLICE_LINES]
    if not counts:
        return Declined(f"{limit} cache lines of a row are too few for slices")
    counts.sort(key=lambda n: (n != LEAST_SHARES, n))

    def launch(kernel: SplitBuilder, sizes: Mapping[str, int]) -> dict[str, Index]:
        if SLICES not in sizes:
            return dict(kernel.launch)
        count = maximum(1, minimum(sizes[SLICES], lines, MAX_PARTIAL_SUMS // maximum(1, results)))
        return replace(kernel.sharing, count=count).launch(_unsplit_launch(kernel))

    return RowChoice(group, "split", Choices({}, {SLICES: tuple(counts)}), lambda name, _: build(name), launch)


def _unsplit_launch(kernel: SplitBuilder) -> Mapping[str, Index]:
    """Return the launch-time values over the number of slices, as those of a kernel that is not split."""
    base: type[Any] = NestKernel if isinstance(kernel, SplitNest) else ContractKernel
    values: Mapping[str, Index] = base.launch.fget(kernel)
    return values


def slices_refusal(kernel: ContractKernel) -> Declined | None:
    """Return why the reduction of a product cannot be split at any size; None if it can, whether it pays or not."""
    x, plan = kernel.product, kernel.plan
    return first_refusal(
        (bool(x.inner), "it has several reductions"),
        (x.decodes, "its weights are decoded"),
        (x.footprint is not None or plan.fill or plan.promote, "its operands are copied"),
    )
