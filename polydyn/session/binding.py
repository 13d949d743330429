"""IOBinding: inputs and outputs of a session in fixed memory."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from polydyn.arguments import checked_text
from polydyn.errors import InputError, UnsupportedError
from polydyn.runtime.program import Program, numpy_dtype
from polydyn.session.missing_names import Refusing
from polydyn.session.values import (
    Array,
    NodeArg,
    OrtValue,
    check_device,
    checked_shape,
    checked_value,
    dtype_name,
    tensor_type,
)


class Bound(Protocol):
    """The part of a session that a binding uses."""

    program: Program

    def get_inputs(self) -> list[NodeArg]:
        """Return the inputs."""

    def get_outputs(self) -> list[NodeArg]:
        """Return the outputs."""


class _DevicePointer:
    """Device memory known only by its address."""

    def __init__(self, pointer: int, shape: tuple[int, ...], dtype: str) -> None:
        self.pointer, self.shape, self.dtype = pointer, shape, dtype
        typestr = numpy_dtype(dtype).str
        self.__cuda_array_interface__ = {"shape": shape, "typestr": typestr, "data": (pointer, False), "version": 3}


def tensor_at(device_type: str, device_id: int, element_type: Any, shape: Sequence[int], pointer: int) -> OrtValue:
    """Return the tensor at an address; the caller keeps the memory alive."""
    dtype, sizes = dtype_name(element_type), checked_shape(shape)
    if not isinstance(pointer, int) or (not pointer and 0 not in sizes):
        raise InputError(f"the address is {pointer!r}", remedy="pass the address of the tensor's memory")
    if check_device(device_type, device_id) == "cuda":
        return OrtValue(_DevicePointer(pointer, sizes, dtype), dtype)
    storage = numpy_dtype(dtype)
    count = int(np.prod(sizes, dtype=np.int64)) * storage.itemsize
    if not count:
        return OrtValue(np.empty(sizes, storage), dtype)
    memory = memoryview((ctypes.c_uint8 * count).from_address(pointer))
    return OrtValue(np.frombuffer(memory, storage).reshape(sizes), dtype)


class IOBinding(Refusing):
    """Inputs and outputs of a session in fixed memory. ``InferenceSession.io_binding`` also creates one.

    If the bindings do not change and every output is bound to memory, only the first call checks them.
    """

    def __init__(self, session: Bound) -> None:
        self._program = session.program
        args = {"input": session.get_inputs(), "output": session.get_outputs()}
        self._types = {kind: {a.name: a.type for a in some} for kind, some in args.items()}
        self._inputs: dict[str, OrtValue] = {}
        self._outputs: dict[str, OrtValue | None] = {}
        self._results: list[OrtValue] = []
        self._call: Any = None

    def bind_cpu_input(self, name: str, arr_on_cpu: Array) -> None:
        """Bind an input to an array, which is read at each call."""
        self.bind_ortvalue_input(name, OrtValue.ortvalue_from_numpy(arr_on_cpu))

    def bind_input(
        self, name: str, device_type: str, device_id: int, element_type: Any, shape: Sequence[int], buffer_ptr: int
    ) -> None:
        """Bind an input to an address."""
        self.bind_ortvalue_input(name, tensor_at(device_type, device_id, element_type, shape, buffer_ptr))

    def bind_ortvalue_input(self, name: str, ortvalue: OrtValue) -> None:
        """Bind an input to a tensor. InputError: no input has this name and type."""
        self._check("input", name, checked_value(ortvalue, "the tensor"))
        self._inputs[name], self._call = ortvalue, None

    def bind_output(
        self, name: str, device_type: str = "cpu", device_id: int = 0, element_type: Any = None,
        shape: Sequence[int] | None = None, buffer_ptr: int | None = None,
    ) -> None:  # fmt: skip
        """Bind an output to an address. Without one, every call creates a new tensor on the device."""
        kind = check_device(device_type, device_id)
        if buffer_ptr is None:
            if kind == "cuda" and "cuda" not in self._program.manifest:
                raise InputError(f"output '{name}' cannot be on {device_type}", tensor=name, remedy="bind it to cpu")
            self._check("output", name, None)
            self._outputs[name], self._call = None, None
            return
        if element_type is None or shape is None:
            raise InputError(f"output '{name}' has an address only", tensor=name, remedy="give element_type and shape")
        self.bind_ortvalue_output(name, tensor_at(device_type, device_id, element_type, shape, buffer_ptr))

    def bind_ortvalue_output(self, name: str, ortvalue: OrtValue) -> None:
        """Bind an output to a tensor. InputError: no output has this name and type."""
        self._check("output", name, checked_value(ortvalue, "the tensor"))
        self._outputs[name], self._call = ortvalue, None

    def synchronize_inputs(self) -> None:
        """Has no effect: calls wait for their inputs."""

    def synchronize_outputs(self) -> None:
        """Has no effect: reading an output waits for it."""

    def clear_binding_inputs(self) -> None:
        """Remove the input bindings."""
        self._inputs.clear()
        self._call = None

    def clear_binding_outputs(self) -> None:
        """Remove the output bindings and the results of the last call."""
        self._outputs.clear()
        self._results = []
        self._call = None

    def get_outputs(self) -> list[OrtValue]:
        """Return the outputs of the last call, in the order in which they were bound."""
        return list(self._results)

    def copy_outputs_to_cpu(self) -> list[Array]:
        """Return the outputs of the last call as numpy arrays."""
        return [v.numpy() for v in self._results]

    def run(self) -> None:
        """Run one call. InputError: an input is not bound, or the bound tensors do not match."""
        if not self._outputs:
            raise InputError("no output is bound", remedy="bind_output every output that is needed")
        if self._call is not None:
            self._call()
            return
        feeds = {n: v.array for n, v in self._inputs.items()}
        out = {n: v.array for n, v in self._outputs.items() if v is not None}
        if out.keys() == self._types["output"].keys():
            self._call = self._bound(feeds, out)
        results: Mapping[str, Any] = self._call() if self._call is not None else self._program.run(feeds, out)
        bound = self._outputs.items()
        self._results = [v or OrtValue(results[n], self._dtypes.get(n)) for n, v in bound]

    def _bound(self, feeds: Mapping[str, Any], out: Mapping[str, Any]) -> Any:
        """Return the program's bound call, or None if an input must be converted first."""
        try:
            return self._program.bind(feeds, out)
        except (InputError, UnsupportedError):
            return None  # run reports the error, or converts

    @property
    def _dtypes(self) -> dict[str, str]:
        return {o["name"]: o["dtype"] for o in self._program.manifest["outputs"]}

    def _check(self, kind: str, name: str, value: OrtValue | None) -> None:
        types = self._types[kind]
        if checked_text(name, f"the name of an {kind}") not in types:
            remedy = f"its {kind}s are {', '.join(types)}"
            raise InputError(f"the model has no {kind} '{name}'", tensor=name, remedy=remedy)
        if value is not None and value.data_type() not in (types[name], *_storage_types(types[name])):
            message = f"{kind} '{name}' is {value.data_type()}, the model has {types[name]}"
            raise InputError(message, tensor=name, remedy="convert the array with astype, or bind one of this type")


def _storage_types(kind: str) -> tuple[str, ...]:
    """Return types that may store the bits of another type."""
    return (tensor_type("uint16"),) if kind == tensor_type("bfloat16") else ()
