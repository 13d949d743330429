"""InferenceSession: a compiled program with the interface of ONNX Runtime's sessions."""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any

import numpy as np

from polydyn.arguments import checked_mapping, checked_text, wrong_type
from polydyn.errors import InputError, PolydynError, UnknownNameError, UnsupportedError
from polydyn.program_cache import cached_program
from polydyn.runtime.artifact import ZIP, is_artifact
from polydyn.runtime.opening import load
from polydyn.runtime.program import Program
from polydyn.session.binding import IOBinding
from polydyn.session.missing_names import DOCUMENT, Refusing
from polydyn.session.options import RunOptions, SessionOptions
from polydyn.session.values import ModelMetadata, NodeArg, OrtValue, checked_value, tensor_type

if TYPE_CHECKING:
    import onnx

    from polydyn.session.trace import Trace

Provider = str | tuple[str, Mapping[str, Any]]

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"


def get_available_providers() -> list[str]:
    """Return the CPU provider, preceded by CUDA if there is a device that kernels can be compiled for."""
    return [CUDA, CPU] if cuda_target() else [CPU]


def cuda_target(device_id: int = 0) -> str:
    """Return the target of a CUDA device of this machine; empty if there is none that polydyn supports."""
    from polydyn.gpu.errors import DeviceError  # sessions on the CPU need no driver
    from polydyn.gpu.targets import EMULATED, named
    from polydyn.runtime.cuda.images import is_emulated
    from polydyn.runtime.cuda.session import open_session

    try:
        driver = open_session(device_id).driver
    except DeviceError:
        return ""
    arch = EMULATED if is_emulated(driver) else named(driver.arch)
    return f"cuda:{arch}" if arch else ""


