"""The machine's own limits, measured: fp32 FMA peak and read bandwidth, by small C programs compiled on the fly."""

from __future__ import annotations

import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

FLAGS = ["-O2", "-march=native", "-pthread", "-ffp-contract=fast"]


@dataclass(frozen=True)
class Limits:
    """``flops``: fp32 operations per second, ``bandwidth``: bytes read per second, both over ``threads`` threads."""

    threads: int
    flops: float
    bandwidth: float

    def seconds(self, flops: float, size: float) -> float:
        """The least time for that many operations and bytes, each byte moved once."""
        return max(flops / self.flops, size / self.bandwidth)


def measure(threads: int) -> Limits:
    """Compiles and runs both programs (about five seconds). CalledProcessError when the compiler refuses."""
    return Limits(threads, _run("fma_peak", threads) * 1e9, _run("read_bandwidth", threads) * 1e9)


def _run(name: str, threads: int) -> float:
    source = Path(__file__).parent / f"{name}.c"
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / name
        subprocess.run([os.environ.get("CC", "cc"), *FLAGS, str(source), "-o", str(program)], check=True)
        out = subprocess.run([str(program), str(threads)], check=True, capture_output=True, text=True)
    return float(out.stdout)
