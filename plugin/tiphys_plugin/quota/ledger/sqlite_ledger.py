"""The ledger in a SQLite file: one transaction decides on a request and records the decision.

With two transactions, two callers could both get the last GPUs, and a crash
between them would leak a lease. ``BEGIN IMMEDIATE`` admits one writer at a time
over all processes of a machine, and a killed process leaves a whole lease or none.

Each decision loads the whole state and stores the changed rows. Parsed rows are
cached: a known row yields the same object again, so the store finds the rows
that a transition left unchanged by identity.

``PRAGMA user_version`` is the format of the file. The tables are created in one
transaction with it, so a crash repeats their creation as a whole.
"""

import contextlib
import json
import sqlite3
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import datetime, timedelta
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from tiphys.errors import StoreError, UsageError
from tiphys.faults import failpoint
from tiphys.records import utc_now
from tiphys_plugin.quota.lease import (
    EndedUsage,
    Lease,
    LeaseRequest,
    PendingRequest,
    PreemptionNotice,
)
from tiphys_plugin.quota.ledger.backend import CHECK_EVERY, BaseLedger, Transition
from tiphys_plugin.quota.ledger.state import LedgerState
from tiphys_plugin.quota.ledger.transitions import FORGET_AFTER
from tiphys_plugin.quota.queues import QueueRules, Queues

_PARSE_CACHE_SIZE = 8192


def load_state(connection: sqlite3.Connection) -> LedgerState:
    """Load the ledger state; must run within a transaction."""
    leases = connection.execute(
        "SELECT id, request, pool, granted_at, check_at, nodes, leaving FROM leases ORDER BY rowid"
    )
    waiting = connection.execute("SELECT request, arrival, since, seen_at, promised_at FROM waiting ORDER BY arrival")
    history = connection.execute("SELECT queue, pool, gpus, at FROM history ORDER BY queue, pool")
    return LedgerState(
        tuple(_parse_lease(*row) for row in leases),
        tuple(_parse_pending(*row) for row in waiting),
        tuple(EndedUsage(queue, pool, gpus, datetime.fromisoformat(at)) for queue, pool, gpus, at in history),
    )


def store_state(connection: sqlite3.Connection, before: LedgerState, after: LedgerState) -> None:
    """Write the difference between two states. Rows are deleted first, because keys are unique."""
    _store_leases(connection, before, after)
    _store_waiting(connection, before, after)
    if after.history != before.history:
        connection.execute("DELETE FROM history")
        connection.executemany(
            "INSERT INTO history (queue, pool, gpus, at) VALUES (?,?,?,?)",
            [(one.queue, one.pool, one.gpus, one.measured_at.isoformat()) for one in after.history],
        )


def _store_leases(connection: sqlite3.Connection, before: LedgerState, after: LedgerState) -> None:
    stored, kept_ids = {one.id: one for one in before.leases}, {one.id for one in after.leases}
    connection.executemany("DELETE FROM leases WHERE id=?", [(lease_id,) for lease_id in stored.keys() - kept_ids])
    connection.executemany(
        "INSERT INTO leases (id, uid, step, node, request, pool, granted_at, check_at, nodes, leaving)"
        " VALUES (?,?,?,?,?,?,?,?,?,?) ON CONFLICT (id) DO UPDATE SET node=excluded.node, request=excluded.request,"
        " check_at=excluded.check_at, nodes=excluded.nodes, leaving=excluded.leaving",
        [
            (
                one.id,
                *one.request.key,
                _request_to_json(one.request),
                one.pool,
                one.granted_at.isoformat(),
                one.check_at.isoformat(),
                json.dumps(one.nodes),
                _preemption_to_json(one.preemption),
            )
            for one in after.leases
            if stored.get(one.id) is not one
        ],
    )


