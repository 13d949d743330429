"""The cost of one selection: the decision as compiled into the host program, timed alone over several shapes."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence

from polydyn.build.compiler import build_library
from polydyn.program.evaluation import Evaluation, evaluation_function
from polydyn.runtime.c import sources
from polydyn.schedules.decision import Decision

TURNS = 2000


def nanoseconds(decision: Decision, symbols: Sequence[str], shapes: Sequence[Mapping[str, int]]) -> float:
    """Return the minimum mean time of one selection in nanoseconds, over passes through all shapes and with loading of
    sizes.
    """
    values = Evaluation(symbols)
    choice = values.choose(decision)
    width = max(1, len(symbols))
    text = f"""#include <time.h>
#include "internal.h"
{evaluation_function("decide", values.lines)}
static int64_t now_ns(void) {{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}}
__attribute__((visibility("default"))) double pdb_select(const int64_t *sizes, int64_t count, int64_t turns) {{
    int64_t v[{values.count + 1}] = {{0}}, least = INT64_MAX, sum = 0;
    for (int64_t t = 0; t < turns; t++) {{
        int64_t start = now_ns();
        for (int64_t i = 0; i < count; i++) {{
            for (int s = 0; s < {len(symbols)}; s++) v[s] = sizes[i * {width} + s];
            v[{len(symbols)}] = 1;
            sum += decide(v) + v[{choice}];
            __asm__ volatile("" : "+r"(sum) : : "memory");
        }}
        least = pd_min(least, now_ns() - start);
    }}
    return (double)least / count;
}}
"""
    headers = {n: t for n, t in sources().items() if n in ("internal.h", "polydyn.h")}
    library = build_library({"select.c": text}, headers)
    loaded = ctypes.CDLL(str(library.file()))
    loaded.pdb_select.restype = ctypes.c_double
    flat = [s.get(n, 0) for s in shapes for n in symbols] or [0]
    sizes = (ctypes.c_int64 * len(flat))(*flat)
    return float(loaded.pdb_select(sizes, ctypes.c_int64(len(shapes)), ctypes.c_int64(TURNS)))
