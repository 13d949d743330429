"""User statements about a dynamic dim: its range, a multiple, and the likely sizes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isclose, lcm
from typing import Any, TypeAlias, Union

from polydyn.errors import ShapeError


@dataclass(frozen=True)
class Sizes:
    """The sizes that a dynamic dim may have.

    ``low``, ``high``: inclusive bounds; ``high`` None means no upper bound. ``multiple``: every size is a multiple of
    it. Both are checked on every call and used in proofs. ``likely``: sizes to tune for; they restrict nothing.
    ``probabilities``: probabilities of the likely sizes, in the same order, with sum 1; if empty, these are equally
    likely. Raises ShapeError if no size is left, or a likely size is not allowed.
    """

    low: int = 0
    high: int | None = None
    multiple: int = 1
    likely: tuple[int, ...] = ()
    probabilities: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for field in ("likely", "probabilities"):
            numbers = getattr(self, field)
            if isinstance(numbers, str) or not isinstance(numbers, Iterable):
                raise ShapeError(f"{field} is {numbers!r}", remedy=f"give a tuple, as in {field}=({numbers!r},)")
            object.__setattr__(self, field, tuple(numbers))
        whole = [self.low, self.multiple, *self.likely, *([] if self.high is None else [self.high])]
        odd = next((n for n in whole if isinstance(n, bool) or not isinstance(n, int)), None)
        if odd is not None:
            raise ShapeError(f"{odd!r} is not a size", remedy="give integers")
        if self.multiple < 1:
            raise ShapeError(f"sizes cannot be multiples of {self.multiple}", remedy="give a multiple >= 1")
        first, last = self.bounds
        if self.low < 0 or (last is not None and last < first):
            raise ShapeError(f"the range {self.range_text()} holds no size", remedy="give 0 <= low <= high")
        self._check_likely()

    def _check_likely(self) -> None:
        outside = [n for n in self.likely if not self.holds(n)]
        if outside:
            raise ShapeError(
                f"the likely size {outside[0]} is not in the range {self.range_text()}",
                remedy="give likely sizes that the range allows",
            )
        if len(set(self.likely)) < len(self.likely):
            raise ShapeError(f"a likely size is given twice: {list(self.likely)}", remedy="give each once")
        if not self.probabilities:
            return
        if len(self.probabilities) != len(self.likely):
            raise ShapeError(
                f"{len(self.probabilities)} probabilities for {len(self.likely)} likely sizes", remedy="give one each"
            )
        total = sum(self.probabilities)
        if min(self.probabilities) < 0 or not isclose(total, 1, abs_tol=1e-6):
            raise ShapeError(
                f"the probabilities {list(self.probabilities)} add up to {total:g}",
                remedy="give numbers >= 0 that add up to 1",
            )

    @classmethod
    def parse(cls, text: str) -> Sizes:
        """Parse ``1:64``, ``8:512:8`` (multiples of 8), ``1:512@128:0.6,384:0.4`` or ``1:512@128,384`` (likely sizes).

        ``1:`` has no upper bound, ``7`` is one size. Raises ShapeError for another form, or if no such sizes exist.
        """
        span, _, likely = text.partition("@")
        try:
            low, *rest = span.split(":")
            if len(rest) > 2:
                raise ValueError
            pairs = [item.partition(":")[::2] for item in likely.split(",")] if likely else []
            high = int(low) if not rest else int(rest[0]) if rest[0] else None
            return cls(
                int(low), high, int(rest[1]) if len(rest) == 2 else 1,
                tuple(int(n) for n, _ in pairs), tuple(float(p) for _, p in pairs if p),
            )  # fmt: skip
        except ShapeError:
            raise
        except ValueError:
            raise ShapeError(
                f"{text!r} does not describe sizes", rule="low:high:multiple@likely",
                remedy="write 1:64, 8:512:8 or 1:512@128:0.6,384:0.4",
            ) from None  # fmt: skip

    @property
    def bounds(self) -> tuple[int, int | None]:
        """The minimum and maximum allowed size (multiples counted)."""
        m = self.multiple
        return -(-self.low // m) * m, None if self.high is None else self.high // m * m

    def holds(self, size: int) -> bool:
        """Check whether a size is in the range and a multiple."""
        return self.low <= size and (self.high is None or size <= self.high) and size % self.multiple == 0

    def range_text(self) -> str:
        """Return ``1..512``, with the multiple if there is one."""
        end = "" if self.high is None else str(self.high)
        return f"{self.low}..{end}" + (f", multiples of {self.multiple}" if self.multiple > 1 else "")

    def __str__(self) -> str:
        shares = self.probabilities or (None,) * len(self.likely)
        likely = [
            str(n) if p is None else f"{n} ({100 * p:g} %)" for n, p in zip(self.likely, shares, strict=True)
        ]  # fmt: skip
        return self.range_text() + (f", likely {', '.join(likely)}" if likely else "")

    def to_json(self) -> dict[str, Any]:
        """Return plain data for manifests."""
        return {
            "low": self.low, "high": self.high, "multiple": self.multiple,
            "likely": list(self.likely), "probabilities": list(self.probabilities),
        }  # fmt: skip


SizesLike: TypeAlias = Union[Sizes, "tuple[int, int | None]"]
"""Accepted values for a dim: ``Sizes``, or just (low, high)."""
Dims: TypeAlias = Mapping[str, SizesLike]
"""Dynamic dims by name."""


def both(a: Sizes, b: Sizes) -> Sizes:
    """Return the sizes that both allow, with the likely ones of ``a``. ShapeError: there are none."""
    highs = [s.high for s in (a, b) if s.high is not None]
    return replace(a, low=max(a.low, b.low), high=min(highs, default=None), multiple=lcm(a.multiple, b.multiple))


def _pair(value: object) -> tuple[Any, Any]:
    """Return (low, high). TypeError, ValueError: the value is no sequence of two."""
    if not isinstance(value, Sequence):
        raise TypeError
    low, high = value
    return low, high


def sizes_by_name(dims: Dims | None) -> dict[str, Sizes]:
    """Convert all values to ``Sizes``. Raises ShapeError that names the dim."""
    out: dict[str, Sizes] = {}
    dims = {} if dims is None else dims
    if not isinstance(dims, Mapping):
        raise ShapeError(f"dims is {dims!r}", rule="name -> sizes", remedy="dims={'L': (1, 512)}")
    for name, value in dims.items():
        given: object = value
        if isinstance(given, str):
            remedy = f"give (low, high), or polydyn.Sizes.parse({given!r})"
            raise ShapeError(f"the text {given!r} does not describe sizes", dim=name, remedy=remedy)
        try:
            out[name] = value if isinstance(value, Sizes) else Sizes(*_pair(value))
        except ShapeError as e:
            raise ShapeError(e.args[0].split("\n")[0], dim=name, remedy=e.remedy) from None
        except (TypeError, ValueError):
            remedy = "give (low, high), where high may be None, or polydyn.Sizes"
            raise ShapeError(f"{value!r} does not describe sizes", dim=name, remedy=remedy) from None
    return out
