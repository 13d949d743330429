"""Loads kernels in the driver, checks programs against the outputs in the pack, and runs a model through pycuda."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.gpu.processes import Job
from benchmarks.gpu.stage import Result, Stage, error, in_turn, numbers, text
from polydyn.gpu.errors import DeviceError, DeviceLostError
from polydyn.gpu.targets import special_runs
from polydyn.runtime.cuda.images import ImageSource
from polydyn.runtime.cuda.program import SHARED_OPT_IN

LAUNCHES = 3
"""Number of kernels that are named for a wrong model."""


def loading(stage: Stage) -> Iterator[Job]:
    """Load every program of the pack, so that kernels that the driver rejects are known before anything is launched."""
    for case in stage.cases:
        yield case["name"], partial(load, stage, case)


def load(stage: Stage, case: Result) -> Result:
    """Load all kernels of a program, with the maximum shared memory per block; the result names the rejected ones."""
    program, refused = stage.program(case), []
    kernels = [(k["name"], k["arch"]) for k in program.manifest["kernels"]]
    source = ImageSource(stage.session.driver, kernels, program._artifact.images, program.sources)
    fitting = [k for k, (_, arch) in enumerate(kernels) if special_runs(arch, source.special)]
    modules: dict[bytes, int] = {}
    with stage.session.use() as driver:
        for k in fitting[: 1 if stage.emulate else None]:  # the emulation compiles each kernel
            try:
                image = source.image(k)
                if image not in modules:
                    modules[image] = driver.load_module(image)
                driver.set_smem(driver.get_function(modules[image], kernels[k][0]), driver.attribute(SHARED_OPT_IN))
            except DeviceLostError:
                raise
            except DeviceError as e:
                refused.append(f"{kernels[k][0]}: {e}")
    failed = {"message": f"{len(refused)} refused; {refused[0]}", "refused": refused} if refused else {}
    return {"ok": not refused, "kernels": len(fitting)} | failed


def checked(stage: Stage, *kinds: str) -> Iterator[Job]:
    """Check every case that has outputs, families first."""
    for case, k in in_turn(stage.cases_of(*kinds), lambda c: int(c["checked"])):
        yield f"{case['name']} {text(case['shapes'][k])}", partial(check, stage, case, k)


def check(stage: Stage, case: Result, k: int) -> Result:
    """Check the k-th shape of a case."""
    data = np.load(stage.folder / f"{case['file']}.npz")
    program = stage.program(case)
    got = program.run(stage.stored(case, k))
    kinds = {o["name"]: o["dtype"] for o in program.manifest["outputs"]}
    worst = max(error(numbers(a, kinds[n]), numbers(data[f"{k}/out/{n}"], kinds[n])) for n, a in got.items())
    out: Result = {"ok": bool(worst <= case["limit"]), "error": worst, "allowed": case["limit"]}
    if not out["ok"]:  # kernels to look at, the rarest first: kernels that all models share are right elsewhere
        taken = [x.kernel for x in program.explain(**case["shapes"][k]).launches if x.tasks > 0]
        out["kernels"] = sorted(set(taken), key=taken.count)
        out["message"] = f"error {worst:.2e}; its kernels: {', '.join(out['kernels'][:LAUNCHES])}"
    return out


def pycuda(stage: Stage) -> Iterator[Job]:
    """Run a model through pycuda, from the wheels of the pack."""
    wheels = sorted((stage.folder / "wheels").glob("*.whl"))
    if any(w.name.startswith("pycuda-") for w in wheels):
        yield "a model through pycuda", partial(through_pycuda, stage, wheels)


def through_pycuda(stage: Stage, wheels: list[Path]) -> Result:
    """Unpack the wheels into a folder and run the first model in a process that imports from it."""
    case = next(c for c in stage.cases_of("models", "kernels"))
    with tempfile.TemporaryDirectory() as site:
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", site]
        subprocess.run([*pip, *map(str, wheels)], check=True, capture_output=True)
        command = [sys.executable, "-m", "benchmarks.gpu.stages", case["kind"], "--pack", str(stage.folder)]
        command += ["--driver", "pycuda", "--only", case["name"], *(["--emulate"] if stage.emulate else [])]
        done = subprocess.run(command, capture_output=True, text=True, env=with_path(site), timeout=100)
    ok = done.returncode == 0 and '"ok": true' in done.stdout and '"ok": false' not in done.stdout
    return {"ok": ok, "case": case["name"]} | ({} if ok else {"message": (done.stdout + done.stderr)[-2000:]})


def with_path(site: str) -> dict[str, str]:
    """Return the environment with a folder of packages."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [site, os.environ.get("PYTHONPATH", "")]))}
