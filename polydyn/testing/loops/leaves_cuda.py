"""Meaning of the device functions that kernels of sm_80 call (``codegen/device/pd_device.cuh``)."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from polydyn.codegen.ir import Apply, Call, Pointer
from polydyn.graph.dtypes import numpy_dtype
from polydyn.schedules.expr import WIDENED, Array, Value
from polydyn.testing.loops.indices import Env, Run
from polydyn.testing.loops.rooms import Broken
from polydyn.testing.loops.warps import LANES, WARP, Bytes, elements, ldmatrix, mma

if TYPE_CHECKING:
    from polydyn.testing.loops.cuda import CudaRun, Ready

Action = Callable[[Env], Any]
WAITS = ("pd_syncthreads",)
"""Leaves at which a warp may wait for others."""
MMA_TYPES: Mapping[str, tuple[str, str]] = {
    "f16": ("float16", "float16"), "bf16": ("bfloat16", "bfloat16"), "tf32": ("tf32", "tf32"), "s8": ("int8", "int8"),
    "u8": ("uint8", "uint8"), "s8u8": ("int8", "uint8"), "u8s8": ("uint8", "int8"),
    "e4m3": ("float8_e4m3fn",) * 2, "e5m2": ("float8_e5m2",) * 2, "e4m3e5m2": ("float8_e4m3fn", "float8_e5m2"),
    "e5m2e4m3": ("float8_e5m2", "float8_e4m3fn"),
}  # fmt: skip
"""End of the name of a product instruction -> the types of its operands."""


@dataclass
class Copy:
    """An asynchronous copy of a warp. ``bytes``: that each thread reads; the rest of ``size`` becomes 0."""

    target: Bytes
    to: Any
    source: Bytes
    start: Any
    size: int
    bytes: Array
    mask: Array
    group: int


def _template(name: str) -> int:
    found = re.search(r"<(\d+)>", name)
    if found is None:
        raise Broken(f"{name} has no number")
    return int(found[1])


def _whole(e: Env, what: str) -> None:
    if not e[""].all():
        raise Broken(f"{what} is reached by some threads of a warp only")


def _nothing(run: CudaRun, n: Call) -> Action:
    return lambda e: None


def _syncwarp(run: CudaRun, n: Call) -> Action:
    return lambda e: _whole(e, n.function)


def _barrier(run: CudaRun, n: Call) -> Action:
    def act(e: Env) -> Generator[Ready, None, None]:
        _whole(e, n.function)
        yield run.block.barrier()

    return act


# -- memory ------------------------------------------------------------------------------------------------------------


def _registers(e: Env, at: tuple[str, Run], count: int) -> tuple[Array, int]:
    """Return a register array and the first of ``count`` of its elements."""
    array, first = e[at[0]], at[1](e)
    if np.ndim(first) or first < 0 or first + count > array.shape[1]:
        raise Broken(f"registers {at[0]} from {first} on, {count} of {array.shape[1]}")
    return array, int(first)


def _copy(run: CudaRun, n: Call) -> Action:
    """cp.async: the destination is NaN until the wait that retires the group."""
    size, to, source = _template(n.function), run.place(n.args[0]), run.place(n.args[1])
    amount, whole = run.values.compile(n.args[2]), n.function.startswith("pd_cp_async_if")

    def act(e: Env) -> None:
        (target, at), (memory, start), mask = to(e), source(e), e[""].copy()
        count = np.broadcast_to(np.asarray(amount(e)), (WARP,)).astype(np.int64) * (size if whole else 1)
        if ((count < 0) | (count > size))[mask].any():
            raise Broken(f"{n.function} of {count} bytes")
        memory.places(np.where(count > 0, start, 0), 1, mask & (count > 0))
        if (np.broadcast_to(np.asarray(start), (WARP,))[mask & (count > 0)] % size).any():
            raise Broken(f"{n.function}: a source that is no multiple of {size}")
        target.write(at, np.full((WARP, size), 0xFF, np.uint8), mask, size)
        e[" warp"].copies.append(Copy(target, at, memory, start, size, count, mask, e[" warp"].groups))

    return act


def _commit(run: CudaRun, n: Call) -> Action:
    def act(e: Env) -> None:
        e[" warp"].groups += 1

    return act


def _land(run: CudaRun, n: Call) -> Action:
    """Finish the copies of all groups but the newest ones."""
    later = _template(n.function)

    def act(e: Env) -> None:
        warp, left = e[" warp"], list[Copy]()
        for c in warp.copies:
            if c.group + later >= warp.groups:
                left.append(c)
                continue
            data = np.zeros((WARP, c.size), np.uint8)
            for count in set(c.bytes[c.mask].tolist()) - {0}:
                mask = c.mask & (c.bytes == count)
                data[mask, :count] = c.source.read(c.start, "uint8", mask, count, 1)[mask]
            c.target.write(c.to, data, c.mask, c.size)
        warp.copies = left

    return act


def _move(load: bool, shared: bool) -> Callable[[CudaRun, Call], Action]:
    """Neighbouring elements between memory and registers, where each is a value of its own."""

    def made(run: CudaRun, n: Call) -> Action:
        count = _template(n.function)
        register, memory = n.args if load else n.args[::-1]
        at, place = run.in_registers(register), run.place(memory)
        assert isinstance(memory, Value)
        dtype = register.dtype if shared else run.types[memory.buffer] if isinstance(memory, Pointer) else memory.dtype
        if shared and dtype in WIDENED:
            dtype = "float32"
        align = min(16, count * numpy_dtype(dtype).itemsize)

        def act(e: Env) -> None:
            (room, start), (array, first) = place(e), _registers(e, at, count)
            if load:
                found = room.read(start, dtype, e[""], count, align).astype(array.dtype)
                array[e[""], first : first + count] = found[e[""]]
            else:
                room.write(start, array[:, first : first + count].astype(numpy_dtype(dtype)), e[""], align)

        return act

    return made


def _sts(run: CudaRun, n: Call) -> Action:
    place, value, dtype = run.place(n.args[0]), run.values.compile(n.args[1]), n.args[0].dtype

    def act(e: Env) -> None:
        room, at = place(e)
        data = np.broadcast_to(np.asarray(value(e)), (WARP,)).astype(numpy_dtype(dtype))
        room.write(at, data[:, None], e[""])

    return act


def _matrices(run: CudaRun, n: Call) -> Action:
    at, place, transposed = run.in_registers(n.args[0]), run.place(n.args[1]), n.function.endswith("_trans")

    def act(e: Env) -> None:
        _whole(e, n.function)
        room, start = place(e)
        array, first = _registers(e, at, 4)
        array[:, first : first + 4] = ldmatrix(room.read(start, "uint16", e[""], 8), transposed).view(array.dtype)

    return act


def _byte_columns(run: CudaRun, n: Call) -> Action:
    """Bytes of pairs of columns become those of even and those of odd columns (``pd_scalar.h``)."""
    at = run.in_registers(n.args[0])

    def act(e: Env) -> None:
        array, first = _registers(e, at, 4)
        r = np.ascontiguousarray(array[:, first : first + 4]).view(np.uint8).reshape(WARP, 4, 4)
        order = np.where((LANES % 4 < 2)[:, None], np.array([0, 2, 4, 6]), np.array([4, 6, 0, 2]))
        out = np.zeros_like(r)
        for pair, (low, high) in enumerate(((0, 1), (2, 3))):
            eight = r[:, [low, high]].reshape(WARP, 8)
            out[:, pair] = np.take_along_axis(eight, order, 1)
            out[:, pair + 2] = np.take_along_axis(eight, order + 1, 1)
        array[:, first : first + 4] = out.reshape(WARP, 16).view(np.uint32)

    return act


def _product(run: CudaRun, n: Call) -> Action:
    kind = n.function.rsplit("_", 1)[1]
    d, a, b = (run.in_registers(x) for x in n.args)

    def act(e: Env) -> None:
        _whole(e, n.function)
        (sums, i), (left, j), (right, k) = (_registers(e, x, c) for x, c in ((d, 4), (a, 4), (b, 2)))
        sums[:, i : i + 4] = mma(sums[:, i : i + 4], left[:, j : j + 4], right[:, k : k + 2], MMA_TYPES[kind])

    return act


def _round_pair(dtype: str) -> Callable[[CudaRun, Call], Action]:
    def made(run: CudaRun, n: Call) -> Action:
        at = run.in_registers(n.args[0])

        def act(e: Env) -> None:
            array, first = _registers(e, at, 2)
            array[:, first : first + 2] = array[:, first : first + 2].astype(numpy_dtype(dtype)).astype(np.float32)

        return act

    return made


def _pack(run: CudaRun, n: Call) -> Action:
    """The words that values make in memory, of the type of the first pointer."""
    count, of, words, values = (
        _template(n.function),
        n.args[0],
        run.in_registers(n.args[1]),
        run.in_registers(n.args[2]),
    )

    def act(e: Env) -> None:
        source, first = _registers(e, values, count)
        data = np.ascontiguousarray(source[:, first : first + count].astype(numpy_dtype(of.dtype))).view(np.uint32)
        array, at = _registers(e, words, data.shape[1])
        array[:, at : at + data.shape[1]] = data

    return act


CALLS: Mapping[str, Callable[[CudaRun, Call], Action]] = {
    "pd_grid_begin": _nothing, "pd_fetch": _nothing, "pd_syncthreads": _barrier, "pd_syncwarp": _syncwarp,
    "pd_cp_async_commit": _commit, "pd_cp_async_wait": _land, "pd_cp_async": _copy, "pd_ldg_wide": _move(True, False),
    "pd_stg_wide": _move(False, False), "pd_lds_wide<": _move(True, True), "pd_sts_wide": _move(False, True),
    "pd_leave": _move(False, False), "pd_left": _move(True, False), "pd_sts<": _sts, "pd_ldmatrix_x4": _matrices,
    "pd_byte_columns": _byte_columns, "pd_mma_": _product, "pd_round_f16x2": _round_pair("float16"),
    "pd_round_bf16x2": _round_pair("bfloat16"), "pd_pack<": _pack,
}  # fmt: skip
"""Leaf, or the prefix of its name -> the action of a call."""


# -- functions ---------------------------------------------------------------------------------------------------------


def _plain(f: Callable[..., Any]) -> Callable[[CudaRun, Apply, list[Run]], Run]:
    """A function of the values of all threads."""

    def made(run: CudaRun, v: Apply, args: list[Run]) -> Run:
        return lambda e: f(*[a(e) for a in args])

    return made


def _shuffle(lane: Callable[[Any], Any]) -> Callable[[CudaRun, Apply, list[Run]], Run]:
    """The value of another lane. ``lane``: from the second argument."""

    def made(run: CudaRun, v: Apply, args: list[Run]) -> Run:
        def call(e: Env) -> Any:
            _whole(e, v.function)
            value = np.broadcast_to(np.asarray(args[0](e)), (WARP,))
            source = np.broadcast_to(np.asarray(lane(args[1](e))), (WARP,))
            return value[np.where((source >= 0) & (source < WARP), source, LANES)]

        return call

    return made


def _left(run: CudaRun, v: Apply, args: list[Run]) -> Run:
    place, dtype = run.place(v.args[0]), v.dtype

    def call(e: Env) -> Any:
        room, at = place(e)
        return room.read(at, dtype, e[""])[:, 0]

    return call


def _pair(dtype: str) -> Callable[[Any, Any], Any]:
    kind = numpy_dtype(dtype)

    def pack(low: Any, high: Any) -> Any:
        two = np.stack([np.broadcast_to(np.asarray(x), (WARP,)) for x in (low, high)], 1)
        return np.ascontiguousarray(two.astype(kind)).view(np.uint32)[:, 0]

    return pack


def _tf32(x: Any) -> Any:
    """Round to 10 bits of mantissa, ties away from zero; the bits of it."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)
    return np.where(np.isnan(x), bits, rounded)[()]


