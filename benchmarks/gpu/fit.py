"""Fits the constants of the cost model to times of all versions.

The fit minimises the selector's loss (geometric mean of the time of the selected version over the best one's) and, with
a weight of a tenth, the error of the estimates. It changes one constant at a time, by a few per cent to a factor of
two.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.gpu.programs import Case
from benchmarks.gpu.timed import timed
from polydyn.compiler import plan_program
from polydyn.gpu.hardware import Costs, Hardware
from polydyn.program.estimates import estimated
from polydyn.program.evaluation import THREADS
from polydyn.program.plan import HostPlan
from polydyn.testing.choice import estimates

SHARES = ("mma_share", "hidden", "hidden_memory")
"""Costs that are at most 1."""
FACTORS = (0.5, 0.7, 0.85, 0.95, 1.05, 1.18, 1.4, 2.0)
ROUNDS, OF_ERROR = 4, 0.1


@dataclass(frozen=True)
class Choice:
    """The versions of a case at a shape, with their times."""

    case: str
    shape: Mapping[str, int]
    times: Mapping[str, float]


def choices(stages: Mapping[str, Any]) -> list[Choice]:
    """Return the timed choices of the selector's stage."""
    from benchmarks.gpu.after import sizes

    rows = stages.get("selector", {}).get("results", ())
    return [Choice(r["name"].partition(" ")[0], sizes(r["name"]), r["versions"]) for r in rows if r.get("versions")]


def supposing(values: Mapping[str, float], device: Hardware) -> Hardware:
    """Return the device with other costs."""
    return replace(device, costs=Costs(**{n: min(v, 1.0) if n in SHARES else v for n, v in values.items()}))


def supposed(device: Hardware) -> dict[str, float]:
    """Return the current costs."""
    return asdict(device.costs)


class Fit:
    """Plans of the timed cases, and their evaluation for given constants."""

    def __init__(self, timed_: Sequence[Choice], cases: Sequence[Case], device: Hardware) -> None:
        self.device, names = device, {c.case for c in timed_}
        plans = {c.name: plan_program(c.model, target=f"cuda:{device.arch}") for c in cases if c.name in names}
        self.plans: dict[str, HostPlan] = {n: p for n, p in plans.items() if len(p.launches) == 1}
        self.rows = [c for c in timed_ if c.case in self.plans]

    def cost(self, values: Mapping[str, float]) -> float:
        """Return the logarithm of the loss, plus a share of the estimates' error."""
        losses, errors = [], []
        made = {n: estimated(p, supposing(values, self.device)) for n, p in self.plans.items()}
        for row in self.rows:
            (launch,) = made[row.case].launches
            env = {**row.shape, THREADS: self.device.multiprocessors}
            said = {n: e.evaluate(env) / 1000 for n, e in estimates(launch).items() if n in row.times}
            if not said:
                continue
            taken = min(said, key=lambda n: said[n])
            losses.append(math.log(row.times[taken] / min(row.times.values())))
            errors += [abs(math.log(row.times[n] / max(us, 1e-3))) for n, us in said.items()]
        return sum(losses) / max(len(losses), 1) + OF_ERROR * sum(errors) / max(len(errors), 1)

    def best(self) -> tuple[dict[str, float], float, float]:
        """Return (constants, their cost, the cost of the current constants)."""
        values = supposed(self.device)
        first = least = self.cost(values)
        for _ in range(ROUNDS):
            before = least
            for name in values:
                for factor in FACTORS:
                    other = values | {name: values[name] * factor}
                    cost = self.cost(other)
                    if cost < least - 1e-6:
                        values, least = other, cost
            if least == before:
                break
        return values, least, first


def fitted(stages: Mapping[str, Any], device: Hardware) -> Iterator[str]:
    """Yield a line for each constant, and its gain."""
    rows = choices(stages)
    if not rows:
        yield "no version was timed"
        return
    fit = Fit(rows, list(timed(False)), device)
    values, least, first = fit.best()
    for name, value in values.items():
        yield f"{name:14} {supposed(device)[name]:10.4g} -> {value:10.4g}"
    yield f"cost {first:.4f} -> {least:.4f} over {len(fit.rows)} choices"
