"""Prints this machine's limits: python -m benchmarks.limits."""

import os

from benchmarks.limits import measure

for count in sorted({1, os.cpu_count() or 1}):
    limits = measure(count, caches=True)
    print(f"{count} threads: {limits.flops / 1e9:.0f} GFLOP/s fp32, {limits.bandwidth / 1e9:.1f} GB/s read")
    for size, rate in limits.cached:
        print(f"   {size / 2**20:g} MiB again and again: {rate / 1e9:.0f} GB/s")