def _store_waiting(connection: sqlite3.Connection, before: LedgerState, after: LedgerState) -> None:
    stored, kept_arrivals = {one.arrival: one for one in before.pending}, {one.arrival for one in after.pending}
    connection.executemany(
        "DELETE FROM waiting WHERE arrival=?", [(arrival,) for arrival in stored.keys() - kept_arrivals]
    )
    connection.executemany(
        "INSERT INTO waiting (arrival, uid, step, node, request, since, seen_at, promised_at)"
        " VALUES (?,?,?,?,?,?,?,?) ON CONFLICT (arrival) DO UPDATE SET node=excluded.node, request=excluded.request,"
        " seen_at=excluded.seen_at, promised_at=excluded.promised_at",
        [
            (
                one.arrival,
                *one.request.key,
                _request_to_json(one.request),
                one.since.isoformat(),
                one.seen_at.isoformat(),
                one.promised_at.isoformat() if one.promised_at is not None else None,
            )
            for one in after.pending
            if stored.get(one.arrival) is not one
        ],
    )


def _request_to_json(request: LeaseRequest) -> str:
    # Most requests have the defaults of these fields, so rows are shorter without them.
    defaults: dict[str, object] = {"attained": 0.0, "first_start": None, "spot": "no", "gpu_types": ()}
    defaults |= {"min_members": None, "max_members": None, "within": None, "avoided_nodes": (), "cohort": None}
    return json.dumps({name: value for name, value in asdict(request).items() if defaults.get(name, ...) != value})


def _preemption_to_json(notice: PreemptionNotice | None) -> str | None:
    if notice is None:
        return None
    fields = {name: value for name, value in asdict(notice).items() if value is not None and value is not False}
    return json.dumps(fields, default=datetime.isoformat)


def _parse_preemption(text: str | None) -> PreemptionNotice | None:
    if text is None:
        return None
    fields = json.loads(text)
    times = {name: datetime.fromisoformat(fields[name]) for name in ("asked_at", "deadline")}
    return PreemptionNotice(**{**fields, **times})


@lru_cache(maxsize=_PARSE_CACHE_SIZE)
def _parse_request(text: str) -> LeaseRequest:
    values = json.loads(text)
    return LeaseRequest(**values | {name: tuple(values.get(name, ())) for name in ("gpu_types", "avoided_nodes")})


@lru_cache(maxsize=_PARSE_CACHE_SIZE)
def _parse_lease(
    identity: str, request: str, pool: str, granted_at: str, check_at: str, nodes: str, leaving: str | None
) -> Lease:
    return Lease(
        id=identity,
        request=_parse_request(request),
        pool=pool,
        granted_at=datetime.fromisoformat(granted_at),
        check_at=datetime.fromisoformat(check_at),
        nodes=tuple(json.loads(nodes)),
        preemption=_parse_preemption(leaving),
    )


@lru_cache(maxsize=_PARSE_CACHE_SIZE)
def _parse_pending(request: str, arrival: int, since: str, seen_at: str, promised_at: str | None) -> PendingRequest:
    return PendingRequest(
        request=_parse_request(request),
        arrival=arrival,
        since=datetime.fromisoformat(since),
        seen_at=datetime.fromisoformat(seen_at),
        promised_at=datetime.fromisoformat(promised_at) if promised_at is not None else None,
    )


_FORMAT = 5
_SCHEMA = (
    # ``uid, step, node`` is the replay key; ``request`` is a LeaseRequest, and ``leaving`` a PreemptionNotice, as JSON.
    """CREATE TABLE leases (
        id TEXT PRIMARY KEY,
        uid TEXT NOT NULL, step TEXT NOT NULL, node TEXT NOT NULL,
        request TEXT NOT NULL,
        pool TEXT NOT NULL,
        granted_at TEXT NOT NULL,
        check_at TEXT NOT NULL,
        nodes TEXT NOT NULL,
        leaving TEXT,
        UNIQUE (uid, step, node)
    ) STRICT""",
    """CREATE TABLE waiting (
        arrival INTEGER PRIMARY KEY AUTOINCREMENT,
        uid TEXT NOT NULL, step TEXT NOT NULL, node TEXT NOT NULL,
        request TEXT NOT NULL,
        since TEXT NOT NULL,
        seen_at TEXT NOT NULL,
        promised_at TEXT,
        UNIQUE (uid, step, node)
    ) STRICT""",
    """CREATE TABLE history (
        queue TEXT NOT NULL, pool TEXT NOT NULL,
        gpus REAL NOT NULL,
        at TEXT NOT NULL,
        PRIMARY KEY (queue, pool)
    ) STRICT""",
)


