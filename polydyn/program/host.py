"""The host program: a HostPlan as C tables, and the evaluation of its sizes (``runtime/internal.h``)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from polydyn.program.evaluation import Evaluation, evaluation_function
from polydyn.program.launch_tables import Tables, launch_tables, quote
from polydyn.program.memory import Slot, plan_slots
from polydyn.program.parallel_launches import intermediate_lives, wave_ranges
from polydyn.program.plan import Buffer, HostPlan, size_bytes
from polydyn.program.verify_memory import verify_slots
from polydyn.schedules.expr import DTYPES
from polydyn.schedules.index import Index, product
from polydyn.schedules.ranges import is_nonnegative
from polydyn.shapes.sentences import bare, sentence

ROLES = {
    "input": "PD_INPUT_ROLE",
    "output": "PD_OUTPUT_ROLE",
    "constant": "PD_CONSTANT_ROLE",
    "intermediate": "PD_INTERMEDIATE_ROLE",
}

RELATIONS = {"==": "=", "<=": "<", "%==": "%"}
"""Codes of the guard relations in the tables."""


@dataclass(frozen=True)
class HostProgram:
    """The C text of the host program's unit, and the memory slots of intermediates."""

    text: str
    slots: tuple[Slot, ...]


def shape_text(shape: Iterable[Index]) -> str:
    """Return a symbolic shape as text, e.g. ``[B, 2*L]``."""
    return "[" + ", ".join(bare(d) for d in shape) + "]"


def host_program(plan: HostPlan, constant_offsets: Mapping[str, int], weight_bytes: int) -> HostProgram:
    """Return the host program of a verified plan. ``constant_offsets``: offsets of constants in the weights.

    The evaluation has two phases. The first computes what input dims, guards and output strides need, the second
    everything else. So sizes are used only after the checks.
    """
    free = [b for n in (*plan.inputs, *plan.outputs) for b in [plan.buffers[n]]]
    values = Evaluation((s.symbol for s in plan.sources), (s for b in free for s in b.strides))
    tables = _check_tables(plan, values)
    check = values.lines
    values.lines = []
    slots = plan_slots(intermediate_lives(plan))
    verify_slots(plan, slots)
    order = {name: i for i, name in enumerate(_used_buffers(plan))}
    tables |= _memory_tables(plan, values, slots, order, constant_offsets)
    tables |= _index_tables(plan, values, order) | _device_check_tables(plan, values, order) | _wave_tables(plan)
    launches, functions = launch_tables(plan, values, order)
    tables |= launches
    scalars = _counts(plan, tables) | {"value_count": values.count, "weight_bytes": weight_bytes}
    scalars |= {"amx": 1} if any(k.amx for k in plan.kernels) else {}
    declarations = "\n".join(f"pd_kernel {k.name};" for k in plan.kernels if not plan.on_device)
    arrays = "\n".join(
        f"static const {kind} {name}[] = {{\n    {_rows(rows) or '0'}\n}};" for name, (kind, rows) in tables.items()
    )
    fields = ",\n    ".join(
        [f".{k} = {v}" for k, v in scalars.items()]
        + [f".{name} = {name}" for name in tables]
        + [".check = check", ".plan = plan_sizes"]
    )
    text = "\n".join(
        [
            '#include "internal.h"',
            declarations,
            evaluation_function("check", check),
            evaluation_function("plan_sizes", values.lines),
            *functions,
            arrays,
            f"const pd_plan pd_the_plan = {{\n    {fields}\n}};\n",
        ]
    )
    return HostProgram(text, slots)


def _rows(rows: Sequence[str]) -> str:
    if all(r.lstrip("-").isdigit() for r in rows):
        return ", ".join(rows)
    return ",\n    ".join(rows)


def _used_buffers(plan: HostPlan) -> list[str]:
    """Return the buffers that a launch or an output names, in order of first use."""
    return list(dict.fromkeys([n for launch in plan.launches for n in launch.buffers] + list(plan.outputs)))


def _copied_outputs(plan: HostPlan) -> list[tuple[int, Buffer]]:
    """Return the outputs that are an unchanged input or constant."""
    return [(i, plan.buffers[n]) for i, n in enumerate(plan.outputs) if plan.buffers[n].role != "output"]


def _io_rows(plan: HostPlan, names: Iterable[str]) -> list[str]:
    return [
        f"{{{quote(n)}, {quote(shape_text(b.shape))}, {DTYPES.index(b.dtype)}, {len(b.shape)}, {len(b.strides)}}}"
        for n in names
        for b in [plan.buffers[n]]
    ]


