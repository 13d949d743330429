"""Searches of families of CUDA kernels: their tiles in records, the resulting launches, rejections."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

import polydyn
from polydyn.codegen.cuda.families import WarpgroupProducts, numbers, of_numbers
from polydyn.codegen.cuda.wgmma_tiles import CLUSTER_SPLIT_K_TILES, FLOAT8_TILES, TILES, WgmmaTile, broken_rule
from polydyn.codegen.kernel import UNIT
from polydyn.compiler import Options, plan_program
from polydyn.errors import ScheduleError
from polydyn.gpu import hardware
from polydyn.graph.expand import import_model
from polydyn.measure import tune
from polydyn.measure.cuda import CudaTuningBackend
from polydyn.measure.family_bench import FamilyDevice, FamilyModel
from polydyn.program.estimates import estimated
from polydyn.search.backbone import Tile
from polydyn.search.outcomes import Search, search_record
from polydyn.search.records import Records
from polydyn.search.tasks.cuda import hardware_of
from polydyn.search.tasks.families import FamilyTask
from polydyn.testing.choice import choose
from tests.support.tiny import model, node

TARGET = "cuda:emulated"
W = np.random.default_rng(3).standard_normal((128, 40)).astype(np.float16)
H200 = hardware.load("h200")
ODD = WgmmaTile(64, 3, 1, 3)
"""Not a default tile."""


@pytest.fixture(autouse=True, scope="module")
def device() -> Iterator[None]:
    """Run programs on the CPU libcuda."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POLYDYN_LIBCUDA", "emulated")
        yield


def linear() -> onnx.ModelProto:
    """Build ``y[M, 40] = relu(x[M, 128] @ w)``."""
    nodes = [node("MatMul", "x w", "t"), node("Relu", "t", "y")]
    return model(nodes, {"x": ("float16", ["M", 128])}, ["y"], {"w": W})


@pytest.fixture(scope="module")
def task() -> FamilyTask:
    product, family = (p.task for p in CudaTuningBackend(TARGET).tasks(import_model(linear()), Options()))
    assert isinstance(family, FamilyTask) and family.key != product.key
    return family


def searched(task: FamilyTask, *tiles: Tile, factor: int = UNIT, source: str = "measured") -> Search:
    return Search("polydyn", tiles, 1, hardware_of(task.device), None, (factor,) * len(tiles), source)


def written(path: Path, task: FamilyTask, search: Search) -> Path:
    with Records.open(path) as opened:
        opened.put([search_record(search, task)])
    return path


def test_every_default_tile_is_among_those_of_the_search(task: FamilyTask) -> None:
    assert not any(map(broken_rule, (*TILES, *CLUSTER_SPLIT_K_TILES, *FLOAT8_TILES)))
    family = task.family
    assert isinstance(family, WarpgroupProducts)
    defaults = (*TILES, *CLUSTER_SPLIT_K_TILES)
    assert task.every[: len(defaults)] == tuple(Tile(numbers(t)) for t in defaults)
    every = [of_numbers(WgmmaTile, t.compile) for t in task.every]
    assert ODD in every and len(every) == len(set(every)) > 100
    for t in every[15::29]:  # tiles that satisfy the rules are built, with the expected shared memory
        for k in family.versions(numbers(t)):
            assert (int(k.scratch) + 1024) * t.blocks <= 228 << 10, t


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"columns": 96}, "columns are"), ({"stages": 1}, "at least two slots"), ({"consumers": 3}, "two warpgroups"),
        ({"in_turn": True, "consumers": 1}, "two in turn"), ({"cluster": "i", "parts": 2}, "shares an operand"),
        ({"parts": 3}, "share a reduction"), ({"columns": 192, "parts": 2}, "equal shares"),
        ({"cluster": "i", "consumers": 1}, "two consumers"), ({"in_turn": True, "blocks": 2}, "alone"),
        ({"columns": 256, "in_turn": True}, "registers"), ({"stages": 9}, "shared memory"), ({"blocks": 0}, "alone"),
    ],
)  # fmt: skip
def test_a_tile_that_breaks_a_rule_is_refused_by_name(change: dict[str, int], rule: str) -> None:
    assert rule in str(broken_rule(replace(WgmmaTile(128, 4), **change)))  # type: ignore[arg-type]


def test_a_record_decides_what_is_launched(task: FamilyTask, tmp_path: Path) -> None:
    """A tile that is not a default is launched where it was measured to be fast, and not where it was slow."""
    x = np.random.default_rng(1).standard_normal((70, 128)).astype(np.float16)
    want = np.maximum(x.astype(np.float32) @ W.astype(np.float32), 0)
    plans = {}
    for name, factor in (("fast", 1), ("slow", 64 * UNIT)):
        found = replace(searched(task, Tile(numbers(ODD)), Tile(numbers(TILES[2]))), factors=(factor, UNIT))
        plan = plan_program(linear(), target=TARGET, records=written(tmp_path / name, task, found))
        (launch,) = estimated(plan, H200).launches
        plans[name] = choose(launch, {"M": 70, "nth": H200.multiprocessors}, H200).name, launch
    kept = "wgmma_64x64x64_3_wide", "wgmma_128x128x64_4_wide"
    (fast, _), (slow, launch) = plans["fast"], plans["slow"]
    assert fast == kept[0] and "64x64x64_3" not in slow
    assert "warpgroups tuned by polydyn" in "".join(launch.reasons) and "64.00 of its estimate" in launch.reasons[-2]
    names = {c.name for c in launch.candidates}
    assert {n for n in names if n.startswith("wgmma") and "int64" not in n and "wide" in n} == set(kept), (
        "no default one"
    )
    program = polydyn.compile(linear(), target=TARGET, records=tmp_path / "fast")
    np.testing.assert_allclose(program.run({"x": x})["y"], want, rtol=2e-2, atol=2e-2)


