"""What nobody needs is removed, old enough and only by whoever leads; what a person should know of is counted.

A lease, ten minutes after it was given:

| its attempt | its Workflow | |
|---|---|---|
| has an end that is as old | any | counted |
| has none | runs | not counted: it holds what it needs |
| has none | over or gone | counted |
| cannot be read, or is of a tenant that is not seen | any | not counted |
"""

import os
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import pytest
from support.builders.argo_objects import workflow
from support.builders.compiled_workflows import History, gated, pipeline_of
from support.builders.ledger import lease
from support.fakes.submitter import FakeSubmitter
from support.processes.failpoints import dying_at
from tiphys_controller import start_run
from tiphys_controller.auto_resume.state import AutomationMode
from tiphys_controller.cleanup import HeldLease, find_garbage, find_orphaned_lease
from tiphys_controller.kubernetes.alert_worker import AlertSweep
from tiphys_controller.kubernetes.janitor import Janitor
from tiphys_controller.kubernetes.metrics import ControllerMetrics
from tiphys_controller.kubernetes.watch_cache import WatchCache
from tiphys_plugin.quota.lease import Lease, LedgerState
from tiphys_plugin.quota.ledger.status_codec import encode_state

from tiphys.errors import StoreError
from tiphys.kube import ListSnapshot
from tiphys.records import AlertClaimRecord, AlertRecord, AlertResultRecord, SubmissionEnd, utc_now
from tiphys.store import DirectoryStore, RunLayout, read_attempt_end
from tiphys.store.abandoned_uploads import find_abandoned_uploads
from tiphys.store.layout import alert_key

HOUR = timedelta(hours=1)
IDS = {name: name * 32 for name in ("a", "b", "c")}


def janitor(
    store: DirectoryStore,
    mode: AutomationMode = AutomationMode.ON,
    leads: bool = True,
    view: WatchCache | None = None,
    blind: str = "",
    leases: Sequence[Lease] = (),
) -> Janitor:
    """One whose clock is a month ahead of the records."""
    return Janitor(
        stores=lambda _: store,
        tenants=lambda: ["ml"],
        view=view or WatchCache(),
        find_blind_reason=lambda: blind,
        cluster_name=lambda: "west",
        read_ledger=lambda: {"spec": {}, "status": encode_state(LedgerState(tuple(leases)))},
        is_leader=lambda: leads,
        metrics=ControllerMetrics(),
        now=lambda: utc_now() + timedelta(days=30),
        mode=mode,
    )


def value(found: Janitor, metric: str, what: str = "") -> float:
    labels = {"what": what} if what else {}
    return found.metrics.registry.get_sample_value(f"tiphys_controller_{metric}", labels) or 0.0


@pytest.fixture
def litter(store: DirectoryStore) -> Callable[[], list[str]]:
    """An upload that died two days ago, one under way, a done alert and one that is not; answers what is left."""
    store.create("x", b"")
    for name, age in (("old", 48), ("new", 1)):
        (store.temporary_folder / name).write_bytes(b"half")
        written = (store.temporary_folder / name).stat().st_mtime
        os.utime(store.temporary_folder / name, (written - age * 3600,) * 2)
    record = AlertRecord(name="RunFailed", status="firing", fingerprint="ab", starts_at="t")
    for alert in (IDS["a"], IDS["b"]):
        store.create(alert_key(alert, "firing"), record.to_bytes())
    store.create(alert_key(IDS["a"], "result"), AlertResultRecord(outcome="told", message="").to_bytes())
    return lambda: sorted(
        [one.name for one in store.temporary_folder.iterdir()] + [one.key for one in store.list("control/alerts/")]
    )


def test_the_janitor_removes_old_garbage_and_nothing_else(
    store: DirectoryStore, litter: Callable[[], list[str]]
) -> None:
    found = janitor(store)
    found.run_round(threading.Event())
    assert litter() == [alert_key(IDS["b"], "firing"), "new"]
    assert (value(found, "litter_total", "upload"), value(found, "litter_total", "alert")) == (1, 1)


@pytest.mark.parametrize(("mode", "leads"), [(AutomationMode.DRY_RUN, True), (AutomationMode.ON, False)])
def test_a_dry_run_and_one_that_does_not_lead_remove_nothing(
    store: DirectoryStore, litter: Callable[[], list[str]], mode: AutomationMode, leads: bool
) -> None:
    before = litter()
    found = janitor(store, mode, leads)
    found.run_round(threading.Event())
    assert litter() == before
    assert value(found, "litter_total", "upload") == (1 if leads else 0)


