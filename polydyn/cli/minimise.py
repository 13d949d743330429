"""``polydyn minimise``: find the smallest part of a model with the same failure as the whole.

Delta debugging over nodes: parts of the node list are left out, first halves, finally single nodes. An outside tensor
that a part reads becomes an input with the type from ONNX's shape inference. An unread tensor becomes an output.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import onnx

from polydyn.build.cache import writable, write_atomically
from polydyn.cli.group import main
from polydyn.cli.inputs import feeds_for
from polydyn.cli.machine import CompileSettings, as_json, of_machine
from polydyn.cli.output import answer, keep_source
from polydyn.cli.parsing import sizes
from polydyn.cli.progress import working
from polydyn.errors import InputError, ModelError, PolydynError
from polydyn.runtime.artifact import is_artifact
from polydyn.verification import verify_model

Failure = Callable[[onnx.ModelProto], "str | None"]
"""Returns the failure of a model as text that is equal for equal failures, or None if it does not fail."""
NAMES = ("compile", "run", "differs", "crash", "command")
SECONDS = 120
"""Time limit in seconds of one trial in a separate process."""


@main.command()
@click.argument("model")
@click.option("--failure", required=True, type=click.Choice(NAMES), help="Kind of failure: an error of polydyn when it "
              "compiles or runs, results that differ from the reference, a crash, or --command.")  # fmt: skip
@click.option("--command", metavar="'CMD {}'", help="A model fails if CMD exits with the same nonzero code; {} is the "
              "model file.")  # fmt: skip
@click.option("--match", default="", help="A text that the error must contain.")
@click.option("--shape", type=sizes, metavar="B=1,L=8", help="Sizes of generated inputs, for run, differs and crash.")
@click.option(
    "--tries", default=400, show_default=True, type=click.IntRange(1), help="Maximum number of models to try."
)
@click.option("-o", "--output", required=True, type=click.Path(dir_okay=False, path_type=Path), help="The model file.")
@as_json
@of_machine
def minimise(
    model: str, failure: str, command: str | None, match: str, shape: dict[str, int] | None, tries: int,
    output: Path, as_json: bool, settings: CompileSettings,
) -> None:  # fmt: skip
    """Write the smallest part of MODEL with the same failure; exit code 1 if MODEL does not have it."""
    if (failure == "command") != bool(command):
        raise click.UsageError("--failure command and --command belong together")
    keep_source(model, output)
    if is_artifact(model):
        raise InputError(f"{model} is a saved program", rule="minimise needs the graph", remedy="give the .onnx file")
    whole = _read(model)
    fails = _failure(failure, settings, shape or {}, command or "", match)
    expected = fails(whole)
    if expected is None:
        message = f"{model} does not fail in this way"
        raise InputError(message, rule=f"--failure {failure}", remedy="name another failure")
    with working("minimising", tries) as step:
        search = Search(whole, fails, expected, tries, step)
        nodes = search.smallest()
    with writable(output):
        write_atomically(output, search.part(nodes).SerializeToString())
    facts = {"output": str(output), "nodes": len(nodes), "of": len(whole.graph.node), "tries": search.tried}
    left = "" if search.tried < tries else "; --tries ended the search"
    line = f"{output}: {len(nodes)} of {facts['of']} nodes, {search.tried} models tried{left}"
    answer(as_json, facts | {"failure": expected}, line, f"failure: {expected}")


def _read(path: str) -> onnx.ModelProto:
    try:
        return onnx.load(path)
    except Exception as e:  # the errors of onnx and protobuf have no common base class
        raise ModelError(f"cannot read {path}: {e}", remedy="give the path of an .onnx file") from e


class Search:
    """Delta debugging (Zeller and Hildebrandt, ddmin) over the nodes of a model."""

    def __init__(
        self, model: onnx.ModelProto, fails: Failure, expected: str, tries: int, say: Callable[[str], None]
    ) -> None:
        """``say`` is called before each model is tried."""
        self.model, self.fails, self.expected, self.tries, self.tried, self.say = model, fails, expected, tries, 0, say
        try:
            inferred = onnx.shape_inference.infer_shapes(model)
        except Exception:  # if shape inference rejects a model, its declared types are used
            inferred = model
        typed = (*inferred.graph.value_info, *inferred.graph.input, *inferred.graph.output)
        self.types = {v.name: v.type for v in typed if v.type.tensor_type.elem_type}

    def smallest(self) -> list[int]:
        """Return the positions of the remaining nodes."""
        nodes, parts = list(range(len(self.model.graph.node))), 2
        while len(nodes) > 1 and self.tried < self.tries:
            size = -(-len(nodes) // parts)
            chunks = [nodes[i : i + size] for i in range(0, len(nodes), size)]
            rest = ([n for n in nodes if n not in set(c)] for c in chunks)
            smaller = next((c for c in (*chunks, *rest) if 0 < len(c) < len(nodes) and self._fails(c)), None)
            if smaller is not None:
                nodes, parts = smaller, 2 if len(smaller) <= size else max(2, parts - 1)
            elif parts >= len(nodes):
                break
            else:
                parts = min(len(nodes), parts * 2)
        return nodes

    def _fails(self, nodes: Sequence[int]) -> bool:
        if self.tried >= self.tries:
            return False
        try:
            part = self.part(nodes)
        except KeyError:  # a tensor has no type
            return False
        self.tried += 1
        self.say(f"minimising: {len(nodes)} nodes")
        return self.fails(part) == self.expected

    def part(self, positions: Sequence[int]) -> onnx.ModelProto:
        """Return the model of some nodes. KeyError: the type of a tensor that they read is unknown."""
        graph = self.model.graph
        nodes = [graph.node[i] for i in positions]
        written = {o for n in nodes for o in n.output if o}
        inner = {x for n in nodes for a in n.attribute for g in (a.g, *a.graphs) for m in g.node for x in m.input}
        read = dict.fromkeys(x for n in nodes for x in (*n.input, *sorted(inner)) if x)
        constants = {t.name: t for t in graph.initializer}
        outer = [x for x in read if x not in written and x not in constants and (x not in inner or x in self.types)]
        results = {o.name for o in graph.output}
        out = [o for n in nodes for o in n.output if o and (o not in read or o in results)]
        whole = len(positions) == len(graph.node)
        result = onnx.ModelProto()
        result.CopyFrom(self.model)
        for field in ("node", "input", "output", "value_info", "initializer"):
            result.graph.ClearField(field)
        result.graph.node.extend(nodes)
        result.graph.initializer.extend(t for n, t in constants.items() if n in read)
        result.graph.input.extend(
            graph.input if whole else (onnx.ValueInfoProto(name=x, type=self.types[x]) for x in outer)
        )
        result.graph.output.extend(onnx.ValueInfoProto(name=o, type=self.types.get(o)) for o in out)
        return result


# -- kinds of failures -------------------------------------------------------------------------------------------------


def _failure(name: str, settings: CompileSettings, shape: Mapping[str, int], command: str, match: str) -> Failure:
    settings = replace(settings, no_cache=True)  # the smaller models are compiled once
    if name == "command":
        return lambda m: _command(m, command)
    if name == "crash":
        return lambda m: _crash(m, settings, shape)

    def fails(m: onnx.ModelProto) -> str | None:
        try:
            return _differs(m, settings, shape) if name == "differs" else _runs(m, settings, shape, name == "run")
        except PolydynError as e:
            text = f"{type(e).__name__}" + (f": {e.rule}" if e.rule else "")
            return text if name != "differs" and match in str(e) else None

    return fails


def _sizes(manifest: Mapping[str, Any], shape: Mapping[str, int]) -> dict[str, int]:
    """Return the sizes of a part's symbols. An unknown symbol gets the last size of ``shape``, or 2."""
    names = [s["symbol"] for s in manifest["symbols"]]
    return {n: shape.get(n, [2, *shape.values()][-1]) for n in names}


