"""Explain a program at one shape: the kernel of every launch, its launch-time choices, its work, and the reasons.

Everything comes from the manifest, so a loaded artifact can be explained without running. Standard library only.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from polydyn.errors import InputError, UnknownNameError
from polydyn.gpu.targets import special_runs
from polydyn.runtime.expressions import decision_from_json
from polydyn.runtime.plain_expressions import evaluate, symbols_of
from polydyn.runtime.symbols import THREADS, holds
from polydyn.runtime.tables import counted, fields_of, frame, html_table, html_text, shown
from polydyn.schedules.decision import Decision, choose, cost
from polydyn.schedules.decision import explain as explain_decision
from polydyn.shapes.sizes import Sizes

WORK_PER_THREAD = 32768
"""``PD_WORK_PER_THREAD`` of the runtime."""
SHOWN_LABELS = 4
"""Maximum launches that are named for one reason why another kind of kernel is not used."""


@dataclass(frozen=True)
class ExplainedLaunch:
    """One launch at one shape.

    ``sizes``: the kernel's parameters; ``choices``: tiles and their counts, chosen at launch; ``flops`` and ``bytes``
    (of the distinct buffers read and written); ``scratch``: bytes per thread, 0 on a device; ``reasons``: why its
    primitives became one kernel, and the decisions of its code generator. ``selection``: why candidates may not be
    launched, the tests that lead to the selected one, and the others with their estimates, best first (in picoseconds,
    on a device in nanoseconds; empty if there is one candidate). ``declined``: other kinds of kernels, and why they do
    not compute its group. ``wave``: launches of one wave start together, each
    with its number of ``threads``.
    """

    label: str
    kernel: str
    tasks: int
    threads: int
    sizes: Mapping[str, int]
    choices: Mapping[str, int]
    flops: int
    bytes: int
    scratch: int
    reasons: tuple[str, ...]
    selection: tuple[str, ...] = ()
    declined: tuple[tuple[str, str], ...] = ()
    wave: int = 0

    def __repr__(self) -> str:
        tasks, threads = counted(max(self.tasks, 0), "task"), counted(self.threads, "thread")
        return f"<{self.label}: {self.kernel}, {tasks} on {threads}>"

    def seconds(self, flops_per_second: float, bytes_per_second: float) -> float:
        """Return the minimum time within these limits: that of computing or of memory, whichever is longer."""
        return max(self.flops / flops_per_second, self.bytes / bytes_per_second)


@dataclass(frozen=True)
class Explanation:
    """A program at one shape; ``str()`` is a table, ``details()`` adds sizes and reasons."""

    name: str
    dims: Mapping[str, int]
    threads: int
    launches: tuple[ExplainedLaunch, ...]
    notes: tuple[str, ...] = field(default=())
    sizes: Mapping[str, Sizes] = field(default_factory=dict)
    """The sizes that the program was compiled for, by dim."""

    @property
    def kernels(self) -> tuple[str, ...]:
        """The distinct kernels in order of first launch; launches without tasks are skipped."""
        return tuple(dict.fromkeys(x.kernel for x in self.launches if x.tasks > 0))

    @property
    def waves(self) -> tuple[tuple[ExplainedLaunch, ...], ...]:
        """The launches that run, by wave. A wave with more than one thread is one fork-join."""
        waves: dict[int, list[ExplainedLaunch]] = {}
        for x in self.launches:
            if x.tasks > 0:
                waves.setdefault(x.wave, []).append(x)
        return tuple(map(tuple, waves.values()))

    def __str__(self) -> str:
        heading = ("launch", "kernel", "wave", "tasks", "threads", "launch choices", "MFLOP", "MB", "FLOP/byte")
        rows = [
            (
                x.label, x.kernel, str(x.wave), str(x.tasks), str(x.threads) if x.tasks > 0 else "skipped",
                " ".join(f"{k}={v}" for k, v in x.choices.items()) or "-",
                f"{x.flops / 1e6:.3f}", f"{x.bytes / 1e6:.3f}", f"{x.flops / x.bytes:.1f}" if x.bytes else "-",
            )
            for x in self.launches
        ]  # fmt: skip
        title = "\n".join([self._title(), *(f"{name}: compiled for {sizes}" for name, sizes in self.sizes.items())])
        return f"{title}\n\n{text_table(heading, rows, optional=OPTIONAL)}"

    def __repr__(self) -> str:
        return f"<Explanation of {self._title()}>"

    def _repr_html_(self) -> str:
        names = ("launch", "kernel", "wave", "tasks", "threads", "choices", "MFLOP", "MB")
        rows = [(x.label, x.kernel, str(x.wave), str(x.tasks), str(x.threads), shown(x.choices), f"{x.flops / 1e6:.3f}",
                 f"{x.bytes / 1e6:.3f}") for x in self.launches]  # fmt: skip
        return html_table(self._title(), names, rows) + html_text("sizes, scratch and reasons", self.details())

    def to_pandas(self) -> Any:
        """Return a ``pandas.DataFrame`` with a row per launch. MissingPackageError: pandas is not installed."""
        return frame([fields_of(x) for x in self.launches])

    def details(self) -> str:
        """Return the table, for every launch its sizes, scratch and reasons, and the kinds of kernels that declined."""
        parts = [str(self)]
        for x in self.launches:
            sizes = " ".join(f"{k}={v}" for k, v in {**x.sizes, **x.choices}.items())
            lines = [f"{x.label}: {x.kernel}({sizes}), {x.scratch} bytes of scratch per thread"]
            parts.append("\n".join([*lines, *(f"    {r}" for r in (*x.reasons, *x.selection))]))
        if declined := self._declined():
            parts.append("\n".join(["other kinds of kernels, and why they are not used", *declined]))
        if self.notes:
            parts.append("\n".join(["notes", *(f"    {n}" for n in self.notes)]))
        return "\n\n".join(parts)

    def _declined(self) -> list[str]:
        launches: dict[tuple[str, str], dict[str, None]] = {}
        for x in self.launches:
            for refusal in x.declined:
                launches.setdefault(refusal, {})[x.label] = None
        return [f"    {name}: {why}: {_some(list(x))}" for (name, why), x in sorted(launches.items())]

    def _title(self) -> str:
        dims = ", ".join(f"{k}={v}" for k, v in self.dims.items()) or "no dynamic dims"
        running = sum(x.tasks > 0 for x in self.launches)
        return (
            f"{self.name or 'model'} at {dims}, {counted(self.threads, 'thread')}: {counted(running, 'launch')} of "
            f"{counted(len(self.kernels), 'kernel')} in {counted(len(self.waves), 'wave')}, "
            f"{sum(x.flops for x in self.launches) / 1e6:.2f} MFLOP"
        )


def _some(labels: Sequence[str]) -> str:
    """Return a list of labels, at most ``SHOWN_LABELS`` of them by name."""
    more = len(labels) - SHOWN_LABELS
    return ", ".join(labels[:SHOWN_LABELS]) + f" and {more} more" * (more > 0)


OPTIONAL = ("FLOP/byte", "MB", "wave", "launch choices", "MFLOP")
"""Columns of an explanation that a narrow terminal does not show, in the order in which they are left out."""
MIN_LABEL = 16
"""Minimum characters of a label that is cut to fit a terminal."""


def text_table(
    heading: Sequence[str], rows: Sequence[Sequence[str]], width: int = 60, optional: Sequence[str] = ()
) -> str:
    """Format columns of text: the first two left-aligned, the others right; long labels are cut at the start.

    On a terminal, labels become as short as its width demands, down to ``MIN_LABEL`` characters; then the ``optional``
    columns are left out one by one, and a last line names them.
    """
    columns, left_out = terminal_width(), list[str]()
    while columns and width > MIN_LABEL and _width(heading, rows, width) > columns:
        width -= 1
    for name in optional:
        if not columns or _width(heading, rows, width) <= columns:
            break
        kept = [k for k, h in enumerate(heading) if h != name]
        heading, rows = [heading[k] for k in kept], [[row[k] for k in kept] for row in rows]
        left_out.append(name)
    cut = [[_cut(c, width) for c in row] for row in [heading, *rows]]
    widths = [max(map(len, column)) for column in zip(*cut, strict=True)]
    lines = [
        "  ".join(c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        for row in cut
    ]
    note = [f"a wider terminal also shows {', '.join(left_out)}"] if left_out else []
    return "\n".join([lines[0].rstrip(), "-" * len(lines[0]), *(line.rstrip() for line in lines[1:]), *note])


def terminal_width() -> int:
    """Return the columns of the terminal, or those of the variable COLUMNS; 0 if the output is not for a terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() or os.environ.get("COLUMNS") else 0


