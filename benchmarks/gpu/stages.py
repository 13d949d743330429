"""The stages of ``run_all``, each a process (``processes``): cases in order. Needs numpy; uses torch if installed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.gpu import processes
from benchmarks.gpu.calibration import calibration
from benchmarks.gpu.checks import checked, loading, pycuda
from benchmarks.gpu.compare import compared, selector
from benchmarks.gpu.costs import overhead, timeline
from benchmarks.gpu.processes import Job
from benchmarks.gpu.real import real
from benchmarks.gpu.stage import Stage
from benchmarks.gpu.tools import once, profiler, sanitizer

STAGES: dict[str, Callable[[Stage], Iterator[Job]]] = {
    "loading": loading,
    "calibration": calibration,
    "kernels": lambda s: checked(s, "kernels", "gemm", "layers", "attention", "stitch", "bytes"),
    "models": lambda s: checked(s, "models"),
    "gemm": lambda s: compared(s, "gemm"),
    "layers": lambda s: compared(s, "layers"),
    "attention": lambda s: compared(s, "attention"),
    "stitch": lambda s: compared(s, "stitch"),
    "bytes": lambda s: compared(s, "bytes"),
    "conv": lambda s: compared(s, "conv"),
    "variants": lambda s: compared(s, "variants"),
    "real": real,
    "selector": selector,
    "overhead": overhead,
    "timeline": timeline,
    "pycuda": pycuda,
    "sanitizer": sanitizer,
    "profiler": profiler,
    "once": once,
}

CHECK_PATIENCE = 20.0
"""Seconds after which a case hangs that is only compared with its correct outputs."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that ``run_all`` passes on to every stage."""
    parser.add_argument("--pack", type=Path, required=True)
    parser.add_argument("--driver", default="ctypes", choices=["ctypes", "pycuda"])
    parser.add_argument("--only", nargs="*", default=[], help="names of cases")
    parser.add_argument("--emulate", action="store_true", help="on the CPU libcuda")


def main() -> int:
    """Run one stage."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("stage", choices=list(STAGES))
    arguments(parser)
    processes.arguments(parser)
    options = parser.parse_args()
    stage = Stage(options)
    driver = stage.session.driver
    processes.say({"about": {"device": driver.device_name, "arch": driver.arch, "driver": driver.name}})
    jobs, patience = STAGES[options.stage](stage), CHECK_PATIENCE if options.stage in ("kernels", "models") else None
    patience = None if options.emulate else patience
    processes.work(jobs, options.first, options.seconds, options.count, options.skip, patience)
    return 0


if __name__ == "__main__":
    sys.exit(main())
