"""Quarantine: records that a checkpoint must not be loaded, and why.

A damaged checkpoint stays in storage as evidence. Its quarantine record saves
later attempts the time to detect the same damage again.
"""

from tiphys.records import CheckpointRef, QuarantineRecord
from tiphys.store import LineageLayout, Store, claim_record, find_record, read_record
from tiphys.store.runs import read_concurrently


def quarantine_checkpoint(store: Store, ref: CheckpointRef, reason: str, by: str) -> QuarantineRecord:
    """Quarantine a checkpoint; return the first record if it was quarantined before.

    Args:
        store: The store of the checkpoint.
        ref: The checkpoint.
        reason: Why it must not be loaded, as a sentence.
        by: Author of the decision: ``restore``, ``verify``, ``settle``, or the name of a person.
    """
    key = LineageLayout(ref.lineage).quarantined(ref.attempt, ref.global_step)
    return claim_record(store, key, QuarantineRecord(checkpoint=ref, reason=reason, by=by)).record


def list_quarantined(store: Store, lineage: str) -> set[CheckpointRef]:
    """All quarantined checkpoints of a lineage; costs one listing."""
    layout = LineageLayout(lineage)
    refs = (layout.parse_checkpoint(info.key) for info in store.list(layout.all_quarantined))
    return {ref for ref in refs if ref is not None}


def read_quarantine_records(store: Store, lineage: str) -> dict[CheckpointRef, QuarantineRecord]:
    """Quarantine records of a lineage, by checkpoint; costs one listing and a read for each."""
    layout = LineageLayout(lineage)
    keys = [info.key for info in store.list(layout.all_quarantined) if layout.parse_checkpoint(info.key)]
    records = read_concurrently(lambda key: read_record(store, key, QuarantineRecord), keys)
    return {record.checkpoint: record for record in records}


def read_quarantine_reason(store: Store, ref: CheckpointRef) -> str:
    """The author and reason of the quarantine of ``ref``, as a sentence; costs one read."""
    record = find_record(store, LineageLayout(ref.lineage).quarantined(ref.attempt, ref.global_step), QuarantineRecord)
    return f"quarantined by {record.by}: {record.reason}" if record else "not quarantined"
