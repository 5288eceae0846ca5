"""Everything that Tiphys writes to storage, as frozen pydantic models."""

from tiphys.records.attempt import (
    AdoptedRecord,
    AttemptClaim,
    AttemptEnd,
    Cause,
    CrashRecord,
    Death,
    MemoRecord,
    Outcome,
    Output,
    OutputKind,
    OutputObject,
    Preemption,
    Skipped,
)
from tiphys.records.base import Record, SealedRecord, StoredRecord, Timestamp, stored_form, utc_now
from tiphys.records.event import Event, EventBatch
from tiphys.records.gang import RankPart, SaveCall, SaveLost
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
from tiphys.records.retention import ExpiryRecord, PinRecord
from tiphys.records.run import ItemBound, RunRecord, RunSealed, SubmissionBound, SubmissionClaim, SubmissionKind

__all__ = [
    "AdoptedRecord",
    "AttemptClaim",
    "AttemptEnd",
    "Cause",
    "CheckpointManifest",
    "CheckpointRef",
    "CrashRecord",
    "Death",
    "Event",
    "EventBatch",
    "ExpiryRecord",
    "Facts",
    "ItemBound",
    "MemoRecord",
    "Outcome",
    "Output",
    "OutputKind",
    "OutputObject",
    "PinRecord",
    "Preemption",
    "QuarantineRecord",
    "RankPart",
    "Record",
    "RunRecord",
    "RunSealed",
    "SaveCall",
    "SaveLost",
    "SealedRecord",
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
    "stored_form",
    "utc_now",
]
