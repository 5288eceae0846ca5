"""The ledger of leases: decided and recorded in one SQLite transaction.

If the decision and its record were two steps, two callers could both be told
that the last GPUs are theirs, and a crash in between would leak them. Here
``BEGIN IMMEDIATE`` lets one writer in at a time, over any number of processes
on one machine, and a killed process leaves either the lease or nothing.
"""

import contextlib
import secrets
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timedelta
from pathlib import Path

from tiphys.errors import StoreError, UsageError
from tiphys.faults import failpoint
from tiphys.records import utc_now
from tiphys_plugin.ledger import rows
from tiphys_plugin.ledger.admission import FORGET_AFTER, admit
from tiphys_plugin.ledger.book import Book
from tiphys_plugin.ledger.model import Admission, Lease, LeaseRequest, Snapshot
from tiphys_plugin.ledger.schema import migrate
from tiphys_plugin.preemption.marking import mark
from tiphys_plugin.queues import Queues


class SqliteLedger:
    """`AdmissionBackend` in one file.

    ``queues`` None means that nothing is limited. No time takes a lease away:
    only a `sweep` that finds it gone does, and it asks about each lease at most
    once in ``check_every``. A waiting request that has not asked for
    ``forget_after`` no longer stands in anybody's way; it keeps its place in
    case it comes back.

    Raises:
        StoreError: the file cannot be opened, read or written, or was made by a newer version.
        UsageError: the queues go by the nodes of a cluster.
    """

    def __init__(
        self,
        path: Path,
        queues: Queues | None,
        clock: Callable[[], datetime] = utc_now,
        check_every: timedelta = timedelta(seconds=30),
        forget_after: timedelta = FORGET_AFTER,
    ) -> None:
        if queues is not None and queues.cluster_nodes is not None:
            raise UsageError(
                "the queues go by the nodes of a cluster (cluster_nodes), and there is none; declare `nodes`"
            )
        self._path = path
        self._queues = queues
        self._clock = clock
        self._check_every = check_every
        self._forget_after = forget_after
        self._lock = threading.Lock()
        with self._translated():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._connection = _connect(path)

    def request(self, request: LeaseRequest) -> Admission:
        with self._writing() as (connection, book):
            now, lease = self._clock(), secrets.token_hex(8)
            after, answer = admit(book, self._queues, request, now, lease, self._forget_after)
            rows.store(connection, book, after)
            failpoint("ledger.before_commit")
        failpoint("ledger.after_commit")
        return answer

    def restore(self, lease: str, request: LeaseRequest, gpu_type: str | None, nodes: tuple[str, ...] = ()) -> None:
        self._turn(lambda book: book.restore(lease, request, gpu_type, nodes, self._queues, self._clock()))

    def withdraw(self, uid: str) -> None:
        self._turn(lambda book: book.withdraw(uid))

    def release(self, lease: str) -> None:
        self._turn(lambda book: book.release(lease, self._queues, self._clock()))

    def shrink(self, lease: str, members: int, nodes: tuple[str, ...] = ()) -> None:
        self._turn(lambda book: book.shrink(lease, members, nodes, self._queues, self._clock()))

    def release_workflow(self, uid: str) -> None:
        self._turn(lambda book: book.release_workflow(uid, self._clock()))

    def ask_to_leave(self, waiting: tuple[str, str], grace_seconds: Mapping[str, float]) -> tuple[Lease, ...]:
        with self._writing() as (connection, book):
            after, marked = mark(book, self._queues, waiting, grace_seconds, self._clock(), self._forget_after)
            rows.store(connection, book, after)
        return marked

    def sweep(self, is_gone: Callable[[Lease], bool]) -> list[Lease]:
        # The question goes to the cluster, so it is asked outside of any transaction.
        now = self._clock()
        due = self._read().due(now, self._check_every)
        gone = [lease for lease in due if is_gone(lease)]
        if due:
            self._turn(lambda book: book.checked(due, gone, now + self._check_every, self._queues, now))
        return gone

    def snapshot(self) -> Snapshot:
        return self._read().snapshot(self._queues)

    def close(self) -> None:
        """Close the file. The ledger answers no more."""
        with self._lock:
            self._connection.close()

    def _read(self) -> Book:
        with self._lock, self._translated():
            self._connection.execute("BEGIN")  # both tables as they were at one instant
            try:
                return rows.load(self._connection)
            finally:
                self._connection.execute("COMMIT")

    def _turn(self, transition: Callable[[Book], Book]) -> None:
        with self._writing() as (connection, book):
            rows.store(connection, book, transition(book))

    @contextlib.contextmanager
    def _writing(self) -> Iterator[tuple[sqlite3.Connection, Book]]:
        with self._lock, self._translated():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection, rows.load(self._connection)
            except BaseException:
                self._connection.execute("ROLLBACK")
                raise
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
