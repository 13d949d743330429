"""A host plan as readable text, for dumps and golden tests."""

from __future__ import annotations

from collections.abc import Iterator

from polydyn.program.plan import Buffer, Candidate, HostPlan, Launch
from polydyn.runtime.symbols import Condition
from polydyn.schedules.decision import ArgMin, Decision, Leaf, Split
from polydyn.schedules.index import ZERO


def show_host_plan(plan: HostPlan) -> str:
    """Return the symbols, buffers, guards, checks and launches in order, with candidates and decisions."""
    lines = [f"program {plan.name} on {plan.place}: {', '.join(plan.inputs)} -> {', '.join(plan.outputs)}"]
    lines += [f"symbol {s.symbol} = size of {s.input} along axis {s.axis}" for s in plan.sources]
    lines += [_buffer(b) for b in plan.buffers.values()]
    lines += [f"guard {g.left} {g.relation} {g.right}: {g.message}" for g in plan.guards]
    lines += [
        f"check before launch {c.launch}: {c.buffer} + {c.offset} within {c.size}: {c.message}"
        for c in plan.index_checks
    ]
    checks = plan.device_checks
    lines += [f"launch {d.launch} writes offending indices of {d.check.buffer} to {d.status}" for d in checks]
    waves = plan.waves or (1,) * len(plan.launches)
    numbers = [(w, n) for w, many in enumerate(waves) for n in range(many)]
    for n, (launch, (wave, _)) in enumerate(zip(plan.launches, numbers, strict=True)):
        lines += [f"launch {n} in wave {wave}: {launch.label}", *(f"  {x}" for x in _launch(launch))]
    return "\n".join((*lines, *(f"note {x}" for x in plan.notes))) + "\n"


def _buffer(b: Buffer) -> str:
    strides = f" with the caller's strides {', '.join(b.strides)}" if b.strides else ""
    return f"{b.role} {b.name}: {b.dtype}[{', '.join(map(str, b.shape))}]{strides}"


def _launch(launch: Launch) -> Iterator[str]:
    yield f"{launch.elements} elements, {launch.flops} operations, {launch.bytes} bytes"
    if launch.copied != ZERO:
        yield f"only moves {launch.copied} bytes"
    if launch.skip_if_same:
        yield "skipped if {} and {} are one array".format(*launch.skip_if_same)
    if launch.writes is not None:
        yield f"writes {', '.join(launch.writes)}"
    for n, c in enumerate(launch.candidates):
        yield f"kernel {n}: {_candidate(c)}"
    if len(launch.candidates) > 1:
        yield from show_decision(launch.decision)
    yield from (f"because {r}" for r in launch.reasons)


def _candidate(c: Candidate) -> str:
    names = c.names or tuple(f"#{n}" for n in range(len(c.symbols)))
    symbols = ", ".join(f"{n} = {i}" for n, i in zip(names, c.symbols, strict=True))
    buffers = ", ".join(b.strip() or "workspace" for b in c.buffers)
    text = f"{c.kernel}({buffers}; {symbols}), {c.tasks} {'blocks' if c.block else 'tasks'}, {c.scratch} bytes"
    text += f" where {' and '.join(map(_condition, c.conditions))}" * bool(c.conditions)
    if c.block is None:
        return text
    text += f", {c.block.threads} threads, {c.block.arch}"
    text += "".join(f", map {m.name} of {m.buffer}" for m in c.block.maps)
    text += f", {c.workspace} bytes of workspace" * (c.workspace != ZERO)
    return text + "".join(f", then {_candidate(x)}" for x in c.after)


def _condition(c: Condition) -> str:
    left, relation, right = c
    return f"{left} {relation} {right}"


def show_decision(decision: Decision, indent: str = "") -> Iterator[str]:
    """Yield a decision as nested lines; kernels by position."""
    if isinstance(decision, Leaf):
        yield f"{indent}take kernel {decision.kernel}"
    elif isinstance(decision, ArgMin):
        yield f"{indent}take the minimum of"
        for e in decision.entries:
            yield f"{indent}  kernel {e.kernel}: {e.cost}"
    elif isinstance(decision, Split):
        yield f"{indent}if {decision.index} <= {decision.threshold}"
        yield from show_decision(decision.low, indent + "  ")
        yield f"{indent}else"
        yield from show_decision(decision.high, indent + "  ")
