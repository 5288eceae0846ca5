"""A trace file: one job in each line, below a first line that names the columns.

One row of a CSV file, read cell by cell.

Whoever made the file has to find the cell that is wrong, so every refusal names
file, line and column.

The forms of trace that are known, each told by columns that no other has.

The project's own, and two that were published, so that a rehearsal can begin
before anybody has exported the history of their own cluster:
`trace1.csv` of the simulator of Muri (Zhao et al., SIGCOMM 2022) and the pod
lists of Alibaba's `cluster-trace-gpu-v2023` (Weng et al., USENIX ATC 2023).
"""

import csv
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO, get_args

from tiphys.errors import UsageError
from tiphys.protocol.step_spec import SpotUse
from tiphys_plugin.quota.simulation.jobs import Job, Trace

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


@dataclass(frozen=True)
class Form:
    """``read`` gives the job of a row, or why it is none that can be replayed.

    ``optional`` are the columns that may be there as well; None: any, of which the rest is not for us.
    """

    name: str
    columns: frozenset[str]
    read: Callable[[Row], Job | str]
    optional: frozenset[str] | None = None


def _own(row: Row) -> Job:
    return Job(
        name=row.text("name") or f"line-{row.line}",
        submit_seconds=row.seconds("submit_seconds"),
        duration_seconds=row.seconds("duration_seconds"),
        gpus=row.whole("gpus", least=1),
        queue=row.text("queue"),
        gpu_type=row.text("gpu_type"),
        priority=row.whole("priority") if row.text("priority") else 0,
        limit_seconds=row.whole("limit_seconds", least=1) if row.text("limit_seconds") else None,
        spot=_spot(row),
    )


def _spot(row: Row) -> SpotUse:
    told = row.text("spot") or "no"
    for use in get_args(SpotUse):
        if told == use:
            known: SpotUse = use
            return known
    raise row.wrong("spot", "no, allowed or only")


def _muri(row: Row) -> Job:
    return Job(
        name=f"job-{row.text('job_id') or row.line}",
        submit_seconds=row.seconds("submit_time", unit_seconds=1e-3),
        duration_seconds=row.seconds("duration", unit_seconds=1e-3),
        gpus=row.whole("num_gpu", least=1),
    )


def _openb(row: Row) -> Job | str:
    gpus = row.whole("num_gpu", least=0)
    if gpus == 0:
        return "without a GPU"
    if row.whole("gpu_milli", least=0) < 1000:
        return "with a part of a GPU"
    if row.text("scheduled_time") is None:
        return "never started, so nobody knows for how long"
    created, began, gone = (row.seconds(name) for name in ("creation_time", "scheduled_time", "deletion_time"))
    if gone < began:
        raise row.wrong("deletion_time", "at or after its scheduled_time")
    spec = row.text("gpu_spec")
    return Job(
        name=row.text("name") or f"line-{row.line}",
        submit_seconds=created,
        duration_seconds=gone - began,
        gpus=gpus,
        gpu_type=spec if spec and "|" not in spec else None,
    )


FORMS = (
    Form(
        "jobs",
        frozenset({"submit_seconds", "duration_seconds", "gpus"}),
        _own,
        frozenset({"queue", "gpu_type", "priority", "name", "limit_seconds", "spot"}),
    ),
    Form("Muri", frozenset({"submit_time", "duration", "num_gpu"}), _muri),
    Form(
        "openb pods",
        frozenset({"num_gpu", "gpu_milli", "creation_time", "deletion_time", "scheduled_time"}),
        _openb,
    ),
)


_LONGEST_SECONDS = 1e11
"""Of all jobs one after the other: some 3,000 years, so that no replay leaves the calendar."""


def read_trace(path: Path) -> Trace:
    """Read a CSV file of jobs, in one of the forms of `tiphys_plugin.quota.simulation.trace`.

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
