"""Tables of the papers on tiny inputs: every one prints its section, and a page keeps the other sections."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from benchmarks.papers import __main__ as command
from benchmarks.papers import checks, kernels, programs, report
from benchmarks.papers.report import Grid, Result, Settings
from benchmarks.papers.statements import STATEMENTS, paragraphs
from tests.support.paths import ROOT

QUICK = Settings(quick=True, rounds=1)


def rows_of(result: Result, grid: int = 0) -> dict[str, list[str]]:
    return {cells[0]: list(cells[1:]) for cells in result.grids[grid].rows}


def test_every_table_has_statements_and_a_line_of_the_list_and_of_the_page() -> None:
    assert set(command.TABLES) == set(STATEMENTS)
    page = (ROOT / "docs" / "paper_tables.md").read_text()
    for name in STATEMENTS:
        assert re.search(rf"^{name} ", command.listing(), re.MULTILINE) and f"benchmarks.papers {name}`" in page


def test_tiles_of_a_product_have_shares_of_the_best() -> None:
    result = kernels.smoothness(Settings(quick=True, rounds=1, points=2, trials=4))
    rows = rows_of(result)
    assert len(result.grids[0].columns) == 5 and {"default, untuned", "ONNX Runtime (whole calls)"} <= rows.keys()
    best = [max(float(r[n]) for name, r in rows.items() if name[0].isdigit()) for n in range(2)]
    for name, r in rows.items():
        assert float(r[2]) == pytest.approx(np.mean([float(r[n]) / best[n] for n in range(2)]), rel=0.05), name
        assert float(r[3]) <= float(r[2]) + 0.01


def test_more_votes_need_fewer_kernels() -> None:
    result = kernels.votes(Settings(quick=True, rounds=1, points=3, trials=6))
    counts = [int(r[0]) for name, r in rows_of(result).items() if name[0].isdigit()]
    assert counts[0] == max(counts) and counts[-1] == 1
    assert sum("*" in name for name in rows_of(result)) == 1, "one k is the strategy's"


def test_every_strategy_is_timed_at_every_number_of_shapes() -> None:
    result = kernels.growth(Settings(quick=True, only=("ftuner", "static")))
    assert result.grids[0].columns == ("strategy", "1", "2")
    assert all(float(x) > 0 for r in rows_of(result).values() for x in r) and len(rows_of(result)) == 2


def test_stitching_leaves_one_kernel() -> None:
    rows = rows_of(programs.stitch(Settings(quick=True, rounds=1, only=("onnxruntime", "polydyn"))))
    for name in ("LayerNorm", "Softmax"):
        assert rows[f"{name}, with stitch"][1] == "1" and int(rows[f"{name}, without stitch"][1]) > 1
        assert rows[f"{name}, with stitch"][2] == "1.00"


def test_networks_are_compared_with_onnx_runtime() -> None:
    result = programs.networks(Settings(quick=True, rounds=1, points=1, only=("alexnet",)))
    ((name, ratio, least, cases, printed),) = result.grids[0].rows
    assert (name, cases, printed) == ("AlexNet", "1", "2.01") and float(ratio) == float(least) > 0
    assert [r[0] for r in result.grids[1].rows] == ["AlexNet"]


def test_sizes_of_a_network_follow_from_the_seed_and_lie_in_the_papers() -> None:
    texts, images = programs.NETWORKS["bert_large"], programs.NETWORKS["alexnet"]
    for seed in range(5):
        settings = Settings(seed=seed, points=4)
        assert programs.sizes_of(texts, settings) == programs.sizes_of(texts, settings)
        assert set(programs.sizes_of(texts, settings)) <= set(programs.TEXTS)
        assert set(programs.sizes_of(images, settings)) <= set(programs.BATCHES)
    assert programs.TEXTS[0] == 1 and programs.TEXTS[-1] == 476 and len(programs.TEXTS) == 17


@pytest.mark.parametrize("rows", [1, 127, 128, 200])
def test_checks_in_every_place_compute_the_product(rows: int) -> None:
    versions = checks.Versions(128, 300, rows)
    versions.check()
    versions.panels[0, 0, 0] += 1  # a control: a wrong operand is seen
    with pytest.raises(AssertionError):
        versions.check()


def test_a_table_of_checks_names_all_versions() -> None:
    result = checks.bounds(QUICK)
    assert set(rows_of(result)) == {*checks.VERSIONS, "polydyn", "ONNX Runtime"}
    assert rows_of(result)["local"][-1] == "1.00"


def test_a_section_replaces_its_own_and_no_other(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Head\n\ntext\n")
    for name, value in (("vortex-13", "1"), ("dietcode-10", "2"), ("vortex-13", "3")):
        report.save(Result(name, f"value {value}", (Grid("c", ("a", "b"), (("x", value),)),)), page)
    text = page.read_text()
    assert text.startswith("# Head\n\ntext\n")
    assert re.findall(r"^## ([\w-]+):", text, re.MULTILINE) == ["dietcode-10", "vortex-13"]
    assert re.findall(r"value (\d)", text) == ["2", "3"] and "| x | 3 |" in text


def test_numbers_have_about_three_digits() -> None:
    values = (1234.5, 12.34, 1.234, 0.9876, 0.0312)
    assert [report.number(x) for x in values] == ["1234", "12.3", "1.23", "0.99", "0.031"]
    assert paragraphs("\n  a\n  b\n\n  c\n") == ["a b", "c"]


def test_quick_numbers_are_not_recorded() -> None:
    with pytest.raises(SystemExit):
        command.parse(["vortex-13", "--quick", "--record"])
