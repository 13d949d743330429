"""What every call of a program of several parts needs: its tensors, and the rooms that they lie in.

What parts give, and the steps that C runs, lies in a room. A room serves tensors that are never there at the same time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

KINDS = (
    "part", "python", "branch", "iterate", "non_zero", "suppress", "unique",
    "sizes", "common", "count", "reshape", "broadcast", "slice", "unsqueeze", "squeeze", "pads", "scales",
)  # fmt: skip
"""``PD_PART`` ... in order."""
COUNTED = ("non_zero", "suppress", "unique")
"""Steps that count while they work: what they give lies in a room even where it is a result."""

Manifest = Mapping[str, Any]


def add_frame(manifest: Manifest, models: Sequence[Manifest], constants: Mapping[str, str]) -> dict[str, Any]:
    """The manifest of a program of several parts with its tensors in order: inputs, ``constants`` (name -> dtype), what
    stages make. ``models``: the manifests of its parts and bodies.

    ``tensors``: name, dtype (None where only a call shows it), room (-1: none), whether it goes to memory of the
    caller's, and whether it lies on a device. Of every stage ``made``: its tensors, and ``gone``: those that nobody
    reads behind it.
    """
    order = manifest["order"]
    made = [_made(k, s, models) for k, s in enumerate(order)]
    results = list(dict.fromkeys(o["of"] for o in manifest["outputs"]))
    gone = _last_uses(order, made, results)
    device = _on_device(order, models) - {*results}
    rooms = _rooms(order, made, gone, device)
    counted = {n for s, names in zip(order, made, strict=True) if s.get("step") in COUNTED for n in names}
    dtypes = _dtypes(manifest, models, made) | dict(constants) | _taken(order, models)
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
    """Where a call waits for a device, as notes: of a program with ``add_frame``'s entries."""
    order, notes = manifest["order"], []
    device = {t["name"] for t in manifest["tensors"] if t["device"]}
    for s in order:
        inside = [models[k] for k in s.get("bodies", {}).values()]
        if any("cuda" in m for m in inside):
            forms = loop_forms(inside[0], s["settings"]) if s["step"] == "iterate" else None
            last = forms and forms.on_device and not any(forms.counts) and not forms.asks
            notes.append(f"{label(s)} waits for the device behind {'its last' if last else 'every'} run of its body")
        if "part" not in s or "cuda" not in models[s["part"]]:
            continue
        host = [n for n in s["made"] if n not in device]
        readers = [label(r) for r in order if "step" in r and {*host} & {*r["inputs"]}]
        why = f"{', '.join(readers)} reads it" if readers else "it is a result"
        if host:
            notes.append(f"a call waits for the device behind part {s['part']}, which gives {', '.join(host)}: {why}")
    return notes


def label(stage: Manifest) -> str:
    """What a step does, of which node."""
    return f"{stage['step']} of {stage['origin']}"


def is_in_c(stage: Manifest) -> bool:
    """Whether C runs a stage."""
    return "part" in stage or stage["step"] in KINDS


def _made(k: int, stage: Manifest, models: Sequence[Manifest]) -> list[str]:
    """The tensors of a stage; what C makes has a name even when nobody reads it."""
    if "part" in stage:
        return [o["name"] for o in models[stage["part"]]["outputs"]]
    if not is_in_c(stage):
        return list(stage["outputs"])
    found = stage["outputs"] or [""] * len(_step_dtypes(stage, models))
    return [n or f"output {o} of stage {k}" for o, n in enumerate(found)]


def _last_uses(
    order: Sequence[Manifest], made: Sequence[Sequence[str]], results: Iterable[str]
) -> list[list[str]]:  # fmt: skip
    """After each stage the tensors that nobody reads any more."""
    last = {n: k for k, stage in enumerate(order) for n in (*stage["inputs"], *made[k])}
    kept = {"", *results}
    return [[n for n, at in last.items() if at == k and n not in kept] for k in range(len(order))]


def _rooms(
    order: Sequence[Manifest], made: Sequence[Sequence[str]], gone: Sequence[Sequence[str]], device: set[str]
) -> dict[str, int]:  # fmt: skip
    """The room of every tensor that C makes; one on a device shares with such tensors only."""
    found: dict[str, int] = {}
    free: dict[bool, list[int]] = {False: [], True: []}
    for stage, names, over in zip(order, made, gone, strict=True):
        for name in names if is_in_c(stage) else ():
            own = free[name in device]
            found[name] = own.pop() if own else len(set(found.values()))
        for name in over:
            if name in found:
                free[name in device].append(found[name])
    return found


def _on_device(order: Sequence[Manifest], models: Sequence[Manifest]) -> set[str]:
    """What parts on a device give and no step reads; bodies of one part may read it."""
    device = [s for s in order if "part" in s and "cuda" in models[s["part"]]]
    made = {o["name"] for s in device for o in models[s["part"]]["outputs"]}
    return made - {n for s in order if "step" in s for n in _read_by_host(s, models)}


