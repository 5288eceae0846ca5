"""Everything that Tiphys writes to storage, as frozen pydantic models."""

from tiphys.records.attempt import (
    AdoptedRecord,
    AttemptClaim,
    AttemptEnd,
    Cause,
    MemoRecord,
    Outcome,
    Output,
    OutputKind,
    OutputObject,
    Skipped,
)
from tiphys.records.base import Record, StoredRecord, Timestamp, utc_now
from tiphys.records.event import Event, EventBatch
from tiphys.records.manifest import CheckpointManifest, CheckpointRef, Facts, QuarantineRecord, Shard
from tiphys.records.names import (
    canonical_json,
    check_run,
    check_step,
    digest,
    item_hash,
    item_step,
    run_name,
)
from tiphys.records.run import ItemBound, RunRecord, RunSealed, SubmissionBound, SubmissionClaim, SubmissionKind

__all__ = [
    "AdoptedRecord",
    "AttemptClaim",
    "AttemptEnd",
    "Cause",
    "CheckpointManifest",
    "CheckpointRef",
    "Event",
    "EventBatch",
    "Facts",
    "ItemBound",
    "MemoRecord",
    "Outcome",
    "Output",
    "OutputKind",
    "OutputObject",
    "QuarantineRecord",
    "Record",
    "RunRecord",
    "RunSealed",
    "Shard",
    "Skipped",
    "StoredRecord",
    "SubmissionBound",
    "SubmissionClaim",
    "SubmissionKind",
    "Timestamp",
    "canonical_json",
    "check_run",
    "check_step",
    "digest",
    "item_hash",
    "item_step",
    "run_name",
    "utc_now",
]
