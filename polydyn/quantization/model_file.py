"""Models whose tensors are read one at a time, and files of models to which tensors are added one at a time.

The weights of a model are in its file, or in files next to it. Either way ``ModelFile`` leaves them there until they
are read, so that the memory of a conversion is that of its largest tensor and not of the model. The weights inside the
file are found by the fields of the protobuf, and ONNX's classes never hold them.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx import TensorProto, numpy_helper

from polydyn.errors import MissingModelError, ModelError
from polydyn.graph.dtypes import PACKED, numpy_dtype, onnx_dtype
from polydyn.graph.importer import ModelLike, external_path
from polydyn.graph.sparse import make_dense
from polydyn.schedules.expr import Array

LARGE = 1024
"""Bytes from which on a tensor stays in its file, and is written to the data file of a large model."""
MAX_INLINE_BYTES = 32 << 20
"""Bytes of tensors that a written model holds itself. Later ones go to its data file, because a protobuf ends at 2 GB.
"""
MODEL_GRAPH, GRAPH_INITIALIZER, TENSOR_RAW_DATA = 7, 5, 9
"""Numbers of fields in ONNX's protobuf."""
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
"""Kinds of fields in a protobuf."""


@dataclass
class ModelFile:
    """A model without the data of its large initializers. ``folder``: where its data files are."""

    proto: onnx.ModelProto
    folder: Path | None = None
    inside: Mapping[str, TensorProto] = field(default_factory=dict)
    """Initializers of a model in memory."""

    def read(self, t: TensorProto) -> Array:
        """Return the elements of an initializer in memory of their own. ModelError: its data do not fit its shape."""
        held = self.inside.get(t.name, t) if t.data_location == TensorProto.EXTERNAL else t
        if held.data_location != TensorProto.EXTERNAL:
            return np.asarray(numpy_helper.to_array(held))
        path, offset, size = self._place(t)
        dtype, shape = numpy_dtype(onnx_dtype(t.data_type, tensor=t.name)), tuple(t.dims)
        count = math.prod(shape)
        data = np.fromfile(path, np.uint8, size, offset=offset)
        if data.size != -(-count * PACKED.get(dtype.name, 8 * dtype.itemsize) // 8) or dtype.name in PACKED:
            raise ModelError(f"the data of {t.name} have {data.size} bytes for the shape {list(shape)}", tensor=t.name)
        return data.view(dtype).reshape(shape)

    def _place(self, t: TensorProto) -> tuple[Path, int, int]:
        if self.folder is None:
            raise ModelError(
                f"constant {t.name} lies in a file, but the model was not given as a path", tensor=t.name,
                remedy="give the path of the model",
            )  # fmt: skip
        path, info = external_path(self.folder, t), {e.key: e.value for e in t.external_data}
        offset = int(info.get("offset", 0))
        return path, offset, int(info.get("length", path.stat().st_size - offset))

    def copy(self, t: TensorProto, writer: Writer, name: str = "") -> None:
        """Add an initializer to a model that is being written, unchanged but for its ``name`` if one is given."""
        held = self.inside.get(t.name, t) if t.data_location == TensorProto.EXTERNAL else t
        if held.data_location != TensorProto.EXTERNAL:
            data = held.raw_data if held.HasField("raw_data") else None
            if data is None:
                writer.add(held, name=name)
                return
        else:
            path, offset, size = self._place(t)
            with open(path, "rb") as f:
                f.seek(offset)
                data = f.read(size)
        writer.add(TensorProto(name=name or t.name, data_type=t.data_type, dims=t.dims), data)

    def whole(self) -> onnx.ModelProto:
        """Return the model with all initializers in memory."""
        proto = onnx.ModelProto()
        proto.CopyFrom(self.proto)
        for t in proto.graph.initializer:
            if t.data_location == TensorProto.EXTERNAL:
                t.CopyFrom(numpy_helper.from_array(self.read(t), t.name))
        return proto


def open_model(model: ModelLike) -> ModelFile:
    """Read a model without its large tensors. The given object is not changed.

    Raises ModelError if there is no readable model.
    """
    if isinstance(model, (str, os.PathLike)):
        path = Path(model)
        try:
            with open(path, "rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _from_bytes(data, path)
        except FileNotFoundError as e:
            raise MissingModelError(f"cannot read {path}: {e.strerror}", remedy="give the path of an .onnx file") from e
        except (OSError, ValueError) as e:
            raise ModelError(f"cannot read {path}: {e}", remedy="give the path of an .onnx file") from e
    if isinstance(model, (bytes, bytearray)):
        proto = onnx.ModelProto()
        try:
            proto.ParseFromString(bytes(model))
        except DecodeError as e:
            raise ModelError("these bytes are not an ONNX protobuf", remedy="give a model") from e
        return _from_memory(proto)
    if not isinstance(model, onnx.ModelProto):
        raise ModelError(f"a {type(model).__name__} is not a model", remedy="give a path, bytes or an onnx.ModelProto")
    return _from_memory(model)


def _from_memory(model: onnx.ModelProto) -> ModelFile:
    """Copy everything but the large initializers, which stay in the given model."""
    proto = onnx.ModelProto()
    for f, value in model.ListFields():
        if f.name == "graph":
            continue
        if f.is_repeated if hasattr(f, "is_repeated") else f.label == f.LABEL_REPEATED:
            getattr(proto, f.name).extend(value)
        else:
            setattr(proto, f.name, value)
    large = {t.name: t for t in model.graph.initializer if t.ByteSize() > LARGE}
    for f, value in model.graph.ListFields():
        if f.name == "initializer":
            proto.graph.initializer.extend(_stub(t) if t.name in large else t for t in value)
        elif f.is_repeated if hasattr(f, "is_repeated") else f.label == f.LABEL_REPEATED:
            getattr(proto.graph, f.name).extend(value)
        else:
            setattr(proto.graph, f.name, value)
    make_dense(proto)
    return ModelFile(proto, inside=large)


def _stub(t: TensorProto) -> TensorProto:
    return TensorProto(name=t.name, data_type=t.data_type, dims=t.dims, data_location=TensorProto.EXTERNAL)


def _from_bytes(data: mmap.mmap, path: Path) -> ModelFile:
    """Parse a file without the data of its large initializers."""
    proto, path = onnx.ModelProto(), path.resolve()
    try:
        for number, begin, start, end in _fields(data, 0, len(data)):
            if number != MODEL_GRAPH:
                proto.MergeFromString(data[begin:end])
                continue
            for inner, inner_begin, inner_start, inner_end in _fields(data, start, end):
                if inner != GRAPH_INITIALIZER or inner_end - inner_start <= LARGE:
                    proto.graph.MergeFromString(data[inner_begin:inner_end])
                    continue
                proto.graph.initializer.append(_tensor(data, inner_start, inner_end, path.name))
    except (DecodeError, IndexError, ValueError) as e:
        raise ModelError(
            f"{path}: not an ONNX protobuf, or a truncated one ({len(data)} bytes)",
            remedy="export or download the model again; git-lfs pointers must be fetched first",
        ) from e
    if not proto.HasField("graph"):
        raise ModelError(f"{path}: the model has no graph", remedy="export it again; the file may be empty or cut off")
    make_dense(proto)
    return ModelFile(proto, path.parent)


def _tensor(data: mmap.mmap, start: int, end: int, name: str) -> TensorProto:
    """Parse a tensor. Its raw data stay where they are, as external data in the file ``name`` of the model itself."""
    t, raw = TensorProto(), None
    for number, begin, inside, after in _fields(data, start, end):
        if number == TENSOR_RAW_DATA:
            raw = (inside, after - inside)
        else:
            t.MergeFromString(data[begin:after])
    if raw:
        t.data_location = TensorProto.EXTERNAL
        for key, value in (("location", name), ("offset", raw[0]), ("length", raw[1])):
            t.external_data.add(key=key, value=str(value))
    return t


def _fields(data: mmap.mmap, start: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield (number, begin of the field, begin of its content, end) of the fields of a message, or raise ValueError."""
    while start < end:
        tag, at = _varint(data, start)
        kind, after = tag & 7, at
        if kind == BYTES:
            size, at = _varint(data, at)
            after = at + size
        elif kind == VARINT:
            _, after = _varint(data, at)
        elif kind in (FIXED64, FIXED32):
            after = at + (8 if kind == FIXED64 else 4)
        else:
            raise ValueError(f"a field of kind {kind}")
        if after > end:
            raise ValueError("a field that is longer than its message")
        yield tag >> 3, start, at, after
        start = after


def _varint(data: mmap.mmap, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("a number of more than 64 bits")


class Writer:
    """Collects the initializers of a new model; large ones go to a data file while the model is written."""

    def __init__(self, path: Path | None) -> None:
        """``path``: the file of the model; None for a model in memory."""
        self.path = path
        self.tensors: list[TensorProto] = []
        self.bytes = 0
        self._data = (
            None
            if path is None
            else tempfile.NamedTemporaryFile(  # noqa: SIM115
                prefix=f".{path.name}.data.", dir=path.parent, delete=False
            )
        )

    @property
    def data_path(self) -> Path | None:
        """The file of the data, next to the model."""
        return None if self.path is None else self.path.with_name(f"{self.path.name}.data")

    def add_array(self, name: str, array: Array) -> str:
        """Add an array of a dtype of numpy or ml_dtypes; return its name."""
        t = TensorProto(name=name, dims=array.shape, data_type=onnx.helper.np_dtype_to_tensor_dtype(array.dtype))
        self.add(t, np.ascontiguousarray(array).tobytes())
        return name

    def add(self, t: TensorProto, data: bytes | None = None, name: str = "") -> None:
        """Add a tensor. ``data``: its elements if it does not hold them itself; ``name``: another name for it."""
        size = t.ByteSize() if data is None else len(data)
        self.bytes += size
        if data is None:
            t, own = TensorProto(), t
            t.CopyFrom(own)
            t.name = name or t.name
        elif self._data is None or len(data) < LARGE or self.bytes <= MAX_INLINE_BYTES:
            t.raw_data = data
        else:
            self._data.write(b"\0" * (-self._data.tell() % 64))
            entry = {"location": f"{self.path.name if self.path else ''}.data", "offset": self._data.tell()}
            self._data.write(data)
            t.data_location = TensorProto.EXTERNAL
            for key, value in (entry | {"length": len(data)}).items():
                t.external_data.add(key=key, value=str(value))
        self.tensors.append(t)

    def finish(self, proto: onnx.ModelProto) -> onnx.ModelProto:
        """Put the initializers into ``proto`` and write the files. Nothing is left of them after an error."""
        del proto.graph.initializer[:]
        proto.graph.initializer.extend(self.tensors)
        if self.path is None or self._data is None or self.data_path is None:
            return proto
        from polydyn.build.cache import replacing

        with replacing(self.path) as f:
            f.write(proto.SerializeToString())
            f.flush()
            self._data.close()
            if os.path.getsize(self._data.name):
                os.chmod(self._data.name, 0o644)
                os.replace(self._data.name, self.data_path)
        return proto

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        if self._data is not None:
            self._data.close()
            with contextlib.suppress(OSError):
                os.unlink(self._data.name)
