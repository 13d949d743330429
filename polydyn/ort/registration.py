"""Register the provider with ONNX Runtime, and open sessions that use it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from polydyn.errors import BuildError, UnsupportedError
from polydyn.onnx_runtime import ort_classes
from polydyn.ort.library import NAME, OLDEST_ORT, get_library_path
from polydyn.ort.settings import provider_options

SPINNING = "session.intra_op.allow_spinning"
"""Entry of a session's options: whether ONNX Runtime's threads wait actively."""
FIRST_BY_NAME = (1, 25)
"""First version of ONNX Runtime that finds a registered provider by its name."""


def register() -> None:
    """Register the provider with ONNX Runtime in this process; it can then be named in ``providers``.

    A second call has no effect. UnsupportedError: ONNX Runtime is not installed, or older than 1.23. BuildError: the
    library cannot be built or loaded.
    """
    onnxruntime = _onnxruntime()
    if _devices(onnxruntime):
        return
    path = get_library_path()
    try:
        onnxruntime.register_execution_provider_library(NAME, path)
    except Exception as e:  # ONNX Runtime's errors have no common base class
        raise BuildError(
            f"ONNX Runtime {onnxruntime.__version__} cannot load the provider: {e}", rule="polydyn.ort.register",
            remedy="polydyn cache clear, then try again",
        ) from e  # fmt: skip


def unregister() -> None:
    """Remove the provider. No session that uses it may exist."""
    onnxruntime = _onnxruntime()
    if _devices(onnxruntime):
        onnxruntime.unregister_execution_provider_library(NAME)


def devices() -> list[Any]:
    """Register the provider; return its devices, for ``SessionOptions.add_provider_for_devices``."""
    register()
    return _devices(_onnxruntime())


def session_options(sess_options: Any = None, **options: Any) -> Any:
    """Return options of a session that uses the provider: ``sess_options`` itself if it is not None.

    ``options``: see ``provider_options``. ``threads`` is ``intra_op_num_threads`` if that is set. ONNX Runtime's
    threads do not wait actively, unless the options say otherwise, because they would disturb the program's threads.
    """
    sess_options, texts = _prepared(sess_options, options)
    sess_options.add_provider_for_devices(devices(), texts)
    return sess_options


def _prepared(sess_options: Any, options: Mapping[str, Any]) -> tuple[Any, dict[str, str]]:
    """Return options of a session without waiting threads, and the options of the provider."""
    sess_options = ort_classes()[1]() if sess_options is None else sess_options
    if options.get("threads") is None and sess_options.intra_op_num_threads:
        options = {**options, "threads": sess_options.intra_op_num_threads}
    try:
        sess_options.get_session_config_entry(SPINNING)
    except Exception:  # ONNX Runtime's way to say that there is no such entry
        sess_options.add_session_config_entry(SPINNING, "0")
    return sess_options, provider_options(**options)


def InferenceSession(model: str | os.PathLike[str] | bytes, sess_options: Any = None, **options: Any) -> Any:
    """Return an ``onnxruntime.InferenceSession`` in which polydyn computes what it supports.

    ``model``: a path or bytes. ``options``: see ``provider_options``. Errors in the model are ONNX Runtime's.
    """
    return ort_classes()[0](model, session_options(sess_options, **options))


def install(**options: Any) -> None:
    """Let polydyn compute in every session for the CPU that this process opens by ``onnxruntime.InferenceSession``.

    ``options``: see ``provider_options``. Code that imported the class before keeps ONNX Runtime's own. A session that
    names another provider than ``CPUExecutionProvider`` is not changed. A second call changes the options.
    """
    onnxruntime = _onnxruntime()
    provider_options(**options)
    register()
    base, is_named = ort_classes()[0], _numbers(onnxruntime.__version__) >= FIRST_BY_NAME
    prepared: list[Any] = []  # options that have the provider already, because a caller uses them again

    class InferenceSession(base):  # type: ignore[misc, valid-type]
        """ONNX Runtime's session, with polydyn as its first provider."""

        def __init__(
            self, path_or_bytes: Any, sess_options: Any = None, providers: Any = None, *rest: Any, **more: Any
        ) -> None:
            if any(o is sess_options for o in prepared):
                providers = None
            elif _for_the_cpu(providers) and not _has_providers(sess_options):
                if is_named:
                    sess_options, texts = _prepared(sess_options, options)
                    providers = [(NAME, texts), "CPUExecutionProvider"]
                else:
                    sess_options, providers = session_options(sess_options, **options), None
                    prepared.append(sess_options)
            super().__init__(path_or_bytes, sess_options, providers, *rest, **more)

    onnxruntime.InferenceSession = InferenceSession


def _for_the_cpu(providers: Any) -> bool:
    """Whether the providers of a session are none, or the CPU's alone."""
    names = {p if isinstance(p, str) else p[0] for p in providers or ()}
    return names <= {"CPUExecutionProvider", "AzureExecutionProvider"}


def _has_providers(sess_options: Any) -> bool:
    return sess_options is not None and bool(getattr(sess_options, "has_providers", bool)())


def _devices(onnxruntime: Any) -> list[Any]:
    return [d for d in onnxruntime.get_ep_devices() if d.ep_name == NAME]


def _onnxruntime() -> Any:
    """Return the module. UnsupportedError: it is not installed, or too old."""
    ort_classes()
    import onnxruntime

    check_version(onnxruntime.__version__)
    return onnxruntime


def check_version(version: str) -> None:
    """Check a version of ONNX Runtime. UnsupportedError: it is too old for the provider."""
    if _numbers(version) < OLDEST_ORT:
        oldest = ".".join(map(str, OLDEST_ORT))
        raise UnsupportedError(
            f"ONNX Runtime {version} has no plugin interface for execution providers", rule="polydyn.ort",
            remedy=f"pip install 'onnxruntime>={oldest}', or use polydyn.InferenceSession",
        )  # fmt: skip


def _numbers(version: str) -> tuple[int, ...]:
    """Return the major and the minor number of a version."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))
