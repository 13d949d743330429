"""Tuning of kernels other than products: their spaces, searches and compilation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper
from onnx.reference import ReferenceEvaluator

from polydyn.backends import Options
from polydyn.checked import CheckedProgram
from polydyn.compiler import plan_program
from polydyn.errors import Declined, ScheduleError
from polydyn.graph.expand import import_model
from polydyn.measure import tune
from polydyn.measure.cpu import other_groups, placed_builder
from polydyn.measure.placed import PlacedTask
from polydyn.schedules.decision import Leaf, Split
from polydyn.search.backbone import Problem, Tile
from polydyn.search.cost import MacroKernel
from polydyn.search.hardware import cpu
from polydyn.search.outcomes import MIN_GAIN, Search, outcome, search_record
from polydyn.search.records import Records
from polydyn.search.sized import search_sizes
from polydyn.search.spaces.space import Usage
from polydyn.search.tasks.cpu import DEFAULT
from polydyn.search.tasks.sized import ROWS, SizedTask
from polydyn.testing import models
from polydyn.testing.inputs import feeds

LARGE_SIZE = 20
"""From this size on, the machine of these tests is fastest with the last tile."""


class Machine:
    """Times whole launches without running any."""

    source = "measured"
    measurements = 0

    def per_operation(self, tiles: Sequence[Tile]) -> list[float]:
        raise AssertionError("launches are whole")

    def kernel(self, tile: Tile) -> MacroKernel:
        return MacroKernel(tile, Usage(0, 0, 1), 0.0, 0.0, 0.0, 0.0)

    def seconds(self, tiles: Sequence[Tile], shape: Mapping[str, int], turns: int = 1) -> list[float]:
        self.measurements += 1
        return [1.0 if t == (tiles[-1] if max(shape.values()) >= LARGE_SIZE else DEFAULT) else 2.0 for t in tiles]


def depthwise() -> onnx.ModelProto:
    w = np.random.default_rng(0).standard_normal((5, 1, 3, 3)).astype(np.float32)
    node = helper.make_node("Conv", ["x", "w"], ["y"], group=5, pads=[1, 1, 1, 1], strides=[2, 2])
    return models.model("depthwise", [node], {"x": ["N", 5, "H", "W"]}, {"w": w})


def placed(model: onnx.ModelProto) -> list[PlacedTask[SizedTask]]:
    found = other_groups(placed_builder(import_model(model), "cpu", Options())[0], "cpu").values()
    return [task for task in found if not isinstance(task, Declined)]


CASES = {
    "window": (depthwise(), {"outputs", "along", "planes"}, [{"N": n, "H": h, "W": 7} for n, h in ((1, 1), (2, 44))]),
    "attention": (models.attention(2, 4), {"rows", "shares"}, [{"B": 1, "L": n} for n in (1, 33)]),
    "map": (models.unary("Abs", ["R", 3]), {"along"}, [{"R": n} for n in (1, 600)]),
    "turned": (models.transpose(["R", 17], [1, 0], "turned"), {"along", "across"}, [{"R": n} for n in (1, 33)]),
}


@pytest.mark.parametrize("name", CASES)
def test_what_a_search_keeps_is_compiled_proven_and_right(name: str, tmp_path: Path) -> None:
    made, sizes, shapes = CASES[name]
    task = placed(made)[-1]
    machine = cpu(1)
    with Records.open(tmp_path / "r.db") as records:
        problem = Problem(task.task.key, task.task.backbone, *task.instances([(s, 1) for s in shapes]))
        bench = Machine()
        tiles = task.task.tiles(4)
        first, again = (
            search_sizes(task.task, problem, machine, bench, records, "polydyn", tiles, 4) for _ in range(2)
        )
        assert first.kernels == again.kernels and bench.measurements == 2, "two sizes, once"
        anywhere = replace(problem, shapes=(), weights=())
        free = search_sizes(task.task, anywhere, machine, bench, records, "polydyn", tiles[:2], 2)
        assert all(task.task.launched(s) == s for s in free.instances), "rows and keys of an attention are one size"
        default, other = (k.tile for k in first.kernels)
        assert default == DEFAULT and {n for n, _ in (*other.compile, *other.launch)} == sizes
        records.put([search_record(outcome(first, machine, 2 * MIN_GAIN), task.task)])
    plan = plan_program(made, records=tmp_path / "r.db")
    *before, launch = plan.launches
    # without kernels for planes in lanes, which are not tuned
    kept = [c.kernel for c in launch.candidates if not c.kernel.startswith("turned")]
    assert isinstance(launch.decision, Split) and len(kept) == 2
    reference = ReferenceEvaluator(made)
    for kernel in (0, 1):
        checked = CheckedProgram(replace(plan, launches=(*before, replace(launch, decision=Leaf(kernel)))))
        for shape in shapes:
            given = feeds(made, shape)
            np.testing.assert_allclose(checked.run(given)["y"], reference.run(None, given)[0], rtol=1e-4, atol=1e-5)


class Bowl(Machine):
    """A machine whose best tile is one planted in the middle of the space. ``task`` gives the numbers of a tile."""

    def __init__(self, task: SizedTask, best: Tile) -> None:
        self.task, self.best, self.tried = task, task.parameters(best), set[Tile]()

    def seconds(self, tiles: Sequence[Tile], shape: Mapping[str, int], turns: int = 1) -> list[float]:
        self.measurements += 1
        self.tried |= set(tiles)
        numbers = [self.task.parameters(t).items() for t in tiles]  # some are 0 on some processors
        far = [sum(abs(math.log((1 + v) / (1 + self.best[n]))) for n, v in x) for x in numbers]
        return [1e-6 * (1 + x) for x in far]


def test_a_space_above_the_number_of_trials_is_searched(tmp_path: Path) -> None:
    """The default is always among the measured tiles. Trials and finals are measured once, and resumed."""
    task = placed(depthwise())[-1]
    every = task.task.tiles()
    trials, best = 24, every[len(every) // 2]
    assert len(every) > 2 * trials and every[0] == DEFAULT
    bench = Bowl(task.task, best)
    problem = Problem(task.task.key, task.task.backbone, *task.instances([({"N": 1, "H": 9, "W": 7}, 1)]))
    with Records.open(tmp_path / "r.db") as records:
        first = search_sizes(task.task, problem, cpu(1), bench, records, "polydyn", every, trials, 3)
        measured = bench.measurements
        again = search_sizes(task.task, problem, cpu(1), bench, records, "polydyn", every, trials, 3)
    assert first.kernels == again.kernels and first.trials == again.trials and bench.measurements == measured
    assert DEFAULT in bench.tried and len(bench.tried) == len(first.trials) == trials
    assert best in bench.tried and first.kernels[-1].tile == best


def test_a_size_that_a_kernel_does_not_offer_is_refused_by_name() -> None:
    """A window's tiles begin with vectors; a file of records could contain anything."""
    (window,) = placed(depthwise())
    with pytest.raises(ScheduleError, match="along=100"):
        window.task.builder(Tile((), (("along", 100),)), "x")


def test_rows_have_no_size_and_say_so(tmp_path: Path) -> None:
    (group,) = tune(models.layer_norm(8), tmp_path / "r.db", threads=1)
    assert group.declined == ROWS and not group.tuples
    assert any(n.endswith(ROWS) for n in plan_program(models.layer_norm(8), records=tmp_path / "r.db").notes)


def test_sizes_that_nobody_chose_follow_the_machine_of_the_records(tmp_path: Path) -> None:
    other, small = placed(CASES["map"][0])[-1].task, replace(cpu(1), local_bytes=3 << 15)
    with Records.open(tmp_path / "r.db") as records:
        records.put([search_record(Search("polydyn", (DEFAULT,), 1, small, Leaf(0)), other)])
    rows = models.unary("Softmax", ["R", "C"])
    plans = [plan_program(rows, records=r) for r in (None, tmp_path / "r.db")]
    assert [f"rows are kept in scratch up to {3 << 15} bytes" in str(p.kernels[0].notes) for p in plans] == [
        False,
        True,
    ]
