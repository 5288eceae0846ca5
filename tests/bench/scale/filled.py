"""Stores with very many runs, alerts or checkpoints."""

from datetime import UTC, datetime, timedelta

from bench.scale.paged_store import PagedStore
from support.builders.compiled_workflows import History, gated, pipeline_of
from support.builders.lineage import commit, ref

from tiphys.records import (
    AlertRecord,
    AlertResultRecord,
    RunRecord,
    SubmissionBinding,
    SubmissionClaim,
    SubmissionEnd,
    SubmissionKind,
    json_digest,
)
from tiphys.store import RunLayout, claim_run, end_submission, open_submission
from tiphys.store.layout import alert_key
from tiphys.store.run_markers import NEWEST, newest_marker

_BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
_BETWEEN = timedelta(minutes=1)
_MANIFEST = pipeline_of(gated("prep"))
_DIGEST = json_digest(_MANIFEST)
CLUSTER = "west"
OPEN_RUNS = 10


def add_runs(store: PagedStore, ended: int, opened: int = OPEN_RUNS) -> None:
    """Runs of one step: ``opened`` that go on, and ``ended`` that began after them, a minute apart."""
    for number in range(opened + ended):
        add_run(store, f"run-{number:06}", _BEGIN + number * _BETWEEN, is_ended=number >= opened)


def add_run(store: PagedStore, run: str, began_at: datetime, *, is_ended: bool) -> None:
    """A run as services and controller leave it."""
    one, layout = PagedStore(), RunLayout(run)
    record = RunRecord(run=run, pipeline="digits", workflow=_MANIFEST, digest=_DIGEST, written_at=began_at)
    claim_run(one, record)
    claim = SubmissionClaim(
        run=run,
        submission=1,
        kind=SubmissionKind.ORIGINAL,
        workflow_name=run,
        namespace="ml",
        cluster=CLUSTER,
        written_at=began_at,
    )
    open_submission(one, claim)
    bound = SubmissionBinding(
        run=run, submission=1, cluster=CLUSTER, namespace="ml", workflow_name=run, uid=f"uid-of-{run}"
    )
    one.create(layout.submission_binding(1), bound.to_bytes())
    if is_ended:
        History(one, run).done("prep")
        end = SubmissionEnd(run=run, submission=1, status="Succeeded", written_at=began_at + _BETWEEN)
        end_submission(one, end, may_be_resumed=False)
    store.objects |= one.objects


def add_older_runs(store: PagedStore, count: int) -> None:
    """The keys of many runs that ended before all others; none of their objects can be read."""
    one = PagedStore()
    add_run(one, "run-000000", _BEGIN, is_ended=True)
    keys = list(one.objects)
    for number in range(count):
        run, ended_at = f"old-{number:06}", _BEGIN - (number + 1) * _BETWEEN
        store.objects |= {key.replace("run-000000", run): b"" for key in keys if not key.startswith(NEWEST)}
        store.objects |= {newest_marker(run, moment): b"" for moment in (ended_at - _BETWEEN, ended_at)}


def add_handled_alerts(store: PagedStore, count: int) -> None:
    """Alerts that fired and were handled."""
    fired = AlertRecord(name="RunFailed", status="firing", fingerprint="f", starts_at="t").to_bytes()
    result = AlertResultRecord(outcome="told", message="").to_bytes()
    for number in range(count):
        alert = json_digest(number)[:32]
        store.objects |= {alert_key(alert, "firing"): fired, alert_key(alert, "result"): result}


def add_checkpoints(store: PagedStore, count: int) -> None:
    """Checkpoints of one attempt of `support.builders.lineage.RUN`."""
    for number in range(count):
        one = PagedStore()
        commit(one, ref(1, number + 1), data=(b"x",))
        store.objects |= one.objects
