"""Each erratum of docs/papers.md: the formula as printed fails on a counterexample, the form used does not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from polydyn.schedules.index import Index
from polydyn.search.backbone import Tile
from polydyn.search.cost import (
    MacroKernel,
    blocks_per_unit,
    compute_ratio,
    memory_seconds,
    occupancy_ratio,
    padded,
    temporal_cost,
    wave_cost,
)
from polydyn.search.cost import dietcode as dietcode_cost
from polydyn.search.cost import ftuner as ftuner_cost
from polydyn.search.select import shares, top_n
from polydyn.search.spaces.space import Usage
from polydyn.search.spaces.ukernel import Filter, in_bound
from polydyn.testing.machines import A100, T4, V100
from polydyn.testing.simulated import gemm

# -- TSCompiler section 6 ----------------------------------------------------------------------------------


def printed_blocks_per_wave(used: Usage, registers_per_block: int) -> float:
    return min(A100.local_bytes / used.local, A100.registers / registers_per_block) * A100.units


def test_tscompiler_wave_needs_floors() -> None:
    used = Usage(local=60 << 10, registers=64, threads=128)
    assert printed_blocks_per_wave(used, 64 * 128) == pytest.approx(295.2)  # 2.73 blocks on each of 108 units
    assert blocks_per_unit(used, A100) * A100.units == 216
    # 290 blocks are one wave in print and two on the machine
    assert math.ceil(290 / 295.2) == 1
    assert wave_cost(5, 290, 216) == 10


def test_tscompiler_wave_needs_thread_and_block_limits() -> None:
    small = Usage(local=1 << 10, registers=16, threads=32)
    assert printed_blocks_per_wave(small, 16 * 32) / A100.units == 128
    assert blocks_per_unit(small, A100) == A100.unit_blocks == 32
    wide = Usage(local=1 << 10, registers=16, threads=1024)
    assert printed_blocks_per_wave(wide, 16 * 1024) / A100.units == 4
    assert blocks_per_unit(wide, A100) == 2  # 2048 threads
    with pytest.raises(ZeroDivisionError):
        printed_blocks_per_wave(replace(small, local=0), 1)
    assert blocks_per_unit(replace(small, local=0), A100) == 32


# -- Vortex Eq. 2 ------------------------------------------------------------------------------------------


def printed_temporal(load: int, store: int, lower: int, size: int) -> int:
    return load + (size - 1) * max(load, lower) + lower + store


def test_vortex_temporal_cost_agrees_where_the_print_is_right() -> None:
    for load, lower in ((3, 7), (7, 3), (5, 5)):
        for n in (1, 2, 9):
            assert temporal_cost(load, 2, lower, 1, n) == printed_temporal(load, 2, lower, n)


def test_vortex_temporal_cost_of_an_empty_reduction_is_the_store() -> None:
    assert printed_temporal(3, 2, 7, 0) == 5  # a load and a partial kernel that never run
    assert temporal_cost(3, 2, 7, 1, 0) == 2
    assert temporal_cost(3, 2, 7, 1, Index.of("t")).evaluate({"t": 0}) == 2


def test_vortex_stores_once_per_spatial_iteration() -> None:
    """Algorithm 1 stores inside the temporal spatial loop; Eq. 2 counts one store for the whole level."""
    assert printed_temporal(1, 10, 1, 4) == 15
    assert temporal_cost(1, 10, 1, 4, 1) == 45


# -- DietCode Eq. 4 and f_pad ------------------------------------------------------------------------------


def f_spatial(blocks: int, units: int, k: float) -> float:
    """Compute DietCode Eq. 4-5 with the fraction the right way up."""
    return k * blocks / padded(blocks, units) + 1 - k


def f_pad(extent: Sequence[int], tile: Sequence[int]) -> float:
    """Return the useful share of the padded iteration space: W / pad(W, M), which the print has upside down."""
    return math.prod(e / padded(e, t) for e, t in zip(extent, tile, strict=True) if e)


def test_dietcode_spatial_factor_as_printed_rewards_small_grids() -> None:
    def printed_spatial(blocks: int) -> float:
        return 0.5 * padded(blocks, 40) / blocks + 0.5

    assert printed_spatial(1) == 20.5  # one block on 40 units: twenty times the full machine
    assert printed_spatial(41) > printed_spatial(80) == 1
    assert f_spatial(40, 40, 0.5) == f_spatial(80, 40, 0.5) == 1
    assert f_spatial(1, 40, 0.5) < f_spatial(41, 40, 0.5) < 1


def test_dietcode_padding_factor_as_printed_rewards_padding() -> None:
    assert padded(129, 128) / 129 > 1  # pad(W, M) / W multiplies the predicted throughput
    assert f_pad((129,), (128,)) == 129 / 256
    assert f_pad((128, 64), (128, 64)) == 1
    assert f_pad((0,), (64,)) == 1


def test_dietcode_closed_form_is_the_product_of_its_factors() -> None:
    tile = Tile((("b.i", 64), ("b.j", 64), ("b.k", 8), ("w.i", 32), ("w.j", 32), ("w.k", 1)))
    kernel = MacroKernel(tile, Usage(16 << 10, 64, 128), 0.0, 3e-6, 0.0, 1e-6)
    b = gemm(None, 2304, 768)
    per_wave = T4.units * blocks_per_unit(kernel.used, T4)
    for rows in (1, 64, 1000, 5000):
        shape = b.sizes({"i": rows})
        blocks = -(-rows // 64) * 36
        local = per_wave * b.flops({"i": 64, "j": 64, "k": 768}) / (3e-6 * 96)
        throughput = local * f_spatial(blocks, per_wave, 1.0) * f_pad((rows, 2304), (64, 64))
        closed = dietcode_cost(b, T4, kernel).evaluate(shape) * 1e-12
        assert closed == pytest.approx(b.flops(shape) / throughput, rel=2e-3)


# -- FTuner Eq. 1, 4, 6/7 and Algorithm 2 ------------------------------------------------------------------


def sia_score(cmr: float, pad: float, occ: float) -> float:
    """Compute FTuner Eq. 1 with all weights 1 and the compute-to-memory ratio in [0, 1) like the other terms."""
    return cmr / (1 + cmr) + pad + occ


def test_ftuner_score_must_not_be_ruled_by_one_unbounded_term() -> None:
    streaming = (40.0, 0.05, 0.05)  # twentyfold padding, one unit in twenty busy
    balanced = (4.0, 1.0, 1.0)
    assert sum(streaming) > sum(balanced)
    assert sia_score(*streaming) < sia_score(*balanced)
    assert sia_score(1e9, 1, 1) < 3


def test_ftuner_compute_ratio_is_equation_6_not_7() -> None:
    """The text takes CMR from Eq. 7, a latency: a tile that moves more data would score higher."""
    b, shape = gemm(None, 768, 768), {"i": 1024}

    def tile(n: int) -> Tile:
        return Tile((("b.i", n), ("b.j", n), ("b.k", 8), ("t.i", 4), ("t.j", 4), ("t.k", 1)))

    wasteful, good = tile(16), tile(128)
    assert memory_seconds(b, V100, wasteful, shape) > memory_seconds(b, V100, good, shape)
    assert compute_ratio(b, V100, wasteful, shape) < compute_ratio(b, V100, good, shape)


def test_ftuner_closed_form_is_three_minus_the_score() -> None:
    """The padding counts points of the loops, but in Eq. 2 (``pad_ratio``) bytes."""
    b = gemm(None, 768, 768)
    for n in (16, 64, 128):
        tile = Tile((("b.i", n), ("b.j", n), ("b.k", 8), ("t.i", 4), ("t.j", 4), ("t.k", 1)))
        kernel = MacroKernel(tile, Usage(16 << 10, 64, 256), 0.0, 0.0, 0.0, 0.0)
        for rows in (1, 100, 1024, 5000):
            shape = {"i": rows}
            blocks = -(-rows // n) * (768 // n)
            score = sia_score(
                compute_ratio(b, V100, tile, shape),
                f_pad((rows, 768, 768), (n, n, 8)),
                occupancy_ratio(blocks, V100.units),
            )
            closed = ftuner_cost(b, V100, kernel).evaluate(b.sizes(shape)) / (1 << 20)
            assert closed == pytest.approx(3 - score, abs=1e-2), (n, rows)


def test_ftuner_bound_of_a_small_workload_is_one_block() -> None:
    used = Usage(0, registers=200, threads=512)  # 102400 registers: more than a unit has
    blocks = 40  # on 80 units: K.wkl.block is 1/2, and 102400 <= 65536 / (1/2) in print
    assert used.registers * used.threads <= V100.registers / (blocks / V100.units)
    assert not in_bound(V100, used, blocks, Filter())
    assert in_bound(V100, Usage(0, 128, 512), blocks, Filter())
    assert not in_bound(V100, Usage(0, 128, 512), 1000, Filter())  # two active blocks need twice that


def printed(extent: int, sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the tile sizes on every path of Algorithm 2 as printed that ends in an exact division."""
    found: list[tuple[int, ...]] = []

    def search(rest: int, path: tuple[int, ...]) -> None:
        for k in sizes:
            if rest <= 0:
                continue
            if rest % k == 0:
                found.append((*path, k))
            else:
                search(rest - k, (*path, k))

    search(extent, ())
    return found


def test_ftuner_combination_as_printed_may_use_three_sizes_or_find_nothing() -> None:
    assert (7, 7, 7, 8) in printed(53, [7, 8])  # 3*7 + 4*8, the paper's example
    three = printed(31, [6, 10, 15])
    assert three
    assert all(len(set(path)) == 3 for path in three)  # "two uKernels"
    assert printed(5, [7, 8]) == []  # "no padding in at least one axis"


# -- BladeDISC 5.2.2 ---------------------------------------------------------------------------------------


def test_bladedisc_most_common_schedules_may_leave_shapes_behind() -> None:
    """Three near-equal schedules win the many large shapes; the small ones get none of the top two."""
    import numpy as np

    table = np.array([[1.0] * 8 + [0.1] * 2, [0.99] * 8 + [0.1] * 2, [0.2] * 8 + [1.0] * 2])
    chosen = top_n(table, 2)
    assert chosen.kernels == (0, 1)
    assert shares(table)[list(chosen.assigned), range(10)].min() == pytest.approx(0.1)
