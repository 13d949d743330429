"""Evaluates the reports of a day with a GPU: results, constants for the cost model, and faults to fix first.

    python -m benchmarks.gpu.after FOLDER [...] [--name gpu_h200] [--fit] [--describe FILE] [--out benchmarks/results]

FOLDER: the output of ``run_all``, one folder for each call; a repeated stage replaces the older one. Prints

- faults, then families of cases compared with their goals, the farthest from its goal first, with their worst cases;
- constants of the cost model compared with their calibration, and the constants without a measurement;
- with ``--describe``: nothing more; the file receives a description of the device with the measured costs
  (for example ``polydyn/gpu/hardware/h200.json``);
- with ``--fit``: the constants with which the selector would have chosen best among the timed versions (minutes).
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.gpu.run_all import wrong
from benchmarks.record import RESULTS
from polydyn.gpu import hardware

Stages = dict[str, dict[str, Any]]
WORST = 3


@dataclass(frozen=True)
class Goal:
    """The goal of a family: the geometric mean of their time over ours (``key``), and the minimum for each case."""

    mean: float
    each: float = 0.0
    key: str = "over_torch"


GOALS = {
    "large products": Goal(0.8, 0.5), "products": Goal(0.8, 0.5), "few rows": Goal(1.0, 0.5), "layers": Goal(0.8, 0.5),
    "attention": Goal(0.6, 0.3), "softmax": Goal(1.0), "layernorm": Goal(1.0), "column": Goal(1.0),
    "element-wise": Goal(1.0),
    "bytes": Goal(0.8), "convolutions": Goal(0.5), "bert_base": Goal(1.0, key="over_inductor"),
    "gpt2": Goal(1.0, key="over_inductor"), "selector": Goal(0.93, 0.5, key="of_best"),
}  # fmt: skip
LARGE_PRODUCT, MAX_SKINNY_ROWS = 2.0**36, 16
"""Multiplications of a large product; maximum number of rows of a skinny product."""


# ---- reading -------------------------------------------------------------------------------------------------------
def read(folders: Sequence[Path]) -> dict[str, Any]:
    """Merge the reports into one, with stages by name. ValueError: they come from several devices."""
    merged: dict[str, Any] = {"stages": {}}
    for folder in folders:
        for path in sorted(folder.rglob("report*.json")) if folder.is_dir() else [folder]:
            report = json.loads(path.read_text())
            merged |= {k: v for k, v in report.items() if k != "stages"}
            merged["stages"] |= report["stages"]
    devices = {s["device"] for s in merged["stages"].values() if "device" in s}
    if len(devices) != 1:
        raise ValueError(f"one device is expected, the reports are of {sorted(devices) or 'none'}")
    return merged | {"device": devices.pop()}


def sizes(name: str) -> dict[str, int]:
    """Parse the shape at the end of a case's name."""
    found = re.search(r" ((?:[A-Z]\d+x)*[A-Z]\d+)(?: \w+)?$", name)
    return {x[0]: int(x[1:]) for x in found[1].split("x")} if found else {}


def family(stage: str, name: str) -> str:
    """Return the name of the goal for a result, or an empty string."""
    at = sizes(name)
    if stage in ("gemm", "layers") and at.get("M", MAX_SKINNY_ROWS + 1) <= MAX_SKINNY_ROWS:
        return "few rows"
    if stage == "gemm":
        return "large products" if math.prod(at.values()) >= LARGE_PRODUCT else "products"
    if stage == "stitch":
        rows = ("softmax", "layernorm", "column")
        return name.partition("_")[0] if name.startswith(rows) else "element-wise"
    if stage == "real":
        return name.partition(" ")[0]
    return {"conv": "convolutions"}.get(stage, stage)


def rated(stages: Stages) -> dict[str, list[tuple[float, dict[str, Any]]]]:
    """Map each family to (value reached, result) pairs, worst first; models are compared with Inductor."""
    found: dict[str, list[tuple[float, dict[str, Any]]]] = {}
    for stage, record in stages.items():
        for r in record["results"]:
            goal = GOALS.get(family(stage, r["name"]))
            value = 1 / r["loss"] if stage == "selector" and "loss" in r else r.get(goal.key if goal else "", 0)
            if goal and value > 0:
                found.setdefault(family(stage, r["name"]), []).append((value, r))
    return {name: sorted(values, key=lambda x: x[0]) for name, values in found.items()}


def mean(values: Sequence[float]) -> float:
    """Return the geometric mean."""
    return math.exp(sum(map(math.log, values)) / len(values))


# ---- evaluation ----------------------------------------------------------------------------------------------------
def failures(stages: Stages) -> Iterator[str]:
    """Yield stages that failed and results that are wrong."""
    for name, record in stages.items():
        if "failed" in record:
            yield f"{name}: {record['failed']}"
        for r in wrong(record):
            said = (str(r.get(x, "")).partition("\n")[0] for x in ("message", "blocking"))
            yield f"{name}: {r['name']}: {'; launch by launch: '.join(filter(None, said)) or r}"


