"""Commands that write files: the page of explain, the plot of bench, dump, minimise."""

from __future__ import annotations

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import onnx
import pytest
from click.testing import CliRunner, Result

from polydyn.cli import main, minimise
from tests.support.stored import path_of
from tests.support.tiny import model, node

BERT = path_of("bert_tiny")


def call(*args: object) -> Result:
    return CliRunner().invoke(main, [str(a) for a in args])


def data(*args: object) -> Any:
    done = call(*args, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.output)


class Links(HTMLParser):
    """Collects the URLs that a page would load."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("script", "link", "img", "iframe"):
            self.found.append(tag)
        self.found += [v or "" for n, v in attrs if n in ("src", "href") and not (v or "").startswith("#")]


def test_the_page_of_explain_has_everything_and_loads_nothing(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    limits = ("--peak", 400, "--bandwidth", 20)
    done = call("explain", BERT, "--shape", "B=2,L=9", "--threads", 2, "--html", page, *limits)
    assert done.exit_code == 0, done.output
    text = page.read_text()
    links = Links()
    links.feed(text)
    assert not links.found
    for part in ("Where the time goes", "Roofline", "Launches", "Memory plan", "Sources", "bert_tiny at B=2, L=9",
                 "attention_mask", "starts a contract group", "kernels_000.c", "µs"):  # fmt: skip
        assert part in text, part
    pictures = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(pictures) == 2 and all(ElementTree.fromstring(x) is not None for x in pictures)
    found = data("explain", BERT, "--shape", "B=0,L=1", "--html", page)
    assert found["shape"] == {"B": 0, "L": 1} and "nothing runs" in page.read_text()


def test_the_plot_of_bench(tmp_path: Path) -> None:
    path = tmp_path / "relu.onnx"
    onnx.save(model([node("Relu", "x", "y")], {"x": ("float32", ["N", 3])}, ["y"]), path)
    for shapes in (("N=1",), ("N=1", "N=64", "N=512")):
        plot = tmp_path / "plot.svg"
        data("bench", path, *(x for s in shapes for x in ("--shape", s)), "--rounds", 1, "--plot", plot)
        text = "\n".join(ElementTree.fromstring(plot.read_text()).itertext())
        assert "onnxruntime" in text and "relu.onnx: seconds of a call" in text


def test_dump_writes_every_stage_or_the_sources(tmp_path: Path) -> None:
    found = data("dump", BERT, "-o", tmp_path / "stages")
    kinds = {Path(f).suffix for f in found["files"]}
    assert {".txt", ".c"} <= kinds and any("00_import" in f for f in found["files"]) and len(found["files"]) > 50
    small = tmp_path / "relu.onnx"
    onnx.save(model([node("Relu", "x", "y")], {"x": ("float32", ["N", 3])}, ["y"]), small)
    assert call("compile", small, "-o", tmp_path / "relu.polydyn").exit_code == 0
    done = call("dump", tmp_path / "relu.polydyn", "-o", tmp_path / "saved")
    assert "files" in done.output and {"host.c", "manifest.json"} <= {p.name for p in (tmp_path / "saved").iterdir()}


# -- minimise ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def chain(tmp_path: Path) -> Path:
    """Build eleven nodes; only ``Erf`` and ``Tanh`` matter. One node has an unknown name."""
    ops = ["Relu", "Neg", "Exp", "Erf", "Neg", "Abs", "Sigmoid", "Tanh", "Neg", "Relu"]
    nodes = [node(op, f"t{k}", f"t{k + 1}") for k, op in enumerate(ops)]
    made = model(nodes, {"t0": ("float32", ["N", 3])}, [f"t{len(ops)}"])
    path = tmp_path / "chain.onnx"
    onnx.save(made, path)
    return path


def ops(path: Path) -> list[str]:
    onnx.checker.check_model(onnx.load(path))
    return [n.op_type for n in onnx.load(path).graph.node]


def test_a_command_decides_what_fails(chain: Path, tmp_path: Path) -> None:
    script = tmp_path / "check.py"
    script.write_text(
        "import sys\ndata = open(sys.argv[1], 'rb').read()\n"
        "sys.exit(7 if b'Erf' in data and b'Tanh' in data else 5 if b'Erf' in data else 0)\n"
    )
    command = f"{sys.executable} {script} {{}}"
    found = data("minimise", chain, "--failure", "command", "--command", command, "-o", tmp_path / "small.onnx")
    assert ops(tmp_path / "small.onnx") == ["Erf", "Tanh"] and found["nodes"] == 2 and found["failure"] == "exit code 7"


def test_an_error_of_compiling_is_one_node(chain: Path, tmp_path: Path) -> None:
    broken = onnx.load(chain)
    broken.graph.node[5].op_type = "Frobnicate"
    onnx.save(broken, chain)
    found = data("minimise", chain, "--failure", "compile", "-o", tmp_path / "small.onnx", "--match", "Frobnicate")
    assert [n.op_type for n in onnx.load(tmp_path / "small.onnx").graph.node] == ["Frobnicate"]
    assert found["failure"].startswith("UnsupportedError") and found["of"] == 10


def test_results_that_differ_and_crashes(chain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["polydyn.cli.minimise"]
    seen: list[int] = []

    def verify(m: onnx.ModelProto, feeds: Any, **options: Any) -> list[Any]:
        seen.append(feeds[m.graph.input[0].name].shape[0])
        return [SimpleNamespace(ok=not any(n.op_type == "Tanh" for n in m.graph.node))]

    monkeypatch.setattr(module, "verify_model", verify)
    found = data("minimise", chain, "--failure", "differs", "--shape", "N=5", "-o", tmp_path / "small.onnx")
    assert ops(tmp_path / "small.onnx") == ["Tanh"] and set(seen) == {5} and found["nodes"] == 1
    monkeypatch.setattr(module, "_exit", lambda m, _: -11 if any(n.op_type == "Erf" for n in m.graph.node) else 1)
    found = data("minimise", chain, "--failure", "crash", "-o", tmp_path / "crash.onnx")
    assert ops(tmp_path / "crash.onnx") == ["Erf"] and found["failure"] == "signal 11"


def test_a_healthy_model_crashes_nowhere_and_tries_are_counted(chain: Path, tmp_path: Path) -> None:
    done = call("minimise", chain, "--failure", "crash", "--shape", "N=2", "-o", tmp_path / "small.onnx")
    assert done.exit_code == 1 and "does not fail in this way" in done.output and not (tmp_path / "small.onnx").exists()
    command = f"{sys.executable} -c 'import sys;sys.exit(1)' {{}}"
    half = tmp_path / "half.onnx"
    done = call("minimise", chain, "--failure", "command", "--command", command, "--tries", 1, "-o", half)
    assert done.exit_code == 0 and "--tries ended the search" in done.output and len(ops(half)) == 5


def test_parts_keep_their_weights_and_types() -> None:
    made = onnx.load(BERT)
    search = minimise.Search(made, lambda m: None, "", 9, lambda text: None)
    part = search.part([3, 4, 5])
    onnx.checker.check_model(part)
    produced = {o for n in part.graph.node for o in n.output}
    known = produced | {t.name for t in part.graph.initializer} | {i.name for i in part.graph.input}
    assert known >= {x for n in part.graph.node for x in n.input if x}


@pytest.mark.parametrize(
    "words", [
        ("compile",), ("quantize",), ("to-half",), ("minimise", "--failure", "run", "--shape", "N=2"),
        ("trace", "--shape", "N=2"), ("try",),
    ],
)  # fmt: skip
def test_the_output_is_not_the_file_that_is_read(words: tuple[str, ...], tmp_path: Path) -> None:
    """Also by another name, as a link."""
    path, link = tmp_path / "relu.onnx", tmp_path / "link.onnx"
    onnx.save(model([node("Relu", "x", "y")], {"x": ("float32", ["N", 3])}, ["y"]), path)
    link.symlink_to(path)
    before = path.read_bytes()
    for output in (path, link):
        done = call(words[0], path, "-o", output, *words[1:])
        assert done.exit_code == 1 and "is the file that the command reads" in done.output, done.output
    assert path.read_bytes() == before
