"""Search spaces: their members, and the reasons for exclusions."""

from __future__ import annotations

import numpy as np
import pytest

from polydyn.errors import PolydynError, UnsupportedError
from polydyn.search.backbone import Backbone, Loop, Operand, Tile
from polydyn.search.hardware import Hardware, cpu
from polydyn.search.spaces.loop_model import loop_model, preferred
from polydyn.search.spaces.microkernel import mutations
from polydyn.search.spaces.rkernel import filter_by_multiples, generate, init_candidates, levels, rkernel_space
from polydyn.search.spaces.space import Space, collect, unit_tile, usage, violation
from polydyn.search.spaces.ukernel import Filter, align, axis_sizes, crosses, ukernel_space
from polydyn.testing.machines import A100, T4, V100
from polydyn.testing.simulated import gemm

HALF = gemm(None, 3072, 1024, dtype="float16", item=2)
FLOAT = gemm(None, 768, 768)
CONV = Backbone(
    (
        Loop("n", None),
        Loop("h", 56),
        Loop("w", 56),
        Loop("o", 64),
        Loop("c", 64, "reduction"),
        Loop("r", 3, "reduction"),
    ),
    (
        Operand("X", ((("n", 1),), (("h", 2), ("r", 1)), (("w", 1),), (("c", 1),))),
        Operand("W", ((("r", 1),), (("c", 1),), (("o", 1),))),
        Operand("Y", ((("n", 1),), (("h", 1),), (("w", 1),), (("o", 1),)), written=True),
    ),
)


def test_footprint_of_a_window_counts_the_elements_it_touches() -> None:
    x = CONV.operands[0]
    assert x.elements({"h": 4, "r": 3, "w": 5, "c": 2}) == (1 + 2 * 3 + 2) * 5 * 2
    assert x.elements({"h": 0, "r": 3}) == 0
    assert CONV.flops({"n": 1, "o": 8}) == 16


def test_tensor_before_vector_before_scalar_instructions() -> None:
    assert preferred(HALF, A100).kind == "tensor"
    assert preferred(gemm(None, 2, 1024, dtype="float16", item=2), A100).name == "hfma2"  # too narrow for mma
    row = Backbone((Loop("j", None),), (), "float16")
    assert preferred(row, A100).kind == "vector"
    assert preferred(gemm(None, 1, 64), cpu()).kind == "scalar"
    with pytest.raises(UnsupportedError, match="int4"):
        preferred(gemm(dtype="int4"), A100)


@pytest.mark.parametrize(("backbone", "hardware"), [(HALF, A100), (FLOAT, T4), (FLOAT, cpu(2)), (CONV, cpu(1))])
def test_loop_model_holds_its_constraints(backbone: Backbone, hardware: Hardware) -> None:
    space = loop_model(backbone, hardware)
    assert 100 < len(space) < 20000
    for tile in space.tiles:
        b, w, v = tile.level("b"), tile.level("w"), tile.level("v")
        parallel = [x.name for x in backbone.parallel]
        assert all(b[n] % w[n] == 0 and w[n] % v[n] == 0 for n in parallel)
        assert violation(hardware, usage(backbone, hardware, tile)) is None
    assert sum(n for _, n in space.refused) > 0


def test_cpu_register_tile_leaves_room_and_cache_tiles_are_bound_at_launch() -> None:
    space = loop_model(FLOAT, cpu())
    tile = Tile(
        (("b.k", 768), ("w.i", 8), ("w.j", 48), ("w.k", 4), ("v.i", 1), ("v.j", 16), ("v.k", 1)),
        (("b.i", 8), ("b.j", 48)),
    )
    assert tile in space.position
    assert usage(FLOAT, cpu(), tile).registers == 24 + 3 + 1
    assert all({n for n, _ in t.launch} == {"b.i", "b.j"} for t in space.tiles)
    assert max(usage(FLOAT, cpu(), t).registers for t in space.tiles) <= 32
    assert dict(space.refused)["registers per thread"] > 0


