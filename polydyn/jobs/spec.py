"""Job files: expand defaults, globs and matrices into one ``Job`` per program or tuning."""

from __future__ import annotations

import difflib
import glob
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polydyn.backends import target_of
from polydyn.compiler import Options
from polydyn.errors import InputError, PolydynError, ShapeError, UnsupportedError
from polydyn.jobs.text import Entry, read_text
from polydyn.measure import TRIALS, Seen
from polydyn.program_key import Arguments
from polydyn.runtime.shapes_log import read_log
from polydyn.schedules.handmade.document import read_schedules
from polydyn.search.strategies import STRATEGIES
from polydyn.shapes.sizes import Sizes, SizesLike, sizes_by_name

KEYS = {
    "model": "a path or glob, or a list of them, relative to the job file",
    "output": "the artifact to write; {name}, {target} and other keys are replaced by their values",
    "target": "cpu, cpu:avx512, cuda:sm_80 ...",
    "dims": 'sizes of dims: {B: "1:64"}, {B: [1, 64]} or {B: {low: 1, high: 64, multiple: 8, likely: [8]}}',
    "symbols": "makes a static export dynamic: {input_ids: [B, L]}; null for an axis that keeps its size",
    "threads": "threads per call",
    "without": "fusion passes to leave out",
    "strategy": "the strategy whose records are used",
    "tf32": "on CUDA, float32 products on tensor cores",
    "precision": "bf16: on a CPU, products with constants round to bfloat16; 3xtf32: on CUDA, tensor cores for float32",
    "winograd": "4: 3x3 convolutions in tiles of 4x4 pixels, faster and less exact than 2",
    "fallback": "onnxruntime: unsupported nodes run there",
    "records": "a record file; {name} etc. are replaced as in output",
    "schedules": "a file of schedules of polydyn.explore, relative to the job file",
    "tune": "true, or {trials: 64, seed: 0, shapes: log.json}: tune into the records first",
    "timeout": "maximum seconds of an attempt",
    "memory": "maximum bytes of an attempt, as in 4G",
    "retries": "further attempts after a lost worker or an exceeded limit",
    "matrix": "{key: [values]}: one job for each combination",
}
TUNE_KEYS = ("trials", "seed", "shapes")
RETRIES = 2


@dataclass(frozen=True)
class Tuning:
    """The arguments of ``polydyn.tune`` that ``compile`` does not have."""

    trials: int = TRIALS
    seed: int = 0
    shapes: tuple[tuple[tuple[tuple[str, int], ...], int], ...] = ()

    def seen(self) -> list[Seen]:
        """Return the shapes seen in traffic."""
        return [(dict(dims), count) for dims, count in self.shapes]


@dataclass(frozen=True)
class Job:
    """One model with the arguments of ``compile`` and ``tune``, its output and its limits. Paths are absolute."""

    place: str
    model: Path
    output: Path | None
    arguments: Arguments
    threads: int | None = None
    tune: Tuning | None = None
    timeout: float | None = None
    memory: int | None = None
    retries: int = RETRIES


def read_jobs(path: Path) -> list[Job]:
    """Return the jobs of a file, in order. InputError names file, line and key; ``KEYS`` lists the allowed keys."""
    root = read_text(path)
    if isinstance(root.value, list):
        root = Entry(root.file, root.line, {"jobs": root})
    if not isinstance(root.value, dict) or "jobs" not in root.value:
        raise root.refusal("there is no list of jobs", "write jobs: and below it - model: a.onnx")
    _check_keys(root, ("jobs", "defaults"))
    defaults = _mapping(root.value.get("defaults", Entry(root.file, root.line, {})))
    _check_keys(Entry(root.file, root.line, defaults), KEYS)
    listed = root.value["jobs"]
    if not isinstance(listed.value, list) or not listed.value:
        raise listed.refusal("jobs is not a list, or empty", "write - model: a.onnx below it")
    jobs = [job for row in listed.value for job in _expand(path.parent.absolute(), row, defaults)]
    _check_outputs(jobs, root)
    return jobs


