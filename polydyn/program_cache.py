"""Programs in the disk cache, by content: one model with the same arguments is compiled once per machine.

Sessions, the torch backend and offline jobs use this cache. The key holds everything that determines the artifact: the
model's bytes and its external data, the arguments, the content of the records, the processor, the C compiler, and
polydyn's own sources, so that a program of another polydyn version is never used.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import onnx

import polydyn
from polydyn.build.cache import cache_dir, digest
from polydyn.build.compiler import find_compiler
from polydyn.build.eviction import grown, touch
from polydyn.build.features import data_cache, machine_features
from polydyn.compiler import Options, compile
from polydyn.errors import ArtifactError, ModelError
from polydyn.extend import fingerprint
from polydyn.graph.dynamic import Symbols
from polydyn.graph.importer import ModelLike, external_path
from polydyn.runtime.artifact import read_artifact
from polydyn.runtime.opening import open_program
from polydyn.runtime.program import Program
from polydyn.search.records import Records
from polydyn.shapes.sizes import Dims, sizes_by_name

SOURCES = (".py", ".c", ".cpp", ".h", ".cuh", ".json", ".csv", ".txt")


@dataclass(frozen=True)
class Arguments:
    """Arguments of ``polydyn.compile`` other than the model and the threads, which do not change a program."""

    target: str = "cpu"
    dims: Dims = field(default_factory=dict)
    options: Options = field(default_factory=Options)
    records: str | os.PathLike[str] | None = None
    symbols: Symbols = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return plain data that is equal for equal arguments. Records are identified by their content."""
        options = {f: getattr(self.options, f) for f in self.options.__dataclass_fields__}
        return {
            "target": self.target,
            "dims": {n: s.to_json() for n, s in sorted(sizes_by_name(self.dims).items())},
            "options": {n: sorted(v) if isinstance(v, (set, frozenset)) else v for n, v in options.items()},
            "records": _content(self.records) if self.records is not None else None,
            "symbols": {n: list(axes) for n, axes in sorted(self.symbols.items())},
        }


def cached_program(model: ModelLike, arguments: Arguments | None = None, *, threads: int | None = None) -> Program:
    """Return the program of a model from the cache, or compile and store it.

    ``Program.compilations`` is 0 for a cached program. Raises the errors of ``polydyn.compile``.
    """
    arguments = arguments or Arguments()
    path = cache_dir("programs") / f"{program_key(model, arguments)}.polydyn"
    if path.exists():
        touch(path)
        with contextlib.suppress(ArtifactError):  # damaged, or evicted just now: compile again
            artifact = replace(read_artifact(path), file=None)  # files of the cache are never overwritten
            return open_program(artifact, threads=threads)
    program = compile(model, threads=threads, **vars(arguments))
    program.save(path, with_threads=False)
    grown(path.parent.parent, path.stat().st_size)
    return program


def program_key(model: ModelLike, arguments: Arguments) -> str:
    """Return the SHA-256 of everything that determines the artifact, as hex text. Raises ModelError or
    ArtifactError.
    """
    machine = json.dumps([sorted(machine_features()), data_cache(2), find_compiler().version])
    said = json.dumps(arguments.to_json(), sort_keys=True)
    return digest(model_digest(model), said, machine, code_digest(), fingerprint())


def model_digest(model: ModelLike) -> str:
    """Return the SHA-256 of a model's bytes and of its external data files.

    Raises ModelError if a file cannot be read, or is outside the folder of the model.
    """
    h = hashlib.sha256()
    if isinstance(model, onnx.ModelProto):
        h.update(model.SerializeToString(deterministic=True))
    elif isinstance(model, (str, os.PathLike)):
        data = _read(Path(model))
        h.update(data)
        for name, path in external_files(data, Path(model).resolve().parent).items():
            h.update(digest(name, file_digest(path)).encode())
    else:
        h.update(model)
    return h.hexdigest()


def external_files(data: bytes, folder: Path) -> dict[str, Path]:
    """Return the external data files of a serialized model in ``folder``: name in the model to resolved path, sorted.

    Bytes that are not an ONNX protobuf have none; the compiler reports them. Raises ModelError, see
    ``external_path``.
    """
    if b"location" not in data:
        return {}
    proto = onnx.ModelProto()
    try:
        proto.ParseFromString(data)
    except Exception:  # protobuf's errors have no common base class
        return {}
    tensors = [*_tensors(proto.graph), *(t for f in proto.functions for t in _of_nodes(f.node))]
    external = {e.value: t for t in tensors for e in t.external_data if e.key == "location"}
    return {name: external_path(folder.resolve(), t) for name, t in sorted(external.items())}


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file, which need not fit in memory. Raises ModelError if it cannot be read."""
    h = hashlib.sha256()
    try:
        with path.open("rb") as f:
            while chunk := f.read(1 << 22):
                h.update(chunk)
    except OSError as e:
        raise ModelError(f"cannot read {path}: {e.strerror}", remedy="keep the data files with the model") from e
    return h.hexdigest()


def _tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    yield from graph.initializer
    yield from _of_nodes(graph.node)


def _of_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.TensorProto]:
    for node in nodes:
        for a in node.attribute:
            yield from [a.t] if a.HasField("t") else a.tensors
            inner: Iterable[onnx.GraphProto] = [a.g] if a.HasField("g") else a.graphs
            for g in inner:
                yield from _tensors(g)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except (OSError, ValueError) as e:  # ValueError: a path with a NUL
        why = getattr(e, "strerror", None) or e
        raise ModelError(f"cannot read {path}: {why}", remedy="give the path of an .onnx file") from e


def _content(records: str | os.PathLike[str]) -> str:
    with Records.open(records, readonly=True) as opened:
        return opened.digest()


@functools.cache
def code_digest() -> str:
    """Return the SHA-256 over polydyn's own files. The version alone does not change with every change of the code."""
    root = Path(polydyn.__file__).parent
    h = hashlib.sha256()
    for folder, folders, files in os.walk(root, followlinks=True):
        folders[:] = sorted(f for f in folders if f != "__pycache__")
        for name in sorted(files):
            if name.endswith(SOURCES):
                path = Path(folder) / name
                h.update(digest(str(path.relative_to(root)), path.read_bytes()).encode())
    return h.hexdigest()
