"""The server of docs/serving.md under load, compared with ONNX Runtime: ``python -m benchmarks.serving``.

Both servers run on 127.0.0.1, alternating. Requests arrive at random (exponential intervals, a fixed seed) whether or
not earlier ones were answered. A latency counts from the time at which a request was due, so that a server that stalls
pays for all waiting requests. Texts are log-uniform between 4 and 128 tokens. The dynamic dims are B (texts that wait
together, at most ``--most``) and L (the longest of them). Vectors are compared. The client shares the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import polydyn

ROOT = Path(__file__).parent.parent
MIN_TOKENS, MAX_TOKENS, VOCABULARY = 4, 128, 100
RIVAL = """def opened(path):
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda feeds: session.run(["last_hidden_state"], feeds)[0]
"""
"""Replaces the page's function of this name."""


@dataclass(frozen=True)
class Load:
    """Result of a load on a server: latencies in seconds, and texts per call on average."""

    runtime: str
    rate: float
    requests: int
    p50: float
    p99: float
    worst: float
    texts: float
    answered_per_second: float


def server_text(runtime: str) -> str:
    """Return the Python of docs/serving.md; for ONNX Runtime with another ``opened``."""
    (text,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "serving.md").read_text(), re.DOTALL)
    if runtime == "polydyn":
        return text
    other, count = re.subn(r"def opened\(path\):.*?\n\n", lambda _: RIVAL + "\n", text, count=1, flags=re.DOTALL)
    assert count == 1
    return other


@contextmanager
def served(runtime: str, model: Path, threads: int, max_texts: int, folder: Path) -> Iterator[int]:
    """Start a server in its own process and yield its port."""
    place = folder / runtime
    place.mkdir(exist_ok=True)
    (place / "server.py").write_text(server_text(runtime))
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    environment = os.environ | {"MODEL": str(model), "THREADS": str(threads), "MOST": str(max_texts)}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "uvicorn", "server:app", "--port", str(port), "--log-level", "warning"]
    command += ["--timeout-keep-alive", "600"]  # keeps idle connections of a client open
    process = subprocess.Popen(command, cwd=place, env=environment)
    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"the server with {runtime} does not answer") from None
                time.sleep(0.1)
        yield port
    finally:
        process.terminate()
        process.wait()


def texts(count: int, seed: int = 0) -> list[list[int]]:
    """Return token ids of texts, lengths log-uniform."""
    draw = random.Random(seed)
    lengths = [round(math.exp(draw.uniform(math.log(MIN_TOKENS), math.log(MAX_TOKENS)))) for _ in range(count)]
    return [[draw.randrange(1, VOCABULARY) for _ in range(n)] for n in lengths]


class Connections:
    """HTTP/1.1 connections to a server that are kept open and reused."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.free: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def post(self, ids: Sequence[int]) -> dict[str, object]:
        """Return the answer to a text. RuntimeError: the status is not 200."""
        reader, writer = self.free.pop() if self.free else await asyncio.open_connection("127.0.0.1", self.port)
        body = json.dumps(ids).encode()
        head = (
            "POST /embed HTTP/1.1",
            "Host: localhost",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
        )
        writer.write("\r\n".join((*head, "", "")).encode() + body)
        status = await reader.readline()
        length = 0
        while line := (await reader.readline()).strip():
            name, _, value = line.partition(b":")
            length = int(value) if name.lower() == b"content-length" else length
        found = await reader.readexactly(length)
        self.free.append((reader, writer))
        if b" 200 " not in status:
            raise RuntimeError(f"{status.decode().strip()}: {found.decode()[:200]}")
        answer: dict[str, object] = json.loads(found)
        return answer

    def close(self) -> None:
        """End all connections."""
        for _, writer in self.free:
            writer.close()


async def load(port: int, runtime: str, rate: float, inputs: Sequence[Sequence[int]]) -> tuple[Load, list[list[float]]]:
    """Send requests at random times, ``rate`` a second on average."""
    draw, connections = random.Random(1), Connections(port)
    for text in inputs[:4]:
        await connections.post(text)
    due, at = [], 0.0
    for _ in inputs:
        at += draw.expovariate(rate)
        due.append(at)
    start = time.perf_counter()

    async def one(text: Sequence[int], when: float) -> tuple[float, dict[str, object]]:
        await asyncio.sleep(max(0.0, start + when - time.perf_counter()))
        answer = await connections.post(text)
        return time.perf_counter() - start - when, answer

    found = await asyncio.gather(*(one(text, when) for text, when in zip(inputs, due, strict=True)))
    seconds = time.perf_counter() - start
    connections.close()
    times = sorted(t for t, _ in found)
    calls = sum(1 / int(str(a["texts"])) for _, a in found)
    p50, p99 = (times[min(len(times) - 1, int(len(times) * p))] for p in (0.5, 0.99))
    done = Load(runtime, rate, len(times), p50, p99, times[-1], len(times) / calls, len(times) / seconds)
    return done, [a["vector"] for _, a in found]  # type: ignore[misc]


def measure(
    model: Path, rates: Sequence[float], seconds: float, threads: int, max_texts: int, turns: int
) -> list[Load]:
    """Measure both servers at every rate, alternating; for each, the run with the lower p99 counts."""
    best: dict[tuple[float, str], Load] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        saved = folder / "model.polydyn"
        polydyn.compile(model, threads=1).save(saved)
        with (
            served("polydyn", saved, threads, max_texts, folder) as ours,
            served("onnxruntime", model.resolve(), threads, max_texts, folder) as theirs,
        ):
            for rate in rates:
                asked = texts(max(20, round(rate * seconds)))
                for _ in range(turns):
                    vectors = []
                    for runtime, port in (("polydyn", ours), ("onnxruntime", theirs)):
                        done, got = asyncio.run(load(port, runtime, rate, asked))
                        vectors.append(got)
                        if (rate, runtime) not in best or done.p99 < best[rate, runtime].p99:
                            best[rate, runtime] = done
                    worst = max(abs(a - b) for x, y in zip(*vectors, strict=True) for a, b in zip(x, y, strict=True))
                    if worst > 1e-3:
                        raise RuntimeError(f"vectors differ by {worst}")
    return list(best.values())


def table(loads: Sequence[Load]) -> str:
    """Return a table with a line for each server and rate."""
    lines = ["| rate | server | p50 ms | p99 ms | worst ms | texts a call | answered a second |", "|---|" + "---|" * 6]
    for x in loads:
        lines.append(
            f"| {x.rate:g} | {x.runtime} | {x.p50 * 1e3:.1f} | {x.p99 * 1e3:.1f} | {x.worst * 1e3:.1f} | "
            f"{x.texts:.2f} | {x.answered_per_second:.1f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Print the table; ``--json`` stores it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?", default=ROOT / "tests" / "data" / "bert_tiny.onnx")
    parser.add_argument("--rates", type=float, nargs="+", default=[20.0, 50.0], help="requests a second")
    parser.add_argument("--seconds", type=float, default=20.0, help="seconds of each load")
    parser.add_argument("--threads", type=int, default=2, help="calls at a time")
    parser.add_argument("--most", type=int, default=8, help="texts in a call")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--json", type=Path)
    said = parser.parse_args()
    loads = measure(said.model, said.rates, said.seconds, said.threads, said.most, said.turns)
    print(table(loads))
    if said.json:
        said.json.write_text(json.dumps([asdict(x) for x in loads], indent=1))


if __name__ == "__main__":
    main()
