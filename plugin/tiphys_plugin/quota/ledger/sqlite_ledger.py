"""The ledger in a SQLite file: one transaction decides on a request and records the decision.

With two transactions, two callers could both get the last GPUs, and a crash
between them would leak a lease. ``BEGIN IMMEDIATE`` admits one writer at a time
over all processes of a machine, and a killed process leaves a whole lease or none.

Each decision loads the whole state and stores the changed rows.

``PRAGMA user_version`` is the format of the file. The table is created in one
transaction with it, so a crash repeats both.
"""

import contextlib
import json
import sqlite3
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

from tiphys.errors import StoreError, UsageError
from tiphys.faults import failpoint
from tiphys.records import utc_now
from tiphys_plugin.quota.lease import EndedUsage, Lease, LedgerState, PendingRequest
from tiphys_plugin.quota.ledger.backend import CHECK_EVERY, BaseLedger, Transition
from tiphys_plugin.quota.ledger.status_codec import HISTORY, LEASES, PENDING, RecordCodec
from tiphys_plugin.quota.queues import Queues
from tiphys_plugin.quota.scheduler.cache import FORGET_AFTER

_CODECS: dict[str, RecordCodec[Any]] = {"lease": LEASES, "waiting": PENDING, "history": HISTORY}
"""Codecs by kind of record."""


class StateRows:
    """The ledger state in the table of a file.

    A known row yields the same object again, so the rows that a transition left unchanged are found by identity.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], Any] = {}

    def load(self, connection: sqlite3.Connection) -> LedgerState:
        """Load the ledger state; must run within a transaction."""
        rows = connection.execute("SELECT kind, record FROM records ORDER BY rowid").fetchall()
        self._known = {row: self._known.get(row) or _CODECS[row[0]].parse(row[1]) for row in rows}
        records: defaultdict[str, list[Any]] = defaultdict(list)
        for (kind, _), record in self._known.items():
            records[kind].append(record)
        history = sorted(records["history"], key=lambda usage: (usage.queue, usage.pool))
        return LedgerState(tuple(records["lease"]), tuple(records["waiting"]), tuple(history))


def store_state(connection: sqlite3.Connection, before: LedgerState, after: LedgerState) -> None:
    """Write the difference between two states. A changed row keeps its place, and a new one is the last."""
    stored, kept = _index_records(before), _index_records(after)
    connection.executemany("DELETE FROM records WHERE kind=? AND key=?", stored.keys() - kept.keys())
    connection.executemany(
        "INSERT INTO records (kind, key, record) VALUES (?,?,?)"
        " ON CONFLICT (kind, key) DO UPDATE SET record=excluded.record",
        [(*key, _CODECS[key[0]].format(record)) for key, record in kept.items() if stored.get(key) is not record],
    )


def _index_records(state: LedgerState) -> dict[tuple[str, str], Lease | PendingRequest | EndedUsage]:
    """The records by their kind and their key."""
    return {
        **{("lease", lease.id): lease for lease in state.leases},
        **{("waiting", str(pending.arrival)): pending for pending in state.pending},
        **{("history", json.dumps([usage.queue, usage.pool])): usage for usage in state.history},
    }


_FORMAT = 7
_SCHEMA = """CREATE TABLE IF NOT EXISTS records (
    kind TEXT NOT NULL, key TEXT NOT NULL,
    record TEXT NOT NULL, -- as `status_codec` formats it
    PRIMARY KEY (kind, key)
) STRICT"""


def create_schema(connection: sqlite3.Connection, path: Path) -> None:
    """Create the table in an empty file.

    Raises:
        StoreError: another version of Tiphys made the file.
    """
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version not in (0, _FORMAT):
        raise _format_error(path, version)
    if not version:  # without a lock if it is current, so it opens during a write
        connection.executescript(f"BEGIN IMMEDIATE; {_SCHEMA}; PRAGMA user_version = {_FORMAT}; COMMIT")


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
            connection.execute("BEGIN")  # one snapshot
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
            self._connection.execute("BEGIN")  # one snapshot
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