def _width(heading: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> int:
    longest = [max(map(len, column)) for column in zip(heading, *rows, strict=True)]
    return sum(min(n, width) + 2 for n in longest) - 2


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else "…" + text[-width + 1 :]


def resolve_dims(manifest: Mapping[str, Any], dims: Mapping[str, int]) -> dict[str, int]:
    """Return every symbol's value. Symbols that are not in ``dims`` follow from guards that are equations.

    InputError: an unknown name, a size below 0, a symbol that does not follow, or a guard that does not hold.
    """
    known = {s["symbol"]: f"axis {s['axis']} of '{s['input']}'" for s in manifest["symbols"]}
    for name, size in dims.items():
        if name not in known:
            raise UnknownNameError(
                f"the program has no dim {name}", dim=name, remedy=f"its dims are {', '.join(known) or 'all constant'}"
            )
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            raise InputError(f"{size!r} is not a size", dim=name, remedy="give an integer >= 0")
    values = _with_equations(manifest, dims)
    missing, enough = [], values
    for symbol in known:  # only sizes that do not follow from the sizes before them
        if symbol not in enough:
            missing.append(symbol)
            enough = _with_equations(manifest, {**enough, symbol: EXAMPLE})
    if missing:
        example = ",".join(f"{s}={EXAMPLE}" for s in missing)
        raise InputError(
            f"no size is given for {', '.join(f'{s} ({known[s]})' for s in missing)}",
            dim=missing[0], remedy=f"give {'them' if len(missing) > 1 else 'it'} too, as in {example}",
        )  # fmt: skip
    for g in manifest["guards"]:
        a, b = evaluate(g["left"], values), evaluate(g["right"], values)
        if not holds(a, g["relation"], b):
            raise InputError(g["message"], rule=f"{g['rule']}, here {a} and {b}")
    return {s: values[s] for s in known}


EXAMPLE = 8
"""A size for remedies."""


def _with_equations(manifest: Mapping[str, Any], dims: Mapping[str, int]) -> dict[str, int]:
    """Return sizes with those that follow from guards that are equations."""
    values = dict(dims)
    equations = [(g["left"], g["right"]) for g in manifest["guards"] if g["relation"] == "=="]
    equations += [(b, a) for a, b in equations]
    for _ in manifest["symbols"]:
        for a, b in equations:
            if isinstance(a, str) and a not in values and symbols_of(b) <= values.keys():
                values[a] = evaluate(b, values)
    return values


def refused_sizes(manifest: Mapping[str, Any]) -> dict[str, str]:
    """Return a sentence for every dim whose described range has sizes that the model's own rules refuse.

    The first two sizes of the range and its last one are tried.
    """
    out: dict[str, str] = {}
    described = declared(manifest)
    for name, sizes in described.items():
        rules = [g for g in manifest["guards"] if symbols_of(g["left"]) | symbols_of(g["right"]) == {name}]
        for size in _tried(sizes):
            for g in rules:
                a, b = (evaluate(g[side], {name: size}) for side in ("left", "right"))
                if name not in out and not holds(a, g["relation"], b):
                    out[name] = f"{name} is described as {sizes.range_text()}, but the model refuses {name}={size}: " \
                                f"{g['rule']}: {g['message']}"  # fmt: skip
    return out


def _tried(sizes: Sizes) -> list[int]:
    """Return the first two sizes of a range and its last one, by its multiple."""
    first = -(-sizes.low // sizes.multiple) * sizes.multiple
    last = [] if sizes.high is None else [sizes.high // sizes.multiple * sizes.multiple]
    second = first + sizes.multiple
    return [first, *([second] if not last or second <= last[0] else []), *last]


@dataclass(frozen=True)
class Device:
    """The properties of a device that decide which candidates may be launched.

    ``shared_limit``: maximum bytes of shared memory per block; ``special``: the compute capability whose special
    instructions kernels may use, 0 for none; ``lacking``: the features that kernels must not use.
    """

    shared_limit: int
    special: int
    lacking: frozenset[str] = frozenset()


def explain(
    manifest: Mapping[str, Any], dims: Mapping[str, int], threads: int, device: Device | None = None
) -> Explanation:
    """Explain a program's manifest at a shape.

    On a device ``threads`` is the number of its SMs; launches have blocks as tasks and the threads of a block as
    threads.
    """
    values = resolve_dims(manifest, dims)
    env = values | {THREADS: threads} | _dense(manifest, values)
    waves = [w for w, count in enumerate(manifest["waves"]) for _ in range(count)]
    explained = map(_Explainer(manifest, env, device).launch, manifest["launches"])
    launches = tuple(replace(x, wave=w) for x, w in zip(explained, waves, strict=True))
    notes = tuple(manifest["notes"])
    return Explanation(manifest["name"], dict(dims) or values, threads, launches, notes, declared(manifest))


def _dense(manifest: Mapping[str, Any], values: Mapping[str, int]) -> dict[str, int]:
    """Return dense values for the strides (``stride_symbol``) that the caller chooses."""
    out: dict[str, int] = {}
    for io in (*manifest["inputs"], *manifest["outputs"]):
        dims = [evaluate(d, values) for d in io["dims"]] if io["strided"] else []
        out |= {f"{io['name']}@{k}": prod(dims[k + 1 :]) for k in range(io["strided"])}
    return out


def declared(manifest: Mapping[str, Any]) -> dict[str, Sizes]:
    """Return the user's description of the dims from the compilation."""
    return {name: Sizes(**fields) for name, fields in manifest.get("dims", {}).items()}


class _Explainer:
    """Explains launches at a shape. ``device`` is None on a CPU."""

    def __init__(self, manifest: Mapping[str, Any], env: Mapping[str, int], device: Device | None) -> None:
        self.env, self.device = env, device
        self.kernels = {k["name"]: k for k in manifest["kernels"]}
        self.decisions = [decision_from_json(d) for d in manifest["decisions"]]

    def launch(self, x: Mapping[str, Any]) -> ExplainedLaunch:
        """Explain which candidate the host program selects, and why."""
        env, candidates, decision = self.env, x["candidates"], self.decisions[x["decision"]]
        reasons = {k: refusal(c, env, self.device) for k, c in enumerate(candidates)}
        barred = {k: reason for k, reason in reasons.items() if reason}
        selected = choose(decision, env, barred) if len(barred) < len(candidates) else len(candidates) - 1
        c, block = candidates[selected], candidates[selected].get("block", {})
        lines: tuple[str, ...] = ()
        if len(candidates) > 1 or self.device:
            lines = explain_decision(decision, env, [c["name"] for c in candidates], " ns" * bool(block), barred)
        after = [f"followed by {a['kernel']}" for a in block.get("after", ()) if evaluate(a["tasks"], env) > 0]
        symbols = list(zip(c["names"], (evaluate(e, env) for e in c["symbols"]), strict=True))
        work, tasks = evaluate(x["work"], env), evaluate(c["tasks"], env) if evaluate(x["elements"], env) > 0 else 0
        first, scratch = len(symbols) - c["choices"], 0 if block else evaluate(c["scratch"], env)
        threads = max(1, min(env[THREADS], tasks, 1 + work // WORK_PER_THREAD))
        return ExplainedLaunch(
            x["label"],
            c["kernel"],
            tasks,
            block.get("threads", threads),
            dict(symbols[:first]),
            dict(symbols[first:]) | self._on_device(c, decision, selected),
            evaluate(x["flops"], env),
            evaluate(x["bytes"], env),
            scratch,
            (*x["reasons"], *self.kernels[c["kernel"]]["notes"]),
            (*lines, *after),
            tuple((name, why) for name, why in x.get("declined", ())),
        )

    def _on_device(self, c: Mapping[str, Any], decision: Decision, selected: int) -> dict[str, int]:
        """Return shared memory, the estimate, and for compiled kernels registers and spills; nothing on a CPU."""
        if "block" not in c:
            return {}
        facts = {"smem": evaluate(c["scratch"], self.env)}
        if estimate := cost(decision, selected, self.env):
            facts["ns"] = estimate
        use = next(iter(self.kernels[c["kernel"]].get("resources", {}).values()), None)
        if use is not None:
            spills = use.get("spill_stores", 0) + use.get("spill_loads", 0)
            facts |= {"registers": use["registers"], "spills": spills}
        return facts


def refusal(c: Mapping[str, Any], env: Mapping[str, int], device: Device | None) -> str:
    """Return why a candidate may not be launched; empty if it may."""
    if device is not None:
        if not special_runs(c["block"]["arch"], device.special):
            return f"it is for {c['block']['arch']}"
        if wrong := [f for f in c["block"].get("features", ()) if f in device.lacking]:
            return f"the device does not conform in {' and '.join(wrong)}"
        smem = evaluate(c["scratch"], env)
        if smem > device.shared_limit:
            return f"it needs {smem} bytes of shared memory, a block has {device.shared_limit}"
    for x in c["conditions"]:
        a, b = evaluate(x["left"], env), evaluate(x["right"], env)
        if not holds(a, x["relation"], b):
            return f"{x['rule']} does not hold: {a}, {b}"
    return ""
