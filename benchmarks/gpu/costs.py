"""The host's cost of a call, and the device's time for each launch of a model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from benchmarks.gpu.compare import bound_us, host_us
from benchmarks.gpu.launch_order import allowing
from benchmarks.gpu.processes import Job
from benchmarks.gpu.stage import Result, Stage, text
from polydyn.runtime.cuda.array import DeviceArray
from polydyn.runtime.cuda.program import GRAPHS, CudaProgram


def spent_us(work: Callable[[], Any], repeat: int) -> float:
    """Return the host's time of a call, the best of three rounds."""
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(repeat):
            work()
        best = min(best, (time.perf_counter() - start) * 1e6 / repeat)
    return best


def overhead(stage: Stage) -> Iterator[Job]:
    """Measure the host's cost of a call: with numpy, with device tensors, with a cached graph, bound, and its launches
    alone; and the device's time of a graph, with and without programmatic dependent launch.
    """
    for case in stage.cases_of("models")[:2]:
        yield f"{case['name']} {text(case['shapes'][0])}", partial(costs, stage, case)


def costs(stage: Stage, case: Result) -> Result:
    """Return microseconds of the host, and of the device (``graph_on_device_us``, ``graph_apart_us``)."""
    program, host, repeat = stage.program(case), stage.stored(case, 0), 1 if stage.emulate else 50
    kinds = {i["name"]: i["dtype"] for i in program.manifest["inputs"]}
    given = {n: DeviceArray.of(stage.session, a, kinds[n]) for n, a in host.items()}
    with stage.session.use() as driver:
        stream, program.graphs = driver.stream(), 0
        program.run(host)
        whole = spent_us(lambda: program.run(host), repeat)
        device = spent_us(lambda: program.run(given, stream=stream), repeat)
        driver.synchronize(stream)
        alone = host_us(stage, program, given)
        want, bound = program.run(given), program.bind(given, stream=stream)
        replay = spent_us(bound, repeat)
        program.graphs = GRAPHS
        kept = spent_us(lambda: program.run(given, bound.outputs, stream=stream), 2 + repeat)
        driver.synchronize(stream)
        same = all(np.array_equal(a.numpy(), want[n].numpy()) for n, a in bound().items())
    with allowing(early=False):
        apart = bound_us(stage, CudaProgram(program._artifact, session=stage.session), given)
    memory = graph_node_bytes(stage, CudaProgram(program._artifact, session=stage.session), given)
    count = sum(x.tasks > 0 for x in program.explain(**case["shapes"][0]).launches)
    return {
        "ok": same, "launches": count, "numpy_us": whole, "device_us": device, "host_program_us": alone,
        "us_per_launch": alone / max(count, 1), "bound_us": replay, "kept_us": kept,
        "graph_on_device_us": bound_us(stage, program, given), "graph_apart_us": apart,
        "graph_node_bytes": memory,
    }  # fmt: skip


def graph_node_bytes(stage: Stage, program: CudaProgram, feeds: dict[str, DeviceArray]) -> float:
    """Return the device memory per node of a cached graph; other use of the device would distort it.

    ``program`` has not run. Its graphs differ by the arrays that they write.
    """
    outputs = [program.run(feeds) for _ in range(GRAPHS)]
    with stage.session.use() as driver:
        before, _ = driver.memory()
        for out in outputs:
            for _ in range(2):  # recorded on the second call
                program.run(feeds, out)
        after, _ = driver.memory()
    return (before - after) / max(1, program.counters["graph_nodes"])


def timeline(stage: Stage) -> Iterator[Job]:
    """Time the launches of each model on the device."""
    for case in stage.cases_of("models"):
        yield f"{case['name']} {text(case['shapes'][-1])}", partial(profiled, stage, case)


def profiled(stage: Stage, case: Result) -> Result:
    """Profile the launches of a model at the last of its shapes."""
    program, host = stage.program(case), stage.stored(case, len(case["shapes"]) - 1)
    kinds = {i["name"]: i["dtype"] for i in program.manifest["inputs"]}
    whole = bound_us(stage, program, {n: DeviceArray.of(stage.session, a, kinds[n]) for n, a in host.items()})
    return {"us": whole, **launches(program, host, 1 if stage.emulate else 20)}


def launches(program: Any, host: Any, repeats: int) -> Result:
    """Return the device's time of every launch, and the kernels that take the largest part."""
    times = program.profile(host, repeats)
    total: dict[str, float] = {}
    for t in times:
        total[t.kernel] = total.get(t.kernel, 0.0) + t.nanoseconds / 1000
    longest = sorted(total.items(), key=lambda x: -x[1])[:6]
    return {
        "launches": len(times), "sum_of_launches_us": sum(total.values()),
        "longest": [f"{us:.1f} us in {sum(t.kernel == k for t in times)} of {k}" for k, us in longest],
        "launches_us": [round(t.nanoseconds / 1000, 2) for t in times],
    }  # fmt: skip
