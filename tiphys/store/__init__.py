"""Object storage: create-only writes, ordered listings, and what they say about runs."""

from tiphys.store.base import ObjectInfo, Store, check_key
from tiphys.store.claims import Claim, claim, find_record, read_record
from tiphys.store.directory import DirectoryStore
from tiphys.store.layout import LineageLayout, RunLayout, lineage_of, memo_key, start_key
from tiphys.store.open import TenantStores, open_store
from tiphys.store.runs import (
    Attempt,
    Submission,
    all_attempts,
    append_events,
    current_workflow,
    last_claim,
    list_runs,
    listing_digest,
    output_fault,
    read_current_run,
    read_events,
    read_run,
    step_attempts,
    submissions,
    workflow_of,
)
from tiphys.store.s3 import S3Store

__all__ = [
    "Attempt",
    "Claim",
    "DirectoryStore",
    "LineageLayout",
    "ObjectInfo",
    "RunLayout",
    "S3Store",
    "Store",
    "Submission",
    "TenantStores",
    "all_attempts",
    "append_events",
    "check_key",
    "claim",
    "current_workflow",
    "find_record",
    "last_claim",
    "lineage_of",
    "list_runs",
    "listing_digest",
    "memo_key",
    "open_store",
    "output_fault",
    "read_current_run",
    "read_events",
    "read_record",
    "read_run",
    "start_key",
    "step_attempts",
    "submissions",
    "workflow_of",
]
