"""Interpret the plan of a compilation as soon as it exists (``POLYDYN_VERIFY=2``)."""

from __future__ import annotations

import numpy as np

from polydyn.backends.base import Kernels, Target
from polydyn.codegen.pipeline import Loops
from polydyn.debug import Verify, verifying
from polydyn.fusion.pipeline import prepared_graph
from polydyn.graph.cut import Parts
from polydyn.graph.ir import Graph
from polydyn.lowering.place import Builder
from polydyn.program.plan import HostPlan
from polydyn.runtime.artifact import Artifact
from polydyn.runtime.seal import SEAL
from polydyn.testing.foreign.plans import check_planned_again
from polydyn.testing.loops.steps import verify_kernels
from polydyn.testing.plan.check import check_planned
from polydyn.testing.plan.faults import PlanError
from polydyn.testing.plan.framed import framed_of
from polydyn.testing.plan.frames import check_frame
from polydyn.testing.plan.planned import Planned, forms_of, rounding_of, width_of, with_text

SIZES = (2, 3, 1, 4, 8, 16, 32, 64)
"""Sizes to try, each for all dims at once."""
CALLS = 2
"""Number of accepted sizes at which a plan is run."""


def verify_by_running(
    source: Graph, rewritten: Graph, builder: Builder, kernels: Kernels, plan: HostPlan, target: Target,
    loops: Loops,
) -> int:  # fmt: skip
    """Run the plan and return the number of sizes without a fault. ``loops``: of the kernels.

    Raises ForeignError if a recheck of order or shared memory disagrees, PlanError if there is a fault.
    """
    side = target.options.winograd
    before = prepared_graph(rewritten, target.without, target.on_device, side, target.rounded, target.unit)
    later = (rewritten, before, kernels.plan.graph)
    planned = Planned(
        source, later, kernels, *forms_of(builder), plan, loops, width=width_of(target), rounding=rounding_of(target)
    )
    planned = with_text(planned)
    check_planned_again(planned)
    verify_kernels(planned, loops)
    return verify_planned(planned)


def verify_frame(parts: Parts, whole: Artifact) -> int:
    """Check the frame of a program and return its number of stages. Raises PlanError if a tensor is lost."""
    begin = int(whole.weights[24:32].view(np.int64)[0])
    words = whole.weights[begin:-SEAL].view(np.int64).tolist()
    framed = framed_of(parts, whole.manifest, whole.manifest["parts"], words)
    for fault in check_frame(framed):
        raise PlanError(str(fault), rule=str(fault), remedy="report it with the model")
    return len(framed.order)


def verify_planned(planned: Planned) -> int:
    """Run a plan like ``verify_by_running``."""
    done = 0
    for size in SIZES:
        found = check_planned(planned, {}, default=size, loops=verifying(Verify.KERNELS))
        if found:
            remedy = "report it with the model; Options(without={'windows', 'horizontal'}) may avoid it"
            raise PlanError(str(found[0].fault), rule=str(found[0]), remedy=remedy)
        done += found is not None
        if done == CALLS:
            break
    return done
