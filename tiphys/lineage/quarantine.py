"""Quarantine: records that a checkpoint must not be loaded, and why.

A damaged checkpoint stays in storage as evidence. Its quarantine record saves
later attempts the time to detect the same damage again.

Programs may write these records. The name alone puts a checkpoint into
quarantine, so a record that cannot be read costs its checkpoint and nothing else.
"""

from collections.abc import Iterator
from itertools import islice

from tiphys.errors import IntegrityError, ObjectMissingError
from tiphys.records import CheckpointRef, QuarantineRecord
from tiphys.store import LineageLayout, Store, claim_record, read_record
from tiphys.store.runs import read_concurrently


def quarantine_checkpoint(store: Store, ref: CheckpointRef, reason: str, by: str) -> None:
    """Quarantine a checkpoint, unless it is in quarantine already: the first record stays, readable or not.

    ``reason`` is a sentence; ``by`` is ``restore``, ``verify``, ``conclude``, or the name of a person.
    """
    try:
        claim_record(store, _key(ref), QuarantineRecord(checkpoint=ref, reason=reason, by=by))
    except IntegrityError:
        return


def list_quarantined(store: Store, lineage: str, most: int | None = None) -> set[CheckpointRef]:
    """All quarantined checkpoints of a lineage, or the newest ``most``; costs one listing."""
    return set(islice(_iter_quarantined(store, lineage), most))


def _iter_quarantined(store: Store, lineage: str) -> Iterator[CheckpointRef]:
    layout = LineageLayout(lineage)
    refs = (layout.parse_checkpoint(info.key) for info in store.list(layout.all_quarantined))
    return (ref for ref in refs if ref is not None)


class QuarantineListing:
    """The quarantined checkpoints of any lineage, for ``in``. Lists each lineage as far as the oldest asked for."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._rest: dict[str, Iterator[CheckpointRef]] = {}
        self._listed: set[CheckpointRef] = set()

    def __contains__(self, ref: CheckpointRef) -> bool:
        if ref not in self._listed:
            if ref.lineage not in self._rest:
                self._rest[ref.lineage] = _iter_quarantined(self._store, ref.lineage)
            for found in self._rest[ref.lineage]:
                self._listed.add(found)
                if (found.attempt, found.global_step) <= (ref.attempt, ref.global_step):
                    break  # the rest is older
        return ref in self._listed


def read_quarantine_records(
    store: Store, lineage: str, most: int | None = None
) -> dict[CheckpointRef, QuarantineRecord | str]:
    """Quarantine records of a lineage, or the newest ``most``, by checkpoint; costs one listing and a read for each.

    A string is the reason why a record cannot be read.
    """
    refs = sorted(list_quarantined(store, lineage, most), key=lambda ref: (ref.attempt, ref.global_step))
    records = zip(refs, read_concurrently(lambda ref: _read(store, ref), refs), strict=True)
    return {ref: record for ref, record in records if record is not None}


def read_quarantine_reason(store: Store, ref: CheckpointRef) -> str:
    """The author and reason of the quarantine of ``ref``, as a sentence; costs one read."""
    record = _read(store, ref)
    if isinstance(record, str):
        return f"quarantined by a record that cannot be read: {record}"
    return f"quarantined by {record.by}: {record.reason}" if record else "not quarantined"


def _read(store: Store, ref: CheckpointRef) -> QuarantineRecord | str | None:
    """The quarantine record of ``ref``, or why it cannot be read; None if there is none."""
    try:
        record = read_record(store, _key(ref), QuarantineRecord)
    except IntegrityError as error:
        return str(error)
    except ObjectMissingError:
        return None
    return record if record.checkpoint == ref else f"{_key(ref)} is the record of checkpoint {record.checkpoint}"


def _key(ref: CheckpointRef) -> str:
    return LineageLayout(ref.lineage).quarantined(ref.attempt, ref.global_step)
