"""The ledger file: what it keeps over replays, restarts, lapses and damage."""

import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from support.builders.ledger import ask, deferral, queues
from tiphys_plugin.quota.lease import AdmissionReason, Admitted, Deferred, LedgerState
from tiphys_plugin.quota.ledger.sqlite_ledger import SqliteLedger

from tiphys.errors import StoreError, UsageError
from tiphys.faults import InjectedFaultError

EIGHT = queues(research={"A100": 8})


@pytest.fixture
def ledger(tmp_path, clock):
    opened = SqliteLedger(tmp_path / "deep" / "ledger.db", EIGHT, clock=clock)
    yield opened
    opened.close()


def held(ledger: SqliteLedger) -> list[tuple[str, int]]:
    return [(lease.request.uid, lease.request.gpus) for lease in ledger.snapshot().leases]


def queued(ledger: SqliteLedger) -> list[str]:
    return [w.request.uid for w in ledger.snapshot().pending]


def test_lease_outlives_a_restart(tmp_path, clock):
    path = tmp_path / "ledger.db"
    before = SqliteLedger(path, EIGHT, clock=clock)
    granted = before.request(ask(8, "u1"))
    before.request(ask(1, "u2"))
    before.close()
    after = SqliteLedger(path, EIGHT, clock=clock)
    assert held(after) == [("u1", 8)]
    assert after.request(ask(8, "u1")) == Admitted(lease=granted.lease, pool="A100")
    assert queued(after) == ["u2"]
    after.close()


def test_lowered_quota_admits_no_request_until_the_holders_fit(tmp_path, clock):
    path = tmp_path / "ledger.db"
    before = SqliteLedger(path, EIGHT, clock=clock)
    before.request(ask(8, "u1"))
    before.close()
    after = SqliteLedger(path, queues(research={"A100": 4}), clock=clock)
    answer = after.request(ask(1, "u2"))
    assert isinstance(answer, Deferred)
    assert "8 of 4 A100" in answer.message
    after.close()


def test_second_writer_waits_for_the_first_and_sees_what_it_did(tmp_path, monkeypatch):
    path, began, go = tmp_path / "ledger.db", threading.Event(), threading.Event()
    first, second = SqliteLedger(path, EIGHT), SqliteLedger(path, EIGHT)

    def pause(point: str) -> None:
        if point == "ledger.before_commit" and not began.is_set():
            began.set()
            assert go.wait(60)

    monkeypatch.setattr("tiphys_plugin.quota.ledger.sqlite_ledger.failpoint", pause)
    with ThreadPoolExecutor(2) as pool:
        granted = pool.submit(first.request, ask(8, "u1"))
        assert began.wait(60)
        other = pool.submit(second.request, ask(8, "u2"))
        with pytest.raises(TimeoutError):
            other.result(timeout=0.1)
        go.set()
        assert isinstance(granted.result(60), Admitted)
        assert deferral(other.result(60)) is AdmissionReason.WAITING_FOR_QUOTA
    first.close()
    second.close()


def test_crash_before_the_commit_leaves_nothing(ledger, monkeypatch):
    def crash(point: str) -> None:
        if point == "ledger.before_commit":
            raise InjectedFaultError(point)

    with monkeypatch.context() as patched, pytest.raises(InjectedFaultError):
        patched.setattr("tiphys_plugin.quota.ledger.sqlite_ledger.failpoint", crash)
        ledger.request(ask(8, "u1"))
    assert ledger.snapshot() == LedgerState((), ())
    assert isinstance(ledger.request(ask(8, "u2")), Admitted)


@pytest.mark.parametrize(("version", "words"), [(99, "format 99.*upgrade Tiphys"), (4, "format 4.*delete it")])
def test_file_of_another_version_is_refused(tmp_path, version, words):
    path = tmp_path / "ledger.db"
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA user_version = {version}")
    connection.close()
    with pytest.raises(StoreError, match=words):
        SqliteLedger(path, None)


def test_file_that_is_no_database_is_named(tmp_path):
    path = tmp_path / "ledger.db"
    path.write_text("not a database, but long enough to be read as one" * 40)
    with pytest.raises(StoreError, match=r"ledger\.db did not answer"):
        SqliteLedger(path, None)


def test_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="did not answer"):
        SqliteLedger(tmp_path / "file" / "ledger.db", None)


@pytest.mark.parametrize("queue", ["research", "full"], ids=["granted", "pending"])
def test_request_that_could_not_be_read_back_is_refused_and_stops_no_other(tmp_path, clock, queue):
    ledger = SqliteLedger(tmp_path / "ledger.db", queues(research={"A100": 8}, full={"A100": 8}), clock=clock)
    ledger.request(ask(8, "u1", queue="full"))
    half_a_pair = replace(ask(8, "u2", queue=queue), run="\ud800")
    with pytest.raises(UsageError, match=r"cannot be stored: .* surrogates not allowed"):
        ledger.request(half_a_pair)
    assert isinstance(ledger.request(ask(8, "u3")), Admitted)
    assert (held(ledger), queued(ledger)) == ([("u1", 8), ("u3", 8)], [])
    ledger.close()
