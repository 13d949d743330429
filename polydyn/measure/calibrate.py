"""Calibration, once per machine: measure the CPU parameters of the cost models, and store them.

The description is stored in the cache folder under the processor's name, features and number of threads. Records
contain it. Since ``machine`` reads the stored description, records stay valid.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from pathlib import Path

from polydyn.build.cache import FileCache, digest
from polydyn.build.compiler import build_library
from polydyn.build.features import data_cache, machine_features
from polydyn.codegen.cpu.target import FMAS_PER_CYCLE, CpuTarget
from polydyn.errors import BuildError
from polydyn.measure.cpu_timing import TIMER
from polydyn.measure.workers import Workers
from polydyn.runtime.c import sources
from polydyn.search.hardware import Hardware, cpu, with_system_cache

FMA_STEPS, CACHED_BYTES, MEMORY_BYTES, TIMES = 1 << 16, 256 << 10, 128 << 20, 8
FORMAT = "3"
L1_WAYS = 8
"""Associativity of a core's L1 data cache if the system does not report it."""


def machine(target: CpuTarget, build: str, threads: int) -> Hardware:
    """Return the description of this machine for a thread count; the first call measures it. Raises BuildError if
    the calibration fails."""
    cache = FileCache("machines")
    key = digest(FORMAT, processor(), target.name, str(threads), *sorted(machine_features()))
    stored = cache.get(key)
    if stored is not None:
        return Hardware.from_json(json.loads(stored))
    hardware = calibrate(target, build, threads)
    cache.put(key, json.dumps(hardware.to_json()).encode())
    return hardware


def processor() -> str:
    """Return the processor's name as the system reports it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def calibrate(target: CpuTarget, build: str, threads: int) -> Hardware:
    """Measure multiply-adds, cache reads of one thread and memory reads of all; read cache sizes from the system."""
    runtime = sources()
    here = Path(__file__).parent / "runtime"
    limits = f"#define PD_W {target.width}\n{(here / 'limits.c').read_text()}"
    table = (
        '#include "internal.h"\npd_kernel pdl_fma, pdl_read;\npd_kernel *const pdt_kernels[] = {pdl_fma, pdl_read};\n'
    )
    units = {"limits.c": limits, "table.c": table, "timing.c": (here / "timing.c").read_text()}
    headers = {n: runtime[n] for n in ("internal.h", "polydyn.h")}
    library = build_library(units | {"pool.c": runtime["pool.c"]}, headers, build)
    path = str(library.file())

    def seconds(workers: Workers, which: int, buffers: Sequence[int], symbols: Sequence[int], tasks: int) -> float:
        arguments = {"library": path, "which": which, "buffers": list(buffers), "symbols": list(symbols)}
        answers = workers.map([arguments | {"tasks": tasks, "threads": tasks, "scratch": 0}] * TIMES)
        failure = next((a.failure for a in answers if a.failure), "")
        if failure:
            raise BuildError(f"this machine cannot be calibrated: {failure}", remedy="try again when it is idle")
        return min(float(a.value) for a in answers)

    with Workers(TIMER, timeout=60.0) as workers:
        fma = 24 * target.width * FMA_STEPS / seconds(workers, 0, [4096], [FMA_STEPS], 1)
        cached = 64 * CACHED_BYTES / seconds(workers, 1, [CACHED_BYTES, 4096], [CACHED_BYTES // 4, 64], 1)
        share = MEMORY_BYTES // 4 // threads
        memory = 4 * share * threads / seconds(workers, 1, [MEMORY_BYTES, 4096], [share, 1], threads)
    core, (_, ways) = with_system_cache(target.core), data_cache(1) or (0, L1_WAYS)
    return cpu(
        threads,
        l2=core.l2,
        ways=ways,
        lanes=target.width,
        registers=core.registers,
        hertz=fma / (2 * FMAS_PER_CYCLE * target.width),
        l2_bandwidth=cached,
        memory_bandwidth=memory,
        name=processor(),
    )
