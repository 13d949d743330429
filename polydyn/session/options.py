"""SessionOptions and RunOptions: supported options, options without effect, and errors for all others."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from polydyn.arguments import CODE, checked_flag, checked_integer, checked_mapping, checked_text
from polydyn.backends.options import Options
from polydyn.errors import InputError, UnsupportedError
from polydyn.program_key import Arguments
from polydyn.session.missing_names import Refusing, missing

if TYPE_CHECKING:
    from polydyn.schedules.handmade.document import Written
    from polydyn.shapes.sizes import Sizes, SizesLike


class GraphOptimizationLevel(IntEnum):
    """``ORT_DISABLE_ALL`` leaves out every fusion pass; all other levels are equal."""

    ORT_DISABLE_ALL = 0
    ORT_ENABLE_BASIC = 1
    ORT_ENABLE_EXTENDED = 2
    ORT_ENABLE_LAYOUT = 3
    ORT_ENABLE_ALL = 99


class ExecutionMode(IntEnum):
    """Has no effect: independent launches always run in parallel."""

    ORT_SEQUENTIAL = 0
    ORT_PARALLEL = 1


class ExecutionOrder(IntEnum):
    """Has no effect: the order follows from the memory plan."""

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
"""Options that are stored but have no effect, with their default values. Memory is planned at compile time, results do
not depend on threads or runs, every program has its own pool, and nothing is logged."""

PREFIX = "polydyn."
"""Prefix of the session config entries that are arguments of ``polydyn.compile``."""


class _Entries(Refusing):
    """Named options that can be set, and config entries by key."""

    _VALUES: Mapping[str, Any] = {}

    def __init__(self) -> None:
        self.__dict__.update(self._VALUES)
        self.__dict__["entries"] = {}

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self._VALUES:
            raise missing(type(self).__name__, name)
        self.__dict__[name] = _like(self._VALUES[name], value, f"{type(self).__name__}.{name}")

    def _add(self, key: str, value: str) -> None:
        checked_text(value, f"the value of the config entry {key!r}")
        if not checked_text(key, "the key of a config entry").startswith(PREFIX):
            warnings.warn(f"config entry {key!r} has no meaning in polydyn and changes nothing", stacklevel=3)
        self.entries[key] = value

    def _get(self, key: str) -> str:
        try:
            value: str = self.entries[checked_text(key, "the key of a config entry")]
        except KeyError:
            raise InputError(f"no config entry {key!r} was added", remedy="add it first") from None
        return value


def _like(default: Any, value: Any, role: str) -> Any:
    """Return the value of an option. WrongTypeError: it is of another kind than the default. InputError: an enumeration
    does not have it."""
    if isinstance(default, bool):
        return checked_flag(value, role)
    if isinstance(default, str):
        return str(value) if isinstance(value, os.PathLike) else checked_text(value, role)
    checked_integer(value, role)
    if isinstance(default, IntEnum) and value not in [m.value for m in type(default)]:
        members = ", ".join(f"{m.name} ({m.value})" for m in type(default))
        raise InputError(f"{role} is {value}", remedy=f"use a member of {type(default).__name__}: {members}")
    return value


class SessionOptions(_Entries):
    """The options to compile and run a model.

    Supported: ``intra_op_num_threads`` (threads per call, 0 for all cores), ``graph_optimization_level``,
    ``enable_profiling`` with ``profile_file_prefix``, ``optimized_model_filepath`` (the compiled program is saved there
    and can be opened as a session), ``add_free_dimension_override_by_name`` and ``..._by_denotation``, and the config
    entries ``polydyn.dim.NAME`` ("1:64", like ``--dim``), ``polydyn.records``, ``polydyn.strategy``,
    ``polydyn.without`` ("stitch,merge"), ``polydyn.tf32`` ("1"), ``polydyn.precision`` ("bf16", "3xtf32"),
    ``polydyn.winograd`` ("4"), ``polydyn.fallback`` ("onnxruntime"), ``polydyn.target``, ``polydyn.start``
    ("quick") and ``polydyn.trust`` ("sources", for a saved program). The options in ``NO_MEANING`` have no effect.
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
        """Fix the size of the dim with this name; calls with another size are rejected."""
        self.dims[checked_text(dim_name, "dim_name")] = _one(dim_value)

    def add_free_dimension_override_by_denotation(self, denotation: str, dim_value: int) -> None:
        """Fix the size of all dims with this denotation."""
        self.denotations[checked_text(denotation, "denotation")] = _one(dim_value)

    def add_session_config_entry(self, key: str, value: str) -> None:
        """Add a config entry. Keys with prefix ``polydyn.`` have an effect; others are stored with a warning."""
        self._add(key, value)

    def get_session_config_entry(self, key: str) -> str:
        """Return the value of an added entry. InputError: the key was not added."""
        return self._get(key)

    def add_provider(self, provider_name: str, provider_options: Mapping[str, str] | None = None) -> None:
        """Add a provider after the earlier ones."""
        options = checked_mapping({} if provider_options is None else provider_options, "provider_options", "a dict")
        self.providers.append((checked_text(provider_name, "provider_name"), dict(options)))

    def has_providers(self) -> bool:
        """Return whether ``add_provider`` was called."""
        return bool(self.providers)

    @property
    def threads(self) -> int | None:
        """Threads per call; None for all cores."""
        return int(self.intra_op_num_threads) or None

    @property
    def start(self) -> str:
        """The argument ``start`` of ``polydyn.compile``."""
        start: str = self.entries.get(f"{PREFIX}start", "full")
        return start

    @property
    def trust(self) -> str:
        """The argument ``trust`` of ``polydyn.load``, for a saved program."""
        trust: str = self.entries.get(f"{PREFIX}trust", CODE)
        return trust

    def arguments(self, target: str, denoted: Mapping[str, list[str]]) -> Arguments:
        """Return the arguments to compile with. ``denoted`` maps a denotation to names of the model's dims. InputError:
        an entry is wrong."""
        dims: dict[str, SizesLike] = dict(self.dims)
        for denotation, sizes in self.denotations.items():
            if denotation not in denoted:
                raise InputError(
                    f"no named dim of the model has the denotation {denotation!r}", dim=denotation,
                    remedy="use add_free_dimension_override_by_name",
                )  # fmt: skip
            dims |= dict.fromkeys(denoted[denotation], sizes)
        known = {
            "start", "records", "schedules", "strategy", "without", "tf32", "target", "fallback", "precision",
            "winograd", "trust",
        }  # fmt: skip
        values: dict[str, str] = {}
        for key, value in self.entries.items():
            name = key.removeprefix(PREFIX)
            if name == key:
                continue
            if name.startswith("dim."):
                dims[name[4:]] = _parsed(value)
            elif name in known:
                values[name] = value
            else:
                listed = ", ".join(f"{PREFIX}{n}" for n in ("dim.NAME", *sorted(known)))
                raise InputError(f"there is no config entry {key}", remedy=f"use one of {listed}")
        without = set(filter(None, values.get("without", "").split(",")))
        if self.graph_optimization_level == GraphOptimizationLevel.ORT_DISABLE_ALL:
            from polydyn.fusion.pipeline import NAMES  # loads the passes

            without = set(NAMES)
        strategy, tf32 = values.get("strategy", Options.strategy), values.get("tf32", "0")
        if tf32 not in ("0", "1"):
            raise InputError(f"{PREFIX}tf32 is {tf32!r}", remedy="set it to '0' or '1'")
        side = values.get("winograd", str(Options.winograd))
        if not side.isdecimal():
            raise InputError(f"{PREFIX}winograd is {side!r}", remedy="set it to a number of pixels, as in '4'")
        options = Options(without, strategy, tf32 == "1", values.get("fallback"), values.get("precision"), int(side))
        schedules: tuple[Written, ...] = ()
        if "schedules" in values:
            from polydyn.schedules.handmade.document import read_schedules

            schedules = tuple(read_schedules(values["schedules"]))
        records = values.get("records")
        return Arguments(values.get("target", target), dims, options, records, schedules=schedules)


def _one(size: Any) -> Sizes:
    """Return the sizes of a dim that has only one. InputError: it is not a size."""
    from polydyn.shapes.sizes import Sizes  # few sessions restrict a dim

    number = checked_integer(size, "dim_value")
    return Sizes(number, number)


def _parsed(text: str) -> Sizes:
    """Return the sizes that a config entry describes. ShapeError: it describes none."""
    from polydyn.shapes.sizes import Sizes

    return Sizes.parse(text)


class RunOptions(_Entries):
    """The options of one call; none has an effect. ``terminate`` cannot be set, because a call cannot be stopped."""

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
        """Store an entry with a warning: it has no effect."""
        self._add(key, value)

    def get_run_config_entry(self, key: str) -> str:
        """Return the value of an added entry. InputError: the key was not added."""
        return self._get(key)
