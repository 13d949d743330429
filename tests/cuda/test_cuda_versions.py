"""Requirements of versions of a launch, with hand-written kernels on the CPU libcuda.

Conditions, launch-time symbols, a workspace and kernels after it, tensor maps, architectures.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from polydyn.codegen.kernel import BASE, TF32, Block, Kernel, PixelBoxOf, TensorMapOf
from polydyn.codegen.printers.cuda import PRELUDE
from polydyn.compiler import plan_program
from polydyn.errors import InputError
from polydyn.gpu.compiler import device_headers, find_nvcc
from polydyn.gpu.errors import DeviceError, DeviceMemoryError
from polydyn.gpu.nvrtc import find_nvrtc
from polydyn.gpu.targets import special_arch
from polydyn.program.assemble import build_program
from polydyn.program.plan import COUNTERS, WORKSPACE, Candidate
from polydyn.runtime.cuda.array import DeviceArray
from polydyn.runtime.cuda.images import ImageSource, build_images
from polydyn.runtime.cuda.program import CudaProgram
from polydyn.runtime.cuda.session import open_session
from polydyn.schedules.index import Index, minimum
from polydyn.shapes.sizes import Sizes
from polydyn.testing.device.cases import to_tf32_even
from tests.support.cuda_programs import add, one_launch, version, with_block
from tests.support.programs import B, kernel_of_text
from tests.support.tiny import model, node

ONE, NTH = Index.of(1), Index.of("nth")
ROW = Index.of(32)

# a block doubles a row; TMA loads the row into shared memory
TMA_KERNEL = (
    PRELUDE
    + """#include "pd_hopper.cuh"