def _expand(folder: Path, row: Entry, defaults: Mapping[str, Entry]) -> Iterator[Job]:
    """Yield every combination of a row's models and its matrix."""
    entries = {**defaults, **_mapping(row)}
    _check_keys(row, KEYS)
    if "model" not in entries:
        raise row.refusal("the job has no model", "add model: a.onnx")
    matrix = _mapping(entries.pop("matrix", Entry(row.file, row.line, {})))
    for key, values in matrix.items():
        if key not in KEYS or key == "matrix":
            raise values.refusal(f"the matrix has an unknown key '{key}'", f"keys are {', '.join(KEYS)}")
        if not isinstance(values.value, list) or not values.value:
            raise values.refusal(f"the matrix has no values for '{key}'", f"write {key}: [first, second]")
    lists = [[(k, v) for v in values.value] for k, values in matrix.items() if isinstance(values.value, list)]
    for combination in itertools.product(*lists):
        one = entries | dict(combination)
        for model in _models(folder, one["model"]):
            yield _job(folder, row, one, model)


def _job(folder: Path, row: Entry, entries: Mapping[str, Entry], model: Path) -> Job:
    read = _Reader(row, entries, folder)
    names = {k: _word(e.plain()) for k, e in entries.items() if not isinstance(e.value, (dict, list))}
    names |= {"target": _word(read("target", _text, "cpu")), "name": model.stem}
    names.setdefault("strategy", Options.strategy)
    tune = read("tune", lambda e: _tuning(folder, e), None)
    output, records = (read(k, lambda e: folder / _filled(e, names), None) for k in ("output", "records"))
    if tune and not records:
        raise entries["tune"].refusal("there are no records to tune into", "add records: some.db")
    if not output and not tune:
        raise row.refusal("the job writes nothing", "add output: a.polydyn, or tune: true with records")
    options = read.options()
    symbols = read("symbols", _axes, {})
    schedules = read("schedules", lambda e: read_schedules(folder / _filled(e, names)), ())
    arguments = Arguments(read.target(options), read("dims", _dims, {}), options, records, symbols, schedules)
    return Job(
        f"{row.file}:{row.line}", model, output, arguments, read("threads", _count, None), tune,
        read("timeout", _seconds, None), read("memory", _bytes, None), read("retries", _whole, RETRIES),
    )  # fmt: skip


class _Reader:
    """Reads the values of a job by key."""

    def __init__(self, row: Entry, entries: Mapping[str, Entry], folder: Path) -> None:
        self.row, self.entries, self.folder = row, entries, folder

    def __call__(self, key: str, convert: Callable[[Entry], Any], missing: Any) -> Any:
        entry = self.entries.get(key)
        if entry is None or entry.value is None:
            return missing
        try:
            return convert(entry)
        except PolydynError:
            raise
        except (TypeError, ValueError, AttributeError) as e:
            raise entry.refusal(f"{key} is {entry.plain()!r}", f"{key}: {KEYS[key]}") from e

    def options(self) -> Options:
        """Return the compiler options. InputError: an unknown pass or strategy."""
        without, tf32 = self("without", _texts, ()), self("tf32", _bool, False)
        strategy, fallback = self("strategy", _text, Options.strategy), self("fallback", _text, None)
        precision, side = self("precision", _text, None), self("winograd", _count, Options.winograd)
        if strategy not in STRATEGIES:
            raise self.entries["strategy"].refusal(f"unknown strategy {strategy!r}", ", ".join(sorted(STRATEGIES)))
        try:
            return Options(without, strategy, tf32, fallback, precision, side)
        except PolydynError as e:
            first, rule = str(e).partition("\n")[0], e.rule or ""
            key = next((k for k in ("fallback", "precision", "winograd") if k in rule), "without")
            raise self.entries[key].refusal(first, e.remedy or KEYS[key]) from e


    def target(self, options: Options) -> str:
        """Return the target. InputError: it is unknown, or does not support the options."""
        name: str = self("target", _text, "cpu")
        try:
            target_of(name, options)
        except UnsupportedError as e:
            keys = (k for k in ("tf32", "precision", "winograd") if k in e.message and k in self.entries)
            raise self.entries.get(next(keys, "target"), self.row).refusal(e.message, e.remedy or KEYS["target"]) from e
        return name


def _check_keys(entry: Entry, keys: Any) -> None:
    for key, value in _mapping(entry).items():
        if key not in keys:
            near = difflib.get_close_matches(key, list(keys), 1)
            raise value.refusal(f"unknown key '{key}'", f"did you mean {near[0]}?" if near else f"{', '.join(keys)}")


def _mapping(entry: Entry) -> dict[str, Entry]:
    if not isinstance(entry.value, dict):
        raise entry.refusal(f"{entry.plain()!r} is not a mapping", "write key: value")
    return dict(entry.value)


