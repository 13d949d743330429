"""A process that has imported the compiler and forks for each compiling process of the provider, to save imports.

The provider starts a small stub, which hands its socket, its log, its environment and its code to the server.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

STUB = """
import json, os, socket
link = socket.socket(socket.AF_UNIX)
link.connect({path!r})
socket.send_fds(link, [json.dumps([dict(os.environ), {code!r}]).encode()], [0, 2])
for k in (0, 1, 2):
    os.close(k)
link.recv(1)
"""
"""The stub ends when the forked process, which holds the other end of the link, has ended."""


@cache
def server() -> str:
    """Start the server once; return the path of its socket."""
    folder = tempfile.TemporaryDirectory(prefix="polydyn-server-")
    path = str(Path(folder.name, "s"))
    code = f"import sys; sys.path[:] = {sys.path!r}; from tests.support.compile_server import serve; serve({path!r})"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout and process.stdout.read(1) == b"."

    def stop() -> None:
        process.kill()
        process.wait()
        folder.cleanup()

    atexit.register(stop)
    return path


def stub(code: str) -> str:
    """Return the code of a process that lets the server run ``code``."""
    return STUB.format(path=server(), code=code)


def serve(path: str) -> None:
    """Fork a process for every request, until this process is killed."""
    import polydyn.compiler
    import polydyn.ort.partition
    import polydyn.ort.program_file
    import polydyn.ort.settings
    import polydyn.ort.worker
    import polydyn.session.options  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    os.write(1, b".")
    while True:
        link, _ = listener.accept()
        data, files, _, _ = socket.recv_fds(link, 1 << 20, 2)
        if os.fork() == 0:
            _run(data, files)
        for end in (link.detach(), *files):
            os.close(end)


def _run(data: bytes, files: list[int]) -> None:
    """Run the code of a request in the place of the stub."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    environment, code = json.loads(data)
    os.environ.clear()
    os.environ.update(environment)
    os.dup2(files[0], 0)
    os.dup2(files[1], 1)
    os.dup2(files[1], 2)
    for end in files:
        os.close(end)
    try:
        exec(code, {"__name__": "__main__"})
    except SystemExit as e:
        os.write(2, str(e).encode())
    finally:
        os._exit(1)
