"""Run generated programs and their run time under gcc's sanitizers and valgrind: ``make sanitize``.

usage: python -m tests.support.sanitized [MODEL ...] [--no-stored] [--random 20] [--first 0] [--kind KIND]

Each model is compiled twice: as usual, and with instrumented code (``KINDS``). A C program, instrumented too, opens the
second library and makes all calls in one context with two threads; its bits must equal those of the usual program.
Every launch is shared out among the threads, however small. The checks of undefined behaviour divide basic blocks, and
gcc fuses a product with a sum only within one. If bits differ, both programs are compiled again without fusing, and
must then agree.

Without MODEL: the stored models at their eight shapes, which contain 1, primes and ragged sizes, and the random models
of ``--random`` seeds from ``--first`` on at theirs, which contain 0. What a sanitizer reports is a finding, unless
``DELIBERATE`` gives the reason for it. Exit code 1: a finding, or other bits.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from polydyn.build import compilers
from polydyn.build.compiler import find_compiler
from polydyn.compiler import compile as compile_model
from polydyn.compiler import compile_to
from polydyn.errors import PolydynError
from polydyn.testing.cells import shared_out
from polydyn.testing.from_c import RefusedError, build, run_and_listen
from polydyn.testing.inputs import feeds, shapes
from polydyn.testing.random_onnx import random_case
from tests.support.stored import MODELS, load

KINDS: Mapping[str, tuple[str, ...]] = {
    "memory": ("-fsanitize=address,undefined,float-cast-overflow,bounds-strict", "-g1"),
    "threads": ("-fsanitize=thread", "-g1"),
    "valgrind": ("-g1",),
}
"""Kind of instrumentation -> the flags of gcc."""
VALGRIND = ("valgrind", "--quiet", "--leak-check=full", "--errors-for-leak-kinds=definite", "--error-exitcode=99")
TARGETS = {"valgrind": "cpu:avx2"}
"""Kind -> the target, if it is not this machine's: valgrind knows no AVX-512."""

SETTINGS = {
    "ASAN_OPTIONS": "detect_stack_use_after_return=1:strict_string_checks=1:alloc_dealloc_mismatch=1",
    "UBSAN_OPTIONS": "print_stacktrace=0",
    "TSAN_OPTIONS": "history_size=4",
}
THREADS = 2

DELIBERATE: Mapping[str, str] = {}
"""Pattern of a report's line -> the reason why the code does this on purpose."""

OTHER_BITS = "a call has other bits than the usual program"
_REPORT = re.compile(
    r"runtime error:|ERROR: (Address|Leak)Sanitizer|WARNING: ThreadSanitizer|ERROR: ThreadSanitizer|"
    r"==\d+== (Invalid|Conditional|Use of|Syscall|Mismatched|.*definitely lost)"
)

Call = Mapping[str, Any]


@dataclass
class Result:
    """The result of a model: calls with equal bits, calls that the library rejects, and what was found.

    ``unfused``: whether bits were compared without fused multiply-adds.
    """

    name: str
    compared: int = 0
    rejected: int = 0
    unfused: bool = False
    findings: list[str] = field(default_factory=list)
    deliberate: Counter[str] = field(default_factory=Counter)


@contextmanager
def instrumented(kind: str) -> Iterator[tuple[str, ...]]:
    """Compile with the flags of a kind in this block. Yield the command of the compiler."""
    command = (*find_compiler().command, *KINDS[kind])
    with mock.patch.dict(os.environ, {"CC": shlex.join(command)}):
        yield command


@contextmanager
def unfused() -> Iterator[None]:
    """Compile without fused multiply-adds in this block."""
    flags = tuple(f.replace("contract=fast", "contract=off") for f in compilers.FLAGS)
    with mock.patch.object(compilers, "FLAGS", flags):
        yield


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

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self.folder, self.target = kind, folder, TARGETS.get(kind, "cpu")
        with instrumented(kind) as command:
            self.program = build([*command, "-pthread"], folder)
        self.command = [*(VALGRIND if kind == "valgrind" else ()), str(self.program)]

    def check(self, name: str, model: Any, calls: Sequence[Call]) -> Result:
        """Check a model: all calls in one process. PolydynError: it cannot be compiled."""
        result = self._checked(name, model, calls)
        if self.kind == "memory" and OTHER_BITS in result.findings:
            with unfused():
                result = self._checked(name, model, calls)
            result.unfused = True
        return result

    def _checked(self, name: str, model: Any, calls: Sequence[Call]) -> Result:
        plain = compile_model(model, target=self.target, threads=THREADS)
        expected = [(c, e) for c in calls if (e := _answer(plain, c)) is not None]
        path, result = self.folder / f"{name}.polydyn", Result(name)
        with instrumented(self.kind), shared_out():
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
        outputs, said = run_and_listen(self.command, path, [c for c, _ in expected], THREADS, SETTINGS)
        self._note(said, result)
        for got, (_, want) in zip(outputs, expected, strict=True):
            same = all(np.ascontiguousarray(a).tobytes() == got[n].tobytes() for n, a in want.items())
            result.findings += [] if same else [OTHER_BITS]
            result.compared += same

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
    parser.add_argument("--no-stored", action="store_true", help="random models only")
    parser.add_argument("--random", type=int, default=20, help="number of random models, if no model is named")
    parser.add_argument("--first", type=int, default=0, help="first seed of the random models")
    parser.add_argument("--kind", choices=KINDS, action="append", help="one kind of instrumentation; all by default")
    args = parser.parse_args(argv)
    failed = 0
    for kind in args.kind or KINDS:
        if kind == "valgrind" and not shutil.which(kind):
            print("valgrind: not here")
            continue
        some = (stored(args.models or (() if args.no_stored else MODELS)), drawn(args.first, args.random))
        failed += check_all(kind, chain(*some[: 1 if args.models else 2]))
    return 1 if failed else 0


def check_all(kind: str, cases: Iterable[tuple[str, Any, list[Call]]]) -> int:
    """Check models with one kind of instrumentation, and print results. Return the number of models with findings."""
    total: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="polydyn-sanitized-") as folder:
        sanitized = Sanitized(kind, Path(folder))
        for name, model, calls in cases:
            start = time.process_time()
            try:
                result = sanitized.check(name, model, calls)
            except PolydynError as e:
                total["models rejected"] += 1
                print(f"{kind} {name}: rejected: {str(e).splitlines()[0]}", flush=True)
                continue
            total.update(
                {
                    "models": 1,
                    "calls": result.compared,
                    "calls rejected": result.rejected,
                    "models without fusing": result.unfused,
                    "models with findings": bool(result.findings),
                    "deliberate": result.deliberate.total(),
                }
            )
            said = f"{result.compared} calls, {len(result.findings)} findings, {time.process_time() - start:.1f} s"
            print(f"{kind} {name}: {said}", *result.findings[:20], sep="\n    ", flush=True)
            for file in Path(folder).glob(f"{name}.*"):
                file.unlink()
    print(f"{kind}: {dict(total)}", flush=True)
    return total["models with findings"]


if __name__ == "__main__":
    sys.exit(main())
