"""The frame of a program of several parts: its tensors, and the rooms that they are stored in.

A room is a region of memory. It holds the outputs of parts, or of steps that C runs, one after another: tensors with
overlapping lifetimes never share a room.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

KINDS = (
    "part", "python", "branch", "iterate", "non_zero", "suppress", "unique",
    "sizes", "common", "count", "reshape", "broadcast", "slice", "unsqueeze", "squeeze", "pads", "scales",
)  # fmt: skip
"""The names of ``PD_PART`` and the following constants, in order."""
DATA_SIZED = ("non_zero", "suppress", "unique")
"""Steps whose output size is known only after they have run. Their outputs are stored in rooms even if they are
results."""

Manifest = Mapping[str, Any]


def add_frame(manifest: Manifest, models: Sequence[Manifest], constants: Mapping[str, str]) -> dict[str, Any]:
    """Return the manifest of a program of several parts, extended by its tensors in order: inputs, ``constants``
    (name -> dtype), outputs of stages. ``models``: the manifests of its parts and bodies.

    ``tensors``: name, dtype (None if it is known only during a call), room (-1 for none), whether it is stored in the
    caller's memory, and whether it is on a device. Every stage has ``made``, its tensors, and ``gone``, the tensors
    that are not read after it.
    """
    order = manifest["order"]
    made = [_stage_tensors(k, s, models) for k, s in enumerate(order)]
    results = list(dict.fromkeys(o["of"] for o in manifest["outputs"]))
    gone = _last_uses(order, made, results)
    device = _on_device(order, models) - {*results}
    rooms = _rooms(order, made, gone, device)
    counted = {n for s, names in zip(order, made, strict=True) if s.get("step") in DATA_SIZED for n in names}
    dtypes = _dtypes(manifest, models, made) | dict(constants) | _input_dtypes(order, models)
    names = dict.fromkeys([*(i["name"] for i in manifest["inputs"]), *constants, *(n for x in made for n in x if n)])
    placed = {n for n in results if n in rooms} - counted
    return dict(manifest) | {
        "tensors": [
            {
                "name": n,
                "dtype": dtypes.get(n),
                "room": rooms.get(n, -1),
                "result": int(n in placed),
                "device": int(n in device),
            }
            for n in names
        ],
        "order": [dict(s) | {"made": m, "gone": g} for s, m, g in zip(order, made, gone, strict=True)],
    }


def waits(manifest: Manifest, models: Sequence[Manifest]) -> list[str]:
    """Return notes on where a call waits for a device. The manifest must have the entries of ``add_frame``."""
    order, notes = manifest["order"], []
    device = {t["name"] for t in manifest["tensors"] if t["device"]}
    for s in order:
        inside = [models[k] for k in s.get("bodies", {}).values()]
        if any("cuda" in m for m in inside):
            forms = loop_forms(inside[0], s["settings"]) if s["step"] == "iterate" else None
            last = forms and forms.on_device and not any(forms.counts) and not forms.asks
            notes.append(f"{label(s)} waits for the device after {'the last' if last else 'every'} run of its body")
        if "part" not in s or "cuda" not in models[s["part"]]:
            continue
        host = [n for n in s["made"] if n not in device]
        readers = [label(r) for r in order if "step" in r and {*host} & {*r["inputs"]}]
        reason = f"{', '.join(readers)} reads it" if readers else "it is a result"
        if host:
            notes.append(
                f"a call waits for the device after part {s['part']}, which writes {', '.join(host)}: {reason}"
            )
    return notes


def label(stage: Manifest) -> str:
    """Return the kind of a step and the node that it runs."""
    return f"{stage['step']} of {stage['origin']}"


def is_in_c(stage: Manifest) -> bool:
    """Return whether C runs a stage."""
    return "part" in stage or stage["step"] in KINDS


def _stage_tensors(k: int, stage: Manifest, models: Sequence[Manifest]) -> list[str]:
    """Return the output tensors of a stage. A tensor that C writes has a name even if it is unused."""
    if "part" in stage:
        return [o["name"] for o in models[stage["part"]]["outputs"]]
    if not is_in_c(stage):
        return list(stage["outputs"])
    names = stage["outputs"] or [""] * len(_step_dtypes(stage, models))
    return [n or f"output {o} of stage {k}" for o, n in enumerate(names)]


def _last_uses(
    order: Sequence[Manifest], made: Sequence[Sequence[str]], results: Iterable[str]
) -> list[list[str]]:  # fmt: skip
    """Return, for each stage, the tensors that are not read after it."""
    last = {n: k for k, stage in enumerate(order) for n in (*stage["inputs"], *made[k])}
    retained = {"", *results}
    return [[n for n, stage in last.items() if stage == k and n not in retained] for k in range(len(order))]


def _rooms(
    order: Sequence[Manifest], made: Sequence[Sequence[str]], gone: Sequence[Sequence[str]], device: set[str]
) -> dict[str, int]:  # fmt: skip
    """Return the room of every tensor that C writes. Tensors on a device share rooms only with each other."""
    rooms: dict[str, int] = {}
    free: dict[bool, list[int]] = {False: [], True: []}
    for stage, names, over in zip(order, made, gone, strict=True):
        for name in names if is_in_c(stage) else ():
            available = free[name in device]
            rooms[name] = available.pop() if available else len(set(rooms.values()))
        for name in over:
            if name in rooms:
                free[name in device].append(rooms[name])
    return rooms


def _on_device(order: Sequence[Manifest], models: Sequence[Manifest]) -> set[str]:
    """Return the tensors that parts write on a device and that no step reads, except bodies of one part."""
    device = [s for s in order if "part" in s and "cuda" in models[s["part"]]]
    outputs = {o["name"] for s in device for o in models[s["part"]]["outputs"]}
    return outputs - {n for s in order if "step" in s for n in _read_by_host(s, models)}


def _read_by_host(stage: Manifest, models: Sequence[Manifest]) -> list[str]:
    """Return the tensors that a step reads itself. It does not read tensors that it only passes to bodies of one part,
    unless a body returns them, nor values that a loop carries on the device.
    """
    settings, bodies = stage["settings"], stage["bodies"]
    if stage["step"] == "iterate" and loop_forms(models[bodies["body"]], settings).on_device:
        return [n for n in stage["inputs"][:2] if n]
    captured: set[int] = set()
    if bodies and not any("tensors" in models[k] for k in bodies.values()):
        every = [settings.get(role, settings) for role in bodies]
        back = {n for s in every for n in s["results"]}
        captured = {k for s in every for n, k in s["captured"]}
        captured -= {k for s in every for n, k in s["captured"] if n in back}
        captured -= {*range(1 if stage["step"] == "branch" else 2 + settings["carried"] + len(settings["slices"]))}
    return [n for k, n in enumerate(stage["inputs"]) if n and k not in captured]


def _dtypes(manifest: Manifest, models: Sequence[Manifest], made: Sequence[Sequence[str]]) -> dict[str, str]:
    """Return the dtypes of inputs and of the tensors that C writes."""
    dtypes = {i["name"]: i["dtype"] for i in manifest["inputs"]}
    for stage, names in zip(manifest["order"], made, strict=True):
        if "part" in stage:
            dtypes |= {o["name"]: o["dtype"] for o in models[stage["part"]]["outputs"]}
        elif is_in_c(stage):
            dtypes |= zip(names, _step_dtypes(stage, models), strict=True)
    return dtypes


def _input_dtypes(order: Sequence[Manifest], models: Sequence[Manifest]) -> dict[str, str]:
    """Return the dtypes with which parts and bodies take tensors."""
    dtypes: dict[str, str] = {}
    for stage in order:
        for role, k in stage.get("bodies", {}).items():
            types = _types(models[k], "inputs")
            captured = stage["settings"].get(role, stage["settings"])["captured"]
            dtypes |= {stage["inputs"][k]: types[n] for n, k in captured if n in types}
    for stage in order:
        if "part" in stage:
            dtypes |= _types(models[stage["part"]], "inputs")
    return dtypes


def _step_dtypes(stage: Manifest, models: Sequence[Manifest]) -> list[str]:
    """Return the dtypes of the outputs of a step in C."""
    settings = stage["settings"]
    if stage["step"] == "unique":
        return [settings["dtype"], "int64", "int64", "int64"]
    if stage["step"] not in ("branch", "iterate"):
        return ["int64"] * (stage["step"] in DATA_SIZED)
    if stage["step"] == "iterate":
        first, types = 2 * int(settings["loop"]), _types(models[stage["bodies"]["body"]], "inputs", "outputs")
        carried = settings["formals"][first : first + settings["carried"]]
        return [*(types[n] for n in carried), *settings["row_dtypes"]]
    types = _types(models[stage["bodies"]["then_branch"]], "inputs", "outputs")
    return [types[n] for n in settings["then_branch"]["results"]]


@dataclass(frozen=True)
class LoopForms:
    """How a loop runs its body.

    ``direct``: for each result, whether the program writes it in place. ``carried``: for each carried value, whether it
    grows in place at its end, the row that it also is (-1: none), and whether it never changes. ``plain``: no result is
    copied. ``counts``: whether the body reads the iteration number, and the condition. ``asks``: whether the body may
    end the loop. ``on_device``: carried values stay on the device, and so do rows with a known size that is a multiple
    of 16 bytes.
    """

    direct: tuple[bool, ...]
    carried: tuple[tuple[bool, int, bool], ...]
    plain: bool
    counts: tuple[bool, ...]
    asks: bool
    on_device: bool


def written_by(model: Manifest) -> set[str]:
    """Return the outputs that a body's program writes to a given address. Outputs of several parts are copied."""
    return set() if "tensors" in model else {o["name"] for o in model["outputs"]}


