"""The machine's own limits, measured: fp32 FMA peak and read bandwidth, by small C programs compiled on the fly."""

from __future__ import annotations

import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

FLAGS = ["-O2", "-march=native", "-pthread", "-ffp-contract=fast"]


KIB = 1024
CACHE_TEST_BYTES = (256 * KIB, 8192 * KIB)
"""Bytes, over all threads, at which caches are measured: well inside a second- and a third-level cache."""


@dataclass(frozen=True)
class Limits:
    """``flops``: fp32 operations per second, ``bandwidth``: bytes read per second, both over ``threads`` threads.

    ``cached``: (bytes, bandwidth) for repeated reads of data of that size, in ascending order of bytes.
    """

    threads: int
    flops: float
    bandwidth: float
    cached: tuple[tuple[int, float], ...] = ()

    def seconds(self, flops: float, size: float) -> float:
        """Return the minimum time for these operations and bytes, each byte moved once, from memory."""
        return max(flops / self.flops, size / self.bandwidth)

    def seconds_again(self, flops: float, size: float) -> float:
        """Return ``seconds`` for a repeated call: data that fits into a cache is read from there."""
        bandwidth = next((rate for most, rate in self.cached if size <= most), self.bandwidth)
        return max(flops / self.flops, size / bandwidth)

    def or_better(self, other: Limits) -> Limits:
        """Return the higher of both measurements: other load on the machine can only have lowered one."""
        pairs = zip(self.cached, other.cached, strict=True)
        cached = tuple((size, max(rate, other_rate)) for (size, rate), (_, other_rate) in pairs)
        return Limits(self.threads, max(self.flops, other.flops), max(self.bandwidth, other.bandwidth), cached)


def measure(threads: int, caches: bool = False) -> Limits:
    """Compile and run both programs (two seconds). CalledProcessError: the compiler failed."""
    flops, memory = _run("fma_peak", threads), _run("read_bandwidth", threads)
    cached = [(b, _run("read_bandwidth", threads, str(b // KIB))) for b in CACHE_TEST_BYTES] if caches else []
    return Limits(threads, flops * 1e9, memory * 1e9, tuple((b, rate * 1e9) for b, rate in cached))


def read_bandwidth(threads: int) -> float:
    """Compile and run the read loop alone. Return bytes per second."""
    return _run("read_bandwidth", threads) * 1e9


def _run(name: str, threads: int, *arguments: str) -> float:
    source = Path(__file__).parent / f"{name}.c"
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / name
        subprocess.run([os.environ.get("CC", "cc"), *FLAGS, str(source), "-o", str(program)], check=True)
        out = subprocess.run([str(program), str(threads), *arguments], check=True, capture_output=True, text=True)
    return float(out.stdout)
