"""Every device primitive, emulated, compared with numpy; and required rejections of the emulation."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from polydyn.gpu.emulator import Counters, EmulatedModule, compile_emulated
from polydyn.gpu.errors import DeviceError
from polydyn.testing.device.cases import HERE, Case, Mapped, all_cases, mismatch
from polydyn.testing.device.cases_hopper import all_hopper_cases
from tests.support.marks import slow

CASES = {c.name: c for c in [*all_cases(), *all_hopper_cases()]}


def run(case: Case, module: EmulatedModule, reverse: bool) -> tuple[dict[int, np.ndarray], Counters]:
    """Launch a case on copies of its arrays; return the outputs by argument position."""
    arrays: dict[int, np.ndarray] = {}
    args, extra = [], []
    for i, a in enumerate(case.args):
        if isinstance(a, Mapped):
            base = a.array if a.array.base is None else a.array.base
            owner = np.array(base)
            arrays[i] = owner[tuple(slice(n) for n in a.array.shape)]
            args.append(a.map.emulated(owner.ctypes.data))
            extra.append(owner)
        elif isinstance(a, np.ndarray):
            arrays[i] = np.array(a)
            args.append(arrays[i])
        else:
            args.append(a)
    counters = module.launch(case.kernel, case.grid, case.threads, args, smem=case.smem, reverse=reverse, extra=extra)
    return {i: arrays[i] for i in case.expect}, counters


@pytest.fixture(scope="module")
def modules() -> dict[str, EmulatedModule]:
    return {
        name: EmulatedModule(compile_emulated((HERE / name).read_text())) for name in {c.source for c in CASES.values()}
    }


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_primitive_equals_numpy(name: str, reverse: bool, modules: dict[str, EmulatedModule]) -> None:
    got, _ = run(CASES[name], modules[CASES[name].source], reverse)
    for position, array in got.items():
        assert mismatch(CASES[name], position, array) <= CASES[name].tolerance, (name, position)


STORE_BUGS = {
    "    pd_fence_proxy_async();": "stored without pd_fence_proxy_async",
    "      pd_tma_store_wait_read<0>();": None,  # the full wait that follows does both
    "      pd_tma_store_commit();": "TMA store was never waited for",
}
"""Omitted parts of a store, and the emulation's messages."""


def test_tma_store_protocol() -> None:
    source = (HERE / "primitives_hopper.cu").read_text()
    part, parts = source[source.index("#define TMA_STORE") : source.index("TMA_STORE(tma_store_3d")], []
    for n, old in enumerate(STORE_BUGS):
        assert part.count(old) == 1
        parts.append(
            part.replace(old, " " * len(old)).replace("TMA_STORE", f"STORE{n}").replace("tma_store_2d,", f"bug{n},")
        )
    module = EmulatedModule(compile_emulated("\n".join(['#include "pd_hopper.cuh"', *parts]), arch=90))
    for n, message in enumerate(STORE_BUGS.values()):
        case = replace(CASES["tma_store_2d"], kernel=f"bug{n}")
        if message is None:
            got, _ = run(case, module, False)
            assert np.array_equal(got[0], case.expect[0])
        else:
            with pytest.raises(DeviceError, match=message):
                run(case, module, False)


