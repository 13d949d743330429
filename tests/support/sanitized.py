"""Run generated programs and their run time under the sanitizers of gcc: ``make sanitize``.

usage: python -m tests.support.sanitized [MODEL ...] [--random 20] [--first 0] [--kind memory|threads] [--target cpu]

Each model is compiled twice: as usual, and with instrumented code (``KINDS``). A C program, instrumented too, opens the
second library and makes all calls in one context with two threads; its bits must equal those of the usual program. Every
launch is shared out among the threads, however small. Without MODEL: the stored models at their eight shapes, which
contain 1, primes and ragged sizes, and the random models of ``--random`` seeds from ``--first`` on at theirs, which
contain 0. What a sanitizer reports is a finding, unless ``DELIBERATE`` gives the reason for it. Exit code 1: a finding,
or other bits.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from polydyn.build.compiler import find_compiler
from polydyn.compiler import compile as compile_model
from polydyn.compiler import compile_to
from polydyn.errors import PolydynError
from polydyn.testing.inputs import feeds, shapes
from polydyn.testing.model_check import all_shared_out
from polydyn.testing.random_onnx import random_case
from tests.support.from_c import RefusedError, build, run_and_listen
from tests.support.stored import MODELS, load

KINDS: Mapping[str, tuple[str, ...]] = {
    "memory": ("-fsanitize=address,undefined,float-cast-overflow,bounds-strict", "-g1"),
    "threads": ("-fsanitize=thread", "-g1"),
}
"""Kind of instrumentation -> the flags of gcc."""

SETTINGS = {
    "ASAN_OPTIONS": "detect_stack_use_after_return=1:strict_string_checks=1:alloc_dealloc_mismatch=1",
    "UBSAN_OPTIONS": "print_stacktrace=0",
    "TSAN_OPTIONS": "history_size=4",
}
THREADS = 2

DELIBERATE: Mapping[str, str] = {}
"""Pattern of a report's line -> the reason why the code does this on purpose."""

_REPORT = re.compile(r"runtime error:|ERROR: (Address|Leak)Sanitizer|WARNING: ThreadSanitizer|ERROR: ThreadSanitizer")

Call = Mapping[str, Any]


@dataclass
class Result:
    """The result of a model: calls with equal bits, calls that the library rejects, and what was found."""

    name: str
    compared: int = 0
    rejected: int = 0
    findings: list[str] = field(default_factory=list)
    deliberate: Counter[str] = field(default_factory=Counter)


@contextmanager
def instrumented(kind: str) -> Iterator[tuple[str, ...]]:
    """Compile with the flags of a kind in this block. Yield the command of the compiler."""
    command = (*find_compiler().command, *KINDS[kind])
    with mock.patch.dict(os.environ, {"CC": shlex.join(command)}):
        yield command


def reports(text: str) -> Iterator[str]:
    """Yield the first lines of the reports in a program's standard error, with the line of code where one is named."""
    lines = text.splitlines()
    for k, line in enumerate(lines):
        if not _REPORT.search(line):
            continue
        frames = [x.strip() for x in lines[k + 1 : k + 12] if re.match(r"\s*#\d+ ", x)]
        yield " ".join([line.strip(), *frames[:4]])


class Sanitized:
    """Compiles and runs models with one kind of instrumentation, in a folder."""

    def __init__(self, kind: str, folder: Path, target: str = "cpu") -> None:
        self.kind, self.folder, self.target = kind, folder, target
        with instrumented(kind) as command:
            self.program = build([*command, "-pthread"], folder)

    def check(self, name: str, model: Any, calls: Sequence[Call]) -> Result:
        """Check a model: all calls in one process. PolydynError: it cannot be compiled."""
        plain = compile_model(model, target=self.target, threads=THREADS)
        expected = [(c, e) for c in calls if (e := _answer(plain, c)) is not None]
        path, result = self.folder / f"{name}.polydyn", Result(name)
        with instrumented(self.kind), all_shared_out():
            compile_to(path, model, target=self.target)
        try:
            self._compare(path, expected, result)
        except RefusedError as e:
            if any(reports(str(e))):
                self._note(str(e), result)
                return result
            for pair in expected:  # a second program inside the first one would answer, which C does not open
                try:
                    self._compare(path, [pair], result)
                except RefusedError as one:
                    result.rejected += 1
                    self._note(str(one), result)
        return result

    def _compare(self, path: Path, expected: Sequence[tuple[Call, Call]], result: Result) -> None:
        outputs, said = run_and_listen([str(self.program)], path, [c for c, _ in expected], THREADS, SETTINGS)
        self._note(said, result)
        for got, (_, want) in zip(outputs, expected, strict=True):
            other = [n for n, a in want.items() if np.ascontiguousarray(a).tobytes() != got[n].tobytes()]
            result.findings += [f"output {n} has other bits" for n in other]
            result.compared += not other

    def _note(self, said: str, result: Result) -> None:
        for report in dict.fromkeys(reports(said)):
            why = next((why for pattern, why in DELIBERATE.items() if re.search(pattern, report)), None)
            if why is None:
                result.findings.append(report)
            else:
                result.deliberate[why] += 1


def _answer(plain: Any, call: Call) -> Call | None:
    """Return a program's outputs, or None if it rejects the call."""
    try:
        return {n: np.asarray(a) for n, a in plain.run(dict(call)).items()}
    except PolydynError:
        return None


def stored(names: Iterable[str]) -> Iterator[tuple[str, Any, list[Call]]]:
    """Yield stored models with their calls."""
    for name in names:
        model = load(name)
        yield name, model, [feeds(model, shape) for shape in shapes(name)]


def drawn(first: int, count: int) -> Iterator[tuple[str, Any, list[Call]]]:
    """Yield the random models of seeds with their calls."""
    for seed in range(first, first + count):
        case = random_case(seed)
        yield case.name, case.model, [arrays for _, arrays in case.feeds()]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help="names of stored models; without any, all and random ones")
    parser.add_argument("--random", type=int, default=20, help="number of random models, if no model is named")
    parser.add_argument("--first", type=int, default=0, help="first seed of the random models")
    parser.add_argument("--kind", choices=KINDS, action="append", help="one kind of instrumentation; all by default")
    parser.add_argument("--target", default="cpu")
    args = parser.parse_args(argv)
    failed = 0
    for kind in args.kind or KINDS:
        total: Counter[str] = Counter()
        with tempfile.TemporaryDirectory(prefix="polydyn-sanitized-") as folder:
            sanitized = Sanitized(kind, Path(folder), args.target)
            cases = stored(args.models or MODELS)
            for some in (cases,) if args.models else (cases, drawn(args.first, args.random)):
                for name, model, calls in some:
                    start = time.process_time()
                    try:
                        result = sanitized.check(name, model, calls)
                    except PolydynError as e:
                        total["models rejected"] += 1
                        print(f"{kind} {name}: rejected: {str(e).splitlines()[0]}", flush=True)
                        continue
                    failed += bool(result.findings)
                    total.update(
                        {"models": 1, "calls": result.compared, "calls rejected": result.rejected,
                         "models with findings": bool(result.findings), "deliberate": result.deliberate.total()}
                    )  # fmt: skip
                    spent = time.process_time() - start
                    print(f"{kind} {name}: {result.compared} calls, {len(result.findings)} findings, {spent:.1f} s",
                          *result.findings[:20], sep="\n    ", flush=True)  # fmt: skip
                    for file in Path(folder).glob(f"{name}.*"):
                        file.unlink()
        print(f"{kind}: {dict(total)}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
