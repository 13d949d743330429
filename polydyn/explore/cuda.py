"""CUDA kernels of hand-written schedules, run on the CPU with strict semantics (``gpu.emulator``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from polydyn.codegen.kernel import Kernel
from polydyn.codegen.printers.cuda import PRELUDE
from polydyn.explore.checks import Checked
from polydyn.gpu.emulator import EmulatedModule, compile_emulated
from polydyn.schedules import model as polyhedral


@dataclass(frozen=True, repr=False)
class CompiledCuda(Checked):
    """A CUDA kernel of one group. ``kernel``: the version that supports every size; ``reverse``: threads run in reverse
    order, which must not change the results.
    """

    group: polyhedral.Group
    kernel: Kernel
    packed: Mapping[str, npt.NDArray[Any]] | None = None
    reverse: bool = False

    @property
    def text(self) -> str:
        """The CUDA text."""
        return self.kernel.text

    @property
    def notes(self) -> tuple[str, ...]:
        """The decisions of the code generator."""
        return (f"blocks of {self.kernel.device.threads} threads", f"{self.kernel.scratch} bytes of shared memory")

    def run(self, inputs: Mapping[str, npt.NDArray[Any]], **sizes: int) -> dict[str, npt.NDArray[Any]]:
        """Return the outputs as flat arrays, like ``Compiled.run``; no GPU is needed.

        BuildError: there is no C++ compiler. DeviceError: the kernel breaks a CUDA rule; it names line and thread.
        """
        memory = self.memory(self.kernel.buffers, inputs, sizes)
        args: list[Any] = [*memory.values(), *(np.int64(sizes[x]) for x in self.kernel.symbols)]
        k = self.kernel
        blocks, smem = k.tasks.evaluate(sizes), k.scratch.evaluate(sizes)
        if blocks:
            self._module.launch(k.name, blocks, k.device.threads, args, smem=smem, reverse=self.reverse)
        return {n: memory[n] for n, a in self.group.arrays.items() if a.role == "output"}

    @cached_property
    def _module(self) -> EmulatedModule:
        return EmulatedModule(compile_emulated(PRELUDE + self.kernel.text.removeprefix(PRELUDE)))
