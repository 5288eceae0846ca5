"""The two output streams of a command: data on stdout, everything else on stderr.

A script that reads stdout must never read a progress line, and a person who
redirects stdout must still see errors. Colour and live views appear only on a
terminal; ``NO_COLOR`` and ``--no-color`` switch colour off.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

import yaml
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

_PIPE_WIDTH = 10_000
"""Width in columns when the output is a pipe, so that no line is wrapped or cut."""


class Format(StrEnum):
    """Values of ``-o`` for commands whose data fits a table."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"


@dataclass
class Screen:
    """The output streams of one command, with its global options."""

    quiet: bool = False
    color: bool = True
    verbose: bool = False

    def __post_init__(self) -> None:
        self.out = self._console(stderr=False)
        self.err = self._console(stderr=True)

    def note(self, text: str) -> None:
        """Print a note on stderr, unless ``--quiet`` is set."""
        if not self.quiet:
            self.err.print(Text(text), soft_wrap=True)

    def show(self, renderable: RenderableType) -> None:
        """Print data for people on stdout. In a pipe, lines have no trailing spaces."""
        if self.out.is_terminal:
            self.out.print(renderable)
            return
        with self.out.capture() as capture:
            self.out.print(renderable)
        self.write("\n".join(line.rstrip() for line in capture.get().splitlines()))

    def write(self, text: str) -> None:
        """Print ``text`` on stdout unchanged, with a final newline."""
        self.out.file.write(text if text.endswith("\n") else f"{text}\n")

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[str | Text]]) -> None:
        """Print a table on stdout without borders, as ``kubectl`` does."""
        table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 3, 0, 0))
        for column in columns:
            table.add_column(column, overflow="fold", no_wrap=column != columns[-1])
        for row in rows:
            table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
        self.show(table)

    def document(self, document: Any, output: Format) -> None:
        """Print ``document``, which consists of JSON types, as JSON or YAML on stdout."""
        if output == Format.YAML:
            self.write(yaml.safe_dump(document, sort_keys=False, allow_unicode=True))
        else:
            self.write(json.dumps(document, indent=2, ensure_ascii=False))

    def _console(self, *, stderr: bool) -> Console:
        console = Console(stderr=stderr, no_color=None if self.color else True, highlight=False)
        if not console.is_terminal:
            console.width = _PIPE_WIDTH
        return console


def format_local_time(moment: datetime) -> str:
    """Format a time in the local time zone, to the second."""
    return moment.astimezone().strftime("%Y-%m-%d %H:%M:%S")
