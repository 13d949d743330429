"""The launches of a host plan for a device as C tables: versions, what must hold, and when that is evaluated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from polydyn.codegen.cuda_kernel import TensorMapOf
from polydyn.gpu.targets import special_arch
from polydyn.gpu.tensormap import element_type
from polydyn.program.evaluation import Evaluation, evaluation_function
from polydyn.program.plan import WORKSPACE, HostPlan, Version

RELATIONS = {"==": "=", "<=": "<", "%==": "%"}
"""Relations of guards and conditions in the tables."""

Tables = dict[str, tuple[str, list[str]]]
"""Name of a C array -> element type and one initialiser per element."""


def quote(text: str) -> str:
    """A C string literal; everything but plain ASCII as octal bytes."""
    plain = set(range(32, 127)) - {ord('"'), ord("\\"), ord("?")}
    return '"' + "".join(chr(b) if b in plain else f"\\{b:03o}" for b in text.encode()) + '"'


def device_tables(plan: HostPlan, values: Evaluation, order: Mapping[str, int]) -> tuple[Tables, list[str]]:
    """The tables of launches and versions, and for each launch a function that evaluates what choosing needs.

    Those run one after the other, each when the launches before it are already on their way to the device; what one
    has computed the later ones use. What the plan's other tables need is evaluated before.
    """
    numbers = []
    for launch in plan.launches:
        sizes = (launch.tasks, launch.scratch, launch.work, launch.flops, launch.bytes, launch.copied)
        skip = launch.skip_if_same
        pair = (plan.inputs.index(skip[0]), plan.outputs.index(skip[1])) if skip else (-1, -1)
        numbers.append(", ".join(map(str, (*map(values.of, sizes), *pair))))
    rows = _Rows(plan, values, order)
    launches: list[str] = []
    choosers: list[str] = []
    shared = values.lines
    for k, launch in enumerate(plan.launches):
        values.lines = []
        first, first_buffer = len(rows.versions), len(rows.buffers)
        rows.buffers += [str(order[n]) for n in launch.buffers]
        rows.add(launch.versions)
        choosers.append(evaluation_function(f"choose_{k}", values.lines))
        counts = f"{len(launch.buffers)}, {first_buffer}, 0, 0"
        kernel = f"{rows.kernels[launch.kernel]}, -1"
        chosen = f"{len(rows.versions) - first}, {first}, choose_{k}"
        launches.append(f"{{{quote(launch.label or launch.kernel)}, {counts}, {numbers[k]}, {kernel}, {chosen}}}")
    values.lines = shared
    return {"launches": ("pd_launch_entry", launches)} | rows.tables(), choosers


class _Rows:
    """The tables of versions, and those they point into."""

    def __init__(self, plan: HostPlan, values: Evaluation, order: Mapping[str, int]) -> None:
        self.values, self.order = values, {**order, WORKSPACE: -1}
        self.kernels = {k.name: i for i, k in enumerate(plan.kernels)}
        self.versions: list[str] = []
        self.conditions: list[str] = []
        self.buffers: list[str] = []
        self.symbols: list[str] = []
        self.maps: list[str] = []
        self.sizes: list[str] = []

    def add(self, versions: Iterable[Version]) -> None:
        """Versions, each followed by those after it."""
        for v in versions:
            of = self.values.of
            buffers = f"{len(v.buffers)}, {len(self.buffers)}"
            symbols = f"{len(v.symbols)}, {len(self.symbols)}"
            conditions = f"{len(v.conditions)}, {len(self.conditions)}"
            self.buffers += [str(self.order[n]) for n in v.buffers]
            self.symbols += [str(of(s)) for s in v.symbols]
            self.conditions += [f"{{{of(a)}, {of(b)}, '{RELATIONS[relation]}'}}" for a, relation, b in v.conditions]
            sizes = f"{of(v.grid)}, {of(v.smem)}, {of(v.workspace)}, {of(v.estimate)}"
            head = f"{self.kernels[v.kernel]}, {v.threads}, {buffers}, {symbols}"
            maps = f"{len(v.maps)}, {len(self.maps)}"
            for m in v.maps:
                self._map(m)
            self.versions.append(f"{{{head}, {sizes}, {conditions}, {maps}, {special_arch(v.arch)}, {len(v.after)}}}")
            self.add(v.after)

    def _map(self, m: TensorMapOf) -> None:
        of, rank, (code, item) = self.values.of, len(m.dims), element_type(m.dtype)
        numbers = f"{self.order[m.buffer]}, {code}, {rank}, {of(m.offset * item)}, {len(self.sizes)}"
        self.sizes += [str(of(d)) for d in m.dims] + [str(of(s * item)) for s in m.strides]
        self.maps.append(f"{{{numbers}, {{{', '.join(map(str, m.box))}}}}}")

    def tables(self) -> Tables:
        """All of them."""
        return {
            "kernels": ("pd_named_kernel", [f"{{0, {quote(n)}}}" for n in self.kernels]),
            "launch_buffers": ("int32_t", self.buffers),
            "launch_symbols": ("int32_t", self.symbols),
            "versions": ("pd_version", self.versions),
            "conditions": ("pd_condition", self.conditions),
            "maps": ("pd_tensor_map", self.maps),
            "map_sizes": ("int32_t", self.sizes),
        }