def test_what_a_record_says_wrongly_is_refused_by_name(task: FamilyTask, tmp_path: Path) -> None:
    good = numbers(ODD)

    def records(name: str, tile: tuple[tuple[str, int], ...], factor: int = UNIT) -> Path:
        return written(tmp_path / name, task, searched(task, Tile(tile), factor=factor))

    for name, tile, words in (
        ("a", tuple((n, 96 if n == "columns" else v) for n, v in good), "columns are 64"),
        ("b", good[1:], "the numbers of a tile are"),
        ("c", (*good[:-2], ("cluster", 7), good[-1]), "is not a WgmmaTile"),
    ):  # fmt: skip
        with pytest.raises(ScheduleError, match=words):
            plan_program(linear(), target=TARGET, records=records(name, tile))
    with pytest.raises(ScheduleError, match="factor above 0"):
        plan_program(linear(), target=TARGET, records=records("d", good, 0))
    own = plan_program(linear(), target="cuda:sm_90a", records=records("e", good))
    assert own.launches == plan_program(linear(), target="cuda:sm_90a").launches, "of another target"


def test_a_search_is_ranked_by_a_model_and_gives_equal_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYDYN_LIBCUDA", "libno-such-cuda.so.1")
    digests = []
    for name in "ab":
        groups = tune(linear(), tmp_path / name, target=TARGET, trials=1, seen=[({"M": 5}, 1.0), ({"M": 900}, 1.0)])
        assert [g.label for g in groups] == ["contract y", "contract y warpgroups"] and groups[1].tuples == 1
        with Records.open(tmp_path / name) as opened:
            digests.append(opened.digest())
            (found,) = (json.loads(r.note) for r in opened.rows(kind="search") if r.group.flags == ("warpgroups",))
            assert {r.source for r in opened.rows()} == {"model"} and found["factors"] == [UNIT]
    assert digests[0] == digests[1]


def test_a_record_decides_the_tile_of_an_attention(tmp_path: Path) -> None:
    nodes = [
        node("Transpose", "k", "c", perm=[0, 1, 3, 2]), node("MatMul", "q c", "s"), node("Softmax", "s", "p", axis=-1),
        node("MatMul", "p v", "y"),
    ]  # fmt: skip
    made = model(
        nodes, {"q": ("float16", ["B", 2, "L", 64]), **dict.fromkeys("kv", ("float16", ["B", 2, "S", 64]))}, ["y"]
    )
    (placed,) = CudaTuningBackend(TARGET).tasks(import_model(made), Options())
    task = placed.task
    assert placed.label == "attention y" and [dict(t.compile) for t in task.every[:2]] == [
        {"keys": 128, "stages": 2}, {"keys": 128, "stages": 3},
    ]  # fmt: skip
    bench = FamilyModel(task, H200, hardware_of(H200))
    shape = task.backbone.sizes({x.name: 256 for x in task.backbone.loops if x.extent is None})
    assert all(0 < t < 1 for t in bench.seconds(task.every[:1], shape))
    found = searched(task, Tile((("keys", 64), ("stages", 4))), factor=1)
    (launch,) = plan_program(made, target=TARGET, records=written(tmp_path / "r", task, found)).launches
    versions = [c.name for c in launch.candidates if "wgmma" in c.name and "int64" not in c.name]
    assert versions == ["attention_wgmma_128x64x64_4_wide"] and "attention tuned by polydyn" in "".join(launch.reasons)


def test_a_search_is_measured_where_the_device_is(task: FamilyTask) -> None:
    """On the CPU libcuda, whose times mean nothing: kernels with tensor maps run, and failures are noted."""
    with CudaTuningBackend(TARGET) as side:
        assert side.workers is not None
        small = replace(side.device, multiprocessors=1)
        bench = FamilyDevice(FamilyModel(task, small, hardware_of(small)), side.workers)
        tiles = [Tile(numbers(ODD)), Tile(numbers(WgmmaTile(64, 8, in_turn=True)))]
        shape = task.backbone.sizes({"i0": 70})
        times = bench.seconds(tiles, shape)
        assert 0 < times[0] < float("inf") and times[1] == float("inf"), "there is one tile, and nothing in turn"
        wrong = Tile(tuple((n, 96 if n == "columns" else v) for n, v in tiles[0].compile))
        assert bench.seconds([wrong], shape) == [float("inf")] and "columns are" in bench.failures[wrong]
        assert bench.measured == 1
