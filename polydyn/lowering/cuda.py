"""From fused groups to CUDA kernels: the same lowering as for the CPU, other trees and printers."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from polydyn.codegen.cuda_attention import CudaAttentionKernel
from polydyn.codegen.cuda_contract import CudaContractKernel
from polydyn.codegen.cuda_kernel import CudaKernel
from polydyn.codegen.cuda_nest import CudaNestKernel
from polydyn.codegen.ir import Compare
from polydyn.fusion.plan import FusedGroup, FusionPlan
from polydyn.graph.ir import Guard
from polydyn.lowering.attention import lower_attention
from polydyn.lowering.contract import ContractGroup, lower_contract
from polydyn.lowering.flatten import CUDA_DTYPES, check_dtypes
from polydyn.lowering.group import LoweredGroup
from polydyn.lowering.kernels import bind
from polydyn.lowering.nest import lower_nest
from polydyn.schedules.errors import CodegenError, ScheduleError
from polydyn.schedules.expr import FLOATS
from polydyn.schedules.index import Atom, Index
from polydyn.schedules.model import verify_group
from polydyn.schedules.proof_attention import prove_row_blocks
from polydyn.schedules.reuse import Proofs
from polydyn.schedules.schedule import schedule_attention
from polydyn.schedules.tiling import nest_tree
from polydyn.shapes.context import ShapeContext

SHARED = 48 << 10
"""Bytes of dynamic shared memory that a block has on every device."""


@dataclass(frozen=True)
class PlacedCuda:
    """A fused group with the versions of its kernel, best first; ``lowered`` binds the kernel's names to the model."""

    fused: FusedGroup
    lowered: LoweredGroup
    versions: tuple[CudaKernel, ...]


def facts_of(guards: Iterable[Guard]) -> ShapeContext:
    """What a program's guards say of its sizes: they are checked before anything is launched."""
    facts = ShapeContext()
    learn = {"==": facts.unify, "<=": facts.at_most, "%==": facts.assume_multiple}
    for g in guards:
        learn[g.relation](g.left, g.right, g.message)
    return facts


def largest(e: Index, ranges: Mapping[str, tuple[int, int | None]]) -> int | None:
    """A bound from above where nothing is subtracted; None when there is none."""
    total = 0
    for monomial, c in e.terms.items():
        factors = [_largest_atom(a, ranges) for a in monomial]
        if c < 0 or any(f is None for f in factors):
            return None
        total += c * math.prod(f for f in factors if f is not None)
    return total


def _largest_atom(a: str | Atom, ranges: Mapping[str, tuple[int, int | None]]) -> int | None:
    if isinstance(a, str):
        return ranges.get(a, (0, None))[1]
    known = [largest(x, ranges) for x in a.args]
    bounds = [x for x in known if x is not None]
    if a.kind == "floordiv":
        n = a.args[1].constant
        return bounds[0] // n if known[0] is not None and n is not None and n > 0 else None
    if a.kind not in ("min", "max") or len(bounds) < len(known):
        return None
    return min(bounds) if a.kind == "min" else max(bounds)


def needed(p: PlacedCuda, facts: ShapeContext) -> PlacedCuda:
    """Without the conditions that always hold, and without the versions behind one that can always be launched."""
    known, kept = p.lowered.params, []

    def proven(c: Compare, own: Collection[str]) -> bool:
        if c.relation not in ("<=", ">=") or (c.left.symbols() | c.right.symbols()) & set(own):
            return False
        low, high = (c.left, c.right) if c.relation == "<=" else (c.right, c.left)
        low, high = bind(known, low), bind(known, high)
        most = largest(low, facts.ranges)
        known_high = most is not None and high.constant is not None and most <= high.constant
        return known_high or facts.nonnegative(high - low)

    for k in p.versions:
        multiples = tuple((i, n) for i, n in k.multiples if not facts.is_multiple(bind(known, i), n))
        conditions = tuple(c for c in k.conditions if not proven(c, k.launch))
        kept.append(replace(k, multiples=multiples, conditions=conditions))
        smem = k.smem.constant
        if not multiples and not conditions and k.arch == "sm_80" and smem is not None and smem <= SHARED:
            break
    return replace(p, versions=tuple(kept))


class CudaBuilder:
    """Builds each distinct kernel once.

    ``arch``: with ``sm_90a`` also versions that only it can run, for launchers that make tensor maps. ``tf32``: large
    products of float32 on tensor cores, their operands rounded to tf32.
    """

    def __init__(self, plan: FusionPlan, arch: str = "sm_80", tf32: bool = False) -> None:
        self.plan, self.arch, self.tf32 = plan, arch, tf32
        self.kernels: dict[str, tuple[CudaKernel, ...]] = {}
        self.notes: list[str] = []

    def place(self, group: FusedGroup) -> tuple[PlacedCuda, ...]:
        """The kernels of one group (three of an attention that one kernel cannot do).

        UnsupportedError, CodegenError: not built, by name.
        """
        if group.kind == "attention":
            whole = self._attention(group)
            return (whole,) if whole else tuple(p for part in group.parts for p in self.place(part))
        for n in group.nodes:
            check_dtypes(n, CUDA_DTYPES, "CUDA")
        floats = group.nodes[0].body.dtype in FLOATS
        contract = lower_contract(self.plan, group, 0) if group.kind == "contract" and floats else None
        if contract is not None:
            placed = self._contract(group, contract)
            if placed is not None:
                return (placed,)
        lowered = lower_nest(self.plan, group)
        key = lowered.key("cuda")
        if key not in self.kernels:
            verify_group(lowered.group)
            nest = Proofs(lowered.group).nest()
            kernel = CudaNestKernel(f"nest_{key[:12]}", lowered.group, nest.band, nest.phases)
            for k in (kernel, kernel.recomputed()):
                tree = nest_tree(k.group, k.prefix, k.phases, False)
                Proofs(k.group).prove_nest(tree, k.prefix, k.phases)
            self.kernels[key] = kernel.versions()
        return (PlacedCuda(group, lowered, self.kernels[key]),)

    def _contract(self, group: FusedGroup, form: ContractGroup) -> PlacedCuda | None:
        """The kernels of a product; None when it has one row and no vectors: then nothing is shared, nor wide."""
        lowered, key = form.lowered, form.lowered.key(form.roles, "cuda")
        kernel = CudaContractKernel(f"contract_{key[:12]}", lowered.group, form.roles, self.arch, self.tf32)
        if form.roles.row == "one" and not kernel.few_rows():
            return None
        if key not in self.kernels:
            verify_group(lowered.group)
            self.kernels[key] = kernel.versions()
        return PlacedCuda(group, lowered, self.kernels[key])

    def _attention(self, group: FusedGroup) -> PlacedCuda | None:
        """The kernel of a whole attention; None, with a note, when it is better run in parts."""
        for n in group.nodes:
            check_dtypes(n, CUDA_DTYPES, "CUDA")
        form = lower_attention(self.plan, group)
        if form is None:
            return None
        lowered = form.lowered
        key = lowered.key(form.parts, "cuda")
        if key not in self.kernels:
            try:
                parts = schedule_attention(form.parts)
                kernel = CudaAttentionKernel(f"attention_{key[:12]}", lowered.group, parts, self.tf32)
            except (CodegenError, ScheduleError) as e:
                self.notes.append(f"{group.outputs[0]}: attention in parts: {e}")
                return None
            verify_group(lowered.group)
            prove_row_blocks(lowered.group, kernel.parts)
            self.kernels[key] = kernel.versions()
        return PlacedCuda(group, lowered, self.kernels[key])
