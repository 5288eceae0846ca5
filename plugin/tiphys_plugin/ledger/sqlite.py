"""The ledger of leases: decided and recorded in one SQLite transaction.

If the decision and its record were two steps, two callers could both be told
that the last GPUs are theirs, and a crash in between would leak them. Here
``BEGIN IMMEDIATE`` lets one writer in at a time, over any number of processes
on one machine, and a killed process leaves either the lease or nothing.
"""

import contextlib
import sqlite3
import threading
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import TypeVar

from tiphys.errors import StoreError, UsageError
from tiphys.faults import failpoint
from tiphys.records import utc_now
from tiphys_plugin.ledger import rows
from tiphys_plugin.ledger.admission import FORGET_AFTER
from tiphys_plugin.ledger.backend import CHECK_EVERY, BookLedger, Transition
from tiphys_plugin.ledger.book import Book
from tiphys_plugin.ledger.schema import migrate
from tiphys_plugin.queues import QueueRules, Queues

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
                before = rows.load(self._connection)
                after, answer = transition(before, self._queues)
                rows.store(self._connection, before, after)
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
                return rows.load(self._connection), self._queues
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