ARRIVE, WAIT = "    pd_cluster_arrive();\n", "    pd_cluster_wait();\n"
CLUSTER_BUGS = {
    "a block is not told that the other has read": (
        (("if (t < 2) pd_mbar_arrive_at(empty, t)", "if (t == 0) pd_mbar_arrive(empty)"), ("(empty, 2)", "(empty, 1)")),
        "overwrites what another copy still writes|WRONG"),
    "the other's half is not waited for": ((("(full, 2 * bytes)", "(full, bytes)"),), "overwrites|deadlock|WRONG"),
    "more bytes than come": ((("(full, 2 * bytes)", "(full, 3 * bytes)"),), "deadlock"),
    "copied to this block only": (((", full, 3)", ", full, 1 << rank)"),), "deadlock"),
    "copied to a block that is not there": (((", full, 3)", ", full, 7)"),), "block 2 of a cluster of 2"),
    "no barrier at the start": ((("    pd_cluster_start();", "    pd_syncthreads();"),), "before pd_mbar_init"),
    "barriers not fenced": ((("      pd_fence_mbar_init();", ""),), "before pd_fence_mbar_init"),
    "no barrier at the end": (((ARRIVE, ""), (WAIT, "")), "which has left"),
    "nobody waits at the end": (((WAIT, ""),), "which has left|have left the kernel"),
    "a block says too early that it is done": (
        ((ARRIVE, ""), ("    for (int i", f"{ARRIVE}    for (int i")), "between arrival and wait"),
    "a block does not say that it is done": (((ARRIVE, f"    if (rank)\n{ARRIVE}"),), "without an arrival"),
    "a thread says it twice": (((ARRIVE, ARRIVE * 2),), "a second arrival"),
}  # fmt: skip
"""Violations of the cluster protocol, and the emulation's messages; WRONG: the result shows it."""


BARRIER = ARRIVE + WAIT
STORE = "smem + t * 4, pd_ldg(x + (pd_bid_x() * 2 + i) * 64 + t));\n"
SUMS_BUGS = {
    "no barrier behind the stores": (STORE + BARRIER, STORE, "no barrier of the cluster behind the store"),
    "a barrier of the block": (STORE + BARRIER, f"{STORE}    pd_syncthreads();\n", "no barrier of the cluster"),
    "a barrier that orders no stores": (STORE + BARRIER, f"{STORE}    pd_cluster_start();\n", "no barrier of"),
    "nobody waits": (STORE + BARRIER, STORE + ARRIVE, "no barrier of the cluster|between arrival"),
    "stored behind the arrival": (STORE + ARRIVE, STORE + ARRIVE + f"    pd_sts<float>({STORE}", "no barrier of"),
    "nobody waits before storing again or leaving": (f"total[t % 4]);\n{BARRIER}", "total[t % 4]);\n",
                                                     "may still read|which has left|have left the kernel"),
    "the wrong block": ("one, smem + first, b)", "one, smem + first, (b + 1) % 3)", "WRONG"),
    "a block that is not there": ("one, smem + first, b)", "one, smem + first, b + 1)", "block 4 of a cluster of 4"),
}  # fmt: skip
"""Faults in sums of a cluster's blocks, and the emulation's messages."""


@pytest.mark.parametrize("reverse", [False, True])
def test_sums_of_a_cluster_protocol(reverse: bool) -> None:
    source = (HERE / "primitives_hopper.cu").read_text()
    text = source[source.index("PD_KERNEL_CLUSTER(cluster_sums") : source.index("// ---- mbarrier: two")]
    assert all(text.count(old) == 1 for old, _, _ in SUMS_BUGS.values())
    bugs = (
        text.replace(old, new).replace("cluster_sums", f"bug{n}") for n, (old, new, _) in enumerate(SUMS_BUGS.values())
    )
    module = EmulatedModule(compile_emulated("\n".join(['#include "pd_hopper.cuh"', *bugs]), arch=90))
    case = CASES["cluster_sums"]
    for n, (bug, (_, _, message)) in enumerate(SUMS_BUGS.items()):
        try:
            got, _ = run(replace(case, kernel=f"bug{n}"), module, reverse)
            said = "" if np.array_equal(got[1], case.expect[1]) else "WRONG"
        except DeviceError as e:
            said = str(e)
        assert re.search(message, said), (bug, said)


