"""OrtValue, NodeArg, ModelMetadata: the values that sessions return and take, under ONNX Runtime's names."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from operator import index
from typing import Any

import numpy as np
import numpy.typing as npt

from polydyn.arguments import checked_flag, checked_integer, checked_text, wrong_type
from polydyn.errors import InputError, UnsupportedError
from polydyn.runtime.native import DTYPE_CODES
from polydyn.runtime.program import numpy_dtype
from polydyn.session.missing_names import Refusing

Array = npt.NDArray[Any]

_ONNX_NAMES = {"float32": "float", "float64": "double"}
"""Maps numpy dtype names to ONNX names if they differ."""


def tensor_type(dtype: str) -> str:
    """Return ONNX Runtime's type name, e.g. ``tensor(float)`` for ``float32``."""
    return dtype if dtype.startswith("seq(") else f"tensor({_ONNX_NAMES.get(dtype, dtype)})"


def onnx_code(dtype: str) -> int:
    """Return the ``TensorProto.DataType`` of a dtype name."""
    import onnx  # its import takes longer than opening a session

    return int(onnx.TensorProto.DataType.Value(_ONNX_NAMES.get(dtype, dtype).upper()))


def dtype_name(element_type: Any) -> str:
    """Return the dtype name of an element type: a ``TensorProto.DataType``, or anything that numpy accepts as a dtype.

    UnsupportedError: ONNX has the type, polydyn does not. InputError: it is not a type.
    """
    if isinstance(element_type, int):
        from polydyn.graph.dtypes import onnx_dtype  # imports onnx

        return onnx_dtype(element_type)
    try:
        dtype = np.dtype(element_type) if element_type is not None else None
    except (TypeError, ValueError):  # ValueError: numpy's, for some mappings
        dtype = None
    if dtype is None or dtype.names or str(dtype) not in DTYPE_CODES:
        message = f"{element_type!r} is not an element type"
        raise InputError(message, remedy="pass numpy's dtype or a TensorProto.DataType")
    return str(dtype)


def checked_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Return a shape as a tuple. InputError: a size is negative or not an integer."""
    try:
        sizes = tuple(map(index, shape))
    except TypeError:
        sizes = (-1,)
    if any(n < 0 for n in sizes):
        raise InputError(f"the shape {shape!r} has a size that is not a number of elements", remedy="pass sizes >= 0")
    return sizes


def checked_array(value: Any) -> Array:
    """Return a value that is a numpy array. InputError: it is not."""
    if not isinstance(value, np.ndarray):
        raise InputError(f"a {type(value).__name__} is not a numpy array", remedy="convert it with numpy.asarray")
    return value


def checked_value(value: Any, role: str) -> OrtValue:
    """Return an OrtValue. WrongTypeError: it is not one."""
    if not isinstance(value, OrtValue):
        wrong_type(role, value, "an OrtValue, as from OrtValue.ortvalue_from_numpy(array)")
    return value


@dataclass(frozen=True)
class NodeArg:
    """An input or output of a model: its name, its type (``tensor(float)``), and the sizes or symbols of its axes."""

    name: str
    type: str
    shape: list[int | str]


@dataclass(frozen=True)
class ModelMetadata:
    """The metadata of a model."""

    custom_metadata_map: dict[str, str]
    description: str
    domain: str
    graph_description: str
    graph_name: str
    producer_name: str
    version: int


def check_device(device_type: str, device_id: int = 0) -> str:
    """Return ``cpu`` or ``cuda``. UnsupportedError: another device, or a second CPU."""
    kind = checked_text(device_type, "the device").lower()
    if kind not in ("cpu", "cuda") or (checked_integer(device_id, "device_id") and kind == "cpu"):
        raise UnsupportedError(
            f"device {device_type}:{device_id} is not supported",
            rule="devices",
            remedy="use cpu, or cuda with a number",
        )
    return kind


@dataclass(frozen=True)
class OrtDevice:
    """A device by ONNX Runtime's numbers: type 0 is the CPU, 1 a GPU."""

    kind: str
    id: int = 0

    @staticmethod
    def make(ort_device_name: str, device_id: int = 0, vendor_id: int = -1) -> OrtDevice:
        """Return the device of a name. UnsupportedError: it is neither cpu nor cuda."""
        return OrtDevice(check_device(ort_device_name, device_id), device_id)

    def device_id(self) -> int:
        """Return its number among the devices of its type."""
        return self.id

    def device_type(self) -> int:
        """Return 0 for cpu, 1 for cuda."""
        return int(self.kind == "cuda")

    def device_mem_type(self) -> int:
        """Return 0, the default memory."""
        return 0


def _on_host(data: Any) -> bool:
    """Whether a tensor of any library is in memory of the host."""
    if isinstance(data, np.ndarray):
        return True
    from polydyn.runtime.cuda.dlpack import CPU, CUDA_HOST, device_of

    return device_of(data) in (CPU, CUDA_HOST)


def _is_device_array(data: Any) -> bool:
    """Whether a value is a ``DeviceArray``. The modules of CUDA are not imported for it."""
    module = sys.modules.get("polydyn.runtime.cuda.array")
    return module is not None and isinstance(data, module.DeviceArray)


