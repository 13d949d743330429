"""Prints this machine's limits: python -m benchmarks.limits."""

import os

from benchmarks.limits import measure

for count in sorted({1, os.cpu_count() or 1}):
    found = measure(count)
    print(f"{count} threads: {found.flops / 1e9:.0f} GFLOP/s fp32, {found.bandwidth / 1e9:.1f} GB/s read")
