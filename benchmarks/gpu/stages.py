"""The stages of ``run_all``, each a process (``processes``): cases in order. Needs numpy; torch where it is."""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu import processes
from benchmarks.gpu.processes import Job
from polydyn.gpu.array import DeviceArray
from polydyn.gpu.errors import DeviceLostError
from polydyn.gpu.images import ImageSource
from polydyn.gpu.session import Session, open_session
from polydyn.gpu.tensormap import TensorMap, element_type
from polydyn.program.artifact import read_artifact
from polydyn.program.cuda_program import MULTIPROCESSORS, SHARED_OPT_IN, Call, CudaProgram
from polydyn.program.explain import THREADS, Device, refusal, resolve_dims
from polydyn.program.expressions import decision_from_json, evaluate
from polydyn.schedules.decision import cost

Result = dict[str, Any]
REPEAT = 20
EMULATED_VERSIONS = 4
"""Of a kernel; each is compiled for the emulation when it is launched."""
EMULATED_ELEMENTS = 50_000
"""Larger arrays are left out on the emulation."""


class Stage:
    """A device and the cases of the pack."""

    def __init__(self, options: argparse.Namespace) -> None:
        if options.emulate:
            os.environ["POLYDYN_LIBCUDA"] = "emulated"
        self.emulate, self.folder = options.emulate, options.pack
        self.session: Session = open_session(prefer=options.driver)
        cases = json.loads((self.folder / "cases.json").read_text())["cases"]
        self.cases = [c for c in cases if not options.only or c["name"] in options.only]
        self.repeat = 2 if self.emulate else REPEAT
        self._program: tuple[str, CudaProgram] | None = None

    @functools.cached_property
    def torch(self) -> Any:
        """torch with a CUDA device, None when there is none; importing it takes seconds."""
        if self.emulate:
            return None
        try:
            import torch
        except ImportError:
            return None
        return torch if torch.cuda.is_available() else None

    def of(self, *kinds: str) -> list[Result]:
        """The cases of some kinds."""
        return [c for c in self.cases if c["kind"] in kinds]

    def program(self, case: Result) -> CudaProgram:
        """A case's program on the device; the last one is kept."""
        if self._program is None or self._program[0] != case["file"]:
            artifact = read_artifact(self.folder / f"{case['file']}.polydyn")
            self._program = (case["file"], CudaProgram(artifact, session=self.session))
        return self._program[1]

    def too_large(self, host: Mapping[str, Any]) -> bool:
        """Whether arrays are left out on the emulation."""
        return self.emulate and sum(a.size for a in host.values()) > EMULATED_ELEMENTS


def error(got: Any, want: Any) -> float:
    """The norm of the difference over the norm of what is wanted; exact for integers; inf when there is no number."""
    a, b = np.asarray(got, np.float64), np.asarray(want, np.float64)
    if a.shape != b.shape:
        return float("inf")
    norm = float(np.linalg.norm(a - b))
    relative = norm / max(float(np.linalg.norm(b)), 1e-30) if norm else 0.0
    return relative if np.isfinite(relative) else float("inf")


def checked(stage: Stage, *kinds: str) -> Iterator[Job]:
    """Programs against the outputs in the pack."""
    for case in stage.of(*kinds):
        for k, shape in enumerate(case["shapes"][: case["checked"]]):
            yield f"{case['name']} {text(shape)}", partial(check, stage, case, k)


def check(stage: Stage, case: Result, k: int) -> Result:
    """The k-th shape of a case."""
    data = np.load(stage.folder / f"{case['file']}.npz")
    program = stage.program(case)
    got = program.run(stored(stage, case, k))
    kinds = {o["name"]: o["dtype"] for o in program.manifest["outputs"]}
    worst = max(error(numbers(a, kinds[n]), numbers(data[f"{k}/out/{n}"], kinds[n])) for n, a in got.items())
    return {"ok": bool(worst <= case["limit"]), "error": worst, "allowed": case["limit"]}


