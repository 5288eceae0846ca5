"""Checkpoints that must not be loaded again, and why.

A checkpoint whose bytes are wrong stays in storage as evidence. A record beside
it says so, once, so that no later attempt spends its time on the same discovery.
"""

from tiphys.records import CheckpointRef, QuarantineRecord
from tiphys.store import LineageLayout, Store, claim, find_record, read_record
from tiphys.store.runs import concurrently


def quarantine(store: Store, ref: CheckpointRef, reason: str, by: str) -> QuarantineRecord:
    """Bar ``ref`` from being chosen; the first reason stands if somebody did so before.

    ``by`` says who decided: ``restore``, or the name of a person.
    """
    key = LineageLayout(ref.lineage).quarantined(ref.attempt, ref.global_step)
    return claim(store, key, QuarantineRecord(checkpoint=ref, reason=reason, by=by)).record


def quarantined(store: Store, lineage: str) -> set[CheckpointRef]:
    """All checkpoints of a lineage that are barred; costs one listing."""
    layout = LineageLayout(lineage)
    found = (layout.parse_checkpoint(info.key) for info in store.list(layout.quarantine))
    return {ref for ref in found if ref is not None}


def quarantine_records(store: Store, lineage: str) -> dict[CheckpointRef, QuarantineRecord]:
    """All checkpoints of a lineage that are barred, and the record that says why; costs a read for each."""
    layout = LineageLayout(lineage)
    keys = [info.key for info in store.list(layout.quarantine) if layout.parse_checkpoint(info.key)]
    records = concurrently(lambda key: read_record(store, key, QuarantineRecord), keys)
    return {record.checkpoint: record for record in records}


def quarantine_reason(store: Store, ref: CheckpointRef) -> str:
    """Why ``ref`` is barred, as recorded; costs one read."""
    record = find_record(store, LineageLayout(ref.lineage).quarantined(ref.attempt, ref.global_step), QuarantineRecord)
    return f"quarantined by {record.by}: {record.reason}" if record else "not quarantined"
