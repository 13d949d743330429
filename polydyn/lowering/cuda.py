"""From fused groups to CUDA kernels: the same lowering as for the CPU, other trees and printers."""

from __future__ import annotations

from dataclasses import dataclass

from polydyn.codegen.cuda_contract import CudaContractKernel
from polydyn.codegen.cuda_kernel import CudaKernel
from polydyn.codegen.cuda_nest import CudaNestKernel
from polydyn.fusion.plan import FusedGroup, FusionPlan
from polydyn.lowering.contract import lower_contract
from polydyn.lowering.flatten import CUDA_DTYPES, check_dtypes
from polydyn.lowering.group import LoweredGroup
from polydyn.lowering.nest import lower_nest
from polydyn.schedules.model import verify_group
from polydyn.schedules.reuse import Proofs
from polydyn.schedules.tiling import nest_tree


@dataclass(frozen=True)
class PlacedCuda:
    """A fused group with the versions of its kernel, best first; ``lowered`` binds the kernel's names to the model."""

    fused: FusedGroup
    lowered: LoweredGroup
    versions: tuple[CudaKernel, ...]


class CudaBuilder:
    """Builds each distinct kernel once."""

    def __init__(self, plan: FusionPlan) -> None:
        self.plan = plan
        self.kernels: dict[str, tuple[CudaKernel, ...]] = {}

    def place(self, group: FusedGroup) -> tuple[PlacedCuda, ...]:
        """The kernels of one group (three of an attention). UnsupportedError, CodegenError: not built, by name."""
        if group.kind == "attention":
            return tuple(p for part in group.parts for p in self.place(part))
        for n in group.nodes:
            check_dtypes(n, CUDA_DTYPES, "CUDA")
        contract = lower_contract(self.plan, group, 0) if group.kind == "contract" else None
        if contract is not None and contract.roles.row != "one":  # without rows nothing is shared: a thread an element
            lowered, key = contract.lowered, contract.lowered.key(contract.roles, "cuda")
            if key not in self.kernels:
                verify_group(lowered.group)
                product = CudaContractKernel(f"contract_{key[:12]}", lowered.group, contract.roles)
                self.kernels[key] = product.versions()
            return (PlacedCuda(group, lowered, self.kernels[key]),)
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
