"""From fused groups to CUDA kernels: the same lowering as for the CPU, other trees and printers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from polydyn.codegen.cuda_attention import CudaAttentionKernel
from polydyn.codegen.cuda_contract import CudaContractKernel, Kept
from polydyn.codegen.cuda_kernel import BASE, MULTIPROCESSORS, CudaKernel
from polydyn.codegen.cuda_nest import CudaNestKernel
from polydyn.codegen.ir import Compare
from polydyn.fusion.plan import FusedGroup, FusionPlan
from polydyn.lowering.attention import lower_attention
from polydyn.lowering.contract import ContractGroup, lower_contract
from polydyn.lowering.flatten import CUDA_DTYPES, check_dtypes
from polydyn.lowering.group import LoweredGroup
from polydyn.lowering.kernels import bind
from polydyn.lowering.nest import lower_nest
from polydyn.schedules.errors import CodegenError, ScheduleError
from polydyn.schedules.index import Atom, Index
from polydyn.schedules.model import verify_group
from polydyn.schedules.proof_attention import prove_row_blocks
from polydyn.schedules.ranges import is_nonnegative
from polydyn.schedules.reuse import Proofs
from polydyn.schedules.schedule import schedule_attention
from polydyn.shapes.context import ShapeContext

SHARED = 48 << 10
"""Bytes of dynamic shared memory that a block has on every device."""
UNKNOWN = "%multiprocessors"
"""Their number in a proof: no model has a symbol of this name."""


@dataclass(frozen=True)
class PlacedCuda:
    """A fused group with the versions of its kernel, best first; ``lowered`` binds the kernel's names to the model.

    ``reasons``: why it has these, lines for ``explain``.
    """

    fused: FusedGroup
    lowered: LoweredGroup
    versions: tuple[CudaKernel, ...]
    reasons: tuple[str, ...] = ()


class CudaTuner(Protocol):
    """What chooses a product's tiles from records; ``polydyn.searches.ChosenTiles`` is one."""

    def tiles(self, key: str, form: ContractGroup) -> tuple[Kept, tuple[str, ...]] | None:
        """The tiles of a group, and lines for ``explain``; None when nothing is known of it."""


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
    if a.kind == "min":
        return min(bounds) if bounds and all(map(is_nonnegative, a.args)) else None
    return max(bounds) if a.kind == "max" and len(bounds) == len(known) else None


def needed(p: PlacedCuda, facts: ShapeContext) -> PlacedCuda:
    """Without the conditions that always hold, and without the versions that another is launched instead of."""
    known = p.lowered.params
    kept: list[CudaKernel] = []

    def proven(c: Compare, own: Mapping[str, Index]) -> bool:
        if c.relation not in ("<=", ">="):
            return False
        low, high = (c.left, c.right) if c.relation == "<=" else (c.right, c.left)
        low, high = bind(known, low.subs(own)), bind(known, high.subs(own))
        most = largest(low, facts.ranges)
        known_high = most is not None and high.constant is not None and most <= high.constant
        return known_high or facts.nonnegative(high - low)

    for k in p.versions:
        multiples = tuple((i, n) for i, n in k.multiples if not facts.is_multiple(bind(known, i), n))
        own = {n: i.subs({MULTIPROCESSORS: UNKNOWN}) for n, i in k.launch.items()}
        conditions = tuple(c for c in k.conditions if not proven(c, own))
        k = replace(k, multiples=multiples, conditions=conditions)
        if not any(serves(earlier, k) for earlier in kept):
            kept.append(k)
    return replace(p, versions=tuple(kept))


def serves(k: CudaKernel, other: CudaKernel) -> bool:
    """Whether a version may be launched wherever a later one may, and takes no longer, as far as work is known."""
    may = set(k.multiples) <= set(other.multiples) and set(k.conditions) <= set(other.conditions)
    may = may and k.launch == other.launch and k.arch in (BASE, other.arch) and k.factor <= other.factor
    most = k.smem.constant
    may = may and (k.smem == other.smem or (most is not None and most <= SHARED))
    if not may or other.work is None:
        return may
    alike = (k.grid, k.threads) == (other.grid, other.threads) and k.after == other.after
    return alike and k.work is not None and k.work.no_slower(other.work)