PD_KERNEL(mapped, 32, 1)(PD_TMAP(map), const float *x, float *y) {
  PD_DYN_SMEM(smem);
  uint64_t *bar = (uint64_t *)(smem + 128);
  if (pd_tid() == 0) {
    pd_mbar_init(bar, 1);
    pd_fence_mbar_init();
    pd_mbar_expect_tx(bar, 128);
    pd_tma_load_2d(smem, &map, 0, (int)pd_bid_x(), bar);
  }
  pd_syncthreads();
  pd_mbar_wait(bar, 0);
  pd_stg(y + pd_bid_x() * 32 + pd_tid(), 2 * pd_lds<float>(smem + pd_tid() * 4));
  (void)x;
}
PD_EXPORT(mapped, 32);
"""
)
# the same with the second pixel of a column from 2 * block - 1 on, which the swizzle has moved
EDITS = (
    ("+ 128)", "+ 256)"), (", 128)", ", 256)"), ("mapped", "pixels"),
    ("smem + pd_tid()", "smem + 128 + (pd_tid() ^ 4)"),
    ("load_2d(smem, &map, 0, (int)pd_bid_x()", "pixels_3d(smem, &map, 0, 2 * (int)pd_bid_x() - 1, 0, 0"),
)  # fmt: skip
PIXELS = functools.reduce(lambda text, edit: text.replace(*edit), EDITS, TMA_KERNEL)


@pytest.fixture(autouse=True, scope="module")
def device() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POLYDYN_LIBCUDA", "emulated")
        yield


def program(*versions: Candidate, kernels: tuple[Kernel, ...]) -> CudaProgram:
    """Compile one launch from x to y, both [B, 32]."""
    made = build_program(one_launch(*versions, kernels=kernels), target="cuda:emulated")
    assert isinstance(made, CudaProgram)
    return made


def difference(p: CudaProgram, b: int) -> float:
    x = np.arange(b * 32, dtype=np.float32).reshape(b, 32)
    got = p.run({"x": x})["y"] - x
    assert (got == got[0, 0]).all() and np.array_equal(p.bind({"x": x})()["y"] - x, got)
    assert p.profile({"x": x}, 1)[0].kernel == p.explain(B=b).launches[0].kernel
    return float(got[0, 0])


def test_the_first_version_whose_conditions_hold_is_taken() -> None:
    first, second, last = version("a", ONE), version("b", Index.of(2)), version("c", Index.of(3))
    first = replace(first, conditions=((B, "<=", Index.of(4)), (B, "%==", Index.of(2))))
    second = replace(second, conditions=((B * 2, "==", Index.of(10)),))
    p = program(first, second, last, kernels=(add("a"), add("b"), add("c")))
    assert [difference(p, b) for b in (1, 2, 3, 4, 5, 6)] == [3, 1, 3, 1, 2, 3]
    assert "not a: B <= 4 does not hold: 6, 4" in p.explain(B=6).details()
    only = program(first, kernels=(add("a"),))
    assert difference(only, 4) == 1
    with pytest.raises(InputError, match="no kernel of l runs at this size"):
        only.run({"x": np.zeros((5, 32), np.float32)})
    assert only.run({"x": np.zeros((0, 32), np.float32)})["y"].shape == (0, 32)


def test_launch_time_symbols_know_the_device() -> None:
    p = program(version("a", minimum(NTH, B)), kernels=(add("a"),))
    assert [difference(p, b) for b in (1, 3, 4, 9)] == [1, 3, 4, 4]  # the emulated device has 4 multiprocessors


def test_kernels_after_share_a_workspace() -> None:
    then = version("b", Index.of(10), WORKSPACE, "y")
    never = replace(version("a", ONE, "y", "y"), tasks=B - B)
    split = replace(version("a", ONE, "x", WORKSPACE), workspace=B * 128, after=(never, then))
    small = replace(version("c", Index.of(7)), conditions=((B, "<=", Index.of(2)),))
    p = program(small, split, kernels=(add("a"), add("b"), add("c")))
    assert [difference(p, b) for b in (2, 3, 100, 1, 5)] == [7, 11, 11, 7, 11]
    assert p.explain(B=3).launches[0].selection[-1] == "followed by b"


COUNTER_KERNEL = (
    PRELUDE
    + """PD_KERNEL(counted, 32, 1)(const float *x, float *space, uint32_t *counters, float *y, int64_t n) {
  pd_grid_begin();
  const int at = pd_tid() * 4 % 32 + pd_bid_x() * 32;
  float v[4];
  pd_ldg_wide<4>(v, x + at);
  if (pd_tid() < 8) pd_leave<4>(space + at, v);
  if (pd_last_block(counters, (int)n))
    for (int64_t i = pd_tid(); i < n * 32; i += 32) pd_stg(y + i, pd_left(space + i) + (float)n);
}
PD_EXPORT(counted, 32);
"""
)


def test_counters_of_blocks_are_a_context_s_own_and_zero_between_launches() -> None:
    """In runs, recorded calls and graphs, next to launches that use the workspace too, and when it grows."""
    counted = replace(version("counted", B, "x", WORKSPACE, COUNTERS, "y"), workspace=B * 128)
    then = replace(version("a", ONE, "x", WORKSPACE), workspace=B * 128, after=(version("b", ONE, WORKSPACE, "y"),))
    counted = replace(counted, conditions=((B, "%==", Index.of(2)),))
    p = program(counted, then, kernels=(kernel_of_text("counted", COUNTER_KERNEL, 4, 1, Block(32)), add("a"), add("b")))
    assert [difference(p, b) for b in (4, 3, 5, 6, 2000, 4)] == [4, 2, 2, 6, 2000, 4]
    x = np.zeros((4, 32), np.float32)
    one, two = (p.bind({"x": x}) for _ in range(2))
    assert all((f()["y"] == 4).all() for f in (one, two, one, two))


def growing() -> CudaProgram:
    """Compile two launches, each with a workspace; the second one's is much larger. ``y = x + 4``."""
    first, second = (
        replace(version("a", ONE, source, WORKSPACE), workspace=B * size, after=(version("b", ONE, WORKSPACE, "y"),))
        for source, size in (("x", 128), ("y", 99_000))
    )
    plan = one_launch(first, kernels=(add("a"), add("b")))
    then = replace(plan.launches[0], candidates=(second,))
    made = build_program(replace(plan, launches=(*plan.launches, then)), target="cuda:emulated")
    assert isinstance(made, CudaProgram)
    return made


