"""Compile-only checks: every device header and both GEMMs for every architecture, ptxas reports, rejections."""

from __future__ import annotations

import re

import pytest

from polydyn.errors import BuildError, UnsupportedError
from polydyn.gpu.compiler import ARCHITECTURES, compile_cuda, find_nvcc, parse_ptxas
from polydyn.gpu.nvrtc import find_nvrtc
from polydyn.testing.device.cases import HERE
from polydyn.testing.device.gemms import MMA_SOURCE, WGMMA_SOURCE

needs_nvcc = pytest.mark.skipif(find_nvcc() is None, reason="nvcc is not installed")
needs_compiler = pytest.mark.skipif(
    find_nvcc() is None and find_nvrtc() is None, reason="neither nvcc nor NVRTC is installed"
)


@needs_compiler
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_mma_gemm_compiles_without_spills(arch: str) -> None:
    use = compile_cuda(MMA_SOURCE, arch).kernels["gemm_mma"]
    assert 64 <= use.registers <= 128  # two blocks of 256 threads on 65536 registers
    assert use.spill_stores == use.spill_loads == use.stack == use.static_smem == 0


@needs_compiler
def test_wgmma_gemm_compiles_for_hopper_only() -> None:
    compiled = compile_cuda(WGMMA_SOURCE, "sm_90a")
    use = compiled.kernels["gemm_wgmma"]
    assert "serialized" not in compiled.log  # ptxas warns so (C75xx) when it must order wgmma by hand
    assert use.registers <= 168 and use.spill_stores == use.spill_loads == use.stack == 0
    with pytest.raises(BuildError, match="sm_80"):
        compile_cuda(WGMMA_SOURCE, "sm_80", compiler="nvcc" if find_nvcc() else None)


@needs_compiler
@pytest.mark.parametrize(("source", "arch"), [("primitives.cu", "sm_80"), ("primitives_hopper.cu", "sm_90a")])
def test_every_primitive_compiles(source: str, arch: str) -> None:
    compiled = compile_cuda((HERE / source).read_text(), arch)
    assert len(compiled.kernels) >= 20 and compiled.image[:4] == b"\x7fELF"
    assert all(u.spill_stores == 0 for u in compiled.kernels.values())


@needs_nvcc
def test_images_are_cached_and_ptx_ends_with_zero() -> None:
    first = compile_cuda(MMA_SOURCE, "sm_80", {"STAGES": 3}, kind="ptx", compiler="nvcc")
    again = compile_cuda(MMA_SOURCE, "sm_80", {"STAGES": 3}, kind="ptx", compiler="nvcc")
    assert first == again and first.image.endswith(b"\0") and b".target sm_80" in first.image
    other = compile_cuda(MMA_SOURCE, "sm_80", {"STAGES": 4}, kind="ptx", compiler="nvcc")
    assert other.image != first.image


@needs_nvcc
def test_compiler_errors_are_shown() -> None:
    with pytest.raises(BuildError, match="no_such_function"):
        compile_cuda("__global__ void k() { no_such_function(); }", "sm_80", compiler="nvcc")


def test_unknown_choices_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="sm_70"):
        compile_cuda("", "sm_70")
    with pytest.raises(BuildError, match="exe"):
        compile_cuda("", "sm_80", kind="exe")
    with pytest.raises(BuildError, match="clang"):
        compile_cuda("", "sm_80", compiler="clang")


def test_ptxas_text() -> None:
    text = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'a' for 'sm_80'
ptxas info    : Function properties for a
    16 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 128 registers, used 1 barriers, 2048 bytes smem, 404 bytes cmem[0]
ptxas info    : (C7520) Potential Performance Loss: wgmma.mma_async instructions are serialized due to insufficient \
register resources for the wgmma pipeline in the function 'b'
ptxas info    : Compiling entry function 'b' for 'sm_80'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers
"""
    uses = parse_ptxas(text)
    a, b = uses["a"], uses["b"]
    assert (a.registers, a.spill_stores, a.spill_loads, a.stack, a.static_smem, a.barriers) == (128, 12, 8, 16, 2048, 1)
    assert (b.registers, b.spill_stores, b.static_smem) == (40, 0, 0) and (a.serialised, b.serialised) == (0, 1)
    assert parse_ptxas("nothing here") == {}


@needs_compiler
def test_gemm_uses_the_instructions_it_should() -> None:
    """Wide shared loads and global stores, ldmatrix, cp.async; no access through generic addresses, no local memory."""
    ptx = compile_cuda(MMA_SOURCE, "sm_80", kind="ptx").image.decode(errors="replace")
    for wanted in (
        "mma.sync",
        "ldmatrix.sync",
        "cp.async.cg",
        "ld.shared.v4",
        "st.global.v4",
        "st.shared.u32|st.shared.b32",
    ):
        assert re.search(wanted, ptx), wanted
    assert not re.search(r"\b(ld|st)\.(local|v4|u32|u16|f32|b32|b16)\b", ptx)
    ptx = compile_cuda(WGMMA_SOURCE, "sm_90a", kind="ptx").image.decode(errors="replace")
    for wanted in ("wgmma.mma_async", "cp.async.bulk.tensor.2d", "mbarrier.try_wait", "setmaxnreg.inc"):
        assert wanted in ptx