def numbers(a: Any, dtype: str) -> Any:
    """An array as numpy calculates with it; bfloat16 travels as bits."""
    return (np.asarray(a).astype(np.uint32) << 16).view(np.float32) if dtype == "bfloat16" else a


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


def microseconds(stage: Stage, work: Callable[[int], Any]) -> tuple[float, float]:
    """The device's time of ``work(stream)``, the best of three rounds of many; the host's time to enqueue it.

    Where the second is nearly the first, the device waits for the host, and the first says nothing of the kernel.
    """
    with stage.session.use() as driver:
        stream = driver.stream()
        times = microseconds_on(stage, stream, lambda: work(stream))
        driver.free_stream(stream)
        return times


def microseconds_on(stage: Stage, stream: int, work: Callable[[], Any]) -> tuple[float, float]:
    """Those of work which puts itself on a stream."""
    with stage.session.use() as driver:
        start, end = driver.event(), driver.event()
        best = host = float("inf")
        for _ in range(1 if stage.emulate else 4):  # the first warms up
            driver.record(start, stream)
            begun = time.perf_counter()
            for _ in range(stage.repeat):
                work()
            host = min(host, (time.perf_counter() - begun) * 1e6 / stage.repeat)
            driver.record(end, stream)
            best = min(best, driver.elapsed(start, end) * 1000 / stage.repeat)
        for event in (start, end):
            driver.free_event(event)
        return best, host


def program_us(stage: Stage, program: CudaProgram, given: Mapping[str, Any]) -> tuple[float, float]:
    """A program's time on arrays that are on the device, and the host's."""
    with stage.session.use():
        context = program._take_ready(stage.session)
        call = Call(program, context, given, {}, 0)
        times = microseconds(stage, lambda stream: context.run_on(call.inputs, call.outputs, stream, True))
        program._idle.append(context)
        return times


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
    if name == "gemm_nt":
        return lambda a, b: a @ b.T
    if name.startswith("gemm"):
        return lambda a, b: a @ b
    if name.startswith("softmax"):
        return lambda x: torch.softmax(x, -1)
    return lambda x, s, b: torch.nn.functional.layer_norm(x, x.shape[-1:], s, b)


def compared(stage: Stage, kind: str) -> Iterator[Job]:
    """Times, beside torch where it is; then beside Inductor with dynamic shapes, whose first compilation takes long."""
    for rival in ("torch", "inductor") if kind == "stitch" else ("torch",):
        for case in stage.of(kind):
            theirs = functools.cache(partial(function_of, stage, case["name"], rival))
            for shape in case["shapes"]:
                name = f"{case['name']} {text(shape)}" + " inductor" * (rival == "inductor")
                yield name, partial(compare, stage, case, shape, rival, theirs)


def function_of(stage: Stage, name: str, rival: str) -> Any:
    """A case's computation as a rival does it."""
    f = torch_function(name, stage.torch)
    return stage.torch.compile(f, dynamic=True) if rival == "inductor" else f


def compare(
    stage: Stage, case: Result, shape: Mapping[str, int], rival: str, theirs: Callable[[], Any]
) -> Result | None:
    """One shape; ``over_...``: their time over ours, so above 1 is faster than they are."""
    program = stage.program(case)
    host = arrays(program, shape)
    if stage.too_large(host) or (rival == "inductor" and stage.torch is None):
        return None
    given = {n: DeviceArray.of(stage.session, a) for n, a in host.items()}
    us, host_us = program_us(stage, program, given)
    out: Result = {"us": us, "host_us": host_us}
    taken = program.explain(**shape).launches
    out["kernel"] = " ".join(x.kernel.partition("_")[2].partition("_")[2] for x in taken)
    if case["kind"] == "gemm":
        out["tflops"] = 2e-6 * shape["M"] * shape["N"] * shape["K"] / us
    if stage.torch is None:
        return out
    tensors = [stage.torch.from_dlpack(a) for a in given.values()]
    got = next(iter(program.run(given).values())).numpy()
    wrong = error(got, torch_function(case["name"], stage.torch)(*tensors).float().cpu().numpy())
    out |= {"error": wrong, "ok": bool(wrong <= case["limit"])}
    try:
        theirs_us = torch_us(stage, partial(theirs(), *tensors))
    except Exception as e:  # another compiler's failure is a remark
        return out | {"message": f"{rival}: {type(e).__name__}: {e}"}
    return out | {f"{rival}_us": theirs_us, f"over_{rival}": theirs_us / us}


