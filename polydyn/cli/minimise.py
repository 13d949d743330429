"""``polydyn minimise``: the smallest part of a model that fails as the whole does.

Delta debugging over nodes: parts of the list are left out, halves first, single nodes last. What a part reads from
outside becomes an input with the type that ONNX's shape inference gives it, what nobody reads becomes an output.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import onnx

from polydyn.build.cache import writable, write_atomically
from polydyn.cli.inputs import feeds_for, sizes
from polydyn.cli.machine import How, as_json, is_artifact, of_machine
from polydyn.cli.main import answer, main
from polydyn.cli.progress import working
from polydyn.errors import InputError, ModelError, PolydynError
from polydyn.verification import verify_model

Failure = Callable[[onnx.ModelProto], "str | None"]
"""How a model fails, as text that is equal for equal failures; None: it does not."""
NAMES = ("compile", "run", "differs", "crash", "command")
SECONDS = 120
"""The longest that one trial may take in a process of its own."""


@main.command()
@click.argument("model")
@click.option("--failure", required=True, type=click.Choice(NAMES), help="What is wrong: an error of polydyn when it "
              "compiles or runs, results that differ from the reference, a crash, or --command.")  # fmt: skip
@click.option("--command", metavar="'CMD {}'", help="Fails when it exits with the same code, not 0; {} is the model.")
@click.option("--match", default="", help="A text that the error must have.")
@click.option("--shape", type=sizes, metavar="B=1,L=8", help="Sizes for made-up inputs, of run, differs and crash.")
@click.option("--tries", default=400, show_default=True, type=click.IntRange(1), help="At most so many models.")
@click.option("-o", "--output", required=True, type=click.Path(dir_okay=False, path_type=Path), help="The model.")
@as_json
@of_machine
def minimise(
    model: str, failure: str, command: str | None, match: str, shape: dict[str, int] | None, tries: int,
    output: Path, as_json: bool, how: How,
) -> None:  # fmt: skip
    """Write the smallest part of MODEL that fails as MODEL does; 1 when MODEL does not fail so."""
    if (failure == "command") != bool(command):
        raise click.UsageError("--failure command and --command belong together")
    if is_artifact(model):
        raise InputError(f"{model} is a saved program", rule="minimise needs the graph", remedy="give the .onnx file")
    whole = _read(model)
    fails = _failure(failure, how, shape or {}, command or "", match)
    wanted = fails(whole)
    if wanted is None:
        raise InputError(f"{model} does not fail so", rule=f"--failure {failure}", remedy="name another failure")
    with working("minimising", tries) as step:
        search = Search(whole, fails, wanted, tries, step)
        kept = search.smallest()
    with writable(output):
        write_atomically(output, search.part(kept).SerializeToString())
    facts = {"output": str(output), "nodes": len(kept), "of": len(whole.graph.node), "tries": search.tried}
    left = "" if search.tried < tries else "; --tries ended the search"
    line = f"{output}: {len(kept)} of {facts['of']} nodes, {search.tried} models tried{left}"
    answer(as_json, facts | {"failure": wanted}, line, f"it fails so: {wanted}")


def _read(path: str) -> onnx.ModelProto:
    try:
        return onnx.load(path)
    except Exception as e:  # onnx and protobuf have no common root of errors
        raise ModelError(f"cannot read {path}: {e}", remedy="give the path of an .onnx file") from e


class Search:
    """Delta debugging (Zeller and Hildebrandt, ddmin) over the nodes of a model."""

    def __init__(
        self, model: onnx.ModelProto, fails: Failure, wanted: str, tries: int, say: Callable[[str], None]
    ) -> None:
        """``say`` is called for every model before it is tried."""
        self.model, self.fails, self.wanted, self.tries, self.tried, self.say = model, fails, wanted, tries, 0, say
        try:
            inferred = onnx.shape_inference.infer_shapes(model)
        except Exception:  # a model that shape inference refuses is minimised with the types that it states
            inferred = model
        known = (*inferred.graph.value_info, *inferred.graph.input, *inferred.graph.output)
        self.types = {v.name: v.type for v in known if v.type.tensor_type.elem_type}

    def smallest(self) -> list[int]:
        """The positions of nodes that are left."""
        kept, parts = list(range(len(self.model.graph.node))), 2
        while len(kept) > 1 and self.tried < self.tries:
            size = -(-len(kept) // parts)
            chunks = [kept[i : i + size] for i in range(0, len(kept), size)]
            rest = ([n for n in kept if n not in set(c)] for c in chunks)
            smaller = next((c for c in (*chunks, *rest) if 0 < len(c) < len(kept) and self._fails(c)), None)
            if smaller is not None:
                kept, parts = smaller, 2 if len(smaller) <= size else max(2, parts - 1)
            elif parts >= len(kept):
                break
            else:
                parts = min(len(kept), parts * 2)
        return kept

    def _fails(self, kept: Sequence[int]) -> bool:
        if self.tried >= self.tries:
            return False
        try:
            made = self.part(kept)
        except KeyError:  # a tensor has no type
            return False
        self.tried += 1
        self.say(f"minimising: {len(kept)} nodes")
        return self.fails(made) == self.wanted

    def part(self, kept: Sequence[int]) -> onnx.ModelProto:
        """The model of some nodes. KeyError: nothing says the type of what they read."""
        graph = self.model.graph
        nodes = [graph.node[i] for i in kept]
        made = {o for n in nodes for o in n.output if o}
        inner = {x for n in nodes for a in n.attribute for g in (a.g, *a.graphs) for m in g.node for x in m.input}
        read = dict.fromkeys(x for n in nodes for x in (*n.input, *sorted(inner)) if x)
        constants = {t.name: t for t in graph.initializer}
        outer = [x for x in read if x not in made and x not in constants and (x not in inner or x in self.types)]
        given = {o.name for o in graph.output}
        out = [o for n in nodes for o in n.output if o and (o not in read or o in given)]
        whole = len(kept) == len(graph.node)
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


# -- what a failure is -------------------------------------------------------------------------------------------------


def _failure(name: str, how: How, shape: Mapping[str, int], command: str, match: str) -> Failure:
    if name == "command":
        return lambda m: _command(m, command)
    if name == "crash":
        return lambda m: _crash(m, how, shape)

    def fails(m: onnx.ModelProto) -> str | None:
        try:
            return _differs(m, how, shape) if name == "differs" else _runs(m, how, shape, name == "run")
        except PolydynError as e:
            text = f"{type(e).__name__}" + (f": {e.rule}" if e.rule else "")
            return text if name != "differs" and match in str(e) else None

    return fails


def _sizes(manifest: Mapping[str, Any], shape: Mapping[str, int]) -> dict[str, int]:
    """Sizes of the symbols that a part has; one that nothing is said of gets the last size that was said, or 2."""
    names = [s["symbol"] for s in manifest["symbols"]]
    return {n: shape.get(n, [2, *shape.values()][-1]) for n in names}


def _runs(m: onnx.ModelProto, how: How, shape: Mapping[str, int], call: bool) -> str | None:
    program = how.compile_model(m)
    if call:
        program.run(feeds_for(program, _sizes(program.manifest, shape), {}))
    return None


def _differs(m: onnx.ModelProto, how: How, shape: Mapping[str, int]) -> str | None:
    program = how.compile_model(m)
    feeds = feeds_for(program, _sizes(program.manifest, shape), {})
    found = verify_model(m, feeds, target=how.target, dims=dict(how.dims), options=how.options)
    return "a tensor differs from the reference" if any(not c.ok for c in found) else None


def _crash(m: onnx.ModelProto, how: How, shape: Mapping[str, int]) -> str | None:
    """In a process of its own, which searches for an error that is none: a crash of the first run ends it."""
    said = ["--failure", "run", "--match", "\x01", "-o", os.devnull, "--target", how.target]
    said += [x for p in how.without for x in ("--without", p)]
    said += ["--threads", str(how.threads)] if how.threads else []
    said += ["--shape", ",".join(f"{n}={v}" for n, v in shape.items())] if shape else []
    code = _exit(m, lambda path: [sys.executable, "-m", "polydyn", "minimise", path, *said])
    return f"signal {-code}" if code < 0 else None


def _command(m: onnx.ModelProto, command: str) -> str | None:
    code = _exit(m, lambda path: [path if x == "{}" else x.replace("{}", path) for x in shlex.split(command)])
    return f"exit code {code}" if code else None


def _exit(m: onnx.ModelProto, arguments: Callable[[str], list[str]]) -> int:
    """The exit code of a command on a model; 0 when it takes too long. InputError: it cannot be started."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "part.onnx"
        path.write_bytes(m.SerializeToString())
        try:
            return subprocess.run(arguments(str(path)), capture_output=True, timeout=SECONDS, check=False).returncode
        except subprocess.TimeoutExpired:
            return 0
        except (OSError, ValueError) as e:
            raise InputError(f"the command cannot be started: {e}", rule="--command", remedy="name a program") from e