def _check_tables(plan: HostPlan, values: Evaluation) -> Tables:
    position = {n: i for i, n in enumerate(plan.inputs)}
    origin = {s.symbol: s for s in plan.sources}
    bound = {(s.input, s.axis) for s in plan.sources if plan.buffers[s.input].shape[s.axis] == Index.of(s.symbol)}
    reasons = {side: g.message for g in plan.guards if g.relation == "==" for side in (g.right, g.left)}
    symbol_at = {(s.input, s.axis): Index.of(s.symbol) for s in plan.sources}
    dims = []
    for name in plan.inputs:
        for axis, dim in enumerate(plan.buffers[name].shape):
            if (name, axis) in bound:
                continue
            where = "; ".join(f"{s} = axis {origin[s].axis} of '{origin[s].input}'" for s in sorted(dim.symbols()))
            text = bare(dim) + (f" ({where})" if where else "")
            reason = reasons.get(symbol_at.get((name, axis), dim), "")
            dims.append(f"{{{position[name]}, {axis}, {values.of(dim)}, {quote(text)}, {quote(reason)}}}")
    output_dims = [str(values.of(d)) for n in plan.outputs for d in plan.buffers[n].shape]
    guards = []
    for g in plan.guards:
        text = quote(sentence(g.left, g.relation, g.right, g.words))
        numbers = f"{values.of(g.left)}, {values.of(g.right)}, '{RELATIONS[g.relation]}'"
        guards.append(f"{{{numbers}, {text}, {quote(g.message)}}}")
    return {
        "inputs": ("pd_io", _io_rows(plan, plan.inputs)),
        "outputs": ("pd_io", _io_rows(plan, plan.outputs)),
        "output_dims": ("int32_t", output_dims),
        "sources": ("pd_source", [f"{{{position[s.input]}, {s.axis}, {quote(s.symbol)}}}" for s in plan.sources]),
        "dim_checks": ("pd_dim_check", dims),
        "guards": ("pd_guard", guards),
    }


def _memory_tables(
    plan: HostPlan, values: Evaluation, slots: Sequence[Slot], order: Mapping[str, int], offsets: Mapping[str, int]
) -> Tables:
    slot_of = {t: i for i, s in enumerate(slots) for t in s.tenants}
    slot_rows: list[str] = []
    slot_values: list[str] = []
    for s in slots:
        slot_rows.append(f"{{{len(slot_values)}, {len(s.sizes)}}}")
        slot_values += [str(values.of(x)) for x in s.sizes]
    buffers: list[str] = []
    signs: dict[Index, str] = {}
    for name in order:
        b = plan.buffers[name]
        index = {"input": plan.inputs, "output": plan.outputs}.get(b.role, ())
        place = slot_of[name] if b.role == "intermediate" else index.index(name) if index else 0
        buffers.append(f"{{{ROLES[b.role]}, {place}, {offsets.get(name, 0)}}}")
        if b.role in ("output", "intermediate"):
            for axis, dim in enumerate(b.shape):
                if not is_nonnegative(dim) and dim not in signs:
                    text = quote(f"axis {axis} of '{name}', {bare(dim)},")
                    signs[dim] = f"{{{values.of(dim)}, {text}}}"
    copies = [f"{{{i}, {order[b.name]}, {values.of(size_bytes(b))}}}" for i, b in _copied_outputs(plan)]
    return {
        "sign_checks": ("pd_sign_check", list(signs.values())),
        "buffers": ("pd_buffer", buffers),
        "slots": ("pd_slot", slot_rows),
        "slot_values": ("int32_t", slot_values),
        "copies": ("pd_copy", copies),
    }


def _wave_tables(plan: HostPlan) -> Tables:
    return {"waves": ("pd_wave", [f"{{{r.start}, {len(r)}}}" for r in wave_ranges(plan)])}


def _index_tables(plan: HostPlan, values: Evaluation, order: Mapping[str, int]) -> Tables:
    rows = [
        f"{{{c.launch}, {order[c.buffer]}, {DTYPES.index(b.dtype)}, {values.of(product(b.shape))}, "
        f"{values.of(c.size)}, {values.of(c.offset)}, {c.part[0]}, {c.part[1]}, {quote(c.message)}}}"
        for c in sorted(plan.index_checks, key=lambda c: c.launch)
        for b in [plan.buffers[c.buffer]]
    ]
    return {"index_checks": ("pd_index_check", rows)}


def _device_check_tables(plan: HostPlan, values: Evaluation, order: Mapping[str, int]) -> Tables:
    rows = [
        f"{{{d.launch}, {order[d.status]}, {values.of(product(plan.buffers[d.status].shape))}, {c.launch}, "
        f"{plan.inputs.index(c.buffer) if d.scanned else -1}, {values.of(c.size)}, {c.part[0]}, {c.part[1]}, "
        f"{quote(c.message)}}}"
        for d in plan.device_checks
        for c in [d.check]
    ]
    return {"device_checks": ("pd_device_check", rows)} if rows else {}


def _counts(plan: HostPlan, tables: Tables) -> dict[str, int]:
    names = {
        "input_count": "inputs", "output_count": "outputs", "symbol_count": "sources", "dim_check_count": "dim_checks",
        "guard_count": "guards", "sign_check_count": "sign_checks", "buffer_count": "buffers", "slot_count": "slots",
        "copy_count": "copies", "launch_count": "launches", "launch_buffer_count": "launch_buffers",
        "launch_symbol_count": "launch_symbols", "output_dim_count": "output_dims", "index_check_count": "index_checks",
        "wave_count": "waves", "kernel_count": "kernels", "candidate_count": "candidates",
    }  # fmt: skip
    dims = sum(len(plan.buffers[n].shape) for n in plan.inputs)
    optional = {"map_count": "maps", "device_check_count": "device_checks"}
    names |= {field: name for field, name in optional.items() if name in tables}
    return {field: len(tables[name][1]) for field, name in names.items()} | {"input_dim_count": dims}
