"""The versions of a program with one launch, each launched by itself: the candidates of the selector."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.gpu.stage import Output, Stage
from polydyn.gpu import hardware
from polydyn.gpu.errors import DeviceError, DeviceLostError
from polydyn.program.evaluation import THREADS
from polydyn.runtime.cuda.array import DeviceArray
from polydyn.runtime.cuda.images import ImageSource
from polydyn.runtime.cuda.program import MULTIPROCESSORS, SHARED_OPT_IN, CudaProgram
from polydyn.runtime.cuda.tensormap import PixelBox, TensorMap, element_type
from polydyn.runtime.cuda.timing import Times, Work
from polydyn.runtime.explain import Device, refusal, resolve_dims
from polydyn.runtime.expressions import decision_from_json
from polydyn.runtime.plain_expressions import evaluate
from polydyn.schedules.decision import cost

EMULATED_VERSIONS = 4
"""Maximum number of versions of a kernel on the emulation, which compiles each one when it is launched."""
Step = tuple[Any, ...]
"""The arguments of ``Driver.launch``."""


@dataclass(frozen=True)
class Timed:
    """A version's times, its estimated time (microseconds), and its error against the correct output.

    ``resident``, ``supposed``: resident blocks per SM, reported by the driver and assumed by the model.
    """

    times: Times
    estimate: float
    error: float
    resident: int
    supposed: int


class Versions:
    """The versions of a program's only launch that may run at a shape, the selected one first."""

    def __init__(self, stage: Stage, program: CudaProgram, shape: Mapping[str, int]) -> None:
        """ValueError: the program has several launches."""
        self.stage, self.session, self.program = stage, stage.session, program
        manifest = program.manifest
        if len(manifest["launches"]) != 1 or len(manifest["outputs"]) != 1:
            raise ValueError(f"the program has {len(manifest['launches'])} launches")
        (launch,), (output,) = manifest["launches"], manifest["outputs"]
        self.output: str = output["name"]
        driver = self.session.driver
        limit, count = driver.attribute(SHARED_OPT_IN), driver.attribute(MULTIPROCESSORS)
        self.env = resolve_dims(manifest, shape) | {THREADS: count}
        kernels = [(k["name"], k["arch"]) for k in manifest["kernels"]]
        self.source = ImageSource(driver, kernels, program._artifact.images, program.sources)
        self.registers = {k["name"]: k.get("resources", {}) for k in manifest["kernels"]}
        device = Device(limit, self.source.special)
        decision = decision_from_json(manifest["decisions"][launch["decision"]])
        times = {v["name"]: cost(decision, k, self.env) for k, v in enumerate(launch["candidates"])}
        fitting = [v for v in launch["candidates"] if not refusal(v, self.env, device)]
        self.list = sorted(fitting, key=lambda v: times[v["name"]])  # equal ones stay in order
        self.estimates = {v["name"]: times[v["name"]] / 1000 for v in self.list}
        self._functions: dict[str, int] = {}

    def memory(self, feeds: Mapping[str, DeviceArray], output: DeviceArray) -> dict[str, DeviceArray]:
        """Return arrays by the names of buffers; constants are copied to the device again."""
        artifact, found = self.program._artifact, {**feeds, self.output: output}
        for name, c in artifact.manifest.get("constants", {}).items():
            raw = artifact.weights[c["offset"] : c["offset"] + c["bytes"]]
            found[name] = DeviceArray.of(self.session, np.array(raw), "uint8")
        return found

    def steps(self, version: Mapping[str, Any], memory: Mapping[str, DeviceArray]) -> list[Step]:
        """Return the launches of a version on arrays; its workspace stays with them."""
        space = DeviceArray(self.session, (max(evaluate(version["block"]["workspace"], self.env), 1),), "uint8", 1)
        found = [s for x in (version, *version["block"]["after"]) for s in self._prepared(x, memory, space)]
        return [(*s, space) for s in found]

    def _prepared(
        self, x: Mapping[str, Any], memory: Mapping[str, DeviceArray], space: DeviceArray
    ) -> Iterator[tuple[Any, ...]]:
        """Yield the launches of a version, or None for a kernel without blocks."""
        env, session = self.env, self.session
        blocks = evaluate(x["tasks"], env)
        if blocks <= 0:
            return
        function = self.function(x["kernel"])
        pointers = [(memory[b] if b else space).pointer for b in x["buffers"]]
        maps = [self._encoded(m, memory[m["buffer"]]) for m in x["block"]["maps"]]
        symbols = [np.int64(evaluate(s, env)) for s in x["symbols"]]
        with session.use():
            threads, smem = x["block"]["threads"], evaluate(x["scratch"], env)
            yield function, (blocks, 1, 1), threads, smem, [*maps, *pointers, *symbols]

    def function(self, kernel: str) -> int:
        """Return a kernel that may use all shared memory."""
        if kernel not in self._functions:
            number = [n for n, _ in self.source.kernels].index(kernel)
            with self.session.use() as driver:
                function = driver.get_function(driver.load_module(self.source.image(number)), kernel)
                driver.set_smem(function, driver.attribute(SHARED_OPT_IN))
                self._functions[kernel] = function
        return self._functions[kernel]

    def _encoded(self, m: Mapping[str, Any], a: DeviceArray) -> bytes:
        """Return the bytes of a tensor map over an array."""
        _, item = element_type(m["dtype"])
        dims, strides = (tuple(evaluate(i, self.env) for i in m[x]) for x in ("dims", "strides"))
        pixels = None
        if of := m.get("pixels"):
            lower, upper = (tuple(evaluate(i, self.env) for i in of[x]) for x in ("lower", "upper"))
            pixels = PixelBox(lower, upper, tuple(of["steps"]))
        described = TensorMap(m["dtype"], dims, tuple(s * item for s in strides), tuple(m["box"]), pixels=pixels)
        return self.session.driver.encode_tensor_map(described, a.pointer + evaluate(m["offset"], self.env) * item)

    def work(self, steps: Sequence[Step]) -> Work:
        """Return a function that launches the steps."""
        driver = self.session.driver

        def launch(stream: int) -> None:
            for function, grid, threads, smem, args, _ in steps:
                driver.launch(function, grid, threads, smem, args, stream)

        return launch

    def occupancy(self, version: Mapping[str, Any]) -> tuple[int, int]:
        """Return blocks per SM, by the driver and by the description of the device; 0 means unknown."""
        smem, driver = evaluate(version["scratch"], self.env), self.session.driver
        try:
            resident = driver.occupancy(self.function(version["kernel"]), version["block"]["threads"], smem)
        except DeviceLostError:
            raise
        except DeviceError:
            resident = 0
        known = hardware.match(driver.device_name)
        registers = self.registers[version["kernel"]].get(known.arch if known else "", {}).get("registers")
        supposed = known.resident_blocks(version["block"]["threads"], registers, smem) if known and registers else 0
        return resident, supposed


def exhaustive(versions: Versions, feeds: Mapping[str, DeviceArray], output: Output) -> dict[str, Timed]:
    """Map each version to its measurement, the selected one first. ``output`` holds the correct values.

    DeviceLostError names the version.
    """
    stage = versions.stage
    found: dict[str, Timed] = {}
    memory = versions.memory(feeds, output.array)
    for v in versions.list[: EMULATED_VERSIONS if stage.emulate else None]:
        output.poison()
        try:
            work = versions.work(versions.steps(v, memory))
            with stage.session.use() as driver:
                work(0)
                driver.synchronize()
            wrong = output.error()
            times = stage.replayed([work], rounds=3, warm=5e-3)
        except DeviceLostError as e:
            raise DeviceLostError(f"{v['name']}: {e}", code=e.code) from e
        found[v["name"]] = Timed(times, versions.estimates[v["name"]], wrong, *versions.occupancy(v))
    return found