class InferenceSession(Refusing):
    """A model, compiled once for every shape, with the methods of ``onnxruntime.InferenceSession``.

    The compiled program is cached by content, so a second session of the same model opens it quickly. Names that
    polydyn does not have raise an error; docs/switching.md lists all of them.
    """

    def __init__(
        self,
        path_or_bytes: str | bytes | os.PathLike[str],
        sess_options: SessionOptions | None = None,
        providers: Sequence[Provider] | None = None,
        provider_options: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> None:
        """``path_or_bytes``: a model, or a saved program. ``providers``: the first one that this machine has is used,
        with a warning for the earlier ones. Raises PolydynError; there is no fallback to an unnamed provider.
        """
        unknown = sorted(kwargs.keys() - {"enable_fallback"})
        if unknown:
            raise UnsupportedError(f"InferenceSession has no argument '{unknown[0]}'", remedy=DOCUMENT)
        self._options = SessionOptions() if sess_options is None else sess_options
        if not isinstance(self._options, SessionOptions):
            raise InputError(
                f"sess_options is of the class {type(sess_options).__module__}.{type(sess_options).__name__}",
                remedy="make it with polydyn.SessionOptions()",
            )
        self._model = path_or_bytes
        self._model_path = str(path_or_bytes) if isinstance(path_or_bytes, (str, os.PathLike)) else None  # for optimum
        self._open(providers if providers is not None else self._options.providers or None, provider_options)

    def __repr__(self) -> str:
        return f"<InferenceSession of {self.program!r}>"

    def _repr_html_(self) -> str:
        return self.program._repr_html_()

    def _open(self, providers: Sequence[Provider] | None, options: Sequence[Mapping[str, Any]] | None) -> None:
        self._provider, self._provider_options, target = choose_provider(providers, options)
        saved = _saved(self._model)
        if saved is None:
            denoted = _denoted(_headers(self._model)) if self._options.denotations else {}
            arguments = self._options.arguments(target, denoted)
            self.program: Program = cached_program(
                self._model, arguments, threads=self._options.threads, start=self._options.start
            )
        else:
            self.program = load(saved, threads=self._options.threads, trust=self._options.trust)
            if ("cuda" in self.program.manifest) != (self._provider == CUDA):
                raise InputError(
                    f"{saved} is compiled for {self.program.manifest['target']}, not for {self._provider}",
                    remedy=f"name providers=[{CUDA if 'cuda' in self.program.manifest else CPU!r}]",
                )
        self._inputs = _arguments(self.program.arguments("inputs"))
        self._outputs = _arguments(self.program.arguments("outputs"))
        self._trace = _new_trace(self._options.profile_file_prefix) if self._options.enable_profiling else None
        if self._options.optimized_model_filepath:
            self.program.save(self._options.optimized_model_filepath)

    # -- running -----------------------------------------------------------------------------------------------------

    def run(
        self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any], run_options: RunOptions | None = None
    ) -> list[Any]:
        """Return the outputs with these names in this order; all outputs for None or an empty list. All are computed.

        ``input_feed``: input name -> numpy array, OrtValue, or a list (which gets the input's dtype). InputError: see
        ``Program.run``.
        """
        names = self._names(output_names)
        _check_run_options(run_options)
        feeds = {n: self._array(n, v) for n, v in _feed(input_feed).items()}
        results = self._traced(lambda: self.program.run(feeds), feeds)
        return [self._host(results[n]) for n in names]

    def run_with_ort_values(
        self, output_names: Sequence[str] | None, input_dict_ort_values: Mapping[str, OrtValue],
        run_options: RunOptions | None = None,
    ) -> list[OrtValue]:  # fmt: skip
        """Like ``run``, with OrtValues as inputs and outputs. Outputs are on a device if an input is."""
        names = self._names(output_names)
        _check_run_options(run_options)
        feeds = {n: checked_value(v, f"input {n!r}").array for n, v in _feed(input_dict_ort_values).items()}
        results = self._traced(lambda: self.program.run(feeds), feeds)
        dtypes = {o["name"]: o["dtype"] for o in self.program.arguments("outputs")}
        return [OrtValue(results[n], dtypes[n]) for n in names]

    def run_async(
        self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any],
        callback: Callable[[list[Any], Any, str], None], user_data: Any, run_options: RunOptions | None = None,
    ) -> None:  # fmt: skip
        """Call ``run`` in a new thread, then ``callback(results, user_data, error)``; ``error`` is "" on success.

        InputError: the callback is not callable.
        """
        if not callable(callback):
            raise InputError(f"the callback is a {type(callback).__name__}", remedy="pass a function of 3 arguments")

        def work() -> None:
            try:
                results, error = self.run(output_names, input_feed, run_options), ""
            except PolydynError as e:
                results, error = [], str(e)
            except Exception as e:  # the callback must run in any case
                results, error = [], f"{type(e).__name__}: {e}"
            callback(results, user_data, error)

        threading.Thread(target=work, daemon=True).start()

    def io_binding(self) -> IOBinding:
        """Return a binding of inputs and outputs to fixed memory, for ``run_with_iobinding``."""
        return IOBinding(self)

    def run_with_iobinding(self, iobinding: IOBinding, run_options: RunOptions | None = None) -> None:
        """Run one call on the bound tensors. InputError: the binding is incomplete or belongs to another session."""
        if not isinstance(iobinding, IOBinding):
            wrong_type("iobinding", iobinding, "the io_binding() of this session")
        _check_run_options(run_options)
        if iobinding._program is not self.program:
            raise InputError("the binding belongs to another session", remedy="use the io_binding() of this session")
        feeds = {n: v.array for n, v in iobinding._inputs.items()}
        self._traced(iobinding.run, feeds)

    def _traced(self, call: Callable[[], Any], feeds: Mapping[str, Any]) -> Any:
        if self._trace is None:
            return call()
        from polydyn.session.trace import call_events  # few sessions write a trace

        start = time.monotonic_ns()
        results = call()
        self._trace.add(start, time.monotonic_ns(), call_events(self.program, feeds, repeats=1))
        return results

    def _names(self, requested: Sequence[str] | None) -> list[str]:
        known = [o.name for o in self._outputs]
        if requested is None:
            return known
        if isinstance(requested, (str, bytes)) or not isinstance(requested, Iterable):
            wrong_type("output_names", requested, f"None or a list of names, as in {known}")
        names = list(requested) or known
        for name in names:
            if not isinstance(name, str):
                wrong_type("a name in output_names", name, f"names, as in {known}")
            if name not in known:
                remedy = f"its outputs are {', '.join(known)}"
                raise UnknownNameError(f"the model has no output '{name}'", tensor=name, remedy=remedy)
        return names

    def _array(self, name: str, value: Any) -> Any:
        if isinstance(value, OrtValue):
            return value.array
        if isinstance(value, (list, tuple, int, float, bool)):
            every = (*self.program.arguments("inputs"), *self.program.arguments("optional"))
            dtype = next((i["dtype"] for i in every if i["name"] == name), None)
            try:
                return np.asarray(value, object if dtype == "string" else dtype)
            except (TypeError, ValueError, OverflowError) as e:
                raise InputError(
                    f"input '{name}' is not an array of {dtype}: {e}", tensor=name, remedy="pass a numpy array"
                ) from e
        return value

    @staticmethod
    def _host(result: Any) -> Any:
        return result if isinstance(result, (np.ndarray, list)) else result.numpy()

    # -- the model ---------------------------------------------------------------------------------------------------

    def get_inputs(self) -> list[NodeArg]:
        """Return the inputs in the model's order."""
        return list(self._inputs)

    def get_outputs(self) -> list[NodeArg]:
        """Return the outputs in the model's order."""
        return list(self._outputs)

    def get_overridable_initializers(self) -> list[NodeArg]:
        """Return the initializers that are also inputs; ``run`` may override their values."""
        return _arguments(self.program.arguments("optional"))

    def get_modelmeta(self) -> ModelMetadata:
        """Return the model's metadata. UnsupportedError: an older polydyn saved the program without it."""
        metadata = self.program.manifest.get("metadata")
        if not metadata:
            raise UnsupportedError(
                "the saved program does not hold the model's metadata", rule="get_modelmeta",
                remedy="compile the model again",
            )  # fmt: skip
        return ModelMetadata(**metadata)

    def get_session_options(self) -> SessionOptions:
        """Return the options of the session."""
        return self._options

    def get_providers(self) -> list[str]:
        """Return the provider that runs the model, as a list."""
        return [self._provider]

    def get_provider_options(self) -> dict[str, dict[str, str]]:
        """Return a mapping from the provider to its options as text."""
        return {self._provider: self._provider_options}

    def set_providers(
        self, providers: Sequence[Provider] | None = None, provider_options: Sequence[Mapping[str, Any]] | None = None
    ) -> None:
        """Open the model again for other providers."""
        self._open(providers, provider_options)

    def disable_fallback(self) -> None:
        """Has no effect: there is no fallback."""

    # -- profiling ---------------------------------------------------------------------------------------------------

    def end_profiling(self) -> str:
        """Write the trace of all calls so far (Chrome's format) and return its path. InputError: not enabled."""
        if self._trace is None:
            raise InputError("profiling is not enabled", remedy="set SessionOptions.enable_profiling before")
        return self._trace.write()

    def get_profiling_start_time_ns(self) -> int:
        """Return the start of profiling in ``time.monotonic_ns``; 0 without profiling."""
        return self._trace.start if self._trace is not None else 0


