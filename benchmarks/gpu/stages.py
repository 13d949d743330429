"""The stages of ``run_all``, each a process: prints one line of JSON per result. Needs numpy; torch where it is."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from math import exp, log
from pathlib import Path
from typing import Any

import numpy as np

from polydyn.gpu.array import DeviceArray
from polydyn.gpu.errors import DeviceError, DeviceLostError
from polydyn.gpu.images import ImageSource
from polydyn.gpu.session import Session, open_session
from polydyn.gpu.tensormap import TensorMap, element_type
from polydyn.program.artifact import read_artifact
from polydyn.program.cuda_program import MULTIPROCESSORS, SHARED_OPT_IN, Call, CudaProgram
from polydyn.program.explain import THREADS, Device, refusal, resolve_dims
from polydyn.program.expressions import evaluate

Result = dict[str, Any]
REPEAT = 20
EMULATED_VERSIONS = 4
"""Of a kernel; each is compiled for the emulation when it is launched."""
EMULATED_ELEMENTS = 50_000
"""Larger arrays are left out on the emulation."""


def torch_or_none() -> Any:
    """torch with a CUDA device, if there is one."""
    try:
        import torch
    except ImportError:
        return None
    return torch if torch.cuda.is_available() else None


class Stage:
    """A device, the cases of the pack, and the time that is left."""

    def __init__(self, options: argparse.Namespace) -> None:
        if options.emulate:
            os.environ["POLYDYN_LIBCUDA"] = "emulated"
        self.emulate, self.folder = options.emulate, options.pack
        self.end = time.monotonic() + options.seconds
        self.session: Session = open_session(prefer=options.driver)
        cases = json.loads((self.folder / "cases.json").read_text())["cases"]
        self.cases = [c for c in cases if not options.only or c["name"] in options.only]
        self.torch = None if self.emulate else torch_or_none()
        self.repeat = 2 if self.emulate else REPEAT
        self.cut = 0

    def of(self, *kinds: str) -> list[Result]:
        """The cases of some kinds."""
        return [c for c in self.cases if c["kind"] in kinds]

    def program(self, case: Result) -> CudaProgram:
        """A case's program on the device."""
        return CudaProgram(read_artifact(self.folder / f"{case['file']}.polydyn"), session=self.session)

    def late(self) -> bool:
        """Whether the stage's time is over; counts what is left out."""
        over = time.monotonic() > self.end
        self.cut += over
        return over


def error(got: Any, want: Any) -> float:
    """The norm of the difference over the norm of what is wanted; exact for integers."""
    a, b = np.asarray(got, np.float64), np.asarray(want, np.float64)
    if a.shape != b.shape:
        return float("inf")
    norm = float(np.linalg.norm(a - b))
    return norm / max(float(np.linalg.norm(b)), 1e-30) if norm else 0.0


def checked(stage: Stage, *kinds: str) -> Iterator[Result]:
    """Programs against the outputs in the pack."""
    for case in stage.of(*kinds):
        data, program = np.load(stage.folder / f"{case['file']}.npz"), stage.program(case)
        for k, shape in enumerate(case["shapes"][: case["checked"]]):
            if stage.late():
                continue
            given = stored(stage, case, k)
            name = f"{case['name']} {text(shape)}"
            try:
                got = program.run(given)
            except DeviceError as e:
                yield {"name": name, "ok": False, "message": f"{type(e).__name__}: {e}"}
                continue
            worst = max(error(a, data[f"{k}/out/{n}"]) for n, a in got.items())
            yield {"name": name, "ok": bool(worst <= case["limit"]), "error": worst, "allowed": case["limit"]}


def text(shape: Mapping[str, int]) -> str:
    return "x".join(f"{k}{v}" for k, v in shape.items())


# ---- timing ----------------------------------------------------------------------------------------------------------
def arrays(program: CudaProgram, shape: Mapping[str, int], seed: int = 0) -> dict[str, Any]:
    """Random inputs of a shape."""
    rng, dims = np.random.default_rng(seed), resolve_dims(program.manifest, shape)
    out = {}
    for i in program.manifest["inputs"]:
        size = [evaluate(d, dims) for d in i["dims"]]
        dtype = np.dtype(i["dtype"])
        out[i["name"]] = rng.standard_normal(size).astype(dtype) if dtype.kind == "f" else np.zeros(size, dtype)
    return out


