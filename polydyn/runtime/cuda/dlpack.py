"""DLPack through ctypes: views of other libraries' tensors, and capsules of device memory for them.

The structures are those of dlpack.h, version 0 (capsules with name ``dltensor``), which all libraries still read.
"""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass
from typing import Any, NamedTuple

from polydyn.errors import InputError
from polydyn.runtime.cuda.driver import LEGACY

__all__ = ["CPU", "CUDA", "CUDA_HOST", "View", "capsule", "device_of", "view"]

CPU, CUDA, CUDA_HOST = 1, 2, 3
_NAME = b"dltensor"
_CODES = {"int": 0, "uint": 1, "float": 2, "bfloat": 4, "bool": 6}
_KINDS = {code: kind for kind, code in _CODES.items()}


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )  # fmt: skip


class _Managed(ctypes.Structure):
    pass


_Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(_Managed))
_Managed._fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _Deleter))

_get = ctypes.pythonapi.PyCapsule_GetPointer
_get.restype, _get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
_new = ctypes.pythonapi.PyCapsule_New
_new.restype, _new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_valid = ctypes.pythonapi.PyCapsule_IsValid
_valid.argtypes = [ctypes.py_object, ctypes.c_char_p]


@dataclass(frozen=True)
class View:
    """An array in device memory; ``strides`` in bytes. ``owner`` keeps the memory alive while the view is in use.

    ``after``: the CUstream on which the exporter writes the contents, if the reader must wait for it; else 0.
    """

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    owner: object
    after: int = 0

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def dense(self) -> bool:
        """Whether the array is C-contiguous."""
        expected, item = self.itemsize, True
        for n, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            item = item and (n == 1 or stride == expected)
            expected *= n
        return item or 0 in self.shape

    @property
    def itemsize(self) -> int:
        """The size of an element in bytes."""
        return 1 if self.dtype == "bool" else int("".join(c for c in self.dtype if c.isdigit())) // 8

    @property
    def span(self) -> tuple[int, int]:
        """The address of the first byte, and the address after the last; they are equal for an empty array."""
        if 0 in self.shape:
            return self.pointer, self.pointer
        reach = [(n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)]
        low, high = sum(min(r, 0) for r in reach), sum(max(r, 0) for r in reach)
        return self.pointer + low, self.pointer + high + self.itemsize


def device_of(x: object) -> int:
    """Return the location of a tensor as a DLPack device type; CPU for objects without one."""
    ask = getattr(x, "__dlpack_device__", None)
    if ask is not None:
        return int(ask()[0])
    return CUDA if hasattr(x, "__cuda_array_interface__") else CPU


def view(x: Any, stream: int, device: int = 0) -> View:
    """Return a view of a tensor in device memory, ready for work on ``stream`` (a CUstream other than 0).

    InputError: the tensor is on another device, has an unsupported element type, or cannot be exported.
    """
    where = x.__dlpack_device__() if hasattr(x, "__dlpack_device__") else (CUDA, device)
    if int(where[1]) != device:
        remedy = f"copy it to device {device}"
        raise InputError(f"a tensor is on device {int(where[1])}, the program runs on device {device}", remedy=remedy)
    ours = getattr(x, "view_on", None)
    if ours is not None:
        result: View = ours(stream)
        return result
    if not hasattr(x, "__dlpack__"):
        return _from_interface(x)
    try:
        exported = x.__dlpack__(stream=stream)
        t = ctypes.cast(_get(exported, _NAME), ctypes.POINTER(_Managed)).contents.tensor
    except (BufferError, ValueError, RuntimeError) as e:
        raise InputError(f"a tensor cannot be exported through DLPack: {e}", remedy="detach it, or copy it") from e
    shape = tuple(t.shape[a] for a in range(t.ndim))
    kind = _KINDS.get(t.code)
    if kind is None or t.lanes != 1:
        raise InputError(f"a tensor has DLPack type {t.code} of {t.lanes} lanes", remedy="convert it")
    dtype = "bool" if kind == "bool" else f"{kind}{t.bits}"
    item = -(-t.bits // 8)
    if t.strides:
        strides = tuple(t.strides[a] * item for a in range(t.ndim))
    else:
        strides = dense_strides(shape, item)
    return View((t.data or 0) + t.byte_offset, shape, strides, dtype, exported)


def _from_interface(x: Any) -> View:
    """Return a view through ``__cuda_array_interface__`` (pycuda, numba).

    In the protocol, an object without a stream needs no waiting. But pycuda never names a stream, even if it uses the
    default stream, so readers wait for the default stream.
    """
    interface = x.__cuda_array_interface__
    kind, bits = interface["typestr"][1], int(interface["typestr"][2:]) * 8
    names = {"i": "int", "u": "uint", "f": "float", "b": "bool"}
    if kind not in names:
        raise InputError(f"a tensor has the type {interface['typestr']}", remedy="convert it")
    shape, after = tuple(interface["shape"]), interface.get("stream") or LEGACY
    strides = interface.get("strides") or dense_strides(shape, bits // 8)
    dtype = "bool" if kind == "b" else f"{names[kind]}{bits}"
    return View(interface["data"][0], shape, tuple(strides), dtype, x, after)


def dense_strides(shape: tuple[int, ...], item: int) -> tuple[int, ...]:
    """Return the strides in bytes of a C-contiguous array."""
    out: list[int] = []
    for n in reversed(shape):
        out.insert(0, item)
        item *= max(n, 1)
    return tuple(out)


class _Export(NamedTuple):
    """The objects that must stay alive until a consumer calls the deleter."""

    managed: _Managed
    sizes: object
    owner: object
    capsule: object


_exported: dict[int, _Export] = {}  # by the address of the _Managed


def _delete(managed: Any) -> None:
    _exported.pop(ctypes.addressof(managed.contents), None)


_deleter = _Deleter(_delete)  # never collected, because consumers keep its address


def _sweep() -> None:
    """Release capsules that were dropped without being used.

    A destructor cannot do this, because its Python code could run while an exception of the consumer propagates.
    """
    for address, e in list(_exported.items()):
        if sys.getrefcount(e.capsule) <= 2 and _valid(e.capsule, _NAME):
            _exported.pop(address, None)


def capsule(pointer: int, shape: tuple[int, ...], dtype: str, owner: object, device: tuple[int, int]) -> object:
    """Return a DLPack capsule of dense memory; ``owner`` stays alive while the consumer holds the capsule."""
    _sweep()
    kind = dtype.rstrip("0123456789")
    bits = 8 if kind == "bool" else int(dtype[len(kind) :])
    sizes = (ctypes.c_int64 * max(len(shape), 1))(*shape)
    managed = _Managed()
    managed.tensor = _Tensor(pointer, *device, len(shape), _CODES[kind], bits, 1, sizes, None, 0)
    managed.deleter = _deleter
    address = ctypes.addressof(managed)
    result: object = _new(address, _NAME, None)
    _exported[address] = _Export(managed, sizes, owner, result)
    return result