def _models(folder: Path, entry: Entry) -> list[Path]:
    entries = entry.value if isinstance(entry.value, list) else [entry]
    models: list[Path] = []
    for e in entries:
        if not isinstance(e.value, str) or not e.value:
            raise e.refusal(f"model is {e.plain()!r}", KEYS["model"])
        if re.search(r"[*?\[]", e.value):
            matches = sorted(glob.glob(str(folder / e.value), recursive=True))
            if not matches:
                raise e.refusal(f"no file matches {e.value}", "globs are relative to the job file")
            models += map(Path, matches)
        else:
            models.append(folder / e.value)
    return models


def _check_outputs(jobs: list[Job], root: Entry) -> None:
    seen: dict[Path, Job] = {}
    for job in jobs:
        other = seen.setdefault(job.output, job) if job.output else job
        if other is not job:
            raise Entry(root.file, int(job.place.rpartition(":")[2]), None).refusal(
                f"{job.output} is written twice, also by the job at line {other.place.rpartition(':')[2]}",
                "put {name}, {target} or another key of the matrix into output",
            )


def _filled(entry: Entry, names: Mapping[str, str]) -> str:
    text = _text(entry)
    try:
        return text.format_map(names)
    except (KeyError, ValueError, IndexError, AttributeError) as e:
        raise entry.refusal(f"cannot replace the keys in {text}: {e}", f"known keys: {', '.join(sorted(names))}") from e


def _word(value: Any) -> str:
    return re.sub(r"[^\w.+-]", "-", str(value))


def _text(e: Entry) -> str:
    if not isinstance(e.value, str) or not e.value:
        raise TypeError
    return e.value


def _texts(e: Entry) -> list[str]:
    return [_text(x) for x in e.value] if isinstance(e.value, list) else [_text(e)]


def _bool(e: Entry) -> bool:
    if not isinstance(e.value, bool):
        raise TypeError
    return e.value


def _whole(e: Entry) -> int:
    if isinstance(e.value, bool) or not isinstance(e.value, int) or e.value < 0:
        raise TypeError
    return e.value


def _count(e: Entry) -> int:
    if not 1 <= _whole(e) <= 256:
        raise ValueError
    return _whole(e)


def _seconds(e: Entry) -> float:
    if isinstance(e.value, bool) or not isinstance(e.value, (int, float)) or e.value <= 0:
        raise TypeError
    return float(e.value)


def _bytes(e: Entry) -> int:
    size = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)B?", str(e.value).strip(), re.IGNORECASE)
    if size is None:
        raise ValueError
    return int(float(size[1]) * 1000.0 ** " KMGT".index(size[2].upper() or " "))


def _dims(entry: Entry) -> dict[str, Sizes]:
    out: dict[str, SizesLike] = {}
    for name, e in _mapping(entry).items():
        try:
            value = e.plain()
            if isinstance(value, (str, int)):
                out[name] = Sizes.parse(str(value))
            else:
                out[name] = Sizes(**value) if isinstance(value, dict) else Sizes(*value)
        except (TypeError, ShapeError) as error:
            first = str(error).partition("\n")[0]
            raise e.refusal(f"dims.{name} is {e.plain()!r}: {first}", KEYS["dims"]) from error
    return sizes_by_name(out)


def _axes(entry: Entry) -> dict[str, list[str | None]]:
    out: dict[str, list[str | None]] = {}
    for name, e in _mapping(entry).items():
        axes = e.plain()
        if not isinstance(axes, list) or not all(a is None or isinstance(a, str) for a in axes):
            raise e.refusal(f"symbols.{name} is {axes!r}", KEYS["symbols"])
        out[name] = axes
    return out


def _tuning(folder: Path, entry: Entry) -> Tuning | None:
    if isinstance(entry.value, bool):
        return Tuning() if entry.value else None
    _check_keys(entry, TUNE_KEYS)
    entries = _mapping(entry)
    numbers = {k: _whole(e) for k, e in entries.items() if k in ("trials", "seed")}
    if numbers.get("trials") == 0:
        raise ValueError
    shapes = _shapes(folder / _text(entries["shapes"]), entries["shapes"]) if "shapes" in entries else ()
    return Tuning(shapes=shapes, **numbers)


def _shapes(path: Path, entry: Entry) -> tuple[tuple[tuple[tuple[str, int], ...], int], ...]:
    try:
        return tuple((tuple(sorted(dims.items())), count) for dims, count in read_log(path))
    except InputError as e:
        raise entry.refusal(str(e).partition("\n")[0], e.remedy or "") from e
