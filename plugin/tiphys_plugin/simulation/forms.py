"""The forms of trace that are known, each told by columns that no other has.

The project's own, and two that were published, so that a rehearsal can begin
before anybody has exported the history of their own cluster:
`trace1.csv` of the simulator of Muri (Zhao et al., SIGCOMM 2022) and the pod
lists of Alibaba's `cluster-trace-gpu-v2023` (Weng et al., USENIX ATC 2023).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

from tiphys.protocol.policy import SpotUse
from tiphys_plugin.simulation.cells import Row
from tiphys_plugin.simulation.job import Job


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
