"""Vectorisation of a named loop: strip-mine by the vector width, then lanes.

A loop without reductions becomes full vectors and one masked tail. A loop that accumulates into registers defined
outside it becomes lane-partial accumulators on several independent chains and a horizontal reduction at the end. The
tail accumulates under a predicate, so that padding needs no neutral fill (docs/cpu.md 4).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial, reduce

from polydyn.codegen import ir
from polydyn.codegen.passes.announce import ANNOUNCE
from polydyn.schedules.errors import CodegenError, Declined
from polydyn.schedules.expr import (
    C_FUNCTIONS,
    REDUCTIONS,
    Const,
    FromIndex,
    Op,
    Value,
    cast,
    conjuncts,
    const,
    neutral,
    op,
)
from polydyn.schedules.index import ONE, ZERO, Atom, Index, maximum, minimum
from polydyn.schedules.lanes import FLOAT_LANES, RAMP_DTYPES, VECTOR_DTYPES, lane_stride

SUM_DTYPES = ("float32", "int32", "int64", "float16", "bfloat16", "float64")
EXTREME_DTYPES = (*SUM_DTYPES, "uint8", "int8", "uint16", "int16")
"""Dtypes whose minima and maxima are found in lanes."""
MASKED_LOAD_DTYPES = ("float32", "uint8", "int8", "uint16", "int16", "float16", "bfloat16", "float64")
"""Dtypes that may be loaded in a subset of lanes."""
PARAMETERS = ("uint8", "int8")
"""Dtypes of zero points. The first byte of such a tensor exists and may be loaded outside its guard."""

REPEAT = "vrepeat_f32"
"""Leaf whose lane l is lane ``(l + phase) // m`` of its first argument; the others are m and the phase, below m."""
SMALL = 1 << 16
"""Maximum numbers of an index that is computed in 32 bits."""
REMAINDER = "vremainder_i32"
"""Leaf with the remainders of lanes from 0 to twice the width by a number up to the width."""
SPREAD = {m: f"vspread{m}_f32" for m in (2, 4, 8)}
"""m -> the leaf whose lane l is lane ``l // m * m`` of its argument."""


class _NoVectorsError(Exception):
    """A loop cannot be vectorised. Never leaves this file: the functions below return ``Declined``."""


