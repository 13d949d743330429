"""Sizes of CPU kernels follow from the core's registers and caches."""

from __future__ import annotations

from dataclasses import replace

from polydyn.codegen.cpu.shares import rows_for_all, rows_that_stay
from polydyn.codegen.cpu.target import AVX2, AVX512, Core
from polydyn.schedules.index import Index
from polydyn.search.hardware import calibrated, cpu


def test_tiles_fill_the_registers_and_hide_their_loads() -> None:
    wide = {t: AVX512.share(*t) / AVX512.share(8, 3) for t in AVX512.tiles}
    assert wide.keys() == {(8, 3), (6, 4), (12, 2), (16, 1)}
    assert 0.98 < wide[6, 4] < 1 and 0.93 < wide[12, 2] < 0.95, "measured: 0.99 and 0.94 of 8 x 3 (docs/cpu.md)"
    assert {*AVX2.tiles} == {(6, 2), (4, 3), (12, 1)}, "with 4 vectors of columns none is left for a row"
    slow = replace(AVX512, core=Core(read=16))
    assert slow.share(6, 4) < 0.9 * slow.share(8, 3), "columns that come slowly should serve many rows"
    assert AVX2.share(6, 1) < 0.8, "too few sums to hide an addition"


def test_blocks_follow_the_second_cache() -> None:
    core, small = Core(), Core(l2=256 << 10)
    assert rows_that_stay(core, 8, Index.of(512)) == 4 * rows_that_stay(small, 8, Index.of(512)) == 16
    assert rows_for_all(core, 8, 256, 256) and not rows_for_all(small, 8, 256, 256)


def test_one_measurement_gives_the_core_that_another_gives() -> None:
    measured = [cpu(2, l2=512 << 10, hertz=f * 1e9, l2_bandwidth=g * 1e9) for f, g in ((3.8, 190), (3.7, 180))]
    assert {calibrated(Core(), m) for m in measured} == {Core(32, 512 << 10, 48)}