def microseconds(stage: Stage, work: Callable[[int], Any]) -> float:
    """The device's time of ``work(stream)``, the best of three rounds of many."""
    with stage.session.use() as driver:
        stream = driver.stream()
        best = microseconds_on(stage, stream, lambda: work(stream))
        driver.free_stream(stream)
        return best


def microseconds_on(stage: Stage, stream: int, work: Callable[[], Any]) -> float:
    """That of work which puts itself on a stream."""
    with stage.session.use() as driver:
        start, end = driver.event(), driver.event()
        best = float("inf")
        for _ in range(1 if stage.emulate else 4):  # the first warms up
            driver.record(start, stream)
            for _ in range(stage.repeat):
                work()
            driver.record(end, stream)
            best = min(best, driver.elapsed(start, end) * 1000 / stage.repeat)
        for event in (start, end):
            driver.free_event(event)
        return best


def program_us(stage: Stage, program: CudaProgram, given: Mapping[str, Any]) -> float:
    """A program's time on arrays that are on the device."""
    with stage.session.use():
        context = program._take_ready(stage.session)
        call = Call(program, context, given, {}, 0)
        us = microseconds(stage, lambda stream: context.run_on(call.inputs, call.outputs, stream, True))
        program._idle.append(context)
        return us


def torch_us(stage: Stage, f: Callable[[], Any]) -> float:
    """The device's time of torch's work."""
    t = stage.torch
    best = float("inf")
    for _ in range(4):
        start, end = t.cuda.Event(enable_timing=True), t.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(stage.repeat):
            f()
        end.record()
        t.cuda.synchronize()
        best = min(best, start.elapsed_time(end) * 1000 / stage.repeat)
    return best


def torch_function(name: str, torch: Any) -> Callable[..., Any]:
    """What torch calls a case's computation."""
    if name.startswith("gemm"):
        return lambda a, b: a @ b
    if name.startswith("softmax"):
        return lambda x: torch.softmax(x, -1)
    return lambda x, s, b: torch.nn.functional.layer_norm(x, x.shape[-1:], s, b)


def compared(stage: Stage, kind: str) -> Iterator[Result]:
    """Times, beside torch and Inductor with dynamic shapes where they are."""
    ratios: dict[str, list[float]] = {"torch": [], "inductor": []}
    for case in stage.of(kind):
        program, compiled = stage.program(case), None
        if stage.torch is not None and kind == "stitch":
            compiled = stage.torch.compile(torch_function(case["name"], stage.torch), dynamic=True)
        for shape in case["shapes"]:
            host = arrays(program, shape)
            if stage.emulate and sum(a.size for a in host.values()) > EMULATED_ELEMENTS:
                continue
            if not stage.late():
                yield compare(stage, case, program, shape, host, compiled, ratios)
    about = {f"geomean over {k}": exp(sum(map(log, r)) / len(r)) for k, r in ratios.items() if r}
    yield {"about": about}


def compare(
    stage: Stage, case: Result, program: CudaProgram, shape: Mapping[str, int], host: Mapping[str, Any],
    compiled: Any, ratios: dict[str, list[float]],
) -> Result:  # fmt: skip
    """One shape; ratios are theirs over ours, so above 1 is faster than they are."""
    given = {n: DeviceArray.of(stage.session, a) for n, a in host.items()}
    out: Result = {"name": f"{case['name']} {text(shape)}", "us": program_us(stage, program, given)}
    taken = program.explain(**shape).launches
    out["kernel"] = " ".join(x.kernel.partition("_")[2].partition("_")[2] for x in taken)
    if case["kind"] == "gemm":
        out["tflops"] = 2e-6 * shape["M"] * shape["N"] * shape["K"] / out["us"]
    if stage.torch is None:
        return out
    tensors = [stage.torch.from_dlpack(a) for a in given.values()]
    f = torch_function(case["name"], stage.torch)
    got, want = next(iter(program.run(given).values())).numpy(), f(*tensors).float().cpu().numpy()
    out |= {"error": error(got, want), "ok": bool(error(got, want) <= case["limit"])}
    for name, theirs in (("torch", f), ("inductor", compiled)):
        if theirs is None:
            continue
        try:
            us = torch_us(stage, lambda theirs=theirs: theirs(*tensors))
        except Exception as e:  # another compiler's failure is a remark
            out["message"] = f"{name}: {type(e).__name__}: {e}"
            continue
        out[f"{name}_us"] = us
        out[f"over_{name}"] = us / out["us"]
        ratios[name].append(us / out["us"])
    return out


