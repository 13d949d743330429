"""The options shared by all commands that may compile, and functions that open their arguments."""

from __future__ import annotations

import difflib
import errno
import functools
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from polydyn.arguments import CODE, TRUST
from polydyn.backends.options import BF16, TF32X3, Options
from polydyn.cli.parsing import dim_sizes, named_axes, sizes
from polydyn.errors import InputError, MissingModelError
from polydyn.onnx_runtime import FALLBACK
from polydyn.schedules.handmade.document import read_schedules
from polydyn.shapes.sizes import Sizes

if TYPE_CHECKING:
    from onnx import ModelProto

    from polydyn.graph.importer import ModelLike
    from polydyn.logs import Report
    from polydyn.runtime.artifact import Artifact
    from polydyn.runtime.program import Program

    _ParamType = click.ParamType[str]
else:
    _ParamType = click.ParamType  # not generic before click 8.3

DIM_HELP = "Sizes of a dim: L=8:512:8 for multiples of 8, L=1:512@128,384 (or @128:0.6,384:0.4) for likely sizes."
TRUST_HELP = "Of a saved program, run its machine code, or what the compiler builds from its C text here."
SYMBOL_HELP = "Symbols for axes to which the model gives fixed sizes; _ for an axis that keeps its size."
DIFFERENT = 3
"""Exit code of a command that worked, but found a difference or a failed job. 1 is an error, 2 is wrong usage."""


class Listed(_ParamType):
    """A name of a list in the compiler, which is imported when a name is given: ``pass`` or ``strategy``."""

    def __init__(self, name: str) -> None:
        self.name = name

    def names(self) -> list[str]:
        """Return all names."""
        if self.name == "pass":
            from polydyn.fusion.pipeline import NAMES

            return sorted(NAMES)
        from polydyn.search.strategies import STRATEGIES

        return sorted(STRATEGIES)

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the name. UsageError: it is unknown; the message names a similar one, or all."""
        if value == Options.strategy or value in (names := self.names()):
            return value
        near = difflib.get_close_matches(value, names, 1)
        remedy = f"did you mean {near[0]}?" if near else f"one of {', '.join(names)}"
        raise click.BadParameter(f"unknown {self.name} {value!r}; {remedy}", ctx, param)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Return the names that begin with a text."""
        return [CompletionItem(n) for n in self.names() if n.startswith(incomplete)]


PASS, STRATEGY = Listed("pass"), Listed("strategy")


@dataclass(frozen=True)
class CompileSettings:
    """The arguments of ``polydyn.compile``."""

    target: str = "cpu"
    dims: tuple[tuple[str, Sizes], ...] = ()
    threads: int | None = None
    without: tuple[str, ...] = ()
    strategy: str = Options.strategy
    tf32: bool = False
    fallback: str | None = None
    precision: str | None = None
    winograd: int = Options.winograd
    records: str | None = None
    symbols: tuple[tuple[str, tuple[str | None, ...]], ...] = ()
    schedules: tuple[str, ...] = ()
    no_cache: bool = False
    trust: str = CODE

    @property
    def options(self) -> Options:
        """The options that change the program."""
        return Options(frozenset(self.without), self.strategy, self.tf32, self.fallback, self.precision, self.winograd)

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of ``polydyn.compile`` other than the model and the threads."""
        return {
            "target": self.target, "dims": dict(self.dims), "options": self.options, "records": self.records,
            "symbols": dict(self.symbols), "schedules": read_schedules(self.schedules),
        }  # fmt: skip

    def compile(self, model: str) -> Program:
        """Compile a model file, with progress on the terminal."""
        from polydyn.cli.progress import compiling

        with compiling(f"compiling {Path(model).name}") as report:
            read, arguments = self.read(model)
            return self.compile_model(read, arguments, report)

    def read(self, path: str) -> tuple[str | ModelProto, dict[str, Any]]:
        """Return what is compiled for a path, and its arguments: the path, or the model of a folder of Hugging Face's
        transformers."""
        if not os.path.isdir(path):
            return path, self.arguments
        from polydyn.origins.pretrained import folder_model

        return folder_model(path, self.arguments)

    def compile_model(
        self, model: ModelLike, arguments: dict[str, Any] | None = None, report: Report | None = None
    ) -> Program:
        """Compile a model, by ``arguments`` in place of one's own: those that ``read`` returned."""
        from polydyn.program_cache import compile as compile_model

        chosen = self.arguments if arguments is None else arguments
        return compile_model(model, threads=self.threads, cache=not self.no_cache, report=report, **chosen)

    @property
    def foreign(self) -> bool:
        """Whether this machine lacks the target's architecture or features, so that its programs do not open here."""
        from polydyn.build.compiler import why_elsewhere

        return bool(why_elsewhere(self.target))

    def write(self, model: str, output: str) -> Artifact:
        """Compile a model file to an artifact file without opening it."""
        from polydyn.cli.progress import compiling
        from polydyn.compiler import compile_to  # loads all passes
        from polydyn.logs import reporting

        with compiling(f"compiling {Path(model).name} for {self.target}") as report, reporting(report):
            read, arguments = self.read(model)
            return compile_to(output, read, threads=self.threads, **arguments)[0]

    def open(self, path: str) -> Program:
        """Open an artifact, or compile a model (fast if the cache has its program).

        InputError: options for compilation are combined with an artifact.
        """
        from polydyn.runtime.artifact import is_artifact
        from polydyn.runtime.opening import load

        if not os.path.exists(path):
            remedy = "give the path of a saved program, of an .onnx file, or of a folder of Hugging Face's transformers"
            raise MissingModelError(f"cannot read {path}: {os.strerror(errno.ENOENT)}", remedy=remedy)
        if not is_artifact(path):
            return self.compile(path)
        program = load(path, threads=self.threads, trust=self.trust)
        self.check_saved(path, program.manifest["target"])
        return program

    def check_saved(self, path: str, target: str) -> None:
        """Raise InputError if options for compilation are combined with an artifact, which is for ``target``."""
        changed = replace(self, threads=None, target="cpu", no_cache=False, trust=CODE) != CompileSettings()
        if changed or self.target not in ("cpu", target):
            raise InputError(
                f"{path} is already compiled, for {target}",
                rule="--dim, --symbol, --without, --records, --schedules, --strategy, --tf32, --precision, --winograd, "
                "--fallback, --target are for models",
                remedy="leave them out, or give the model",
            )


