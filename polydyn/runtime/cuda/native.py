"""ctypes bindings of what a program for a CUDA device has beyond ``native`` (``runtime/polydyn_cuda.h``)."""

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
    """An opened library whose kernels are loaded into a session's context by ``open``."""

    def __init__(self, artifact: Artifact) -> None:
        super().__init__(artifact)
        self.session: Session | None = None
        self._images: _Images | None = None
        self.special = 0
        """The compute capability whose own instructions kernels may use; 0: none's."""
        self.lacking: frozenset[str] = frozenset()
        """The features that kernels do without."""
        self.generation = -1
        """Of the session, when ``open`` was last called; -1: never."""
        lib = self.library
        lib.pd_cuda_stream.restype = ctypes.c_void_p
        lib.pd_cuda_choices.restype = ctypes.c_int64
        lib.pd_cuda_run.argtypes = [*[ctypes.c_void_p] * 4, ctypes.c_int32, ctypes.c_void_p]

    def open(self, artifact: Artifact, session: Session) -> None:
        """Loads the weights; kernels follow when they are launched. Within ``session.use``.

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
        """Says that no kernel may use these; whether that can be said: programs of older polydyns know no features."""
        without = getattr(self.library, "pd_cuda_without", None)
        if without is not None:
            without(self.program, ctypes.c_int64(sum(1 << n for n, f in enumerate(FEATURES) if f in features)))
        return without is not None or not features

    def forget_context(self) -> None:
        """The context is gone with everything in it."""
        self.library.pd_cuda_lost(self.program)
        self.generation = -1

    def before_close(self) -> None:
        """Nothing is given back to a context that is gone."""
        if self.session is not None and self.generation != self.session.generation:
            self.forget_context()

    def check(self, code: int) -> None:
        """Raises what the library's error code means; what the driver says as the driver's own errors."""
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
    """Images for the library, which asks for them by the number of a kernel; each stays alive with this object."""

    def __init__(self, source: ImageSource) -> None:
        self._source = source
        self._texts: dict[bytes, ctypes.Array[ctypes.c_char]] = {}
        self._failed: dict[int, BaseException] = {}  # by thread
        self.callback = _IMAGE(self._give)

    def failure(self) -> BaseException | None:
        """Why this thread's last image could not be given, once; None when it could."""
        return self._failed.pop(threading.get_ident(), None)

    def _give(self, _: object, kernel: int) -> int | None:
        try:
            image = self._source.image(kernel)
        except BaseException as e:  # also an interruption: what leaves a callback would be dropped
            self._failed[threading.get_ident()] = e
            return None
        if image not in self._texts:
            self._texts[image] = ctypes.create_string_buffer(image, len(image))
        return ctypes.addressof(self._texts[image])


class CudaContext(Context):
    """A context on the device; ``places`` say where each input and then each output of a call lies."""

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
        """``pd_shapes`` for arrays of these shapes and strides at these places; ``key`` becomes both."""
        self.key = None  # until all is done: an interruption may come in between
        self._places[: len(places)] = list(places)
        self._cuda.pd_cuda_places(self.handle, self._places)
        self.prepare(key)
        self.key = [*key, places]

    def point(self, inputs: list[int], outputs: list[int]) -> None:
        """The addresses of the next call."""
        super().point(inputs, outputs)
        self.calls += 1

    def run_on(self, inputs: list[int], outputs: list[int], stream: int, detached: bool) -> None:
        """``pd_cuda_run`` on these addresses; ``stream`` 0 is the context's own."""
        self.point(inputs, outputs)
        code = self._cuda.pd_cuda_run(
            self.handle, self.input_pointers, self.output_pointers, stream or None, detached, None
        )
        if code:
            self._native.check(code)

    def record(self, inputs: list[int], outputs: list[int]) -> None:
        """``pd_cuda_record`` of a call on these addresses, for ``replay``."""
        record = getattr(self._cuda, "pd_cuda_record", None)
        if record is None:
            raise ArtifactError("the program was compiled before a device had bound calls", remedy="compile it again")
        self.point(inputs, outputs)
        self._native.check(record(self.handle, self.input_pointers, self.output_pointers))

    def replay(self, stream: int, detached: bool) -> Callable[[], int]:
        """``pd_cuda_replay``, to be called: it returns an error code. ``stream`` 0 is the context's own."""
        return partial(self._cuda.pd_cuda_replay, self.handle, ctypes.c_void_p(stream or None), int(detached))

    def keep(self, most: int, most_bytes: int) -> None:
        """``pd_cuda_keep`` and ``pd_cuda_keep_bytes``, when they are other numbers than before; older programs keep no
        graphs, or do not count their bytes.
        """
        if most != self._kept and hasattr(self._cuda, "pd_cuda_keep"):
            self._native.check(self._cuda.pd_cuda_keep(self.handle, most))
            self._kept = most
        if most_bytes != self._kept_bytes and hasattr(self._cuda, "pd_cuda_keep_bytes"):
            self._native.check(self._cuda.pd_cuda_keep_bytes(self.handle, ctypes.c_int64(most_bytes)))
            self._kept_bytes = most_bytes

    def graphs(self) -> tuple[int, ...]:
        """``pd_cuda_graphs``."""
        counts = (ctypes.c_int64 * 5)()
        if hasattr(self._cuda, "pd_cuda_graphs"):
            self._cuda.pd_cuda_graphs(self.handle, counts)
        return tuple(counts)

    def wait(self) -> None:
        """``pd_cuda_wait``. InputError: an index of the last call, which was not waited for, lies outside its axis."""
        self._native.check(self._cuda.pd_cuda_wait(self.handle))

    def release(self) -> None:
        """``pd_cuda_release``: what was recorded is gone."""
        self._cuda.pd_cuda_release(self.handle)

    def choices(self) -> int:
        """``pd_cuda_choices``."""
        return int(self._cuda.pd_cuda_choices(self.handle))

    def profile(self, inputs: list[int], outputs: list[int], launches: int) -> list[int]:
        """Nanoseconds of every launch on the device."""
        self.point(inputs, outputs)
        table = (ctypes.c_int64 * (launches + 1))()
        code = self._cuda.pd_cuda_run(self.handle, self.input_pointers, self.output_pointers, None, 0, table)
        if code:
            self._native.check(code)
        return list(table)[:launches]
