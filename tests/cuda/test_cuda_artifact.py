"""CUDA programs as files, and their contents: images, resources, sources."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import polydyn
from polydyn.build.compiler import find_compiler
from polydyn.errors import ArtifactError, BuildError
from polydyn.gpu import emulator
from polydyn.gpu.compiler import find_nvcc
from polydyn.gpu.errors import WrongArchitectureError
from polydyn.gpu.nvrtc import find_nvrtc
from polydyn.program.assemble import rebuild
from polydyn.runtime.artifact import write_artifact
from polydyn.runtime.c import sources
from polydyn.runtime.cuda import images
from polydyn.runtime.cuda.program import CudaProgram
from polydyn.runtime.cuda.session import open_session
from tests.support.cuda_programs import check, relu
from tests.support.paths import ROOT


@pytest.fixture(autouse=True, scope="module")
def device() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POLYDYN_LIBCUDA", "emulated")
        yield


def test_saved_programs_run_and_explain_the_same(tmp_path: Path) -> None:
    program = relu()
    program.save(tmp_path / "p.polydyn")
    loaded: Any = polydyn.load(tmp_path / "p.polydyn")
    assert isinstance(loaded, CudaProgram) and loaded.images == [] and loaded.compilations == 0
    check(loaded, 4)
    check(program, 4)
    assert str(loaded.explain(N=4)) == str(program.explain(N=4))


def test_only_kernels_that_are_launched_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    program, compiled = relu(), []

    def compile_emulated(text: str, arch: int) -> Path:
        compiled.append(text)
        return emulator.compile_emulated(text, arch=arch)

    monkeypatch.setattr(images, "compile_emulated", compile_emulated)
    check(program, 4)
    first = len(compiled)
    check(program, 7)
    assert first == len(program.launches) == len(compiled) < program.kernel_count


def test_without_a_cuda_compiler_programs_hold_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def none(prefer: str | None = None) -> str:
        raise BuildError("no CUDA compiler found")

    monkeypatch.setattr(images, "compiler_version", none)
    program: Any = relu("cuda:sm_80")
    assert program.images == [] and "sources, compiled where they run" in program.manifest["cuda"]["note"]
    program.save(tmp_path / "p.polydyn")
    loaded: Any = polydyn.load(tmp_path / "p.polydyn")
    check(loaded, 2)  # in fact, for the emulation
    others = dict(loaded.sources) | {"pd_device.cuh": "// older"}
    with pytest.raises(WrongArchitectureError, match="another polydyn"):
        images.ImageSource(open_session().driver, [], {}, others)

    def refuse(text: str, arch: int) -> Path:
        raise BuildError("no C++ compiler found")

    monkeypatch.setattr(images, "compile_emulated", refuse)
    loaded = polydyn.load(tmp_path / "p.polydyn")
    with pytest.raises(WrongArchitectureError, match="cannot be compiled here: no C"):
        check(loaded, 2)
    monkeypatch.undo()
    check(loaded, 2)


@pytest.mark.skipif(find_nvcc() is None and find_nvrtc() is None, reason="neither nvcc nor NVRTC is installed")
def test_with_a_cuda_compiler_programs_hold_cubins_ptx_and_what_ptxas_said(tmp_path: Path) -> None:
    program: Any = relu("cuda:sm_86")
    assert program.images == ["ptx", "sm_86"] and len(program.resources) == program.kernel_count
    for use in program.resources.values():
        assert 1 <= use["sm_86"]["registers"] <= 255 and use["sm_86"]["spill_stores"] == 0
    explained = program.explain(N=3).launches[0]
    assert explained.choices["registers"] == program.resources[explained.kernel]["sm_86"]["registers"]
    check(program, 3)  # the emulation compiles the sources
    path = tmp_path / "p.polydyn"
    program.save(path)
    rebuild(path, tmp_path / "q.polydyn", "cuda:sm_80")
    other: Any = polydyn.load(tmp_path / "q.polydyn")
    assert other.images == ["ptx", "sm_80"]
    with pytest.raises(BuildError, match="not for cpu"):
        rebuild(path, tmp_path / "r.polydyn")

    class Device:
        device_name = "NVIDIA"

        def __init__(self, arch: int) -> None:
            self.arch = arch

    def image(arch: int, program: CudaProgram = other) -> bytes:
        names = [(k["name"], k["arch"]) for k in program.manifest["kernels"]]
        source = images.ImageSource(Device(arch), names, program._artifact.images, program.sources)  # type: ignore[arg-type]
        return source.image(len(names) - 1)

    cubin, ptx = (other._artifact.images[n] for n in ("sm_80/kernels_000.cubin", "ptx/kernels_000.ptx"))
    assert image(80) == image(86) == image(89) == cubin and cubin[:4] == b"\x7fELF"
    assert image(90) == image(103) == image(120) == ptx and b".target sm_80" in ptx and ptx.endswith(b"\0")
    assert image(80, program) == ptx, "a cubin runs on no older device"


def test_a_damaged_image_is_found(tmp_path: Path) -> None:
    path = tmp_path / "p.polydyn"
    program = relu()
    write_artifact(replace(program._artifact, images={"sm_80/kernels_000.cubin": bytes(999)}), path)
    with zipfile.ZipFile(path) as z:
        info = z.getinfo("images/sm_80/kernels_000.cubin")
        at = info.header_offset + 30 + len(info.filename) + info.compress_size // 2
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(ArtifactError, match="damaged"):
        polydyn.load(path)


def test_loading_and_running_needs_only_numpy(tmp_path: Path) -> None:
    relu().save(tmp_path / "p.polydyn")
    blocked = ("islpy", "onnx", "sympy", "networkx", "click", "rich", "torch", "pycuda", "sklearn")
    code = f"""
import sys
for m in {blocked}: sys.modules[m] = None
import numpy, polydyn
y = polydyn.load({str(tmp_path / "p.polydyn")!r}).run({{"x": numpy.full((2, 8), 3, "float32")}})["y"]
assert (y == 3).all()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_the_runtime_compiles_without_warnings(tmp_path: Path) -> None:
    for name, text in sources("cuda").items():
        (tmp_path / name).write_text(text)
    units = [n for n in sources("cuda") if n.endswith(".c")]
    flags = ["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-fPIC", "-c"]
    subprocess.run([*find_compiler().command, *flags, *units], cwd=tmp_path, check=True)
    (tmp_path / "h.c").write_text('#include "polydyn_cuda.h"\n')
    strict = [*find_compiler().command, "-std=c99", "-pedantic", "-Werror", "-c", "h.c"]
    subprocess.run(strict, cwd=tmp_path, check=True)
