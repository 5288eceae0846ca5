"""Reads a `GPULedger` object, appends to its log, and detects that either was lost or damaged.

A missing, damaged or recreated object is never taken for an empty ledger state:
that would grant GPUs that are held. Only a service that starts, or that recovers
a lost ledger, may begin with an empty state, because it restores the leases of
live pods first.

If records of the log are lost, the service that misses them asks the others, by a
mark in the head. A service that still knows all leases writes them to a new log;
so does one that finds records gone although it needs none of them itself.
If none does within `REPAIR_SECONDS`, the log begins without leases, and every
service records the leases of live pods again.
"""

import json
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta

from tiphys.errors import (
    ConflictError,
    ForbiddenError,
    IntegrityError,
    NotFoundError,
    ObjectExistsError,
    StoreError,
    UsageError,
)
from tiphys.kube.api import KubeApi, Object
from tiphys.kube.ledger_log import (
    LOG_FORMAT,
    LedgerBook,
    LedgerRecords,
    LogDamagedError,
    LogHead,
    LogReader,
    parse_head,
)
from tiphys.kube.resources import GPU_LEDGERS
from tiphys.records import utc_now
from tiphys_plugin.quota.admission_backend import LedgerLostError
from tiphys_plugin.quota.lease import Lease, LedgerState, PendingRequest
from tiphys_plugin.quota.ledger import status_codec
from tiphys_plugin.quota.ledger.log_entry import StateCodec, encode_changes
from tiphys_plugin.quota.queues import MisconfiguredQueues, QueueRules, parse_queues
from tiphys_plugin.quota.scheduler.cache import SchedulerCache

MAX_ENTRY_BYTES = 1_000_000
"""Largest entry. A larger change is stored as a snapshot; etcd takes 1.5 MiB for a whole object."""
REPAIR_SECONDS = 12.0
"""How long the services may take to write anew what a damaged log has lost; each of them reads it every 5 s."""
_ABANDONED_AFTER = timedelta(hours=1)
_BYTES_PER_ENTRY = 100
_MIN_SNAPSHOT_BYTES = 256 << 10
_READ_TRIES = 4


@dataclass(frozen=True)
class LedgerVersion:
    """The parsed content of one resourceVersion of the object."""

    manifest: Object
    rules: QueueRules
    state: LedgerState
    head: LogHead | None
    """Head of the log; None if the object has no status yet."""

    @property
    def object_version(self) -> tuple[str, str]:
        return _object_version(self.manifest)

    @property
    def needs_write(self) -> bool:
        """Whether the state has to be written although nothing changed: another service found its log damaged."""
        return self.head is not None and self.head.repair_asked_at is not None

    def makes_snapshot_due(self, earlier: "LedgerVersion") -> bool:
        """Whether the write after ``earlier`` has to take a snapshot; of all services, the one that wrote it does."""
        if self.head is None or earlier.head is None:
            return False
        return self.head.record_bytes // self._snapshot_bytes > earlier.head.record_bytes // self._snapshot_bytes

    @property
    def _snapshot_bytes(self) -> int:
        return max(_MIN_SNAPSHOT_BYTES, _BYTES_PER_ENTRY * (len(self.state.leases) + len(self.state.pending)))


