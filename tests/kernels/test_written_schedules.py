"""Schedules that people write step by step: proven, right at ragged sizes, and used by ``polydyn.compile``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner

import polydyn
from polydyn import explore
from polydyn.cli import main
from polydyn.compiler import plan_program
from polydyn.errors import InputError, LegalityError, PolydynError, ScheduleError, UnknownNameError, UnsupportedError
from polydyn.explore import Schedule, save_schedules
from polydyn.explore.compiled import cpu_of
from polydyn.explore.search import search
from polydyn.explore.tuning import tune_schedules
from polydyn.jobs.spec import read_jobs
from polydyn.program_key import Arguments
from polydyn.schedules.handmade import document
from polydyn.schedules.handmade.document import read_schedules
from polydyn.testing.fuzz_schedules import check
from tests.support.tiny import model, node

W = np.random.default_rng(0).standard_normal((40, 56)).astype(np.float32)


def product_model(rows: str = "M") -> onnx.ModelProto:
    """Build ``y[M, 56] = gelu(x[M, 40] @ w)``."""
    nodes = [node("MatMul", "x w", "s"), node("Gelu", "s", "y")]
    return model(nodes, {"x": ("float32", [rows, 40])}, ["y"], {"w": W})


def batches_model() -> onnx.ModelProto:
    inputs = {"x": ("float32", ["B", "M", "K"]), "z": ("float32", ["B", "K", "N"])}
    return model([node("MatMul", "x z", "y")], inputs, ["y"])


def start(made: onnx.ModelProto) -> Schedule:
    (group,) = explore.groups(made)
    return group.schedule()


def blocked(s: Schedule) -> Schedule:
    """Write a product in register tiles of 6 x 16."""
    s = s.tile(i=6, j=16).reorder("j.0", "i.0").accumulate(at="i.0")
    return s.unroll("i", "j").vectorize("j").parallel("j", "i")


# -- steps -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["cpu", "cpu:avx2"])
def test_register_tiles_are_right_at_ragged_sizes(target: str) -> None:
    width = cpu_of(target).processor.width
    for s in (blocked(start(product_model())), blocked(start(product_model()).pack(width))):
        kernel = s.compile(target)
        assert not kernel.notes
        for m in (0, 1, 5, 6, 7, 33):
            assert kernel.check(**s.sizes(M=m)) < 1e-5


def test_sums_of_unrolled_tiles_are_registers_with_a_version_for_each_number_of_rows() -> None:
    text = blocked(start(product_model())).compile("cpu:avx2").text
    assert "acc_0" in text and "PD_STACK" not in text.partition("written_acc_6(const")[2].partition("\n}\n")[0]
    assert all(f"written_acc_{n}(" in text for n in range(1, 7))


def test_a_tile_that_cannot_be_in_registers_stays_in_memory_with_a_note() -> None:
    s = start(product_model()).tile(i=6, j=12).accumulate(at="j").unroll("i", "j").vectorize("j")
    kernel = s.compile("cpu:avx2")
    assert "acc is in memory: j.1 has 12 steps, which are no whole vectors of 8" in kernel.notes
    assert kernel.check(**s.sizes(M=7)) < 1e-5


@pytest.mark.parametrize("columns", [2, 8, 24])
def test_columns_that_do_not_fill_the_only_tile_are_not_stored_beyond(columns: int) -> None:
    made = model([node("MatMul", "x w", "y")], {"x": ("float32", ["M", 40])}, ["y"], {"w": W[:, :columns]})
    for s in (start(made), start(made).pack(16)):
        s = s.tile(i=4, j=32).accumulate(at="j").unroll("i", "j").parallel("i")
        assert s.check(M=21) < 1e-5 and (s.vectorize("j").check(M=21) < 1e-5 or columns % 16)


def test_tiles_of_tiles_may_lie_beyond_the_last_element() -> None:
    s = start(batches_model()).tile(i=(12, 4), j=(64, 32)).accumulate(at="j.1")
    for written in (s, s.cache("x", at="i.0"), s.cache("z", at="j.0"), s.unroll("i", "j").vectorize("j")):
        for n in (1, 3, 33, 65):
            assert written.check(B=2, M=13, N=n, K=3) < 1e-5


def test_tiles_of_nearly_equal_sizes() -> None:
    s = start(product_model()).tile(i=12, j=16).even("i").accumulate(at="j").unroll("i", "j").vectorize("j")
    assert [s.parallel("i", "j").check(M=m) < 1e-5 for m in (0, 1, 11, 12, 13, 25, 37)] == [True] * 7
    t = start(batches_model()).tile(i=4, j=16).even("i", "j").accumulate(at="j").cache("x", at="i.0").parallel("i0")
    assert [t.check(B=2, M=a, N=b, K=3) < 1e-5 for a, b in ((1, 1), (5, 17), (9, 33), (0, 4))] == [True] * 4
    plan_program(batches_model(), schedules=[t.written])


def test_a_reduction_of_no_steps_gives_zeros() -> None:
    for s in (start(batches_model()), start(batches_model()).reorder("k", "j"), start(batches_model()).tile(k=4)):
        assert s.check(B=1, M=2, N=3, K=0) == 0


def test_sums_pass_through_the_result_from_block_to_block() -> None:
    s = start(batches_model()).tile(i=4, j=16, k=8).reorder("k.0", "i.0", "j.0").accumulate(at="j")
    assert "SAVE" in s.tree and "LOAD" in s.tree
    assert s.cache("z", at="j.0").check(B=2, M=5, N=19, K=17) < 1e-5


def test_a_depthwise_convolution_has_vectors_along_channels() -> None:
    w = np.random.default_rng(0).standard_normal((32, 1, 3, 3)).astype(np.float32)
    nodes = [node("Transpose", "x", "t", perm=[0, 3, 1, 2]), node("Conv", "t w", "c", group=32, pads=[1, 1, 1, 1]),
             node("Relu", "c", "r"), node("Transpose", "r", "y", perm=[0, 2, 3, 1])]  # fmt: skip
    made = model(nodes, {"x": ("float32", ["N", "H", "W", 32])}, ["y"], {"w": w})
    (group,) = explore.groups(made)
    s = group.schedule()
    channels = next(n for n, e in s.axes.items() if e == "32")
    s = s.tile(**{channels: 16}).accumulate(at=f"{channels}.0").vectorize(channels).parallel("N", "H")
    assert [s.check(N=n, H=h, W=w) < 1e-5 for n, h, w in ((1, 1, 1), (2, 5, 7), (0, 3, 3))] == [True] * 3
    kernel = s.compile()
    assert not kernel.notes and "vload" in kernel.text


def test_refusals_name_loops_and_tensors_as_the_user_does() -> None:
    s = start(product_model()).tile(i=4, j=16)
    with pytest.raises(LegalityError, match="for example ACC at i = ") as wrong:
        s.reorder("k", "i.0", "j.0").store("l0", at="i.0")
    assert "size_" not in wrong.value.message and wrong.value.remedy
    with pytest.raises(ScheduleError, match="k runs a reduction"):
        start(product_model()).reorder("k", "i").parallel("k")
    assert start(product_model()).inside == {"l0": "INIT, ACC"} and len(repr(s)) < 200


def test_rows_of_a_softmax_are_tiled_and_in_vectors() -> None:
    s = start(model([node("Softmax", "x", "y")], {"x": ("float32", ["A", "C"])}, ["y"]))
    for written in (s, s.tile(A=4).vectorize("C").parallel("A")):
        assert [written.check(A=a, C=c) < 1e-5 for a, c in ((0, 3), (1, 1), (9, 70))] == [True] * 3


def test_axes_and_tensors_have_the_names_of_the_model() -> None:
    s = start(batches_model())
    assert s.axes == {"i0": "B", "i": "M", "j": "N", "k": "K"}
    assert s.tile(M=4, N=16).steps == s.tile(i=4, j=16).steps
    assert "cache('z', at='j')" in str(s.tile(N=16).cache("z", at="N"))
    assert set(s.tensors.values()) == {"x", "z", "y"}


@pytest.mark.parametrize("dim", ["i0", "j0", "i", "k", "seq len", "n0", "b_i", "élan"])
def test_dims_may_have_any_name(dim: str) -> None:
    s = blocked(start(product_model(dim)))
    assert s.check(**{dim: 7}) < 1e-5


def test_a_schedule_prints_the_python_that_builds_it() -> None:
    (group,) = explore.groups(batches_model())
    s = group.schedule().tile(i=(12, 4), j=32).accumulate(at="i.1").cache("z", at="j.0").unroll("i", factor=2)
    scope: dict[str, Any] = {"group": group}
    exec(str(s), scope)
    assert scope["s"].steps == s.steps and str(scope["s"]) == str(s)
    assert len(s.descriptions) == len(s.steps) and "loops of ACC: i0, i.0, j.0, i.1, k, i.2, j.1" in s.descriptions[0]


WRONG: dict[str, tuple[Any, type[PolydynError], str]] = {
    "no loop": (lambda s: s.tile(z=4), ScheduleError, "no loop z"),
    "size 0": (lambda s: s.tile(i=0), ScheduleError, "not the size of a tile"),
    "tile True": (lambda s: s.tile(i=True), ScheduleError, "not the size of a tile"),
    "uneven": (lambda s: s.tile(i=(8, 3)), ScheduleError, "do not divide"),
    "no size": (lambda s: s.tile(), ScheduleError, "no axis"),
    "twice": (lambda s: s.tile(i=4).tile(i=2), ScheduleError, "has the loops i.0, i.1"),
    "unrolled": (lambda s: s.unroll("j", factor=2).tile(j=4), ScheduleError, "unrolled already"),
    "in vectors": (lambda s: s.reorder("k", "j").vectorize("j").tile(j=4), ScheduleError, "in vectors already"),
    "even before tiles": (lambda s: s.even("i"), ScheduleError, "two loops"),
    "even reduction": (lambda s: s.tile(k=4).even("k"), ScheduleError, "not an axis of results"),
    "even twice": (lambda s: s.tile(i=4).even("i").even("i"), ScheduleError, "even already"),
    "one axis twice": (lambda s: s.tile(M=6, i=3), ScheduleError, "i is i, which has|M is i, which has"),
    "tile behind a buffer": (lambda s: s.cache("x", at="i").tile(k=4), ScheduleError, "a buffer has the axis"),
    "one loop to order": (lambda s: s.reorder("i"), ScheduleError, "two loops"),
    "vectors twice": (lambda s: s.reorder("k", "j").vectorize("j").vectorize("j"), ScheduleError, "already"),
    "factor 0": (lambda s: s.unroll("k", factor=0), ScheduleError, "factor=0"),
    "half panels": (lambda s: s.pack(16).tile(j=24).accumulate(at="j").vectorize("j"), ScheduleError, "whole panels"),
    "an order twice": (lambda s: s.cache("x", at="i", order=("i", "i")), ScheduleError, "does not read"),
    "size -1": (lambda s: s.check(M=-1), InputError, "not a size"),
    "size True": (lambda s: s.check(M=True), InputError, "not a size"),
    "size text": (lambda s: s.seconds(M="3"), InputError, "not a size"),
    "seed -1": (lambda s: s.check(-1, M=3), InputError, "seed"),
    "repeat 0": (lambda s: s.seconds(0, M=3), InputError, "repeat"),
    "no trials": (lambda s: s.search([{"M": 3}], trials=0), InputError, "trials"),
    "sizes not listed": (lambda s: s.search({"M": 3}), InputError, "trials"),
    "a weight of 0": (lambda s: s.search([{"M": 3}], weights=[0]), InputError, "weights"),
    "no such file": (lambda s: s.group.schedule("none.json"), ScheduleError, "cannot read"),
    "a number": (lambda s: polydyn.compile(product_model(), schedules=3), ScheduleError, "int is not a schedule"),
    "nothing to save": (lambda s: save_schedules("none.json"), InputError, "no schedule is given"),
    "of two loops": (lambda s: s.tile(i=4).reorder("i", "j"), ScheduleError, "has the loops i.0, i.1"),
    "one loop twice": (lambda s: s.reorder("i", "i"), ScheduleError, "twice"),
    "reduction": (lambda s: s.reorder("k", "i").parallel("k"), ScheduleError, "runs a reduction"),
    "inner": (lambda s: s.parallel("j"), ScheduleError, "outermost loops of INIT"),
    "parallel twice": (lambda s: s.parallel("i").parallel("i"), ScheduleError, "already"),
    "no tensor": (lambda s: s.cache("q", at="i"), UnknownNameError, "no tensor q"),
    "copied twice": (lambda s: s.cache("x", at="i").cache("x", at="i"), ScheduleError, "already"),
    "no such order": (lambda s: s.cache("x", at="i", order=("i", "j")), ScheduleError, "does not read"),
    "result": (lambda s: s.cache("y", at="i"), ScheduleError, "no statement reads"),
    "not inside": (lambda s: s.store("w", at="i"), ScheduleError, "not a tensor inside"),
    "no reduction inside": (lambda s: s.accumulate(at="k"), ScheduleError, "no loop of the reduction"),
    "two buffers": (lambda s: s.store("l0", at="k").accumulate(at="j"), ScheduleError, "buffer already"),
    "vectors outside": (lambda s: s.tile(j=8).accumulate(at="j.0").vectorize("j.0"), ScheduleError, "other loops"),
    "symbolic": (lambda s: s.unroll("i"), ScheduleError, "no constant number"),
    "factor": (lambda s: s.unroll("k", factor=99), ScheduleError, "factor"),
    "too much": (lambda s: s.tile(i=64, j=56).unroll("i", "j"), ScheduleError, "copies"),
    "pack later": (lambda s: s.tile(i=4).pack(8), ScheduleError, "first step"),
    "pack nothing": (lambda s: s.pack(0), ScheduleError, "pack"),
    "one row's storage": (lambda s: s.reorder("k", "i", "j").store("l0", at="i"), LegalityError, "another epoch"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused_by_name(name: str) -> None:
    f, error, words = WRONG[name]
    with pytest.raises(error, match=words) as refused:
        f(start(product_model()))
    assert refused.value.rule


def window_model() -> onnx.ModelProto:
    inputs = {"x": ("float32", ["N", 4, "H", "W"])}
    weights = np.random.default_rng(3).standard_normal((8, 4, 3, 3)).astype(np.float32)
    return model([node("Conv", "x w", "y", pads=[1, 1, 1, 1])], inputs, ["y"], {"w": weights})


@pytest.mark.parametrize("order", [(), ("i0", "i2", "j", "j1", "j2", "k")])
def test_a_copy_of_a_padded_image_holds_the_padding(order: tuple[str, ...]) -> None:
    s = start(window_model()).tile(j=4).accumulate(at="j").cache("x", at="j.0" if order else "i2", order=order)
    assert "a0_copy" in s.compile("cpu:avx2").text
    for h, w in ((1, 1), (5, 6), (3, 9)):
        assert s.check(N=2, H=h, W=w) < 1e-5


def test_what_several_conditions_guard_is_not_copied() -> None:
    nodes = [node("Pad", "x p", "s"), node("Pad", "x q", "t"), node("Mul", "s t", "y")]
    pads = {"p": np.array([1, 0]), "q": np.array([0, 1])}
    (group,) = explore.groups(model(nodes, {"x": ("float32", ["A"])}, ["y"], pads))
    s = group.schedule()
    assert s.check(A=5) < 1e-5
    with pytest.raises(ScheduleError, match="only where a condition holds"):
        s.cache("x", at="i0")


def test_loops_that_must_become_vectors_and_do_not_are_an_error() -> None:
    made = model([node("MatMul", "x z", "y")], {"x": ("uint32", ["M", 8]), "z": ("uint32", [8, "N"])}, ["y"])
    with pytest.raises(ScheduleError, match="does not become vectors"):
        start(made).vectorize("j0").compile()


def test_sizes_are_those_of_the_models_dims() -> None:
    s = start(product_model())
    with pytest.raises(UnknownNameError, match="no dim n0"):
        s.check(n0=3)
    with pytest.raises(InputError, match="no size is given for M"):
        s.seconds()


@pytest.mark.parametrize("seed", range(10))
def test_random_schedules_compute_their_groups(seed: int) -> None:
    kind, message = check(seed)
    assert kind in ("right", "refused"), message


# -- searches --------------------------------------------------------------------------------------------------------


def test_a_search_finds_other_numbers_and_is_reproducible() -> None:
    s = start(product_model()).tile(i=2, j=8).reorder("j.0", "i.0").accumulate(at="i.0").unroll("i", "j").parallel("j")

    def time(x: Schedule, dims: Mapping[str, int]) -> float:
        tile = dict(x.steps[0].named)
        return 1.0 + abs(tile["i"] - 5) + abs(tile["j"] - 16) + (x.steps[1].arguments[0] == "j.0")

    found = search(s, [{"M": 8}, {"M": 64}], trials=40, seed=1, time=time)
    assert str(found.trials[0][0]) == str(s), "the schedule itself comes first"
    assert found.candidates > 100 and found.best.steps[0].named == (("i", 5), ("j", 16))
    assert found.best.steps[1].arguments == ("j.0", "i.0") and found.refused, "the steps after it fit one order only"
    assert set(found.regions) == {"size 0", "size 1"} and len(set(found.regions["size 0"].values())) > 1, "regions move"
    assert found.opinions and all(p > 0 for p, _ in found.opinions)
    again = search(s, [{"M": 8}, {"M": 64}], trials=40, seed=1, time=time)
    assert [str(x) for x, _ in again.trials] == [str(x) for x, _ in found.trials]


def test_a_search_measures_and_needs_sizes() -> None:
    s = start(product_model()).tile(j=8).accumulate(at="j").parallel("i")
    found = s.search([{"M": 16}], trials=4)
    assert len(found.trials) + found.refused >= 4 and found.best.check(M=7) < 1e-5
    with pytest.raises(InputError, match="0 weights for 0 sizes"):
        s.search([])

    def refused(x: Schedule, dims: Mapping[str, int]) -> float:
        raise ScheduleError("no")

    with pytest.raises(InputError, match="no candidate could be timed"):
        search(s, [{"M": 16}], trials=2, time=refused)


def test_tune_searches_the_schedules_of_a_file_and_rewrites_it(tmp_path: Path) -> None:
    made, path = product_model(), tmp_path / "s.json"
    onnx.save(made, tmp_path / "m.onnx")
    s = start(made).tile(i=1, j=8).accumulate(at="j").vectorize("j").parallel("i")
    s.save(path)
    arguments = ["tune", str(tmp_path / "m.onnx"), "--schedules", str(path), "--trials", "4", "--dim", "M=8:64"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0 and "times as fast as before" in result.output, result.output
    (written,) = document.read_file(path)
    assert written.group == s.written.group and [x[0] for x in written.steps] == [x.name for x in s.steps]
    result = CliRunner().invoke(main, [*arguments, "--records", str(tmp_path / "r.db")])
    assert result.exit_code == 2 and "give one of them" in result.output
    with pytest.raises(InputError, match="fits no group"):
        tune_schedules(two_layers(), path)
    found = tune_schedules(made, path, trials=2, seen=[({"M": 5}, 3), ({"M": 9}, 1)])
    assert len(found[0].trials[0][1]) == 2


# -- programs --------------------------------------------------------------------------------------------------------


def two_layers() -> onnx.ModelProto:
    """Build two products of one structure, and one of another."""
    v = W[:, :40]
    nodes = [node("MatMul", "x v", "s"), node("Relu", "s", "t"), node("MatMul", "t u", "p"), node("Relu", "p", "q"),
             node("MatMul", "q w", "y")]  # fmt: skip
    return model(nodes, {"x": ("float32", ["M", 40])}, ["y"], {"v": v, "u": -v, "w": W})


def test_a_program_uses_a_schedule_for_all_groups_of_its_structure(tmp_path: Path) -> None:
    made, x = two_layers(), np.random.default_rng(1).standard_normal((9, 40)).astype(np.float32)
    first, *_ = explore.groups(made)
    s = first.schedule().tile(i=4, j=8).accumulate(at="j").unroll("i", "j").vectorize("j").parallel("i")
    s.save(tmp_path / "s.json")
    program = polydyn.compile(made, schedules=tmp_path / "s.json", threads=1)
    (entry,) = program.manifest["schedules"]
    assert entry == s.written.to_json()
    details = program.explain(M=9).details()
    assert "a schedule written by hand" in details
    np.testing.assert_allclose(program(x=x)["y"], polydyn.compile(made, threads=1)(x=x)["y"], rtol=1e-5, atol=1e-4)
    assert polydyn.compile(made, schedules=s, threads=1).compilations == 0, "a file and an object have one key"
    second = explore.groups(made)[1].schedule()
    assert len(read_schedules([s, replace(s.written, label=second.group.label)])) == 1, "labels do not count"
    again = first.schedule(document.read_file(tmp_path / "s.json")[0])
    assert again.steps == s.steps


def test_an_attention_is_computed_in_parts_if_one_has_a_schedule() -> None:
    nodes = [node("MatMul", "q k", "s"), node("Softmax", "s", "p"), node("MatMul", "p v", "y")]
    inputs = {"q": ("float32", ["B", "L", 8]), "k": ("float32", ["B", 8, "L"]), "v": ("float32", ["B", "L", 8])}
    made = model(nodes, inputs, ["y"])
    scores, rows, values = explore.groups(made)
    s = rows.schedule().tile(i1=2).parallel("i1.0")
    x = {n: np.random.default_rng(0).standard_normal([2, 8, 8], np.float32) for n in inputs}
    program, plain = polydyn.compile(made, schedules=s, threads=2), polydyn.compile(made, threads=2)
    np.testing.assert_allclose(program(**x)["y"], plain(**x)["y"], rtol=1e-5, atol=1e-5)
    assert (len(program.launches), len(plain.launches)) == (3, 1)
    assert any("a part has a schedule written by hand" in n for n in program.manifest["notes"])
    assert scores.schedule().axes and values.schedule().axes


def test_a_saved_program_keeps_its_schedule(tmp_path: Path) -> None:
    made = product_model()
    program = polydyn.compile(made, schedules=blocked(start(made)), threads=1)
    program.save(tmp_path / "p.polydyn")
    x = np.ones((5, 40), np.float32)
    loaded = polydyn.load(tmp_path / "p.polydyn")
    assert loaded.manifest["schedules"] == program.manifest["schedules"]
    np.testing.assert_array_equal(loaded(x=x)["y"], program(x=x)["y"])


def test_kernels_of_schedules_are_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYDYN_VERIFY", "2")
    made = batches_model()
    s = start(made).tile(i=(12, 4), j=(64, 32)).accumulate(at="j.1").cache("x", at="i.0").unroll("i", "j")
    plan_program(made, schedules=[s.vectorize("j").parallel("i0").written])


def test_the_command_line_and_sessions_take_files_of_schedules(tmp_path: Path) -> None:
    made = product_model()
    onnx.save(made, tmp_path / "m.onnx")
    blocked(start(made)).save(tmp_path / "s.json")
    arguments = ["compile", str(tmp_path / "m.onnx"), "-o", str(tmp_path / "p.polydyn"), "--schedules",
                 str(tmp_path / "s.json")]  # fmt: skip
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    assert polydyn.load(tmp_path / "p.polydyn").manifest["schedules"]
    options = polydyn.SessionOptions()
    options.add_session_config_entry("polydyn.schedules", str(tmp_path / "s.json"))
    session = polydyn.InferenceSession(str(tmp_path / "m.onnx"), options)
    x = np.ones((3, 40), np.float32)
    np.testing.assert_allclose(session.run(None, {"x": x})[0], polydyn.compile(made)(x=x)["y"], rtol=1e-5, atol=1e-5)
    (tmp_path / "jobs.yaml").write_text("jobs:\n- {model: m.onnx, output: q.polydyn, schedules: s.json}\n")
    (job,) = read_jobs(tmp_path / "jobs.yaml")
    assert Arguments.from_json(job.arguments.to_json()).schedules == job.arguments.schedules != ()


def test_a_schedule_that_fits_no_group_is_refused() -> None:
    s = blocked(start(product_model()))
    with pytest.raises(InputError, match="fits no group of this model") as refused:
        polydyn.compile(two_layers(), schedules=s)
    assert "groups(model)" in str(refused.value.remedy)


def test_schedules_are_for_cpus() -> None:
    with pytest.raises(UnsupportedError, match="schedules written by hand on cuda:emulated"):
        polydyn.compile(product_model(), schedules=blocked(start(product_model())), target="cuda:emulated")


def test_two_schedules_for_one_group_are_refused() -> None:
    s = start(product_model())
    with pytest.raises(ScheduleError, match="two schedules are for one group"):
        polydyn.compile(product_model(), schedules=[blocked(s), s.parallel("i")])


BROKEN = {
    "text": "nonsense", "list": "[]", "other": '{"format": "x", "version": 1, "schedules": []}',
    "newer": '{"format": "polydyn schedules", "version": 9, "schedules": []}',
    "entry": '{"format": "polydyn schedules", "version": 1, "schedules": [{"group": "a"}]}',
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_are_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    path.write_text(BROKEN[name])
    with pytest.raises(ScheduleError, match=r"s\.json is not a file of schedules"):
        polydyn.compile(product_model(), schedules=path)
    with pytest.raises(ScheduleError, match="cannot read"):
        polydyn.compile(product_model(), schedules=tmp_path / "missing.json")


@pytest.mark.parametrize(("step", "words"), [
    (["explode", [], {}], "no step explode"), (["tile", [], {"z": 4}], "no loop z"), (["tile", [4], {}], "tile"),
    (["unroll", ["i"], {"size": 4}], "unroll"), (["pack", [4096], {}], "pack"),
])  # fmt: skip
def test_steps_of_a_file_are_checked(step: list[Any], words: str, tmp_path: Path) -> None:
    s = blocked(start(product_model()))
    s.save(tmp_path / "s.json")
    data = json.loads((tmp_path / "s.json").read_text())
    data["schedules"][0]["steps"] = [step]
    (tmp_path / "s.json").write_text(json.dumps(data))
    with pytest.raises(PolydynError, match=f"the schedule of contract y: .*{words}"):
        polydyn.compile(product_model(), schedules=tmp_path / "s.json")


def test_shipped_schedules_are_used_where_they_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = product_model()
    blocked(start(made)).save(tmp_path / "gelu.json")
    monkeypatch.setattr(document, "LIBRARY", tmp_path)
    document.library.cache_clear()
    try:
        plan = plan_program(made)
        assert any("written_" in x.text for x in plan.kernels)
        off = plan_program(made, options=polydyn.Options(without={"library"}))
        assert not any("written_" in x.text for x in off.kernels)
        plan_program(two_layers())  # none fits
    finally:
        document.library.cache_clear()


def test_shipped_schedules_are_files_of_schedules() -> None:
    for x in document.library():
        assert x.measured, f"{x.label} says what it gained"


def test_a_group_with_a_schedule_of_its_own_is_refused() -> None:
    scan = model([node("CumSum", "x a", "y")], {"x": ("float32", ["A", "C"])}, ["y"], {"a": np.array(1)})
    groups = [g for g in explore.groups(scan) if g.fused.kind == "scan"]
    assert groups
    with pytest.raises(UnsupportedError, match="has no schedule to write"):
        groups[0].schedule()