def loop_forms(model: Manifest, settings: Manifest) -> LoopForms:
    """Return how a loop runs a body."""
    written = written_by(model)
    first, count = int(settings["loop"]), settings["carried"]
    formals = settings["formals"][2 * first :][:count]
    condition, rows = settings["results"][:first], settings["results"][first + count :]
    carried = settings["results"][first : first + count]
    placed: set[str] = set()

    def has_place(name: str) -> bool:
        """Whether the program writes the result in place. It writes every output once."""
        first_use = name in written and name not in placed
        placed.add(name)
        return first_use

    ends = [has_place(n) for n in condition]
    own = [n not in rows and has_place(n) for n in carried]  # a carried row is stored among the rows
    direct_rows = [has_place(n) for n in rows]
    strided = {o["name"] for o in model["outputs"] if o["strided"]}
    grows = {(a["output"], a["input"]) for a in model["appendable"] if a["output"] not in strided}
    forms = tuple(
        (d and (n, f) in grows, rows.index(n) if n in rows and n in written else -1, n == f)
        for n, f, d in zip(carried, formals, own, strict=True)
    )
    plain = all(d or stays or row >= 0 for (_, row, stays), d in zip(forms, own, strict=True)) and all(direct_rows)
    plain &= all(d or n == settings["formals"][1] for n, d in zip(condition, ends, strict=True))
    still = not any(in_place for in_place, _, _ in forms) and all(axis == 0 for axis, _ in settings["slices"])
    read = {b for x in model["launches"] for c in x["candidates"] for b in c["buffers"]}
    counts = tuple(n in read for n in settings["formals"][: 2 * first])
    asks = any(n != settings["formals"][1] for n in condition)
    on_device = plain and still and "cuda" in model and "tensors" not in model
    return LoopForms((*ends, *own, *direct_rows), forms, plain, counts, asks, on_device)


def _types(model: Manifest, *which: str) -> dict[str, str]:
    return {x["name"]: x["dtype"] for w in which for x in model[w]}
