"""Programs for arm64 (NEON), cross-compiled by gcc or zig and executed by qemu: ``make arm-test``.

Only the code is tested: under qemu, memory ordering between threads is this processor's.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import polydyn
from polydyn.build.compilers import wheel_command
from polydyn.build.features import architecture
from polydyn.cli import main
from polydyn.compiler import compile_artifact, plan_graph
from polydyn.errors import ArtifactError, UnsupportedError
from polydyn.graph.reference import evaluate
from polydyn.program.assemble import build_artifact
from polydyn.runtime.artifact import read_artifact, write_artifact
from polydyn.testing.accuracy import TOLERANCE, error, reference
from polydyn.testing.from_c import build, run
from polydyn.testing.fuzz import difference
from polydyn.testing.inputs import feeds, shapes
from polydyn.testing.quantizer import quantize
from polydyn.testing.random_graphs import random_feeds, random_graph
from tests.program.test_parts import MASKED_ROWS
from tests.support.paths import DATA
from tests.support.stored import load, path_of

CROSS, QEMU, SYSROOT = "aarch64-linux-gnu-gcc", "qemu-aarch64", "/usr/aarch64-linux-gnu"
ZIG = shlex.join([*wheel_command(), "-target", "aarch64-linux-gnu"]) if wheel_command() else ""
"""zig of the Python package; it brings the C library to link with, and qemu the one to run with."""
TARGET = "cpu:neon"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (shutil.which(CROSS) and shutil.which(QEMU)), reason=f"{CROSS} or {QEMU} is not installed"),
    pytest.mark.skipif(architecture() == "aarch64", reason="the ordinary tests run NEON code here"),
]
Feeds = Mapping[str, np.ndarray[Any, Any]]


@pytest.fixture(scope="module", params=["gcc", "zig"])
def compiler(request: pytest.FixtureRequest) -> str:
    """Return the command of a cross compiler."""
    if request.param == "zig" and not ZIG:
        pytest.skip("the Python package ziglang is not installed")
    return CROSS if request.param == "gcc" else ZIG


@pytest.fixture(autouse=True)
def cross(monkeypatch: pytest.MonkeyPatch, compiler: str) -> None:
    monkeypatch.setenv("CC", compiler)


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory, compiler: str) -> Path:
    """Build polydyn/testing/run_stdin.c for arm64."""
    return build(shlex.split(compiler), tmp_path_factory.mktemp("arm"))


def call(runner: Path, artifact: Path, calls: Sequence[Feeds], threads: int = 2) -> list[dict[str, Any]]:
    """Return the outputs of a saved program for each call, computed by qemu."""
    return run([QEMU, "-L", SYSROOT, str(runner)], artifact, calls, threads)


def compiled(model: str, to: Path) -> Path:
    """Compile a model file for arm64 by the command line and return the artifact."""
    done = CliRunner().invoke(main, ["compile", model, "--target", TARGET, "-o", str(to)])
    assert done.exit_code == 0 and "opens on aarch64" in done.output, done.output
    return to


@pytest.mark.parametrize("name", ["bert_tiny", "gpt2_past_tiny", "resnet_tiny", "vit_hw_tiny", "llama_tiny"])
def test_models_are_right_at_every_shape(name: str, runner: Path, tmp_path: Path) -> None:
    wanted = [s for s in shapes(name) if np.prod(list(s.values())) < 20_000]
    got = call(runner, compiled(path_of(name), tmp_path / "m.polydyn"), [feeds(load(name), s) for s in wanted])
    worst = [error(g, e) for g, e in zip(got, reference(path_of(name), wanted), strict=True)]
    assert max(worst) <= TOLERANCE, dict(zip(map(str, wanted), worst, strict=True))


def test_a_program_of_parts_is_right(runner: Path, tmp_path: Path) -> None:
    write_artifact(compile_artifact(MASKED_ROWS, target=TARGET)[0], tmp_path / "m.polydyn")
    x = np.random.default_rng(2).standard_normal((5, 7)).astype(np.float32)
    (got,) = call(runner, tmp_path / "m.polydyn", [{"x": x}])
    np.testing.assert_allclose(got["y"], np.exp(x[x > 0]), 1e-5)


def test_bytes_are_right(runner: Path, tmp_path: Path) -> None:
    wanted = [{"B": 1, "L": 7}, {"B": 2, "L": 13}]
    given = [feeds(load("bert_tiny"), s) for s in wanted]
    model = quantize(path_of("bert_tiny"), tmp_path / "q.onnx", "dynamic", [], weight_type="QUInt8")
    here = polydyn_here(model).run
    got = call(runner, compiled(model, tmp_path / "m.polydyn"), given)
    assert max(error(g, here(f)) for g, f in zip(got, given, strict=True)) < 1e-2


def polydyn_here(model: str) -> polydyn.Program:
    """Compile the program for this machine; products of bytes are exact, operations around them round."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CC", "gcc")
        return polydyn.compile(model)


def test_random_graphs_agree_with_the_reference(runner: Path, tmp_path: Path) -> None:
    wrong = {}
    for seed in range(12):
        graph = random_graph(seed)
        given = [random_feeds(graph, n) for n in range(3)]
        write_artifact(build_artifact(plan_graph(graph, target=TARGET), TARGET)[0], tmp_path / "g.polydyn")
        for f, got in zip(given, call(runner, tmp_path / "g.polydyn", given), strict=True):
            if said := difference(graph, f, got, evaluate(graph, f)):
                wrong[seed] = said
    assert not wrong


def test_a_program_for_another_architecture_is_not_opened_here(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="cpu:neon is for aarch64") as e:
        polydyn.compile(path_of("resnet_tiny"), target=TARGET)
    assert "without opening it" in str(e.value.remedy)
    saved = compiled(str(DATA / "resnet_tiny.onnx"), tmp_path / "m.polydyn")
    with pytest.raises(ArtifactError, match="was made for aarch64"):
        polydyn.load(saved)
    assert CliRunner().invoke(main, ["extract", str(saved), "-o", str(tmp_path / "c")]).exit_code == 0


def test_a_program_for_musl_is_linked_with_musl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not executed: Debian has no C library of musl for arm64."""
    if not ZIG:
        pytest.skip("the Python package ziglang is not installed")
    monkeypatch.setenv("CC", ZIG.replace("linux-gnu", "linux-musl"))
    library = read_artifact(
        compiled(str(DATA / "resnet_tiny.onnx"), tmp_path / "m.polydyn"), check_machine=False
    ).library
    assert library[:4] == b"\x7fELF" and int.from_bytes(library[18:20], "little") == 183
    assert b"GLIBC_" not in library and b"libc.so\0" in library
