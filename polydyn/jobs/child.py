"""One step of a job in its own process: ``python -m polydyn.jobs.child request.json``.

The request is plain data (see ``polydyn.jobs.work``); the result is written next to it as ``result.json``. The process
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
    """Run a request and write its result; a PolydynError is a result too."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1:
        sys.exit("the worker is gone")
    from polydyn.errors import PolydynError

    data = json.loads(request.read_text(encoding="utf-8"))
    start = time.perf_counter()
    try:
        facts = tune_step(data) if data["step"] == "tune" else compile_step(data)
        result: dict[str, Any] = {"outcome": "done", "facts": facts}
    except PolydynError as e:
        result = {"outcome": "failed", "error": f"{type(e).__name__}: {e}", "facts": {}}
    usage = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    result["facts"] |= {"seconds": time.perf_counter() - start, "peak_bytes": max(usage) * 1024}
    partial = request.with_name("result.partial")
    partial.write_text(json.dumps(result), encoding="utf-8")
    partial.rename(request.with_name("result.json"))


def compile_step(data: Any) -> dict[str, Any]:
    """Write the artifact; return the facts for the report."""
    from polydyn.build.compiler import why_elsewhere
    from polydyn.program_cache import cached_program
    from polydyn.program_key import Arguments

    arguments = Arguments.from_json(data["arguments"])
    if why_elsewhere(arguments.target):
        return _cross_compile(data, vars(arguments))
    program = cached_program(data["model"], arguments, threads=data["threads"])
    program.save(data["artifact"])
    return {
        "launches": len(program.launches),
        "kernels": program.kernel_count,
        "compilations": program.compilations,
        "artifact_bytes": os.path.getsize(data["artifact"]),
    }


def _cross_compile(data: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Write the artifact of a target that does not run on this machine, as ``polydyn compile`` does."""
    from polydyn.compiler import compile_to

    artifact, compiled = compile_to(data["artifact"], data["model"], threads=data["threads"], **arguments)
    manifest = artifact.manifest
    return {
        "launches": len(manifest["launches"]), "kernels": len(manifest["kernels"]), "compilations": compiled,
        "artifact_bytes": os.path.getsize(data["artifact"]),
    }  # fmt: skip


def tune_step(data: Any) -> dict[str, Any]:
    """Add records to the shard; return the facts for the report."""
    import polydyn
    from polydyn.program_key import Arguments

    arguments = Arguments.from_json(data["arguments"])
    groups = polydyn.tune(
        data["model"], data["shard"], target=arguments.target, dims=arguments.dims, threads=data["threads"],
        options=arguments.options, trials=data["tune"]["trials"], seed=data["tune"]["seed"],
        seen=[(dict(dims), count) for dims, count in data["tune"]["shapes"]], symbols=arguments.symbols,
    )  # fmt: skip
    sources = sorted({g.source for g in groups})
    return {"groups": len(groups), "measured": sum(g.measured for g in groups), "sources": sources}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
