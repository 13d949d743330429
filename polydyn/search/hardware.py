"""Hardware descriptions: machines as search spaces and analytical cost models need them.

Units: bytes, bytes per second, operations per second. ``units`` are SMs of a GPU or worker threads of a CPU. The
*local* memory holds a block tile: shared memory, or the L2 share of a core.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from polydyn.build.features import data_cache
from polydyn.codegen.cpu.target import FMAS_PER_CYCLE, Core
from polydyn.errors import UnsupportedError
from polydyn.search.backbone import digest_of

MAX_L2_BYTES = 2 << 20
"""Maximum L2 size in bytes that is accepted: virtual machines report more, and cores may share it."""
READ_STEP = 16
"""A measured bandwidth is rounded to this many bytes per cycle, so that repeated measurements agree."""


@dataclass(frozen=True)
class Instruction:
    """A compute instruction: ``tile`` (m, n, k) elements per issue, ``rate`` operations per second and unit.

    ``kind``: ``tensor`` (matrix), ``vector`` or ``scalar``; TSCompiler 5.1 prefers them in that order.
    """

    name: str
    kind: str
    dtype: str
    tile: tuple[int, int, int]
    rate: float


@dataclass(frozen=True)
class Hardware:
    """A machine. Limits that do not apply are 0 (a CPU has no warps and no block limit).

    ``registers``: 32-bit registers per unit of a GPU, vector registers per core of a CPU; ``thread_registers``: the
    limit per thread. ``lanes``: threads of a warp, or float32 lanes of a vector. ``ways``: L1 associativity.
    """

    name: str
    kind: str
    units: int
    local_bytes: int
    block_bytes: int
    local_bandwidth: float
    memory_bandwidth: float
    registers: int
    thread_registers: int
    lanes: int
    instructions: tuple[Instruction, ...]
    unit_threads: int = 0
    block_threads: int = 0
    unit_blocks: int = 0
    ways: int = 0

    @property
    def digest(self) -> str:
        """Content hash. Measurements are valid only for an equal description."""
        return digest_of(self.to_json())

    def to_json(self) -> dict[str, Any]:
        """Return the description as plain data."""
        return asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Hardware:
        """Return the description that ``to_json`` wrote. TypeError or KeyError: wrong data."""
        ins = tuple(Instruction(**{**i, "tile": tuple(i["tile"])}) for i in data["instructions"])
        return Hardware(**{**data, "instructions": ins})

    def peak(self, dtype: str) -> float:
        """Return the operations per second of the whole machine with its best instruction for a dtype."""
        return self.units * max(i.rate for i in self.usable(dtype))

    def usable(self, dtype: str) -> tuple[Instruction, ...]:
        """Return the instructions for a dtype, in TSCompiler's order of preference. UnsupportedError: none."""
        fitting = [i for i in self.instructions if i.dtype == dtype]
        if not fitting:
            raise UnsupportedError(
                f"{self.name} has no compute instruction for {dtype}",
                rule="Hardware.instructions",
                remedy="add the instruction to the hardware description, or cast the model",
            )
        order = {"tensor": 0, "vector": 1, "scalar": 2}
        return tuple(sorted(fitting, key=lambda i: (order[i.kind], -i.rate, i.name)))


def cpu(
    threads: int = 1,
    *,
    lanes: int = 16,
    registers: int = 32,
    hertz: float = 3.6e9,
    l2: int = 1 << 20,
    l2_bandwidth: float = 118e9,
    memory_bandwidth: float = 28e9,
    ways: int = 8,
    name: str = "cpu",
) -> Hardware:
    """Describe a CPU with two FMA pipes of ``lanes`` float32 lanes per core (AVX-512: 16 lanes, 32 registers; AVX2: 8,
    16).

    A step of an integer product has the same rate as one of floats: vectors and pipes are the same.
    """
    rate = hertz * 2 * FMAS_PER_CYCLE * lanes
    wide = {"float32": lanes, "int32": lanes, "float64": lanes // 2}
    return Hardware(
        f"{name}:{threads}x{lanes}",
        "cpu",
        threads,
        l2,
        l2,
        l2_bandwidth,
        memory_bandwidth,
        registers,
        registers,
        lanes,
        tuple(
            Instruction(f"fma_{kind}", kind, dtype, (1, n, 1), rate * n / lanes)
            for dtype, width in wide.items()
            for kind, n in (("vector", width), ("scalar", 1))
        ),
        ways=ways,
    )


def with_system_cache(core: Core) -> Core:
    """Return a core with the L2 size that this machine's system reports; unchanged if it reports none."""
    l2, _ = data_cache(2) or (core.l2, 0)
    return replace(core, l2=min(l2, MAX_L2_BYTES))


def calibrated(core: Core, machine: Hardware) -> Core:
    """Return a core with the L2 size and read bandwidth of a calibrated machine."""
    hertz = machine.peak("float32") / machine.units / (2 * machine.lanes * FMAS_PER_CYCLE)
    read = round(machine.local_bandwidth / hertz / READ_STEP) * READ_STEP
    return replace(core, l2=machine.local_bytes, read=max(READ_STEP, read))
