"""IOBinding: inputs and outputs of a session at fixed places."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from polydyn.errors import InputError, UnsupportedError
from polydyn.runtime.program import Program, numpy_dtype
from polydyn.session.refusals import Refusing
from polydyn.session.values import Array, NodeArg, OrtValue, check_device, checked_shape, dtype_name, tensor_type


class Bound(Protocol):
    """What a binding asks of a session."""

    program: Program

    def get_inputs(self) -> list[NodeArg]:
        """The inputs."""

    def get_outputs(self) -> list[NodeArg]:
        """The outputs."""


class _DevicePointer:
    """Device memory that only an address is known of."""

    def __init__(self, pointer: int, shape: tuple[int, ...], dtype: str) -> None:
        self.pointer, self.shape, self.dtype = pointer, shape, dtype
        typestr = numpy_dtype(dtype).str
        self.__cuda_array_interface__ = {"shape": shape, "typestr": typestr, "data": (pointer, False), "version": 3}


def tensor_at(device_type: str, device_id: int, element_type: Any, shape: Sequence[int], pointer: int) -> OrtValue:
    """The tensor at an address, which the caller keeps alive."""
    dtype, sizes = dtype_name(element_type), checked_shape(shape)
    if not isinstance(pointer, int) or (not pointer and 0 not in sizes):
        raise InputError(f"the address is {pointer!r}", remedy="pass the address of the tensor's memory")
    if check_device(device_type, device_id) == "cuda":
        return OrtValue(_DevicePointer(pointer, sizes, dtype), dtype)
    carrier = numpy_dtype(dtype)
    count = int(np.prod(sizes, dtype=np.int64)) * carrier.itemsize
    if not count:
        return OrtValue(np.empty(sizes, carrier), dtype)
    memory = memoryview((ctypes.c_uint8 * count).from_address(pointer))
    return OrtValue(np.frombuffer(memory, carrier).reshape(sizes), dtype)


class IOBinding(Refusing):
    """What a session reads and writes, at fixed places; ``InferenceSession.io_binding`` makes one too.

    While bindings stay as they are and every output has memory of its own, calls after the first check nothing again.
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
        """An input is read from this array, as it is at each call."""
        self.bind_ortvalue_input(name, OrtValue.ortvalue_from_numpy(arr_on_cpu))

    def bind_input(
        self, name: str, device_type: str, device_id: int, element_type: Any, shape: Sequence[int], buffer_ptr: int
    ) -> None:
        """An input is read from an address."""
        self.bind_ortvalue_input(name, tensor_at(device_type, device_id, element_type, shape, buffer_ptr))

    def bind_ortvalue_input(self, name: str, ortvalue: OrtValue) -> None:
        """An input is read from this tensor. InputError: no input of this name and type."""
        self._check("input", name, ortvalue)
        self._inputs[name], self._call = ortvalue, None

    def bind_output(
        self, name: str, device_type: str = "cpu", device_id: int = 0, element_type: Any = None,
        shape: Sequence[int] | None = None, buffer_ptr: int | None = None,
    ) -> None:  # fmt: skip
        """An output is written to an address; without one every call makes a new tensor on the device."""
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
        """An output is written into this tensor. InputError: no output of this name and type."""
        self._check("output", name, ortvalue)
        self._outputs[name], self._call = ortvalue, None

    def synchronize_inputs(self) -> None:
        """Nothing is to be waited for: calls wait for their inputs."""

    def synchronize_outputs(self) -> None:
        """Nothing is to be waited for: reading an output waits for it."""

    def clear_binding_inputs(self) -> None:
        """Forgets the inputs."""
        self._inputs.clear()
        self._call = None

    def clear_binding_outputs(self) -> None:
        """Forgets the outputs, and the results of the last call."""
        self._outputs.clear()
        self._results = []
        self._call = None

    def get_outputs(self) -> list[OrtValue]:
        """What the last call wrote, in the order in which outputs were bound."""
        return list(self._results)

    def copy_outputs_to_cpu(self) -> list[Array]:
        """What the last call wrote, as numpy arrays."""
        return [v.numpy() for v in self._results]

    def run(self) -> None:
        """One call. InputError: an input is not bound, or what is bound does not fit together."""
        if not self._outputs:
            raise InputError("no output is bound", remedy="bind_output every output that is wanted")
        if self._call is not None:
            self._call()
            return
        feeds = {n: v.array for n, v in self._inputs.items()}
        given = {n: v.array for n, v in self._outputs.items() if v is not None}
        if given.keys() == self._types["output"].keys():
            self._call = self._bound(feeds, given)
        results: Mapping[str, Any] = self._call() if self._call is not None else self._program.run(feeds, given)
        bound = self._outputs.items()
        self._results = [v or OrtValue(results[n], self._dtypes.get(n)) for n, v in bound]

    def _bound(self, feeds: Mapping[str, Any], given: Mapping[str, Any]) -> Any:
        """The program's bound call; None where an input would have to be converted first."""
        try:
            return self._program.bind(feeds, given)
        except (InputError, UnsupportedError):
            return None  # run says what is wrong, or converts

    @property
    def _dtypes(self) -> dict[str, str]:
        return {o["name"]: o["dtype"] for o in self._program.manifest["outputs"]}

    def _check(self, kind: str, name: str, value: OrtValue | None) -> None:
        types = self._types[kind]
        if name not in types:
            raise InputError(f"the model has no {kind} '{name}'", tensor=name, remedy=f"{kind}s: {', '.join(types)}")
        if value is not None and value.data_type() not in (types[name], *_carriers(types[name])):
            raise InputError(f"{kind} '{name}' is {value.data_type()}, the model has {types[name]}", tensor=name)


def _carriers(kind: str) -> tuple[str, ...]:
    """Types that may carry another one's bits."""
    return (tensor_type("uint16"),) if kind == tensor_type("bfloat16") else ()
