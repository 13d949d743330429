"""Lists that people look at: one line as text, a table in a notebook, a DataFrame where pandas is installed.

Standard library only, because ``polydyn.load`` imports this.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
MAX_ROWS = 200
"""Maximum number of rows that a notebook shows of one table."""
STYLE = "text-align:left;padding:2px 10px 2px 0;border:0"


class Table(list[T]):
    """A list of records, equal to a list of the same records.

    ``repr`` is one line, a notebook shows a table, and ``to_pandas()`` returns a DataFrame with a column per field.
    """

    def __init__(self, rows: Iterable[T] = (), title: str = "", unit: str = "row") -> None:
        """``title``: what the rows are; ``unit``: the name of one row."""
        super().__init__(rows)
        self.title, self.unit = title, unit

    def __repr__(self) -> str:
        return f"<{self.title + ': ' if self.title else ''}{counted(len(self), self.unit)}>"

    def rows(self) -> list[dict[str, Any]]:
        """Return every record as a mapping of field -> value."""
        return [fields_of(x) for x in self]

    def to_pandas(self) -> Any:
        """Return a ``pandas.DataFrame`` with a row per record. MissingPackageError: pandas is not installed."""
        return frame(self.rows())

    def _repr_html_(self) -> str:
        rows = self.rows()[:MAX_ROWS]
        names = list(dict.fromkeys(n for r in rows for n in r))
        more = f", the first {MAX_ROWS} are shown" if len(self) > MAX_ROWS else ""
        return html_table(repr(self)[1:-1] + more, names, [[shown(r.get(n, "")) for n in names] for r in rows])


def fields_of(x: Any) -> dict[str, Any]:
    """Return a record as a mapping: of a dataclass the fields, else what its method ``row`` returns."""
    if hasattr(x, "row"):
        return dict(x.row())
    return {n: getattr(x, n) for n in x.__dataclass_fields__}


def frame(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Return a ``pandas.DataFrame``. MissingPackageError: pandas is not installed."""
    try:
        import pandas
    except ImportError as e:
        from polydyn.errors import MissingPackageError

        raise MissingPackageError("a DataFrame needs the package pandas", rule="to_pandas",
                                  remedy="pip install pandas, or use rows()") from e  # fmt: skip
    return pandas.DataFrame(list(rows))


def counted(count: int, unit: str) -> str:
    """Return a count with its unit: ``1 launch``, ``2 launches``."""
    plural = f"{unit}es" if unit.endswith(("ch", "s")) else f"{unit}s"
    return f"{count} {unit if count == 1 else plural}"


def shown(value: Any) -> str:
    """Return a value as the text of a cell."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return " ".join(f"{k}={v}" for k, v in value.items())
    return str(value)


def escaped(text: str) -> str:
    """Return text for HTML."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def html_table(title: str, heading: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a title and a table as HTML in the colours of the page around it."""
    head = "".join(f'<th style="{STYLE}">{escaped(h)}</th>' for h in heading)
    lines = ("".join(f'<td style="{STYLE}">{escaped(c)}</td>' for c in r) for r in rows)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>" if heading else ""
    return f'<div style="overflow-x:auto"><b>{escaped(title)}</b>{table}</div>'


def html_text(title: str, text: str) -> str:
    """Return a title and a text of fixed width as HTML, which opens by a click."""
    return f"<details><summary><b>{escaped(title)}</b></summary><pre>{escaped(text)}</pre></details>"
