"""The log of a `GPULedger`: how leases and pending requests are stored without rewriting all of them.

An object of the API server holds 1.5 MB at most, and every write of it stores all
of it again. So the status of the `GPULedger` holds only the head of a log: the
number of the newest entry, the newest entries themselves, and the number of the
newest snapshot. An entry says what one write changed. When the entries in the
head take `SEGMENT_BYTES`, the next writer copies them to a `GPULedgerRecord`, a
create-only object named by the number of its first entry. Two writers that copy
the same entries create the same object, so a lost answer does no harm.

The head is replaced under its resourceVersion. That one write decides which entry
comes next, for all services alike. A head names every entry that counts, so a
record that is missing, changed or cut off is always noticed: `LogDamagedError`.

A snapshot holds all leases and requests after one entry, in several records.
Records before it are deleted. A reader that misses such a record loads the snapshot.
"""

import base64
import hashlib
import json
import zlib
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError
from pydantic.alias_generators import to_camel

from tiphys.errors import IntegrityError, NotFoundError, ObjectExistsError, StoreError
from tiphys.kube.api import KubeApi, Object
from tiphys.kube.resources import GPU_LEDGER_RECORDS, GPU_LEDGERS

LOG_FORMAT = 7
"""``version`` of the status of a `GPULedger`. A status of another version is refused."""
SEGMENT_BYTES = 4096
"""Size of the entries in the head from which the next writer moves them to a record."""
CHUNK_BYTES = 500_000
"""Size of a record of a snapshot, before compression."""
LEDGER_LABEL = "tiphys.dev/ledger"

JsonObject = Mapping[str, Any]
_Lease = TypeVar("_Lease")
_Pending = TypeVar("_Pending")


class LogDamagedError(StoreError):
    """A record of the log is missing or is not what was written."""