def _new_trace(prefix: str) -> Trace:
    """Return an empty trace, whose module few sessions need."""
    from polydyn.session.trace import Trace

    return Trace(prefix)


def _feed(feed: Any) -> Mapping[str, Any]:
    """Return the inputs by name. InputError: they are not a mapping."""
    return checked_mapping(feed, "input_feed", "a dict: input name -> array")


def _check_run_options(options: Any) -> None:
    """Check the options of a call, which have no effect. WrongTypeError: polydyn has not made them."""
    if options is not None and not isinstance(options, RunOptions):
        wrong_type("run_options", options, "None or a polydyn.session.RunOptions()")


def choose_provider(
    providers: Sequence[Provider] | None, options: Sequence[Mapping[str, Any]] | None
) -> tuple[str, dict[str, str], str]:
    """Return name, options and target of the first provider that this machine has. UnsupportedError: it has none."""
    pairs = provider_pairs(providers, options)
    for k, (name, inline) in enumerate(pairs):
        settings = {str(a): str(b) for a, b in inline.items()}
        if name == CPU:
            return name, settings, "cpu"
        if name == CUDA and (target := cuda_target(_device_id(settings))):
            return name, settings, target
        if k + 1 < len(pairs):
            warnings.warn(f"provider {name!r} is not available, the next one is {pairs[k + 1][0]!r}", stacklevel=4)
    raise UnsupportedError(
        f"provider {pairs[-1][0]!r} is not available", rule="providers",
        remedy=f"this machine has {', '.join(get_available_providers())}; name one of them",
    )  # fmt: skip