def test_static_extents_bound_the_tiles_and_tiny_ones_still_have_a_space() -> None:
    assert max(t["b.j"] for t in loop_model(gemm(None, 24, 768), cpu()).tiles) <= 16 * 32
    for extent in (0, 1, 2, 7):
        assert len(loop_model(gemm(None, extent, extent), cpu())) > 0


def test_an_empty_space_names_the_rule() -> None:
    with pytest.raises(PolydynError, match="local memory per block rejected 1"):
        collect("x", [(Tile(()), "local memory per block")])


def test_a_space_of_one_tuple_has_no_coordinates() -> None:
    space = Space("one", (Tile((("b.i", 8),)),))
    assert space.names == ()
    assert space.points.shape == (1, 0)


def test_vortex_candidates_fit_their_level_and_the_parent_map_is_exact() -> None:
    instruction = A100.usable("float16")[0]
    unit = unit_tile(HALF, instruction)
    low, high = generate(HALF, A100, instruction)
    assert low.tiles
    for c in low.tiles:
        assert all(v % unit[n] == 0 for n, v in c)
    raw = init_candidates(HALF, levels(A100)[1], unit)
    taken = [HALF.bytes_moved(dict(c))[0] for c in raw]
    assert max(taken) <= high.level.capacity
    assert min(taken) >= max(taken) / 32
    for c in raw:
        expected = tuple(p for p in low.tiles if all(dict(c)[n] % v == 0 for n, v in p))
        assert high.parents.get(c, ()) == expected
    assert filter_by_multiples([(("i", 12),)], [(("i", 5),)]) == {}


def test_vortex_keeps_every_compute_unit() -> None:
    units = {tuple(t.level("v").items()) for t in rkernel_space(HALF, A100).tiles}
    assert len(units) == 2  # mma and hfma2: chosen per shape


def test_dietcode_mutates_within_a_factor_of_two() -> None:
    seed = next(t for t in loop_model(FLOAT, cpu()).tiles if (t["w.i"], t["w.j"], t["b.i"], t["b.j"]) == (4, 32, 4, 32))
    space = mutations(FLOAT, cpu(), seed)
    assert seed in space.position
    for tile in space.tiles:
        for level in ("b", "w"):
            for n, v in tile.level(level).items():
                assert seed[f"{level}.{n}"] <= 2 * v
                assert v <= 2 * seed[f"{level}.{n}"]
        assert tile.level("v") == seed.level("v")
        assert all(tile[f"b.{x}"] % tile[f"w.{x}"] == 0 for x in "ijk")


def test_ftuner_alignment_takes_the_neighbours_of_primes() -> None:
    assert axis_sizes([53]) == sorted({d for n in (52, 54) for d in range(1, n + 1) if n % d == 0})
    assert axis_sizes([12]) == [1, 2, 3, 4, 6, 12]
    assert axis_sizes([0]) == [1]
    assert 5 in axis_sizes([12, 10])


def test_ftuner_cross_pick_is_some_step_of_the_trade_off() -> None:
    rule = Filter()
    steps = [(rule.pad[0] + i * rule.pad_step, rule.occ[1] - i * rule.occ_step) for i in range(46)]
    rng = np.random.default_rng(1)
    for pad, occ in rng.uniform((0.4, 0.88), (1.0, 1.0), (300, 2)):
        assert crosses(pad, occ, rule) == any(pad >= p and occ >= o - 1e-12 for p, o in steps)


def test_ftuner_space_serves_every_workload_and_says_what_fell() -> None:
    shapes = [{"i": 16 * t} for t in (1, 53, 128)]
    space = ukernel_space(gemm(None, 512, 256), V100, shapes)
    assert dict(space.refused)["Algorithm 1"] > len(space)
    assert all(t["b.k"] % 8 == 0 and t["b.i"] % t["t.i"] == 0 for t in space.tiles)
    offered = align(gemm(None, 512, 256), V100, shapes)
    assert any(t["b.i"] % 53 == 0 for t in offered)  # a tile that divides the odd length