class LogHead(BaseModel):
    """The part ``log`` of the status of a `GPULedger`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, alias_generator=to_camel, populate_by_name=True)

    id: str
    """Drawn when the log began; part of the names of its records."""
    number: NonNegativeInt = 0
    """Number of the newest entry; 0: none yet."""
    entries: tuple[dict[str, Any], ...] = ()
    """The newest entries. Those before them are in records."""
    snapshot: NonNegativeInt = 0
    """Number of the entry after which the snapshot was taken; 0: the log begins without leases and requests."""
    snapshot_first: NonNegativeInt = 1
    """First entry of the record that holds the entry after the snapshot."""
    chunks: NonNegativeInt = 0
    """Records of the snapshot."""
    record_bytes: NonNegativeInt = 0
    """Size of the entries that were moved to records since the snapshot."""
    losses: NonNegativeInt = 0
    """How often the log was begun again without its leases, because it was damaged."""
    repair_asked_at: str | None = None
    """When a service found the log damaged. A service that still knows all leases writes them anew."""

    @property
    def first(self) -> int:
        """Number of the first entry in the head."""
        return self.number - len(self.entries) + 1

    def to_json(self) -> dict[str, Any]:
        """The head as it is stored."""
        document = self.model_dump(by_alias=True, exclude_defaults=True)
        return {**document, "entries": list(self.entries)} if self.entries else document


def parse_head(status: JsonObject) -> LogHead:
    """The head in the status of a `GPULedger`.

    Raises:
        IntegrityError: the status is of another format, or its head is damaged.
    """
    version = status.get("version")
    if version != LOG_FORMAT:
        remedy = "; upgrade Tiphys" if isinstance(version, int) and version > LOG_FORMAT else ""
        raise IntegrityError(f"it has format {version!r}, and this Tiphys reads {LOG_FORMAT}{remedy}")
    try:
        head = LogHead.model_validate({**status["log"], "entries": tuple(status["log"].get("entries", ()))})
    except (ValidationError, KeyError, TypeError) as error:
        reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else repr(error)
        raise IntegrityError(f"log: {reason}") from error
    if [entry.get("n") for entry in head.entries] != list(range(head.first, head.number + 1)):
        raise IntegrityError("log.entries: their numbers do not end with the number of the log")
    return head


class LedgerBook(NamedTuple, Generic[_Lease, _Pending]):
    """Leases, pending requests in order of arrival, and usage history after one entry."""

    leases: tuple[_Lease, ...] = ()
    pending: tuple[_Pending, ...] = ()
    history: Any = ()


class BookCodec(Protocol[_Lease, _Pending]):
    """Makes leases and requests of their stored form. Every method raises `IntegrityError` if it is damaged."""

    def lease(self, raw: JsonObject) -> _Lease: ...
    def pending(self, raw: JsonObject) -> _Pending: ...
    def history(self, raw: Sequence[JsonObject]) -> Any: ...
    def lease_id(self, lease: _Lease) -> str: ...
    def arrival(self, pending: _Pending) -> int: ...
    def checked(self, lease: _Lease, check_at: str) -> _Lease: ...
    def seen(self, pending: _Pending, seen_at: str) -> _Pending: ...


def apply_entries(
    book: LedgerBook[_Lease, _Pending], entries: Iterable[JsonObject], codec: BookCodec[_Lease, _Pending]
) -> LedgerBook[_Lease, _Pending]:
    """The book after ``entries``, which must follow it.

    An entry has these fields, each of which may be missing: ``leases`` and ``waiting`` are new or changed; ``ended``
    are ids of leases and ``left`` arrival numbers of requests that are gone; ``checked`` and ``seen`` give times to
    ids and arrival numbers; ``history`` replaces the usage history.

    Raises:
        IntegrityError: an entry names a lease or a request that the book lacks, or is damaged.
    """
    leases = dict(zip(map(codec.lease_id, book.leases), book.leases, strict=True))
    pending, history = list(book.pending), book.history
    try:
        for entry in entries:
            _apply_to_leases(leases, entry, codec)
            _apply_to_pending(pending, entry, codec)
            if "history" in entry:
                history = codec.history(entry["history"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise IntegrityError(f"an entry of the log does not fit those before it: {error!r}") from error
    return LedgerBook(tuple(leases.values()), tuple(pending), history)


def _apply_to_leases(leases: dict[str, _Lease], entry: JsonObject, codec: BookCodec[_Lease, _Pending]) -> None:
    for lease_id in entry.get("ended", ()):
        del leases[lease_id]
    for raw in entry.get("leases", ()):
        leases[raw["id"]] = codec.lease(raw)
    for check_at, ids in entry.get("checked", {}).items():
        leases.update({lease_id: codec.checked(leases[lease_id], check_at) for lease_id in ids})


def _apply_to_pending(pending: list[_Pending], entry: JsonObject, codec: BookCodec[_Lease, _Pending]) -> None:
    for arrival in entry.get("left", ()):
        del pending[_find_pending(pending, arrival, codec)]
    for raw in entry.get("waiting", ()):
        _put_pending(pending, codec.pending(raw), codec)
    for seen_at, arrivals in entry.get("seen", {}).items():
        for index in (_find_pending(pending, arrival, codec) for arrival in arrivals):
            pending[index] = codec.seen(pending[index], seen_at)


def _find_pending(pending: list[_Pending], arrival: int, codec: BookCodec[_Lease, _Pending]) -> int:
    """The place of the request with that arrival number.

    Raises:
        KeyError: there is none.
    """
    index = bisect_left(pending, arrival, key=codec.arrival)
    if index == len(pending) or codec.arrival(pending[index]) != arrival:
        raise KeyError(arrival)
    return index


def _put_pending(pending: list[_Pending], request: _Pending, codec: BookCodec[_Lease, _Pending]) -> None:
    """Insert a request at its place, or replace the one with its arrival number."""
    arrival = codec.arrival(request)
    index = bisect_left(pending, arrival, key=codec.arrival)
    end = index + 1 if index < len(pending) and codec.arrival(pending[index]) == arrival else index
    pending[index:end] = [request]


class LedgerRecords:
    """The `GPULedgerRecord` objects of one ledger. Every method raises `StoreError` if the API server fails."""

    def __init__(self, api: KubeApi, namespace: str, ledger: str) -> None:
        self._api = api
        self._namespace = namespace
        self._ledger = ledger

    def append(self, head: LogHead, changes: JsonObject, owner: Object) -> LogHead:
        """The head after one more entry. Moves the entries of ``head`` to a record if they take `SEGMENT_BYTES`."""
        entry = {"n": head.number + 1, **changes}
        size = len(_to_json(head.entries))
        if size < SEGMENT_BYTES:
            return head.model_copy(update={"number": entry["n"], "entries": (*head.entries, entry)})
        # Before the head that counts on it. If that head loses, the winner has made the same record: its name is that
        # of the first entry, and all who read this head hold the same entries.
        self._create(self._record_name(head.id, head.first), list(head.entries), owner)
        moved = {"number": entry["n"], "entries": (entry,), "record_bytes": head.record_bytes + size}
        return head.model_copy(update=moved)

    def write_snapshot(
        self, log_id: str, number: int, sections: Mapping[str, Sequence[JsonObject]], owner: Object
    ) -> int:
        """Store a snapshot after entry ``number``, and return the number of its chunks."""
        chunks = 0
        for chunk in _split_chunks(sections):
            self._create(self._chunk_name(log_id, number, chunks), chunk, owner)
            chunks += 1
        return chunks

    def read_entries(self, head: LogHead, number: int, first: int) -> list[JsonObject]:
        """The entries after entry ``number``, whose record begins with entry ``first``.

        Raises:
            LogDamagedError: a record is missing or damaged.
        """
        entries: list[JsonObject] = []
        while first < head.first:
            segment = self._read(self._record_name(head.id, first))
            if not segment:
                raise LogDamagedError(f"{self._record_name(head.id, first)} is empty")
            entries += segment
            first += len(segment)
        entries = [entry for entry in (*entries, *head.entries) if entry["n"] > number]
        if [entry["n"] for entry in entries] != list(range(number + 1, head.number + 1)):
            raise LogDamagedError(f"entries are missing between {number} and {head.number}")
        return entries

    def prefetch(self) -> "_PrefetchedRecords":
        """The same records, listed at once: a process that starts reads thousands."""
        listed = self._api.list(GPU_LEDGER_RECORDS, self._namespace, f"{LEDGER_LABEL}={self._ledger}").items
        return _PrefetchedRecords(self._api, self._namespace, self._ledger, listed)

    def read_snapshot(self, head: LogHead) -> Iterator[JsonObject]:
        """The chunks of the snapshot, each with some ``leases``, ``waiting`` and ``history``.

        Raises:
            LogDamagedError: a record is missing or damaged.
        """
        return (self._read(self._chunk_name(head.id, head.snapshot, number)) for number in range(head.chunks))

    def delete_unused(self, head: LogHead, abandoned_before: datetime) -> int:
        """Delete the records that no reader of ``head`` needs, and return their number.

        Records of another log are deleted if they were created before ``abandoned_before``: a service may be about to
        begin a log.
        """
        unused = []
        for metadata in self._list_metadata():
            name = metadata["name"]
            if self._is_of_log(head, name):
                is_unused = not self._is_needed(head, name)
            else:
                is_unused = datetime.fromisoformat(metadata["creationTimestamp"]) < abandoned_before
            if is_unused:
                unused.append(name)
        return sum(self._api.delete(GPU_LEDGER_RECORDS, self._namespace, name) for name in unused)

    def find_lost(self, head: LogHead, seen: dict[str, str]) -> str:
        """Return what a new reader of ``head`` would miss: a record that is gone or was changed; empty without one.

        ``seen`` are the resource versions of records by name, which this method keeps up to date: a record is never
        changed, and no record names the one after it. So of a record between the first and the head, no loss is
        noticed that came before the first call that could have listed it.
        """
        listed = {
            metadata["name"]: metadata["resourceVersion"]
            for metadata in self._list_metadata()
            if self._is_of_log(head, metadata["name"]) and self._is_needed(head, metadata["name"])
        }
        chunks = (self._chunk_name(head.id, head.snapshot, number) for number in range(head.chunks))
        first = [self._record_name(head.id, head.snapshot_first)] if head.snapshot_first < head.first else []
        known = [name for name in seen if self._is_of_log(head, name) and self._is_needed(head, name)]
        for name in dict.fromkeys((*chunks, *first, *known)):
            if name not in listed:
                return f"{name} is missing"
            if listed[name] != seen.get(name, listed[name]):
                return f"{name} was changed"
        seen.clear()
        seen.update(listed)
        return ""

    def _is_of_log(self, head: LogHead, name: str) -> bool:
        return name.startswith(f"{self._ledger}.{head.id}.")

    def _is_needed(self, head: LogHead, name: str) -> bool:
        # Numbers in names have leading zeros, so texts compare as numbers do; a chunk has one part more than a record.
        record, chunk = self._record_name(head.id, head.snapshot_first), self._chunk_name(head.id, head.snapshot, 0)
        return name >= (chunk if name.count(".") > record.count(".") else record)

    def _list_metadata(self) -> list[Object]:
        labels = f"{LEDGER_LABEL}={self._ledger}"
        listed = self._api.list(
            GPU_LEDGER_RECORDS, self._namespace, labels, transform=_keep_metadata, metadata_only=True
        )
        return [record["metadata"] for record in listed.items]

    def _find(self, name: str) -> Object | None:
        return self._api.get(GPU_LEDGER_RECORDS, self._namespace, name)

    def _read(self, name: str) -> Any:
        found = self._find(name)
        if found is None:
            raise LogDamagedError(f"GPULedgerRecord {self._namespace}/{name} is missing")
        try:
            data = found["spec"]["data"]
            if hashlib.sha256(data.encode()).hexdigest() != found["spec"]["sha256"]:
                raise ValueError("its content was changed")
            return json.loads(zlib.decompress(base64.b64decode(data)))
        except (KeyError, TypeError, ValueError, AttributeError, zlib.error) as error:
            raise LogDamagedError(f"GPULedgerRecord {self._namespace}/{name} is damaged: {error!r}") from error

    def _create(self, name: str, content: object, owner: Object) -> None:
        data = base64.b64encode(zlib.compress(_to_json(content), 1)).decode()
        # The garbage collector deletes the records of a ledger that was deleted.
        reference = {
            "apiVersion": GPU_LEDGERS.api_version,
            "kind": GPU_LEDGERS.kind,
            "name": owner["metadata"]["name"],
            "uid": owner["metadata"]["uid"],
        }
        metadata = {"name": name, "labels": {LEDGER_LABEL: self._ledger}, "ownerReferences": [reference]}
        spec = {"data": data, "sha256": hashlib.sha256(data.encode()).hexdigest()}
        try:
            self._api.create(GPU_LEDGER_RECORDS, self._namespace, {"metadata": metadata, "spec": spec})
        except ObjectExistsError:
            return  # the name fixes the content: another writer has created it, or the answer to this one was lost
        except NotFoundError as error:
            raise StoreError(
                f"{error}; bring the kinds of Tiphys up to date: `kubectl apply --server-side -f` the folder crds of "
                "the chart"
            ) from error

    def _record_name(self, log_id: str, first: int) -> str:
        return f"{self._ledger}.{log_id}.{first:012d}"

    def _chunk_name(self, log_id: str, number: int, chunk: int) -> str:
        return f"{self._record_name(log_id, number)}.{chunk:05d}"


class _PrefetchedRecords(LedgerRecords):
    def __init__(self, api: KubeApi, namespace: str, ledger: str, listed: Iterable[Object]) -> None:
        super().__init__(api, namespace, ledger)
        self._listed = {record["metadata"]["name"]: record for record in listed}

    def _find(self, name: str) -> Object | None:
        return self._listed.get(name) or super()._find(name)


class LogReader(Generic[_Lease, _Pending]):
    """Follows the log of one ledger, and keeps the newest book."""

    def __init__(self, records: LedgerRecords, codec: BookCodec[_Lease, _Pending]) -> None:
        self._records = records
        self._codec = codec
        self.head: LogHead | None = None
        """Head up to which ``book`` was read or written."""
        self.book: LedgerBook[_Lease, _Pending] = LedgerBook()

    def read(self, head: LogHead) -> LedgerBook[_Lease, _Pending]:
        """The book at ``head``.

        Raises:
            LogDamagedError: a record is missing or damaged. Read the newest head, which may no longer need the record.
        """
        before = self.head
        try:
            # A log that was begun anew, or that went back, shares no entries with the book that is known here.
            if before is not None and before.id == head.id and before.number <= head.number:
                try:
                    self._follow(self._records, self.book, head, before.number, before.first)
                    return self.book
                except LogDamagedError:
                    if before.number >= head.snapshot:
                        raise  # the snapshot is older than this book, so it cannot replace what is missing
            # A new ledger has nothing to list.
            records = self._records.prefetch() if head.first > 1 else self._records
            self._follow(records, self._load_snapshot(records, head), head, head.snapshot, head.snapshot_first)
        except IntegrityError as error:
            raise LogDamagedError(f"the log is damaged: {error}") from error
        return self.book

    def accept(self, head: LogHead, book: LedgerBook[_Lease, _Pending]) -> None:
        """Take what this process has just written."""
        self.head, self.book = head, book

    def _follow(
        self, records: LedgerRecords, book: LedgerBook[_Lease, _Pending], head: LogHead, number: int, first: int
    ) -> None:
        if number < head.number:
            book = apply_entries(book, records.read_entries(head, number, first), self._codec)
        self.head, self.book = head, book

    def _load_snapshot(self, records: LedgerRecords, head: LogHead) -> LedgerBook[_Lease, _Pending]:
        leases: list[_Lease] = []
        pending: list[_Pending] = []
        history: list[JsonObject] = []
        for chunk in records.read_snapshot(head):
            leases += map(self._codec.lease, chunk["leases"])
            pending += map(self._codec.pending, chunk["waiting"])
            history += chunk["history"]
        return LedgerBook(tuple(leases), tuple(pending), self._codec.history(history))


def _split_chunks(sections: Mapping[str, Sequence[JsonObject]]) -> Iterator[dict[str, list[JsonObject]]]:
    """Chunks of at most `CHUNK_BYTES`, unless one part is larger; none for a book without any parts."""
    chunk, size = _empty_chunk(), 0
    for section, parts in sections.items():
        for part in parts:
            part_size = len(_to_json(part))
            if size and size + part_size > CHUNK_BYTES:
                yield chunk
                chunk, size = _empty_chunk(), 0
            chunk[section].append(part)
            size += part_size
    if size:
        yield chunk


def _empty_chunk() -> dict[str, list[JsonObject]]:
    return {"leases": [], "waiting": [], "history": []}


def _keep_metadata(record: Object) -> Object:
    return {
        "metadata": {field: record["metadata"][field] for field in ("name", "resourceVersion", "creationTimestamp")}
    }


def _to_json(content: object) -> bytes:
    return json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