def _runs(m: onnx.ModelProto, settings: CompileSettings, shape: Mapping[str, int], call: bool) -> str | None:
    program = settings.compile_model(m)
    if call:
        program.run(feeds_for(program, _sizes(program.manifest, shape), {}))
    return None


def _differs(m: onnx.ModelProto, settings: CompileSettings, shape: Mapping[str, int]) -> str | None:
    program = settings.compile_model(m)
    feeds = feeds_for(program, _sizes(program.manifest, shape), {})
    checks = verify_model(m, feeds, target=settings.target, dims=dict(settings.dims), options=settings.options)
    return "a tensor differs from the reference" if any(not c.ok for c in checks) else None


def _crash(m: onnx.ModelProto, settings: CompileSettings, shape: Mapping[str, int]) -> str | None:
    """Run a model in a separate process. It searches for an error that cannot occur, so only a crash ends it early."""
    arguments = ["--failure", "run", "--match", "\x01", "-o", os.devnull, "--target", settings.target]
    arguments += [x for p in settings.without for x in ("--without", p)]
    arguments += ["--threads", str(settings.threads)] if settings.threads else []
    arguments += ["--shape", ",".join(f"{n}={v}" for n, v in shape.items())] if shape else []
    code = _exit(m, lambda path: [sys.executable, "-m", "polydyn", "minimise", path, *arguments])
    return f"signal {-code}" if code < 0 else None


def _command(m: onnx.ModelProto, command: str) -> str | None:
    code = _exit(m, lambda path: [path if x == "{}" else x.replace("{}", path) for x in shlex.split(command)])
    return f"exit code {code}" if code else None


def _exit(m: onnx.ModelProto, arguments: Callable[[str], list[str]]) -> int:
    """Return the exit code of a command on a model; 0 if it times out. InputError: it cannot be started."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "part.onnx"
        path.write_bytes(m.SerializeToString())
        try:
            return subprocess.run(arguments(str(path)), capture_output=True, timeout=SECONDS, check=False).returncode
        except subprocess.TimeoutExpired:
            return 0
        except (OSError, ValueError) as e:
            raise InputError(f"the command cannot be started: {e}", rule="--command", remedy="name a program") from e
