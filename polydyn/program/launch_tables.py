"""The launches of a host plan as C tables: their candidates, and the arithmetic that selects one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from polydyn.capability import FEATURES
from polydyn.codegen.kernel import Kernel, TensorMapOf
from polydyn.codegen.printers.cuda import BEGIN
from polydyn.gpu.targets import special_arch
from polydyn.program.evaluation import Evaluation, evaluation_function
from polydyn.program.plan import COUNTERS, WORKSPACE, Candidate, HostPlan, Launch
from polydyn.runtime.cuda.tensormap import element_type
from polydyn.runtime.symbols import ARCH, LACKING, SHARED, Condition
from polydyn.schedules.decision import ONLY
from polydyn.schedules.index import ZERO, Index
from polydyn.schedules.names import given_back

V = Index.of
Tables = dict[str, tuple[str, list[str]]]
"""Maps the name of a C array to its element type and one initialiser per element."""


def quote(text: str) -> str:
    """Return a C string literal, with octal escapes for everything except plain ASCII."""
    plain = set(range(32, 127)) - {ord('"'), ord("\\"), ord("?")}
    return '"' + "".join(chr(b) if b in plain else f"\\{b:03o}" for b in given_back(text).encode()) + '"'


def launch_tables(plan: HostPlan, values: Evaluation, order: Mapping[str, int]) -> tuple[Tables, list[str]]:
    """Return the tables of launches and candidates, and the C functions that the tables name.

    ``order``: the number of every buffer. On a CPU all values and choices are evaluated before the first launch. On a
    device each launch has its own function, which runs after the earlier launches were issued. Later functions use the
    values of earlier ones.
    """
    numbers = [_numbers(launch, plan, values) for launch in plan.launches]
    rows = _Rows(plan, values, order)
    launches: list[str] = []
    functions: list[str] = []
    touches: list[str] = []
    before = values.lines
    for k, (launch, sizes) in enumerate(zip(plan.launches, numbers, strict=True)):
        if plan.on_device:
            values.lines = []
        first = len(rows.candidates)
        choice = rows.add(launch)
        name = "0"
        if plan.on_device:
            name = f"choose_{k}"
            functions.append(evaluation_function(name, values.lines))
        chooser = f"{len(rows.candidates) - first}, {first}, {choice}, {name}"
        touched = _touched(launch, plan, order)
        count = -1 if launch.writes is None else len(touched)
        rest = f", {count}, {len(touches)}" if plan.on_device else ""
        launches.append(f"{{{quote(launch.label)}, {', '.join(map(str, sizes))}, {chooser}{rest}}}")
        touches += touched
    values.lines = before
    tables = {"launches": ("pd_launch_entry", launches)} | rows.tables()
    return tables | ({"touches": ("int32_t", touches)} if plan.on_device else {}), functions


def _touched(launch: Launch, plan: HostPlan, order: Mapping[str, int]) -> list[str]:
    """Return the buffers that the launch reads or writes, encoded as in ``pd_plan.touches``."""
    writes = launch.writes or ()
    changing = [b for b in launch.buffers if plan.buffers[b].role != "constant"]
    return [str(2 * order[b] + (b in writes)) for b in changing] if launch.writes is not None else []


def _numbers(launch: Launch, plan: HostPlan, values: Evaluation) -> tuple[int, ...]:
    """Return the positions of the launch's sizes, and the numbers of the input and output for ``skip_if_same``."""
    sizes = map(values.of, (launch.elements, launch.work, launch.flops, launch.bytes, launch.copied))
    skip = launch.skip_if_same
    return (*sizes, *((plan.inputs.index(skip[0]), plan.outputs.index(skip[1])) if skip else (-1, -1)))


