"""A trace file: one job in each line, below a first line that names the columns."""

import csv
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

from tiphys.errors import UsageError
from tiphys_plugin.simulation.cells import Row
from tiphys_plugin.simulation.forms import FORMS, Form
from tiphys_plugin.simulation.job import Job, Trace

_LONGEST_SECONDS = 1e11
"""Of all jobs one after the other: some 3,000 years, so that no replay leaves the calendar."""


def read_trace(path: Path) -> Trace:
    """Read a CSV file of jobs, in one of the forms of `tiphys_plugin.simulation.forms`.

    Raises:
        UsageError: it cannot be read, or a cell is wrong; the message names line and column.
    """
    source = f"trace {path}"
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            return _trace(_lines(file, source), source)
    except OSError as error:
        raise UsageError(f"{source} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{source} is not UTF-8 text ({error.reason} at byte {error.start})") from error


def _trace(lines: Iterator[tuple[int, list[str]]], source: str) -> Trace:
    header = next(lines, (1, []))[1]
    form = _form(header, source)
    skipped: Counter[str] = Counter()
    jobs: list[Job] = []
    for line, cells in lines:
        found = form.read(_row(header, cells, source, line))
        if isinstance(found, Job):
            jobs.append(found)
        else:
            skipped[found] += 1
    _check(jobs, source)
    known = form.columns | (frozenset(header) if form.optional is None else form.optional)
    ignored = tuple(column for column in header if column not in known)
    return Trace(form.name, tuple(sorted(jobs, key=lambda job: job.submit_seconds)), dict(skipped), ignored)


def _lines(file: TextIO, source: str) -> Iterator[tuple[int, list[str]]]:
    """Cells of each line that has any, with its number."""
    reader = csv.reader(file, strict=True)
    try:
        for cells in reader:
            if any(cell.strip() for cell in cells):
                yield reader.line_num, [cell.strip() for cell in cells]
    except csv.Error as error:
        raise UsageError(f"{source}, line {reader.line_num}: {error}; expected comma-separated values") from error


def _form(header: Sequence[str], source: str) -> Form:
    if twice := next((name for name in header if header.count(name) > 1), None):
        raise UsageError(f"{source}: its first line names column {twice} twice")
    for form in FORMS:
        if form.columns <= set(header):
            return form
    own = ",".join(sorted(FORMS[0].columns, reverse=True))
    found = ",".join(header) or "nothing"
    raise UsageError(f"{source}: its first line must name the columns, at least {own}; found {found}")


def _row(header: Sequence[str], cells: Sequence[str], source: str, line: int) -> Row:
    if len(cells) != len(header):
        column = header[len(cells)] if len(cells) < len(header) else "after the last"
        raise UsageError(
            f"{source}, line {line}, column {column}: the line has {len(cells)} cells, the first line has {len(header)}"
        )
    return Row(source, line, dict(zip(header, cells, strict=True)))


def _check(jobs: Sequence[Job], source: str) -> None:
    if not jobs:
        raise UsageError(f"{source} has no job that can be replayed; every line below the first is one job with GPUs")
    last = max(job.submit_seconds for job in jobs) + sum(job.duration_seconds for job in jobs)
    if last > _LONGEST_SECONDS:
        raise UsageError(f"{source}: its jobs take more than {_LONGEST_SECONDS:g} s; durations are in seconds")