def provider_pairs(
    providers: Sequence[Provider] | None, options: Sequence[Mapping[str, Any]] | None
) -> list[tuple[str, Mapping[str, Any]]]:
    """Return names with options. WrongTypeError: an argument is not a list of what it should be."""
    if isinstance(providers, (str, bytes)) or not isinstance(providers, (Iterable, NoneType)):
        wrong_type("providers", providers, f"a list, as in [{CPU!r}]")
    pairs: list[tuple[str, Mapping[str, Any]]] = []
    for p in () if providers is None else providers:
        name, inline = p if isinstance(p, (tuple, list)) and len(p) == 2 else (p, {})
        role = f"the options of {checked_text(name, 'a provider, or the first of its pair with options,')}"
        pairs.append((name, checked_mapping(inline, role, "a dict")))
    if options is None:
        return pairs or [(CPU, {})]
    if isinstance(options, (str, bytes, Mapping)) or not isinstance(options, Iterable):
        wrong_type("provider_options", options, "a list of a dict for each provider")
    given = [checked_mapping(o, "an element of provider_options", "a dict") for o in options]
    if len(given) != len(pairs):
        raise InputError("providers and provider_options differ in length", remedy="give options for each provider")
    return [(name, o) for (name, _), o in zip(pairs, given, strict=True)] or [(CPU, {})]


def _device_id(settings: Mapping[str, str]) -> int:
    """Return the number of the device. InputError: it is not one."""
    text = settings.get("device_id", "0")
    if not text.isdecimal():
        remedy = "pass the number of a device, as in 0"
        raise InputError(f"device_id is {text!r}", rule="provider options", remedy=remedy)
    return int(text)


def _saved(model: Any) -> Path | None:
    """Return the path of a saved program, or None for a model. InputError: ``model`` is neither a path nor bytes."""
    if isinstance(model, (bytes, bytearray, memoryview)):
        if bytes(model[: len(ZIP)]) == ZIP:
            raise InputError("a saved program is opened by its path", remedy="write the bytes to a file")
        return None
    if not isinstance(model, (str, os.PathLike)):
        from polydyn.graph.importer import remedy_of  # imports onnx

        proto = hasattr(model, "SerializeToString")
        remedy = "give model.SerializeToString(), or call polydyn.compile(model)" if proto else remedy_of(model)
        raise InputError(f"a {type(model).__name__} is not a model of a session", remedy=remedy)
    return Path(model) if is_artifact(model) else None  # compilation reports a wrong path


def _headers(model: Any) -> onnx.ModelProto:
    """Return the model without its external data; empty if it cannot be read, because compilation reports that."""
    import onnx  # only overrides by denotation need it

    proto = onnx.ModelProto()
    try:
        proto.ParseFromString(bytes(model) if not isinstance(model, (str, os.PathLike)) else Path(model).read_bytes())
    except Exception:  # protobuf's errors have no common base class
        return onnx.ModelProto()
    return proto


def _denoted(model: onnx.ModelProto) -> dict[str, list[str]]:
    """Return a mapping from denotation to the names of the input dims that have it."""
    out: dict[str, list[str]] = {}
    for i in model.graph.input:
        for d in i.type.tensor_type.shape.dim:
            if d.denotation and d.dim_param:
                out.setdefault(d.denotation, []).append(d.dim_param)
    return out


def _arguments(declared: Sequence[Mapping[str, Any]]) -> list[NodeArg]:
    return [
        NodeArg(d["name"], tensor_type(d["dtype"]), [int(s) if s.isdecimal() else s for s in d["shape"]])
        for d in declared
    ]
