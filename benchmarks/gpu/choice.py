"""Prints the selected version of a product on a device, its estimated time, and the roofline. Needs no GPU.

    python -m benchmarks.gpu.choice [--arch sm_90a] [--dtype float16] [--rows 1 16 ...]

The dense layers of BERT base with dynamic rows. ``of roofline``: the roofline's share of the estimate, both without the
time between two kernels. ``first that fits``: the version that would be launched without estimates, and its estimate.
Nothing here is measured: the table shows the model's predictions, so that implausible ones can be seen.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence

from benchmarks.gpu.programs import model, node
from polydyn.compiler import plan_program
from polydyn.gpu import hardware
from polydyn.program.estimates import estimated
from polydyn.program.plan import Launch
from polydyn.runtime.symbols import THREADS
from polydyn.testing.choice import choose, estimates, may_run

LAYERS = ((768, 768), (768, 3072), (3072, 768))
"""(K, N)."""
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)
RATES = {"float32": "f32", "float16": "f16"}


def layer(k: int, n: int, dtype: str, device: hardware.Hardware) -> Launch:
    """Plan relu(x w + c) for x of [M, k], with estimates."""
    nodes = [node("MatMul", "x", "w", to="t"), node("Add", "t", "c", to="u"), node("Relu", "u")]
    sizes = {"x": (dtype, ["M", k]), "w": (dtype, [k, n]), "c": (dtype, [n])}
    plan = plan_program(model(nodes, sizes), target=f"cuda:{device.arch}")
    (launch,) = estimated(plan, device).launches
    return launch


def roofline(launch: Launch, env: Mapping[str, int], dtype: str, device: hardware.Hardware) -> float:
    """Return nanoseconds: all operations at the peak, or all bytes at the bandwidth."""
    flops, moved = (x.evaluate(env) for x in (launch.flops, launch.bytes))
    return max(flops / (1000 * device.peak_tflops[RATES[dtype]]), moved / device.memory_gb_per_s)


def rows(k: int, n: int, dtype: str, device: hardware.Hardware, sizes: Sequence[int]) -> Iterator[str]:
    """Yield a line of the table for each number of rows."""
    launch = layer(k, n, dtype, device)
    times = estimates(launch)
    for m in sizes:
        env = {"M": m, THREADS: device.multiprocessors}
        taken = choose(launch, env, device)
        first = next(v for v in launch.candidates if may_run(v, env, device))
        least, older = (times[v.name].evaluate(env) for v in (taken, first))
        ideal = roofline(launch, env, dtype, device)
        blocks, share = taken.tasks.evaluate(env), ideal / max(1, least - device.costs.launch_ns * len(taken.sequence))
        yield (f"{k:5}x{n:<5} {m:5}  {taken.name:32} {blocks:6} {least / 1000:8.1f} {ideal / 1000:8.1f} {share:6.0%}  "
               f"{first.name:32} {older / 1000:8.1f}")  # fmt: skip


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", choices=hardware.DEVICES, default="sm_90a")
    parser.add_argument("--dtype", choices=RATES, default="float16")
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    options = parser.parse_args()
    device = hardware.load(hardware.DEVICES[options.arch])
    heading = f"{'KxN':11} {'rows':>5}  {'taken':32} blocks estimate roofline of it  {'first that fits':32} estimate"
    print(f"{device.name}, {options.dtype}, estimated microseconds\n\n{heading}")
    for k, n in LAYERS:
        for line in rows(k, n, options.dtype, device, options.rows):
            print(line, flush=True)


if __name__ == "__main__":
    main()
