"""The two output streams of a command: data on stdout, everything else on stderr.

A script that reads stdout must never read a progress line, and a person who
redirects stdout must still see errors. Colour and live views appear only on a
terminal; ``NO_COLOR`` and ``--no-color`` switch colour off.

What a command shows was written by the programs of a run, so control characters
become visible symbols here. `Screen` does this for its own output, and
`guard_streams` for everything that a command writes without it.
"""

import io
import json
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO

from hera_pipelines.control_characters import replace_control_characters
from tiphys.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text


class Format(StrEnum):
    """Values of ``-o`` for commands whose data fits a table."""

    TABLE = "table"
    WIDE = "wide"
    """The table with all its columns; `choose_format` turns it into ``TABLE``."""
    JSON = "json"
    YAML = "yaml"


ManifestFormat = Literal["yaml", "json"]
"""Values of ``-o`` for a manifest, which has no table form."""


class GuardedStream(io.TextIOBase):
    """A text stream that shows control characters as symbols. It has no ``buffer`` that would lead past it."""

    def __init__(self, stream: TextIO) -> None:
        self.unguarded = stream

    def write(self, text: str) -> int:
        self.unguarded.write(replace_control_characters(text))
        return len(text)

    def flush(self) -> None:
        self.unguarded.flush()

    def isatty(self) -> bool:
        return self.unguarded.isatty()

    def fileno(self) -> int:
        return self.unguarded.fileno()

    def writable(self) -> bool:
        return True

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self.unguarded.encoding


@contextmanager
def guard_streams() -> Iterator[None]:
    """Guard the standard streams while the body runs: from ``print``, warnings, logs and the help of commands."""
    with redirect_stdout(GuardedStream(sys.stdout)), redirect_stderr(GuardedStream(sys.stderr)):
        yield


@dataclass
class Screen:
    """The output streams of one command, with its global options."""

    quiet: bool = False
    color: bool = True
    verbose: bool = False
    wide: bool = False
    """Whether tables are printed whole, however wide the terminal is (``-o wide``)."""

    @cached_property
    def out(self) -> "Console":
        return self._open_console(sys.stdout)

    @cached_property
    def err(self) -> "Console":
        return self._open_console(sys.stderr)

    def _open_console(self, stream: TextIO) -> "Console":
        from hera_pipelines.cli.console import open_console  # imports Rich, which the help does not need

        return open_console(stream.unguarded if isinstance(stream, GuardedStream) else stream, color=self.color)

    def note(self, text: str) -> None:
        """Print a note on stderr, unless ``--quiet`` is set."""
        if not self.quiet:
            self.err.print(text, soft_wrap=True)

    def show(self, renderable: "RenderableType") -> None:
        """Print data for people on stdout. In a pipe, lines have no trailing spaces."""
        if self.out.is_terminal:
            self.out.print(renderable)
            return
        with self.out.capture() as capture:
            self.out.print(renderable)
        self.write("\n".join(line.rstrip() for line in capture.get().splitlines()))

    def write(self, text: str) -> None:
        """Print ``text`` on stdout as it is but for control characters, with a final newline."""
        self.out.file.write(_as_lines(text))

    def save(self, target: Path | None, text: str, kind: str, hint: str = "") -> None:
        """Write ``text`` to the file that ``--output`` names; to stdout without one, or for ``-``.

        ``kind`` is what a message calls it (document, picture, page), and ``hint`` the end of the note that it was
        written.

        Raises:
            UsageError: the file cannot be written.
        """
        if target is None or str(target) == "-":
            self.write(text.replace("\r\n", "\n").rstrip("\n"))
            return
        try:
            target.write_text(text, encoding="utf-8", newline="")
        except OSError as error:
            raise UsageError(f"cannot write the {kind} to {target}: {error.strerror}; name another file") from error
        self.note(f"wrote {target}{hint}")

    def error(self, text: str) -> None:
        """Print ``text`` on stderr, even with ``--quiet``."""
        self.err.file.write(_as_lines(text))

    def table(
        self,
        columns: Sequence[str],
        rows: Iterable[Sequence["str | Text"]],
        *,
        hide: Sequence[str] = (),
        wraps: bool = False,
    ) -> None:
        """Print a table on stdout: fitted to the width of a terminal, and whole in a pipe or with ``-o wide``.

        A narrow terminal need not show the columns ``hide``, the first one first. With ``wraps`` the sentences of the
        last column are wrapped, not cut.
        """
        from rich.text import Text

        from hera_pipelines.cli.console import guarded_text
        from hera_pipelines.cli.tables import fit_table

        cells = [[guarded_text(Text(cell) if isinstance(cell, str) else cell) for cell in row] for row in rows]
        width = self.out.width if self.out.is_terminal and not self.wide else None
        table = fit_table(self.out, columns, cells, width, hide=hide, wraps=wraps)
        for line in table.lines:
            self.out.print(line, soft_wrap=True)
        if table.hidden:
            self.note(f"… hides {', '.join(table.hidden)}; -o wide shows all columns")

    def document(self, document: Any, output: Format, *, indent: int | None = 2) -> None:
        """Print ``document``, which consists of JSON types, as JSON or YAML on stdout.

        JSON is one line if ``indent`` is None. Characters beyond ASCII are escaped, so that a program that reads
        the document gets every one of them. Numbers that JSON does not have, such as the loss of a training that has
        diverged, are null.
        """
        if output == Format.YAML:
            import yaml

            self.write(yaml.safe_dump(document, sort_keys=False))
        else:
            self.write(json.dumps(_replace_nan(document), indent=indent, allow_nan=False))

    def typed_document(self, kind: str, output: Format, /, **fields: Any) -> None:
        """Print a `document` of Tiphys, with its ``apiVersion`` and ``kind`` before its fields."""
        from tiphys_controller import API_VERSION

        self.document({"apiVersion": API_VERSION, "kind": kind, **fields}, output)


def _replace_nan(document: Any) -> Any:
    if isinstance(document, float) and not math.isfinite(document):
        return None
    if isinstance(document, dict):
        return {name: _replace_nan(value) for name, value in document.items()}
    return [_replace_nan(value) for value in document] if isinstance(document, list | tuple) else document


def _as_lines(text: str) -> str:
    return replace_control_characters(text if text.endswith("\n") else f"{text}\n")


def format_local_time(moment: datetime) -> str:
    """Format a time in the local time zone, to the second."""
    return moment.astimezone().strftime("%Y-%m-%d %H:%M:%S")
