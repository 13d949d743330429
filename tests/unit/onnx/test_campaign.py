"""The campaign of random models: covering array, cells, coverage, the frame of fuzzers, and models that are kept."""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper

from polydyn.cli import main
from polydyn.compiler import plan_program
from polydyn.errors import InputError, MissingPackageError, ModelError, needing_extra
from polydyn.lowering.place_cpu import KERNEL_PREFIXES
from polydyn.testing import cells, coverage, fuzz_models
from polydyn.testing.authorities import difference, nudged
from polydyn.testing.campaign import Campaign, Result
from polydyn.testing.cells import DIMENSIONS, Cell, array, here, missing, possible, rows
from polydyn.testing.coverage import Coverage, kernels_counted, nodes_of
from polydyn.testing.drafts import plain_array
from polydyn.testing.pairwise import Row, covering_array, pairs, pairs_in
from polydyn.testing.random_onnx import random_case
from tests.support.campaign_cases import dying, numbered
from tests.support.paths import ROOT

SMALL = {"a": ("1", "2", "3"), "b": ("1", "2", "3"), "c": ("1", "2"), "d": ("1", "2", "3", "4")}


def covered(found: cells.CoveringArray) -> set[frozenset[tuple[str, str]]]:
    return set().union(*(pairs_in(row) for row in found.rows))


def test_every_pair_is_covered() -> None:
    found = covering_array(SMALL)
    assert covered(found) == set(pairs(SMALL)) and not found.impossible
    assert 12 <= len(found.rows) <= 15  # the two longest dimensions have 12 pairs
    without = cells.CoveringArray(found.rows[1:], found.impossible)
    assert covered(without) != set(pairs(SMALL))


def test_impossible_pairs_are_named_and_no_row_breaks_the_rule() -> None:
    def rule(row: Row) -> bool:
        return not (row.get("a") == "1" and row.get("d") in ("1", "2")) and not (row.get("b") == "3" and "c" in row)

    found = covering_array(SMALL, rule)
    assert all(map(rule, found.rows))
    third = {frozenset({("b", "3"), (n, v)}) for n in "acd" for v in SMALL[n]}  # every row has a c
    assert found.impossible == third | {frozenset({("a", "1"), ("d", v)}) for v in "12"}
    assert covered(found) == set(pairs(SMALL)) - found.impossible


def test_the_cells_cover_every_possible_pair_here() -> None:
    values = {n: [v for v in every if (n, v) not in missing()] for n, every in DIMENSIONS.items()}
    found = array()
    assert covered(found) == set(pairs(values)) - found.impossible
    assert len(found.rows) < 40 and all(map(possible, found.rows))
    for pair in found.impossible:
        assert not cells.available(dict(pair)) or dict(pair).get("target") in (cells.ARM, None), pair
    settings = fuzz_models.Settings(cell=fuzz_models.ARRAY)
    block = range(7 * len(rows()), 8 * len(rows()))
    assert {settings.cell_of(s) for s in block} == set(rows())


def test_what_a_machine_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cells, "c_compilers", lambda: {"gcc": "gcc", "clang": "", "zig": ""})
    monkeypatch.setattr(cells, "qemu", list)
    missing.cache_clear()
    try:
        found = missing()
        assert found["compiler", "clang"] == "it is not installed"
        assert "qemu-aarch64 is not installed" in found["target", cells.ARM]
        assert not any(dict(row)["compiler"] == "clang" for row in array().rows)
        assert here(Cell(passes="none", compiler="clang")) == Cell(passes="none")
        assert here(Cell(cells.ARM, opened="saved", compiler="zig")) == Cell(opened="saved")
        assert here(Cell(cells.ARM, precision="bf16")) == Cell(precision="bf16")
    finally:
        missing.cache_clear()


def test_cells_are_written_and_read() -> None:
    cell = Cell("cpu:avx2", passes="half", precision="bf16", compiler="gcc", threads="3")
    assert Cell.parse(str(cell)) == cell and Cell.parse("") == Cell()
    with pytest.raises(InputError, match="unknown cell target=tpu"):
        Cell.parse("target=tpu")
    with pytest.raises(InputError, match="impossible"):
        Cell.parse("target=cpu,precision=tf32")
    with cell.environment(0):
        assert os.environ["CC"] == "gcc"
    off = cell.options(3).without
    assert 0 < len(off) < len(Cell(passes="none").options(3).without) and off != cell.options(4).without


def test_special_values_and_sizes_around_tiles() -> None:
    a = plain_array(np.dtype(np.float32), [400], np.random.default_rng(0), True)
    tiny, most = np.finfo(np.float32).tiny, np.finfo(np.float32).max
    assert np.isnan(a).any() and np.isinf(a).any() and (np.signbit(a) & (a == 0)).any()
    assert ((a != 0) & (np.abs(a) < tiny)).any() and (a == most).any()
    small = plain_array(np.dtype(np.int8), [90], np.random.default_rng(0), True)
    assert {-128, 127} <= set(small.tolist())
    cases = [random_case(s, "views") for s in range(40)]
    sizes = {v for c in cases for call in c.calls for v in call.values()}
    assert {7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 0, 1} <= sizes
    assert 0 < sum(c.special for c in cases) < 12


def test_a_rounded_precision_tolerates_its_rounding_only() -> None:
    want = {"y": np.float32([1, 2])}
    got = {"y": np.float32([1, 2.02])}
    assert difference(got, want) and not difference(got, want, 2.0**-5)
    assert difference({"y": np.int32([1])}, {"y": np.int32([2])}, 2.0**-5)
    moved = nudged(onnx.ModelProto(), want, 0, 0.5)[1]["y"]
    assert np.abs(moved - want["y"]).max() > 0.01
    ends = {"y": np.full(50, np.finfo(np.float32).max)}
    assert np.isfinite(nudged(onnx.ModelProto(), ends, 0, 0.5)[1]["y"]).all()


