"""Run the jobs of a file: skip finished steps, retry failed ones, and share records by merging.

A job has one or two steps: tuning into its records, and compiling. Compilation waits for all tunings of the batch into
the same records, so that the order in which steps end has no effect. A step is done if the ledger has it under its key
(the hash of everything that determines its result) and its output exists. Only this process writes outputs, records
and the ledger; every output appears complete or not at all.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from polydyn.build.cache import digest, write_atomically
from polydyn.errors import ArtifactError, InputError, PolydynError, UnwritableError
from polydyn.jobs.cluster import Cluster, Execute, open_cluster
from polydyn.jobs.ledger import DONE, Ledger, folder_of, only_one
from polydyn.jobs.report import write_report
from polydyn.jobs.spec import Job, read_jobs
from polydyn.jobs.work import execute
from polydyn.logs import note
from polydyn.program_key import code_digest, external_files, model_digest
from polydyn.search.records import Records

FINAL = (DONE, "failed")
"""Outcomes that another attempt would not change; all others are retried."""


@dataclass(frozen=True)
class Step:
    """A compilation or a tuning: ``name`` in the ledger, and its job."""

    kind: str
    name: str
    job: Job


@dataclass(frozen=True)
class _Running:
    """A running step: its key, its attempt in the ledger and in this run, and the request."""

    step: Step
    key: str
    attempt: int
    number: int
    request: dict[str, Any]


@dataclass(frozen=True)
class State:
    """The progress of a batch: steps by outcome, and the estimated remaining seconds (None: unknown)."""

    steps: int
    done: int = 0
    skipped: int = 0
    failed: int = 0
    left: float | None = None

    @property
    def ended(self) -> int:
        """Steps that are finished."""
        return self.done + self.skipped + self.failed


@dataclass(frozen=True)
class BatchResult:
    """The final state of a batch, and its report."""

    state: State
    report: Path


@dataclass
class Batch:
    """The jobs of a file, for one run.

    ``workers``: processes of the local cluster; ``scheduler``: the address of another cluster. ``share``: workers see
    the client's files under the same paths (always true for a local cluster); otherwise files are sent by content.
    ``only``: patterns of the jobs to run (``selected``). ``say`` is called for every step that ended, with the state
    after it. ``execute``: runs a request in a worker.
    """

    path: Path
    workers: int = 1
    scheduler: str | None = None
    share: bool = True
    say: Callable[[str, State], None] = lambda line, state: None
    only: Sequence[str] = ()
    execute: Execute = execute
    broken: dict[Path, str] = field(default_factory=dict)
    found: dict[Path, Path] = field(default_factory=dict)
    _digests: dict[Path, tuple[tuple[int, int], str]] = field(default_factory=dict)

    def run(self) -> BatchResult:
        """Run the steps that are not done. InputError: the file is wrong, or another client runs it; ClusterError."""
        jobs = selected(read_jobs(self.path), self.only, self._relative)
        self.folder = folder_of(self.path).absolute()
        with only_one(self.folder):
            shutil.rmtree(self.folder / "work", ignore_errors=True)
            (self.folder / "shards").mkdir(exist_ok=True)
            self.ledger = Ledger.open(self.folder / "ledger.db")
            report = self.folder / "report.html"
            try:
                where = self.scheduler or f"{self.workers} local"
                self.number = self.ledger.begin_run(where)
                with open_cluster(self.workers, self.scheduler, self.folder / "work") as cluster:
                    state = self._all(cluster, jobs)
                self.ledger.end_run(self.number)
            finally:
                write_report(self.ledger, self.path.name, report)
                self.ledger.close()
                shutil.rmtree(self.folder / "work", ignore_errors=True)
        return BatchResult(state, report)

    def plan(self) -> list[tuple[Step, str]]:
        """Return every step and what ``run`` would do: "done before", "to do", or why it cannot begin. Nothing is
        written. InputError: the file is wrong, or ``only`` matches no job."""
        jobs = selected(read_jobs(self.path), self.only, self._relative)
        self.folder = folder_of(self.path).absolute()
        path = self.folder / "ledger.db"
        ledger = Ledger.open(path) if path.exists() else None
        tunings, compilations = self._steps(jobs)
        with nullcontext() if ledger is None else closing(ledger):
            planned = [(s, self._planned(s, ledger)) for s in tunings.values()]
            tuned = {_records(s.job) for s, state in planned if state != "done before"}
            for s in compilations:
                waits = _records(s.job) in tuned
                planned.append((s, "to do, after tuning" if waits else self._planned(s, ledger)))
        return planned

    def _planned(self, step: Step, ledger: Ledger | None) -> str:
        """Return what ``run`` would do with a step that waits for no other."""
        try:
            key = self._key(step)
        except PolydynError as e:
            return f"cannot begin ({type(e).__name__}): {e.message}"
        done = ledger is not None and ledger.is_done(step.name, key) and _destination(step).exists()
        return "done before" if done else "to do"

    def _steps(self, jobs: Sequence[Job]) -> tuple[dict[str, Step], list[Step]]:
        """Return the tunings by name, equal ones once, and the compilations."""
        tunings = {s.name: s for j in jobs if j.tune for s in [Step("tune", self._tuning_name(j), j)]}
        return tunings, [Step("compile", self._relative(j.output), j) for j in jobs if j.output]

    # -- the order of steps --------------------------------------------------------------------------------------------

    def _all(self, cluster: Cluster, jobs: list[Job]) -> State:
        tunings, compilations = self._steps(jobs)
        for s in (*tunings.values(), *compilations):
            model, target = self._relative(s.job.model), s.job.arguments.target
            self.ledger.take_part(self.number, s.name, s.kind, model, target)
        self.state = State(len(tunings) + len(compilations))
        self.before: dict[Path, set[str]] = {}
        for s in tunings.values():
            self.before.setdefault(_records(s.job), set()).add(s.name)
        self.waiting: dict[Path, list[Step]] = {}
        self.ready = deque(tunings.values())
        for s in compilations:
            path = s.job.arguments.records
            if path and Path(path) in self.before:
                self.waiting.setdefault(Path(path), []).append(s)
            else:
                self.ready.append(s)
        self.running: dict[int, _Running] = {}
        self.tries: dict[str, int] = {}
        self.took: list[float] = []
        tokens = itertools.count()
        while self.ready or self.running:
            while self.ready and len(self.running) < cluster.slots:
                self._start(cluster, next(tokens), self.ready.popleft())
            if not self.running:
                time.sleep(0.2 if self.ready else 0)
            elif (ended := cluster.next()) is not None:
                self._ended(*ended, cluster.slots)
        return self.state

    def _start(self, cluster: Cluster, token: int, step: Step) -> None:
        """Send a step to the cluster, unless it is done or cannot start."""
        try:
            key = self._key(step)
            if self.ledger.is_done(step.name, key):
                if self._there(step, key):
                    self._count(step, "skipped", "done before")
                    return
                self.ledger.forget(step.name, key)
            request = self._request(step, key, token)
        except PolydynError as e:
            attempt = self.ledger.begin(self.number, step.name, "", 1)
            self.ledger.end(attempt, {"outcome": "failed", "error": f"{type(e).__name__}: {e}"})
            self._count(step, "failed", f"failed ({type(e).__name__}): {e}")
            return
        if link := cluster.begin():
            self.say(link, self.state)
        number = self.tries[step.name] = self.tries.get(step.name, 0) + 1
        attempt = self.ledger.begin(self.number, step.name, key, number)
        self.running[token] = _Running(step, key, attempt, number, request)
        cluster.submit(token, self.execute, request)

    def _ended(self, token: int, answer: dict[str, Any], slots: int) -> None:
        ended = self.running.pop(token)
        step, attempt, number = ended.step, ended.attempt, ended.number
        if answer["outcome"] == DONE:
            try:
                self._place(ended, answer)
            except PolydynError as e:
                answer = answer | {"outcome": "failed", "error": f"{type(e).__name__}: {e}"}
        outcome, error = answer["outcome"], answer["error"]
        self.ledger.end(attempt, answer)
        facts = answer["facts"]
        if outcome == DONE:
            self.took.append(facts.get("seconds", 0.0))
            self.state = replace(self.state, left=self._time_left(slots))
            self._count(step, "done", _summary(step, facts))
        elif outcome in FINAL or number > step.job.retries:
            tried = f" after {number} attempts" if number > 1 else ""
            self._count(step, "failed", f"{outcome}{tried}: {error}" if outcome != "failed" else f"failed: {error}")
        else:
            self.ready.append(step)
            self.say(f"{step.name}: {outcome} ({error}), attempt {number} of {step.job.retries + 1}", self.state)

    def _time_left(self, slots: int) -> float:
        mean = sum(self.took) / len(self.took)
        return mean * (self.state.steps - self.state.ended - 1) / max(slots, 1)

    def _count(self, step: Step, outcome: str, line: str) -> None:
        """Record that a step is finished; compilations that waited for it may start."""
        self.state = replace(self.state, **{outcome: getattr(self.state, outcome) + 1})
        self.say(f"[{self.state.ended}/{self.state.steps}] {step.name}: {line}", self.state)
        note("jobs", "%s: %s", step.name, line)
        if step.kind != "tune":
            return
        path = _records(step.job)
        self.before[path].discard(step.name)
        if outcome == "failed":
            self.broken[path] = step.name
        if not self.before[path]:
            self.ready.extend(self.waiting.pop(path, []))

    # -- requests and results ------------------------------------------------------------------------------------------

    def _key(self, step: Step) -> str:
        """Return the hash of all inputs of a step. PolydynError: a file cannot be read, or its tuning failed."""
        job = step.job
        if step.kind == "tune":
            inputs = [replace(job.arguments, records=None).to_json(), job.threads, _tune_json(job)]
        else:
            if job.arguments.records and (tuning := self.broken.get(Path(job.arguments.records))):
                raise ArtifactError(f"its tuning failed: {tuning}", rule="records before compiling", remedy="see there")
            inputs = [job.arguments.to_json()]
        return digest(step.kind, self._model_digest(job.model), json.dumps(inputs, sort_keys=True), code_digest())

    def _model_digest(self, model: Path) -> str:
        """Return the digest of a model; it is computed once per state of the file, not once per job."""
        try:
            status = model.stat()
        except OSError:
            return model_digest(model)  # this reports the error
        stamp = (status.st_mtime_ns, status.st_size)
        if self._digests.get(model, (None,))[0] != stamp:
            self._digests[model] = (stamp, model_digest(model))
        return self._digests[model][1]

    def _request(self, step: Step, key: str, token: int) -> dict[str, Any]:
        job = step.job
        arguments = replace(job.arguments, records=None).to_json()
        if step.kind == "compile" and job.arguments.records:
            arguments["records"] = str(job.arguments.records)
        request: dict[str, Any] = {
            "step": step.kind, "model": str(job.model), "arguments": arguments, "threads": job.threads,
            "tune": _tune_json(job), "timeout": job.timeout, "memory": job.memory,
        }  # fmt: skip
        shard = self._shard(step, key)
        if self.share or not self.scheduler:
            return request | {"folder": str(self.folder / "work" / str(token)), "shard": str(shard) if shard else None}
        data = job.model.read_bytes()
        external = external_files(data, job.model.resolve().parent)
        files = {"model.onnx": data} | {n: p.read_bytes() for n, p in external.items()}
        if shard and shard.exists():
            files["shard"] = shard.read_bytes()
        if arguments["records"]:
            files["records.db"] = Path(arguments["records"]).read_bytes()
            arguments["records"] = "records.db"
        return request | {"model": "model.onnx", "files": files}

    def _there(self, step: Step, key: str) -> bool:
        """Return whether the step's result exists. If records are gone, results of tunings are merged again."""
        if step.kind != "tune":
            return step.job.output is not None and step.job.output.exists()
        shard, records = self._shard(step, key), _records(step.job)
        if not self.found[records].exists():
            if shard is None or not shard.exists():
                return False
            self._merge(shard, None, records)
        return True

    def _shard(self, step: Step, key: str) -> Path | None:
        """Return the file in which a tuning stores its measurements; it survives interruptions.

        It starts as a copy of the records at the start of the batch, independent of what other tunings have added.
        """
        if step.kind != "tune":
            return None
        shard, records = self.folder / "shards" / f"{digest(key, step.name)}.db", _records(step.job)
        if records not in self.found:
            copy = self.folder / "work" / f"{digest(str(records))}.db"
            if records.exists():
                copy.parent.mkdir(exist_ok=True)
                with Records.open(records, readonly=True) as opened:
                    opened.export(copy)
            self.found[records] = copy
        if not shard.exists() and self.found[records].exists():
            shutil.copyfile(self.found[records], shard)
        return shard

    def _place(self, ended: _Running, answer: dict[str, Any]) -> None:
        """Move a worker's result to its destination. ArtifactError: it cannot be written there."""
        step, files, folder = ended.step, answer.pop("files", {}), ended.request.get("folder")
        target = _records(step.job) if step.kind == "tune" else step.job.output
        assert target is not None
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            if step.kind == "tune":
                self._merge(self._shard(step, ended.key), files.get("shard"), target)
            elif folder is None:
                write_atomically(target, files["artifact"])
            else:
                _move(Path(folder) / "artifact", target)
        except OSError as e:
            raise UnwritableError.of(target, e) from e
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

    @staticmethod
    def _merge(shard: Path | None, content: bytes | None, target: Path) -> None:
        """Add the measurements of a tuning to the records."""
        assert shard is not None
        if content is not None:
            write_atomically(shard, content)
        with Records.open(target) as records:
            records.merge(shard)

    def _relative(self, path: Path | None) -> str:
        return os.path.relpath(path or "", self.path.parent.absolute())

    def _tuning_name(self, job: Job) -> str:
        """Return the records and the model, with a hash that distinguishes tunings with different arguments."""
        parts = [replace(job.arguments, records=None).to_json(), job.threads, _tune_json(job), str(job.model)]
        mark = digest(json.dumps(parts, sort_keys=True))[:8]
        return f"{self._relative(_records(job))} <- {self._relative(job.model)} {mark}"


