"""The command ``polydyn``: its commands by name, its errors and its exit codes.

This module imports click only. The module of a command is imported when it is called, so that ``polydyn --help`` and
the completion of a shell are quick. A PolydynError is printed without a traceback and gives exit code 1, Ctrl-C gives
130; ``--debug`` shows the traceback. Exit codes: docs/cli.md.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import click
from click.shell_completion import CompletionItem

import polydyn

COMMANDS = {
    "batch": ("batch", "Run offline jobs from a YAML or JSON file."),
    "bench": ("bench", "Compare the time of MODEL with other runtimes."),
    "cache": ("cache", "Show or empty the cache of compiled code."),
    "compare": ("compare", "Compare the outputs and times of two programs."),
    "compile": ("programs", "Compile MODEL into an artifact."),
    "completion": ("group", "Print the completion script of a shell."),
    "doctor": ("programs", "Show what this machine offers."),
    "dump": ("dump", "Write every stage of a compilation into a folder."),
    "explain": ("programs", "Show which kernels run at a shape, and why."),
    "extract": ("extract", "Write the files that C and C++ programs need."),
    "fuzz": ("fuzz", "Compare random models with ONNX Runtime."),
    "generate": ("generate", "Continue a text with the model of a folder."),
    "inspect": ("programs", "Show inputs, outputs, guards and kernels."),
    "minimise": ("minimise", "Find the smallest part of a model that fails."),
    "profile": ("programs", "Show the time of every kernel at a shape."),
    "quantize": ("quantize", "Round the weights of MODEL to 4 or 8 bits."),
    "records": ("records", "Show, merge, copy and thin record files."),
    "run": ("programs", "Run a program or a model once."),
    "to-half": ("quantize", "Store MODEL in 16-bit floats."),
    "trace": ("compare", "Record when each thread worked on which launch."),
    "try": ("trying", "Say whether MODEL is right and faster here."),
    "tune": ("tune", "Search the fastest tiles on this machine."),
    "verify": ("compare", "Compare a program with a reference."),
}
"""Maps a command to its module in this folder and its line in ``polydyn --help``."""
EXAMPLES = """\b
Examples:
  polydyn try bert.onnx -o report.html
  polydyn compile bert.onnx -o bert.polydyn --dim B=1:64
  polydyn run bert.polydyn --shape B=4,L=61
  polydyn explain bert.polydyn --shape B=4,L=61 --html page.html
  polydyn tune bert.onnx --records bert.db
"""
MACHINE_ERRORS = (
    errno.EACCES, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC,
    errno.EPERM, errno.EPIPE, errno.EROFS,
)  # fmt: skip
"""Errors of the machine: what a command was given may be right, and no traceback helps."""
MACHINE_REMEDY = "free space or choose another folder for outputs, TMPDIR and POLYDYN_CACHE"
INTERRUPT_EXIT_CODE = 130
"""Exit code after Ctrl-C, as shells give it."""


class Commands(click.Group):
    """The group of commands. It imports a command's module when the command is named.

    ``shown``: the error whose traceback ends the process.
    """

    shown: BaseException | None = None

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands."""
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """Import a command."""
        if name in COMMANDS:
            import_module(f"polydyn.cli.{COMMANDS[name][0]}")
        return super().get_command(ctx, name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in sorted(COMMANDS.items())])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return the commands, or the options, that begin with a text."""
        found = [CompletionItem(n, help=t) for n, (_, t) in COMMANDS.items() if n.startswith(incomplete)]
        return found + click.Command.shell_complete(self, ctx, incomplete)

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run a command line. As a process (``standalone_mode``) it ends with an exit code of docs/cli.md."""
        run: Callable[..., Any] = super().main
        if not extra.pop("standalone_mode", True):
            return run(*args, standalone_mode=False, **extra)
        _replace_closed_streams()
        try:
            code = run(*args, standalone_mode=False, **extra)
            sys.stdout.flush()  # a full disk behind standard output is an error of the command
        except click.ClickException as e:
            e.show()
            code = e.exit_code
        except (KeyboardInterrupt, click.Abort, OSError) as e:
            code = None if e is self.shown else _ended_by(e)
            if code is None:
                raise
        sys.exit(code if isinstance(code, int) else 0)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. An error of polydyn or of the machine and Ctrl-C end it with a line on standard error."""
        try:
            return super().invoke(ctx)
        except (KeyboardInterrupt, Exception) as e:
            code = None if ctx.params.get("debug") else _ended_by(e)
            if code is None:
                self.shown = e
                raise
            ctx.exit(code)


def _replace_closed_streams() -> None:
    """Open the streams that were closed before the process began, so that no file gets their numbers."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            with contextlib.suppress(OSError):
                opened = os.open(os.devnull, os.O_RDWR)
                if opened != number:
                    os.dup2(opened, number)
                    os.close(opened)
                setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w", encoding="utf-8", closefd=False))


def _ended_by(error: BaseException) -> int | None:
    """Print the line for an error that ends a command, and return its exit code. None: it needs its traceback."""
    from polydyn.errors import PolydynError

    if was_interrupted(error) or isinstance(error, click.Abort):
        print("interrupted", file=sys.stderr)
        return INTERRUPT_EXIT_CODE
    if isinstance(error, PolydynError):
        print(f"error ({type(error).__name__}): {error}", file=sys.stderr)
        return 1
    if not isinstance(error, OSError) or error.errno not in MACHINE_ERRORS:
        return None
    _abandon_output()
    if error.errno != errno.EPIPE:  # the reader of a pipe that ended needs no message
        place = f"{error.filename}: " if error.filename is not None else ""
        print(f"error (OSError): {place}{error.strerror}\n  remedy: {MACHINE_REMEDY}", file=sys.stderr)
    return 1


def _abandon_output() -> None:
    """Close standard output without writing what it still holds, so that the end of the process raises no error."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def was_interrupted(error: BaseException | None) -> bool:
    """Whether Ctrl-C is the error or its origin: a library that was interrupted may raise another error."""
    seen: set[int] = set()  # the origins of an error that is raised again may form a circle
    while error is not None and id(error) not in seen:
        if isinstance(error, KeyboardInterrupt):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


@click.group(cls=Commands, epilog=EXAMPLES, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.version_option(polydyn.__version__, "-V", "--version", prog_name="polydyn")
def main(debug: bool) -> None:
    """Compile an ONNX model once, for every shape."""


@main.command()
@click.argument("shell", type=click.Choice(("bash", "zsh", "fish")))
def completion(shell: str) -> None:
    """Print the completion script of a shell: eval "$(polydyn completion bash)"."""
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None
    print(kind(main, {}, "polydyn", "_POLYDYN_COMPLETE").source())
