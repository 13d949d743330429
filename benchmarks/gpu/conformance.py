"""The first script for a day with a GPU: checks that the hardware behaves like the emulation.

    python -m benchmarks.gpu.conformance [--driver ctypes|pycuda] [--pack FOLDER] [--out conformance.json] [--emulate]

Needs this repository, numpy, the CUDA driver, and kernels compiled ahead (``--pack``) or nvcc or NVRTC. The kernel of
every primitive runs on the GPU and is compared with numpy (data movement and integers: equal bits; arithmetic: the
error of the norm). Then come the two hand-written GEMMs at ugly shapes, launches that must wait for one another, and a
few timings. Cases run in a worker process: if one hangs or breaks its context, it is reported, the worker is replaced,
and the rest still runs. Failed features are stored for the device: its kernels do not use them
(``polydyn.gpu.lacking``). ``--emulate`` uses the CPU libcuda instead, to test this script.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu import launch_order, processes
from polydyn.gpu import hardware
from polydyn.gpu.cache import content_key
from polydyn.gpu.compiler import compile_cuda, device_headers
from polydyn.gpu.errors import DeviceError
from polydyn.gpu.lacking import keep
from polydyn.runtime.cuda.driver import Driver
from polydyn.runtime.cuda.drivers import open_driver
from polydyn.runtime.cuda.session import Session
from polydyn.testing.device.cases import HERE as DEVICE
from polydyn.testing.device.cases import Array, Case, Mapped, all_cases, mismatch
from polydyn.testing.device.cases_hopper import all_hopper_cases
from polydyn.testing.device.gemms import SHAPES, Problem

ARCH = {80: "sm_80", 86: "sm_86", 89: "sm_89", 90: "sm_90a", 100: "sm_100"}
SOURCES = {"primitives.cu": "", "gemm_mma.cu": "", "primitives_hopper.cu": "sm_90a", "gemm_wgmma.cu": "sm_90a",
           "calibration.cu": "", "calibration_hopper.cu": "sm_90a"}  # fmt: skip
"""Maps each kernel file to the one architecture that has its instructions, or to an empty string."""
LIMIT = 300.0
"""Seconds for all cases, outside of ``run_all``."""
GPU_SLACK = 20.0
"""Tensor cores and the CUDA library round differently: tolerated error, relative to the emulation's."""
CASE_SECONDS = 15.0
"""Seconds after which a case counts as hanging: cases take milliseconds."""
GEMM_SIZES = ((1024, 1024, 1024), (4096, 4096, 4096), (16, 4096, 4096))
Job = tuple[str, Callable[["Machine"], dict[str, Any]]]


def image_name(text: str, arch: str) -> str:
    """Return the name of a compiled file in a pack, derived from text and headers, so that old packs are not reused."""
    return f"{content_key(text, *device_headers().values())[:20]}.{arch}.cubin"


def text_of(source: str) -> str:
    """Return the text of a file of kernels."""
    beside = Path(__file__).with_name(source)
    return (beside if beside.exists() else DEVICE / source).read_text()


def images(archs: tuple[str, ...]) -> Iterator[tuple[str, bytes]]:
    """Yield (name, cubin) of all files, for a pack. BuildError: there is no compiler."""
    for source, special in SOURCES.items():
        text = text_of(source)
        for arch in archs:
            if special in ("", arch):
                yield image_name(text, arch), compile_cuda(text, arch).image


class Machine:
    """A driver and the modules that cases load through it; ``pack``: a folder with images."""

    def __init__(self, driver: Driver, emulate: bool, pack: Path | None = None, library: str = "") -> None:
        """``library``: the file that the driver opened."""
        self.driver, self.emulate, self.pack, self.library = driver, emulate, pack, library
        self.modules: dict[str, int] = {}

    @classmethod
    def opened(cls, kind: str, emulate: bool, pack: Path | None) -> Machine:
        """Open a device in this process; a context that breaks ends the process."""
        library = "libcuda.so.1"
        if emulate:
            from polydyn.gpu import cpu_libcuda

            library = str(cpu_libcuda.build())
        driver = open_driver(kind, library=library)
        driver.deferred = True
        return cls(driver, emulate, pack, library)

    @functools.cached_property
    def place(self) -> launch_order.Place:
        """The place where programs run."""
        arch = "emulated" if self.emulate else ARCH.get(self.driver.arch, "sm_80")
        return launch_order.Place(Session(self.driver, self.library), self.pack, f"cuda:{arch}")

    def kernel(self, source: str, name: str, smem: int) -> int:
        """Load a kernel of a file in this folder for this device, with its shared memory allowed."""
        if source not in self.modules:
            self.modules[source] = self.driver.load_module(self.image(text_of(source), source))
        function = self.driver.get_function(self.modules[source], name)
        if smem > 48 * 1024:
            self.driver.set_smem(function, smem)
        return function

    def image(self, text: str, source: str) -> bytes:
        """Return the image from the pack, or compile it: a cubin, or PTX of sm_80 for architectures that polydyn does
        not know.
        """
        if self.emulate:
            from polydyn.gpu.emulator import compile_emulated

            return compile_emulated(text, arch=90 if SOURCES[source] else 80).read_bytes()
        known = ARCH.get(self.driver.arch)
        ready = self.pack / "conformance" / image_name(text, known) if self.pack and known else None
        if ready and ready.exists():
            return ready.read_bytes()
        return compile_cuda(text, known or "sm_80", kind="cubin" if known else "ptx").image

    def run(
        self, source: str, kernel: str, grid: tuple[int, int, int], threads: int, smem: int, args: Any, repeat: int = 0
    ) -> tuple[dict[int, Array], float]:
        """Launch on copies of the arrays; return (arrays by position, milliseconds per launch over ``repeat``)."""
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