class _Lanes:
    """Rewrites one iteration's body for lanes ``start + @lane`` of ``var``."""

    def __init__(self, var: str, start: Index, width: int, mask: Index | None) -> None:
        self.var, self.start, self.width, self.mask = var, start, width, mask
        self.local: set[str] = set()

    def split(self, i: Index) -> tuple[Index, Index]:
        """Return (stride per lane, rest)."""
        strided = lane_stride(i, self.var, self.start, self.width)
        if strided is None:
            raise _NoVectorsError(f"{i} is not affine in the lane of {self.var}")
        return strided

    def value(self, v: Value) -> Value:
        out = ir.map_value(v, self._part)
        for x in (v, *(x for x in ir.walk_value(out) if ir.lanes_of(x) > 1)):
            if isinstance(x, Op) and x.name in C_FUNCTIONS:
                raise _NoVectorsError(f"{x.name} is a C function of one element")
            if x.dtype not in VECTOR_DTYPES:
                raise _NoVectorsError(f"no vectors of {x.dtype}")
        return out

    def _part(self, v: Value) -> Value:
        if isinstance(v, ir.FlatLoad):
            if lane_stride(v.address, self.var, self.start, self.width) is None and (read := self._by_quotient(v)):
                return read
            stride, rest = self.split(v.address)
            if stride == ZERO:
                return replace(v, address=rest)
            return replace(v, address=rest, lanes=self.width, stride=stride, mask=self.mask)
        if isinstance(v, FromIndex):
            if lane_stride(v.index, self.var, self.start, self.width) is None:
                return self._remainder(v) or cast(self._integers(v.index), v.dtype)
            stride, rest = self.split(v.index)
            if stride != ZERO and v.dtype not in RAMP_DTYPES:
                raise _NoVectorsError(f"no ramp of {v.dtype}")
            return replace(v, index=rest) if stride == ZERO else ir.Ramp(v.dtype, rest, stride, self.width)
        if isinstance(v, ir.Reg) and v.name in self.local:
            return replace(v, lanes=self.width)
        if isinstance(v, Op) and v.name == "where" and ir.lanes_of(v.args[0]) > 1 and any(map(_loads, v.args[1:])):
            return _guarded(v)
        return _range(v, self.width) if isinstance(v, Op) and v.dtype == "bool" else v

    def _by_quotient(self, v: ir.FlatLoad) -> Value | None:
        """Return a load of consecutive elements that runs of lanes share: an address that moves with ``lane // m``."""
        if v.dtype not in FLOAT_LANES or v.guard is not None:
            return None
        count = Index.of(self.width) if self.mask is None else minimum(self.width, self.mask)
        for a in v.address.atoms():
            if isinstance(a, str) or a.kind != "floordiv":
                continue
            m = a.args[1].constant
            if m is None or not 1 < m <= self.width or (rest := self._run_of(a)) is None:
                continue
            base = lane_stride(v.address - Index({(a,): 1}), self.var, self.start, self.width)
            if base is not None and base[0] == ZERO:
                first = rest // m
                phase = rest - first * m
                live = (count + phase).ceildiv(m)
                read = replace(v, address=base[1] + first, lanes=self.width, stride=ONE, mask=live)
                return ir.Apply(v.dtype, REPEAT, (read, const(m, "int64"), FromIndex("int64", phase)))
            if self.width % m == 0 and rest % m == ZERO:  # the elements of the runs are m apart
                base = lane_stride(v.address - Index({(a,): m}), self.var, self.start, self.width)
                if m in SPREAD and base is not None and base[0] == ZERO:
                    live = count.ceildiv(m) * m - (m - 1)
                    read = replace(v, address=base[1] + rest, lanes=self.width, stride=ONE, mask=live)
                    return ir.Apply(v.dtype, SPREAD[m], (read,))
        return None

    def _remainder(self, v: FromIndex) -> Value | None:
        """Return small numbers ``c + s*(x % m)``, of an x that is one larger in each lane; None for other indices."""
        for a in v.index.atoms():
            if isinstance(a, str) or a.kind != "floordiv" or not 1 < (m := a.args[1].constant or 0) <= self.width:
                continue
            first, step = self._run_of(a), -v.index.terms.get((a,), 0) // m
            left = (v.index - (a.args[0] - Index({(a,): m})) * step).constant
            if first is None or left is None or max(abs(left), abs(step)) > SMALL:
                continue
            lanes = ir.Ramp("int32", first % m, ONE, self.width)
            rest = ir.Apply("int32", REMAINDER, (lanes, const(m, "int32")))
            return cast(op("add", op("mul", rest, const(step, "int32")), const(left, "int32")), v.dtype)
        return None

    def _run_of(self, a: Atom) -> Index | None:
        """Return the dividend of a quotient in the first lane, if it is one larger in each lane."""
        found = lane_stride(a.args[0], self.var, self.start, self.width)
        return found[1] if found is not None and found[0] == ONE else None

    def _integers(self, i: Index) -> Value:
        """Return an index that is not affine in the lane, in 64-bit lanes: sums and products of minima and maxima."""
        if lane_stride(i, self.var, self.start, self.width) is not None:
            return self._part(FromIndex("int64", i))
        terms = []
        for m, c in i.terms.items():
            moving = [a for a in m if isinstance(a, Atom) and self.var in Index({(a,): 1}).symbols()]
            rest = Index({tuple(a for a in m if a not in moving): c})
            factors = [self._extreme(a) for a in moving]
            factors += [self._part(FromIndex("int64", rest))] if rest != ONE or not factors else []
            terms.append(reduce(partial(op, "mul"), factors))
        return reduce(partial(op, "add"), terms)

    def _extreme(self, a: Atom) -> Value:
        if a.kind not in ("min", "max"):
            raise _NoVectorsError(f"{a} is not affine in the lane of {self.var}")
        return reduce(partial(op, a.kind), map(self._integers, a.args))

    def body(self, body: ir.Body) -> ir.Body:
        out: list[ir.Node] = []
        for n in body:
            if isinstance(n, ir.Def):
                self.local.add(n.reg)
                out.append(replace(n, value=self.value(n.value), lanes=self.width))
            elif isinstance(n, ir.Set):
                if n.reg not in self.local:
                    raise _NoVectorsError(f"{n.reg} is carried by the vector loop {self.var}")
                out.append(replace(n, value=self.value(n.value), lanes=self.width))
            elif isinstance(n, ir.Store):
                stride, rest = self.split(n.address)
                if stride == ZERO:
                    raise _NoVectorsError(f"all lanes of {self.var} write one element of {n.buffer}")
                v = self.value(n.value)
                out.append(replace(n, address=rest, stride=stride, value=v, lanes=self.width, mask=self.mask))
            elif isinstance(n, ir.Call) and n.function == ANNOUNCE:  # once per vector
                out.append(replace(n, args=tuple(map(self._first, n.args))))
            elif isinstance(n, (ir.For, ir.Let, ir.If)):
                out.append(ir.with_bodies(self._bounds(n), tuple(map(self.body, ir.bodies(n)))))
            else:
                raise _NoVectorsError(f"{type(n).__name__} inside the vector loop {self.var}")
        return tuple(out)

    def _first(self, v: Value) -> Value:
        return replace(v, address=self.split(v.address)[1]) if isinstance(v, ir.Pointer) else v

    def _bounds(self, n: ir.For | ir.Let | ir.If) -> ir.Node:
        def inv(i: Index) -> Index:
            stride, rest = self.split(i)
            if stride != ZERO:
                raise _NoVectorsError(f"a bound depends on the lane of {self.var}: {i}")
            return rest

        if isinstance(n, ir.For):
            return replace(n, lo=inv(n.lo), hi=inv(n.hi))
        if isinstance(n, ir.Let):
            return replace(n, value=inv(n.value))
        return replace(n, cond=tuple(ir.Compare(c.relation, inv(c.left), inv(c.right)) for c in n.cond))