LEAVES = "  if (n == 4) pd_leave<4>(space + here + at, mine);\n"
COUNT = "  if (pd_last_block(counters + task, 4)) {"
COUNTED_BUGS = {
    "left behind the count": (LEAVES, COUNT, COUNT + LEAVES, "no count of both blocks"),
    "not left": (LEAVES, "", "", "what no block has left"),
    "loaded as if it were there": ("pd_left<2>(mine, there)", "", "pd_ldg_wide<2>(mine, there)", "WRONG"),
    "all finish": (COUNT, COUNT, "  pd_last_block(counters + task, 4);\n  {", "no count of both|no block has left"),
    "counts of fewer blocks": (COUNT, COUNT, COUNT.replace("4", "3"), "no block has left|no count of both"),
    "counts of more blocks": (COUNT, COUNT, COUNT.replace("4", "5"), "a counter of blocks ends at 4"),
    "one counter for all": (COUNT, COUNT, COUNT.replace(" + task", ""), "no block has left|no count of both"),
    "another task's sums": ("(task * 4 + b)", "", "(task / 2 * 4 + b)", "no count of both|no block has left"),
}  # fmt: skip
"""Faults in counted sums: the removed text, its replacement, and the emulation's message."""


def test_counted_sums_protocol() -> None:
    """One of two block orders catches a dependence on the order."""
    source = (HERE / "primitives.cu").read_text()
    text = source[source.index("PD_KERNEL(counted_sums") : source.index("// ---- conversions")]
    bugs = []
    for n, (old, before, new, _) in enumerate(COUNTED_BUGS.values()):
        edited = text.replace(old, new) if before in ("", old) else text.replace(old, "").replace(before, new)
        assert edited != text
        bugs.append(edited.replace("counted_sums", f"bug{n}"))
    module = EmulatedModule(compile_emulated("\n".join(['#include "pd_device.cuh"', *bugs])))
    case = CASES["counted_sums"]
    for n, (bug, (*_, message)) in enumerate(COUNTED_BUGS.items()):
        said = ""
        for reverse in (False, True):
            try:
                got, _ = run(replace(case, kernel=f"bug{n}"), module, reverse)
                said += "" if np.array_equal(got[1], case.expect[1]) else "WRONG"
            except DeviceError as e:
                said += str(e)
        assert re.search(message, said), (bug, said)


@pytest.mark.parametrize("reverse", [False, True])
def test_cluster_protocol(reverse: bool) -> None:
    source = (HERE / "primitives_hopper.cu").read_text()
    start, end = source.index("#define CLUSTER"), source.index("CLUSTER(cluster_load_3d")
    part, parts = source[start:end].replace(" \\\n", "\n"), []
    head, use = part.split("PD_EXPORT(name, 64);\n")
    text = head[head.index("PD_KERNEL") :] + "PD_EXPORT(name, 64);\n"
    text = "\n".join(line.rstrip() for line in text.splitlines())
    text = text.replace("__VA_ARGS__", use[use.index("pd_tma") :].rstrip()[:-1])
    for n, (edits, _) in enumerate(CLUSTER_BUGS.values()):
        bug = text.replace("name", f"bug{n}")
        for old, new in edits:
            assert bug.count(old) == 1, old
            bug = bug.replace(old, new)
        parts.append(bug)
    module = EmulatedModule(compile_emulated("\n".join(['#include "pd_hopper.cuh"', *parts]), arch=90))
    case = CASES["cluster_load_2d"]
    for n, (bug, (_, message)) in enumerate(CLUSTER_BUGS.items()):
        try:
            got, _ = run(replace(case, kernel=f"bug{n}"), module, reverse)
            said = "" if np.array_equal(got[7], case.expect[7]) else "WRONG"
        except DeviceError as e:
            said = str(e)
        assert re.search(message, said), (bug, said)
    with pytest.raises(DeviceError, match="launch of 3 blocks; the kernel has clusters of 2"):
        run(replace(case, kernel="bug0", grid=(3, 1, 1)), module, reverse)


def _edited(case: Case, numbers: dict[int, int], box: tuple[int, int] = (64, 24), **pixels: tuple[int, ...]) -> Case:
    """Return a case of a column of pixels with other numbers, by argument position, and another map."""
    of, *rest = case.args
    changed = replace(of.map, box=box, pixels=replace(of.map.pixels, **pixels))
    args = [np.int32(numbers[i]) if i in numbers else a for i, a in enumerate(rest, 1)]
    return replace(case, args=(replace(of, map=changed), *args))


