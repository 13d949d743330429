"""Targets: the meaning of their names, rejections, and compiling as the list of its stages."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from click.testing import CliRunner

import polydyn
from polydyn.backends import Options, target_of
from polydyn.backends.cpu import Cpu
from polydyn.backends.cuda import Cuda
from polydyn.build.features import architecture
from polydyn.cli import main
from polydyn.compiler import plan_program
from polydyn.errors import CodegenError, UnsupportedError
from polydyn.graph.expand import import_model
from tests.support.tiny import model, node

MATMUL = model(
    [node("MatMul", "x w", "t"), node("Relu", "t", "y")],
    {"x": ("float32", ["M", "K"]), "w": ("float32", ["K", 16])}, ["y"],
)  # fmt: skip


def test_a_name_is_one_target() -> None:
    assert isinstance(target_of("cpu:avx2"), Cpu) and isinstance(target_of("cuda:sm_80"), Cuda)
    for name in ("cpu:z80", "cuda:sm_70", "tpu", ""):
        with pytest.raises(UnsupportedError, match="unknown target"):
            target_of(name)
    with pytest.raises(UnsupportedError, match="tf32 on cpu:avx2"):
        target_of("cpu:avx2", Options(tf32=True))


def test_a_program_for_another_architecture_can_be_written_but_not_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``make arm-test`` compiles and executes such programs."""
    other = "cpu:neon" if architecture() == "x86_64" else "cpu:avx2"
    monkeypatch.setenv("CC", "no-cross-compiler")
    with pytest.raises(UnsupportedError, match=f"target {other} is for"):
        polydyn.compile(MATMUL, target=other)
    assert plan_program(MATMUL, target=other).kernels
    onnx.save(MATMUL, tmp_path / "m.onnx")
    done = CliRunner().invoke(main, ["compile", str(tmp_path / "m.onnx"), "--target", other, "-o", str(tmp_path / "p")])
    assert done.exit_code == 1 and "no C compiler found" in done.output, "the command goes on to compile it"
    assert not (tmp_path / "p").exists()


@pytest.mark.parametrize("name", ["cpu:avx512", "cuda:sm_90a"])
def test_stages_one_by_one_are_what_compile_does(name: str) -> None:
    target, graph = target_of(name), import_model(MATMUL)
    rewritten = target.rewrite(graph)
    kernels = target.place(target.builder(target.fuse(rewritten)))
    whole = plan_program(MATMUL, target=name)
    assert {k.text for p in kernels.placed for k in p.kernels} <= {k.text for k in whole.kernels}
    first = [x for x in whole.launches if x.kind != "shares"]
    assert len(first) < len(whole.launches) or target.on_device, "K may be long: a launch adds its shares"
    for launch, p in zip(first, kernels.placed, strict=True):
        assert [c.kernel for c in launch.candidates] == [k.name for k in p.kernels]
        assert set(p.written) <= set(launch.writes or ())
        assert all((c.block is not None) == target.on_device for c in launch.candidates)
    assert [c.name for c in whole.launches[0].candidates] == list({c.name: 0 for c in whole.launches[0].candidates})


def test_the_stages_are_shown_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("POLYDYN_DEBUG", "1")
    polydyn.compile(MATMUL)
    said = [line.split()[-1] for line in capsys.readouterr().err.splitlines() if " s  " in line]
    assert [x for x in said if x != "all"] == ["import", "rewrite", "fuse", "kernels", "plan", "build"]


def test_a_bug_ends_the_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    """An earlier version noted it and used a slow kernel."""

    def broken(*_: object) -> None:
        raise CodegenError("planted")

    monkeypatch.setattr("polydyn.codegen.passes.vectorise._iteration", broken)
    softmax = model([node("Softmax", "x", "y", axis=-1)], {"x": ("float32", ["M", 24])}, ["y"])
    with pytest.raises(CodegenError, match="planted"):
        plan_program(softmax, target="cpu:avx2")
