"""Machine code: kernels have the instructions that make them fast, and none that spills registers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.gpu import sass
from polydyn.gpu.compiler import find_nvcc

KINDS = {k.name: k for k in sass.kinds()}
needs_tools = pytest.mark.skipif(
    find_nvcc() is None or sass.find_nvdisasm() is None, reason="nvcc or nvdisasm is not installed"
)


@needs_tools
@pytest.mark.parametrize(
    "name",
    ["product f16", "product f16, clusters", "product tf32", "product tf32, wgmma", "product s8, wgmma",
     "attention f16", "attention f16, 128 rows", "attention f16, wgmma", "element-wise"],
)  # fmt: skip
def test_kernels_have_their_instructions(name: str) -> None:
    got = sass.check(KINDS[name])
    assert got["missing"] == [] and got["spilled"] == 0


@needs_tools
def test_what_is_lacking_is_named() -> None:
    got = sass.check(replace(KINDS["product f16"], patterns=("HMMA", "HGMMA")))
    assert got["missing"] == ["HGMMA"] and got["counts"]["HMMA"] > 0


@needs_tools
def test_a_loop_that_is_too_long_is_named() -> None:
    got = sass.check(replace(KINDS["product f16"], loop=100))
    assert got["missing"] == ["a loop of at most 100"] and got["loop"] > 100 and got["multiplications"] == 64


def test_instructions_and_loops_are_read_from_listings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listing = """.L_x_1:
        /*0000*/                   LDC R1, c[0x0][0x37c] ;
.L_x_2:
        /*0010*/              @!P0 LDGSTS.E.BYPASS.LTC128B.128 [R2], desc[UR4][R4.64] ;
        /*1020*/              @UP1 UTMALDG.2D [UR8], [UR4] ;
        /*1030*/                   HMMA.16816.F32 R4, R8, R12, R4 ;
        /*1040*/              @!P0 BRA `(.L_x_3) ;
        /*1050*/               @P0 BRA `(.L_x_2) ;
.L_x_3:
        /*1060*/               @P1 BRA `(.L_x_1) ;
"""
    tool = tmp_path / "nvdisasm"
    tool.write_text(f"#!/bin/sh\ncat <<'END'\n{listing}END\n")
    tool.chmod(0o755)
    monkeypatch.setattr(sass, "find_nvdisasm", lambda: str(tool))
    code = sass.disassembled(tmp_path)
    assert code.instructions[:4] == ("LDC", "LDGSTS.E.BYPASS.LTC128B.128", "UTMALDG.2D", "HMMA.16816.F32")
    assert code.loops == ((1, 6), (0, 7)) and len(code.inner()) == 5 and sass.multiplications(code.inner()) == (1, 0)
    assert code.skips == ((4, 6),) and code.path() == 5, "behind the loop"


def test_out_of_line_code_and_what_is_stepped_over() -> None:
    wait, power = "WARPGROUP.DEPBAR.LE", "MUFU.EX2"
    code = ("HGMMA.64", wait, "BRA", power, "FMUL", power, wait, "BRA", "EXIT", "HGMMA.64", "BRA")
    found = sass.Code(code, ((0, 8), (1, 11)), ((2, 5),))
    assert len(found.inner()) == 8 and found.path() == 6 and sass.overlapped_powers(found.inner()) == 2
    drained = sass.Code(("LDGSTS", "HMMA", "LDSM", "BRA", "HMMA", "BRA"), ((0, 4), (4, 6)))
    assert len(drained.inner()) == 4, "the last steps copy nothing"
