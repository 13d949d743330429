"""BERT-base and GPT-2 in float16 at random shapes, compiled once, compared with torch: eager, and Inductor (dynamic).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from benchmarks.gpu import twins
from benchmarks.gpu.compare import bound_us, host_us
from benchmarks.gpu.costs import launches
from benchmarks.gpu.processes import Job, patiently
from benchmarks.gpu.stage import Result, Stage, text, torch_error, torch_times
from polydyn.gpu.errors import DeviceLostError
from polydyn.runtime.cuda.array import DeviceArray

COMPILING = 120.0
"""Maximum seconds of a first call of torch."""
EACH = 5
"""Number of consecutive torch calls that are timed."""


def real(stage: Stage) -> Iterator[Job]:
    """Measure ours and eager torch at every shape; then Inductor, whose compilation takes long."""
    cases = stage.cases_of("real")
    if stage.emulate:
        return
    for rival in ("torch", "inductor"):
        for case in cases:
            theirs = functools.cache(partial(function, stage, case["name"], rival))
            for shape in case["shapes"]:
                name = f"{case['name']} {text(shape)} {rival}"
                yield name, partial(compare, stage, case, shape, rival, theirs)
    for case in cases:
        yield f"{case['name']} launches", partial(profiled, stage, case)


def device_inputs(stage: Stage, case: Result, shape: Mapping[str, int]) -> dict[str, DeviceArray]:
    """Return inputs on the device."""
    host = twins.inputs(twins.CONFIGS[case["name"]], shape["B"], shape["L"])
    return {n: DeviceArray.of(stage.session, a) for n, a in host.items()}


def function(stage: Stage, name: str, rival: str) -> Callable[..., Any]:
    """Return the model in torch, with the program's weights."""
    torch, c = stage.torch, twins.CONFIGS[name]
    tensors = {n: torch.from_numpy(a).cuda() for n, a in twins.parameters(c, "float16").items()}
    made: Callable[..., Any] = twins.function(torch, c, tensors)
    return torch.compile(made, dynamic=True) if rival == "inductor" else made


def compare(
    stage: Stage, case: Result, shape: Mapping[str, int], rival: str, theirs: Callable[[], Callable[..., Any]]
) -> Result | None:
    """Compare one shape: by graphs (``us``), and by consecutive calls, which include the host's work (``call_us``)."""
    if rival == "inductor" and stage.torch is None:
        return None
    program, arrays = stage.program(case), device_inputs(stage, case, shape)
    got = next(iter(program.run(arrays).values()))
    out: Result = {"us": bound_us(stage, program, arrays), "host_us": host_us(stage, program, arrays)}
    out["call_us"] = max(out["us"], out["host_us"])
    if stage.torch is None:
        return out
    try:
        out |= torchs(stage, case, arrays, got, rival, theirs())
        out[f"over_{rival}"] = out[f"{rival}_us"] / out["us"]
        out[f"calls_over_{rival}"] = out[f"{rival}_call_us"] / out["call_us"]
    except DeviceLostError:
        raise
    except Exception as e:  # another compiler's failure is a remark
        out["message"] = f"{rival}: {type(e).__name__}: {e}"
    return out


def torchs(
    stage: Stage, case: Result, arrays: Mapping[str, DeviceArray], got: Any, rival: str, theirs: Callable[..., Any]
) -> Result:
    """Return whether the results agree, and torch's times."""
    torch = stage.torch
    tensors = [torch.from_dlpack(a) for a in arrays.values()]
    with torch.no_grad():
        start = time.perf_counter()
        with patiently(COMPILING):
            want = theirs(*tensors)
        torch.cuda.synchronize()
        first = time.perf_counter() - start
        wrong = torch_error(torch, torch.from_dlpack(got), want)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(EACH):
            theirs(*tensors)
        end.record()
        torch.cuda.synchronize()
        call = begin.elapsed_time(end) * 1000 / EACH
        out: Result = {"error": wrong, "ok": bool(wrong <= case["limit"]), f"{rival}_call_us": call}
        us = torch_times(torch, [partial(theirs, *tensors)], rounds=3).median * 1e6
    return out | {f"{rival}_us": us, f"{rival}_first_s": first}


def profiled(stage: Stage, case: Result) -> Result:
    """Profile the model at (8, 512)."""
    host = twins.inputs(twins.CONFIGS[case["name"]], 8, 512)
    return launches(stage.program(case), host, 5)
