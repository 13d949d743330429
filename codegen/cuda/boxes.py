"""An array with a tensor map, whose boxes TMA loads and wgmma reads: the map, copies of a box, descriptors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from polydyn.codegen.ir import Apply, Call, Compare, Parameter, Pointer
from polydyn.codegen.kernel import TensorMapOf
from polydyn.codegen.passes.widen import multiples
from polydyn.schedules.errors import Declined
from polydyn.schedules.expr import ITEMSIZE, FromIndex, Load, Value
from polydyn.schedules.index import ONE, ZERO, Atom, Index, IndexLike
from polydyn.schedules.model import Group
from polydyn.schedules.ranges import is_nonnegative

V = Index.of
ALIGN = 16
"""Alignment in bytes of the pitches and base addresses of tensor maps."""
MAX_COORDINATE = 2**31 - 256
"""Maximum rows, columns and steps of a tensor map. Coordinates have 32 bits, and a panel may begin past the end."""
MAX_BATCH_DIMS = 2
"""Maximum batch dims of a map."""


@dataclass(frozen=True)
class BatchDim:
    """A batch dim of a tensor map.

    Several values of the batch iterators in ``coordinate`` may read the same element.
    """

    coordinate: Index
    extent: Index
    stride: Index


@dataclass(frozen=True)
class Taps:
    """Taps of ``length`` steps, of which the first ``steps`` exist. ``name``: the batch dim that counts the taps."""

    name: str
    length: Index
    steps: Index


@dataclass(frozen=True)
class TensorOperand:
    """An operand with a tensor map. ``along_k``: the reduction is the contiguous side; ``outer``: the batch dims.

    ``taps``: set if some steps do not exist; those read as zeros.
    """

    buffer: str
    dtype: str
    along_k: bool
    offset: Index
    pitch: Index
    outer: tuple[BatchDim, ...]
    multiples: tuple[tuple[Index, int], ...]
    taps: Taps | None = None

    @property
    def conditions(self) -> tuple[Compare, ...]:
        """Strides that must be positive and are not known to be."""
        strides = (self.pitch, *(x.stride for x in self.outer))
        return tuple(Compare(">=", s, ONE) for s in strides if not is_nonnegative(s))

    def tensor_map(self, name: str, mn: Index, k: Index, box: tuple[int, int], dtype: str = "") -> TensorMapOf:
        """Return the map of ``mn`` rows or columns and ``k`` steps, in boxes (contiguous side first)."""
        steps = self.taps.steps if self.taps else k
        dims = (*((steps, mn) if self.along_k else (mn, steps)), *(x.extent for x in self.outer))
        strides = (self.pitch, *(x.stride for x in self.outer))
        whole = (*box, *[1] * len(self.outer))
        return TensorMapOf(name, self.buffer, dtype or self.dtype, self.offset, dims, strides, whole)

    def load(
        self, name: str, place: Pointer, mn: Index, k: Index, a: Mapping[str, Index], full: Value, blocks: int = 1
    ) -> Call:
        """Copy the box that begins at row or column ``mn`` and step ``k``, in the batch at ``a``.

        ``blocks``: the number of blocks of the cluster that all receive it.
        """
        at = self._coordinates(mn, k, a)
        args = (place, Parameter("uint64", name), *at, full)
        if blocks == 1:
            return Call(f"pd_tma_load_{len(at)}d", args)
        return Call(f"pd_tma_load_{len(at)}d_to", (*args, FromIndex("int32", V(2**blocks - 1))))

    def fetch(self, name: str, mn: Index, k: Index, a: Mapping[str, Index]) -> Call:
        """Prefetch the same box to L2, for a later copy."""
        at = self._coordinates(mn, k, a)
        return Call(f"pd_tma_fetch_{len(at)}d", (Parameter("uint64", name), *at))

    def store(self, name: str, place: Pointer, mn: Index, k: Index, a: Mapping[str, Index]) -> Call:
        """Copy a box from shared to global memory."""
        at = self._coordinates(mn, k, a)
        return Call(f"pd_tma_store_{len(at)}d", (Parameter("uint64", name), place, *at))

    def _coordinates(self, mn: Index, k: Index, a: Mapping[str, Index]) -> tuple[Value, ...]:
        if self.taps:
            k, a = k % self.taps.length, {**a, self.taps.name: k // self.taps.length}
        at = (*((k, mn) if self.along_k else (mn, k)), *(x.coordinate.subs(a) for x in self.outer))
        return tuple(FromIndex("int32", i) for i in at)


def tensor_operand(group: Group, v: Value, mn: str, k: str, batch: Mapping[str, Index]) -> TensorOperand | Declined:
    """Return the tensor map operand of a load; declined if its address is not linear with aligned pitches.

    ``batch``: iterators with their extents. Several values of an iterator may read one element, like heads that read
    the same key: the address then contains quotients of it by a number.
    """
    if not isinstance(v, Load):
        return Declined("it is more than a load")
    dims: dict[str, BatchDim] = {x: BatchDim(V(x), e, ZERO) for x, e in batch.items()}

    def quotient(a: Atom) -> Index:
        of, by = (a.args[0], a.args[1].constant) if a.kind == "floordiv" else (ZERO, None)
        if by is None or str(of) not in batch:
            return a.normal()
        name = f"{of}/{by}"
        dims[name] = BatchDim(of // by, batch[str(of)].ceildiv(by), ZERO)
        return V(name)

    rest = group.arrays[v.buffer].address(v.index).map_atoms(quotient)
    strides: dict[str, Index] = {}
    for x in (mn, k, *dims):
        strides[x], rest = rest.split(x)
    iterators = {mn, k, *dims}
    if any(i.symbols() & iterators for i in (rest, *strides.values())) or not rest.is_polynomial:
        return Declined("its address is not linear")
    along_k = strides[k] == ONE
    if not along_k and strides[mn] != ONE:
        return Declined("it does not have unit stride along either axis")
    pitch = strides[mn] if along_k else strides[k]
    outer = tuple(BatchDim(d.coordinate, d.extent, strides[x]) for x, d in dims.items() if strides[x] != ZERO)
    if len(outer) > MAX_BATCH_DIMS or any(is_nonnegative(-s) for s in (pitch, *(x.stride for x in outer))):
        return Declined(f"it has more than {MAX_BATCH_DIMS} batch axes, or a stride that is not positive")
    alignment: dict[tuple[Index, int], None] = {}
    for i in (rest, pitch, *(x.stride for x in outer)):
        more = multiples(i, ALIGN // ITEMSIZE[v.dtype], ())
        if more is None:
            return Declined(f"its pitches are not multiples of {ALIGN} bytes")
        alignment |= dict.fromkeys(more)
    return TensorOperand(v.buffer, v.dtype, along_k, rest, pitch, outer, tuple(alignment))


def descriptor(place: Pointer, step: IndexLike, panel: int = 0) -> Value:
    """Return wgmma's descriptor of an operand in shared memory, ``step`` bytes after ``place``.

    ``panel``: bytes between panels of an operand that is contiguous along its own side; 0 if it is contiguous along the
    steps. Adding to a descriptor is cheaper than building one, and the first is built once for all steps.
    """
    number = FromIndex("int32", V(panel))
    first = Apply("uint64", "pd_desc_mn", (place, number)) if panel else Apply("uint64", "pd_desc_k", (place,))
    return Apply("uint64", "pd_desc_at", (first, FromIndex("int32", V(step))))
