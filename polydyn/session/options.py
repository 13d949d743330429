"""SessionOptions and RunOptions: what is honoured, what has no meaning here, what is refused."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from enum import IntEnum
from typing import Any

from polydyn.compiler import Options
from polydyn.errors import InputError, UnsupportedError
from polydyn.fusion.pipeline import NAMES
from polydyn.program_cache import Arguments
from polydyn.session.refusals import Refusing, missing
from polydyn.shapes.sizes import Sizes, SizesLike


class GraphOptimizationLevel(IntEnum):
    """``ORT_DISABLE_ALL`` leaves out every fusion pass; all others are the same."""

    ORT_DISABLE_ALL = 0
    ORT_ENABLE_BASIC = 1
    ORT_ENABLE_EXTENDED = 2
    ORT_ENABLE_LAYOUT = 3
    ORT_ENABLE_ALL = 99


class ExecutionMode(IntEnum):
    """Has no meaning here: launches that need nothing of each other always run side by side."""

    ORT_SEQUENTIAL = 0
    ORT_PARALLEL = 1


class ExecutionOrder(IntEnum):
    """Has no meaning here: the order follows from the memory plan."""

    DEFAULT = 0
    PRIORITY_BASED = 1
    MEMORY_EFFICIENT = 2


NO_MEANING: Mapping[str, Any] = {
    "enable_cpu_mem_arena": True,
    "enable_mem_pattern": True,
    "enable_mem_reuse": True,
    "execution_mode": ExecutionMode.ORT_SEQUENTIAL,
    "execution_order": ExecutionOrder.DEFAULT,
    "inter_op_num_threads": 0,
    "log_severity_level": -1,
    "log_verbosity_level": 0,
    "logid": "",
    "use_deterministic_compute": False,
    "use_per_session_threads": True,
}
"""Options that are kept and change nothing, with their first values: memory is planned when a model is compiled,
results do not depend on threads or runs, every program has a pool of its own, and nothing is logged."""

OWN = "polydyn."
"""Session config entries that begin so are arguments of ``polydyn.compile``."""


class _Entries(Refusing):
    """Named values that can be set, and config entries by key."""

    _VALUES: Mapping[str, Any] = {}

    def __init__(self) -> None:
        self.__dict__.update(self._VALUES)
        self.__dict__["entries"] = {}

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self._VALUES:
            raise missing(type(self).__name__, name)
        self.__dict__[name] = value

    def _add(self, key: str, value: str) -> None:
        if not key.startswith(OWN):
            warnings.warn(f"config entry {key!r} has no meaning in polydyn and changes nothing", stacklevel=3)
        self.entries[key] = value

    def _get(self, key: str) -> str:
        try:
            found: str = self.entries[key]
        except KeyError:
            raise InputError(f"no config entry {key!r} was added", remedy="add it first") from None
        return found


class SessionOptions(_Entries):
    """How a model is compiled and run.

    Honoured: ``intra_op_num_threads`` (threads of every call, 0 for all cores), ``graph_optimization_level``,
    ``enable_profiling`` with ``profile_file_prefix``, ``optimized_model_filepath`` (the compiled program is saved there
    and can be opened as a session), ``add_free_dimension_override_by_name`` and ``..._by_denotation``, and the config
    entries ``polydyn.dim.NAME`` ("1:64", as ``--dim`` has it), ``polydyn.records``, ``polydyn.strategy``,
    ``polydyn.without`` ("stitch,merge"), ``polydyn.tf32`` ("1"), ``polydyn.precision`` ("bf16", "3xtf32"),
    ``polydyn.winograd`` ("4"), ``polydyn.fallback`` ("onnxruntime") and ``polydyn.target``.
    ``NO_MEANING`` lists what changes nothing.
    """

    _VALUES: Mapping[str, Any] = {
        **NO_MEANING,
        "enable_profiling": False,
        "graph_optimization_level": GraphOptimizationLevel.ORT_ENABLE_ALL,
        "intra_op_num_threads": 0,
        "optimized_model_filepath": "",
        "profile_file_prefix": "polydyn_profile_",
    }

    def __init__(self) -> None:
        super().__init__()
        self.__dict__.update(dims={}, denotations={}, providers=[])

    def add_free_dimension_override_by_name(self, dim_name: str, dim_value: int) -> None:
        """The dim of this name has this size; calls with another are refused."""
        self.dims[dim_name] = Sizes(dim_value, dim_value)

    def add_free_dimension_override_by_denotation(self, denotation: str, dim_value: int) -> None:
        """All dims of this denotation have this size."""
        self.denotations[denotation] = Sizes(dim_value, dim_value)

    def add_session_config_entry(self, key: str, value: str) -> None:
        """Keys that begin with ``polydyn.`` count; others are kept, with a warning."""
        self._add(key, value)

    def get_session_config_entry(self, key: str) -> str:
        """The value that was added. InputError: none was."""
        return self._get(key)

    def add_provider(self, provider_name: str, provider_options: Mapping[str, str] | None = None) -> None:
        """As the next of ``providers``."""
        self.providers.append((provider_name, dict(provider_options or {})))

    def has_providers(self) -> bool:
        """Whether ``add_provider`` was called."""
        return bool(self.providers)

    @property
    def threads(self) -> int | None:
        """Of every call; None: all cores."""
        return int(self.intra_op_num_threads) or None

    def arguments(self, target: str, denoted: Mapping[str, list[str]]) -> Arguments:
        """What to compile with; ``denoted``: denotation -> names of the model's dims. InputError: a bad entry."""
        dims: dict[str, SizesLike] = dict(self.dims)
        for denotation, sizes in self.denotations.items():
            if denotation not in denoted:
                raise InputError(
                    f"no named dim of the model has the denotation {denotation!r}", dim=denotation,
                    remedy="use add_free_dimension_override_by_name",
                )  # fmt: skip
            dims |= dict.fromkeys(denoted[denotation], sizes)
        known = {"records", "strategy", "without", "tf32", "target", "fallback", "precision", "winograd"}
        said: dict[str, str] = {}
        for key, value in self.entries.items():
            name = key.removeprefix(OWN)
            if name == key:
                continue
            if name.startswith("dim."):
                dims[name[4:]] = Sizes.parse(value)
            elif name in known:
                said[name] = value
            else:
                raise InputError(f"there is no config entry {key}", remedy=f"polydyn.dim.NAME, {', '.join(known)}")
        without = set(filter(None, said.get("without", "").split(",")))
        if self.graph_optimization_level == GraphOptimizationLevel.ORT_DISABLE_ALL:
            without = set(NAMES)
        strategy, tf32 = said.get("strategy", Options.strategy), said.get("tf32", "0") == "1"
        side = said.get("winograd", str(Options.winograd))
        if not side.isdecimal():
            raise InputError(f"polydyn.winograd is {side!r}", remedy="a number of pixels")
        options = Options(without, strategy, tf32, said.get("fallback"), said.get("precision"), int(side))
        return Arguments(said.get("target", target), dims, options, said.get("records"))


class RunOptions(_Entries):
    """How one call runs: nothing changes it. ``terminate`` cannot be set: a call is not stopped halfway."""

    _VALUES: Mapping[str, Any] = {
        "log_severity_level": -1,
        "log_verbosity_level": 0,
        "logid": "",
        "only_execute_path_to_fetches": False,
        "terminate": False,
    }

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "terminate" and value:
            raise UnsupportedError("a call is not stopped halfway", rule="RunOptions.terminate", remedy="leave it")
        super().__setattr__(name, value)

    def add_run_config_entry(self, key: str, value: str) -> None:
        """Is kept, with a warning: nothing of it has a meaning here."""
        self._add(key, value)

    def get_run_config_entry(self, key: str) -> str:
        """The value that was added. InputError: none was."""
        return self._get(key)
