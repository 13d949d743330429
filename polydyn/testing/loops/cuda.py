"""Execute the loop IR of a CUDA kernel: a value is a scalar, or an array with one element per thread of a warp.

The warps of a block take turns: the first that can go on runs until it waits, so it gets as far ahead of the others as
barriers let it; in the other order it is the last. Asynchronous copies land as late as they may: at the wait that
retires their group. Memory that nobody has written is NaN, and a copy that is under way makes its destination NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from typing import Any

import numpy as np

from polydyn.codegen import ir
from polydyn.codegen.kernel import Kernel
from polydyn.graph.dtypes import numpy_dtype
from polydyn.schedules.expr import ITEMSIZE, WIDENED, Array, Value
from polydyn.schedules.index import ZERO
from polydyn.testing.loops.indices import Env, Indices, Run
from polydyn.testing.loops.leaves_cpu import leaf
from polydyn.testing.loops.leaves_cuda import CALLS, FUNCTIONS, WAITS, Copy
from polydyn.testing.loops.rooms import Broken, Unbound, poisoned, value_dtype
from polydyn.testing.loops.values import REDUCE, Values
from polydyn.testing.loops.warps import LANES, WARP, Bytes, swizzled

Ready = Callable[[], bool]
Action = Callable[[Env], Any]
"""Execute a node. An action that may wait returns a generator of conditions to wait for."""
MASK, STATE = "", " warp"
"""Names in the environment of a warp: the threads that execute, the state of the warp."""
EVERY = np.ones(WARP, bool)
MAX_STEPS = 1 << 20
LANE_GROUP = 8
SHARED_BYTES = 232_448
THREADS_OF: Mapping[str, Callable[[int], tuple[Any, int]]] = {
    "warp": lambda threads: ("lane", WARP), "lanes": lambda threads: ("lane8", LANE_GROUP),
    "block": lambda threads: ("tid", threads), "columns": lambda threads: ("warp", threads // WARP),
}  # fmt: skip
"""Kind of a loop -> the symbol that is the first iteration of a thread, and the distance to its next one."""


class Warp:
    """What a warp has besides registers: copies that are under way, and how many groups of them were committed."""

    def __init__(self, number: int) -> None:
        self.number, self.groups = number, 0
        self.copies: list[Copy] = []


class Block:
    """The state of a block: shared memory, barriers, the counter it was the last one at."""

    def __init__(self, number: int, warps: int) -> None:
        self.number, self.warps, self.last = number, warps, False
        self.shared = Bytes("shared memory", np.full(SHARED_BYTES, 0xFF, np.uint8))
        self.arrived, self.phase = 0, 0

    def barrier(self) -> Ready:
        """Arrive at the barrier of the block. Return the condition to wait for."""
        self.arrived += 1
        phase = self.phase
        if self.arrived == self.warps:
            self.arrived, self.phase = 0, phase + 1
        return lambda: self.phase > phase


class CudaRun:
    """One run of a kernel. ``buffers``: name -> (dtype, elements); ``values``: symbols of the kernel."""

    def __init__(
        self, buffers: Mapping[str, tuple[str, Array]], kernel: Kernel, values: Mapping[str, int], reverse: bool = False
    ) -> None:
        self.kernel, self.symbols, self.reverse = kernel, values, reverse
        self.types = {n: t for n, (t, _) in buffers.items()}
        self.room = {n: Bytes(n, a.reshape(-1).view(np.uint8)) for n, (_, a) in buffers.items()}
        self.shared: dict[str, Run] = {}
        self.registers: set[str] = set()
        self.offset = ZERO
        self.steps, self.executed = 0, set[int]()
        self.indices = Indices(self._fetch)
        self.values: Values = DeviceValues(self)
        self.block = Block(0, 1)
        self.threads = kernel.device.threads
        if kernel.device.cluster > 1 or kernel.device.maps:
            raise Unknown("clusters and tensor maps have no meaning here yet")

    def run(self, body: ir.Body, tasks: int) -> None:
        """Execute the blocks one after another. Raises Broken if one accesses memory out of bounds or waits forever."""
        action, _ = self._body(body)
        numbers = range(tasks)
        try:
            with np.errstate(all="ignore"):
                for number in reversed(numbers) if self.reverse else numbers:
                    self._block(action, number)
        except KeyError as e:
            raise Unbound(f"{e} has no value") from e

    def _block(self, action: Action, number: int) -> None:
        warps = self.threads // WARP
        self.block = Block(number, warps)
        states = [Warp(w) for w in range(warps)]
        running = [self._warp(action, number, w) for w in states]
        waiting: dict[int, Ready] = {w: lambda: True for w in range(warps)}
        order = range(warps - 1, -1, -1) if self.reverse else range(warps)
        while waiting:
            at = next((w for w in order if w in waiting and waiting[w]()), None)
            if at is None:
                raise Broken(f"{len(waiting)} warps wait forever")
            try:
                waiting[at] = next(running[at])
            except StopIteration:
                del waiting[at]
                if any(c.bytes.any() for c in states[at].copies):
                    raise Broken("an asynchronous copy that nobody waits for") from None
        if self.block.arrived:
            raise Broken("a warp ends while others wait at a barrier")

    def _warp(self, action: Action, number: int, warp: Warp) -> Generator[Ready, None, None]:
        tid = LANES + WARP * warp.number
        env: Env = {n: int(v) for n, v in self.symbols.items()}
        env |= {"tid": tid, "lane": LANES, "lane8": LANES % LANE_GROUP, "warp": warp.number, "bid": number}
        env |= {MASK: EVERY, STATE: warp}
        waits = action(env)
        if waits is not None:
            yield from waits

    def _fetch(self, e: Env, name: str, at: Any) -> Any:
        found = self.room[name].read(np.asarray(at) * ITEMSIZE[self.types[name]], self.types[name], e[MASK])[:, 0]
        return found.astype(np.int64) if np.ndim(at) else int(found[e[MASK]][0])

    # -- nodes -------------------------------------------------------------------------------------------------------

    def _body(self, body: ir.Body) -> tuple[Action, bool]:
        """Return the action of a body, and whether it may wait."""
        actions = [self._node(n) for n in body]
        if not any(waits for _, waits in actions):

            def plain(e: Env) -> None:
                for a, _ in actions:
                    a(e)

            return plain, False

        def run(e: Env) -> Generator[Ready, None, None]:
            for a, waits in actions:
                if waits:
                    yield from a(e)
                else:
                    a(e)

        return run, True

    def _node(self, n: ir.Node) -> tuple[Action, bool]:
        action, waits = self._action(n)
        number = id(n)

        def run(e: Env) -> Any:
            self.executed.add(number)
            return action(e)

        return run, waits

    def _action(self, n: ir.Node) -> tuple[Action, bool]:
        if isinstance(n, ir.For):
            return self._for(n)
        if isinstance(n, ir.If):
            return self._if(n)
        if isinstance(n, ir.Let):
            value, (inner, waits), var = self.indices.compile(n.value), self._body(n.body), n.var

            def bind(e: Env) -> Any:
                e[var] = value(e)
                return inner(e)

            return bind, waits
        if isinstance(n, ir.Alloc):
            return self._alloc(n)
        if isinstance(n, (ir.Mark, ir.Outline)):
            return self._body(n.body)
        if isinstance(n, ir.Store):
            return self._store(n), False
        if isinstance(n, (ir.Def, ir.Set)):
            return self._assign(n)
        if isinstance(n, ir.Call):
            return leaf(n.function, CALLS)(self, n), n.function.startswith(WAITS)
        raise Broken(f"a node without meaning: {n!r}")

    def _for(self, n: ir.For) -> tuple[Action, bool]:
        var, lo, hi, (inner, waits) = n.var, self.indices.compile(n.lo), self.indices.compile(n.hi), self._body(n.body)
        own, by = THREADS_OF[n.kind](self.threads) if n.kind in THREADS_OF else (None, 1)

        def rounds(e: Env) -> Generator[None, None, None]:
            """Set the variable and the mask of each round."""
            around, first, end = e[MASK], lo(e) + (e[own] if own else 0), hi(e)
            if np.ndim(first) == 0 and np.ndim(end) == 0:
                for x in range(int(first), int(end), by):
                    self._count(var)
                    e[var] = x
                    yield
                return
            each = np.broadcast_to(np.asarray(first), (WARP,))
            while (live := around & (each < end)).any():
                self._count(var)
                e[var], e[MASK] = each, live
                yield
                each = each + by
            e[MASK] = around

        def plain(e: Env) -> None:
            for _ in rounds(e):
                inner(e)

        def waiting(e: Env) -> Generator[Ready, None, None]:
            for _ in rounds(e):
                yield from inner(e)

        return (waiting, True) if waits else (plain, False)

    def _count(self, var: str) -> None:
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise Broken(f"loop {var} does not end")

    def _if(self, n: ir.If) -> tuple[Action, bool]:
        tests = [self.indices.compare(c) for c in n.cond]
        sides = [self._body(n.then), self._body(n.orelse)]

        def taken(e: Env) -> Generator[Action, None, None]:
            """Set the mask and yield the body of each side that some thread takes."""
            around = e[MASK]
            holds = np.logical_and.reduce([np.broadcast_to(np.asarray(t(e), bool), (WARP,)) for t in tests])
            for side, (action, _) in zip((holds, ~holds), sides, strict=True):
                mask = around & side
                if mask.any():
                    e[MASK] = mask
                    yield action
            e[MASK] = around

        def plain(e: Env) -> None:
            for action in taken(e):
                action(e)

        def waiting(e: Env) -> Generator[Ready, None, None]:
            for action in taken(e):
                waits = action(e)
                if waits is not None:
                    yield from waits

        return (waiting, True) if any(w for _, w in sides) else (plain, False)

    def _alloc(self, n: ir.Alloc) -> tuple[Action, bool]:
        self.types[n.buffer] = n.dtype
        if n.scope == "shared":
            start = self.offset
            self.shared[n.buffer] = self.indices.compile(start)
            self.offset = start + (n.size * ITEMSIZE[n.dtype]).ceildiv(16) * 16
            made = self._body(n.body)
            self.offset = start
            return made
        self.registers.add(n.buffer)
        size, (inner, waits), name = self.indices.compile(n.size), self._body(n.body), n.buffer
        kind = WIDENED.get(n.dtype, n.dtype)

        def run(e: Env) -> Any:
            e[f"{name}[]"] = poisoned((WARP, int(size(e))), kind)
            return inner(e)

        return run, waits

    # -- values ------------------------------------------------------------------------------------------------------

    def _assign(self, n: ir.Def | ir.Set) -> tuple[Action, bool]:
        name, kind = n.reg, value_dtype(n.value.dtype)
        if isinstance(n.value, ir.Apply) and n.value.function == "pd_last_block":
            return self._last_block(n.value, name), True
        value, combine = self.values.compile(n.value), REDUCE[n.reduce] if isinstance(n, ir.Set) and n.reduce else None
        keep = isinstance(n, ir.Set)

        def assign(e: Env) -> None:
            new = value(e)
            if combine is not None:
                new = np.asarray(combine(e[name], new)).astype(kind)[()]
            e[name] = new if not keep or e[MASK].all() else np.where(e[MASK], new, e[name])

        return assign, False

    def _last_block(self, v: ir.Apply, name: str) -> Action:
        """All threads of a block say it: whether the block is the last one of ``blocks``."""
        counter, blocks = self.place(v.args[0]), self.values.compile(v.args[1])

        def run(e: Env) -> Generator[Ready, None, None]:
            yield self.block.barrier()
            if e[STATE].number == 0:
                memory, at = counter(e)
                before = int(memory.read(at, "uint32", LANES == 0)[0, 0])
                after = (before + 1) % int(blocks(e))
                memory.write(at, np.full((WARP, 1), after, np.uint32), LANES == 0)
                self.block.last = after == 0
            yield self.block.barrier()
            e[name] = np.int32(self.block.last)

        return run

    def place(self, v: Value) -> Callable[[Env], tuple[Bytes, Any]]:
        """Return the function that gives the memory and the byte addresses of a tile or of a pointer to memory."""
        if isinstance(v, ir.Tile):
            start, row, column = (self.indices.compile(i) for i in (v.start, v.row, v.column))
            size, base = ITEMSIZE[v.dtype], self.shared.get(v.buffer)
            fixed = self.room.get(v.buffer)

            def tile(e: Env) -> tuple[Bytes, Any]:
                at = (start(e) + swizzled(row(e), column(e), v.pitch, v.chunk, size)) * size
                return (fixed, at) if fixed is not None else (self.block.shared, base(e) + at)  # type: ignore[misc]

            return tile
        assert isinstance(v, (ir.Pointer, ir.FlatLoad))
        address, item = self.indices.compile(v.address), ITEMSIZE[self._type(v.buffer, v.dtype)]
        if v.buffer in self.shared:
            base = self.shared[v.buffer]
            return lambda e: (self.block.shared, base(e) + address(e) * item)
        if v.buffer not in self.room:
            raise Unknown(f"{v.buffer} is allocated by a later step")
        room = self.room[v.buffer]
        return lambda e: (room, np.asarray(address(e)) * item)

    def _type(self, buffer: str, dtype: str) -> str:
        return self.types.get(buffer, dtype)

    def in_registers(self, v: Value) -> tuple[str, Run]:
        """Return the name of a register array and the function that gives the first element of a pointer to it."""
        if not isinstance(v, ir.Pointer) or v.buffer not in self.registers:
            raise Broken(f"no pointer to registers: {v!r}")
        return f"{v.buffer}[]", self.indices.compile(v.address)

    def load(self, v: ir.FlatLoad) -> Run:
        """Return the function that reads an element of memory or of a register array."""
        kind = value_dtype(v.dtype)
        if v.buffer in self.registers:
            name, at = f"{v.buffer}[]", self.indices.compile(v.address)

            def register(e: Env) -> Any:
                i = at(e)
                if np.min(i) < 0 or np.max(i) >= e[name].shape[1]:
                    raise Broken(f"{name} at {i} of {e[name].shape[1]}")
                return (e[name][:, i] if np.ndim(i) == 0 else e[name][LANES, i]).astype(kind)

            return register
        place, dtype = self.place(v), self._type(v.buffer, v.dtype)

        def read(e: Env) -> Any:
            memory, at = place(e)
            return memory.read(at, dtype, e[MASK])[:, 0].astype(kind)

        return read

    def _store(self, n: ir.Store) -> Action:
        value, kind = self.values.compile(n.value), value_dtype(n.value.dtype)
        combine = REDUCE[n.reduce] if n.reduce else None
        if n.buffer in self.registers:
            name, at = f"{n.buffer}[]", self.indices.compile(n.address)

            def keep(e: Env) -> None:
                i, new, array = at(e), value(e), e[name]
                if np.min(i) < 0 or np.max(i) >= array.shape[1]:
                    raise Broken(f"{name} at {i} of {array.shape[1]}")
                i = np.broadcast_to(np.asarray(i), (WARP,))
                old = array[LANES, i]
                new = np.asarray(new if combine is None else combine(old, new)).astype(array.dtype)
                array[LANES, i] = np.where(e[MASK], new, old)

            return keep
        place = self.place(ir.FlatLoad(n.value.dtype, n.buffer, n.address))
        dtype = self._type(n.buffer, n.value.dtype)

        def store(e: Env) -> None:
            (memory, at), new = place(e), value(e)
            if combine is not None:
                new = combine(memory.read(at, dtype, e[MASK])[:, 0].astype(kind), new)
            data = np.broadcast_to(np.asarray(new), (WARP,)).astype(numpy_dtype(dtype))
            memory.write(at, data[:, None], e[MASK])

        return store


class Unknown(Exception):
    """A body needs what the interpreter has no meaning for."""


class DeviceValues(Values):
    """Values of a warp. Of a choice, each branch is evaluated for the threads that choose it."""

    def __init__(self, run: CudaRun) -> None:
        super().__init__(run.indices, run.load, self._call)
        self.run = run

    def _call(self, v: ir.Apply, args: list[Run]) -> Run:
        meaning = leaf(v.function, FUNCTIONS)
        compiled: Run = meaning(self.run, v, args)
        return compiled

    def compile(self, v: Value) -> Run:
        """Return the function that evaluates a value."""
        if isinstance(v, ir.Tile):
            place, kind, dtype = self.run.place(v), value_dtype(v.dtype), v.dtype

            def tile(e: Env) -> Any:
                memory, at = place(e)
                return memory.read(at, dtype, e[MASK])[:, 0].astype(kind)

            return tile
        if isinstance(v, ir.Pointer):
            return lambda e: None  # an argument of a leaf, which looks at the pointer itself
        return super().compile(v)

    def _both(self, args: list[Run], need: bool) -> Run:
        first, second = args

        def both(e: Env) -> Any:
            a = first(e)
            if np.ndim(a) == 0:
                return second(e) if bool(a) == need else np.bool_(not need)
            around, out = e[MASK], np.array(a, bool)
            open_ = around & (out == need)
            if open_.any():
                e[MASK] = open_
                out[open_] = np.broadcast_to(np.asarray(second(e), bool), (WARP,))[open_]
                e[MASK] = around
            return out

        return both

    def _choice(self, args: list[Run], lanes: int, kind: Any) -> Run:
        condition, yes, no = args

        def choose(e: Env) -> Any:
            c = condition(e)
            if np.ndim(c) == 0:
                return (yes if c else no)(e)
            around, out = e[MASK], np.zeros(WARP, kind)
            for mask, branch in ((around & c, yes), (around & ~c, no)):
                if mask.any():
                    e[MASK] = mask
                    out[mask] = np.broadcast_to(np.asarray(branch(e)), (WARP,))[mask]
            e[MASK] = around
            return out

        return choose
