"""Dask: a local cluster, or a scheduler by its address. Steps go out one for each free thread of a worker."""

from __future__ import annotations

import asyncio
import functools
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from polydyn.errors import PolydynError, UnsupportedError

Execute = Callable[[dict[str, Any]], dict[str, Any]]
PATIENCE = 60.0
"""Seconds without any worker after which a batch gives up."""
BEGINNINGS = 3
"""How often local workers may begin."""


class ClusterError(PolydynError):
    """The cluster is not there, or lost all its workers."""


class Cluster:
    """Workers of a scheduler; ``submit`` gives them steps, ``next`` waits for an answer.

    ``client`` begins it: a batch in which all is done needs no workers, which take seconds to begin.
    """

    def __init__(self, client: Callable[[], Any]) -> None:
        self._begin = client
        self._client: Any = None
        self._ended: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self._looked, self._slots, self._last = 0.0, 0, time.monotonic()

    @property
    def slots(self) -> int:
        """Threads of all workers: as many steps run at once; 1 before ``begin``. ClusterError: none for a minute."""
        if self._client is None:
            return 1
        now = time.monotonic()
        if now - self._looked > 1.0 or not self._slots:
            self._looked, self._slots = now, self._count()
            if self._slots:
                self._last = now
            elif now - self._last > PATIENCE:
                raise ClusterError("the cluster has no workers", remedy="start workers, then call batch again")
        return self._slots

    def begin(self) -> None:
        """Connects, at the first call. UnsupportedError: Dask is not installed. ClusterError: nobody answers."""
        if self._client is None:
            self._client = self._begin()
            self._last = time.monotonic()

    def submit(self, token: int, execute: Execute, request: dict[str, Any]) -> None:
        """After ``begin``: sends a step to a worker; its answer comes with ``token``."""
        future = self._client.submit(execute, request, pure=False)
        future.add_done_callback(lambda f: self._ended.put((token, f)))

    def next(self, timeout: float = 0.5) -> tuple[int, dict[str, Any]] | None:
        """The next answer; None when none came in time. A worker that was lost answers with the outcome ``lost``."""
        try:
            token, future = self._ended.get(timeout=timeout)
        except queue.Empty:
            return None
        error = None
        try:
            answer: dict[str, Any] = future.result(timeout=PATIENCE)
        except Exception as e:  # whatever Dask or the step raised
            error = e
        finally:
            future.release()
        if error is None:
            return token, answer
        lost = type(error).__name__ in ("KilledWorker", "CancelledError", "FutureCancelledError")
        what = "the worker was lost" if lost else f"{type(error).__name__}: {error}"
        return token, {"outcome": "lost" if lost else "died", "error": what, "facts": {}}

    def _count(self) -> int:
        if self._client.status != "running":
            raise ClusterError("the scheduler was lost", remedy="start it, and call batch again: it goes on from there")
        return sum(self._client.nthreads().values())


@contextmanager
def open_cluster(workers: int, scheduler: str | None = None) -> Iterator[Cluster]:
    """A local cluster of so many workers, or the workers of a scheduler; it begins when it is needed."""
    with ExitStack() as stack:
        yield Cluster(lambda: stack.enter_context(_client(workers, scheduler)))


@contextmanager
def _client(workers: int, scheduler: str | None) -> Iterator[Any]:
    """Dask's client. UnsupportedError: Dask is not installed. ClusterError: nobody answers at the address."""
    try:
        import dask
        from distributed import Client, LocalCluster
    except ImportError:
        raise UnsupportedError(
            "batch needs Dask", rule="the extra [jobs]", remedy="pip install 'polydyn[jobs]'"
        ) from None
    if scheduler:
        try:
            client = Client(scheduler, timeout=20, set_as_default=False, loop=event_loop())
        except (OSError, ValueError) as e:
            raise ClusterError(
                f"no scheduler answers at {scheduler}: {e}", rule="--scheduler", remedy="start one with dask scheduler"
            ) from e
        with client:
            yield client
        return
    with (
        dask.config.set({"distributed.scheduler.allowed-failures": 0, "distributed.comm.timeouts.connect": "60s"}),
        _local(LocalCluster, workers) as local,
        Client(local, set_as_default=False, loop=event_loop()) as client,
    ):
        yield client


def _local(make: Callable[..., Any], workers: int) -> Any:
    """A local cluster. A worker that is killed while it begins ends the others: then they begin anew. ClusterError."""
    failure: RuntimeError | None = None
    for _ in range(BEGINNINGS):
        try:
            return make(
                n_workers=workers, threads_per_worker=1, memory_limit=0, dashboard_address="127.0.0.1:0",
                silence_logs=50, loop=event_loop(),
            )  # fmt: skip
        except RuntimeError as e:
            failure = e
    raise ClusterError(f"no worker begins: {failure}", remedy="see what ends them, then call batch again") from failure


@functools.cache
def event_loop() -> Any:
    """The event loop of all clusters of this process, in a thread of its own. ClusterError: it does not begin.

    Dask gives a loop of its own ten seconds to begin, which is too short on a machine that is busy.
    """
    from tornado.ioloop import IOLoop

    begun: queue.SimpleQueue[Any] = queue.SimpleQueue()

    async def live() -> None:
        begun.put(IOLoop.current())
        await asyncio.Event().wait()

    threading.Thread(target=lambda: asyncio.run(live()), name="event loop of clusters", daemon=True).start()
    try:
        return begun.get(timeout=PATIENCE)
    except queue.Empty:
        raise ClusterError(f"no event loop within {PATIENCE:g} s", remedy="try again on a less busy machine") from None