# ---- the selector against all versions -----------------------------------------------------------------------------
def selector(stage: Stage) -> Iterator[Result]:
    """Every version that fits, timed alone, against the one that is taken."""
    losses = []
    for case in stage.of("gemm"):
        program = stage.program(case)
        for shape in case["shapes"][:: 1 if stage.emulate else 5]:
            host = arrays(program, shape)
            if stage.late() or (stage.emulate and sum(a.size for a in host.values()) > EMULATED_ELEMENTS):
                continue
            times, estimates = exhaustive(stage, program, shape, host)
            first, best = next(iter(times)), min(times, key=lambda n: times[n])
            losses.append(times[first] / times[best])
            yield {"name": f"{case['name']} {text(shape)}", "taken": first, "us": times[first], "best": best,
                   "best_us": times[best], "loss": losses[-1], "versions": times, "estimates": estimates}  # fmt: skip
    if losses:
        yield {"about": {"geomean loss": exp(sum(map(log, losses)) / len(losses))}}


def exhaustive(
    stage: Stage, program: CudaProgram, shape: Mapping[str, int], host: Mapping[str, Any]
) -> tuple[dict[str, float], dict[str, float]]:
    """Version -> microseconds, and those that it was estimated to take, the version that is taken first."""
    manifest, session = program.manifest, stage.session
    (launch,) = manifest["launches"]
    limit, count = (session.driver.attribute(a) for a in (SHARED_OPT_IN, MULTIPROCESSORS))
    env = resolve_dims(manifest, shape) | {THREADS: count}
    size = [evaluate(d, env) for d in manifest["outputs"][0]["dims"]]
    y = DeviceArray(session, tuple(size), manifest["outputs"][0]["dtype"], 2)
    memory = {n: DeviceArray.of(session, a) for n, a in host.items()} | {manifest["outputs"][0]["name"]: y}
    kernels = [(k["name"], k["arch"]) for k in manifest["kernels"]]
    names = [n for n, _ in kernels]
    source = ImageSource(session.driver, kernels, program._artifact.images, program.sources)
    device = Device(limit, source.special)
    times: dict[str, float] = {}
    estimates: dict[str, float] = {}
    said = [evaluate(t, env) for t in manifest["times"]]
    for v in sorted(launch["versions"], key=lambda v: said[v["estimate"]]):  # equal ones stay in order
        if refusal(v, env, device) or (stage.emulate and len(times) == EMULATED_VERSIONS):
            continue
        space = DeviceArray(session, (max(evaluate(v["workspace"], env), 1),), "uint8", 1)
        steps = []
        for x in (v, *v["after"]):
            if evaluate(x["grid"], env) <= 0:
                continue
            with session.use() as driver:
                function = driver.get_function(driver.load_module(source.image(names.index(x["kernel"]))), x["kernel"])
                driver.set_smem(function, limit)
            pointers = [(memory[b] if b else space).pointer for b in x["buffers"]]
            maps = [encoded(session, m, memory[m["buffer"]], env) for m in x["maps"]]
            values = [*maps, *pointers, *(np.int64(evaluate(s, env)) for s in x["symbols"])]
            steps.append((function, (evaluate(x["grid"], env), 1, 1), x["threads"], evaluate(x["smem"], env), values))

        def work(stream: int, steps: list[Any] = steps) -> None:
            for step in steps:
                session.driver.launch(*step, stream)

        times[v["name"]], estimates[v["name"]] = microseconds(stage, work), said[v["estimate"]] / 1000
    return times, estimates


def encoded(session: Session, m: Mapping[str, Any], a: DeviceArray, env: Mapping[str, int]) -> bytes:
    """The bytes of a tensor map over an array."""
    _, item = element_type(m["dtype"])
    dims, strides = (tuple(evaluate(i, env) for i in m[x]) for x in ("dims", "strides"))
    described = TensorMap(m["dtype"], dims, tuple(s * item for s in strides), tuple(m["box"]))
    return session.driver.encode_tensor_map(described, a.pointer + evaluate(m["offset"], env) * item)


# ---- what the host costs ---------------------------------------------------------------------------------------------
def host_us(work: Callable[[], Any], repeat: int) -> float:
    """The host's time of a call, the best of three rounds."""
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(repeat):
            work()
        best = min(best, (time.perf_counter() - start) * 1e6 / repeat)
    return best


