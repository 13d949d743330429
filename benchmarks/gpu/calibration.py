"""Measures the cost model's assumptions about a device: launches, latencies, bandwidths, barriers, rates, overlaps.

Each result has ``measured`` in the unit of its constant (``constant``, a field of the device's description or of its
``Costs``); ``after`` compares both and writes costs into a description.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from benchmarks.gpu.conformance import Machine
from benchmarks.gpu.processes import Job
from benchmarks.gpu.stage import L2_BYTES, Result, Stage
from polydyn.runtime.cuda.array import DeviceArray
from polydyn.runtime.cuda.driver import Argument
from polydyn.runtime.cuda.program import MULTIPROCESSORS, SHARED_OPT_IN

CLOCK_KHZ = 13
"""CUdevice_attribute: the boost clock."""
LIMITS = {
    "multiprocessors": MULTIPROCESSORS, "l2_bytes": L2_BYTES, "smem_per_sm": 81, "smem_per_block": SHARED_OPT_IN,
    "smem_reserved_per_block": 111, "registers_per_sm": 82, "threads_per_sm": 39, "blocks_per_sm": 106,
}  # fmt: skip
"""Maps a number of the hardware description to its CUdevice_attribute."""
RATE_STEPS = 2000
MEASURABLE_COSTS = ("launch_ns", "latency_ns", "barrier_clocks", "meeting_clocks", "l2_bytes", "shared_bytes", "issued",
            "mma_share", "hidden", "hidden_memory")  # fmt: skip
"""Fields of ``Costs`` that calibration measures; all others are only fitted (``after --fit``)."""
ARITHMETIC, COPIES = 1, 2
"""Bits that select the work of the kernel ``beside``."""


class Kernels:
    """The kernels of ``calibration*.cu`` on the stage's device."""

    def __init__(self, stage: Stage) -> None:
        self.stage, driver = stage, stage.session.driver
        self.machine = Machine(driver, stage.emulate, stage.folder)
        self.multiprocessors = driver.attribute(MULTIPROCESSORS)
        self.ghz = (driver.attribute(CLOCK_KHZ) or 1_000_000) / 1e6

    def seconds(self, name: str, grid: int, threads: int, smem: int, args: Sequence[Any], many: bool = False) -> float:
        """Return the seconds of a launch; ``many``: short launches, many of them in one graph."""
        kept = [DeviceArray.of(self.stage.session, a) if isinstance(a, np.ndarray) else a for a in args]
        values: list[Argument] = [a.pointer if isinstance(a, DeviceArray) else np.int32(a) for a in kept]
        source = "calibration_hopper.cu" if name.startswith(("wgmma", "meetings")) else "calibration.cu"
        with self.stage.session.use() as driver:
            function = self.machine.kernel(source, name, smem)

            def launch(stream: int) -> None:
                driver.launch(function, (grid, 1, 1), threads, smem, values, stream)

            launch(0)
            driver.synchronize()
        return self.stage.replayed([launch] * (200 if many and not self.stage.emulate else 1)).median


def calibration(stage: Stage) -> Iterator[Job]:
    """Yield the driver's limits, then all measurements."""
    k = Kernels(stage)
    for name, code in LIMITS.items():
        yield f"driver's {name}", partial(limit, k, name, code)
    yield "time between kernels", partial(between, k)
    for where, nbytes in (("L2", 4 << 20), ("memory", 1 << 30)):
        yield f"latency of {where}", partial(latency, k, where, nbytes)
    for where, nbytes in (("L2", 16 << 20), ("memory", 1 << 30)):
        yield f"bandwidth of {where}", partial(bandwidth, k, where, nbytes)
    yield "a barrier", partial(barrier, k, "barriers", 1, 256, "barrier_clocks")
    yield "bandwidth of shared memory", partial(shared, k)
    yield "instructions of a clock", partial(issue, k)
    for where, nbytes in (("L2", 16 << 20), ("memory", 1 << 30)):
        yield f"arithmetic beside {where}", partial(hidden, k, where, nbytes)
    yield "rate of mma.sync", partial(rate, k, "mma_rate", 8 * 8 * 16 * 8 * 16 * 2, 0)
    if stage.session.driver.arch == 90:
        yield "a meeting of a cluster", partial(barrier, k, "meetings", 2, 128, "meeting_clocks")
        for n, along in ((64, "k"), (128, "k"), (192, "k"), (256, "k"), (64, "n"), (256, "n")):
            name = f"wgmma_{n}_{along}"
            yield f"rate of {name}", partial(rate, k, name, 2 * 4 * 64 * n * 16 * 2, 128 * 128 + n * 128)


def limit(k: Kernels, name: str, code: int) -> Result:
    """Return a number of the hardware description that the driver reports."""
    return {"measured": k.stage.session.driver.attribute(code), "constant": name}


