"""Families of CUDA kernels whose tiles a search may choose, other than tiles of warps: the interface for the search.

A tile of a family is a frozen dataclass of numbers, truth values and axes. Records store its numbers by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import product
from typing import Any, Protocol

from polydyn.codegen.cuda.group import ProductGroup
from polydyn.codegen.cuda.warpgroup_attention import Attention, AttentionTile, attention_tiles, warpgroup_attention
from polydyn.codegen.cuda.warpgroup_attention import broken_rule as attention_rule
from polydyn.codegen.cuda.wgmma import wgmma_versions
from polydyn.codegen.cuda.wgmma_operands import wgmma_refusal
from polydyn.codegen.cuda.wgmma_tiles import AXES, CLUSTER_SPLIT_K_TILES, FLOAT8_TILES, TILES, WgmmaTile, broken_rule
from polydyn.codegen.kernel import Kernel, with_block
from polydyn.schedules.errors import ScheduleError
from polydyn.schedules.expr import FLOAT8
from polydyn.schedules.model import Group

Numbers = tuple[tuple[str, int], ...]
"""A tile as (field, value) pairs; an axis is its position in ``AXES``."""
WARPGROUPS, ATTENTION = "warpgroups", "attention"
"""The families of warpgroup products and warpgroup attentions."""


class Family(Protocol):
    """Kernels of one group that differ by their tile."""

    @property
    def name(self) -> str:
        """The name in records."""

    @property
    def group(self) -> Group:
        """The computation of its kernels."""

    def tiles(self) -> tuple[Numbers, ...]:
        """Return every tile that may be built; the group's default tiles come first."""

    def versions(self, tile: Numbers) -> Sequence[Kernel]:
        """Build the kernels of a tile. ScheduleError: it breaks a rule, which is named."""


@dataclass(frozen=True)
class FamilyFactors:
    """The tuned tiles of a family, each with the factor of its estimates (``Block.factor``).

    ``others``: the factor of versions that were not measured. ``reasons``: lines for ``explain``.
    """

    tiles: tuple[tuple[Numbers, int], ...]
    others: int
    reasons: tuple[str, ...] = ()

    def versions(self, family: Family) -> list[Kernel]:
        """Return the kernels of the tiles. ScheduleError: a tile breaks a rule, by name."""
        return [with_block(k, factor=factor) for t, factor in self.tiles for k in family.versions(t)]


@dataclass(frozen=True)
class WarpgroupProducts:
    """Products by warpgroups on sm_90a. ``tf32``: float32 may be rounded to tf32."""

    product: ProductGroup
    tf32: bool = False
    name: str = WARPGROUPS

    @property
    def group(self) -> Group:
        """The computation of its kernels."""
        return self.product.group

    def tiles(self) -> tuple[Numbers, ...]:
        """Return every tile that may be built, or an empty tuple if warpgroups do not support the product."""
        if wgmma_refusal(self.product, self.tf32):
            return ()
        eight = self.product.dtype in FLOAT8
        first = FLOAT8_TILES if eight else (*TILES, *CLUSTER_SPLIT_K_TILES)
        every = dict.fromkeys((*first, *(() if eight else _every_tile())))
        return tuple(numbers(t) for t in every if not broken_rule(t))

    def versions(self, tile: Numbers) -> Sequence[Kernel]:
        """Build the kernels of a tile; empty if the shape does not have this tile."""
        t = of_numbers(WgmmaTile, tile)
        if rule := broken_rule(t):
            raise ScheduleError(f"{t} is not built", rule=rule, remedy="tune the group again")
        return wgmma_versions(self.product, self.tf32, (t,), wanted=True)


@dataclass(frozen=True)
class WarpgroupAttention:
    """Attentions by warpgroups on sm_90a."""

    of: Attention
    name: str = ATTENTION

    @property
    def group(self) -> Group:
        """The computation of its kernels."""
        return self.of.group

    def tiles(self) -> tuple[Numbers, ...]:
        """Return every tile that may be built, or an empty tuple if warpgroups do not support the attention."""
        return tuple(map(numbers, attention_tiles(self.of)))

    def versions(self, tile: Numbers) -> Sequence[Kernel]:
        """Build the kernels of a tile; empty if all keys are one tile."""
        t = of_numbers(AttentionTile, tile)
        if rule := attention_rule(t, int(self.of.scores.K), int(self.of.values.N)):
            raise ScheduleError(f"{t} is not built", rule=rule, remedy="tune the group again")
        return warpgroup_attention(self.of, t)


def _every_tile() -> tuple[WgmmaTile, ...]:
    """Return the tiles of warpgroups with the maximum number of blocks per multiprocessor."""
    columns, stages = (256, 192, 128, 64), (3, 4, 5, 6, 8)
    shapes = ((2, False, ""), (1, False, ""), (2, True, ""), (2, False, "i"), (2, True, "i"))
    out = []
    for n, s, (consumers, turns, cluster), parts in product(columns, stages, shapes, (1, 2, 4, 8)):
        sizes = (WgmmaTile(n, s, consumers, blocks, turns, cluster, parts) for blocks in (3, 2, 1))
        out += [t for t in sizes if not broken_rule(t)][:1]
    return tuple(sorted(out, key=lambda t: t.parts > 1))


def numbers(tile: Any) -> Numbers:
    """Return the fields of a tile as numbers."""
    values = ((f.name, getattr(tile, f.name)) for f in fields(tile))
    return tuple((n, AXES.index(v) if isinstance(v, str) else int(v)) for n, v in values)


def of_numbers(kind: type[Any], tile: Numbers) -> Any:
    """Return the tile of these numbers. ScheduleError: they are not its fields."""
    values: Mapping[str, int] = dict(tile)
    types = {f.name: str(f.type) for f in fields(kind)}
    if values.keys() != types.keys() or any(types[n] == "str" and not 0 <= v < len(AXES) for n, v in tile):
        raise ScheduleError(
            f"{dict(tile)} is not a {kind.__name__}", rule=f"the numbers of a tile are {', '.join(types)}",
            remedy="tune the group again",
        )  # fmt: skip
    return kind(**{n: AXES[v] if types[n] == "str" else bool(v) if types[n] == "bool" else v for n, v in tile})