@pytest.mark.parametrize(
    ("numbers", "changes", "message"),
    [
        ({}, {"lower": (-2, 0)}, "between the steps|WRONG"), ({}, {"upper": (1, -2)}, "WRONG"),
        ({}, {"upper": (-1, 0)}, "WRONG"), ({}, {"steps": (1, 2)}, "WRONG"), ({}, {"steps": (2, 1)}, "WRONG"),
        ({}, {"box": (64, 16)}, "deadlock"), ({}, {"box": (64, 40)}, "out-of-bounds shared access"),
        ({7: 2}, {}, "WRONG"), ({8: 1}, {}, "WRONG"), ({7: 256}, {}, "more than 8 bits"),
        ({3: 0}, {}, "between the steps of 2 from -1"), ({3: 9}, {}, "outside its bounding box from -1 to 7"),
        ({5: 1}, {}, "WRONG"),
    ],
)  # fmt: skip
def test_planted_bugs_of_pixels_are_seen(
    numbers: dict, changes: dict, message: str, modules: dict[str, EmulatedModule]
) -> None:
    """A wrong corner, step, number of pixels, offset, tap offset or image."""
    case = CASES["tma_pixels_4d_strided_inside"]
    try:
        got, _ = run(_edited(case, numbers, **changes), modules[case.source], False)
        said = "" if np.array_equal(got[10], case.expect[10]) else "WRONG"
    except DeviceError as e:
        said = str(e)
    assert re.search(message, said), said


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("mma_u8s8", "int32_t, pd_mma_m16n8k32_u8s8)", "int32_t, pd_mma_m16n8k32_s8u8)"),
        slow("mma_s8u8", "int32_t, pd_mma_m16n8k32_s8u8)", "int32_t, pd_mma_m16n8k32_u8)"),
        slow("mma_u8", "int32_t, pd_mma_m16n8k32_u8)", "int32_t, pd_mma_m16n8k32_s8)"),
        ("byte_columns", "pd_byte_columns(r, t)", "pd_byte_columns(r, 0)"),
        slow("byte_columns", "(m + i / 4) % 2 * 2", "m % 2 * 2"),
        ("byte_columns", "pd_ldmatrix_x4_trans(", "pd_ldmatrix_x4("),
    ],
)
def test_planted_bugs_with_bytes_are_seen(name: str, old: str, new: str) -> None:
    source = (HERE / "primitives.cu").read_text()
    part = source[source.index("// ---- mma: ") : source.index("// ---- cp.async with")]
    assert part.count(old) == 1
    module = EmulatedModule(compile_emulated(f'#include "pd_device.cuh"\n{part.replace(old, new)}'))
    got, _ = run(CASES[name], module, False)
    assert any(mismatch(CASES[name], position, array) > 0 for position, array in got.items())


def test_bytes_are_transposed_without_conflicts(modules: dict[str, EmulatedModule]) -> None:
    _, count = run(CASES["byte_columns"], modules["primitives.cu"], False)
    assert count.ldmatrix == 1 and count.ldmatrix_conflicts == 0


def test_maps_that_do_not_round_are_seen(modules: dict[str, EmulatedModule]) -> None:
    def plain(name: str) -> Case:
        case = CASES[name]
        args = (replace(a, map=replace(a.map, dtype="float32")) if isinstance(a, Mapped) else a for a in case.args)
        return replace(case, args=tuple(args))

    for name in ("tma_load_2d_tf32", "tma_load_2d_tf32_ties"):
        got, _ = run(plain(name), modules["primitives_hopper.cu"], False)
        assert mismatch(CASES[name], 10, got[10]) > 0.5
    with pytest.raises(DeviceError, match="is not rounded to tf32"):
        run(plain("wgmma_tf32_n128_rounded"), modules["primitives_hopper.cu"], False)
