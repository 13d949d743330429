"""Dask: a local cluster, or a scheduler by its address. Each free thread of a worker gets one step."""

from __future__ import annotations

import asyncio
import functools
import logging
import multiprocessing
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from polydyn.errors import PolydynError, UnsupportedError

Execute = Callable[[dict[str, Any]], dict[str, Any]]
PATIENCE = 60.0
"""Seconds without any worker after which a batch stops."""
END_SECONDS = 5.0
"""Seconds in which a killed worker ends."""
MAX_STARTS = 3
"""Maximum number of attempts to start the local workers."""


class ClusterError(PolydynError, RuntimeError):
    """The cluster is missing, or lost all its workers."""


class Cluster:
    """The workers of a scheduler: ``submit`` sends a step, ``next`` waits for an answer.

    ``client`` starts the cluster. If all steps of a batch are done, workers are not started, because that takes
    seconds.
    """

    def __init__(self, client: Callable[[], Any]) -> None:
        self._begin = client
        self._client: Any = None
        self._ended: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self._looked, self._slots, self._last = 0.0, 0, time.monotonic()

    @property
    def slots(self) -> int:
        """The threads of all workers, that is, steps that run at once; 1 before ``begin``. ClusterError: none for a
        minute."""
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

    def begin(self) -> str:
        """Connect on the first call, and return a line with the address of Dask's dashboard; "" on later calls.

        UnsupportedError: Dask is not installed. ClusterError: there is no answer.
        """
        if self._client is None:
            self._client = self._begin()
            self._last = time.monotonic()
            return _dashboard(self._client)
        return ""

    def submit(self, token: int, execute: Execute, request: dict[str, Any]) -> None:
        """Send a step to a worker; call ``begin`` first. Its answer has the same ``token``."""
        future = self._client.submit(execute, request, pure=False)
        future.add_done_callback(lambda f: self._ended.put((token, f)))

    def next(self, timeout: float = 0.5) -> tuple[int, dict[str, Any]] | None:
        """Return the next answer, or None after a timeout. A lost worker gives the outcome ``lost``."""
        try:
            token, future = self._ended.get(timeout=timeout)
        except queue.Empty:
            return None
        error = None
        try:
            answer: dict[str, Any] = future.result(timeout=PATIENCE)
        except Exception as e:  # any error of Dask or of the step
            error = e
        finally:
            future.release()
        if error is None:
            return token, answer
        lost = type(error).__name__ in ("KilledWorker", "CancelledError", "FutureCancelledError")
        message = "the worker was lost" if lost else f"{type(error).__name__}: {error}"
        return token, {"outcome": "lost" if lost else "died", "error": message, "facts": {}}

    def _count(self) -> int:
        if self._client.status != "running":
            raise ClusterError("the scheduler was lost", remedy="start it, and call batch again: it continues")
        return sum(self._client.nthreads().values())


def _dashboard(client: Any) -> str:
    """Return a line about Dask's dashboard, which draws its pages with bokeh."""
    link = getattr(client, "dashboard_link", None)
    if not link:
        return ""
    drawn = "" if find_spec("bokeh") else " (its pages need the package bokeh on the scheduler)"
    return f"dashboard: {link}{drawn}"


@contextmanager
def open_cluster(workers: int, scheduler: str | None = None, folder: Path | None = None) -> Iterator[Cluster]:
    """Open a local cluster of ``workers`` workers, or the workers of a scheduler; it starts on first use.

    ``folder``: for temporary files of a local cluster.
    """
    with ExitStack() as stack:
        yield Cluster(lambda: stack.enter_context(_client(workers, scheduler, folder)))


@contextmanager
def _client(workers: int, scheduler: str | None, folder: Path | None) -> Iterator[Any]:
    """Open Dask's client. UnsupportedError: Dask is not installed. ClusterError: the address does not answer."""
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
    settings = {"distributed.scheduler.allowed-failures": 0, "distributed.comm.timeouts.connect": "60s"}
    with (
        dask.config.set(settings | ({"temporary-directory": str(folder)} if folder else {})),
        _local(LocalCluster, workers) as local,
        Client(local, set_as_default=False, loop=event_loop()) as client,
    ):
        yield client


def _local(make: Callable[..., Any], workers: int) -> Any:
    """Start a local cluster. If a worker is killed while it starts, the others end and all are started again.
    ClusterError: they do not start."""
    failure: RuntimeError | None = None
    before = _begun()
    for _ in range(MAX_STARTS):
        try:
            return make(
                n_workers=workers, threads_per_worker=1, memory_limit=0, dashboard_address="127.0.0.1:0",
                silence_logs=50, loop=event_loop(),
            )  # fmt: skip
        except RuntimeError as e:
            failure = e
        except KeyboardInterrupt:
            _abandon(before)
            raise
    raise ClusterError(f"no worker starts: {failure}", remedy="see what ends them, then call batch again") from failure


def _begun() -> tuple[set[Any], set[Any]]:
    """Return Dask's clusters and the child processes of this process."""
    from distributed.deploy.spec import SpecCluster

    return set(SpecCluster._instances), set(multiprocessing.active_children())


def _abandon(before: tuple[set[Any], set[Any]]) -> None:
    """End the cluster that began since ``before`` and whose workers were still starting.

    Dask cannot close it, and would say so when this process ends.
    """
    clusters, children = (now - earlier for now, earlier in zip(_begun(), before, strict=True))
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # it reports workers that did not start
    for cluster in clusters:
        cluster.shutdown_on_close = False
    for child in children:
        child.kill()
        child.join(END_SECONDS)


@functools.cache
def event_loop() -> Any:
    """Return the event loop of all clusters of this process, in a thread of its own. ClusterError: it does not start.

    Dask gives its own loop ten seconds to start, which is too short on a busy machine.
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
