"""Reads trace files: CSV with a header line and one job per line.

The header identifies the format: the project's own, or one of two published
traces, so that a simulation needs no export from a cluster. These are `trace1.csv`
of the simulator of Muri (Zhao et al., SIGCOMM 2022) and the pod lists of Alibaba's
`cluster-trace-gpu-v2023` (Weng et al., USENIX ATC 2023). Every error names file,
line and column, so that the author of the file finds the wrong cell.
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
from tiphys_plugin.quota.simulation.jobs import Trace, TraceJob

_MAX_VALUE = 10_000_000_000
"""Some 300 years in seconds: a larger value has a wrong unit, and would exceed the range of datetime."""
_MAX_SPEED = 1000


@dataclass(frozen=True)
class TraceRow:
    """One row, with its cells by column. The methods raise `UsageError` for invalid cells."""

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
        if not 0 <= value <= _MAX_VALUE:
            unit = "seconds" if unit_seconds == 1 else f"units of {unit_seconds:g} s"
            raise self.cell_error(column, f"a number of {unit} from 0 to {_MAX_VALUE / unit_seconds:g}")
        return value

    def integer(self, column: str, minimum: int = -_MAX_VALUE) -> int:
        try:
            value = int(self.text(column) or "")
        except ValueError:
            value = minimum - 1
        if not minimum <= value <= _MAX_VALUE:
            raise self.cell_error(column, f"a whole number from {minimum} to {_MAX_VALUE}")
        return value

    def cell_error(self, column: str, expected: str) -> UsageError:
        """The error for a cell that is not ``expected``."""
        text = self.text(column)
        actual = "nothing" if text is None else repr(text)
        return UsageError(f"{self.source}, line {self.line}, column {column}: {actual} is not {expected}")


@dataclass(frozen=True)
class TraceFormat:
    """A trace format. ``parse_row`` returns the job of a row, or the reason why it cannot be replayed.

    ``columns`` are required and identify the format. ``optional`` are further known columns; None: all other columns
    are known to be irrelevant.
    """

    name: str
    columns: frozenset[str]
    parse_row: Callable[[TraceRow], TraceJob | str]
    optional: frozenset[str] | None = None


def _parse_tiphys_row(row: TraceRow) -> TraceJob:
    return TraceJob(
        name=row.text("name") or f"line-{row.line}",
        submit_seconds=row.seconds("submit_seconds"),
        duration_seconds=row.seconds("duration_seconds"),
        gpus=row.integer("gpus", minimum=1),
        queue=row.text("queue"),
        gpu_type=row.text("gpu_type"),
        speed=_parse_speed(row),
        priority=row.integer("priority") if row.text("priority") else 0,
        limit_seconds=row.integer("limit_seconds", minimum=1) if row.text("limit_seconds") else None,
        spot=_parse_spot_use(row),
        namespace=row.text("namespace"),
    )


def _parse_speed(row: TraceRow) -> tuple[float, ...]:
    text, types = row.text("speed"), (row.text("gpu_type") or "").split("|")
    if text is None:
        return ()
    try:
        speed = tuple(map(float, text.split("|")))
    except ValueError:
        speed = ()
    is_in_range = all(1 / _MAX_SPEED <= factor <= _MAX_SPEED for factor in speed)
    if len(speed) != len(types) or len(types) < 2 or not is_in_range:
        raise row.cell_error(
            "speed", f"a number from {1 / _MAX_SPEED:g} to {_MAX_SPEED} for each of several types, as in 2.5|1"
        )
    return speed


def _parse_spot_use(row: TraceRow) -> SpotUse:
    text = row.text("spot") or "no"
    for use in get_args(SpotUse):
        if text == use:
            spot_use: SpotUse = use
            return spot_use
    raise row.cell_error("spot", "no, allowed or only")


def _parse_muri_row(row: TraceRow) -> TraceJob:
    return TraceJob(
        name=f"job-{row.text('job_id') or row.line}",
        submit_seconds=row.seconds("submit_time", unit_seconds=1e-3),
        duration_seconds=row.seconds("duration", unit_seconds=1e-3),
        gpus=row.integer("num_gpu", minimum=1),
    )


def _parse_openb_row(row: TraceRow) -> TraceJob | str:
    gpus = row.integer("num_gpu", minimum=0)
    if gpus == 0:
        return "without a GPU"
    if row.integer("gpu_milli", minimum=0) < 1000:
        return "with a part of a GPU"
    if row.text("scheduled_time") is None:
        return "never started, so without a duration"
    created, started, deleted = (row.seconds(name) for name in ("creation_time", "scheduled_time", "deletion_time"))
    if deleted < started:
        raise row.cell_error("deletion_time", "at or after its scheduled_time")
    spec = row.text("gpu_spec")
    return TraceJob(
        name=row.text("name") or f"line-{row.line}",
        submit_seconds=created,
        duration_seconds=deleted - started,
        gpus=gpus,
        gpu_type=spec or None,
    )


TRACE_FORMATS = (
    TraceFormat(
        "jobs",
        frozenset({"submit_seconds", "duration_seconds", "gpus"}),
        _parse_tiphys_row,
        frozenset({"queue", "gpu_type", "speed", "priority", "name", "limit_seconds", "spot", "namespace"}),
    ),
    TraceFormat("Muri", frozenset({"submit_time", "duration", "num_gpu"}), _parse_muri_row),
    TraceFormat(
        "openb pods",
        frozenset({"num_gpu", "gpu_milli", "creation_time", "deletion_time", "scheduled_time"}),
        _parse_openb_row,
    ),
)


_MAX_TOTAL_SECONDS = 1e11
"""Longest total of all jobs one after the other, some 3,000 years, so that no replay exceeds the range of datetime."""


def read_trace(path: Path) -> Trace:
    """Read a CSV file of jobs in one of `TRACE_FORMATS`.

    Raises:
        UsageError: the file cannot be read, or a cell is wrong; the message names line and column.
    """
    source = f"trace {path}"
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            return _parse_trace(_read_lines(file, source), source)
    except OSError as error:
        raise UsageError(f"{source} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{source} is not UTF-8 text ({error.reason} at byte {error.start})") from error


def _parse_trace(lines: Iterator[tuple[int, list[str]]], source: str) -> Trace:
    header = next(lines, (1, []))[1]
    trace_format = _detect_format(header, source)
    skipped: Counter[str] = Counter()
    jobs: list[TraceJob] = []
    for line, cells in lines:
        parsed = trace_format.parse_row(_build_row(header, cells, source, line))
        if isinstance(parsed, TraceJob):
            jobs.append(parsed)
        else:
            skipped[parsed] += 1
    _check_jobs(jobs, source)
    optional = frozenset(header) if trace_format.optional is None else trace_format.optional
    ignored = tuple(column for column in header if column not in trace_format.columns | optional)
    return Trace(trace_format.name, tuple(sorted(jobs, key=lambda job: job.submit_seconds)), dict(skipped), ignored)


def _read_lines(file: TextIO, source: str) -> Iterator[tuple[int, list[str]]]:
    """Line number and cells of each line that is not blank."""
    reader = csv.reader(file, strict=True)
    try:
        for cells in reader:
            if any(cell.strip() for cell in cells):
                yield reader.line_num, [cell.strip() for cell in cells]
    except csv.Error as error:
        raise UsageError(f"{source}, line {reader.line_num}: {error}; expected comma-separated values") from error


def _detect_format(header: Sequence[str], source: str) -> TraceFormat:
    if twice := next((name for name in header if header.count(name) > 1), None):
        raise UsageError(f"{source}: its first line names column {twice} twice")
    for trace_format in TRACE_FORMATS:
        if trace_format.columns <= set(header):
            return trace_format
    required = ",".join(sorted(TRACE_FORMATS[0].columns, reverse=True))
    actual = ",".join(header) or "nothing"
    raise UsageError(f"{source}: its first line must name the columns, at least {required}; found {actual}")


def _build_row(header: Sequence[str], cells: Sequence[str], source: str, line: int) -> TraceRow:
    if len(cells) != len(header):
        column = header[len(cells)] if len(cells) < len(header) else "after the last"
        raise UsageError(
            f"{source}, line {line}, column {column}: the line has {len(cells)} cells, the first line has {len(header)}"
        )
    return TraceRow(source, line, dict(zip(header, cells, strict=True)))


def _check_jobs(jobs: Sequence[TraceJob], source: str) -> None:
    if not jobs:
        raise UsageError(f"{source} has no job that can be replayed; every line below the first is one job with GPUs")
    last = max(job.submit_seconds for job in jobs) + sum(job.longest_seconds for job in jobs)
    if last > _MAX_TOTAL_SECONDS:
        raise UsageError(f"{source}: its jobs take more than {_MAX_TOTAL_SECONDS:g} s; durations are in seconds")