# -- the frame ---------------------------------------------------------------------------------------------------------


def test_the_frame_counts_and_survives_a_process_that_dies() -> None:
    said: list[str] = []
    campaign = Campaign(partial(numbered, dies=5), range(7), say=said.append)
    assert campaign.run() == 1
    assert campaign.counts["cases"] == 6 and campaign.counts["wrong (test)"] == 5
    assert [(r.seed, r.files) for r in campaign.failures if r.files] == [(0, "new"), (3, "new")]
    assert "crash or hang" in next(text for text in said if text.startswith("seed5"))
    assert "refused 1 times: no #" in said
    authority = Campaign(partial(numbered, dies=5), [5], ask=dying, say=said.append)
    assert authority.run() == 0 and authority.counts["an authority dies"] == 1


def test_a_campaign_that_is_interrupted_keeps_its_counts() -> None:
    said: list[str] = []
    campaign = Campaign(numbered, range(7), say=said.append)

    def interrupt(r: Result) -> bool:
        if r.seed == 2:
            raise KeyboardInterrupt
        return False

    campaign.stops = interrupt
    assert campaign.run() == 1 and campaign.counts["cases"] == 3
    assert any(text.startswith("ended by Ctrl-C; 2 failures") for text in said)


# -- models ------------------------------------------------------------------------------------------------------------


def model() -> onnx.ModelProto:
    """Build ``y = relu(x @ w)``, rounded products and fused maps."""
    info, w = helper.make_tensor_value_info, np.linspace(-1, 1, 40, dtype=np.float32).reshape(8, 5)
    nodes = [helper.make_node("MatMul", ["x", "w"], ["s"]), helper.make_node("Relu", ["s"], ["y"])]
    graph = helper.make_graph(nodes, "g", [info("x", TensorProto.FLOAT, ["B", 8])],
                              [info("y", TensorProto.FLOAT, None)], [onnx.numpy_helper.from_array(w, "w")])  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def test_families_in_the_table_are_those_of_the_sources() -> None:
    """A new family of CPU kernels belongs into ``coverage.FAMILIES``; otherwise it is never missed."""
    text = "".join((ROOT / "polydyn" / "lowering" / f).read_text() for f in ("cpu_tables.py", "place_cpu.py"))
    found = {*re.findall(r"_named\(\"(\w+)\"\)", text), *re.findall(r"f\"(\w+)_\{(?:self\.)?key", text)}
    assert found | set(KERNEL_PREFIXES.values()) == set(coverage.FAMILIES["cpu"])


def test_the_table_names_what_was_reached_and_what_never() -> None:
    reached: Counter[tuple[str, ...]] = Counter()
    with kernels_counted(reached, "cpu:avx2"):
        plan_program(model(), target="cpu:avx2")
    reached.update(nodes_of(model()))
    reached["pass", "epilogue"] += 1
    assert reached["kernel", "MatMul", "float32", "contract", "cpu:avx2"] == 1
    assert reached["node", "Relu", "14", "float32"] == 1
    table = Coverage(reached)
    never = table.never()
    assert "Conv" in never["operators"] and not {"MatMul", "Relu"} & set(never["operators"])
    assert "window (cpu)" in never["kernel families"] and "contract (cpu)" not in never["kernel families"]
    assert "stitch" in never["passes"] and "epilogue" not in never["passes"]
    text = table.to_markdown()
    assert "| MatMul | 1 | 13 | float32 1 |" in text and "| epilogue | 1 |" in text
    assert table.to_json()["pass"] == [["epilogue", 1]]


def test_a_command_lists_cells_and_rejects_unknown_ones() -> None:
    shown = CliRunner().invoke(main, ["fuzz", "--cells"])
    assert shown.exit_code == 0 and f"{len(rows())} cells cover every pair" in shown.output
    wrong = CliRunner().invoke(main, ["fuzz", "--models", "1", "--cell", "target=tpu"])
    assert wrong.exit_code == 1 and "unknown cell" in wrong.output
    assert CliRunner().invoke(main, ["fuzz", "--theme", "nothing"]).exit_code == 2


def test_a_wheel_lacks_the_campaign(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "polydyn.testing", None)
    said = CliRunner().invoke(main, ["fuzz"])
    assert said.exit_code == 1 and "polydyn fuzz runs polydyn's test tools, which are not installed" in said.output
    assert "use a checkout of polydyn's sources (pip install -e .) with the extra test" in said.output


def test_a_package_of_the_extra_is_named() -> None:
    said = r"polydyn fuzz needs the package onnxruntime(.|\n)*polydyn\[test\]"
    with pytest.raises(MissingPackageError, match=said), needing_extra("polydyn fuzz", "test"):
        raise ModuleNotFoundError("no module", name="onnxruntime")
    with pytest.raises(ModuleNotFoundError, match="no module"), needing_extra("polydyn fuzz", "test"):
        raise ModuleNotFoundError("no module", name="polydyn.testing")  # not of a package that pip installs


def test_inputs_of_a_kept_model_are_needed(tmp_path: Path) -> None:
    onnx.save(model(), tmp_path / "m.onnx")
    with pytest.raises(ModelError, match="cannot read the inputs"):
        fuzz_models.again(tmp_path / "m.onnx")
