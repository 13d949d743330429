"""The first script for a day with a GPU: does the hardware do what the emulation does?

    python -m benchmarks.gpu.conformance [--driver ctypes|pycuda] [--out conformance.json] [--emulate]

Needs this repository, numpy, the CUDA driver, and nvcc or NVRTC. Every primitive's kernel runs on the GPU against
numpy (data movement and integers: equal bits; arithmetic: the error of the norm), then the two hand-written GEMMs at
ugly shapes, then a few timings. Cases run in a worker process: one that hangs or breaks its context is reported, the
worker is replaced, and the rest still runs. ``--emulate`` takes the CPU libcuda instead, to test this script.
"""

from __future__ import annotations

import argparse
import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.cases import HERE, Array, Case, Mapped, all_cases, mismatch
from benchmarks.gpu.cases_hopper import all_hopper_cases
from benchmarks.gpu.gemms import SHAPES, Problem
from polydyn.gpu import hardware
from polydyn.gpu.driver import Driver, open_driver
from polydyn.gpu.errors import DeviceError, DeviceLostError

ARCH = {80: "sm_80", 86: "sm_86", 89: "sm_89", 90: "sm_90a", 100: "sm_100"}
PATIENCE = 60.0
"""Seconds without a result after which a case counts as hanging."""
GPU_SLACK = 20.0
"""Tensor cores and the CUDA library round differently: tolerated error over the emulation's."""
TIMED = ((1024, 1024, 1024), (4096, 4096, 4096), (16, 4096, 4096))
Job = tuple[str, Callable[["Machine"], dict[str, Any]]]


class Machine:
    """A driver and the modules that cases load through it."""

    def __init__(self, kind: str, emulate: bool) -> None:
        self.emulate = emulate
        library = "libcuda.so.1"
        if emulate:
            from polydyn.gpu import cpu_libcuda

            library = str(cpu_libcuda.build())
        self.driver: Driver = open_driver(kind, library=library)
        self.modules: dict[str, int] = {}

    def kernel(self, source: str, name: str, smem: int) -> int:
        """A kernel of a file beside this one, for this device, allowed its shared memory."""
        if source not in self.modules:
            self.modules[source] = self.driver.load_module(self.image((HERE / source).read_text(), source))
        function = self.driver.get_function(self.modules[source], name)
        if smem > 48 * 1024:
            self.driver.set_smem(function, smem)
        return function

    def image(self, text: str, source: str) -> bytes:
        """Compiled for this device: a cubin, or PTX of sm_80 where polydyn knows no better."""
        if self.emulate:
            from polydyn.gpu.emulator import compile_emulated

            return compile_emulated(text, arch=90 if "hopper" in source or "wgmma" in source else 80).read_bytes()
        from polydyn.gpu.compiler import compile_cuda

        known = ARCH.get(self.driver.arch)
        return compile_cuda(text, known or "sm_80", kind="cubin" if known else "ptx").image

    def run(
        self, source: str, kernel: str, grid: tuple[int, int, int], threads: int, smem: int, args: Any, repeat: int = 0
    ) -> tuple[dict[int, Array], float]:
        """Launches on copies of the arrays; (arrays by position, milliseconds per launch over ``repeat``)."""
        function = self.kernel(source, kernel, smem)
        buffers: dict[int, tuple[int, Array, Array]] = {}
        values: list[Any] = []
        try:
            for i, a in enumerate(args):
                if not isinstance(a, Mapped | np.ndarray):
                    values.append(a)
                    continue
                view = a.array if isinstance(a, Mapped) else a
                whole = np.array(view if view.base is None or not isinstance(a, Mapped) else view.base)
                pointer = self.driver.alloc(whole.nbytes)
                self.driver.h2d(pointer, whole)
                buffers[i] = (pointer, whole, whole[tuple(slice(n) for n in view.shape)])
                values.append(self.driver.encode_tensor_map(a.map, pointer) if isinstance(a, Mapped) else pointer)
            self.driver.launch(function, grid, threads, smem, values)
            self.driver.synchronize()
            for pointer, whole, _ in buffers.values():
                self.driver.d2h(whole, pointer)
            ms = (
                self._time(lambda: self.driver.launch(function, grid, threads, smem, values), repeat) if repeat else 0.0
            )
        finally:
            for pointer, _, _ in buffers.values():
                try:
                    self.driver.free(pointer)
                except DeviceError:
                    break  # lost with the context
        return {i: view for i, (_, _, view) in buffers.items()}, ms

    def _time(self, launch: Callable[[], None], repeat: int) -> float:
        start, end = self.driver.event(), self.driver.event()
        self.driver.record(start)
        for _ in range(repeat):
            launch()
        self.driver.record(end)
        return self.driver.elapsed(start, end) / repeat


# ---- what is run ---------------------------------------------------------------------------------------------------
def primitive(case: Case) -> Callable[[Machine], dict[str, Any]]:
    """One primitive against numpy."""

    def job(machine: Machine) -> dict[str, Any]:
        got, _ = machine.run(case.source, case.kernel, case.grid, case.threads, case.smem, case.args)
        error = max(mismatch(case, i, got[i]) for i in case.expect)
        allowed = case.tolerance * (1 if machine.emulate else GPU_SLACK)
        return {"error": error, "allowed": allowed, "ok": error <= allowed}

    return job