def test_a_workspace_grows_when_nobody_uses_it_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second launch needs a larger one while the first is running: freeing memory need not wait."""
    monkeypatch.setenv("PDEMU_FREE_WAITS", "0")
    x = np.arange(96, dtype=np.float32).reshape(3, 32)
    assert np.array_equal(growing().run({"x": x})["y"], x + 4)


def test_no_memory_for_a_larger_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first launch has lost its workspace and requests it again when the call is repeated."""
    made, x = growing(), np.arange(96, dtype=np.float32).reshape(3, 32)
    session = open_session()
    free, total = session.driver.memory()
    monkeypatch.setenv("PDEMU_MEMORY", str(total - free + 100_000))
    for _ in range(3):
        with pytest.raises(DeviceMemoryError, match="297000 bytes of workspace"):
            made.run({"x": x})
        with pytest.raises(DeviceMemoryError, match="297000 bytes of workspace"):
            made.bind({"x": x})
    monkeypatch.delenv("PDEMU_MEMORY")
    assert np.array_equal(made.run({"x": x})["y"], x + 4)


@pytest.mark.parametrize("before", ["a bound call", "a failing run"])
def test_a_workspace_is_replaced_when_the_run_before_has_ended(before: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDEMU_FREE_WAITS", "0")
    made, session = growing(), open_session()
    few, many = (np.arange(32 * b, dtype=np.float32).reshape(b, 32) for b in (2, 9))
    x, y = DeviceArray.of(session, few), DeviceArray(session, (2, 32), "float32", 4)
    with session.use() as driver:
        stream, gone = driver.stream(), driver.stream()
        late = made.run({"x": x}, stream=stream)["y"]
        driver.free_stream(gone)
        if before == "a failing run":  # it cannot wait for the previous one
            with pytest.raises(DeviceError, match="invalid resource handle"):
                made.run({"x": x}, {"y": y}, stream=gone)
        run = made.run if before == "a failing run" else lambda feeds: made.bind(feeds)()
        got = run({"x": DeviceArray.of(session, many)})["y"]
        assert made.counters["contexts"] == 1
        assert np.array_equal(late.numpy(), few + 4) and np.array_equal(got.numpy(), many + 4)
        driver.free_stream(stream)


@pytest.mark.skipif(find_nvcc() is None and find_nvrtc() is None, reason="neither nvcc nor NVRTC is installed")
def test_kernels_for_one_architecture_are_compiled_for_it_alone() -> None:
    kernels = [("mapped", "sm_90a"), ("a", "sm_80"), ("b", "sm_80")]
    sources = {"mapped.cu": TMA_KERNEL, "a.cu": add("a").text, "b.cu": add("b").text} | device_headers()
    built = build_images(kernels, sources, ("sm_89", "sm_90a"))
    units = {n.replace("kernels_00", "") for n in built.files}
    assert units == {"sm_89/1.cubin", "sm_90a/0.cubin", "sm_90a/1.cubin", "ptx/1.ptx"}
    assert set(built.resources["mapped"]) == {"sm_90a"} and set(built.resources["b"]) == {"sm_89", "sm_90a"}

    class Device:
        device_name = "NVIDIA"

        def __init__(self, arch: int) -> None:
            self.arch = arch

    for arch, special, image in ((89, 89, "sm_89/kernels_001.cubin"), (90, 90, "sm_90a/kernels_001.cubin"),
                                 (80, 0, "ptx/kernels_001.ptx"), (120, 0, "ptx/kernels_001.ptx")):  # fmt: skip
        source = ImageSource(Device(arch), kernels, built.files, sources)  # type: ignore[arg-type]
        assert source.special == special and source.image(1) is built.files[image]
    assert source.image(2) is source.image(1)


def test_tensor_maps_and_architectures(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = TensorMapOf("map", "x", "float32", Index.of(0), (ROW, B), (ROW,), (32, 1))
    hopper = Candidate("mapped", ("x", "y"), (), B, Index.of(256), "tma", block=Block(32, "sm_90a", (rows,)))
    kernels = (kernel_of_text("mapped", TMA_KERNEL, 2, 0, Block(32, "sm_90a")), add("a"))
    p = program(hopper, version("a", ONE), kernels=kernels)
    for b in (3, 1, 40):
        x = np.random.default_rng(b).standard_normal((b, 32)).astype(np.float32)
        assert np.array_equal(p.run({"x": x})["y"], 2 * x)
        assert np.array_equal(p.run({"x": -x})["y"], -2 * x)
        call = p.bind({"x": x})
        p.run({"x": np.zeros((b + 1, 32), np.float32)})  # with its own map
        assert np.array_equal(call()["y"], 2 * x)
    assert p.profile({"x": x}, 1)[0].kernel == "mapped" == p.explain(B=2).launches[0].kernel
    rounding = program(with_block(hopper, maps=(replace(rows, dtype=TF32),)), version("a", ONE), kernels=kernels)
    rounded = to_tf32_even(x).view(np.float32)
    assert np.array_equal(rounding.run({"x": x})["y"], 2 * rounded) and (rounded != x).mean() > 0.9
    monkeypatch.setattr("polydyn.runtime.cuda.images.ImageSource.special", 80)
    older = program(hopper, version("a", ONE), kernels=kernels)
    assert difference(older, 3) == 1 and "not tma: it is for sm_90a" in older.explain(B=3).details()


def test_maps_of_pixels_reach_the_driver() -> None:
    """Corners and steps of a tensor map in im2col mode, at the sizes of each call."""
    box = PixelBoxOf((Index.of(-1),), (B,), (2,))
    image = TensorMapOf("map", "x", "float32", Index.of(0), (ROW, B, Index.of(1)), (ROW, ROW * B), (32, 2), box)
    of_pixels = Candidate("pixels", ("x", "y"), (), B, Index.of(512), "tma", block=Block(32, "sm_90a", (image,)))
    p = program(of_pixels, kernels=(kernel_of_text("pixels", PIXELS, 2, 0, Block(32, "sm_90a")),))
    for b in (1, 7):
        x = np.random.default_rng(b).standard_normal((b, 32)).astype(np.float32)
        later = np.concatenate([x[1::2], np.zeros((b - b // 2, 32), np.float32)])
        assert np.array_equal(p.run({"x": x})["y"], 2 * later)


def test_what_is_proven_of_the_sizes_leaves_fewer_versions() -> None:
    product = model([node("MatMul", "x y", "z")], {"x": ("float32", ["M", "K"]), "y": ("float32", ["K", "N"])}, ["z"])

    def versions(**dims: Sizes) -> list[Candidate]:
        (one,) = plan_program(product, target="cuda:sm_80", dims=dims).launches
        assert not one.candidates[-1].conditions, "the last version is total"
        return list(one.candidates)

    free, even = versions(), versions(K=Sizes(multiple=4), N=Sizes(multiple=4))
    small = versions(**{n: Sizes(low=1, high=512, multiple=4) for n in "MKN"})
    assert len(small) < len(even) < len(free)
    assert any(relation == "%==" for v in free for _, relation, _ in v.conditions)
    assert not any(relation == "%==" for v in even for _, relation, _ in v.conditions)
    assert not any(v.kernel.endswith("_long") for v in small), "32 bits are enough"


def test_generator_and_run_time_mean_the_same_base() -> None:
    assert special_arch(BASE) == 0
