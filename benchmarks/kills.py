"""Kill compile, save, tune, batch, cache writes and evictions at random times: ``make kills``.

usage: python -m benchmarks.kills [--kills 100] [--seed 0] [--only ACTION ...] [--folder FOLDER]

Each action runs in a process of its own, which is killed by SIGKILL at a random time of the action's usual duration:
the process alone, or with all processes that it started. Afterwards every complete file must be whole: entries of the
cache match their hash, saved programs open and give the bits of an undisturbed compilation, records and the ledger
keep every row. In the end every action is carried out undisturbed (``resumes``). Files with temporary names stay after
a kill; they are counted, and the cache removes its own after an hour. Exit code 1: something was lost or half-written.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import polydyn
from polydyn.build.cache import FileCache, stored_file
from polydyn.build.eviction import KINDS, entries, evict, grown
from polydyn.errors import PolydynError
from polydyn.jobs.ledger import Ledger, folder_of
from polydyn.runtime.artifact import read_artifact

VARIANTS = 4
"""Number of models, which differ in a constant size, so that each has kernels of its own."""
JOBS = 2
"""Number of models in the batch."""
FEED = np.linspace(-1, 1, 15, dtype=np.float32).reshape(5, 3)
LIMIT = 400_000
"""Bytes of the cache while evictions are killed."""
FILE_BYTES = 20_000
WAIT_SECONDS = 20.0
"""Maximum time in which processes that a killed one has started must end by themselves."""


def model_of(variant: int) -> onnx.ModelProto:
    """Return x[B, 3] @ w, a softmax, and a second product; the inner size depends on the variant."""
    size, numbers = 5 + 2 * variant, np.random.default_rng(variant)
    weights = {"w": numbers.standard_normal((3, size)), "v": numbers.standard_normal((size, 4))}
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Softmax", ["h"], ["s"], axis=-1),
             helper.make_node("MatMul", ["s", "v"], ["y"])]  # fmt: skip
    graph = helper.make_graph(
        nodes, f"variant{variant}", [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["B", 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["B", 4])],
        [numpy_helper.from_array(a.astype(np.float32), n) for n, a in weights.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def result_of(program: polydyn.Program) -> bytes:
    """Return the bits of a program's output."""
    return bytes(program.run({"x": FEED})["y"].tobytes())


@dataclass
class Room:
    """The folder of a campaign: models, undisturbed programs and their results, and what the actions write."""

    folder: Path
    random: random.Random
    expected: list[bytes] = field(default_factory=list)
    rows: int = 0
    """Number of records that were seen in the file of records."""
    turn: int = 0
    """Number of the kill; each tuning draws other tiles."""

    def path(self, name: str) -> Path:
        """Return a file of the folder."""
        return self.folder / name

    def prepare(self) -> None:
        """Write the models, and compile each of them undisturbed; then use a cache of this folder."""
        for k in range(VARIANTS):
            onnx.save(model_of(k), str(self.path(f"{k}.onnx")))
            program = polydyn.compile(self.path(f"{k}.onnx"), threads=1)
            program.save(self.path(f"quiet{k}.polydyn"))
            self.expected.append(result_of(program))
        os.environ["POLYDYN_CACHE"] = str(self.path("cache"))
        jobs = "".join(f"  - {{model: {k}.onnx, output: batch{k}.polydyn}}\n" for k in range(JOBS))
        self.path("jobs.yaml").write_text(f"jobs:\n{jobs}")


# -- actions -----------------------------------------------------------------------------------------------------------


def compile_all(room: Room) -> None:
    """Compile and save every model, with whatever the cache has."""
    for k in range(VARIANTS):
        polydyn.compile(room.path(f"{k}.onnx"), threads=1).save(room.path(f"out{k}.polydyn"))


def save_over(room: Room) -> None:
    """Save two programs in turn as the same file."""
    programs = [polydyn.load(room.path(f"quiet{k}.polydyn"), threads=1) for k in (0, 1)]
    for k in range(30):
        programs[k % 2].save(room.path("over.polydyn"))


def tune(room: Room) -> None:
    """Tune a model into a file of records."""
    polydyn.tune(room.path("0.onnx"), records=room.path("records.db"), trials=4, seed=room.turn, threads=1)