def selected(jobs: Sequence[Job], only: Sequence[str], relative: Callable[[Path | None], str]) -> list[Job]:
    """Return the jobs whose output, records, model or target matches one of the patterns ``only``; all without any.

    Paths are relative to the job file; a pattern may also be a part of a path. InputError: no job matches.
    """
    if not only:
        return list(jobs)
    found = []
    for job in jobs:
        records = Path(job.arguments.records) if job.arguments.records else None
        paths = [job.output, records, job.model]
        names = [relative(p) for p in paths if p] + [job.arguments.target]
        if any(fnmatch(n, p) or p in n for p in only for n in names):
            found.append(job)
    if not found:
        known = ", ".join(dict.fromkeys(relative(j.output or j.model) for j in jobs))
        raise InputError(f"no job matches {' or '.join(only)}", rule="--only", remedy=f"the jobs are {known}")
    return found


def _destination(step: Step) -> Path:
    """Return the file that a step writes."""
    return _records(step.job) if step.kind == "tune" or step.job.output is None else step.job.output


def _records(job: Job) -> Path:
    return Path(job.arguments.records or "")


def _tune_json(job: Job) -> dict[str, Any] | None:
    return {"trials": job.tune.trials, "seed": job.tune.seed, "shapes": job.tune.shapes} if job.tune else None


def _move(source: Path, target: Path) -> None:
    """Rename a file, or copy it between file systems; the target is complete or does not exist."""
    try:
        os.replace(source, target)
    except OSError:
        write_atomically(target, source.read_bytes())


def _summary(step: Step, facts: dict[str, Any]) -> str:
    seconds = f"{facts.get('seconds', 0.0):.1f} s"
    if step.kind == "tune":
        return f"{facts.get('groups', 0)} groups tuned, {facts.get('measured', 0)} measured, {seconds}"
    return f"{facts.get('launches', 0)} launches, {facts.get('kernels', 0)} kernels, {seconds}"