class OrtValue(Refusing):
    """A tensor: a numpy array that is used in place, or memory of a CUDA device.

    ``array``: a numpy array, or an object on a device that DLPack or ``__cuda_array_interface__`` exports. ``dtype``:
    its dtype name, if numpy's differs (bfloat16 is stored as uint16).
    """

    def __init__(self, array: Any, dtype: str | None = None) -> None:
        self.array = array
        self._dtype = dtype or str(array.dtype).removeprefix("torch.")

    @classmethod
    def ortvalue_from_numpy(
        cls, numpy_obj: Array, /, device_type: str = "cpu", device_id: int = 0, vendor_id: int = -1
    ) -> OrtValue:
        """Return the array itself on the CPU (a copy only if it is not C-contiguous), or a copy on a device."""
        checked_array(numpy_obj)
        if check_device(device_type, device_id) == "cpu":
            return cls(np.ascontiguousarray(numpy_obj) if numpy_obj.ndim else numpy_obj)
        from polydyn.runtime.cuda.array import DeviceArray
        from polydyn.runtime.cuda.session import open_session  # opens the driver

        return cls(DeviceArray.of(open_session(device_id), numpy_obj))

    @classmethod
    def ortvalue_from_numpy_with_onnx_type(cls, data: Array, /, onnx_element_type: int) -> OrtValue:
        """Return an array whose bits are elements of a type that numpy lacks. InputError: the element sizes differ."""
        dtype = dtype_name(onnx_element_type)
        checked_array(data)
        if numpy_dtype(dtype).itemsize != data.itemsize:
            raise InputError(f"{data.dtype} cannot store {dtype}", remedy="pass elements of the same size")
        return cls(data.view(numpy_dtype(dtype)), dtype)

    @classmethod
    def ortvalue_from_shape_and_type(
        cls, shape: Sequence[int], element_type: Any, device_type: str = "cpu", device_id: int = 0,
        vendor_id: int = -1, memory_info: None = None,
    ) -> OrtValue:  # fmt: skip
        """Return memory with undefined contents. ``element_type``: a numpy dtype, or a ``TensorProto.DataType``."""
        if memory_info is not None:
            raise UnsupportedError("memory_info is not supported", rule="allocators", remedy="name device_type")
        dtype, sizes = dtype_name(element_type), checked_shape(shape)
        storage = numpy_dtype(dtype)
        if check_device(device_type, device_id) == "cpu":
            try:
                return cls(np.empty(sizes, storage), dtype)
            except (MemoryError, ValueError) as e:  # ValueError: numpy cannot create an array of this shape
                raise InputError(f"no memory for a tensor of shape {list(sizes)}", remedy="pass smaller sizes") from e
        from polydyn.runtime.cuda.array import DeviceArray
        from polydyn.runtime.cuda.session import open_session  # opens the driver

        return cls(DeviceArray(open_session(device_id), sizes, dtype, storage.itemsize), dtype)

    @classmethod
    def from_dlpack(cls, data: Any, is_bool_tensor: bool = False) -> OrtValue:
        """Return a tensor of another library without a copy; ``data`` has ``__dlpack__``."""
        if not hasattr(data, "__dlpack__"):
            raise InputError(f"a {type(data).__name__} has no __dlpack__", remedy="pass a tensor of another library")
        if not _on_host(data):
            return cls(data)
        array, is_bool = np.from_dlpack(data), checked_flag(is_bool_tensor, "is_bool_tensor")
        return cls(array.view(np.bool_) if is_bool and array.dtype == np.uint8 else array)

    def __dlpack__(self, *, stream: Any = None, **more: Any) -> Any:
        if isinstance(self.array, np.ndarray):
            return self.array.__dlpack__()
        return self.array.__dlpack__(stream=stream)

    def __dlpack_device__(self) -> tuple[int, int]:
        device: tuple[int, int] = self.array.__dlpack_device__()
        return device

    def numpy(self) -> Array:
        """Return the array itself on the CPU, or a copy from a device."""
        if isinstance(self.array, np.ndarray):
            return self.array
        if _is_device_array(self.array):
            return self.array.numpy()  # type: ignore[no-any-return]
        raise UnsupportedError(
            f"a {type(self.array).__name__} cannot be copied to the host here", remedy="copy it with its own library"
        )

    def update_inplace(self, np_arr: Array) -> None:
        """Copy an array of the same dtype and shape into this tensor. InputError: dtype or shape differ."""
        checked_array(np_arr)
        if str(np_arr.dtype) != str(numpy_dtype(self._dtype)) or list(np_arr.shape) != self.shape():
            raise InputError(
                f"{np_arr.dtype}{list(np_arr.shape)} does not fit into {self._dtype}{self.shape()}",
                remedy="make a new OrtValue",
            )
        if isinstance(self.array, np.ndarray):
            self.array[...] = np_arr
        elif _is_device_array(self.array):
            self.array.copy_from(np_arr)
        else:
            raise UnsupportedError(f"a {type(self.array).__name__} is read-only here", remedy="make a new OrtValue")

    def shape(self) -> list[int]:
        """Return the sizes of its axes."""
        return [int(n) for n in self.array.shape]

    def data_ptr(self) -> int:
        """Return its address."""
        if isinstance(self.array, np.ndarray):
            return int(self.array.ctypes.data)
        pointer = getattr(self.array, "pointer", None)
        address: int = self.array.data_ptr() if pointer is None else pointer
        return address

    def data_type(self) -> str:
        """Return its type, for example ``tensor(float)``."""
        return tensor_type(self._dtype)

    def element_type(self) -> int:
        """Return its ``TensorProto.DataType``."""
        return onnx_code(self._dtype)

    def device_name(self) -> str:
        """Return ``cpu`` or ``cuda``."""
        return "cpu" if _on_host(self.array) else "cuda"

    def tensor_size_in_bytes(self) -> int:
        """Return the size of its elements in bytes."""
        return math.prod(self.shape()) * numpy_dtype(self._dtype).itemsize

    def has_value(self) -> bool:
        """Return True, because empty values do not exist here."""
        return True

    def is_tensor(self) -> bool:
        """Return True, because other values do not exist here."""
        return True

    def is_sparse_tensor(self) -> bool:
        """Return False."""
        return False

    def is_tensor_sequence(self) -> bool:
        """Return False."""
        return False
