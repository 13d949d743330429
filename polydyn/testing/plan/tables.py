"""Read back the C text of a host program, and compare buffers, waves and slots with the plan."""

from __future__ import annotations

import re

from polydyn.program.plan import COUNTERS, WORKSPACE
from polydyn.testing.plan.faults import Faults
from polydyn.testing.plan.planned import Planned

NONE = {-1: WORKSPACE, -2: COUNTERS}


def check_tables(planned: Planned, faults: Faults) -> None:
    """Add a fault for each difference between the C text and the plan."""
    plan, text = planned.plan, planned.text
    faults.launch = "tables"
    if not text or not plan.launches:
        return
    order = list(dict.fromkeys([n for x in plan.launches for n in x.buffers] + list(plan.outputs)))
    flat, kernels = _numbers(text, "launch_buffers"), [_kernel_name(r) for r in _rows(text, "kernels")]
    if [int(r[1]) for r in _rows(text, "waves")] != list(plan.waves or (1,) * len(plan.launches)):
        faults.add("tables", "", "the waves differ")
    expected = [c for x in plan.launches for one in x.candidates for c in one.sequence]
    for c, row in zip(expected, _rows(text, "candidates"), strict=True):
        kernel, count, first = map(int, row[:3])
        named = tuple(NONE[b] if b < 0 else order[b] for b in flat[first : first + count])
        if (kernels[kernel], *named) != (c.kernel, *c.buffers):
            faults.add("tables", c.kernel, f"it is called as {kernels[kernel]} of {named}, not of {c.buffers}")
    slot_of = {t: k for k, s in enumerate(planned.slots) for t in s.tenants}
    for name, (role, place, *_) in zip(order, _rows(text, "buffers"), strict=True):
        own = plan.buffers[name].role
        where = {"intermediate": slot_of.get(name), "input": _at(plan.inputs, name), "output": _at(plan.outputs, name)}
        if role != f"PD_{own.upper()}_ROLE" or (own != "constant" and int(place) != where[own]):
            faults.add("tables", name, f"it is {role} number {place}")
    _check_order(planned, order, faults)


def _check_order(planned: Planned, order: list[str], faults: Faults) -> None:
    """Compare the copies and index checks of the host."""
    plan, text = planned.plan, planned.text
    copied = [(int(r[0]), order[int(r[1])]) for r in _rows(text, "copies") if len(r) > 1]
    if copied != [(k, n) for k, n in enumerate(plan.outputs) if plan.buffers[n].role != "output"]:
        faults.add("tables", "", f"the host copies {copied}")
    looks = [(int(r[0]), order[int(r[1])]) for r in _rows(text, "index_checks") if len(r) > 1]
    if looks != [(c.launch, c.buffer) for c in sorted(plan.index_checks, key=lambda c: c.launch)]:
        faults.add("tables", "", f"the host looks at {looks}")


def _kernel_name(row: list[str]) -> str:
    """Return the name in a row of kernels: a function of a CPU, or a text after the number of a device's module."""
    return row[1].strip('"') if row[0].isdigit() else row[0]


def _at(names: tuple[str, ...], name: str) -> int | None:
    return names.index(name) if name in names else None


def _rows(text: str, name: str) -> list[list[str]]:
    """Return the rows of a C array as lists of elements."""
    found = re.search(rf"^static const \w+ {name}\[\] = \{{\n(.*?)\n\}};", text, re.S | re.M)
    assert found is not None, f"the host program has no {name}"
    rows = re.findall(r"\{(.*)\}", found.group(1))
    return [r.split(", ") for r in rows] if rows else [[p.strip()] for p in found.group(1).split(", ")]


def _numbers(text: str, name: str) -> list[int]:
    return [int(r[0]) for r in _rows(text, name)]
