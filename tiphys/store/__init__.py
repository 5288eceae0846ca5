"""Object storage: create-only writes, ordered listings, key layout, and the state of runs."""

from tiphys.store.attempt_ends import DamagedRecord, find_attempt_end, pass_over_end, read_attempt_end
from tiphys.store.base import ObjectInfo, Store, check_key
from tiphys.store.buckets.azure import AzureStore
from tiphys.store.buckets.gcs import GcsStore
from tiphys.store.buckets.s3 import S3Store
from tiphys.store.claims import ClaimResult, claim_record, find_record, read_record
from tiphys.store.directory import DirectoryStore
from tiphys.store.layout import LineageLayout, RunLayout, idempotency_record_key, lineage_name, memo_key
from tiphys.store.open import TenantStores, artifact_prefix, is_bucket_url, open_store
from tiphys.store.outputs import find_output_fault, list_output_files, list_outputs, outputs_digest
from tiphys.store.run_markers import (
    close_submission,
    end_submission,
    list_newest_runs,
    list_open_submissions,
    open_submission,
)
from tiphys.store.runs import (
    Attempt,
    Submission,
    append_events,
    claim_run,
    fence_attempt,
    list_runs,
    read_events,
    read_last_claim,
    read_open_attempts,
    read_run,
    read_step_attempts,
    read_submission_workflow,
    read_submissions,
)

__all__ = [
    "Attempt",
    "AzureStore",
    "ClaimResult",
    "DamagedRecord",
    "DirectoryStore",
    "GcsStore",
    "LineageLayout",
    "ObjectInfo",
    "RunLayout",
    "S3Store",
    "Store",
    "Submission",
    "TenantStores",
    "append_events",
    "artifact_prefix",
    "check_key",
    "claim_record",
    "claim_run",
    "close_submission",
    "end_submission",
    "fence_attempt",
    "find_attempt_end",
    "find_output_fault",
    "find_record",
    "idempotency_record_key",
    "is_bucket_url",
    "lineage_name",
    "list_newest_runs",
    "list_open_submissions",
    "list_output_files",
    "list_outputs",
    "list_runs",
    "memo_key",
    "open_store",
    "open_submission",
    "outputs_digest",
    "pass_over_end",
    "read_attempt_end",
    "read_events",
    "read_last_claim",
    "read_open_attempts",
    "read_record",
    "read_run",
    "read_step_attempts",
    "read_submission_workflow",
    "read_submissions",
]
