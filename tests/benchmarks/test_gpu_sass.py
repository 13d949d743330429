"""Machine code: the instructions that make kernels fast are there, and none that spills registers."""

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
    ["product f16", "product f16, wgmma", "product tf32", "product tf32, wgmma", "product s8, wgmma", "attention f16",
     "element-wise"],
)  # fmt: skip
def test_kernels_have_their_instructions(name: str) -> None:
    got = sass.check(KINDS[name])
    assert got["missing"] == [] and got["spilled"] == 0


@needs_tools
def test_what_is_lacking_is_named() -> None:
    got = sass.check(replace(KINDS["product f16"], wanted=("HMMA", "HGMMA")))
    assert got["missing"] == ["HGMMA"] and got["counts"]["HMMA"] > 0


def test_instructions_are_read_from_listings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listing = """.L_x_1:
        /*0000*/                   LDC R1, c[0x0][0x37c] ;
        /*0010*/              @!P0 LDGSTS.E.BYPASS.LTC128B.128 [R2], desc[UR4][R4.64] ;
        /*1020*/              @UP1 UTMALDG.2D [UR8], [UR4] ;
        /*1030*/                   HMMA.16816.F32 R4, R8, R12, R4 ;
"""
    tool = tmp_path / "nvdisasm"
    tool.write_text(f"#!/bin/sh\ncat <<'END'\n{listing}END\n")
    tool.chmod(0o755)
    monkeypatch.setattr(sass, "find_nvdisasm", lambda: str(tool))
    assert sass.instructions(tmp_path) == ["LDC", "LDGSTS.E.BYPASS.LTC128B.128", "UTMALDG.2D", "HMMA.16816.F32"]
