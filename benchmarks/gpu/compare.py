"""Times of our programs and torch's: programs of one kernel or few, hot and cold caches, device and host."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from benchmarks.gpu.processes import Job
from benchmarks.gpu.rivals import Rival, rival
from benchmarks.gpu.stage import (
    Output,
    Result,
    Stage,
    data,
    described,
    in_turn,
    outputs,
    text,
    torch_error,
    torch_times,
)
from benchmarks.gpu.versions import Versions, exhaustive
from polydyn.gpu.errors import DeviceLostError
from polydyn.runtime.cuda.array import DeviceArray
from polydyn.runtime.cuda.program import Call, CudaProgram

ITEM_BYTES = {"float32": 4, "int32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "uint8": 1, "bool": 1}
CALLS = 20
"""Number of calls over which the host's time is averaged."""


def compared(stage: Stage, *kinds: str) -> Iterator[Job]:
    """Compare every shape of every case, families first."""
    theirs = functools.cache(partial(rival_of, stage))
    for case, k in in_turn(stage.cases_of(*kinds), lambda c: len(c["shapes"])):
        shape = case["shapes"][k]
        yield f"{case['name']} {text(shape)}", partial(compare, stage, case, shape, theirs)


def rival_of(stage: Stage, name: str) -> Rival:
    """Return torch's computation for a case."""
    return rival(stage.torch, next(c for c in stage.cases if c["name"] == name))


def compare(stage: Stage, case: Result, shape: Mapping[str, int], theirs: Callable[[str], Rival]) -> Result | None:
    """Compare one shape: ``us``, ``cold_us`` of the device, ``host_us`` of a call; ``over_torch``: their time over
    ours.

    Our numbers are taken first, and stay valid if torch fails.
    """
    program = stage.program(case)
    if stage.too_large(program, shape):
        return None
    given = data(stage, program, shape)
    got = next(iter(program.run(given).values()))
    out = ours(stage, program, shape, given)
    if stage.torch is None:
        return out
    try:
        out |= torchs(stage, case, program, shape, given, got, theirs(case["name"]))
    except DeviceLostError:
        raise
    except Exception as e:  # another library's failure is a remark
        out["message"] = f"torch: {type(e).__name__}: {e}"
    if "torch_us" in out:
        out["over_torch"] = out["torch_us"] / out["us"]
        out["cold_over_torch"] = out["torch_cold_us"] / out["cold_us"]
    return out


# ---- ours ----------------------------------------------------------------------------------------------------------
def ours(stage: Stage, program: CudaProgram, shape: Mapping[str, int], feeds: Mapping[str, DeviceArray]) -> Result:
    """Time a program; a program of several launches is replayed as a bound call, one launch is timed directly."""
    explained = program.explain(**shape)
    taken = [x for x in explained.launches if x.tasks > 0]
    out: Result = {"host_us": host_us(stage, program, feeds)}
    try:
        hot, cold, sets = kernels_us(stage, program, shape, feeds)
        out |= {"us": hot.median * 1e6, "cold_us": cold.median * 1e6, "spread": hot.spread, "sets": sets}
    except ValueError:  # several launches, which only the program itself can start: its call, captured once
        us = bound_us(stage, program, feeds)
        out |= {"us": us, "cold_us": us, "sets": 1, "launches": len(taken)}
    flops, moved = sum(x.flops for x in taken), sum(x.bytes for x in taken)
    out["kernel"] = " ".join(x.kernel.partition("_")[2].partition("_")[2] for x in taken[:3])
    out |= {"tflops": flops / out["us"] / 1e6, "gb_per_s": moved / out["cold_us"] / 1e3}
    return out


def kernels_us(stage: Stage, program: CudaProgram, shape: Mapping[str, int], feeds: Mapping[str, DeviceArray]) -> Any:
    """Return (hot, cold, sets): times of the selected version. ValueError: the program has several launches."""
    versions = Versions(stage, program, shape)
    if not versions.list:
        raise ValueError("no version")
    taken, sets = versions.list[0], stage.sets(footprint(program, shape))
    works, kept = [], []
    for turn in range(sets):
        mine = feeds if turn == 0 else data(stage, program, shape, turn)
        memory = versions.memory(mine, outputs(stage, program, shape)[versions.output])
        kept.append(memory)  # until all measurements are done
        works.append(versions.work(versions.steps(taken, memory)))
    with stage.session.use() as driver:
        for work in works:
            work(0)
        driver.synchronize()
    hot = stage.replayed(works[:1])
    return hot, stage.replayed(works), sets


def footprint(program: CudaProgram, shape: Mapping[str, int]) -> int:
    """Return the bytes of the inputs, outputs and constants of a program."""
    sizes = [*described(program, "inputs", shape), *described(program, "outputs", shape)]
    moved = sum(math.prod(size) * ITEM_BYTES.get(dtype, 8) for size, dtype in sizes)
    return moved + sum(int(c["bytes"]) for c in program.manifest.get("constants", {}).values())


