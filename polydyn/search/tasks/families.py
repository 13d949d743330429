"""Tuning tasks of families of CUDA kernels (``codegen.cuda.families``): products by warpgroups, attentions.

Their spaces are small, and a model's estimate of a whole launch, or the launch itself, tells their tiles apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from polydyn.codegen.cuda.families import Family
from polydyn.codegen.kernel import Kernel
from polydyn.errors import Declined
from polydyn.gpu.cache import content_key
from polydyn.gpu.compiler import device_headers
from polydyn.gpu.hardware import Hardware as Device
from polydyn.gpu.hardware import device_of
from polydyn.gpu.targets import single
from polydyn.lowering.contract import ContractGroup
from polydyn.schedules.index import Index
from polydyn.search.backbone import GroupKey, Tile
from polydyn.search.tasks.cpu import Task, accumulation, declined_data
from polydyn.search.tasks.cuda import GENERATOR, CudaTask, compiler_of, cuda_task_of
from polydyn.search.tasks.sized import backbone_of


@dataclass(frozen=True)
class FamilyTask(Task[Any]):
    """A group whose kernels of one family are tuned. ``device``: whose limits count; ``sizes``: loop -> extent."""

    family: Family
    device: Device
    sizes: Mapping[str, Index]

    @property
    def extents(self) -> dict[str, Index]:
        """Loop -> extent over the group's parameters."""
        return dict(self.sizes)

    @cached_property
    def every(self) -> tuple[Tile, ...]:
        """Its tuples, those of the group without tuning first."""
        return tuple(map(Tile, self.family.tiles()))

    def tiles(self, most: int) -> list[Tile]:
        """The first of them."""
        return list(self.every[:most])

    def versions(self, tile: Tile) -> tuple[Kernel, ...]:
        """The kernels of a tuple. ScheduleError: it breaks a rule, by name."""
        return tuple(self.family.versions(tile.compile))


def family_task_of(key: str, form: Any, family: Family, target: str, tf32: bool = False) -> FamilyTask | Declined:
    """The task of a group for one architecture, or why it is not tuned. ``form``: what the group is lowered to."""
    if isinstance(form, ContractGroup):
        of = cuda_task_of(key, form, target, tf32)
        return of if isinstance(of, Declined) else _of_product(of, family)
    if refusal := declined_data(form):
        return refusal
    backbone, generator = backbone_of(form), f"{GENERATOR} {content_key(*device_headers().values())[:12]}"
    name = GroupKey(key, backbone.dtype, target, compiler=compiler_of(single(target)), flags=(family.name,),
                    generator=generator)  # fmt: skip
    return FamilyTask(form, name, backbone, family, device_of(target), dict(accumulation(form).iters))


def _of_product(task: CudaTask, family: Family) -> FamilyTask:
    name = replace(task.key, flags=(family.name,))
    return FamilyTask(task.form, name, task.backbone, family, task.device, task.extents, place=task.place)