class CudaBuilder:
    """Builds each distinct kernel once.

    ``arch``: with ``sm_90a`` also versions that only it can run, for launchers that make tensor maps. ``tf32``: large
    products of float32 on tensor cores, their operands rounded to tf32. ``tuner``: whose tiles products have.
    """

    def __init__(
        self, plan: FusionPlan, arch: str = BASE, tf32: bool = False, tuner: CudaTuner | None = None
    ) -> None:
        self.plan, self.arch, self.tf32, self.tuner = plan, arch, tf32, tuner
        self.along_k = ("float32",) if tf32 else ()  # what wgmma wants, and ldmatrix; pass ``steps`` does so for bytes
        self.kernels: dict[str, tuple[CudaKernel, ...]] = {}
        self.attentions: dict[str, CudaAttentionKernel] = {}
        self.reasons: dict[str, tuple[str, ...]] = {}
        self.notes: list[str] = []

    def products(self, group: FusedGroup) -> Iterator[tuple[str, FusedGroup, ContractGroup]]:
        """The matmul-like groups that a group is placed as, with their keys: itself, or parts of an attention."""
        if group.kind == "attention":
            parts = () if self._attention_kernel(group) else group.parts
            yield from (x for part in parts for x in self.products(part))
        elif form := self._product(group):
            yield self._key(form), group, form

    def _product(self, group: FusedGroup) -> ContractGroup | None:
        for n in group.nodes:
            check_dtypes(n, CUDA_DTYPES, "CUDA")
        return lower_contract(self.plan, group, 0, along_k=self.along_k) if group.kind == "contract" else None

    def _key(self, form: ContractGroup) -> str:
        return form.lowered.key(form.roles, "cuda")

    def place(self, group: FusedGroup) -> tuple[PlacedCuda, ...]:
        """The kernels of one group (three of an attention that one kernel cannot do).

        UnsupportedError, CodegenError: not built, by name.
        """
        if group.kind == "attention":
            whole = self._attention(group)
            return (whole,) if whole else tuple(p for part in group.parts for p in self.place(part))
        contract = self._product(group)
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
                for t in k.schedules():
                    Proofs(k.group).prove_nest(t, k.prefix, k.phases)
            self.kernels[key] = kernel.versions()
        return (PlacedCuda(group, lowered, self.kernels[key]),)

    def _contract(self, group: FusedGroup, form: ContractGroup) -> PlacedCuda | None:
        """The kernels of a product; None when it has one row and no vectors: then nothing is shared, nor wide."""
        lowered, key = form.lowered, self._key(form)
        kernel = CudaContractKernel(f"contract_{key[:12]}", lowered.group, form.roles, self.arch, self.tf32)
        if form.roles.row == "one" and not kernel.few_rows():
            return None
        if key not in self.kernels:
            verify_group(lowered.group)
            found = self.tuner.tiles(key, form) if self.tuner else None
            kept, self.reasons[key] = found or (None, ())
            self.kernels[key] = kernel.tuned_versions(kept) if kept else kernel.versions()
        if why := kernel.without_wgmma():
            self.notes.append(f"{group.outputs[0]}: no wgmma: {why}")
        return PlacedCuda(group, lowered, self.kernels[key], self.reasons[key])

    def _attention(self, group: FusedGroup) -> PlacedCuda | None:
        """The kernel of a whole attention; None, with a note, when it is better run in parts."""
        found = self._attention_kernel(group)
        if found is None:
            return None
        lowered, key, kernel = found
        if key not in self.kernels:
            verify_group(lowered.group)
            prove_row_blocks(lowered.group, kernel.parts)
            self.kernels[key] = kernel.versions()
        return PlacedCuda(group, lowered, self.kernels[key])

    def _attention_kernel(self, group: FusedGroup) -> tuple[LoweredGroup, str, CudaAttentionKernel] | None:
        for n in group.nodes:
            check_dtypes(n, CUDA_DTYPES, "CUDA")
        form = lower_attention(self.plan, group)
        if form is None:
            return None
        lowered = form.lowered
        key = lowered.key(form.parts, "cuda")
        if key not in self.attentions:
            try:
                parts = schedule_attention(form.parts)
                kernel = CudaAttentionKernel(f"attention_{key[:12]}", lowered.group, parts, self.tf32)
            except (CodegenError, ScheduleError) as e:
                self.notes.append(f"{group.outputs[0]}: attention in parts: {e}")
                return None
            self.attentions[key] = kernel
        return lowered, key, self.attentions[key]