def _range(v: Op, width: int) -> Value:
    """Turn comparisons of consecutive integers with a uniform one into ranges of lanes."""
    a, b = v.args[0], v.args[-1]
    if v.name == "and" and isinstance(a, ir.Between) and isinstance(b, ir.Between):
        return ir.Between("bool", maximum(a.low, b.low), minimum(a.high, b.high), width)
    name, strict = v.name, v.name in ("gt", "lt")
    if isinstance(b, ir.Ramp):  # the lanes to the left
        name, a, b = {"ge": "le", "gt": "lt", "le": "ge", "lt": "gt"}.get(name, ""), b, a
    step = a.step.constant if isinstance(a, ir.Ramp) and a.dtype == "int64" else None
    if name not in ("ge", "gt", "le", "lt") or not isinstance(a, ir.Ramp) or step is None or step < 1:
        return v
    bound = b.index if isinstance(b, FromIndex) else Index.of(int(b.value)) if isinstance(b, Const) else None
    if bound is None:
        return v
    above = name in ("ge", "gt")
    first = (bound + (above == strict) - a.start).ceildiv(step)  # the first lane that is in, or out
    return ir.Between("bool", first, Index.of(width), width) if above else ir.Between("bool", ZERO, first, width)


def _guarded(v: Op) -> Value:
    """Return a choice by lane: each branch loads only in its own lanes, then both are evaluated."""
    inside, then, orelse = v.args
    then = _under(then, inside)
    loaded = then.args[0] if isinstance(then, Op) and then.name == "cast" else then
    if isinstance(loaded, ir.FlatLoad) and orelse == const(0, v.dtype):
        return then  # lanes that are not loaded are 0
    if _loads(orelse):
        orelse = _under(orelse, Op("bool", "not", (inside,)))
    return replace(v, name="select", args=(inside, then, orelse))


def _under(v: Value, guard: Value) -> Value:
    """Return a value whose loads read only elements that the lanes of a guard need."""
    if isinstance(v, ir.Apply) and v.function in (REPEAT, *SPREAD.values()):
        read, *rest = v.args
        return replace(v, args=(_under(read, _sources(v, guard)), *rest))
    if isinstance(v, (Op, ir.Apply)):
        return replace(v, args=tuple(_under(x, guard) for x in v.args))
    if not isinstance(v, ir.FlatLoad):
        return v
    if v.lanes == 1 and v.dtype in PARAMETERS and v.address == ZERO:
        return v
    if v.lanes == 1 or v.stride.constant is None or v.dtype not in MASKED_LOAD_DTYPES:
        raise _NoVectorsError("a guarded load of that stride cannot be speculated in vector lanes")
    if isinstance(guard, ir.Between) and v.mask is not None and v.guard is None:  # one range instead of two
        return replace(v, mask=None, guard=replace(guard, high=minimum(guard.high, v.mask)))
    return replace(v, guard=guard if v.guard is None else Op("bool", "and", (v.guard, guard)))


