"""Analyse the C of the run time without executing it: ``make analyze``.

usage: python -m tests.support.analyzed

gcc's ``-fanalyzer``, and clang-tidy's analyzer if it is on the path (``pip install clang-tidy``). Each translation unit
of ``polydyn.runtime.c``, and of the execution provider of ONNX Runtime, is analysed as it is compiled. Exit code 1: a
warning that ``KNOWN`` does not explain, or an entry of ``KNOWN`` that no longer occurs.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from polydyn.ort import library
from polydyn.runtime import c as runtime

GCC = ("gcc", "-std=gnu11", "-O1", "-fPIC", "-fanalyzer", "-c", "-o", "/dev/null")
TIDY = (
    "clang-tidy", "--quiet",
    "-checks=-*,clang-analyzer-*,-clang-analyzer-security.insecureAPI.DeprecatedOrUnsafeBufferHandling",
)  # fmt: skip
"""The check that is left out calls every memcpy insecure."""
CLEANUP_LEAKS = "clang-tidy", "provider", "leak of memory|memory leak"
"""(tool, place, warning) that is left out: clang's analyzer does not know the attribute cleanup, by which the provider
frees memory. gcc's analyzer does, and reports its leaks."""

PROVIDER = CLEANUP_LEAKS[1]
"""The execution provider, next to the places that the run time has units for."""
UNITS: Mapping[str, Sequence[str]] = {**runtime.UNITS, PROVIDER: library.UNITS}

WELL_FORMED = "expressions are postfix words that polydyn/program/encoding.py writes: an operation has its operands"
RANKS = "an io's rank is that of the tensor whose dims were copied before, so each dim that is read was written"
COUNTS = (
    "the numbers of a loop's rows, carried tensors and results are constants of its table and agree with each other"
)
KEPT = "what is kept lies in a room that has memory: the number of kept bytes is at most its size"
PLACED = "memory was reserved for the room by the call before it, whose error would have returned"
TAKEN = "a launch has at most as many threads as its wave, so one of them is not taken"
TYPES = "the element type was compared with that of the input before"
LOADED = "loading fails before if the library lacks this call"
MAPPED = "without a path the caller gives memory, and NULL is rejected"
OWNERS = "the structure that the caller passed owns the memory, and is freed with it when there is an error"
MAPS = "a tensor map has between 1 and 5 axes, and as an image at least 3"

KNOWN: Mapping[tuple[str, str], str] = {
    ("waves.c", "taken[t] = 1;"): TAKEN,
    ("strided.c", "bytes *= dims[a];"): RANKS,
    ("runtime.c", "*value++ = (c->staged[i] < 0 ? strides[a] : dense[a])"): RANKS,
    ("runtime.c", "if (!c->given[o]) memcpy(wanted, dense,"): RANKS,
    ("sequence.c", "int64_t b = stack[top--], a = stack[top];"): WELL_FORMED,
    ("sequence.c", "return stack[0];"): WELL_FORMED,
    ("sequence.c", "memcpy(t->shape, shape,"): RANKS,
    ("sequence.c", "if (kept) memcpy(data, room->data, (size_t)kept);"): KEPT,
    ("control.c", "return a->rank == b->rank && !memcmp("): COUNTS,
    ("control.c", "x->start = (x->direct ? t->data : x->room.data)"): PLACED,
    ("control.c", "*to = c->rooms[next].data;"): COUNTS,
    ("control.c", "*to = c->now.data = c->rooms[at].data;"): COUNTS,
    ("control.c", "if (c->row >= 0) next[j] ="): COUNTS,
    ("control.c", "else if (c->stays) next[j] ="): COUNTS,
    ("control.c", "if (b->direct[first + j]) b->unit.to[b->results[first + j]] = next[j];"): COUNTS,
    ("control.c", "if (asks(l)) l->going = *of[0].data != 0;"): COUNTS,
    ("control.c", "l->steady &= same_shape(&c->now, &of[first + j])"): COUNTS,
    ("control.c", "if (c->row < 0 && next[j] != c->now.data)"): COUNTS,
    ("control.c", "c->now.data = next[j];"): COUNTS,
    ("control.c", "every.shape[a] = every.shape[a - 1]"): COUNTS,
    ("unique.c", "*other = one + x.count;"): PLACED,
    ("parts.c", "(code = m->open(NULL, p->weights + at[0], 0, at[1], &m->program))"): LOADED,
    ("parts.c", "const pd_head head = *(const pd_head *)"): MAPPED,
    ("parts.c", "pd_item_bytes[t->dtype], dense"): TYPES,
    ("size_steps.c", "s->values[g->symbols[k]] = found[k];"): RANKS,
    ("cuda_kept.c", "k->kept[k->count++] = e;"): "an entry is forgotten before if there are as many as are kept",
    ("cuda_run.c", "unsigned_sizes[s] = (uint64_t)sizes[s];"): MAPS,
    ("cuda_run.c", "corners[s] = (int32_t)sizes[2 * m->rank - 1 + s];"): MAPS,
    ("cuda_run.c", "steps[1 + s] = m->steps[s];"): MAPS,
    ("unit.c", "if (!(names[k] = strdup(name)))"): OWNERS,
    ("settings.c", "s->options[s->option_count++] = o;"): OWNERS,
    ("sets.c", "if (of[k] == set) some[n++] = nodes[k];"): "without a list there is one set, of all nodes",
    ("cuda_run.c", "TRY(cuEventElapsedTime(&ms, events[k], events[k + 1])"): "all events were made before the run",
}  # fmt: skip
"""(file, part of its line) -> the reason why a warning about this line is wrong."""