def _read_by_host(stage: Manifest, models: Sequence[Manifest]) -> list[str]:
    """The tensors that a step reads itself: not those that it only hands to bodies of one part, which do not give
    them back, nor what a loop carries on the device.
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
    """The types of inputs, and of what C makes."""
    found = {i["name"]: i["dtype"] for i in manifest["inputs"]}
    for stage, names in zip(manifest["order"], made, strict=True):
        if "part" in stage:
            found |= {o["name"]: o["dtype"] for o in models[stage["part"]]["outputs"]}
        elif is_in_c(stage):
            found |= zip(names, _step_dtypes(stage, models), strict=True)
    return found


def _taken(order: Sequence[Manifest], models: Sequence[Manifest]) -> dict[str, str]:
    """The types that parts and bodies take tensors as."""
    found: dict[str, str] = {}
    for stage in order:
        for role, k in stage.get("bodies", {}).items():
            types = _types(models[k], "inputs")
            captured = stage["settings"].get(role, stage["settings"])["captured"]
            found |= {stage["inputs"][at]: types[n] for n, at in captured if n in types}
    for stage in order:
        if "part" in stage:
            found |= _types(models[stage["part"]], "inputs")
    return found


def _step_dtypes(stage: Manifest, models: Sequence[Manifest]) -> list[str]:
    """What a step in C gives."""
    settings = stage["settings"]
    if stage["step"] == "unique":
        return [settings["dtype"], "int64", "int64", "int64"]
    if stage["step"] not in ("branch", "iterate"):
        return ["int64"] * (stage["step"] in COUNTED)
    if stage["step"] == "iterate":
        first, types = 2 * int(settings["loop"]), _types(models[stage["bodies"]["body"]], "inputs", "outputs")
        carried = settings["formals"][first : first + settings["carried"]]
        return [*(types[n] for n in carried), *settings["row_dtypes"]]
    types = _types(models[stage["bodies"]["then_branch"]], "inputs", "outputs")
    return [types[n] for n in settings["then_branch"]["results"]]


@dataclass(frozen=True)
class LoopForms:
    """How a loop runs its body. ``direct``: the results that the program writes to their place. ``carried``: whether
    each grows at its end in place, which row it is too (-1: none), whether it stays. ``plain``: no result is copied.
    ``counts``: whether it reads the number of the iteration, and the condition; ``asks``: whether it may end the loop.
    ``on_device``: what is carried, and rows whose number is known and whose bytes are multiples of 16, stay there.
    """

    direct: tuple[bool, ...]
    carried: tuple[tuple[bool, int, bool], ...]
    plain: bool
    counts: tuple[bool, ...]
    asks: bool
    on_device: bool


def written_by(model: Manifest) -> set[str]:
    """The outputs that a body's program writes where it is told; what one of several parts gives is copied."""
    return set() if "tensors" in model else {o["name"] for o in model["outputs"]}


def loop_forms(model: Manifest, settings: Manifest) -> LoopForms:
    """The forms of a loop over a body."""
    written = written_by(model)
    first, count = int(settings["loop"]), settings["carried"]
    formals = settings["formals"][2 * first :][:count]
    condition, rows = settings["results"][:first], settings["results"][first + count :]
    carried = settings["results"][first : first + count]
    placed: set[str] = set()

    def has_place(name: str) -> bool:
        """Whether the program writes it there; it writes every output once."""
        first_use = name in written and name not in placed
        placed.add(name)
        return first_use

    ends = [has_place(n) for n in condition]
    own = [n not in rows and has_place(n) for n in carried]  # a row that is carried lies among the rows
    lie = [has_place(n) for n in rows]
    strided = {o["name"] for o in model["outputs"] if o["strided"]}
    grows = {(a["output"], a["input"]) for a in model["appendable"] if a["output"] not in strided}
    forms = tuple(
        (d and (n, f) in grows, rows.index(n) if n in rows and n in written else -1, n == f)
        for n, f, d in zip(carried, formals, own, strict=True)
    )
    plain = all(d or stays or row >= 0 for (_, row, stays), d in zip(forms, own, strict=True)) and all(lie)
    plain &= all(d or n == settings["formals"][1] for n, d in zip(condition, ends, strict=True))
    still = not any(in_place for in_place, _, _ in forms) and all(axis == 0 for axis, _ in settings["slices"])
    read = {b for x in model["launches"] for c in x["candidates"] for b in c["buffers"]}
    counts = tuple(n in read for n in settings["formals"][: 2 * first])
    asks = any(n != settings["formals"][1] for n in condition)
    on_device = plain and still and "cuda" in model and "tensors" not in model
    return LoopForms((*ends, *own, *lie), forms, plain, counts, asks, on_device)


def _types(model: Manifest, *which: str) -> dict[str, str]:
    return {x["name"]: x["dtype"] for w in which for x in model[w]}
