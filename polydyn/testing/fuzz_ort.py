"""Run random ONNX models in sessions of ONNX Runtime with the provider of polydyn, some of their nodes refused.

usage: python -m polydyn.testing.fuzz_ort [SEEDS] [--first N] [--jobs 1] [--theme NAME] [--out FOLDER]

Each model of ``random_onnx`` is run at several sizes by a session of which polydyn compiles all nodes that it supports,
except random nodes that the option ``exclude`` names. Results are compared with those of ONNX Runtime alone, as in
``fuzz_models``. A call that ONNX Runtime computes must not fail. Kernels are compiled without optimisation. Exit code
1: a model gives wrong numbers, or an error.
"""

from __future__ import annotations

import ctypes
import os
import random
import sys
from collections import Counter
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import onnx

import polydyn.ort
from polydyn.onnx_runtime import ort_classes, ort_session
from polydyn.testing.campaign import Campaign, Finding, Kinds, Result, fresh_cache, parser_of, seeds_of
from polydyn.testing.disputes import goes_beyond
from polydyn.testing.fuzz_models import ask
from polydyn.testing.model_check import Check, everything
from polydyn.testing.random_onnx import THEMES, random_case

WORKER = """
import sys
sys.path[:] = {path!r}
from polydyn.ort.worker import main
from polydyn.testing.cells import quick_build
with quick_build():
    main()
"""
"""The code of the compiling process, which compiles without optimisation."""
SHARES = (0.0, 0.1, 0.3, 0.6)
"""Shares of the nodes that are refused."""


def refused_nodes(model: onnx.ModelProto, seed: int) -> list[str]:
    """Name the nodes of a model; return the names of random ones."""
    r = random.Random(f"{seed} refused")
    share = r.choice(SHARES)
    for k, node in enumerate(model.graph.node):
        node.name = f"n{k}"
    return [n.name for n in model.graph.node if r.random() < share]


def run_seed(seed: int, theme: str = "", out: str = "") -> Result:
    """Run the model of a seed. A model that fails is written into the folder ``out``, if there is one."""
    case = random_case(seed, theme)
    refused = refused_nodes(case.model, seed)
    check = Check(case.model, list(case.feeds()))
    check.ask()
    if not any(e is not None for e in check.expected):
        return Result(seed, case.name, Counter({"no authority runs it": 1}))
    counts = check.out.counts
    try:
        ort_session(case.model.SerializeToString())
    except Exception:  # an implementation is missing; the authority then is onnx.reference
        return Result(seed, case.name, Counter({"ONNX Runtime alone does not run it": 1}))
    options = ort_classes()[1]()
    options.log_severity_level = 4
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    try:
        session = polydyn.ort.InferenceSession(
            case.model.SerializeToString(), options, exclude=refused, min_nodes=1, threads=1 + seed % 2
        )
        session.disable_fallback()
        names = [o.name for o in session.get_outputs()]
        assigned: list[Any] = getattr(session, "get_provider_graph_assignment_info", list)()
        sets = [len(a.get_nodes()) for a in assigned if a.ep_name == polydyn.ort.get_ep_name()]
        counts["sets"] += len(sets)
        counts["models without a set"] += not sets
        for k, (_, feeds) in enumerate(check.calls):
            if check.expected[k] is None:
                continue
            got = dict(zip(names, session.run(names, dict(feeds)), strict=True))
            counts["calls compared"] += 1
            if check._agrees(got, k, "program"):
                continue
            if not goes_beyond(case.model, everything(case.model, feeds)):
                break
            counts["calls beyond ONNX"] += 1
            check.out.finding = None  # sizes that no definition covers: ONNX Runtime alone differs from run to run
    except Exception as e:
        check.record_finding("error", "session", f"{type(e).__name__}: {e}")
    finding = check.out.finding
    counts["models right"] += finding is None
    if finding is None:
        return Result(seed, case.name, counts)
    if out:
        Path(out).mkdir(parents=True, exist_ok=True)
        Path(out, f"seed{seed}.onnx").write_bytes(case.model.SerializeToString())
    message = f"refused {refused}: {finding.message}"
    return Result(seed, case.name, counts, Finding(finding.kind, finding.stage, message, finding.call))


@cache
def compile_quickly() -> None:
    """Let the compiling processes of this process compile without optimisation."""
    library = ctypes.CDLL(polydyn.ort.get_library_path())
    library.PolydynSetDefaults(os.fsencode(sys.executable), WORKER.format(path=sys.path).encode(), 1)


def run_quickly(seed: int, seen_kinds: Kinds, theme: str, out: str) -> Result:
    """Run a seed in a process of a campaign."""
    compile_quickly()
    return run_seed(seed, theme, out)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--theme", default="", choices=["", *THEMES])
    parser.add_argument("--out", default="", help="folder for models that fail")
    args = parser.parse_args(argv)
    run = partial(run_quickly, theme=args.theme, out=args.out)
    with fresh_cache():  # ONNX Runtime itself crashes for some models
        return Campaign(run, seeds_of(args), args.jobs, partial(ask, theme=args.theme)).run()


if __name__ == "__main__":
    sys.exit(main())