def host_us(stage: Stage, program: CudaProgram, feeds: Mapping[str, DeviceArray]) -> float:
    """Return the host's time of a call on device arrays, once it is a graph, if the program caches graphs."""
    repeat = 1 if stage.emulate else CALLS
    with stage.session.use() as driver:
        context, stream = program._take_ready(stage.session), driver.stream()
        try:
            context.keep(program.graphs, program.graph_bytes)
            call = Call(program, context, feeds, {}, stream)
            for _ in range(2):  # the second call is recorded
                context.run_on(call.inputs, call.outputs, stream, True)
            driver.synchronize(stream)
            start = time.perf_counter()
            for _ in range(repeat):
                context.run_on(call.inputs, call.outputs, stream, True)
            spent = time.perf_counter() - start
            driver.synchronize(stream)
        finally:
            program._idle.append(context)
        driver.free_stream(stream)
    return spent * 1e6 / repeat


def bound_us(stage: Stage, program: CudaProgram, feeds: Mapping[str, DeviceArray]) -> float:
    """Return the device's time of a bound call, the minimum of three rounds."""
    repeat, best = (1, float("inf")) if stage.emulate else (CALLS, float("inf"))
    with stage.session.use() as driver:
        stream, events = driver.stream(), (driver.event(), driver.event())
        bound = program.bind(feeds, stream=stream)
        for _ in range(1 if stage.emulate else 4):  # the first one warms up
            driver.record(events[0], stream)
            for _ in range(repeat):
                bound()
            driver.record(events[1], stream)
            best = min(best, driver.elapsed(*events) * 1000 / repeat)
    return best


# ---- torch's -------------------------------------------------------------------------------------------------------
def torchs(
    stage: Stage, case: Result, program: CudaProgram, shape: Mapping[str, int], feeds: Mapping[str, DeviceArray],
    got: DeviceArray, theirs: Rival,
) -> Result:  # fmt: skip
    """Return whether the results agree, then torch's times, hot and cold like ours."""
    torch, (function, constants) = stage.torch, theirs
    tensors = [torch.from_dlpack(a) for a in feeds.values()]
    want = function(*tensors, *constants)
    wrong = torch_error(torch, torch.from_dlpack(got), want)
    out: Result = {"error": wrong, "ok": bool(wrong <= case["limit"])}
    hot = torch_times(torch, [partial(function, *tensors, *constants)])
    turns = [[*tensors, *constants]]
    for turn in range(1, stage.sets(footprint(program, shape))):
        others = [torch.from_dlpack(a) for a in data(stage, program, shape, turn).values()]
        turns.append([*others, *(t.clone() for t in constants)])
    cold = torch_times(torch, [partial(function, *t) for t in turns])
    return out | {"torch_us": hot.median * 1e6, "torch_cold_us": cold.median * 1e6}


# ---- the selector against all versions -----------------------------------------------------------------------------
def selector(stage: Stage) -> Iterator[Job]:
    """Time every version that fits, alone, and compare with the selected one."""
    cases = stage.cases_of("gemm", "layers", "bytes", "stitch", "conv")
    step = {"gemm": 1 if stage.emulate else 3, "stitch": 2}
    for case, k in in_turn(cases, lambda c: -(-len(c["shapes"]) // step.get(c["kind"], 1))):
        shape = case["shapes"][k * step.get(case["kind"], 1)]
        yield f"{case['name']} {text(shape)}", partial(select, stage, case, shape)


def select(stage: Stage, case: Result, shape: Mapping[str, int]) -> Result | None:
    """Compare the versions at one shape; ``loss``: the time of the selected version over the best one's.

    All of them must agree with the last one, which is the simplest, within twice the case's limit.
    """
    program = stage.program(case)
    if stage.too_large(program, shape):
        return None
    try:
        versions = Versions(stage, program, shape)
    except ValueError:
        return None
    given, output = data(stage, program, shape), Output(stage, outputs(stage, program, shape)[versions.output])
    plainest(versions, given, output)
    found = exhaustive(versions, given, output)
    if not found:
        return None
    times = {n: t.times.least * 1e6 for n, t in found.items()}
    first, best = next(iter(times)), min(times, key=lambda n: times[n])
    wrong = {n: t.error for n, t in found.items() if not t.error <= 2 * case["limit"]}
    return {
        "ok": not wrong, "taken": first, "us": times[first], "best": best, "best_us": times[best],
        "loss": times[first] / times[best], "versions": times,
        "estimates": {n: t.estimate for n, t in found.items()},
        "blocks": {n: [t.resident, t.supposed] for n, t in found.items() if t.resident != t.supposed},
        **({"message": f"wrong: {', '.join(wrong)}", "errors": wrong} if wrong else {}),
    }  # fmt: skip


def plainest(versions: Versions, feeds: Mapping[str, DeviceArray], output: Output) -> None:
    """Use the last allowed version of the program's list as the reference result."""
    names = [v["name"] for (launch,) in [versions.program.manifest["launches"]] for v in launch["candidates"]]
    if not versions.list:
        return
    last = max(versions.list, key=lambda v: names.index(v["name"]))
    memory = versions.memory(feeds, output.array)  # lives until the work is done
    work = versions.work(versions.steps(last, memory))
    with versions.session.use() as driver:
        work(0)
        driver.synchronize()
    output.keep()
