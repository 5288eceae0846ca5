"""The ledger of leases: decided and recorded in one SQLite transaction.

If the decision and its record were two steps, two callers could both be told
that the last GPUs are theirs, and a crash in between would leak them. Here
``BEGIN IMMEDIATE`` lets one writer in at a time, over any number of processes
on one machine, and a killed process leaves either the lease or nothing.
"""

import contextlib
import json
import secrets
import sqlite3
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from datetime import datetime, timedelta
from functools import lru_cache
from pathlib import Path

from tiphys.errors import StoreError
from tiphys.faults import failpoint
from tiphys.records import utc_now
from tiphys_plugin.ledger import pools
from tiphys_plugin.ledger.decide import State, decide
from tiphys_plugin.ledger.model import Admission, Admitted, Deferred, Lease, LeaseRequest, Snapshot, Waiting
from tiphys_plugin.ledger.schema import migrate
from tiphys_plugin.queues import Queues

_LEASES = "SELECT id, request, pool, granted_at, check_at FROM leases"
_WAITING = "SELECT request, arrival, since, seen_at FROM waiting"


class SqliteLedger:
    """`AdmissionBackend` in one file.

    ``queues`` None means that nothing is limited. No time takes a lease away:
    only a `sweep` that finds it gone does, and it asks about each lease at most
    once in ``check_every``. A waiting request that has not asked for
    ``forget_after`` no longer stands in anybody's way; it keeps its place in
    case it comes back.

    Raises:
        StoreError: the file cannot be opened, read or written, or was made by a newer version.
    """

    def __init__(
        self,
        path: Path,
        queues: Queues | None,
        clock: Callable[[], datetime] = utc_now,
        check_every: timedelta = timedelta(seconds=30),
        forget_after: timedelta = timedelta(minutes=2),
    ) -> None:
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
        with self._writing() as connection:
            if (held := self._take_over(connection, request)) is not None:
                return Admitted(lease=held.id, pool=held.pool)
            now = self._clock()
            waiting = self._queue_up(connection, request, now)
            answer = decide(self._state(connection, request, now), request, waiting.arrival)
            if isinstance(answer, Admitted):
                answer = self._grant(connection, waiting, answer, now)
            if not isinstance(answer, Deferred):
                connection.execute("DELETE FROM waiting WHERE uid=? AND step=? AND node=?", request.key)
            failpoint("ledger.before_commit")
        failpoint("ledger.after_commit")
        return answer

    def restore(self, lease: str, request: LeaseRequest, gpu_type: str | None) -> None:
        pool = pools.counted_against(self._queues, request, gpu_type)
        with self._writing() as connection:
            self._insert(connection, lease, request, pool, self._clock())

    def withdraw(self, uid: str) -> None:
        with self._writing() as connection:
            connection.execute("DELETE FROM waiting WHERE uid=?", (uid,))

    def release(self, lease: str) -> None:
        with self._writing() as connection:
            connection.execute("DELETE FROM leases WHERE id=?", (lease,))

    def release_workflow(self, uid: str) -> None:
        with self._writing() as connection:
            connection.execute("DELETE FROM waiting WHERE uid=?", (uid,))
            connection.execute("UPDATE leases SET check_at=? WHERE uid=?", (self._clock().isoformat(), uid))

    def sweep(self, is_gone: Callable[[Lease], bool]) -> list[Lease]:
        # The question goes to the cluster, so it is asked outside of any transaction.
        now = self._clock()
        again = now + self._check_every
        # A check further away than any that was ever set: the clock was put back since.
        due = [lease for lease in self.snapshot().leases if lease.check_at <= now or lease.check_at > again]
        gone = [lease for lease in due if is_gone(lease)]
        if due:
            with self._writing() as connection:
                later = again.isoformat()
                connection.executemany("UPDATE leases SET check_at=? WHERE id=?", [(later, lease.id) for lease in due])
                # One that serves another attempt by now is not the one that was looked at.
                seen = [(lease.id, json.dumps(asdict(lease.request))) for lease in gone]
                connection.executemany("DELETE FROM leases WHERE id=? AND request=?", seen)
        return gone

    def snapshot(self) -> Snapshot:
        with self._lock, self._translated():
            return Snapshot(
                leases=tuple(map(_lease, self._connection.execute(f"{_LEASES} ORDER BY rowid"))),
                waiting=tuple(map(_waiting, self._connection.execute(f"{_WAITING} ORDER BY arrival"))),
            )

    def close(self) -> None:
        """Close the file. The ledger answers no more."""
        with self._lock:
            self._connection.close()

    @staticmethod
    def _take_over(connection: sqlite3.Connection, request: LeaseRequest) -> Lease | None:
        """The lease that this node was given before, or that another node of this attempt left behind.

        A node that dies between its lease and its claim leaves GPUs that nobody
        uses and that no look at pods can find. The next try asks for the same
        attempt, and would wait for them until its own workflow ends.
        """
        rows = connection.execute(f"{_LEASES} WHERE uid=? AND step=?", (request.uid, request.step))
        leases = [_lease(row) for row in rows]
        own = [lease for lease in leases if lease.request.node == request.node]
        left = [lease for lease in leases if lease.request.attempt == request.attempt]
        held = next(iter(own + left), None)
        if held is not None and held.request != request:
            # Its attempt and node are what its pods and its end are looked up by.
            now_for = replace(held.request, node=request.node, attempt=request.attempt)
            connection.execute(
                "UPDATE leases SET node=?, request=? WHERE id=?",
                (request.node, json.dumps(asdict(now_for)), held.id),
            )
        return held

    def _queue_up(self, connection: sqlite3.Connection, request: LeaseRequest, now: datetime) -> Waiting:
        """Take a place, or say that the one taken before is still wanted; a new try of the step keeps it."""
        connection.execute(
            "UPDATE OR IGNORE waiting SET node=? WHERE uid=? AND step=?", (request.node, request.uid, request.step)
        )
        connection.execute(
            "INSERT INTO waiting (uid, step, node, request, since, seen_at) VALUES (?, ?, ?, ?, ?, ?)"
            " ON CONFLICT (uid, step, node) DO UPDATE SET request=excluded.request, seen_at=excluded.seen_at",
            (*request.key, json.dumps(asdict(request)), now.isoformat(), now.isoformat()),
        )
        row = connection.execute(f"{_WAITING} WHERE uid=? AND step=? AND node=?", request.key).fetchone()
        return _waiting(row)

    def _state(self, connection: sqlite3.Connection, request: LeaseRequest, now: datetime) -> State:
        others = [w for w in map(_waiting, connection.execute(_WAITING)) if w.request.key != request.key]
        return State(
            queues=self._queues,
            leases=tuple(map(_lease, connection.execute(_LEASES))),
            waiting=tuple(w for w in others if now - w.seen_at <= self._forget_after),
        )

    def _grant(self, connection: sqlite3.Connection, waiting: Waiting, answer: Admitted, now: datetime) -> Admitted:
        lease = secrets.token_hex(8)
        self._insert(connection, lease, waiting.request, answer.pool, now)
        return replace(answer, lease=lease, waited_seconds=(now - waiting.since).total_seconds())

    @staticmethod
    def _insert(connection: sqlite3.Connection, lease: str, request: LeaseRequest, pool: str, now: datetime) -> None:
        row = (lease, *request.key, json.dumps(asdict(request)), pool, now.isoformat(), now.isoformat())
        connection.execute(
            "INSERT INTO leases (id, uid, step, node, request, pool, granted_at, check_at) VALUES (?,?,?,?,?,?,?,?)"
            " ON CONFLICT DO NOTHING",
            row,
        )

    @contextlib.contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        with self._lock, self._translated():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
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


@lru_cache(maxsize=8192)
def _request(text: str) -> LeaseRequest:
    """Cached, because every decision reads every row again, and a thousand may wait."""
    return LeaseRequest(**json.loads(text))


def _lease(row: tuple[str, str, str, str, str]) -> Lease:
    identity, request, pool, granted_at, check_at = row
    return Lease(
        id=identity,
        request=_request(request),
        pool=pool,
        granted_at=datetime.fromisoformat(granted_at),
        check_at=datetime.fromisoformat(check_at),
    )


def _waiting(row: tuple[str, int, str, str]) -> Waiting:
    request, arrival, since, seen_at = row
    return Waiting(
        request=_request(request),
        arrival=arrival,
        since=datetime.fromisoformat(since),
        seen_at=datetime.fromisoformat(seen_at),
    )