def _rest(x: Any) -> Any:
    return _tf32(np.asarray(x, np.float32) - np.asarray(_tf32(x), np.uint32).view(np.float32))


def _dp4a(types: str) -> Callable[[Any, Any, Any], Any]:
    kinds = MMA_TYPES[types]

    def dot(a: Any, b: Any, c: Any) -> Any:
        x, y = (np.broadcast_to(np.asarray(w), (WARP,)) for w in (a, b))
        left, right = elements(x[:, None], kinds[0])[:, 0], elements(y[:, None], kinds[1])[:, 0]
        return (np.asarray(c).astype(np.int64) + (left * right).sum(1)).astype(np.int32)

    return dot


FUNCTIONS: Mapping[str, Callable[[CudaRun, Apply, list[Run]], Run]] = {
    "pd_shfl_xor": _shuffle(lambda m: LANES ^ m), "pd_shfl_idx": _shuffle(lambda lane: np.asarray(lane) & 31),
    "pd_exp2_fast": _plain(lambda x: np.exp2(np.asarray(x, np.float32))), "pd_left": _left,
    "pd_f32_to_f16": _plain(lambda x: np.asarray(x).astype(np.float16).astype(np.float32)),
    "pd_f32_to_bf16": _plain(lambda x: np.asarray(x).astype(numpy_dtype("bfloat16")).astype(np.float32)),
    "pd_f32_to_e4m3": _plain(lambda x: np.asarray(x).astype(numpy_dtype("float8_e4m3fn")).astype(np.float32)),
    "pd_f32_to_e5m2": _plain(lambda x: np.asarray(x).astype(numpy_dtype("float8_e5m2")).astype(np.float32)),
    "pd_pack_f16x2": _plain(_pair("float16")), "pd_pack_bf16x2": _plain(_pair("bfloat16")),
    "pd_f32_to_tf32": _plain(_tf32), "pd_tf32_rest": _plain(_rest),
    "pd_bits_to_f32": _plain(lambda x: np.asarray(x, np.uint32).view(np.float32)[()]),
    **{f"pd_dp4a_{t}": _plain(_dp4a(t)) for t in ("s8", "u8", "u8s8", "s8u8")},
}  # fmt: skip
"""Leaf -> the function that compiles a call."""
