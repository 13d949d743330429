"""The command ``polydyn``; ``python -m polydyn`` is the same. It imports nothing before Ctrl-C has its exit code."""

import atexit
import os
import signal
import sys

INTERRUPT_EXIT_CODE = 130
"""Exit code after Ctrl-C, as shells give it."""
AGAIN_SECONDS = 0.02
"""Seconds after which an interrupt that Python ignored is raised again."""


def start() -> None:
    """Run the command line of this process. Ctrl-C during the first imports ends it with 130 too."""
    codes: list[object] = []
    atexit.register(_end, codes)  # the first to be registered is the last to run
    sys.unraisablehook = _raise_again
    try:
        from polydyn.cli import main

        main()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        codes.append(INTERRUPT_EXIT_CODE)
        sys.exit(INTERRUPT_EXIT_CODE)
    except SystemExit as e:
        codes.append(e.code)
        raise


def _raise_again(ignored: "sys.UnraisableHookArgs") -> None:
    """Raise an interrupt again that Python ignores, as in a callback of an import; show other errors as Python does."""
    if not issubclass(ignored.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(ignored)
        return
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, AGAIN_SECONDS)


def _end(codes: list[object]) -> None:
    """End an interrupted process with its exit code. Python would end it by the signal if ``exec`` was interrupted."""
    if codes == [INTERRUPT_EXIT_CODE]:
        from contextlib import suppress

        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(INTERRUPT_EXIT_CODE)


if __name__ == "__main__":
    start()
