"""Where output goes: data to stdout, everything else to stderr.

A script that reads stdout must never meet a progress line, and a person who
pipes stdout away must still see errors. Colour and live views appear only on a
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
"""Columns in a pipe: nothing is wrapped or cut for a program."""


class Format(StrEnum):
    """What ``-o`` takes where a table makes sense."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"


@dataclass
class Screen:
    """The two streams of one invocation, and how much is said on them."""

    quiet: bool = False
    color: bool = True
    verbose: bool = False

    def __post_init__(self) -> None:
        self.out = self._console(stderr=False)
        self.err = self._console(stderr=True)

    def note(self, text: str) -> None:
        """Tell a person something beside the data; silent under ``--quiet``."""
        if not self.quiet:
            self.err.print(Text(text), soft_wrap=True)

    def show(self, renderable: RenderableType) -> None:
        """Print data for people on stdout; in a pipe without the spaces that pad lines."""
        if self.out.is_terminal:
            self.out.print(renderable)
            return
        with self.out.capture() as capture:
            self.out.print(renderable)
        self.write("\n".join(line.rstrip() for line in capture.get().splitlines()))

    def write(self, text: str) -> None:
        """Print data for programs on stdout, as it is."""
        self.out.file.write(text if text.endswith("\n") else f"{text}\n")

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[str | Text]]) -> None:
        """Columns without box art, as ``kubectl`` prints them."""
        table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 3, 0, 0))
        for column in columns:
            table.add_column(column, overflow="fold", no_wrap=column != columns[-1])
        for row in rows:
            table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
        self.show(table)

    def document(self, document: Any, output: Format) -> None:
        """One JSON or YAML document; ``document`` consists of JSON types."""
        if output == Format.YAML:
            self.write(yaml.safe_dump(document, sort_keys=False, allow_unicode=True))
        else:
            self.write(json.dumps(document, indent=2, ensure_ascii=False))

    def _console(self, *, stderr: bool) -> Console:
        console = Console(stderr=stderr, no_color=None if self.color else True, highlight=False)
        if not console.is_terminal:
            console.width = _PIPE_WIDTH
        return console


def local_time(moment: datetime) -> str:
    """A moment on the clock of whoever looks."""
    return moment.astimezone().strftime("%Y-%m-%d %H:%M:%S")
