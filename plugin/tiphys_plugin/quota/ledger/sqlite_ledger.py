"""The ledger in a SQLite file: one transaction decides on a request and records the decision.

With two transactions, two callers could both get the last GPUs, and a crash
between them would leak a lease. ``BEGIN IMMEDIATE`` admits one writer at a time
over all processes of a machine, and a killed process leaves a whole lease or none.

Each decision loads the whole state and stores the changed rows.

``PRAGMA user_version`` is the format of the file. The tables are created in one
transaction with it, so a crash repeats their creation as a whole.
"""

import contextlib
import sqlite3
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import TypeVar

from tiphys.errors import StoreError, UsageError
from tiphys.faults import failpoint
from tiphys.records import utc_now
from tiphys_plugin.quota.lease import EndedUsage, Lease, LedgerState, PendingRequest
from tiphys_plugin.quota.ledger.backend import CHECK_EVERY, BaseLedger, Transition
from tiphys_plugin.quota.ledger.status_codec import format_lease, format_pending, parse_lease, parse_pending
from tiphys_plugin.quota.ledger.transitions import FORGET_AFTER
from tiphys_plugin.quota.queues import Queues


class StateRows:
    """The ledger state in the tables of a file.

    A known row yields the same object again, so the rows that a transition left unchanged are found by identity.
    """

    def __init__(self) -> None:
        self._leases: dict[str, Lease] = {}
        self._pending: dict[str, PendingRequest] = {}

    def load(self, connection: sqlite3.Connection) -> LedgerState:
        """Load the ledger state; must run within a transaction."""
        leases = [text for (text,) in connection.execute("SELECT lease FROM leases ORDER BY rowid")]
        waiting = [text for (text,) in connection.execute("SELECT request FROM waiting ORDER BY arrival")]
        history = connection.execute("SELECT queue, pool, gpus, at FROM history ORDER BY queue, pool")
        self._leases = {text: self._leases.get(text) or parse_lease(text) for text in leases}
        self._pending = {text: self._pending.get(text) or parse_pending(text) for text in waiting}
        return LedgerState(
            tuple(self._leases.values()),
            tuple(self._pending.values()),
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
            [(usage.queue, usage.pool, usage.gpus, usage.measured_at.isoformat()) for usage in after.history],
        )


def _store_leases(connection: sqlite3.Connection, before: LedgerState, after: LedgerState) -> None:
    stored, kept_ids = {lease.id: lease for lease in before.leases}, {lease.id for lease in after.leases}
    connection.executemany("DELETE FROM leases WHERE id=?", [(lease_id,) for lease_id in stored.keys() - kept_ids])
    connection.executemany(
        "INSERT INTO leases (id, uid, step, node, lease) VALUES (?,?,?,?,?)"
        " ON CONFLICT (id) DO UPDATE SET node=excluded.node, lease=excluded.lease",
        [
            (lease.id, *lease.request.key, format_lease(lease))
            for lease in after.leases
            if stored.get(lease.id) is not lease
        ],
    )


def _store_waiting(connection: sqlite3.Connection, before: LedgerState, after: LedgerState) -> None:
    stored = {pending.arrival: pending for pending in before.pending}
    kept_arrivals = {pending.arrival for pending in after.pending}
    connection.executemany(
        "DELETE FROM waiting WHERE arrival=?", [(arrival,) for arrival in stored.keys() - kept_arrivals]
    )
    connection.executemany(
        "INSERT INTO waiting (arrival, uid, step, node, request) VALUES (?,?,?,?,?)"
        " ON CONFLICT (arrival) DO UPDATE SET node=excluded.node, request=excluded.request",
        [
            (pending.arrival, *pending.request.key, format_pending(pending))
            for pending in after.pending
            if stored.get(pending.arrival) is not pending
        ],
    )


_FORMAT = 6
_SCHEMA = (
    # ``uid, step, node`` is the replay key. ``lease`` is a Lease, and ``request`` a PendingRequest, as `status_codec`
    # encodes them.
    """CREATE TABLE leases (
        id TEXT PRIMARY KEY,
        uid TEXT NOT NULL, step TEXT NOT NULL, node TEXT NOT NULL,
        lease TEXT NOT NULL,
        UNIQUE (uid, step, node)
    ) STRICT""",
    """CREATE TABLE waiting (
        arrival INTEGER PRIMARY KEY AUTOINCREMENT,
        uid TEXT NOT NULL, step TEXT NOT NULL, node TEXT NOT NULL,
        request TEXT NOT NULL,
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
            return StateRows().load(connection)
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
        self._rows = StateRows()
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
                before = self._rows.load(self._connection)
                after, answer = transition(replace(before, queues=self._queues))
                store_state(self._connection, before, after)
                failpoint("ledger.before_commit")
            except BaseException:
                self._connection.execute("ROLLBACK")
                raise
            self._connection.execute("COMMIT")
        failpoint("ledger.after_commit")
        return answer

    def snapshot(self) -> LedgerState:
        with self._lock, self._translate_errors():
            self._connection.execute("BEGIN")  # one snapshot of all tables
            try:
                return replace(self._rows.load(self._connection), queues=self._queues)
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