class LedgerObject:
    """The object ``name`` in ``namespace`` with its log, created empty if it does not exist. Thread-safe."""

    def __init__(
        self,
        api: KubeApi,
        namespace: str,
        name: str,
        clock: Callable[[], datetime] = utc_now,
        cache: SchedulerCache | None = None,
    ) -> None:
        self._api = api
        self._namespace = namespace
        self._name = name
        self._cache = cache or SchedulerCache()
        self._clock = clock
        self._lock = threading.RLock()
        self._records = LedgerRecords(api, namespace, name)
        self._reader: LogReader[Lease, PendingRequest] = LogReader(self._records, StateCodec())
        self._finished_snapshot: LogHead | None = None
        self._seen_records: dict[str, str] = {}
        self._lost_log = ""
        """Id of a log of which records were lost, and which the next `write` replaces."""
        self.last_version: LedgerVersion | None = None
        """The last version that this service read or wrote; other services may have written since."""

    def __str__(self) -> str:
        return f"GPULedger {self._namespace}/{self._name}"

    def read(self) -> LedgerVersion:
        """Read the newest version, by one request if there is nothing new.

        Raises:
            StoreError: it cannot be read, or must not be trusted; the message says what to do.
        """
        with self._lock:
            return self._parse_newest(self._get() or self._create())

    def accept_replacement(self) -> None:
        """Take the object that is there now for the ledger, after the one before was lost.

        Raises:
            LedgerLostError: there is none, or it has no queues and the one before had some; or its log is damaged, and
                another service may repair it.
            StoreError: it cannot be read.
        """
        with self._lock:
            manifest, lost = self._get(), self.last_version
            if manifest is None:
                raise self._lost_error("was deleted")
            if lost is not None and lost.rules is not None and manifest.get("spec") is None:
                raise self._lost_error("was made again without queues")
            self.last_version, self._reader = None, LogReader(self._records, StateCodec())
            try:
                self._parse_newest(manifest)
            except _DamagedLogError as damaged:
                self._repair(damaged)
            finally:  # a damaged object is not accepted, so the one before still counts as lost
                self.last_version = self.last_version or lost

    def write(self, version: LedgerVersion, ledger_state: LedgerState) -> LedgerVersion:
        """Append the change from ``version`` to ``ledger_state``, and return the version written.

        Raises:
            ConflictError: ``version`` is not the newest one; nothing was written.
            StoreError: no answer; the state may have been written.
        """
        try:
            head = self._next_head(version, ledger_state)
            with self._lock:
                return self._replace_status(version, ledger_state, head)
        except NotFoundError as error:
            raise ConflictError(f"{self} is gone, or its kind has no status: {error}") from error
        except UsageError as error:
            raise StoreError(f"{self}: {error}; bring its kind up to date with the chart") from error

    def take_snapshot(self, version: LedgerVersion) -> None:
        """Store all leases and requests of ``version``, so that the next `write` can end the records before it.

        Raises:
            StoreError: the API server does not answer.
        """
        if (head := version.head) is None:
            return
        sections = status_codec.encode_state(version.state)
        chunks = self._records.write_snapshot(head.id, head.number, sections, version.manifest)
        taken = {"snapshot": head.number, "snapshot_first": head.first, "chunks": chunks}
        self._finished_snapshot = head.model_copy(update=taken)

    def needs_write(self, version: LedgerVersion) -> bool:
        """Whether to write although nothing changed: to end the records before a snapshot, or to replace the log."""
        is_lost = version.head is not None and version.head.id == self._lost_log
        return version.needs_write or self._finished_snapshot is not None or is_lost

    def find_lost_record(self) -> str:
        """Return what a new reader would miss, empty if nothing; the next `write` then replaces the log.

        Raises:
            StoreError: the ledger cannot be read.
        """
        head = self.read().head
        if head is None or not (lost := self._records.find_lost(head, self._seen_records)):
            return ""
        now = self.read().head  # a newer snapshot may have ended the record
        if now is None or (now.id, now.snapshot) != (head.id, head.snapshot):
            return ""
        self._lost_log = head.id
        return lost

    def delete_unused_records(self) -> int:
        """Delete the records before the newest snapshot, and return their number."""
        head = self.last_version.head if self.last_version is not None else None
        return 0 if head is None else self._records.delete_unused(head, self._clock() - _ABANDONED_AFTER)

    def _next_head(self, version: LedgerVersion, ledger_state: LedgerState) -> LogHead:
        head = version.head or LogHead(id=_draw_id())
        changes = encode_changes(version.state, ledger_state, self._cache)
        # A new log needs no record of the old one, whatever that has lost, and its snapshot has room for any change.
        if head.repair_asked_at is not None or head.id == self._lost_log or _size(changes) > MAX_ENTRY_BYTES:
            return self._begin_log(version, ledger_state, head.number + 1)
        if not changes:
            return self._with_finished_snapshot(head)
        return self._with_finished_snapshot(self._records.append(head, changes, version.manifest))

    def _begin_log(self, version: LedgerVersion, ledger_state: LedgerState, number: int) -> LogHead:
        """The head of a new log that begins with a snapshot of ``ledger_state``."""
        log_id, losses = _draw_id(), version.head.losses if version.head is not None else 0
        sections = status_codec.encode_state(ledger_state)
        chunks = self._records.write_snapshot(log_id, number, sections, version.manifest)
        return LogHead(
            id=log_id, number=number, snapshot=number, snapshot_first=number + 1, chunks=chunks, losses=losses
        )

    def _with_finished_snapshot(self, head: LogHead) -> LogHead:
        taken, self._finished_snapshot = self._finished_snapshot, None
        # It was written in the background: others may have begun a new log, or taken a later snapshot, meanwhile.
        if taken is None or taken.id != head.id or taken.snapshot <= head.snapshot:
            return head
        record_bytes = max(0, head.record_bytes - taken.record_bytes)
        changes = {name: getattr(taken, name) for name in ("snapshot", "snapshot_first", "chunks")}
        return head.model_copy(update={**changes, "record_bytes": record_bytes})

    def _replace_status(self, version: LedgerVersion, ledger_state: LedgerState, head: LogHead) -> LedgerVersion:
        summary = status_codec.encode_summary(ledger_state, self._cache.sum_held_gpus(ledger_state))
        content = {"version": LOG_FORMAT, "summary": summary, "log": head.to_json()}
        # By uid and resourceVersion the API server refuses a write after a newer one, or to another object of the name:
        # this PUT alone decides which entry comes next, for all services.
        metadata = {key: version.manifest["metadata"][key] for key in ("name", "namespace", "uid", "resourceVersion")}
        unchanged = {key: value for key, value in version.manifest.items() if key in ("apiVersion", "kind", "spec")}
        body = {**unchanged, "metadata": metadata, "status": content}
        written = self._api.replace(GPU_LEDGERS, self._namespace, body, "status")
        self._reader.accept(head, LedgerBook(ledger_state.leases, ledger_state.pending, ledger_state.history))
        self.last_version = LedgerVersion(written, version.rules, ledger_state, head)
        return self.last_version

    def _get(self) -> Object | None:
        try:
            return self._api.get(GPU_LEDGERS, self._namespace, self._name)
        except UsageError as error:
            raise StoreError(f"{self} cannot be read: {error}") from error

    def _create(self) -> Object:
        if self.last_version is not None:
            raise self._lost_error("was deleted")
        try:
            return self._api.create(GPU_LEDGERS, self._namespace, {"metadata": {"name": self._name}})
        except ObjectExistsError:
            manifest = self._get()  # another service has created it meanwhile
            if manifest is None:
                raise self._lost_error("was made and deleted again") from None
            return manifest
        except (NotFoundError, UsageError) as error:
            raise StoreError(
                f"{self} cannot be made: {error}; install the chart of Tiphys, which brings the kind GPULedger, "
                "into this namespace"
            ) from error
        except ForbiddenError as error:
            raise StoreError(
                f"there is no {self}, and this account may not make one ({error}); make it with "
                f"`tiphys queues apply -f FILE -n {self._namespace}`, or by the chart"
            ) from error

    def _parse_newest(self, manifest: Object) -> LedgerVersion:
        """Parse ``manifest``, or a newer one if records that it needs were deleted meanwhile."""
        for _ in range(_READ_TRIES):
            if self.last_version is not None and self.last_version.object_version == _object_version(manifest):
                break
            try:
                self.last_version = self._parse_version(manifest)
            except _DamagedLogError:
                newest = self._get()
                if newest is None or _object_version(newest) == _object_version(manifest):
                    raise
                manifest = newest
        if self.last_version is None or self.last_version.object_version != _object_version(manifest):
            raise StoreError(f"{self} was changed by others {_READ_TRIES} times while it was read; ask again")
        return self.last_version

    def _parse_version(self, manifest: Object) -> LedgerVersion:
        last = self.last_version
        if last is not None and manifest["metadata"]["uid"] != last.object_version[0]:
            raise self._lost_error("is another object of the same name")
        if "status" not in manifest:
            if last is not None and "status" in last.manifest:
                raise self._lost_error("has lost its status")
            return LedgerVersion(manifest, self._rules(manifest), LedgerState(), None)
        try:
            head = parse_head(manifest["status"])
        except IntegrityError as error:
            raise StoreError(
                f"the status of {self} is damaged: {error}. Nothing is granted until it is repaired: with "
                f"`kubectl edit gpuledgers {self._name} -n {self._namespace} --subresource=status`; or delete the "
                f"object and apply its queues again with {self._recovery_phrase}"
            ) from error
        return LedgerVersion(manifest, self._rules(manifest), self._read_log(manifest, head), head)

    def _read_log(self, manifest: Object, head: LogHead) -> LedgerState:
        before = self.last_version.head if self.last_version is not None else None
        # Both logs can be read, and lack leases that this service knows: to follow them would grant held GPUs.
        if before is not None and head.losses > before.losses:
            raise self._lost_error("was begun without its leases, because its log was damaged")
        if before is not None and head.number < before.number:
            raise self._lost_error(f"went back from entry {before.number} of its log to {head.number}")
        try:
            book = self._reader.read(head)
        except LogDamagedError as error:
            raise _DamagedLogError(
                f"the log of {self} is damaged: {error}. No GPUs are granted until a service that still has its "
                "leases writes them anew, or the services record the leases of live pods, which takes some "
                f"{REPAIR_SECONDS:g} s",
                manifest,
                head,
            ) from error
        return LedgerState(*book)

    def _repair(self, damaged: "_DamagedLogError") -> None:
        """Ask the other services for what the log has lost, or begin without it if none of them has it."""
        head, manifest = damaged.head, damaged.manifest
        lost = LedgerVersion(manifest, self._rules(manifest), LedgerState(), None)
        try:
            if head.repair_asked_at is None:
                asked = status_codec.format_timestamp(self._clock())
                self._replace_status(lost, LedgerState(), head.model_copy(update={"repair_asked_at": asked}))
            # The absolute difference, as the other service's clock may be ahead: nothing is granted until this is over.
            elif abs(self._clock() - status_codec.parse_timestamp(head.repair_asked_at)).total_seconds() > (
                REPAIR_SECONDS
            ):
                number = head.number + 1
                begun = LogHead(
                    id=_draw_id(), number=number, snapshot=number, snapshot_first=number + 1, losses=head.losses + 1
                )
                self._replace_status(lost, LedgerState(), begun)
                return
        except (ConflictError, NotFoundError):
            pass  # another service is repairing it
        self.last_version, self._reader = None, LogReader(self._records, StateCodec())
        raise damaged

    def _rules(self, manifest: Object) -> QueueRules:
        """The queues of the spec; the same object for an unchanged spec, because it holds caches."""
        if self.last_version is not None and self.last_version.manifest.get("spec") == manifest.get("spec"):
            return self.last_version.rules
        return parse_ledger_queues(manifest)

    def _lost_error(self, how: str) -> LedgerLostError:
        return LedgerLostError(
            f"{self} {how} while leases were kept in it, so no GPUs are granted; unless it is there, make it with "
            f"{self._recovery_phrase}"
        )

    @property
    def _recovery_phrase(self) -> str:
        return (
            f"`tiphys queues apply -f FILE -n {self._namespace}`, and the services record the leases of live pods in "
            "it and go on within seconds"
        )


class _DamagedLogError(LedgerLostError):
    """The log of ``manifest`` with this ``head`` cannot be read."""

    def __init__(self, message: str, manifest: Object, head: LogHead) -> None:
        super().__init__(message)
        self.manifest = manifest
        self.head = head


def _draw_id() -> str:
    return secrets.token_hex(4)


def _size(content: object) -> int:
    return len(json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode())


def parse_ledger_queues(manifest: Object) -> QueueRules:
    """The queues in the spec of a `GPULedger` manifest; None without a spec."""
    if manifest.get("spec") is None:
        return None
    namespace, name = manifest["metadata"]["namespace"], manifest["metadata"]["name"]
    try:
        return parse_queues(manifest["spec"], f"the spec of GPULedger {namespace}/{name}")
    except UsageError as error:
        return MisconfiguredQueues(f"{error}; repair it with `tiphys queues apply -f FILE -n {namespace}`")


def _object_version(manifest: Object) -> tuple[str, str]:
    return manifest["metadata"]["uid"], manifest["metadata"]["resourceVersion"]
