"""Damage models: each must be read anyway, or rejected with an error that names its place; none may end the process.

usage: python -m polydyn.testing.damage [COUNT] [--first N] [--jobs 2] [--seconds 10] [--memory 4]

A file is a function of its number: one of ONNX's node cases or a random model of shape arithmetic, which is cut off, or
has changed bits, changed bytes, bytes from elsewhere, or one changed field of its protobuf. It is written, read,
planned and placed as a program for the CPU, in a process with limited processor time (seconds) and memory (GiB). Prints
failures and counts. Exits with 1 if anything failed.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import onnx

from polydyn.compiler import plan_program
from polydyn.errors import PolydynError
from polydyn.testing.conformance import cases, freeze, run_all
from polydyn.testing.random_models import random_model

MAX_CASE_BYTES = 20_000
"""Maximum bytes of a node case."""
NUMBERS = (0, 1, -1, 2, 7, 2**31 - 1, -(2**31), 2**63 - 1, -(2**63))
Damage = Callable[[bytes, random.Random], bytes]


def cut_off(data: bytes, r: random.Random) -> bytes:
    """Keep only the first bytes."""
    return data[: r.randrange(len(data))]


def flipped(data: bytes, r: random.Random) -> bytes:
    """Flip one to eight bits."""
    out = bytearray(data)
    for _ in range(r.randint(1, 8)):
        out[r.randrange(len(out))] ^= 1 << r.randrange(8)
    return bytes(out)


def overwritten(data: bytes, r: random.Random) -> bytes:
    """Overwrite a run of bytes with zeros, ones or noise."""
    at, count = r.randrange(len(data)), r.randint(1, 16)
    run = r.choice([b"\0" * count, b"\xff" * count, r.randbytes(count)])
    return (data[:at] + run + data[at + count :])[: len(data)]


def moved(data: bytes, r: random.Random) -> bytes:
    """Duplicate or move a run of bytes."""
    at, count, to = r.randrange(len(data)), r.randint(1, 64), r.randrange(len(data))
    rest = data if r.random() < 0.5 else data[:at] + data[at + count :]
    return rest[:to] + data[at : at + count] + rest[to:]


def edited(data: bytes, r: random.Random) -> bytes:
    """Change one field of the protobuf: a number, a text, a list that becomes shorter, longer or reordered."""
    model = onnx.load_from_string(data)
    messages, fields = [model], []
    for m in messages:  # the list grows meanwhile
        for f, value in m.ListFields():
            fields.append((m, f))
            if f.type == f.TYPE_MESSAGE:
                messages += [value] if _is_single(f, value) else list(value)
    message, field = r.choice(fields)
    value = getattr(message, field.name)
    if not _is_single(field, value):
        _change_list(value, r)
    elif field.type == field.TYPE_MESSAGE or r.random() < 0.2:
        message.ClearField(field.name)
    else:
        with contextlib.suppress(ValueError):  # not a value of this enumeration
            setattr(message, field.name, _other(value, r))
    data = model.SerializeToString()
    return bytes(data)


def _is_single(field: Any, value: Any) -> bool:
    return isinstance(value, (int, float, str, bytes)) or hasattr(value, "ListFields")


def _change_list(values: Any, r: random.Random) -> None:
    how = r.choice(["less", "more", "order"])
    if how == "less":
        del values[r.randrange(len(values))]
        return
    copies = [x.__deepcopy__() if hasattr(x, "ListFields") else x for x in values]
    if how == "more":
        copies.append(r.choice(copies))
    else:
        r.shuffle(copies)
    del values[:]
    values.extend(copies)


def _other(value: Any, r: random.Random) -> Any:
    """Return another value of the same type, as far as the field accepts it."""
    if isinstance(value, int):
        return r.choice([x for x in NUMBERS if -(2**31) <= x < 2**31 or abs(value) >= 2**31] + [value ^ 1])
    if isinstance(value, float):
        return r.choice([0.0, -1.0, 1e38, float("inf"), float("nan")])
    if isinstance(value, str):
        return r.choice(["", value + "x", value[:-1], value.upper(), "x", "y"])
    return r.choice([b"", value[:-1], value + b"\0"])


DAMAGES: Sequence[Damage] = (cut_off, flipped, overwritten, moved, edited, edited, edited)


@lru_cache(maxsize=1)
def node_cases() -> list[bytes]:
    """Return the small node cases, as files."""
    found = (freeze(c).SerializeToString() for c in cases("test_"))
    return [data for data in found if len(data) <= MAX_CASE_BYTES]


def damaged(number: int) -> tuple[str, bytes]:
    """Return the kind of damage, and the file."""
    r = random.Random(number)
    data = random_model(number, 6).SerializeToString() if r.random() < 0.2 else r.choice(node_cases())
    how = r.choice(DAMAGES)
    return how.__name__, how(data, r)


def attempt(number: int, seconds: float = 10) -> str:
    """Return ``read``, ``refused``, or ``failed: ...`` for the damaged file of this number."""
    how, data = damaged(number)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "damaged.onnx"
        path.write_bytes(data)
        start, result = time.process_time(), "read"
        try:
            plan_program(path)
        except PolydynError as e:
            result = "refused"
            if not (e.node or e.tensor or e.dim or e.rule or path.name in str(e)):
                result = f"failed: {type(e).__name__} without a place: {e}"
        except Exception as e:  # any other error is a failure
            result = f"failed: {type(e).__name__}: {e}"
        spent = time.process_time() - start
    if spent > seconds:
        result = f"failed: {spent:.0f} s, then {result}"
    return result if not result.startswith("failed") else f"{result[:300]} ({how})"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", type=int, nargs="?", default=300)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=10, help="processor time per file")
    parser.add_argument("--memory", type=int, default=4, help="GiB per file")
    args = parser.parse_args(argv)
    node_cases()  # workers inherit them

    def run(k: int) -> str:
        resource.setrlimit(resource.RLIMIT_AS, (args.memory << 30, args.memory << 30))
        return attempt(args.first + k, args.seconds)

    results = run_all(args.count, run, args.jobs, 6 * args.seconds)
    for k, result in enumerate(results):
        if result.startswith("failed"):
            print(f"file {args.first + k}: {result}")
    counts = Counter(r.split(":")[0] for r in results)
    print(dict(counts))
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