def of_machine(f: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a command with the options of ``CompileSettings``; they become its argument ``settings``."""

    @functools.wraps(f)
    def command(*args: Any, **values: Any) -> Any:
        fields = CompileSettings.__dataclass_fields__.items()
        settings = CompileSettings(**{name: values.pop(name, f.default) for name, f in fields})
        return f(*args, settings=settings, **values)

    option, default = click.option, Options.strategy
    wrapped: Callable[..., Any] = command
    for add in (
        option("--records", help="A record file of polydyn tune; it chooses the tiles."),
        option("--schedules", multiple=True, help="A file of schedules of polydyn.explore; repeatable."),
        option("--fallback", type=click.Choice([FALLBACK]), help="Run unsupported nodes there, with a warning."),
        option("--tf32", is_flag=True, help="On CUDA, float32 products on tensor cores; operands rounded to 10 bits."),
        option(
            "--precision",
            type=click.Choice([BF16, TF32X3]),
            help="Products with rounded operands: bf16 on a CPU, 3xtf32 on CUDA.",
        ),
        option(
            "--winograd",
            type=int,
            default=Options.winograd,
            show_default=True,
            help="Side in pixels of the tiles of 3x3 convolutions; 4 is faster and less exact.",
        ),
        option("--no-cache", is_flag=True, help="Compile a model even if the cache has its program."),
        option("--strategy", default=default, show_default=True, type=STRATEGY, help="Use this strategy's records."),
        option("--threads", type=click.IntRange(1, 256), help="Threads per call; default: all cores."),
        option("--target", default="cpu", show_default=True, help="cpu, cpu:avx2, cpu:neon, cuda:sm_80 ..."),
        option("--without", type=PASS, multiple=True, help="A pass to leave out, as in stitch; repeatable."),
        option("--symbol", "symbols", type=named_axes, metavar="input_ids=B,L", multiple=True, help=SYMBOL_HELP),
        option("--dim", "dims", type=dim_sizes, metavar="B=1:64", multiple=True, help=DIM_HELP),
    ):
        wrapped = add(wrapped)
    return wrapped


def of_program(f: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a command that opens a saved program or compiles a model: the options of ``of_machine`` and --trust."""
    return click.option("--trust", type=click.Choice(TRUST), default=CODE, show_default=True, help=TRUST_HELP)(
        of_machine(f)
    )


SHAPES = click.option("--shape", "shapes", type=sizes, metavar="B=1,L=8", required=True, multiple=True,
                      help="Sizes for generated inputs; may be repeated.")  # fmt: skip
as_json = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
