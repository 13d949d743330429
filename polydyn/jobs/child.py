"""One step of a job in a process of its own: ``python -m polydyn.jobs.child request.json``.

The request is plain data (see ``polydyn.jobs.work``); the result is written beside it, as ``result.json``. The process
dies with the worker that started it.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1


def main(request: Path) -> None:
    """Runs a request and writes its result; an error of polydyn is a result."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1:
        sys.exit("the worker is gone")
    from polydyn.errors import PolydynError

    said = json.loads(request.read_text(encoding="utf-8"))
    start = time.perf_counter()
    try:
        facts = tune_step(said) if said["step"] == "tune" else compile_step(said)
        result: dict[str, Any] = {"outcome": "done", "facts": facts}
    except PolydynError as e:
        result = {"outcome": "failed", "error": f"{type(e).__name__}: {e}", "facts": {}}
    usage = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    result["facts"] |= {"seconds": time.perf_counter() - start, "peak_bytes": max(usage) * 1024}
    partial = request.with_name("result.partial")
    partial.write_text(json.dumps(result), encoding="utf-8")
    partial.rename(request.with_name("result.json"))


def arguments_of(said: Any) -> Any:
    """``Arguments`` from the plain data of ``Arguments.to_json``, records by path."""
    from polydyn.compiler import Options
    from polydyn.program_cache import Arguments
    from polydyn.shapes.sizes import Sizes

    dims = {n: Sizes(**s) for n, s in said["dims"].items()}
    return Arguments(said["target"], dims, Options(**said["options"]), said["records"], said["symbols"])


def compile_step(said: Any) -> dict[str, Any]:
    """Writes the artifact; what the report says of it."""
    from polydyn.program_cache import cached_program

    program = cached_program(said["model"], arguments_of(said["arguments"]), threads=said["threads"])
    program.save(said["artifact"])
    return {
        "launches": len(program.launches),
        "kernels": program.kernel_count,
        "compilations": program.compilations,
        "artifact_bytes": os.path.getsize(said["artifact"]),
    }


def tune_step(said: Any) -> dict[str, Any]:
    """Adds to the shard of the records; what the report says of it."""
    import polydyn

    arguments = arguments_of(said["arguments"])
    groups = polydyn.tune(
        said["model"], said["shard"], target=arguments.target, dims=arguments.dims, threads=said["threads"],
        options=arguments.options, trials=said["tune"]["trials"], seed=said["tune"]["seed"],
        seen=[(dict(dims), count) for dims, count in said["tune"]["shapes"]], symbols=arguments.symbols,
    )  # fmt: skip
    sources = sorted({g.source for g in groups})
    return {"groups": len(groups), "measured": sum(g.measured for g in groups), "sources": sources}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
