"""``polydyn try``: verdicts, exit codes, sizes chosen from dims, what is left to ONNX Runtime, the page."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import onnx
import pytest
from click.testing import CliRunner, Result

from polydyn.cli import baselines, main, trying
from polydyn.cli.machine import DIFFERENT
from polydyn.cli.trying import NOT_FASTER, Row, Trial, _size, report_page
from polydyn.shapes.sizes import Sizes
from tests.support.tiny import model, node


def call(*args: object) -> Result:
    return CliRunner().invoke(main, ["try", *map(str, args), "--rounds", "4", "--threads", "1"])


def saved(path: Path, nodes: list[onnx.NodeProto], dims: list[Any]) -> Path:
    onnx.save(model(nodes, {"x": ("float32", dims)}, ["y"]), str(path))
    return path


@pytest.fixture
def relu(tmp_path: Path) -> Path:
    return saved(tmp_path / "relu.onnx", [node("Relu", "x", "y")], ["B", "N"])


def trial(rows: list[Row], limit: float = 1e-4, left: tuple[str, ...] = ()) -> Trial:
    return Trial("m<b>.onnx", tuple(rows), limit, left, 1.5, True, 2, 3, "cpu")


def row(ours: float, theirs: float, spread: float = 0.1, error: float = 0.0) -> Row:
    return Row({"B": 2}, ours, theirs, spread, error)


def test_a_model_is_right_at_three_sizes(relu: Path, tmp_path: Path) -> None:
    done = call(relu, "--dim", "N=8:64", "-o", tmp_path / "page.html")
    assert done.exit_code in (0, NOT_FASTER), done.output
    assert "right: yes" in done.output and "left to ONNX Runtime: nothing" in done.output
    assert [re.findall(r"B=\d+,N=\d+", done.output)] == [["B=1,N=8", "B=2,N=15", "B=8,N=64"]]
    page = (tmp_path / "page.html").read_text()
    assert "relu.onnx: right" in page and page.count("<figure>") == 3


def test_a_wrong_result_has_its_own_exit_code(relu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    true = baselines.BASELINES["onnxruntime"]
    wrong = lambda source: lambda feeds: {n: a + 1 for n, a in true(source)(feeds).items()}  # noqa: E731
    monkeypatch.setattr(baselines, "BASELINES", {"onnxruntime": wrong})
    done = call(relu, "--shape", "B=2,N=3", "--json")
    assert done.exit_code == DIFFERENT
    found = json.loads(done.output)
    assert not found["right"] and found["rows"][0]["shape"] == {"B": 2, "N": 3} and found["rows"][0]["error"] >= 0.5
    allowed = call(relu, "--shape", "B=2,N=3", "--tolerance", 9)
    assert allowed.exit_code in (0, NOT_FASTER) and "right: yes" in allowed.output


def test_nodes_that_onnx_runtime_runs_are_listed_with_the_reason(tmp_path: Path) -> None:
    nodes = [node("Relu", "x", "r"), node("MaxRoiPool", "r rois", "y", pooled_shape=[1, 1])]
    inputs = {"x": ("float32", ["N", 1, 4, 4]), "rois": ("float32", ["R", 5])}
    onnx.save(model(nodes, inputs, ["y"]), str(tmp_path / "m.onnx"))
    done = call(tmp_path / "m.onnx", "--shape", "N=2,R=0")
    assert done.exit_code in (0, NOT_FASTER), done.output
    assert "left to ONNX Runtime (1 node)" in done.output
    assert re.search(r"\(MaxRoiPool\) runs in ONNX Runtime: .+", done.output)


def test_verdicts_look_at_the_spread() -> None:
    assert [row(1, x).verdict for x in (1.2, 0.8, 1.05)] == ["faster", "slower", "equal"]
    assert trial([row(1, 2), row(1, 1)]).code == 0 and trial([row(1, 2), row(1, 1)]).speed == "faster"
    assert trial([row(1, 2), row(1, 0.5)]).code == NOT_FASTER and trial([row(1, 1)]).code == NOT_FASTER
    assert trial([row(1, 2, error=1.0)]).code == DIFFERENT, "wrong, however fast"
    assert trial([row(1, 4), row(1, 1)]).mean == pytest.approx(2)


def test_sizes_are_likely_ones_or_of_the_range() -> None:
    sizes = {
        None: [1, 2, 8], Sizes(8, 512): [8, 71, 512], Sizes(0, 0 + 6): [1, 1, 6], Sizes(0, 64, 8): [8, 8, 64],
        Sizes(1, 512, likely=(128, 384)): [128, 128, 384], Sizes(3): [3, 3, 8],
    }  # fmt: skip
    for given, expected in sizes.items():
        found = [_size(given, (1, 2, 8), level) for level in range(3)]
        assert found == sorted(found) and (given is None or all(map(given.holds, found))), (given, found)
        assert found[0] == expected[0] and found[-1] == expected[-1], (given, found)


def test_dims_that_follow_from_others_are_not_chosen(tmp_path: Path) -> None:
    inputs = {"x": ("float32", ["B", "N"]), "z": ("float32", ["B", "M"])}
    onnx.save(model([node("Sub", "x z", "y")], inputs, ["y"]), str(tmp_path / "m.onnx"))
    done = call(tmp_path / "m.onnx")
    assert done.exit_code in (0, NOT_FASTER), done.output
    assert re.findall(r"^B=\d+,N=\d+", done.output, re.M) == ["B=1,N=8", "B=2,N=64", "B=8,N=160"]


def test_a_saved_program_and_a_model_without_sizes_are_refused(relu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert CliRunner().invoke(main, ["compile", str(relu), "-o", str(relu.with_suffix(".polydyn"))]).exit_code == 0
    refused = call(relu.with_suffix(".polydyn"))
    assert refused.exit_code == 1 and "is a saved program" in refused.output

    def none(*_: object) -> dict[str, int]:
        raise trying.InputError("a guard")

    monkeypatch.setattr(trying, "_shape", none)
    refused = call(relu)
    assert refused.exit_code == 1 and "no sizes were found" in refused.output and "--shape" in refused.output


class Tags(HTMLParser):
    """Collects attributes, and checks that what is opened is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.attributes: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs
        assert tag not in ("script", "link", "img")


def test_the_page_needs_nothing_else_and_escapes() -> None:
    page = report_page(
        trial([row(1e-3, 2e-3), row(2e-3, 1e-3, error=1.0)], left=("n (Det) runs in ONNX Runtime: <x>",))
    )
    tags = Tags()
    tags.feed(page)
    assert not [a for a in tags.attributes if a[0] in ("src", "href")] and "url(" not in page
    assert "within the spread</h1>" in report_page(trial([row(1, 1)])), "no claim of speed without a difference"
    assert "m&lt;b&gt;.onnx: wrong" in page and "&lt;x&gt;" in page and "differs" in page
    assert "prefers-color-scheme:dark" in page and "width=device-width" in page
