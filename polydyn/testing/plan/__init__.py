"""Interpret host plans byte by byte, without calling any function that makes or verifies plans.

``check_model`` runs the plans of a model on concrete sizes in a simulated memory, without a C compiler, and lists the
faults (docs/debugging.md). ``check_planned`` does the same for one given plan.
"""

from polydyn.testing.plan.check import Faulty, check_model, check_planned
from polydyn.testing.plan.faults import Fault
from polydyn.testing.plan.planned import Planned, planned_of, plans_of

__all__ = ["Fault", "Faulty", "Planned", "check_model", "check_planned", "planned_of", "plans_of"]