def gemm(kind: str, shape: tuple[int, int, int], repeat: int = 0) -> Callable[[Machine], dict[str, Any]]:
    """A hand-written GEMM against float64; timed over ``repeat`` launches."""

    def job(machine: Machine) -> dict[str, Any]:
        problem = Problem(*shape)
        blocks, smem, args = problem.mma() if kind == "mma" else problem.wgmma()
        threads = 256 if kind == "mma" else 384
        output = 3
        got, ms = machine.run(f"gemm_{kind}.cu", f"gemm_{kind}", (blocks, 1, 1), threads, smem, args, repeat)
        problem.c.base[...] = got[output]
        error = problem.error()
        result = {"error": error, "allowed": 1e-3, "ok": error < 1e-3}
        if repeat:
            result |= {"ms": ms, "tflops": 2e-9 * shape[0] * shape[1] * shape[2] / ms}
        return result

    return job


def jobs(arch: int, emulate: bool) -> list[Job]:
    """Everything for a device of this compute capability, in order."""
    hopper = arch == 90
    out: list[Job] = [(c.name, primitive(c)) for c in [*all_cases(), *(all_hopper_cases() if hopper else [])]]
    kinds = ("mma", "wgmma") if hopper else ("mma",)
    for kind in kinds:
        for shape in SHAPES:
            if kind == "mma" or shape[2]:
                out.append((f"gemm_{kind} {'x'.join(map(str, shape))}", gemm(kind, shape)))
    if not emulate:
        out += [(f"time gemm_{kind} {'x'.join(map(str, s))}", gemm(kind, s, 20)) for s in TIMED for kind in kinds]
    return out


# ---- worker and parent -----------------------------------------------------------------------------------------------
def worker(kind: str, emulate: bool, first: int) -> None:
    """Runs jobs from ``first`` on; a line of JSON per event. Ends when the context was lost."""
    machine = Machine(kind, emulate)
    known = hardware.match(machine.driver.device_name)
    say({"device": machine.driver.device_name, "arch": machine.driver.arch, "described": known is not None})
    for i, (name, job) in enumerate(jobs(machine.driver.arch, emulate)):
        if i < first:
            continue
        say({"begin": i, "name": name})
        try:
            say({"end": i, **job(machine)})
        except DeviceLostError as e:
            say({"end": i, "ok": False, "message": str(e)})
            return
        except Exception as e:  # a table with a hole beats no table
            say({"end": i, "ok": False, "message": f"{type(e).__name__}: {e}"})
    say({"done": True})


def say(event: dict[str, Any]) -> None:
    """One event to the parent."""
    print(json.dumps(event), flush=True)


def events(command: list[str]) -> Iterator[dict[str, Any] | None]:
    """Events of a worker; None when it is silent for too long (it is then killed)."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    try:
        while True:
            line = lines.get(timeout=PATIENCE)
            if line is None:
                return
            if line.startswith("{"):
                yield json.loads(line)
    except queue.Empty:
        yield None
    finally:
        process.kill()
        process.wait()


def collect(kind: str, emulate: bool) -> dict[str, Any]:
    """Runs workers until every job has an answer."""
    report: dict[str, Any] = {"date": time.strftime("%Y-%m-%d %H:%M:%S"), "driver": kind, "results": []}
    first, done = 0, False
    while not done:
        command = [sys.executable, "-m", "benchmarks.gpu.conformance", "--driver", kind, "--worker", str(first)]
        began: dict[str, Any] | None = None
        answered = first
        for event in events([*command, *(["--emulate"] if emulate else [])]):
            if event is None:
                break
            if "device" in event:
                report |= event
            elif "begin" in event:
                began = event
            elif "end" in event and began is not None:
                record(report, {"name": began["name"], **event})
                began, answered = None, event["end"] + 1
            done = done or "done" in event
        if began is not None:
            record(
                report,
                {"name": began["name"], "ok": False, "message": f"hangs (over {PATIENCE:.0f} s) or kills the process"},
            )
            answered = began["begin"] + 1
        if not done and answered == first:
            raise SystemExit("the worker ends before its first case: is there a driver and a compiler? see above")
        first = answered
    return report


def record(report: dict[str, Any], result: dict[str, Any]) -> None:
    """Keeps and prints one result."""
    result.pop("end", None)
    report["results"].append(result)
    if "message" in result:
        detail = str(result["message"]).splitlines()[0]
    else:
        detail = f"error {result['error']:.2e} (allowed {result['allowed']:.0e})"
    if "tflops" in result:
        detail += f", {result['ms']:.3f} ms, {result['tflops']:.1f} TFLOP/s"
    print(f"{'ok  ' if result['ok'] else 'FAIL'} {result['name']:32s} {detail}", flush=True)


def main() -> int:
    """The exit status is the number of failures, at most 1."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--driver", default="ctypes", choices=["ctypes", "pycuda"])
    parser.add_argument("--out", type=Path, default=Path("conformance.json"))
    parser.add_argument("--emulate", action="store_true", help="the CPU libcuda: tests this script without a GPU")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        worker(options.driver, options.emulate, options.worker)
        return 0
    report = collect(options.driver, options.emulate)
    failed = [r["name"] for r in report["results"] if not r["ok"]]
    print(f"{report.get('device')}: {len(report['results']) - len(failed)} of {len(report['results'])} conform")
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    return min(len(failed), 1)


if __name__ == "__main__":
    sys.exit(main())
