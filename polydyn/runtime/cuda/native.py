"""ctypes bindings of a CUDA program's functions, in addition to ``native`` (``runtime/polydyn_cuda.h``)."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from functools import partial

from polydyn.capability import EARLY, FEATURES
from polydyn.errors import ArtifactError
from polydyn.gpu.errors import DriverMissingError
from polydyn.gpu.lacking import lacking
from polydyn.runtime.artifact import Artifact
from polydyn.runtime.cuda.images import ImageSource
from polydyn.runtime.cuda.session import Session
from polydyn.runtime.native import Context, Native

DEVICE = 6
"""``PD_DEVICE``."""

_IMAGE = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32)
"""``pd_cuda_image``."""

ON_DEVICE, ON_HOST, TO_COPY = 0, 1, 2
"""``PD_ON_DEVICE``, ``PD_ON_HOST``, ``PD_TO_COPY``."""


class CudaNative(Native):
    """An opened library. ``open`` loads its kernels into a session's context."""

    def __init__(self, artifact: Artifact) -> None:
        super().__init__(artifact)
        self.session: Session | None = None
        self._images: _Images | None = None
        self.special = 0
        """The compute capability whose special instructions kernels may use, or 0."""
        self.lacking: frozenset[str] = frozenset()
        """The features that kernels must not use."""
        self.generation = -1
        """The session's generation at the last call of ``open``; -1 if it was not called."""
        lib = self.library
        lib.pd_cuda_stream.restype = ctypes.c_void_p
        lib.pd_cuda_choices.restype = ctypes.c_int64
        lib.pd_cuda_run.argtypes = [*[ctypes.c_void_p] * 4, ctypes.c_int32, ctypes.c_void_p]

    def open(self, artifact: Artifact, session: Session) -> None:
        """Load the weights; kernels are loaded on their first launch. Use it within ``session.use``.

        WrongArchitectureError: the device is too old, or has neither image nor source. DeviceMemoryError.
        """
        kernels = [(k["name"], k["arch"]) for k in artifact.manifest["kernels"]]
        source = ImageSource(session.driver, kernels, artifact.images, artifact.sources)
        self.session, self._images = session, _Images(source)
        library, context = session.library.encode(), ctypes.c_void_p(session.driver.context)
        self.lacking = lacking(session.driver.device_name)
        self.special = source.special if self._leave_out(self.lacking) else 0
        if EARLY in self.lacking and hasattr(self.library, "pd_cuda_overlap"):
            self.library.pd_cuda_overlap(self.program, 0)
        code = self.library.pd_cuda_open(self.program, library, context, self._images.callback, None, self.special)
        self.check(code)
        self.generation = session.generation

    def _leave_out(self, features: frozenset[str]) -> bool:
        """Forbid features in kernels. Return False if that is impossible: older programs have no features."""
        without = getattr(self.library, "pd_cuda_without", None)
        if without is not None:
            without(self.program, ctypes.c_int64(sum(1 << n for n, f in enumerate(FEATURES) if f in features)))
        return without is not None or not features

    def forget_context(self) -> None:
        """Mark the context as lost, with everything in it."""
        self.library.pd_cuda_lost(self.program)
        self.generation = -1

    def before_close(self) -> None:
        """Skip releasing resources of a lost context."""
        if self.session is not None and self.generation != self.session.generation:
            self.forget_context()

    def check(self, code: int) -> None:
        """Raise the exception of the library's error code; driver errors become the driver's exceptions."""
        if code != DEVICE:
            super().check(code)
            return
        message = (self.library.pd_error() or b"").decode(errors="replace")
        result = self.library.pd_cuda_result()
        failed = self._images.failure() if self._images is not None else None
        if failed is not None:
            raise failed
        if not result or self.session is None:
            raise DriverMissingError(message, remedy="install the NVIDIA driver")
        call, _, detail = message.partition(" failed: ")
        self.session.driver.fail(result, call, detail.partition("); ")[2])


class _Images:
    """Images for the library, which requests them by kernel number; they stay alive with this object."""

    def __init__(self, source: ImageSource) -> None:
        self._source = source
        self._texts: dict[bytes, ctypes.Array[ctypes.c_char]] = {}
        self._failed: dict[int, BaseException] = {}  # by thread
        self.callback = _IMAGE(self._give)

    def failure(self) -> BaseException | None:
        """Return and clear the error of this thread's last image request, or None."""
        return self._failed.pop(threading.get_ident(), None)

    def _give(self, _: object, kernel: int) -> int | None:
        try:
            image = self._source.image(kernel)
        except BaseException as e:  # includes interrupts, because exceptions in a callback would be lost
            self._failed[threading.get_ident()] = e
            return None
        if image not in self._texts:
            self._texts[image] = ctypes.create_string_buffer(image, len(image))
        return ctypes.addressof(self._texts[image])