def test_the_age_of_a_file_is_measured_by_the_clock_that_wrote_it(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.create("x", b"")
    (store.temporary_folder / "fresh").write_bytes(b"")
    monkeypatch.setattr("time.time", lambda: 9e9)
    assert list(find_abandoned_uploads(store, HOUR)) == []
    assert [one.name for one in find_abandoned_uploads(store, -HOUR)] == ["fresh"]


def test_runs_that_nothing_carries_on_are_counted(store: DirectoryStore, tmp_path: Path) -> None:
    submitter, manifest = FakeSubmitter(tmp_path / "cluster"), pipeline_of(gated("fit"))
    for run in ("lives", "gone", "ended", "elsewhere"):
        start_run(store, submitter if run != "elsewhere" else FakeSubmitter(tmp_path / "east", "east"), manifest, run)
    store.create(
        RunLayout("ended").submission_end(1), SubmissionEnd(run="ended", submission=1, status="Succeeded").to_bytes()
    )
    with dying_at("start.after_claim"):
        start_run(store, submitter, manifest, "unsent")
    view = WatchCache()
    view.apply_workflow_change("ml", ListSnapshot([workflow("lives")]))
    found = janitor(store, view=view)
    found.run_round(threading.Event())
    assert (value(found, "runs_unfinished", "gone"), value(found, "runs_unfinished", "unsent")) == (1, 1)
    blind = janitor(store, blind="workflows: forbidden")
    blind.run_round(threading.Event())
    assert (value(blind, "runs_unfinished", "gone"), value(blind, "runs_unfinished", "unsent")) == (0, 1)


def test_unused_leases_are_counted_and_left_to_the_ledger(store: DirectoryStore) -> None:
    History(store, "run-ended").failed("fit")
    History(store, "run-runs").opened("fit")
    store.create(RunLayout("run-damaged").attempt_end("fit", 1), b"no record")
    leases = [lease(8, name) for name in ("ended", "runs", "gone", "damaged")] + [lease(8, "other", namespace="vision")]
    view = WatchCache()
    view.apply_workflow_change("ml", ListSnapshot([workflow(name, uid=name) for name in ("ended", "runs", "damaged")]))
    before = [one.key for one in store.list("")]

    found, blind = janitor(store, view=view, leases=leases), janitor(store, blind="x", leases=leases)
    for one in (found, blind):
        one.run_round(threading.Event())

    assert (value(found, "leases_orphaned"), value(blind, "leases_orphaned")) == (2, 0)
    assert [one.key for one in store.list("")] == before


@pytest.mark.parametrize(
    ("held_minutes", "ended_minutes", "is_unused"),
    [(9, None, False), (11, None, True), (60, 9, False), (60, 11, True)],
)
def test_a_lease_is_unused_ten_minutes_after_its_grant_and_its_end(
    store: DirectoryStore, held_minutes: int, ended_minutes: int | None, is_unused: bool
) -> None:
    now, minute = utc_now(), timedelta(minutes=1)
    if ended_minutes is not None:
        History(store, "run-1").failed("fit")
        now = read_attempt_end(store, "run-1", "fit", 1).written_at + ended_minutes * minute
    held = HeldLease("ml", "run-1", "fit", 1, "uid", 8, now - held_minutes * minute, None)
    assert (find_orphaned_lease(held, store, is_workflow_running=False, now=now) is not None) is is_unused


@pytest.mark.parametrize("deletions", range(4))
def test_a_removal_of_an_alert_that_is_cut_off_has_it_not_handled_again(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch, deletions: int
) -> None:
    records = {
        "firing": AlertRecord(name="RunFailed", status="firing", fingerprint="ab", starts_at="t"),
        "resolved": AlertRecord(name="RunFailed", status="resolved", fingerprint="ab", starts_at="t"),
        "claim": AlertClaimRecord(run="", submission=0),
        "result": AlertResultRecord(outcome="told", message=""),
    }
    for kind, record in records.items():
        store.create(alert_key(IDS["a"], kind), record.to_bytes())
    [finding] = find_garbage(store, utc_now() + timedelta(days=8))
    delete, deleted = store.delete, list[str]()

    def die(key: str) -> None:
        if len(deleted) == deletions:
            raise StoreError("no answer")
        deleted.append(key)
        delete(key)

    monkeypatch.setattr(store, "delete", die)
    assert finding.remove is not None
    with pytest.raises(StoreError):
        finding.remove()
    assert AlertSweep().find_next_pending(store) == {}


def test_storage_that_does_not_answer_is_counted_and_tried_again(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "store")
    store.create(alert_key(IDS["c"], "result"), b"no record")
    found = janitor(store)
    found.run_round(threading.Event())
    assert value(found, "failures_total", "janitor") == 1
