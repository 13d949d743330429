"""The key of a compiled program: the hash of everything that determines its artifact.

These are the model's bytes and its external data, the arguments, the content of the records, the registered operators,
the processor, the compilers, and polydyn's own sources, so that a program of another polydyn version is never used.
Everything that caches programs uses ``program_key`` (docs/adr/0035-one-key.md). It loads neither onnx nor a pass of the
compiler unless a model or an argument requires that, because computing the key is most of the time that a cached
program takes to open.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import sys
import time
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polydyn
from polydyn.backends.options import Options
from polydyn.build.cache import FileCache, digest
from polydyn.build.compilers import find_compiler
from polydyn.build.features import data_cache, machine_features
from polydyn.errors import BuildError, MissingModelError, ModelError, UnsupportedError
from polydyn.graph.data_files import data_file, locations

if TYPE_CHECKING:
    import onnx

    from polydyn.graph.dynamic import Symbols
    from polydyn.graph.importer import ModelLike
    from polydyn.schedules.handmade.document import Written
    from polydyn.shapes.sizes import Dims

SOURCES = (".py", ".c", ".cpp", ".h", ".cuh", ".json", ".csv", ".txt")


@dataclass(frozen=True)
class Arguments:
    """Arguments of ``polydyn.compile`` other than the model and the threads, which do not change a program."""

    target: str = "cpu"
    dims: Dims = field(default_factory=dict)
    options: Options = field(default_factory=Options)
    records: str | os.PathLike[str] | None = None
    symbols: Symbols = field(default_factory=dict)
    schedules: tuple[Written, ...] = ()

    def check(self) -> None:
        """Check the arguments, without a model. Raises InputError, ShapeError, UnsupportedError or ArtifactError."""
        from polydyn.backends import target_of  # loads the compiler
        from polydyn.shapes.sizes import sizes_by_name

        if self.target:
            target_of(self.target, self.options, self.schedules)
        sizes_by_name(self.dims)
        if self.records is not None:
            _content(self.records)

    @classmethod
    def from_json(cls, data: Any) -> Arguments:
        """Return the arguments of ``to_json``, in which ``records`` is a path."""
        from polydyn.schedules.handmade.document import Written
        from polydyn.shapes.sizes import Sizes

        dims = {n: Sizes(**s) for n, s in data["dims"].items()}
        schedules = tuple(Written.from_json(x, "schedules") for x in data["schedules"])
        return cls(data["target"], dims, Options(**data["options"]), data["records"], data["symbols"], schedules)

    def to_json(self) -> dict[str, Any]:
        """Return plain data that is equal for equal arguments. Records are identified by their content."""
        options = {f: getattr(self.options, f) for f in self.options.__dataclass_fields__}
        return {
            "target": self.target,
            "dims": _dims_json(self.dims),
            "options": {n: sorted(v) if isinstance(v, (set, frozenset)) else v for n, v in options.items()},
            "records": _content(self.records) if self.records is not None else None,
            "symbols": {n: axes if isinstance(axes, str) else list(axes) for n, axes in sorted(self.symbols.items())},
            "schedules": [x.to_json() for x in self.schedules],
        }


def _dims_json(dims: Dims) -> dict[str, Any]:
    """Return plain data for sizes by name. ShapeError: one is wrong."""
    if isinstance(dims, dict) and not dims:
        return {}
    from polydyn.shapes.sizes import sizes_by_name  # a stored program without sizes opens without it

    return {n: s.to_json() for n, s in sorted(sizes_by_name(dims).items())}


def program_key(model: ModelLike, arguments: Arguments) -> str:
    """Return the SHA-256 of everything that determines the artifact, as hex text. Raises PolydynError if a part cannot
    be read, or if there is no such hash.
    """
    machine = [sorted(machine_features()), data_cache(2), find_compiler().identity]
    texts = [json.dumps(machine), json.dumps(arguments.to_json(), sort_keys=True), *_device_compilers(arguments.target)]
    return digest(model_digest(model), code_digest(), _registrations(), *texts)


def _device_compilers(target: str) -> list[str]:
    """Return the versions of the compilers for a device; "" for one that is not installed."""
    if target.partition(":")[0] != "cuda":
        return []
    from polydyn.gpu.compiler import compiler_version
    from polydyn.gpu.emulator import emulator_compiler
    from polydyn.gpu.targets import EMULATED, architectures

    try:
        return [*emulator_compiler()] if architectures(target) == (EMULATED,) else [compiler_version()]
    except BuildError:
        return [""]


def registrations() -> str | None:
    """Return the digest of the operators that ``polydyn.extend`` registered: "" if there are none, None if Python rules
    define one.
    """
    if "polydyn.extend" not in sys.modules:  # loading it takes longer than opening a program
        return ""
    from polydyn.extend import fingerprint

    return fingerprint()


def _registrations() -> str:
    """Return ``registrations``. UnsupportedError: Python rules define an operator, and rules may call any code."""
    known = registrations()
    if known is None:
        raise UnsupportedError("an operator is defined by Python rules", rule="program_key", remedy="compile the model")
    return known


def model_digest(model: ModelLike) -> str:
    """Return the SHA-256 of a model's bytes and of its external data files.

    Raises ModelError if a file cannot be read, or is outside the folder of the model.
    """
    h = hashlib.sha256()
    if isinstance(model, (str, os.PathLike)):
        data = _read(Path(model))
        h.update(data)
        for name, path in external_files(data, Path(model).resolve().parent).items():
            h.update(digest(name, file_digest(path)).encode())
    elif isinstance(model, (bytes, bytearray, memoryview)):
        h.update(model)
    elif callable(serialize := getattr(model, "SerializeToString", None)):
        h.update(serialize(deterministic=True))
    else:
        raise UnsupportedError("a model in memory with external data has no key", rule="program_key")
    return h.hexdigest()


def external_files(data: bytes, folder: Path) -> dict[str, Path]:
    """Return the external data files of a serialized model in ``folder``: name in the model to resolved path, sorted.

    Bytes that are not an ONNX protobuf have none; the compiler reports them. Raises ModelError, see
    ``external_path``.
    """
    names = locations(data)
    files = {n: path for n in names or () if (path := data_file(folder.resolve(), n)) is not None}
    if names is not None and len(files) == len(names):
        return files
    import onnx  # its import takes half as long as opening a program

    from polydyn.graph.importer import external_path

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
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    yield from _of_nodes(graph.node)


def _of_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.TensorProto]:
    for node in nodes:
        for a in node.attribute:
            yield from [a.t] if a.HasField("t") else a.tensors
            yield from (a.sparse_tensor.values, a.sparse_tensor.indices)
            inner: Iterable[onnx.GraphProto] = [a.g] if a.HasField("g") else a.graphs
            for g in inner:
                yield from _tensors(g)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except (OSError, ValueError) as e:  # ValueError: a path with a NUL
        why = getattr(e, "strerror", None) or e
        kind = MissingModelError if isinstance(e, FileNotFoundError) else ModelError
        raise kind(f"cannot read {path}: {why}", remedy="give the path of an .onnx file") from e


def _content(records: str | os.PathLike[str]) -> str:
    from polydyn.search.records import Records  # it loads the spaces of the tuner

    with Records.open(records, readonly=True) as opened:
        return opened.digest()


def code_digest() -> str:
    """Return the SHA-256 over polydyn's own files. The version alone does not change with every change of the code."""
    return _sources()[0]


