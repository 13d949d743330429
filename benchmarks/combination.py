"""FTuner's two-kernel combination (Algorithm 2) at prime lengths: padding on a GPU, time on this CPU.

usage: python -m benchmarks.combination [--threads N] [--quick]

In the padded binding of a GPU every block is executed whole. For FTuner's uKernels (V100, lengths 1..128) and for
polydyn's own (H200), chosen on a simulated machine, the multiply-adds that are executed at every prime length are counted:
of the single kernel that the strategy's scores choose, of the single kernel that pads least, and of the pair. Padding is
what is executed beyond the product itself.

On the CPU tiles are exact and one kernel serves every length. There the two launches of a pair are timed against the one
kernel that the same scores choose, and against each other's best.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks import record
from benchmarks.ops import models
from polydyn.compiler import cpu_target
from polydyn.dispatch.build import Dispatch, Program, build_dispatch
from polydyn.schedules.decision import choose
from polydyn.tuner import tasks_of
from polydyn.tuner.bench import CpuBench
from polydyn.tuner.calibrate import machine
from polydyn.tuner.timing import TIMER
from polydyn.tuning.backbone import Backbone, GroupKey, Loop, Operand, Problem, gemm
from polydyn.tuning.hardware import V100, Hardware
from polydyn.tuning.measure import Workers
from polydyn.tuning.replay import Simulated
from polydyn.tuning.strategy import STRATEGIES, Tuned, tune
