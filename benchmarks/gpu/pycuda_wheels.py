"""Builds pycuda and its requirements as wheels: the package index has only pycuda's source.

    python -m benchmarks.gpu.pycuda_wheels OUT [--python PYTHON]

Needs a C++ compiler and the headers of the CUDA toolkit, but neither a GPU nor its driver: pycuda is linked with the
CPU libcuda, and loads the installed libcuda.so.1 when it is imported. Takes two minutes on one core, and needs the
package index.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from polydyn.errors import BuildError
from polydyn.gpu import cpu_libcuda
from polydyn.gpu.compiler import find_nvcc


def toolkit() -> Path:
    """Return the toolkit's folder, which has ``include/cuda.h``. BuildError: there is none."""
    nvcc = find_nvcc()
    if nvcc is None:
        raise BuildError("pycuda is built with the headers of the CUDA toolkit: no nvcc was found")
    with tempfile.NamedTemporaryFile(suffix=".cu") as nothing:  # the nvcc on PATH may be a script that calls another
        command = [nvcc[0], "--dryrun", "-E", nothing.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    tops = [line.partition("TOP=")[2].strip() for line in said.splitlines() if line.startswith("#$ TOP=")]
    home = Path(tops[0]).resolve() if tops else Path(nvcc[0]).resolve().parents[1]
    if not (home / "include/cuda.h").is_file():
        raise BuildError(f"pycuda is built with the headers of the CUDA toolkit: {home} has no include/cuda.h")
    return home


def build(python: str, folder: Path, *others: str) -> None:
    """Build the wheels of pycuda and of ``others`` for an interpreter.

    BuildError: no toolkit. CalledProcessError: pip or the compiler failed, and printed the reason.
    """
    with tempfile.TemporaryDirectory() as home:
        stub = Path(home) / "libcuda.so"  # must define what pycuda links, or its name is dropped from the wheel
        shutil.copy(cpu_libcuda.build(), stub)
        settings = {"CUDA_ROOT": str(toolkit()), "CUDADRV_LIB_DIR": [home], "CUDA_ENABLE_CURAND": False}
        settings |= {"CXXFLAGS": ["-g0", "-O1", "-w"]}
        (Path(home) / ".aksetup-defaults.py").write_text("".join(f"{k} = {v!r}\n" for k, v in settings.items()))
        command = [python, "-m", "pip", "wheel", "--quiet", "--wheel-dir", str(folder), "pycuda", *others]
        subprocess.run(command, check=True, env=os.environ | {"HOME": home})


def main() -> int:
    """Build the wheels."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--python", default=sys.executable, help="the interpreter that the wheels are for")
    options = parser.parse_args()
    build(options.python, options.out)
    print(*sorted(p.name for p in options.out.glob("*.whl")), sep="\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