def batch(room: Room) -> None:
    """Run a batch of some models."""
    command = [sys.executable, "-m", "polydyn", "batch", str(room.path("jobs.yaml")), "-j", "1"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise RuntimeError(done.stdout[-2000:])


def write_cache(room: Room) -> None:
    """Store entries and libraries in the cache."""
    for k in range(60):
        body = _body(k)
        FileCache("objects").put(hashlib.sha256(body).hexdigest(), body)
        stored_file("lib", f"{hashlib.sha256(body).hexdigest()}.so", body)


def evict_cache(room: Room) -> None:
    """Store entries that were last used long ago in a cache that is too small for them."""
    os.environ["POLYDYN_CACHE_LIMIT"] = str(LIMIT)
    cache = FileCache("objects")
    for k in range(60):
        body = _body(1000 + k)
        key = hashlib.sha256(body).hexdigest()
        cache.put(key, body)
        with contextlib.suppress(FileNotFoundError):
            os.utime(cache.path(key), (k, k))
        grown(cache.folder.parent, 0)


def _body(k: int) -> bytes:
    return np.random.default_rng(k).bytes(FILE_BYTES + k)


ACTIONS: Mapping[str, Callable[[Room], None]] = {
    "compile": compile_all, "save": save_over, "tune": tune, "batch": batch, "write": write_cache, "evict": evict_cache,
}  # fmt: skip
SHARES = {"compile": 8, "save": 3, "tune": 4, "batch": 1, "write": 2, "evict": 3}
"""Relative frequency of each action."""


# -- checks ------------------------------------------------------------------------------------------------------------


def faults(room: Room) -> Iterator[str]:
    """Yield what was lost or half-written."""
    yield from cache_faults(room.path("cache"))
    for name in [f"out{k}" for k in range(VARIANTS)] + [f"batch{k}" for k in range(JOBS)] + ["over"]:
        path = room.path(f"{name}.polydyn")
        if not path.exists():
            continue
        try:
            bits = result_of(polydyn.load(path, threads=1))
        except PolydynError as e:
            yield f"{path.name}: {e}"
            continue
        if bits not in (room.expected[:2] if name == "over" else [room.expected[int(name[-1])]]):
            yield f"{path.name} gives other bits"
    yield from _database_faults(room)


def cache_faults(root: Path) -> Iterator[str]:
    """Yield entries of a cache, under their final names, that are not whole."""
    for kind in KINDS:
        for e in entries(root, kind):
            if e.unfinished:
                continue
            try:
                data = e.path.read_bytes()
                if kind == "lib":
                    whole = hashlib.sha256(data).hexdigest() == e.path.stem
                elif kind == "programs":
                    whole = bool(read_artifact(e.path).library)
                else:
                    whole = hashlib.sha256(data[:-32]).digest() == data[-32:]
            except FileNotFoundError:
                continue  # evicted in the meantime
            except PolydynError as error:
                yield f"{kind}/{e.path.name}: {error}"
                continue
            if not whole:
                yield f"{kind}/{e.path.name} is not whole"


def _database_faults(room: Room) -> Iterator[str]:
    for path in (room.path("records.db"), folder_of(room.path("jobs.yaml")) / "ledger.db"):
        if not path.exists():
            continue
        with contextlib.closing(sqlite3.connect(path)) as db:
            said = db.execute("PRAGMA integrity_check").fetchone()[0]
            if said != "ok":
                yield f"{path.name}: {said}"
            if path.name == "records.db" and db.execute("SELECT 1 FROM sqlite_master WHERE name='record'").fetchone():
                rows = int(db.execute("SELECT count(*) FROM record").fetchone()[0])
                if rows < room.rows:
                    yield f"records.db has {rows} rows and had {room.rows}"
                room.rows = rows


def final_faults(room: Room, seconds: Mapping[str, float]) -> Iterator[str]:
    """Carry out every action undisturbed; yield what does not work then."""
    for name in seconds:
        try:
            ACTIONS[name](room)
        except Exception as e:  # every error here is a finding
            yield f"{name} does not resume: {type(e).__name__}: {e}"
    os.environ.pop("POLYDYN_CACHE_LIMIT", None)
    yield from faults(room)
    done = {"compile": ("out", VARIANTS), "batch": ("batch", JOBS)}
    for name, (prefix, count) in done.items():
        missing = [k for k in range(count) if not room.path(f"{prefix}{k}.polydyn").exists()]
        if name in seconds and missing:
            yield f"{name} resumed, but programs {missing} do not exist"
    if "batch" in seconds:
        ledger = Ledger.open(folder_of(room.path("jobs.yaml")) / "ledger.db")
        running = ledger._db.execute("SELECT count(*) FROM attempt WHERE outcome = 'running'").fetchone()[0]
        ledger.close()
        if running:
            yield f"{running} attempts of the ledger are still marked as running"
    if "evict" in seconds:
        root = room.path("cache")
        for kind in KINDS:
            for e in entries(root, kind):
                os.utime(e.path, (1, 1))
        evict(root, LIMIT)
        kept = sum(e.bytes for kind in KINDS for e in entries(root, kind))
        if kept > LIMIT:
            yield f"an eviction leaves {kept} bytes of {LIMIT}"


# -- killing -----------------------------------------------------------------------------------------------------------


def begin(action: Callable[[Room], None], room: Room) -> int:
    """Start an action in a child, the leader of its own session. Return its process id."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()
        with open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), 1)
            os.dup2(nothing.fileno(), 2)
        action(room)
        code = 0
    finally:
        os._exit(code)


def session_members(leader: int) -> list[int]:
    """Return the processes of a session that still run."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, _, _, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(session) == leader and state not in "ZX":
                found.append(int(folder.name))
    return found


def kill(pid: int, everything: bool) -> str:
    """Kill a child, and with ``everything`` its session. Return a fault if processes of it do not end by themselves."""
    members = session_members(pid) if everything else [pid]
    for member in {*members, pid}:
        with contextlib.suppress(ProcessLookupError):
            os.kill(member, signal.SIGKILL)
    os.waitpid(pid, 0)
    end = time.monotonic() + WAIT_SECONDS
    while left := session_members(pid):
        if time.monotonic() > end:
            for member in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(member, signal.SIGKILL)
            return f"{len(left)} processes of a killed one still run after {WAIT_SECONDS:.0f} s"
        time.sleep(0.05)
    return ""


def campaign(room: Room, kills: int, names: Sequence[str]) -> tuple[list[str], Counter[str]]:
    """Kill ``kills`` actions. Return the faults, and counts of kills by action and of actions that ended before."""
    room.prepare()
    seconds, counts, found = dict[str, float](), Counter[str](), list[str]()
    for name in names:
        start = time.monotonic()
        pid = begin(ACTIONS[name], room)
        if os.waitpid(pid, 0)[1]:
            found.append(f"{name} fails undisturbed")
        seconds[name] = time.monotonic() - start
        print(f"{name} takes {seconds[name]:.1f} s", flush=True)
    for number in range(kills):
        name = room.random.choices(list(names), [SHARES[n] for n in names])[0]
        room.turn = number + 1
        if name == "compile" and room.random.random() < 0.7:  # else with what earlier kills have left
            _clear(room)
        pid = begin(ACTIONS[name], room)
        began, limit = time.monotonic(), room.random.uniform(0, seconds[name])
        while not (ended := os.waitpid(pid, os.WNOHANG))[0] and time.monotonic() < began + limit:
            time.sleep(0.003)
        status = ended[1]
        if ended[0]:  # what is in a cache by now takes less time
            counts[f"{name} ended before"] += 1
            seconds[name] = (seconds[name] + time.monotonic() - began) / 2
            said = "" if not status else f"{name} ended with status {status}"
        else:
            said = kill(pid, room.random.random() < 0.5)
            counts[name] += 1
        for fault in filter(None, (said, *faults(room))):
            found.append(f"kill {number} ({name}): {fault}")
            print(found[-1], flush=True)
        if number % 10 == 9:
            print(f"{number + 1} kills, {len(found)} faults", flush=True)
    found += final_faults(room, seconds)
    counts["temporary files in the cache"] = sum(e.unfinished for k in KINDS for e in entries(room.path("cache"), k))
    counts["temporary files beside outputs"] = sum(p.is_file() for p in room.folder.glob(".*"))
    return found, counts


def _clear(room: Room) -> None:
    """Remove complete programs and objects, so that the next compilation compiles."""
    for kind in ("programs", "objects"):
        for e in entries(room.path("cache"), kind):
            if not e.unfinished and room.random.random() < 0.8:
                e.path.unlink(missing_ok=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=ACTIONS, default=list(ACTIONS))
    parser.add_argument("--folder", type=Path, help="a folder that is kept; else a temporary one")
    args = parser.parse_args(argv)
    before = {n: os.environ.get(n) for n in ("POLYDYN_CACHE", "POLYDYN_CACHE_LIMIT")}
    with tempfile.TemporaryDirectory(prefix="polydyn-kills-") as temporary:
        folder = args.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            found, counts = campaign(Room(folder, random.Random(args.seed)), args.kills, args.only)
        finally:
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value
    print(f"{args.kills} kills, seed {args.seed}: {dict(counts)}")
    print(*found[:50], f"{len(found)} faults", sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
