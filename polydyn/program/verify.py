"""The invariants of a HostPlan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from polydyn.codegen.kernel import Block, Kernel, TensorMapOf
from polydyn.errors import PolydynError, UnsupportedError
from polydyn.program.host import RELATIONS, ROLES
from polydyn.program.parallel_launches import verify_waves
from polydyn.program.plan import Candidate, HostPlan, Launch
from polydyn.runtime.symbols import THREADS
from polydyn.schedules.decision import verify_decision
from polydyn.schedules.expr import DTYPES, ITEMSIZE
from polydyn.schedules.index import Index

MAX_RANK = 16
"""``PD_MAX_RANK`` of polydyn.h."""

MAX_BLOCK = 1024
"""Maximum threads per block on any device."""


def verify_host_plan(plan: HostPlan) -> None:
    """Raise PolydynError unless:

    - every input and output names a buffer, inputs with role ``input``, outputs with any role except ``intermediate``;
      no name occurs twice; buffers have their own name, a known dtype and at most 16 axes;
    - every constant that is used has an array with the buffer's item size;
    - every symbol has exactly one source, an axis of an input; none is called ``nth``;
    - every expression uses only those symbols (launch arithmetic also ``nth`` and the callers' strides);
    - strides are distinct symbols, fewer than axes, only of inputs and outputs; a launch that is skipped if an input
      and an output are the same memory names both, and they have the same rank and item size;
    - every launch has a decision over its candidates; every candidate names a kernel of the plan with the same number
      of buffers and symbols; kernel names are C names; candidates have a block, conditions and kernels with an
      architecture only on a device;
    - every index check names an integer buffer of its launch; a check on a device has a launch that names its words,
      which are int64 in an intermediate; on a device the host checks only inputs, for calls with inputs in host
      memory, and the device checks these too;
    - launches write only buffers that they name; waves respect dependences (``verify_waves``);
    - every buffer that a launch names exists, and some launch names every output.
    """
    _verify_buffers(plan)
    symbols = _verify_sources(plan)
    for b in plan.buffers.values():
        _only(b.shape, symbols, f"the shape of '{b.name}'")
    for g in plan.guards:
        _only((g.left, g.right), symbols, f"the guard '{g.message}'")
        if g.relation not in RELATIONS:
            raise PolydynError(f"a guard has the unknown relation {g.relation!r}", rule=g.message)
    _verify_launches(plan, symbols | _verify_strides(plan, symbols) | {THREADS})
    verify_waves(plan)
    _verify_architectures(plan)
    for c in plan.index_checks:
        _only([c.size, c.offset], symbols, f"the check '{c.message}'")
        inside = 0 <= c.launch < len(plan.launches) and c.buffer in plan.launches[c.launch].buffers
        inside |= c.launch == len(plan.launches) and c.buffer in plan.buffers and not plan.on_device
        if not inside or "int" not in plan.buffers[c.buffer].dtype:
            raise PolydynError("an index check does not name an integer buffer of its launch", tensor=c.buffer)
    _verify_device_checks(plan, symbols)


def _verify_device_checks(plan: HostPlan, symbols: frozenset[str]) -> None:
    for d in plan.device_checks:
        c, place = d.check, f"the device's check '{d.check.message}'"
        _only([c.size, c.offset], symbols, place)
        words = plan.buffers.get(d.status)
        inside = 0 <= d.launch < len(plan.launches) and d.status in plan.launches[d.launch].buffers
        integers = words is not None and (words.dtype, words.role) == ("int64", "intermediate")
        if not plan.on_device or not inside or not integers:
            raise PolydynError(f"no launch writes the words of {place}", tensor=d.status)
        if not -1 <= c.launch < len(plan.launches) or (d.scanned and (c not in plan.index_checks or c.launch < 0)):
            raise PolydynError(f"{place} is missing among the host's checks", tensor=c.buffer)
    scanned = [d.check for d in plan.device_checks if d.scanned]
    for c in plan.index_checks if plan.on_device else ():
        if c not in scanned or c.buffer not in plan.inputs:
            raise PolydynError(f"the device does not make the check '{c.message}'", tensor=c.buffer)


def _verify_architectures(plan: HostPlan) -> None:
    """Check that kernels have an architecture exactly if the plan is for a device."""
    wrong = next((k for k in plan.kernels if bool(k.block) != plan.on_device), None)
    if wrong is not None:
        arch = wrong.block.arch if wrong.block else "no device"
        raise PolydynError(f"the kernel {wrong.name} is for {arch}, the plan for {plan.place}")


def _once(names: Iterable[str], subject: str) -> None:
    twice = [n for n, k in Counter(names).items() if k > 1]
    if twice:
        raise PolydynError(f"{subject} {twice[0]!r} occurs twice in the host plan")


def _verify_buffers(plan: HostPlan) -> None:
    _once(plan.inputs, "input")
    _once(plan.outputs, "output")
    for name in (*plan.inputs, *plan.outputs):
        if name not in plan.buffers:
            raise PolydynError("an input or output has no buffer", tensor=name)
    for name, b in plan.buffers.items():
        if len(b.shape) > MAX_RANK:
            raise UnsupportedError(
                f"'{name}' has {len(b.shape)} axes", tensor=name, rule=f"a tensor in memory has at most {MAX_RANK}",
                remedy="join some of its axes",
            )  # fmt: skip
        if b.name != name or b.role not in ROLES or b.dtype not in DTYPES:
            raise PolydynError(f"buffer {b} under the name {name!r} is malformed", tensor=name)
        if (b.role == "input") != (name in plan.inputs) or (b.role == "output" and name not in plan.outputs):
            raise PolydynError(f"role {b.role} contradicts the plan's inputs and outputs", tensor=name)
        if b.role == "intermediate" and name in plan.outputs:
            raise PolydynError("an output must not be an intermediate", tensor=name)
        if b.role == "constant":
            array = plan.constants.get(name)
            if array is None or array.dtype.itemsize != ITEMSIZE[b.dtype]:
                raise PolydynError(f"a constant of {b.dtype} has no array of this item size", tensor=name)


def _verify_sources(plan: HostPlan) -> frozenset[str]:
    _once((s.symbol for s in plan.sources), "symbol")
    for s in plan.sources:
        if s.symbol == THREADS:
            raise PolydynError(f"a symbol must not be called {THREADS!r}", dim=s.symbol)
        if s.input not in plan.inputs or not 0 <= s.axis < len(plan.buffers[s.input].shape):
            raise PolydynError(f"its source, axis {s.axis} of '{s.input}', does not exist", dim=s.symbol)
    return frozenset(s.symbol for s in plan.sources)


def _verify_strides(plan: HostPlan, symbols: frozenset[str]) -> frozenset[str]:
    strides = [s for b in plan.buffers.values() for s in b.strides]
    _once([*strides, *symbols, THREADS], "symbol")
    for b in plan.buffers.values():
        inside = b.role in ("constant", "intermediate") or (b.role == "input" and b.name in plan.outputs)
        if b.strides and (inside or len(b.strides) >= len(b.shape)):
            raise PolydynError(f"the strides {b.strides} cannot be the caller's", tensor=b.name)
    return frozenset(strides)


def _verify_skip(plan: HostPlan, launch: Launch, place: str) -> None:
    if launch.skip_if_same is None:
        return
    source, target = launch.skip_if_same
    plausible = source in plan.inputs and target in plan.outputs and {source, target} <= set(launch.buffers)
    a, b = (plan.buffers[n] for n in launch.skip_if_same) if plausible else (None, None)
    if a is None or b is None or len(a.shape) != len(b.shape) or ITEMSIZE[a.dtype] != ITEMSIZE[b.dtype]:
        raise PolydynError(f"{place} cannot be skipped when '{source}' and '{target}' are the same memory")


def _only(expressions: Iterable[Index], symbols: frozenset[str], where: str) -> None:
    for x in expressions:
        unknown = x.symbols() - symbols
        if unknown:
            raise PolydynError(f"{where} uses a symbol without a source: {x}", dim=sorted(unknown)[0])


def _verify_kernel(kernels: Mapping[str, Kernel], name: str, passed: tuple[int, int], place: str) -> None:
    kernel = kernels.get(name)
    if kernel is None:
        raise PolydynError(f"{place} names the kernel {name!r}, which is not in the plan")
    taken = (len(kernel.buffers), len(kernel.symbols))
    if taken != passed:
        raise PolydynError(
            f"{place} passes {passed[0]} buffers and {passed[1]} symbols, {kernel.name} takes {taken[0]} and {taken[1]}"
        )


def _verify_candidate(
    plan: HostPlan, c: Candidate, kernels: Mapping[str, Kernel], symbols: frozenset[str], place: str
) -> None:
    place = f"{place}, candidate {c.name}"
    _verify_kernel(kernels, c.kernel, (len(c.buffers), len(c.symbols)), place)
    if len(c.names) not in (0, len(c.symbols)) or not 0 <= c.choices <= len(c.symbols):
        raise PolydynError(f"{place} has {len(c.names)} names of {len(c.symbols)} symbols, {c.choices} of them choices")
    sides = [x for left, _, right in c.conditions for x in (left, right)]
    _only((*c.symbols, c.tasks, c.scratch, c.workspace, *sides), symbols, place)
    if any(relation not in RELATIONS for _, relation, _ in c.conditions):
        raise PolydynError(f"{place} has an unknown condition")
    if (c.block is None) == plan.on_device:
        raise PolydynError(f"{place} is not for {plan.place}")
    if c.block is None:
        if c.conditions:
            raise PolydynError(f"{place} has conditions", rule="a CPU runs every candidate at every size")
    else:
        _verify_block(c.block, symbols, place)
    for x in c.after:
        if x.block is None or x.after:
            raise PolydynError(f"{place} is followed by something other than a single kernel of a device")
        _verify_candidate(plan, x, kernels, symbols, place)


def _verify_block(b: Block, symbols: frozenset[str], place: str) -> None:
    steps = () if b.work is None else (b.work.steps, b.work.tiles)
    _only(steps, symbols, place)
    sizes = [i for m in b.maps for i in (m.offset, *m.dims, *m.strides, *m.corners)]
    _only(sizes, symbols, f"{place}, its tensor maps")
    if not all(map(_matches, b.maps)):
        raise PolydynError(f"{place} has a tensor map whose dims, strides and box do not match")
    if not 1 <= b.threads <= MAX_BLOCK:
        raise PolydynError(f"{place} has blocks of {b.threads} threads")


def _matches(m: TensorMapOf) -> bool:
    """Whether a tensor map has one stride per outer dim and one box size per dim. In im2col mode, the box has sizes of
    channels and pixels, and corners and steps have one entry per image dim.
    """
    rank, pixels = len(m.dims), m.pixels
    matches = pixels is None or {len(pixels.lower), len(pixels.upper), len(pixels.steps)} == {rank - 2}
    return matches and len(m.strides) == rank - 1 and len(m.box) == (rank if pixels is None else 2)


def _verify_launches(plan: HostPlan, symbols: frozenset[str]) -> None:
    kernels = {k.name: k for k in plan.kernels}
    _once((k.name for k in plan.kernels), "kernel")
    for k in plan.kernels:
        if not k.name.isidentifier() or not k.name.isascii():
            raise PolydynError(f"{k.name!r} is not a C identifier")
    touched: set[str] = set()
    for launch in plan.launches:
        place = f"launch '{launch.label}'"
        verify_decision(launch.decision, len(launch.candidates), symbols)
        for c in launch.candidates:
            _verify_candidate(plan, c, kernels, symbols, place)
        missing = [b for b in launch.buffers if b not in plan.buffers]
        if missing:
            raise PolydynError(f"{place} uses an unknown buffer", tensor=missing[0])
        unnamed = set(launch.writes or ()) - set(launch.buffers)
        if unnamed:
            raise PolydynError(f"{place} writes a buffer that it does not name", tensor=min(unnamed))
        _verify_skip(plan, launch, place)
        _only((launch.elements, launch.work, launch.flops, launch.bytes, launch.copied), symbols, place)
        touched.update(launch.buffers)
    for name in plan.outputs:
        if plan.buffers[name].role == "output" and name not in touched:
            raise PolydynError("no launch writes the output", tensor=name)