def _sources(v: ir.Apply, guard: Value) -> Value:
    """Return the guard of the vector that ``v`` permutes: true in the lanes from which the guard's lanes come."""
    parts = [_sources_of_range(v, p) if isinstance(p, ir.Between) else p for p in conjuncts(guard)]
    if any(ir.lanes_of(p) > 1 and not isinstance(p, ir.Between) for p in parts):
        raise _NoVectorsError("runs of lanes share elements, and a guard is no range of lanes")
    return reduce(partial(op, "and"), parts)


def _sources_of_range(v: ir.Apply, lanes: ir.Between) -> ir.Between:
    low, high = lanes.low, lanes.high
    if v.function == REPEAT:
        times, phase = v.args[1:]
        assert isinstance(times, Const) and isinstance(phase, FromIndex)
        m = int(times.value)
        first, end = (low + phase.index) // m, (high + phase.index).ceildiv(m)
    else:
        m = next(m for m, leaf in SPREAD.items() if leaf == v.function)
        first, end = low // m * m, high.ceildiv(m) * m - (m - 1)
    return replace(lanes, low=first, high=minimum(end, first + (high - low) * m))  # no lanes have no sources


def _loads(v: Value) -> bool:
    return any(isinstance(x, ir.FlatLoad) for x in ir.walk_value(v))


def vectorise_tile(body: ir.Body, var: str, width: int, mask_extent: Index | None = None) -> ir.Body:
    """Call ``tile_in_vectors``. CodegenError: the loops cannot be vectorised."""
    made = tile_in_vectors(body, var, width, mask_extent)
    if isinstance(made, Declined):
        raise CodegenError(f"cannot vectorise the tile: {made}")
    return made