def limits(candidate: Candidate) -> tuple[Condition, ...]:
    """Return all conditions of a candidate's launch: its own, and the requirements on the device."""
    if candidate.block is None:
        return candidate.conditions
    arch = special_arch(candidate.block.arch)
    fits = [(candidate.scratch, "<=", V(SHARED))] if candidate.scratch != ZERO else []
    only = "==" if candidate.block.arch[-1].isalpha() else ">="
    runs = [(V(ARCH), only, V(arch))] if arch else []
    bits = [V(LACKING) // 2**n for n, f in enumerate(FEATURES) if f in candidate.features]
    return (*candidate.conditions, *fits, *runs, *((bit - bit // 2 * 2, "==", ZERO) for bit in bits))


class _Rows:
    """The table of candidates, and the tables it points into."""

    def __init__(self, plan: HostPlan, values: Evaluation, order: Mapping[str, int]) -> None:
        self.values, self.order, self.on_device = values, {**order, WORKSPACE: -1, COUNTERS: -2}, plan.on_device
        self.kernels = {k.name: i for i, k in enumerate(plan.kernels)}
        self.texts = plan.kernels
        self.candidates: list[str] = []
        self.buffers: list[str] = []
        self.symbols: list[str] = []
        self.maps: list[str] = []
        self.sizes: list[str] = []

    def add(self, launch: Launch) -> int:
        """Add the candidates of a launch, each with the kernels after it. Return the position of the chosen row.

        Return -1 if the first row is always chosen. Rows count from the launch's first.
        """
        starts, row = [], 0
        for c in launch.candidates:
            starts.append(row)
            row += len(c.sequence)
        conditions = list(map(limits, launch.candidates))
        evaluated = [list(_evaluated(c)) for c in launch.candidates]
        if launch.decision == ONLY and not conditions[0]:
            choice, positions = -1, [[self.values.of(x) for x in evaluated[0]]]
            positions += [[0] * len(x) for x in evaluated[1:]]  # never launched
        else:
            choice = self.values.choose(launch.decision, conditions, starts)
            positions = self.values.select(choice, starts, evaluated)
        for c, values in zip(launch.candidates, positions, strict=True):
            self._add(c, iter(values))
        return choice

    def _add(self, first: Candidate, positions: Iterator[int]) -> None:
        """Add one candidate. ``positions``: positions of the values that ``_evaluated`` yields."""
        for c in first.sequence:
            buffers = f"{len(c.buffers)}, {len(self.buffers)}"
            symbols = f"{len(c.symbols)}, {len(self.symbols)}"
            self.buffers += [str(self.order[n]) for n in c.buffers]
            self.symbols += [str(next(positions)) for _ in c.symbols]
            head, sizes = f"{self.kernels[c.kernel]}, {buffers}, {symbols}", f"{next(positions)}, {next(positions)}"
            block = ""
            if c.block is not None:
                maps, workspace = f"{len(c.block.maps)}, {len(self.maps)}", next(positions)
                for m in c.block.maps:
                    self._map(m, positions)
                block = f", {c.block.threads}, {workspace}, {maps}, {len(c.after)}"
            self.candidates.append(f"{{{head}, {sizes}{block}}}")

    def _map(self, m: TensorMapOf, positions: Iterator[int]) -> None:
        code, _ = element_type(m.dtype)
        numbers = f"{self.order[m.buffer]}, {code}, {len(m.dims)}, {next(positions)}, {len(self.sizes)}"
        self.sizes += [str(next(positions)) for _ in (*m.dims, *m.strides, *m.corners)]
        steps = m.pixels.steps if m.pixels else (0,)
        self.maps.append(f"{{{numbers}, {{{', '.join(map(str, m.box))}}}, {{{', '.join(map(str, steps))}}}}}")

    def _kernel(self, k: Kernel) -> str:
        if not self.on_device:
            return f"{{{k.name}, {quote(k.name)}}}"
        return f"{{0, {quote(k.name)}, {int(BEGIN in k.text)}}}"

    def tables(self) -> Tables:
        """Return all tables; the tensor map tables exist only on a device."""
        return {
            "kernels": ("pd_named_kernel", list(map(self._kernel, self.texts))),
            "launch_buffers": ("int32_t", self.buffers),
            "launch_symbols": ("int32_t", self.symbols),
            "candidates": ("pd_candidate", self.candidates),
        } | ({"maps": ("pd_tensor_map", self.maps), "map_sizes": ("int32_t", self.sizes)} if self.on_device else {})


def _evaluated(first: Candidate) -> Iterator[Index]:
    """Yield the expressions that must be evaluated before a candidate is launched, in the order of the tables."""
    for c in first.sequence:
        yield from (*c.symbols, c.tasks, c.scratch)
        if c.block is not None:
            yield c.workspace
            yield from (x for m in c.block.maps for x in _map_sizes(m))


def _map_sizes(m: TensorMapOf) -> Sequence[Index]:
    """Return offset, dims, strides and corners of a tensor map; offset and strides in bytes."""
    _, item = element_type(m.dtype)
    return (m.offset * item, *m.dims, *(s * item for s in m.strides), *m.corners)