class CudaContext(Context):
    """A context on the device; ``places`` give the location of each input, then of each output of a call."""

    __slots__ = ("_cuda", "_kept", "_kept_bytes", "_places", "calls", "stream")

    def __init__(
        self,
        native: CudaNative,
        multiprocessors: int,
        inputs: list[tuple[int, int]],
        output_ranks: list[int],
        strided: list[int],
    ) -> None:
        super().__init__(native, multiprocessors, inputs, output_ranks, strided)
        self._cuda = native.library
        self._places = (ctypes.c_int32 * (len(inputs) + len(output_ranks) + 1))()
        self.calls = 0
        self._kept = self._kept_bytes = -1
        self.stream = int(native.library.pd_cuda_stream(self.handle) or 0)

    def prepare_at(self, key: list[tuple[int, ...]], places: tuple[int, ...]) -> None:
        """Call ``pd_shapes`` for arrays of these shapes, strides and places; then ``key`` contains both."""
        self.key = None  # until all is done, because an interrupt may occur in between
        self._places[: len(places)] = list(places)
        self._cuda.pd_cuda_places(self.handle, self._places)
        self.prepare(key)
        self.key = [*key, places]

    def point(self, inputs: list[int], outputs: list[int]) -> None:
        """Set the addresses of the next call."""
        super().point(inputs, outputs)
        self.calls += 1

    def run_on(self, inputs: list[int], outputs: list[int], stream: int, detached: bool) -> None:
        """Call ``pd_cuda_run`` on these addresses; ``stream`` 0 is the context's own."""
        self.point(inputs, outputs)
        code = self._cuda.pd_cuda_run(
            self.handle, self.input_pointers, self.output_pointers, stream or None, detached, None
        )
        if code:
            self._native.check(code)

    def record(self, inputs: list[int], outputs: list[int]) -> None:
        """Call ``pd_cuda_record`` on these addresses, for ``replay``."""
        record = getattr(self._cuda, "pd_cuda_record", None)
        if record is None:
            raise ArtifactError("the program is too old for bound calls on a device", remedy="compile it again")
        self.point(inputs, outputs)
        self._native.check(record(self.handle, self.input_pointers, self.output_pointers))

    def replay(self, stream: int, detached: bool) -> Callable[[], int]:
        """Return ``pd_cuda_replay`` as a function; it returns an error code. ``stream`` 0 is the context's own."""
        return partial(self._cuda.pd_cuda_replay, self.handle, ctypes.c_void_p(stream or None), int(detached))

    def keep(self, max_graphs: int, max_bytes: int) -> None:
        """Call ``pd_cuda_keep`` and ``pd_cuda_keep_bytes`` if the limits have changed. Older programs keep no graphs,
        or do not count their bytes.
        """
        if max_graphs != self._kept and hasattr(self._cuda, "pd_cuda_keep"):
            self._native.check(self._cuda.pd_cuda_keep(self.handle, max_graphs))
            self._kept = max_graphs
        if max_bytes != self._kept_bytes and hasattr(self._cuda, "pd_cuda_keep_bytes"):
            self._native.check(self._cuda.pd_cuda_keep_bytes(self.handle, ctypes.c_int64(max_bytes)))
            self._kept_bytes = max_bytes

    def graphs(self) -> tuple[int, ...]:
        """Return the counts of ``pd_cuda_graphs``."""
        counts = (ctypes.c_int64 * 5)()
        if hasattr(self._cuda, "pd_cuda_graphs"):
            self._cuda.pd_cuda_graphs(self.handle, counts)
        return tuple(counts)

    def wait(self) -> None:
        """Call ``pd_cuda_wait``. InputError: the last call, which was not waited for, had an index outside its axis."""
        self._native.check(self._cuda.pd_cuda_wait(self.handle))

    def release(self) -> None:
        """Call ``pd_cuda_release``, which frees the recording."""
        self._cuda.pd_cuda_release(self.handle)

    def choices(self) -> int:
        """Return ``pd_cuda_choices``."""
        return int(self._cuda.pd_cuda_choices(self.handle))

    def profile(self, inputs: list[int], outputs: list[int], launches: int) -> list[int]:
        """Return the nanoseconds of every launch on the device."""
        self.point(inputs, outputs)
        table = (ctypes.c_int64 * (launches + 1))()
        code = self._cuda.pd_cuda_run(self.handle, self.input_pointers, self.output_pointers, None, 0, table)
        if code:
            self._native.check(code)
        return list(table)[:launches]
