"""Compare ``torch.compile`` with polydyn to eager torch: functions of torch's own table, and random modules.

usage: python -m polydyn.testing.fuzz_torch [SEEDS] [--first N] [--jobs 1] [--compile 3] [--kind aten|modules|both]
                                            [--out FOLDER]

With ``both``, even seeds are functions (``torch_aten``), odd ones modules (``torch_modules``). Every ``--compile``-th
case runs compiled kernels, the others the imported graph. Values, NaN, infinities, signs of zeros, types, shapes,
strides, shared memory and inputs after the call are compared; float64 runs of eager torch give the bounds of rounding
(``torch_reference``). A case is right, rejected by name, different, or an error; cases that eager torch or torch's own
capture does not run are counted. Exit code 1: a case is different or an error.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from polydyn.testing.campaign import Campaign, Finding, Kinds, Result, fresh_cache, parser_of, seeds_of
from polydyn.testing.torch_aten import aten_case, single_cases
from polydyn.testing.torch_check import Case, Verdict, check
from polydyn.testing.torch_modules import module_case

KINDS = ("aten", "modules", "both")
FAULTS = ("different", "error")


def run_seed(seed: int, kind: str, compile_kernels: bool, out: str = "") -> Result:
    """Run the case of a seed and return its result."""
    torch.set_num_threads(1)
    functions = kind == "aten" or (kind == "both" and seed % 2 == 0)
    number = seed // 2 if kind == "both" else seed
    try:
        case = aten_case(number) if functions else module_case(number)
    except Exception as e:  # the generator's own fault
        return Result(seed, f"seed{seed}", Counter({"generator": 1}), refusal=f"generator: {type(e).__name__}: {e}")
    if case is None:
        return Result(seed, f"seed{seed}", Counter({"no case": 1}))
    found = [(case, check(case, compile_kernels))]
    if functions and found[0][1].kind != "right":  # one sample may hide the others
        alone = [(c, check(c, compile_kernels)) for c in single_cases(number)]
        found = alone + found if any(v.kind in FAULTS for _, v in alone) else found + alone
    return _result(seed, found, out)


def _result(seed: int, verdicts: Sequence[tuple[Case, Verdict]], out: str) -> Result:
    result = Result(seed, f"{seed} {verdicts[0][0].name}")
    for case, v in verdicts:
        result.counts += v.counts
        if v.kind in FAULTS:
            kind = "wrong" if v.kind == "different" else "error"
            if result.finding is None:
                result.finding = Finding(kind, "torch", v.message, v.call)
                result.files = case.text
            elif v.message not in result.finding.message:
                old = result.finding
                result.finding = Finding(old.kind, old.stage, f"{old.message}; and {v.message}", old.call)
        if v.kind == "refused":
            result.refusal = v.message
    kinds = {v.kind for _, v in verdicts}
    best = next(k for k in (*FAULTS, "right", "refused", "torch fails", "eager refuses") if k in kinds)
    result.counts[f"cases: {best}"] += 1
    if out and result.finding is not None:
        Path(out).mkdir(parents=True, exist_ok=True)
        text = f"{result.name}: {result.finding.kind}, call {result.finding.call}\n{result.finding.message}\n"
        (Path(out) / f"{seed}.txt").write_text(f"{text}{result.files}\n")
    return result


def run_case(seed: int, seen_kinds: Kinds, kind: str, every: int, out: str) -> Result:
    """Run the case of a seed in a process of a campaign; every ``every``-th one is compiled."""
    return run_seed(seed, kind, bool(every) and seed // 2 % every == 0, out)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--compile", type=int, default=3, metavar="N", help="compile every N-th case; 0: none")
    parser.add_argument("--kind", default="both", choices=KINDS)
    parser.add_argument("--out", default="", help="folder for a text about each case that fails")
    args = parser.parse_args(argv)
    run = partial(run_case, kind=args.kind, every=args.compile, out=args.out)
    with fresh_cache():
        return Campaign(run, seeds_of(args), args.jobs, unit="cases").run()


if __name__ == "__main__":
    sys.exit(main())
