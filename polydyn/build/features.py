"""Processor features: those that compiled code may use, and those of this machine. Standard library only."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from pathlib import Path

MACROS = {
    "__SSE3__": "pni", "__SSSE3__": "ssse3", "__SSE4_1__": "sse4_1", "__SSE4_2__": "sse4_2", "__POPCNT__": "popcnt",
    "__AVX__": "avx", "__AVX2__": "avx2", "__FMA__": "fma", "__F16C__": "f16c", "__BMI__": "bmi1", "__BMI2__": "bmi2",
    "__LZCNT__": "abm", "__MOVBE__": "movbe",
    "__AVX512F__": "avx512f", "__AVX512BW__": "avx512bw", "__AVX512CD__": "avx512cd", "__AVX512DQ__": "avx512dq",
    "__AVX512VL__": "avx512vl", "__AVX512IFMA__": "avx512ifma", "__AVX512VBMI__": "avx512vbmi",
    "__AVX512VBMI2__": "avx512_vbmi2", "__AVX512VNNI__": "avx512_vnni", "__AVX512BITALG__": "avx512_bitalg",
    "__AVX512VPOPCNTDQ__": "avx512_vpopcntdq", "__AVX512BF16__": "avx512_bf16", "__AVX512FP16__": "avx512_fp16",
    "__AVXVNNI__": "avx_vnni", "__AMX_TILE__": "amx_tile", "__AMX_BF16__": "amx_bf16", "__AMX_INT8__": "amx_int8",
    "__GFNI__": "gfni", "__VAES__": "vaes",
    "__ARM_FEATURE_SVE": "sve", "__ARM_FEATURE_SVE2": "sve2", "__ARM_FEATURE_DOTPROD": "asimddp",
    "__ARM_FEATURE_FP16_VECTOR_ARITHMETIC": "asimdhp", "__ARM_FEATURE_BF16": "bf16",
    "__ARM_FEATURE_MATMUL_INT8": "i8mm",
}  # fmt: skip
"""Compiler macro (defined if code may use the feature) -> the kernel's name for it in /proc/cpuinfo."""


def machine_features(cpuinfo: str = "/proc/cpuinfo") -> frozenset[str]:
    """Return the features of this machine's processor as Linux lists them; empty if Linux does not list them."""
    try:
        text = Path(cpuinfo).read_text(encoding="ascii", errors="replace")
    except OSError:
        return frozenset()
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def architecture() -> str:
    """Return the name of this machine's architecture: ``x86_64``, ``aarch64`` ..."""
    return platform.machine()


def data_cache(level: int, root: str = "/sys/devices/system/cpu/cpu0/cache") -> tuple[int, int] | None:
    """Return (bytes, ways) of a core's data cache at a level, as reported by the system; None if not reported."""
    for folder in sorted(Path(root).glob("index*")):
        try:
            at, kind, size, ways = ((folder / n).read_text().strip() for n in
                                    ("level", "type", "size", "ways_of_associativity"))  # fmt: skip
            if at == str(level) and kind != "Instruction" and size.endswith("K"):
                return int(size[:-1]) << 10, int(ways)
        except (OSError, ValueError):
            continue
    return None


def available_cores(groups: str = "/proc/self/cgroup", root: str = "/sys/fs/cgroup") -> int:
    """Return the number of cores that this process can use: its mask, limited by the smallest quota of its control
    groups; at least 1.

    Threads beyond a quota only spin, and are throttled together with those that work.
    """
    cores = len(os.sched_getaffinity(0))
    return max(1, min([cores, *(-(-limit // period) for limit, period in _quotas(groups, Path(root)))]))


def _quotas(groups: str, root: Path) -> Iterator[tuple[int, int]]:
    """Yield (microseconds, period) for each control group of this process and its ancestors: version 2, then 1."""
    try:
        lines = [line.split(":", 2) for line in Path(groups).read_text().splitlines()]
    except OSError:
        lines = []
    for _, controllers, path in (line for line in lines if len(line) == 3):
        if controllers and "cpu" not in controllers.split(","):
            continue
        inside = Path(path.strip("/"))
        for folder in (inside, *inside.parents):
            yield from _quota(root / ("cpu" if controllers else "") / folder)
    if not lines:
        yield from _quota(root)


def _quota(folder: Path) -> Iterator[tuple[int, int]]:
    """Yield the quota of a group if it has one."""
    try:
        if (both := folder / "cpu.max").exists():
            limit, period = both.read_text().split()
        else:
            limit, period = ((folder / f"cpu.cfs_{x}_us").read_text().strip() for x in ("quota", "period"))
        if limit not in ("max", "-1") and int(limit) > 0 and int(period) > 0:
            yield int(limit), int(period)
    except (OSError, ValueError):
        return