_WARNING = re.compile(r"^([\w./]+\.c):(\d+):\d+: (?:warning|error): (.*)", re.MULTILINE)


def texts(place: str) -> dict[str, str]:
    """Return file name -> C text of a place: its units and headers."""
    if place != PROVIDER:
        return dict(runtime.sources(place))
    units, headers = library.sources()
    return {**units, **headers}


def warnings(tool: tuple[str, ...], folder: Path, place: str, changed: Mapping[str, str] | None = None
             ) -> Iterator[tuple[str, str, str]]:  # fmt: skip
    """Yield (file of the run time, text of the line, warning) of a tool. ``changed``: file -> its text in a test."""
    for name, text in {**texts(place), **(changed or {})}.items():
        (folder / name).write_text(text)
    for unit in UNITS[place]:
        flags = ["--", "-std=gnu11"] if tool[0] == "clang-tidy" else []
        done = subprocess.run([*tool, unit, *flags], cwd=folder, capture_output=True, text=True)
        for file, line, said in dict.fromkeys(_WARNING.findall(done.stdout + done.stderr)):
            if (tool[0], place) == CLEANUP_LEAKS[:2] and re.search(CLEANUP_LEAKS[2], said):
                continue
            yield *located(folder / unit, Path(file).name, int(line)), said


def located(unit: Path, file: str, line: int) -> tuple[str, str]:
    """Return the file of the run time that a unit has at a line, and the line. gcc names that file itself, clang-tidy
    the unit."""
    lines, name, offset = unit.read_text().splitlines(), unit.name, 0
    for k, text in enumerate(lines[: line if file == unit.name else len(lines)]):
        if mark := re.match(r'#line 1 "(.+)"', text):
            name, offset = mark[1], k + 1
            if name == file:
                return name, lines[offset + line - 1]
    return name, lines[line - 1]


def main() -> int:
    """Run the tools that are here."""
    new, used = 0, set[tuple[str, str]]()
    tools = [t for t in (GCC, TIDY) if shutil.which(t[0])]
    for tool in tools:
        for place in UNITS:
            with tempfile.TemporaryDirectory() as folder:
                for file, line, said in warnings(tool, Path(folder), place):
                    known = [k for k in KNOWN if k[0] == file and k[1] in line]
                    used.update(known)
                    if not known:
                        new += 1
                        print(f"{tool[0]} {file}: {said}\n    {line.strip()}")
    unused = KNOWN.keys() - used if len(tools) == 2 else set()
    for file, line in sorted(unused):
        print(f"KNOWN explains a line that nothing warns about: {file}: {line}")
    missing = [t[0] for t in (GCC, TIDY) if t not in tools]
    print(f"{new} new warnings, {len(used)} explained" + "".join(f"; {m} is not here" for m in missing))
    return 1 if new or unused or not tools else 0


if __name__ == "__main__":
    sys.exit(main())