# ---- the selector against all versions -----------------------------------------------------------------------------
def selector(stage: Stage) -> Iterator[Job]:
    """Every version that fits, timed alone, against the one that is taken."""
    for case in stage.of("gemm"):
        for shape in case["shapes"][:: 1 if stage.emulate else 5]:
            yield f"{case['name']} {text(shape)}", partial(select, stage, case, shape)


def select(stage: Stage, case: Result, shape: Mapping[str, int]) -> Result | None:
    """One shape; ``loss``: the time of the version that is taken over the best one's. All of them must be right."""
    program = stage.program(case)
    host = arrays(program, shape)
    if stage.too_large(host):
        return None
    b = host["b"].T if case["name"].endswith("nt") else host["b"]
    found = exhaustive(stage, program, host, shape, np.asarray(host["a"], np.float32) @ np.asarray(b, np.float32))
    times = {n: us for n, (us, _, _) in found.items()}
    first, best = next(iter(times)), min(times, key=lambda n: times[n])
    wrong = {n: e for n, (_, _, e) in found.items() if not e <= case["limit"]}
    return {
        "ok": not wrong, "taken": first, "us": times[first], "best": best, "best_us": times[best],
        "loss": times[first] / times[best], "versions": times, "estimates": {n: us for n, (_, us, _) in found.items()},
        **({"message": f"wrong: {', '.join(wrong)}", "errors": wrong} if wrong else {}),
    }  # fmt: skip


def exhaustive(
    stage: Stage, program: CudaProgram, host: Mapping[str, Any], shape: Mapping[str, int], want: Any
) -> dict[str, tuple[float, float, float]]:
    """Version -> its microseconds, those it was estimated to take, its error against ``want``; the one taken first."""
    manifest, session = program.manifest, stage.session
    (launch,), (output,) = manifest["launches"], manifest["outputs"]
    limit, count = (session.driver.attribute(a) for a in (SHARED_OPT_IN, MULTIPROCESSORS))
    env = resolve_dims(manifest, shape) | {THREADS: count}
    nothing = np.full([evaluate(d, env) for d in output["dims"]], np.nan, output["dtype"])
    memory = {n: DeviceArray.of(session, a) for n, a in [*host.items(), (output["name"], nothing)]}
    y = memory[output["name"]]
    kernels = [(k["name"], k["arch"]) for k in manifest["kernels"]]
    source = ImageSource(session.driver, kernels, program._artifact.images, program.sources)
    device, decision = Device(limit, source.special), decision_from_json(manifest["decisions"][launch["decision"]])
    said = {v["name"]: cost(decision, k, env) for k, v in enumerate(launch["candidates"])}
    found: dict[str, tuple[float, float, float]] = {}
    for v in sorted(launch["candidates"], key=lambda v: said[v["name"]]):  # equal ones stay in order
        if refusal(v, env, device) or (stage.emulate and len(found) == EMULATED_VERSIONS):
            continue
        space = DeviceArray(session, (max(evaluate(v["block"]["workspace"], env), 1),), "uint8", 1)
        with session.use() as driver:
            driver.h2d(y.pointer, nothing)  # what the version before has left is no result
        try:
            steps = [s for x in (v, *v["block"]["after"]) for s in prepared(session, source, x, memory, space, env)]
            us, _ = microseconds(stage, partial(launched, session, steps))
        except DeviceLostError as e:
            raise DeviceLostError(f"{v['name']}: {e}", code=e.code) from e
        found[v["name"]] = us, said[v["name"]] / 1000, error(y.numpy(), want)
    return found


