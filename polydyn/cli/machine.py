"""The options shared by all commands that may compile, and functions that open their arguments."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import click

from polydyn.backends.options import BF16, TF32X3, Options
from polydyn.build.compiler import why_elsewhere
from polydyn.cli.inputs import dim_sizes, named_axes
from polydyn.cli.progress import working
from polydyn.compiler import compile_to
from polydyn.errors import InputError
from polydyn.fusion.pipeline import NAMES
from polydyn.graph.importer import ModelLike
from polydyn.onnx_runtime import FALLBACK
from polydyn.program_cache import compile as compile_model
from polydyn.runtime.artifact import Artifact, is_artifact
from polydyn.runtime.opening import load
from polydyn.runtime.program import Program
from polydyn.search.strategies import STRATEGIES
from polydyn.shapes.sizes import Sizes

DIM_HELP = "Sizes of a dim: L=8:512:8 for multiples of 8, L=1:512@128,384 (or @128:0.6,384:0.4) for likely sizes."
SYMBOL_HELP = "Symbols for axes to which the model gives fixed sizes; _ for an axis that keeps its size."
DIFFERENT = 3
"""Exit code of a command that worked, but found a difference or a failed job. 1 is an error, 2 is wrong usage."""


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
    no_cache: bool = False

    @property
    def options(self) -> Options:
        """The options that change the program."""
        return Options(frozenset(self.without), self.strategy, self.tf32, self.fallback, self.precision, self.winograd)

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of ``polydyn.compile`` other than the model and the threads."""
        return {
            "target": self.target, "dims": dict(self.dims), "options": self.options, "records": self.records,
            "symbols": dict(self.symbols),
        }  # fmt: skip

    def compile(self, model: str) -> Program:
        """Compile a model file, with progress on the terminal."""
        with working(f"compiling {model}"):
            return self.compile_model(model)

    def compile_model(self, model: ModelLike) -> Program:
        """Compile a model."""
        return compile_model(model, threads=self.threads, cache=not self.no_cache, **self.arguments)

    @property
    def foreign(self) -> bool:
        """Whether this machine lacks the target's architecture or features, so that its programs do not open here."""
        return bool(why_elsewhere(self.target))

    def write(self, model: str, output: str) -> Artifact:
        """Compile a model file to an artifact file without opening it."""
        with working(f"compiling {model} for {self.target}"):
            return compile_to(output, model, threads=self.threads, **self.arguments)[0]

    def open(self, path: str) -> Program:
        """Open an artifact, or compile a model (fast if the cache has its program).

        InputError: options for compilation are combined with an artifact.
        """
        if not is_artifact(path):
            return self.compile(path)
        program = load(path, threads=self.threads)
        changed = replace(self, threads=None, target="cpu", no_cache=False) != CompileSettings()
        if changed or self.target not in ("cpu", program.manifest["target"]):
            raise InputError(
                f"{path} is already compiled, for {program.manifest['target']}",
                rule="--dim, --symbol, --without, --records, --strategy, --tf32, --precision, --winograd, --fallback, "
                "--target are for models",
                remedy="leave them out, or give the model",
            )
        return program


def of_machine(f: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a command with the options of ``CompileSettings``; they become its argument ``settings``."""

    @functools.wraps(f)
    def command(*args: Any, **values: Any) -> Any:
        settings = CompileSettings(**{name: values.pop(name) for name in CompileSettings.__dataclass_fields__})
        return f(*args, settings=settings, **values)

    option, default, strategies = click.option, Options.strategy, click.Choice(sorted(STRATEGIES))
    wrapped: Callable[..., Any] = command
    for add in (
        option("--records", help="A record file of polydyn tune; it chooses the tiles."),
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
        option("--strategy", default=default, show_default=True, type=strategies, help="Use this strategy's records."),
        option("--threads", type=click.IntRange(1, 256), help="Threads per call; default: all cores."),
        option("--target", default="cpu", show_default=True, help="cpu, cpu:avx2, cpu:neon, cuda:sm_80 ..."),
        option("--without", type=click.Choice(NAMES), multiple=True, help="A fusion pass to leave out, as in stitch."),
        option("--symbol", "symbols", type=named_axes, metavar="input_ids=B,L", multiple=True, help=SYMBOL_HELP),
        option("--dim", "dims", type=dim_sizes, metavar="B=1:64", multiple=True, help=DIM_HELP),
    ):
        wrapped = add(wrapped)
    return wrapped


as_json = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")


def print_json(data: Any) -> None:
    """Print one line of JSON to standard output."""
    print(json.dumps(data, ensure_ascii=False))