def tile_in_vectors(body: ir.Body, var: str, width: int, mask_extent: Index | None = None) -> ir.Body | Declined:
    """Turn loops ``var`` of a constant extent that is a multiple of ``width`` into loops over vectors.

    ``mask_extent``: the number of live elements from the loop's start; further lanes are masked. Declined: the loops
    cannot be vectorised.
    """

    def f(n: ir.Node) -> ir.Node:
        if not (isinstance(n, ir.For) and n.var == var):
            return n
        trips = n.hi.constant
        if n.lo != ZERO or trips is None or trips % width:
            raise CodegenError(f"{var} in [{n.lo}, {n.hi}) is not a whole number of vectors of {width}")
        start = Index.of(var) * width if trips > width else ZERO
        lanes = _Lanes(var, start, width, None if mask_extent is None else mask_extent - start)
        return ir.For(var, ZERO, Index.of(trips // width), lanes.body(n.body), "vector")

    try:
        return ir.rewrite(body, f)
    except _NoVectorsError as e:
        return Declined(str(e))


def vectorise_loop(loop: ir.For, width: int, chains: int = 4) -> ir.Body | Declined:
    """Vectorise a loop of any extent: full vectors, then a masked tail. Reductions are as described above.

    Declined: it cannot be vectorised, and does not change.
    """
    try:
        return _vectorised(loop, width, chains)
    except _NoVectorsError as e:
        return Declined(str(e))


def _vectorised(loop: ir.For, width: int, chains: int) -> ir.Body:
    accumulators = _accumulators(loop)
    if loop.lo != ZERO:
        raise CodegenError(f"vector loop {loop.var} must start at 0")
    count = chains if accumulators else 1
    names = {r: [f"{r}_{loop.var}{c}" for c in range(count)] for r in accumulators}
    out: list[ir.Node] = []
    for reg, (reduction, dtype) in accumulators.items():
        out += [ir.Def(x, neutral(reduction, dtype), width) for x in names[reg]]
    step, v = Index.of(width * count), Index.of(loop.var)
    main = loop.hi // step
    body: list[ir.Node] = []
    for c in range(count):
        body += _iteration(loop, v * step + c * width, width, None, {r: names[r][c] for r in names}, f"_{c}")
    out.append(ir.For(loop.var, ZERO, main, tuple(body), "vector"))
    first = {r: names[r][0] for r in names}
    if count > 1 and not _divides(step, loop.hi):
        rest = (loop.hi - main * step) // width
        single = _iteration(loop, main * step + v * width, width, None, first, "_r")
        out.append(ir.For(loop.var, ZERO, rest, single, "vector"))
    if not _divides(Index.of(width), loop.hi):
        full = (loop.hi // width) * width
        tail = _iteration(loop, full, width, loop.hi - full, first, "_t")
        out.append(ir.If((ir.Compare(">", loop.hi, full),), tail))
    for reg, (reduction, dtype) in accumulators.items():
        parts: list[Value] = [ir.Reg(dtype, x, width) for x in names[reg]]
        while len(parts) > 1:  # in pairs: a chain would be longer
            pairs = zip(parts[::2], parts[1::2], strict=False)
            odd = parts[len(parts) // 2 * 2 :]
            parts = [*(Op(dtype, REDUCTIONS[reduction], pair) for pair in pairs), *odd]
        out.append(ir.Set(reg, ir.Horizontal(dtype, reduction, parts[0]), 1, reduction))
    return tuple(out)


def _divides(n: Index, x: Index) -> bool:
    return (x % n) == ZERO


def _accumulators(loop: ir.For) -> dict[str, tuple[str, str]]:
    """Return the registers set with a reduction inside the loop but defined outside: name -> (reduction, dtype)."""
    inside = {n.reg for n in ir.walk(loop.body) if isinstance(n, ir.Def)}
    out: dict[str, tuple[str, str]] = {}
    for n in ir.walk(loop.body):
        if isinstance(n, ir.Set) and n.reg not in inside:
            if n.reduce is None or out.get(n.reg, (n.reduce, n.value.dtype)) != (n.reduce, n.value.dtype):
                raise _NoVectorsError(f"{n.reg} is carried by {loop.var} but is not one reduction")
            if n.value.dtype not in (SUM_DTYPES if n.reduce in ("sum", "prod") else EXTREME_DTYPES):
                raise _NoVectorsError(f"{n.reg} accumulates {n.value.dtype}, which vectors do not support")
            out[n.reg] = (n.reduce, n.value.dtype)
    return out


def _iteration(
    loop: ir.For, start: Index, width: int, mask: Index | None, accumulators: Mapping[str, str], suffix: str
) -> ir.Body:
    """Return one vector iteration that accumulates into the lane-partial registers; local registers get a suffix."""
    lanes = _Lanes(loop.var, start, width, mask)
    lanes.local |= set(accumulators)
    local = {n.reg for n in ir.walk(loop.body) if isinstance(n, ir.Def)}
    made = lanes.body(loop.body)
    zero = {n.reg for n in ir.walk(made) if isinstance(n, ir.Def) and _zero_outside(n.value, frozenset())}

    def rename(n: ir.Node) -> ir.Node:
        if isinstance(n, (ir.Def, ir.Set)):
            reg = accumulators.get(n.reg, n.reg + suffix if n.reg in local else n.reg)
            n = replace(n, reg=reg)
            counted = isinstance(n, ir.Set) and n.reduce == "sum" and _zero_outside(n.value, zero)
            if isinstance(n, ir.Set) and n.reduce and reg in accumulators.values() and mask is not None and not counted:
                old = ir.Reg(n.value.dtype, reg, width)
                new = Op(n.value.dtype, REDUCTIONS[n.reduce], (old, n.value))
                n = ir.Set(reg, ir.Blend(n.value.dtype, new, old, mask), width)
        if isinstance(n, (ir.Store, ir.Def, ir.Set)):
            return replace(n, value=ir.map_value(n.value, name))
        return n

    def name(v: Value) -> Value:
        return replace(v, name=v.name + suffix) if isinstance(v, ir.Reg) and v.name in local else v

    return ir.rewrite(made, rename)


def _zero_outside(v: Value, zero: Collection[str]) -> bool:
    """Whether masked lanes of a value are 0: masked loads, registers ``zero``, and products of them."""
    if isinstance(v, Op) and v.name == "mul":
        return all(_zero_outside(a, zero) for a in v.args)
    return (isinstance(v, ir.FlatLoad) and v.mask is not None) or (isinstance(v, ir.Reg) and v.name in zero)
