"""The book as rows of SQLite: load all of it, store what changed.

Decisions read the whole book, and a thousand may wait. So a row that was seen
before gives the object that it gave then, which also tells at a glance what a
transition has left alone.

Tables of the ledger, and how an older file becomes a current one.

``PRAGMA user_version`` counts the steps already taken; each step runs in one
transaction with its count, so that a crash repeats it whole.

The ledger of leases: decided and recorded in one SQLite transaction.

If the decision and its record were two steps, two callers could both be told
that the last GPUs are theirs, and a crash in between would leak them. Here
``BEGIN IMMEDIATE`` lets one writer in at a time, over any number of processes
on one machine, and a killed process leaves either the lease or nothing.
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
from tiphys_plugin.quota.lease import Lease, LeaseRequest, Leaving, Waiting
from tiphys_plugin.quota.ledger.backend import CHECK_EVERY, BookLedger, Transition
from tiphys_plugin.quota.ledger.state import Book
from tiphys_plugin.quota.ledger.transitions import FORGET_AFTER
from tiphys_plugin.quota.queues import QueueRules, Queues
from tiphys_plugin.quota.scheduler.fair_share import Consumed

_KEPT = 8192


def load(connection: sqlite3.Connection) -> Book:
    """The book in the file; call it within a transaction."""
    leases = connection.execute(
        "SELECT id, request, pool, granted_at, check_at, nodes, leaving FROM leases ORDER BY rowid"
    )
    waiting = connection.execute("SELECT request, arrival, since, seen_at, promised_at FROM waiting ORDER BY arrival")
    history = connection.execute("SELECT queue, pool, gpus, at FROM history ORDER BY queue, pool")
    return Book(
        tuple(_lease(*row) for row in leases),
        tuple(_waiting(*row) for row in waiting),
        tuple(Consumed(queue, pool, gpus, datetime.fromisoformat(at)) for queue, pool, gpus, at in history),
    )


def store(connection: sqlite3.Connection, before: Book, after: Book) -> None:
    """Write the difference; what goes makes room first, because keys are unique."""
    _store_leases(connection, before, after)
    _store_waiting(connection, before, after)
    if after.history != before.history:
        connection.execute("DELETE FROM history")
        connection.executemany(
            "INSERT INTO history (queue, pool, gpus, at) VALUES (?,?,?,?)",
            [(one.queue, one.pool, one.gpus, one.at.isoformat()) for one in after.history],
        )


def _store_leases(connection: sqlite3.Connection, before: Book, after: Book) -> None:
    known, kept = {one.id: one for one in before.leases}, {one.id for one in after.leases}
    connection.executemany("DELETE FROM leases WHERE id=?", [(gone,) for gone in known.keys() - kept])
    connection.executemany(
        "INSERT INTO leases (id, uid, step, node, request, pool, granted_at, check_at, nodes, leaving)"
        " VALUES (?,?,?,?,?,?,?,?,?,?) ON CONFLICT (id) DO UPDATE SET node=excluded.node, request=excluded.request,"
        " check_at=excluded.check_at, nodes=excluded.nodes, leaving=excluded.leaving",
        [
            (
                one.id,
                *one.request.key,
                _text(one.request),
                one.pool,
                one.granted_at.isoformat(),
                one.check_at.isoformat(),
                json.dumps(one.nodes),
                _leaving_text(one.leaving),
            )
            for one in after.leases
            if known.get(one.id) is not one
        ],
    )


def _store_waiting(connection: sqlite3.Connection, before: Book, after: Book) -> None:
    known, kept = {one.arrival: one for one in before.waiting}, {one.arrival for one in after.waiting}
    connection.executemany("DELETE FROM waiting WHERE arrival=?", [(gone,) for gone in known.keys() - kept])
    connection.executemany(
        "INSERT INTO waiting (arrival, uid, step, node, request, since, seen_at, promised_at)"
        " VALUES (?,?,?,?,?,?,?,?) ON CONFLICT (arrival) DO UPDATE SET node=excluded.node, request=excluded.request,"
        " seen_at=excluded.seen_at, promised_at=excluded.promised_at",
        [
            (
                one.arrival,
                *one.request.key,
                _text(one.request),
                one.since.isoformat(),
                one.seen_at.isoformat(),
                one.promised_at.isoformat() if one.promised_at is not None else None,
            )
            for one in after.waiting
            if known.get(one.arrival) is not one
        ],
    )


def _text(request: LeaseRequest) -> str:
    # What nobody needs is not written, so that who knows no such field reads on.
    seldom = {"attained": 0.0, "first_start": None, "spot": "no", "min_members": None, "max_members": None}
    return json.dumps({name: value for name, value in asdict(request).items() if seldom.get(name, ...) != value})


def _leaving_text(leaving: Leaving | None) -> str | None:
    if leaving is None:
        return None
    said = {name: value for name, value in asdict(leaving).items() if value is not None}
    return json.dumps(said, default=datetime.isoformat)


def _leaving(text: str | None) -> Leaving | None:
    if text is None:
        return None
    said = json.loads(text)
    times = {name: datetime.fromisoformat(said[name]) for name in ("asked_at", "deadline")}
    return Leaving(**{**said, **times})


@lru_cache(maxsize=_KEPT)
def _request(text: str) -> LeaseRequest:
    return LeaseRequest(**json.loads(text))


@lru_cache(maxsize=_KEPT)
def _lease(
    identity: str, request: str, pool: str, granted_at: str, check_at: str, nodes: str, leaving: str | None
) -> Lease:
    return Lease(
        id=identity,
        request=_request(request),
        pool=pool,
        granted_at=datetime.fromisoformat(granted_at),
        check_at=datetime.fromisoformat(check_at),
        nodes=tuple(json.loads(nodes)),
        leaving=_leaving(leaving),
    )


@lru_cache(maxsize=_KEPT)
def _waiting(request: str, arrival: int, since: str, seen_at: str, promised_at: str | None) -> Waiting:
    return Waiting(
        request=_request(request),
        arrival=arrival,
        since=datetime.fromisoformat(since),
        seen_at=datetime.fromisoformat(seen_at),
        promised_at=datetime.fromisoformat(promised_at) if promised_at is not None else None,
    )


_STEPS = (
    # 1: ``uid, step, node`` is the replay key; ``request`` is a LeaseRequest as JSON.
    (
        """CREATE TABLE leases (
            id TEXT PRIMARY KEY,
            uid TEXT NOT NULL, step TEXT NOT NULL, node TEXT NOT NULL,
            request TEXT NOT NULL,
            pool TEXT NOT NULL,
            granted_at TEXT NOT NULL,
            check_at TEXT NOT NULL,
            UNIQUE (uid, step, node)
        ) STRICT""",
        """CREATE TABLE waiting (
            arrival INTEGER PRIMARY KEY AUTOINCREMENT,
            uid TEXT NOT NULL, step TEXT NOT NULL, node TEXT NOT NULL,
            request TEXT NOT NULL,
            since TEXT NOT NULL,
            seen_at TEXT NOT NULL,
            UNIQUE (uid, step, node)
        ) STRICT""",
    ),
    # 2: what leases that are over have left in the means of their queues; a LeaseRequest may have ``seconds``.
    (
        """CREATE TABLE history (
            queue TEXT NOT NULL, pool TEXT NOT NULL,
            gpus REAL NOT NULL,
            at TEXT NOT NULL,
            PRIMARY KEY (queue, pool)
        ) STRICT""",
    ),
    # 3: nodes of the members as JSON, and a Leaving as JSON; a LeaseRequest may have ``members`` and
    # ``attained`` with ``first_start``.
    (
        "ALTER TABLE leases ADD COLUMN nodes TEXT NOT NULL DEFAULT '[]'",
        "ALTER TABLE leases ADD COLUMN leaving TEXT",
    ),
    # 4: a LeaseRequest may have ``spot``, and the pool of a lease may be a flavor; when who waits was promised GPUs.
    ("ALTER TABLE waiting ADD COLUMN promised_at TEXT",),
)


def migrate(connection: sqlite3.Connection, path: Path) -> None:
    """Bring the file at ``path`` to the current tables.

    Raises:
        StoreError: a newer version of Tiphys made the file.
    """
    if connection.execute("PRAGMA user_version").fetchone()[0] == len(_STEPS):
        return  # nobody has to wait for those who write
    connection.execute("BEGIN IMMEDIATE")
    try:
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version > len(_STEPS):
            raise StoreError(
                f"the GPU ledger {path} has format {version}, this Tiphys knows up to {len(_STEPS)}; upgrade Tiphys"
            )
        for statements in _STEPS[version:]:
            for statement in statements:
                connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {len(_STEPS)}")
    except BaseException:
        connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


_Answer = TypeVar("_Answer")


class SqliteLedger(BookLedger):
    """`AdmissionBackend` in one file.

    ``queues`` None means that nothing is limited.

    Raises:
        StoreError: the file cannot be opened, read or written, or was made by a newer version.
        UsageError: the queues go by the nodes of a cluster.
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
                "the queues go by the nodes of a cluster (cluster_nodes), and there is none; declare `nodes`"
            )
        super().__init__(clock, check_every, forget_after)
        self._path = path
        self._queues = queues
        self._lock = threading.Lock()
        with self._translated():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._connection = _connect(path)

    def close(self) -> None:
        """Close the file. The ledger answers no more."""
        with self._lock:
            self._connection.close()

    def _take(self, transition: Transition[_Answer]) -> _Answer:
        with self._lock, self._translated():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                before = load(self._connection)
                after, answer = transition(before, self._queues)
                store(self._connection, before, after)
                failpoint("ledger.before_commit")
            except BaseException:
                self._connection.execute("ROLLBACK")
                raise
            self._connection.execute("COMMIT")
        failpoint("ledger.after_commit")
        return answer

    def _read(self) -> tuple[Book, QueueRules]:
        with self._lock, self._translated():
            self._connection.execute("BEGIN")  # both tables as they were at one instant
            try:
                return load(self._connection), self._queues
            finally:
                self._connection.execute("COMMIT")

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise StoreError(
                f"the GPU ledger {self._path} did not answer: {error}; check that its disk is writable and not full"
            ) from error


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=10, isolation_level=None, check_same_thread=False)
    try:
        connection.execute("PRAGMA journal_mode=WAL")
        # A lease that was answered must survive a power cut: WAL alone promises that only with FULL.
        connection.execute("PRAGMA synchronous=FULL")
        migrate(connection, path)
    except BaseException:
        connection.close()
        raise
    return connection