def overhead(stage: Stage) -> Iterator[Result]:
    """What a call costs the host: with numpy, with tensors that stay on the device, bound, and its launches alone;
    and the device, when it is launched kernel by kernel and when it is bound, which replays a graph."""
    for case in stage.of("models")[:2]:
        yield {"name": f"{case['name']} {text(case['shapes'][0])}"} | costs(stage, case)


def stored(stage: Stage, case: Result, k: int) -> dict[str, Any]:
    """The inputs of a case's k-th shape."""
    data = np.load(stage.folder / f"{case['file']}.npz")
    return {n.split("/", 2)[2]: data[n] for n in data.files if n.startswith(f"{k}/in/")}


def costs(stage: Stage, case: Result) -> Result:
    """Microseconds of the host, and those of the device (``run``, ``graph``)."""
    program, host, repeat = stage.program(case), stored(stage, case, 0), 1 if stage.emulate else 50
    given = {n: DeviceArray.of(stage.session, a) for n, a in host.items()}
    with stage.session.use() as driver:
        stream = driver.stream()
        program.run(host)
        whole = host_us(lambda: program.run(host), repeat)
        device = host_us(lambda: program.run(given, stream=stream), repeat)
        driver.synchronize(stream)
        context = program._take_ready(stage.session)
        call = Call(program, context, given, {}, stream)
        alone = host_us(lambda: context.run_on(call.inputs, call.outputs, stream, True), repeat)
        launched = microseconds_on(stage, stream, lambda: context.run_on(call.inputs, call.outputs, stream, True))
        program._idle.append(context)
        want, bound = program.run(given), program.bind(given, stream=stream)
        replay = host_us(bound, repeat)
        replayed = microseconds_on(stage, stream, bound)
        same = all(np.array_equal(a.numpy(), want[n].numpy()) for n, a in bound().items())
    count = sum(x.tasks > 0 for x in program.explain(**case["shapes"][0]).launches)
    return {
        "ok": same, "launches": count, "numpy_us": whole, "device_us": device, "host_program_us": alone,
        "us_per_launch": alone / max(count, 1), "bound_us": replay, "run_on_device_us": launched,
        "graph_on_device_us": replayed,
    }  # fmt: skip


def timeline(stage: Stage) -> Iterator[Result]:
    """Where the time of a model goes on the device."""
    for case in stage.of("models"):
        if stage.late():
            continue
        program, shape = stage.program(case), case["shapes"][-1]
        host = stored(stage, case, len(case["shapes"]) - 1)
        times = program.profile(host, 1 if stage.emulate else 20)
        whole = program_us(stage, program, {n: DeviceArray.of(stage.session, a) for n, a in host.items()})
        longest = sorted(times, key=lambda t: -t.nanoseconds)[:5]
        yield {
            "name": f"{case['name']} {text(shape)}", "launches": len(times), "us": whole,
            "sum_of_launches_us": sum(t.nanoseconds for t in times) / 1000,
            "longest": [f"{t.nanoseconds / 1000:.1f} us {t.kernel} ({t.label})" for t in longest],
            "launches_us": [round(t.nanoseconds / 1000, 2) for t in times],
        }  # fmt: skip


STAGES: dict[str, Callable[[Stage], Iterator[Result]]] = {
    "kernels": lambda s: checked(s, "kernels", "gemm", "stitch"),
    "models": lambda s: checked(s, "models"),
    "gemm": lambda s: compared(s, "gemm"),
    "stitch": lambda s: compared(s, "stitch"),
    "selector": selector,
    "overhead": overhead,
    "timeline": timeline,
}


def main() -> int:
    """Runs one stage."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("stage", choices=list(STAGES))
    parser.add_argument("--pack", type=Path, required=True)
    parser.add_argument("--driver", default="ctypes")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--emulate", action="store_true")
    options = parser.parse_args()
    stage = Stage(options)
    driver = stage.session.driver
    say({"about": {"device": driver.device_name, "arch": driver.arch, "driver": driver.name}})
    try:
        for result in STAGES[options.stage](stage):
            say(result)
    except DeviceLostError as e:
        say({"failed": f"{type(e).__name__}: {e}"})
    say({"about": {"cut": stage.cut}})
    return 0


def say(event: Result) -> None:
    print(json.dumps(event), flush=True)


if __name__ == "__main__":
    sys.exit(main())
