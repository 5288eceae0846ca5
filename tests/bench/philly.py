"""Converts Microsoft's Philly traces into a trace for ``tiphys simulate``: ``python -m bench.philly LOG > jobs.csv``.

`LOG` is `cluster_job_log`, a JSON list of jobs (Jeon et al., USENIX ATC 2019). The virtual
cluster of a job is its queue. Times have no zone and only their differences count, so they
are read as UTC. A job holds the GPUs of its last attempt for the time of all attempts together.
"""

import csv
import json
import sys
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, TextIO

from pydantic import BaseModel, BeforeValidator, TypeAdapter, ValidationError
from tiphys_plugin.quota.simulation.jobs import TraceJob

from tiphys.errors import UsageError

COLUMNS = ("name", "submit_seconds", "duration_seconds", "gpus", "queue")


def _parse_time(value: object) -> datetime | None:
    if value is None or value in ("", "None"):
        return None
    return datetime.strptime(str(value), "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC)


_Time = Annotated[datetime | None, BeforeValidator(_parse_time)]


class _Server(BaseModel):
    gpus: tuple[str, ...]


class _Attempt(BaseModel):
    start_time: _Time = None
    end_time: _Time = None
    detail: tuple[_Server, ...] = ()


class _Job(BaseModel):
    jobid: str
    vc: str
    submitted_time: _Time
    attempts: tuple[_Attempt, ...]


_JOBS = TypeAdapter(list[_Job])


def parse_philly_jobs(text: str, source: str) -> tuple[Sequence[TraceJob], Counter[str]]:
    """The jobs, submitted at seconds after the first one, and the number of jobs left out by reason.

    Raises:
        UsageError: the text is no list of Philly jobs; the message names the entry and the field.
    """
    try:
        entries = _JOBS.validate_python(json.loads(text))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the whole file"
        raise UsageError(f"{source}, {place}: {first['msg']}; expected a job of Philly's cluster_job_log") from error
    except ValueError as error:
        raise UsageError(f"{source} is no JSON ({error})") from error
    skipped: Counter[str] = Counter()
    jobs: list[TraceJob] = []
    origin = min((entry.submitted_time for entry in entries if entry.submitted_time), default=None)
    for entry in entries:
        parsed = _parse_job(entry, origin)
        if isinstance(parsed, TraceJob):
            jobs.append(parsed)
        else:
            skipped[parsed] += 1
    return jobs, skipped


def _parse_job(entry: _Job, origin: datetime | None) -> TraceJob | str:
    if entry.submitted_time is None or origin is None:
        return "without a time of submission"
    if not entry.attempts:
        return "never started, so without a duration"
    gpus = sum(len(server.gpus) for server in entry.attempts[-1].detail)
    if gpus == 0:
        return "without a GPU"
    duration = 0.0
    for attempt in entry.attempts:
        if attempt.start_time is None or attempt.end_time is None:
            return "with an attempt without its start or end"
        if attempt.end_time < attempt.start_time:
            return "with an attempt that ends before its start"
        duration += (attempt.end_time - attempt.start_time).total_seconds()
    return TraceJob(
        name=entry.jobid,
        submit_seconds=(entry.submitted_time - origin).total_seconds(),
        duration_seconds=duration,
        gpus=gpus,
        queue=entry.vc,
    )


def write_trace(jobs: Sequence[TraceJob], file: TextIO) -> None:
    """Write jobs as the CSV that ``tiphys simulate`` reads."""
    writer = csv.writer(file)
    writer.writerow(COLUMNS)
    writer.writerows([getattr(job, column) for column in COLUMNS] for job in jobs)


def main() -> None:
    """Convert the file that the command line names."""
    jobs, skipped = parse_philly_jobs(Path(sys.argv[1]).read_text(), sys.argv[1])
    write_trace(jobs, sys.stdout)
    for reason, count in skipped.items():
        sys.stderr.write(f"left out: {count} {reason}\n")


if __name__ == "__main__":
    main()
