"""The work of a worker for a step: a folder, a process with limits, and the files for the answer.

Requests and answers are plain data, so a worker needs only polydyn and none of the client's objects. Files are passed
by path if worker and client share a file system, otherwise by content.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

LOG = 20_000
"""Number of last characters of a step's output that are kept."""


def execute(request: dict[str, Any]) -> dict[str, Any]:
    """Run one attempt at a step.

    ``request``: ``step`` (compile or tune), ``model`` (a path), ``arguments``, ``threads``, ``tune``, ``timeout``
    (seconds or None), ``memory`` (bytes or None), and either ``folder`` (shared with the client; the answer's files
    stay there) or ``files`` (name -> content, for ``model`` and ``records`` relative to the folder). The answer has
    ``outcome`` (done, failed, timeout, memory, died), ``error``, ``facts``, ``log``, ``worker``, and if the request has
    ``files``, the written ``files``.
    """
    shared = request.get("folder")
    folder = Path(shared) if shared else Path(tempfile.mkdtemp(prefix="polydyn-job-"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        answer = _attempt(folder, request)
        if not shared:
            written = (folder / name for name in ("artifact", "shard"))
            answer["files"] = {p.name: p.read_bytes() for p in written if p.exists()}
        return answer | {"worker": f"{socket.gethostname()}:{os.getpid()}"}
    finally:
        if not shared:
            shutil.rmtree(folder, ignore_errors=True)


def _attempt(folder: Path, request: dict[str, Any]) -> dict[str, Any]:
    data = dict(request)
    for name, content in data.pop("files", {}).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    data |= {"artifact": str(folder / "artifact"), "shard": request.get("shard") or str(folder / "shard")}
    file, result = folder / "request.json", folder / "result.json"
    result.unlink(missing_ok=True)
    file.write_text(json.dumps(data), encoding="utf-8")
    with (folder / "log.txt").open("wb") as log:
        child = subprocess.Popen(
            [sys.executable, "-m", "polydyn.jobs.child", str(file)], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            cwd=folder, start_new_session=True, env=_environment(),
        )  # fmt: skip
        ended = _watch(child, request.get("timeout"), request.get("memory"))
    text = (folder / "log.txt").read_text(encoding="utf-8", errors="replace")[-LOG:]
    if ended is None and result.exists():
        answer: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
        return {"error": "", "log": text} | answer
    outcome, error = ended or ("died", f"the process ended with code {child.returncode}")
    return {"outcome": outcome, "error": error, "log": text, "facts": {}}


def _environment() -> dict[str, str]:
    """Return this process's environment, with its module search path."""
    paths = [p for p in sys.path if p]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


def _watch(child: subprocess.Popen[bytes], timeout: float | None, memory: int | None) -> tuple[str, str] | None:
    """Wait for a process and kill its group if it exceeds a limit. Return the outcome, or None if it ended itself."""
    start, pause = time.monotonic(), 0.01
    try:
        while True:
            try:
                child.wait(pause)
                return None
            except subprocess.TimeoutExpired:
                pause = min(pause * 2, 0.2)
            if timeout is not None and time.monotonic() - start > timeout:
                return "timeout", f"took longer than {timeout:g} s"
            if memory is not None and (used := resident_bytes(child.pid)) > memory:
                return "memory", f"took {used / 1e6:.0f} MB, more than {memory / 1e6:.0f} MB"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def resident_bytes(session: int) -> int:
    """Return the resident memory in bytes of all processes of a session."""
    total = 0
    for entry in os.listdir("/proc"):
        if not entry.isdecimal():
            continue
        with contextlib.suppress(OSError, IndexError, ValueError):
            fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == session:
                total += int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
    return total