def sources_changed() -> bool:
    """Return whether polydyn's files are newer than this process's import of polydyn, so that its modules may differ
    from them.
    """
    return _sources()[1] > polydyn.IMPORTED_NS


MASK = 2**64 - 1
"""Makes the time of a file that is older than 1970 a number without a sign."""
SETTLED_NS = 2 * 10**9
"""Nanoseconds since the last change of a file after which a further change gives it another time."""


@functools.cache
def _sources() -> tuple[str, int]:
    """Return the hash of polydyn's own files, and the latest time of modification in nanoseconds.

    The cache keeps the hash under the states of the files. No program can set the time of a file's last change
    (``st_ctime``), so equal states are equal files, except within the resolution of that time.
    """
    root = str(Path(polydyn.__file__).parent)
    paths = list(_source_files(root))
    states = [os.stat(p) for p in paths]
    facts = array("Q")
    for s in states:
        facts.extend((s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns & MASK, s.st_ctime_ns & MASK))
    key = digest("\0".join(paths), facts.tobytes())
    settled = time.time_ns() - max(s.st_ctime_ns for s in states) > SETTLED_NS
    found, cache = None, None
    with contextlib.suppress(BuildError):  # a folder that cannot be used
        cache = FileCache("sources")
        found = cache.get(key) if settled else None
    if found is None:
        h = hashlib.sha256()
        for path in paths:
            with open(path, "rb", buffering=0) as f:
                data = f.read()
            h.update(f"{path[len(root) :]}\0{len(data)}\0".encode())
            h.update(data)
        found = h.hexdigest().encode()
        with contextlib.suppress(BuildError, UnsupportedError):
            if cache is not None and settled:
                cache.put(key, found)
    return found.decode(), max(s.st_mtime_ns for s in states)


def _source_files(folder: str) -> Iterator[str]:
    """Yield the paths of the files in a folder that are compiled or read, in a fixed order. It follows links."""
    with os.scandir(folder) as scan:
        entries = sorted(scan, key=lambda e: e.name)
    for e in entries:
        if e.name.endswith(SOURCES):
            yield e.path
        elif e.name != "__pycache__" and e.is_dir():
            yield from _source_files(e.path)
