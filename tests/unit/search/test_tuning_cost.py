"""Cost models as closed forms: right at ugly sizes, monotone if required, and within 64-bit integers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from polydyn.schedules.index import Atom, Index
from polydyn.search import cost
from polydyn.search.backbone import Backbone, Tile
from polydyn.search.cost import MacroKernel, blocks_at, blocks_per_unit, grid, steps
from polydyn.search.hardware import Hardware, cpu
from polydyn.search.spaces.loop_model import loop_model
from polydyn.search.spaces.space import Usage
from polydyn.testing.machines import A100
from polydyn.testing.simulated import Simulated, gemm

HALF = gemm(None, 3072, None, dtype="float16", item=2)
FLOAT = gemm(None, 768, None)
MODELS = {
    "tscompiler": cost.tscompiler,
    "vortex": cost.vortex,
    "dietcode": cost.dietcode,
    "ftuner": cost.ftuner,
    "polydyn": cost.polydyn,
}
UGLY = (0, 1, 2, 7, 31, 32, 33, 130)


def kernels(backbone: Backbone, hardware: Hardware) -> list[MacroKernel]:
    sim = Simulated(backbone, hardware)
    tiles = loop_model(backbone, hardware).tiles
    return [sim.kernel(t) for t in tiles[:: len(tiles) // 7]]


CASES = [(HALF, A100), (FLOAT, cpu(2))]


def test_block_counts_agree_with_plain_integers() -> None:
    for k in kernels(HALF, A100):
        for m in UGLY:
            for depth in UGLY:
                shape = HALF.sizes({"i": m, "k": depth})
                assert grid(HALF, k.tile).evaluate(shape) == blocks_at(HALF, k.tile, shape)
                assert steps(HALF, k.tile).evaluate(shape) == -(-depth // k.tile["b.k"])


def test_tscompiler_is_wave_time_times_waves() -> None:
    for k in kernels(HALF, A100):
        shape = HALF.sizes({"i": 5000, "k": 1024})
        waves = math.ceil(blocks_at(HALF, k.tile, shape) / (108 * blocks_per_unit(k.used, A100)))
        wave = k.fixed + k.step * math.ceil(1024 / k.tile["b.k"])
        assert cost.tscompiler(HALF, A100, k).evaluate(shape) * 1e-12 == pytest.approx(waves * wave, rel=1e-3)


@pytest.mark.parametrize("name", ["tscompiler", "vortex", "dietcode", "polydyn"])
@pytest.mark.parametrize(("backbone", "hardware"), CASES, ids=["gpu", "cpu"])
def test_times_never_fall_with_more_work_of_whole_tiles(name: str, backbone: Backbone, hardware: Hardware) -> None:
    for k in kernels(backbone, hardware):
        form = MODELS[name](backbone, hardware, k)
        step = hardware.units * max(1, blocks_per_unit(k.used, hardware)) * k.tile["b.i"]
        rows = [form.evaluate(backbone.sizes({"i": n * step, "k": 1024})) for n in range(6)]
        deep = [form.evaluate(backbone.sizes({"i": 130, "k": n * k.tile["b.k"]})) for n in range(6)]
        assert rows == sorted(rows)
        assert deep == sorted(deep)
        assert rows[1] > 0


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("backbone", "hardware"), CASES, ids=["gpu", "cpu"])
def test_every_size_has_a_cost(name: str, backbone: Backbone, hardware: Hardware) -> None:
    for k in kernels(backbone, hardware)[:3]:
        form = MODELS[name](backbone, hardware, k)
        for m in UGLY:
            for depth in (0, 1, 33):
                assert form.evaluate(backbone.sizes({"i": m, "k": depth})) >= 0


def largest(p: Index, env: dict[str, int]) -> tuple[int, int]:
    """Return (value, largest intermediate) as computed by the printed C code: products and sums from left to right."""
    total = most = 0
    for factors, v in p.terms.items():
        for a in factors:
            if isinstance(a, Atom):
                parts = [largest(x, env) for x in a.args]
                values = [x for x, _ in parts]
                most = max([most, *(y for _, y in parts)])
                if a.kind == "floordiv":
                    x = values[0] // values[1] if values[1] else 0
                else:
                    x = min(values) if a.kind == "min" else max(values)
            else:
                x = env[a]
            v *= x
            most = max(most, abs(v))
        total += v
        most = max(most, abs(total))
    return total, most


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("backbone", "hardware"), CASES, ids=["gpu", "cpu"])
def test_closed_forms_fit_64_bits(name: str, backbone: Backbone, hardware: Hardware) -> None:
    for k in kernels(backbone, hardware):
        form = MODELS[name](backbone, hardware, k)
        for m, depth in ((1 << 20, 16384), (1, 1 << 20), (130, 33)):
            env = backbone.sizes({"i": m, "k": depth})
            value, most = largest(form, env)
            assert value == form.evaluate(env)
            assert most < 1 << 63


def test_exact_tiles_are_charged_for_what_they_hold() -> None:
    """On a CPU, blocks share a static loop evenly, a reduction has its exact length, columns are whole vectors."""
    sizes = {"b.k": 768, "w.i": 6, "w.j": 64, "w.k": 1, "v.i": 1, "v.j": 16, "v.k": 1}
    tile = Tile(tuple(sizes.items()), (("b.i", 96), ("b.j", 256)))
    measured = MacroKernel(tile, Usage(0, 30, 1), 0.0, 1e-3, 0.0, 1e-3, one_row=0.4, three_rows=0.6)
    static = gemm(None, 768, 768)  # three blocks of columns
    assert cost._exact(static, cpu(), measured).evaluate({"i": 96}) == pytest.approx(3e9, rel=1e-6)
    wide = replace(measured, tile=replace(tile, launch=(("b.i", 96), ("b.j", 1024))))
    assert cost._exact(static, cpu(), wide).evaluate({"i": 96}) == pytest.approx(1e9, rel=1e-6)
    free = gemm(None, None, None)
    narrow = replace(measured, one_vector=0.5, least=0.3)
    form = cost._exact(free, cpu(), narrow)

    def at(i: int, j: int, k: int) -> float:
        return form.evaluate({"i": i, "j": j, "k": k}) / 1e9

    assert at(96, 256, 768) == pytest.approx(1, rel=1e-3) and at(96, 256, 64) == pytest.approx(1 / 12, rel=1e-3)
    one = at(6, 64, 768)  # a register tile
    assert one == pytest.approx(1 / 64, rel=1e-3)
    assert at(6, 1, 768) == at(6, 16, 768) == pytest.approx(one / 2, rel=1e-2)
    assert at(1, 64, 768) == pytest.approx(0.4 * one, rel=1e-2) and at(1, 5, 768) == pytest.approx(0.3 * one, rel=1e-2)
    assert at(6, 80, 768) == pytest.approx(1.5 * one, rel=1e-2) and at(0, 5, 7) == at(5, 0, 7) == at(5, 7, 0) == 0
