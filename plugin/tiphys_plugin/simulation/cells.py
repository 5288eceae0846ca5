"""One row of a CSV file, read cell by cell.

Whoever made the file has to find the cell that is wrong, so every refusal names
file, line and column.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from tiphys.errors import UsageError

_MOST = 10_000_000_000
"""Seconds of some 300 years: larger is a wrong unit, and would leave the calendar."""


@dataclass(frozen=True)
class Row:
    """``cells`` by column. The methods raise `UsageError` for what a column must not hold."""

    source: str
    line: int
    cells: Mapping[str, str]

    def text(self, column: str) -> str | None:
        """None if the cell is empty or its column is missing."""
        return self.cells.get(column) or None

    def seconds(self, column: str, unit_seconds: float = 1.0) -> float:
        try:
            value = float(self.text(column) or "") * unit_seconds
        except ValueError:
            value = math.nan
        if not 0 <= value <= _MOST:
            unit = "seconds" if unit_seconds == 1 else f"units of {unit_seconds:g} s"
            raise self.wrong(column, f"a number of {unit} from 0 to {_MOST / unit_seconds:g}")
        return value

    def whole(self, column: str, least: int = -_MOST) -> int:
        try:
            value = int(self.text(column) or "")
        except ValueError:
            value = least - 1
        if not least <= value <= _MOST:
            raise self.wrong(column, f"a whole number from {least} to {_MOST}")
        return value

    def wrong(self, column: str, expected: str) -> UsageError:
        """The error for a cell that is not what was ``expected``."""
        told = self.text(column)
        found = "nothing" if told is None else repr(told)
        return UsageError(f"{self.source}, line {self.line}, column {column}: {found} is not {expected}")