# ---- cases ----------------------------------------------------------------------------------------------------------
def primitive(case: Case) -> Callable[[Machine], dict[str, Any]]:
    """Return a job that compares one primitive with numpy."""

    def job(machine: Machine) -> dict[str, Any]:
        got, _ = machine.run(case.source, case.kernel, case.grid, case.threads, case.smem, case.args)
        error = max(mismatch(case, i, got[i]) for i in case.expect)
        allowed = case.tolerance * (1 if machine.emulate else GPU_SLACK)
        return {"error": error, "allowed": allowed, "ok": error <= allowed}

    return job


def gemm(kind: str, shape: tuple[int, int, int], repeat: int = 0) -> Callable[[Machine], dict[str, Any]]:
    """Return a job that compares a hand-written GEMM with float64; timed over ``repeat`` launches."""

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
    """Return all jobs for a device of this compute capability, in order."""
    hopper = arch == 90
    out: list[Job] = [(c.name, primitive(c)) for c in [*all_cases(), *(all_hopper_cases() if hopper else [])]]
    kinds = ("mma", "wgmma") if hopper else ("mma",)
    for kind in kinds:
        for shape in SHAPES:
            if kind == "mma" or shape[2]:
                out.append((f"gemm_{kind} {'x'.join(map(str, shape))}", gemm(kind, shape)))
    out += [(name, lambda machine, job=job: job(machine.place)) for name, job in launch_order.jobs(arch)]
    if not emulate:
        out += [(f"time gemm_{kind} {'x'.join(map(str, s))}", gemm(kind, s, 20)) for s in GEMM_SIZES for kind in kinds]
    return out


# ---- worker and parent -----------------------------------------------------------------------------------------------
def worker(options: argparse.Namespace) -> None:
    """Run jobs from the first on; stop when the context is lost."""
    machine = Machine.opened(options.driver, options.emulate, options.pack)
    known = hardware.match(machine.driver.device_name)
    about = {"device": machine.driver.device_name, "arch": machine.driver.arch, "described": known is not None}
    processes.say({"about": about})
    found = (
        (name, spared(name, options.skip) or partial(job, machine))
        for name, job in jobs(machine.driver.arch, options.emulate)
    )
    patience = None if options.emulate else CASE_SECONDS
    processes.work(found, options.first, options.seconds, options.count, options.skip, patience)


def spared(name: str, hanging: Sequence[str]) -> Callable[[], dict[str, Any]] | None:
    """Return a replacement for a case if a case of its kind hangs: a dozen similar cases would take all the time."""
    like = next((h for h in hanging if kind_of(h) == kind_of(name)), None)
    return None if like is None else lambda: {"ok": False, "message": f"not run, as {like} hangs"}


def kind_of(name: str) -> str:
    """Return a case's first words, for example tma_pixels of tma_pixels_4d_same_first."""
    found = re.match(r"[a-z]+(_[a-z]+)?", name)
    return found[0] if found else name


def collect(options: argparse.Namespace) -> dict[str, Any]:
    """Run workers until every job has an answer; write the report as it grows."""
    report: dict[str, Any] = {"date": time.strftime("%Y-%m-%d %H:%M:%S"), "driver": options.driver, "results": []}
    command = [sys.executable, "-m", "benchmarks.gpu.conformance", "--worker", "--driver", options.driver]
    command += ["--pack", str(options.pack)] if options.pack else []
    command += ["--emulate"] if options.emulate else []
    for event in processes.results(command, LIMIT, 300.0 if options.emulate else processes.PATIENCE):
        if "about" in event:
            report |= event["about"]
        elif "failed" in event:
            report["failed"] = event["failed"]
        else:
            record(report, event)
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    return report


def record(report: dict[str, Any], result: dict[str, Any]) -> None:
    """Store and print one result."""
    report["results"].append(result)
    if "message" in result:
        detail = str(result["message"]).splitlines()[0]
    else:
        detail = f"error {result['error']:.2e} (allowed {result['allowed']:.0e})"
    if "tflops" in result:
        detail += f", {result['ms']:.3f} ms, {result['tflops']:.1f} TFLOP/s"
    print(f"{'ok  ' if result['ok'] else 'FAIL'} {result['name']:32s} {detail}", flush=True)


def main() -> int:
    """Run the command line; the exit status is 1 if anything failed, else 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--driver", default="ctypes", choices=["ctypes", "pycuda"])
    parser.add_argument("--out", type=Path, default=Path("conformance.json"))
    parser.add_argument("--pack", type=Path, help="a folder of benchmarks.gpu.pack, which has the kernels compiled")
    parser.add_argument("--emulate", action="store_true", help="the CPU libcuda: tests this script without a GPU")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    processes.arguments(parser)
    options = parser.parse_args()
    if options.worker:
        worker(options)
        return 0
    report = collect(options)
    failed = [r["name"] for r in report["results"] if not r["ok"]]
    if "device" in report and not options.emulate:
        print(f"kept in {keep(report['device'], {r['name']: r['ok'] for r in report['results']})}")
    why = f"; {report['failed']}" if "failed" in report else ""
    print(f"{report.get('device')}: {len(report['results']) - len(failed)} of {len(report['results'])} conform{why}")
    return int(bool(failed) or "failed" in report)


if __name__ == "__main__":
    sys.exit(main())
