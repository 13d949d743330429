"""Hardware descriptions: complete, consistent with themselves, and extensible by a file."""

from __future__ import annotations

import json

import pytest

from polydyn.errors import PolydynError, UnsupportedError
from polydyn.gpu import hardware
from polydyn.gpu.compiler import ARCHITECTURES


@pytest.mark.parametrize("name", hardware.names())
def test_description_agrees_with_itself(name: str) -> None:
    h = hardware.load(name)
    tensor_ops_per_clock = {"sm_80": 2048, "sm_86": 512, "sm_89": 512, "sm_90a": 4096}[h.arch]  # f16, f32 accumulate
    assert h.arch in ARCHITECTURES
    assert h.peak_tflops["f16"] == pytest.approx(
        h.multiprocessors * tensor_ops_per_clock * h.tensor_clock_ghz / 1000, rel=0.01
    )
    cores = 64 if h.arch == "sm_80" else 128
    assert h.peak_tflops["f32"] == pytest.approx(h.multiprocessors * cores * 2 * h.clock_ghz / 1000, rel=0.01)
    assert h.smem_per_block + h.smem_reserved_per_block == h.smem_per_sm
    assert ("wgmma" in h.instructions) == (h.arch == "sm_90a")
    assert h.sources


def test_the_five_are_there() -> None:
    assert hardware.names() == ("a100", "h100", "h200", "rtx3090", "rtx4090")


def test_resident_blocks() -> None:
    a100, h200, rtx3090 = (hardware.load(n) for n in ("a100", "h200", "rtx3090"))
    assert a100.resident_blocks(256, 128, 65536) == 2  # registers and shared memory both give 2
    assert a100.resident_blocks(256, 129, 65536) == 1  # 129 registers are allocated as 136
    assert rtx3090.resident_blocks(256, 128, 65536) == 1  # 100 KB hold one 64 KB block
    assert h200.resident_blocks(384, 168, 200_000) == 1
    assert a100.resident_blocks(32, 32, 0) == 32  # the limit on blocks
    assert rtx3090.resident_blocks(1024, 32, 0) == 1  # 1536 threads hold one block of 1024
    assert a100.resident_blocks(128, 64, 170_000) == a100.resident_blocks(2048, 16, 0) == 0


def test_a_new_gpu_is_a_file(tmp_path) -> None:
    text = json.loads((hardware.HERE / "h100.json").read_text())
    path = tmp_path / "new.json"
    path.write_text(json.dumps({**text, "name": "New", "multiprocessors": 200}))
    assert hardware.load(path).multiprocessors == 200
    for change, message in (({"l2_bytes": 0}, "l2_bytes"), ({"colour": 1}, "colour"), ({"costs": {"blue": 1}}, "blue")):
        path.write_text(json.dumps({**text, **change}))
        with pytest.raises(PolydynError, match=message):
            hardware.load(path)
    with pytest.raises(UnsupportedError, match="rtx1000"):
        hardware.load("rtx1000")


def test_match_by_the_drivers_name() -> None:
    found = hardware.match("NVIDIA H200")
    assert found is not None and found.memory_gb_per_s == 4800
    assert hardware.match("NVIDIA T4") is None