def order(stages: Stages) -> Iterator[str]:
    """Yield families, the farthest from their goal first, each with its worst cases."""
    found = rated(stages)
    reached = {name: mean([v for v, _ in values]) for name, values in found.items()}
    for name in sorted(found, key=lambda n: reached[n] / GOALS[n].mean):
        goal, values = GOALS[name], found[name]
        below = sum(v < goal.each for v, _ in values)
        met = "met" if reached[name] >= goal.mean and not below else "MISSED"
        count = f"{len(values):4} cases, {below} below {goal.each}"
        yield f"{name:15} {reached[name]:6.2f} of {goal.mean:4.2f}  {met:6} {count}"
        for value, r in values[:WORST]:
            ours = f"{r['us']:9.1f} us" if "us" in r else ""
            yield f"    {value:6.2f} {ours}  {r['name']}  {r.get('kernel') or r.get('taken', '')}"
    for r in stages.get("real", {}).get("results", ()):
        for line in r.get("longest", ()):
            yield f"{r['name']}: {line}"


def calibrated(stages: Stages, device: hardware.Hardware) -> Iterator[tuple[str, str, float, float]]:
    """Yield (constant, variant, assumed value, measured value) for each measurement of a constant."""
    for r in stages.get("calibration", {}).get("results", ()):
        name, measured = r.get("constant", ""), float(r.get("measured", 0))
        if name == "peak_tflops":
            yield name, r["of"], device.peak_tflops["f16"], measured
        elif hasattr(device, name):
            yield name, r.get("of", ""), float(getattr(device, name)), measured
        elif hasattr(device.costs, name):
            share = device.peak_tflops["f16"] if name == "mma_share" else 1.0
            yield name, r.get("of", ""), float(getattr(device.costs, name)), measured / share


def costs(stages: Stages, device: hardware.Hardware) -> dict[str, float]:
    """Return the measured costs; for latency, the value of memory."""
    every = ((n, of, x) for n, of, _, x in calibrated(stages, device) if hasattr(device.costs, n))
    found = [(n, x) for n, of, x in every if (n, of) != ("latency_ns", "L2")]
    return {n: float(f"{x:.4g}") for n, x in found if math.isfinite(x) and x > 0}


def unmeasured(stages: Stages, device: hardware.Hardware) -> list[str]:
    """Return the costs without a measurement."""
    found = costs(stages, device)
    return [
        f"{f.name:16} {getattr(device.costs, f.name):g} is supposed"
        for f in fields(device.costs)
        if f.name not in found
    ]


def describe(path: Path, report: Mapping[str, Any], device: hardware.Hardware) -> None:
    """Write the description of the device with measured values in place of assumed ones."""
    raw = json.loads((hardware.HERE / f"{file_of(device)}.json").read_text())
    measured = costs(report["stages"], device)
    source = f"{', '.join(measured)}: benchmarks.gpu.calibration on {report['device']}, {report.get('date', '')}"
    raw["costs"], raw["sources"] = raw["costs"] | measured, raw["sources"] | {"measured costs": source}
    path.write_text(json.dumps(raw, indent=2) + "\n")
    hardware.load(path)


def file_of(device: hardware.Hardware) -> str:
    """Return the name of a description's file."""
    return next(n for n in hardware.names() if hardware.load(n).name == device.name)


def biases(stages: Stages) -> Iterator[tuple[str, float, int]]:
    """Yield (kind of version, median of measured over estimated time, number of samples): systematic errors of the
    model.
    """
    found: dict[str, list[float]] = {}
    for r in stages.get("selector", {}).get("results", ()):
        for version, us in r.get("versions", {}).items():
            kind = re.sub(r"(_\d+)+(_wide|_long)*( int64)?$", "", version)
            if r["estimates"].get(version):
                found.setdefault(kind, []).append(us / r["estimates"][version])
    for kind, ratios in sorted(found.items(), key=lambda x: -abs(math.log(median(x[1])))):
        yield kind, median(ratios), len(ratios)


def save(report: Mapping[str, Any], name: str, folder: Path) -> Path:
    """Save the reports as one result; they contain the time and the device of each measurement."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(report, indent=1) + "\n")
    return path


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--name", default="gpu")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--describe", type=Path, help="write a description of the device with measured values")
    options = parser.parse_args()
    report = read(options.folders)
    stages, device = report["stages"], hardware.match(report["device"]) or hardware.load("h200")
    print(report["device"], save(report, options.name, options.out), sep="\n")
    for heading, lines in (
        ("wrong", failures(stages)),
        ("to mend, in order of loss", order(stages)),
        (
            "constants: supposed, measured",
            (f"{n:16} {of:12} {a:10.4g} {b:10.4g}" for n, of, a, b in calibrated(stages, device)),
        ),
        ("not measured", unmeasured(stages, device)),
        ("measured over estimated time", (f"{k:24} {ratio:6.2f}  {count} timed" for k, ratio, count in biases(stages))),
    ):
        print(f"\n{heading}", *(list(lines) or ["nothing"]), sep="\n")
    if options.describe:
        describe(options.describe, report, device)
    if options.fit:
        from benchmarks.gpu.fit import fitted

        print("\nconstants that would have chosen best", *fitted(stages, device), sep="\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
