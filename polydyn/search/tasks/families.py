"""Tuning tasks of families of CUDA kernels (``codegen.cuda.families``): products by warpgroups, attentions.

Their spaces are small. Their tiles are compared by a model's estimate of a full launch, or by the launch itself.
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
    """A group with a kernel family to tune. ``device`` gives the limits; ``sizes``: loop -> extent."""

    family: Family
    device: Device
    sizes: Mapping[str, Index]

    @property
    def extents(self) -> dict[str, Index]:
        """Maps a loop to its extent over the group's parameters."""
        return dict(self.sizes)

    @cached_property
    def every(self) -> tuple[Tile, ...]:
        """All configurations; those of the group without tuning come first."""
        return tuple(map(Tile, self.family.tiles()))

    def parameters(self, tile: Tile) -> dict[str, int]:
        """Return the values of all parameters of a configuration."""
        return dict(tile.compile)

    def versions(self, tile: Tile) -> tuple[Kernel, ...]:
        """Return the kernels of a configuration. ScheduleError: it breaks a rule, which is named."""
        return tuple(self.family.versions(tile.compile))


def family_task_of(key: str, form: Any, family: Family, target: str, tf32: bool = False) -> FamilyTask | Declined:
    """Return the task of a group for one architecture, or why it is not tuned. ``form``: the lowered group."""
    if isinstance(form, ContractGroup):
        task = cuda_task_of(key, form, target, tf32)
        return task if isinstance(task, Declined) else _product_family(task, family)
    if refusal := declined_data(form):
        return refusal
    backbone, generator = backbone_of(form), f"{GENERATOR} {content_key(*device_headers().values())[:12]}"
    name = GroupKey(key, backbone.dtype, target, compiler=compiler_of(single(target)), flags=(family.name,),
                    generator=generator)  # fmt: skip
    return FamilyTask(form, name, backbone, family, device_of(target), dict(accumulation(form).iters))


def _product_family(task: CudaTask, family: Family) -> FamilyTask:
    name = replace(task.key, flags=(family.name,))
    return FamilyTask(task.form, name, task.backbone, family, task.device, task.extents, place=task.place)