def create_schema(connection: sqlite3.Connection, path: Path) -> None:
    """Create the tables in an empty file.

    Raises:
        StoreError: another version of Tiphys made the file.
    """
    if connection.execute("PRAGMA user_version").fetchone()[0] == _FORMAT:
        return  # without a lock, so a current file opens during a write
    connection.execute("BEGIN IMMEDIATE")
    try:
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version not in (0, _FORMAT):
            raise _format_error(path, version)
        if not version:
            for statement in _SCHEMA:
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {_FORMAT}")
    except BaseException:
        connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


def _format_error(path: Path, version: int) -> StoreError:
    remedy = "upgrade Tiphys" if version > _FORMAT else "finish its runs with the Tiphys that made it, then delete it"
    return StoreError(f"the GPU ledger {path} has format {version}, and this Tiphys reads {_FORMAT}; {remedy}")


_Answer = TypeVar("_Answer")


def read_ledger_file(path: Path) -> LedgerState:
    """The state of the ledger in a file, which is neither locked nor changed.

    Raises:
        StoreError: it cannot be read, or another version of Tiphys wrote it.
    """
    try:
        with contextlib.closing(
            sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=10)
        ) as connection:
            version = connection.execute("PRAGMA user_version").fetchone()[0]
            if version != _FORMAT:
                raise _format_error(path, version)
            connection.execute("BEGIN")  # one snapshot of all tables
            return load_state(connection)
    except sqlite3.Error as error:
        raise StoreError(f"the GPU ledger {path} cannot be read: {error}") from error


class SqliteLedger(BaseLedger):
    """`AdmissionBackend` in one file.

    ``queues`` None means that nothing is limited.

    Raises:
        StoreError: the file cannot be opened, read or written, or another version of Tiphys made it.
        UsageError: the queues have ``cluster_nodes``, which need a cluster.
    """

    def __init__(
        self,
        path: Path,
        queues: Queues | None,
        clock: Callable[[], datetime] = utc_now,
        check_every: timedelta = CHECK_EVERY,
        forget_after: timedelta = FORGET_AFTER,
    ) -> None:
        if queues is not None and queues.cluster_nodes is not None:
            raise UsageError(
                "the queues read the nodes of a cluster (cluster_nodes), but this service has no cluster; "
                "declare `nodes` instead"
            )
        super().__init__(clock, check_every, forget_after)
        self._path = path
        self._queues = queues
        self._lock = threading.Lock()
        with self._translate_errors():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._connection = _open_database(path)

    def close(self) -> None:
        """Close the file. Later calls fail."""
        with self._lock:
            self._connection.close()

    def _transact(self, transition: Transition[_Answer]) -> _Answer:
        with self._lock, self._translate_errors():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                before = load_state(self._connection)
                after, answer = transition(before, self._queues)
                store_state(self._connection, before, after)
                failpoint("ledger.before_commit")
            except BaseException:
                self._connection.execute("ROLLBACK")
                raise
            self._connection.execute("COMMIT")
        failpoint("ledger.after_commit")
        return answer

    def _read(self) -> tuple[LedgerState, QueueRules]:
        with self._lock, self._translate_errors():
            self._connection.execute("BEGIN")  # one snapshot of all tables
            try:
                return load_state(self._connection), self._queues
            finally:
                self._connection.execute("COMMIT")

    @contextlib.contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise StoreError(
                f"the GPU ledger {self._path} did not answer: {error}; check that its disk is writable and not full"
            ) from error


def _open_database(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=10, isolation_level=None, check_same_thread=False)
    try:
        connection.execute("PRAGMA journal_mode=WAL")
        # A granted lease must survive a power cut; in WAL mode only synchronous=FULL guarantees that.
        connection.execute("PRAGMA synchronous=FULL")
        create_schema(connection, path)
    except BaseException:
        connection.close()
        raise
    return connection