def between(k: Kernels) -> Result:
    """Measure the time from the end of a kernel to the first instruction of the next, in a graph."""
    ns = k.seconds("nothing", 1, 32, 0, [np.zeros(1, np.uint32)], True) * 1e9
    return {"measured": ns, "unit": "ns", "constant": "launch_ns"}


def latency(k: Kernels, where: str, nbytes: int) -> Result:
    """Measure the latency by following a random cycle."""
    count, steps = (nbytes if not k.stage.emulate else 4096) // 128, 2000 if not k.stage.emulate else 10
    order = np.random.default_rng(0).permutation(count)
    table = np.zeros(count * 32, np.uint32)  # one index in 128 bytes
    table[order * 32] = np.roll(order, -1) * 32
    given = [table, steps, np.zeros(1, np.uint32)]
    ns = (k.seconds("chase", 1, 32, 0, given) - k.seconds("nothing", 1, 32, 0, given[2:])) * 1e9 / steps
    return {"measured": ns, "unit": "ns", "constant": "latency_ns", "of": where}


def bandwidth(k: Kernels, where: str, nbytes: int) -> Result:
    """Measure reads of all multiprocessors; data that fits in L2 is read repeatedly."""
    size = nbytes if not k.stage.emulate else 1 << 14
    rounds = 40 if where == "L2" and not k.stage.emulate else 1
    given = [np.zeros(size, np.uint8), size // 16, rounds, np.zeros(1, np.uint32)]
    rate_ = size * rounds / k.seconds("read", 2 * k.multiprocessors, 512, 0, given) / 1e9
    if where == "memory":
        return {"measured": rate_, "unit": "GB/s", "constant": "memory_gb_per_s"}
    clock = rate_ / k.multiprocessors / k.ghz
    return {"measured": clock, "unit": "bytes a clock and multiprocessor", "constant": "l2_bytes", "gb_per_s": rate_}


def barrier(k: Kernels, name: str, blocks: int, threads: int, constant: str) -> Result:
    """Measure the clocks of a barrier of a block, or of a cluster."""
    steps = 10_000 if not k.stage.emulate else 4
    seconds = k.seconds(name, blocks, threads, 0, [steps, np.zeros(1, np.float32)])
    return {"measured": seconds / steps * k.ghz * 1e9, "unit": "clocks", "constant": constant}


def of_a_clock(k: Kernels, name: str, amount: int, smem: int) -> float:
    """Return the work of a multiprocessor per clock; ``amount``: work of a 512-thread block in a step."""
    steps = RATE_STEPS if not k.stage.emulate else 1
    blocks = k.multiprocessors if not k.stage.emulate else 1
    seconds = k.seconds(name, blocks, 512, smem, [steps, np.zeros(blocks * 512, np.float32)])
    return amount * steps * blocks / k.multiprocessors / seconds / k.ghz / 1e9


def shared(k: Kernels) -> Result:
    """Measure bytes from shared memory, with 16 bytes per thread."""
    measured = of_a_clock(k, "shared_read", 8 * 512 * 16, 512 * 16)
    return {"measured": measured, "unit": "bytes a clock and multiprocessor", "constant": "shared_bytes"}


def issue(k: Kernels) -> Result:
    """Measure the issue rate of warp instructions: independent multiply-adds."""
    measured = of_a_clock(k, "multiply_adds", 64 * 512 // 32, 0)
    return {"measured": measured, "unit": "instructions a clock and multiprocessor", "constant": "issued"}


def hidden(k: Kernels, where: str, nbytes: int) -> Result:
    """Measure the share of the shorter of products and loads that overlaps with the longer; each thread alternates
    both.
    """
    size, steps = (nbytes, 4000) if not k.stage.emulate else (1 << 14, 1)
    blocks = 2 * k.multiprocessors if not k.stage.emulate else 1
    data, out = np.zeros(size, np.uint8), np.zeros(blocks * 256, np.float32)
    alone, copies, both = (
        k.seconds("beside", blocks, 256, 0, [data, size // 16, steps, what, out])
        for what in (ARITHMETIC, COPIES, ARITHMETIC | COPIES)
    )
    found = min(1.0, max(0.0, (alone + copies - both) / min(alone, copies)))
    return {"measured": found, "constant": "hidden" if where == "L2" else "hidden_memory", "of": where}


def rate(k: Kernels, name: str, operations: int, smem: int) -> Result:
    """Measure TFLOP/s of the device; ``operations``: operations of a block in a step."""
    blocks = k.multiprocessors * (1 if smem > 100_000 else 2)
    steps = RATE_STEPS if not k.stage.emulate else 1
    halves = np.random.default_rng(0).standard_normal(512).astype(np.float16).view(np.uint32)
    given = [steps, halves, np.zeros(blocks * 256, np.float32)]
    if k.stage.emulate:
        blocks = 1
    found = operations * steps * blocks / k.seconds(name, blocks, 256, smem, given) / 1e12
    constant = "mma_share" if name == "mma_rate" else "peak_tflops"
    return {"measured": found, "unit": "TFLOP/s", "constant": constant, "of": name}
