"""The process that compiles a model while another implementation answers calls (``quick_start``)."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import IO

from polydyn.errors import PolydynError
from polydyn.program_cache import compile as compile_cached
from polydyn.program_key import Arguments

NICENESS = 5
"""Niceness of the compiling process: calls of the stand-in come first."""
INTERRUPTS, INTERRUPT_SECONDS = 3, 2.0
"""How often the compiling process is interrupted before it is ended, and the seconds between."""


def child(pipe: IO[bytes]) -> None:
    """Compile the requested model in this process. It is interrupted when the other end of the pipe is closed."""
    line = pipe.readline()
    if not line:  # the other process has ended
        return
    request = json.loads(line)
    path = Path(request["program"])
    signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be ignored in the other process
    threading.Thread(target=_end_with, args=(pipe.fileno(), path.parent), daemon=True).start()
    os.nice(NICENESS)
    try:
        arguments = vars(Arguments.from_json(request["arguments"]))
        program = compile_cached(request["model"], threads=request["threads"], cache=request["cache"], **arguments)
        program.save(path, with_threads=False)
    except PolydynError as e:
        path.with_name("error.txt").write_text(f"{type(e).__name__}: {e}")
    except KeyboardInterrupt:
        shutil.rmtree(path.parent, ignore_errors=True)


def _end_with(pipe: int, folder: Path) -> None:
    """Interrupt this process when the other end of the pipe is closed, so that it stops its compilers; then end it."""
    os.read(pipe, 1)  # not a buffered read, whose lock would stop the end of this process
    for _ in range(INTERRUPTS):  # libraries may swallow one
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(INTERRUPT_SECONDS)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)