def prepared(
    session: Session, source: ImageSource, x: Mapping[str, Any], memory: Mapping[str, DeviceArray],
    space: DeviceArray, env: Mapping[str, int],
) -> Iterator[tuple[Any, ...]]:  # fmt: skip
    """The arguments of ``Driver.launch`` for a kernel of a version; none when it has no blocks."""
    blocks = evaluate(x["tasks"], env)
    if blocks <= 0:
        return
    number = [n for n, _ in source.kernels].index(x["kernel"])
    with session.use() as driver:
        function = driver.get_function(driver.load_module(source.image(number)), x["kernel"])
        driver.set_smem(function, driver.attribute(SHARED_OPT_IN))
    pointers = [(memory[b] if b else space).pointer for b in x["buffers"]]
    maps = [encoded(session, m, memory[m["buffer"]], env) for m in x["block"]["maps"]]
    symbols = [np.int64(evaluate(s, env)) for s in x["symbols"]]
    yield function, (blocks, 1, 1), x["block"]["threads"], evaluate(x["scratch"], env), [*maps, *pointers, *symbols]


def launched(session: Session, steps: list[tuple[Any, ...]], stream: int) -> None:
    """The kernels of a version, one after the other."""
    for step in steps:
        session.driver.launch(*step, stream)


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


def overhead(stage: Stage) -> Iterator[Job]:
    """What a call costs the host: with numpy, with tensors that stay on the device, bound, and its launches alone;
    and the device, when it is launched kernel by kernel and when it is bound, which replays a graph."""
    for case in stage.of("models")[:2]:
        yield f"{case['name']} {text(case['shapes'][0])}", partial(costs, stage, case)


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
        launched, _ = microseconds_on(stage, stream, lambda: context.run_on(call.inputs, call.outputs, stream, True))
        program._idle.append(context)
        want, bound = program.run(given), program.bind(given, stream=stream)
        replay = host_us(bound, repeat)
        replayed, _ = microseconds_on(stage, stream, bound)
        same = all(np.array_equal(a.numpy(), want[n].numpy()) for n, a in bound().items())
    count = sum(x.tasks > 0 for x in program.explain(**case["shapes"][0]).launches)
    return {
        "ok": same, "launches": count, "numpy_us": whole, "device_us": device, "host_program_us": alone,
        "us_per_launch": alone / max(count, 1), "bound_us": replay, "run_on_device_us": launched,
        "graph_on_device_us": replayed,
    }  # fmt: skip


def timeline(stage: Stage) -> Iterator[Job]:
    """Where the time of a model goes on the device."""
    for case in stage.of("models"):
        yield f"{case['name']} {text(case['shapes'][-1])}", partial(profiled, stage, case)


def profiled(stage: Stage, case: Result) -> Result:
    """The launches of a model at the last of its shapes."""
    program, host = stage.program(case), stored(stage, case, len(case["shapes"]) - 1)
    times = program.profile(host, 1 if stage.emulate else 20)
    whole, _ = program_us(stage, program, {n: DeviceArray.of(stage.session, a) for n, a in host.items()})
    longest = sorted(times, key=lambda t: -t.nanoseconds)[:5]
    return {
        "launches": len(times), "us": whole, "sum_of_launches_us": sum(t.nanoseconds for t in times) / 1000,
        "longest": [f"{t.nanoseconds / 1000:.1f} us {t.kernel} ({t.label})" for t in longest],
        "launches_us": [round(t.nanoseconds / 1000, 2) for t in times],
    }  # fmt: skip


STAGES: dict[str, Callable[[Stage], Iterator[Job]]] = {
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
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--emulate", action="store_true")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=60)
    options = parser.parse_args()
    stage = Stage(options)
    driver = stage.session.driver
    processes.say({"about": {"device": driver.device_name, "arch": driver.arch, "driver": driver.name}})
    processes.work(STAGES[options.stage](stage), options.first, options.seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
