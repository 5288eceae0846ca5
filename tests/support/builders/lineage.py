"""Builders of attempts, their ends and checkpoints, with everything that a test does not care about filled in."""

import hashlib
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from tiphys.protocol.step_spec import (
    DELETE_AFTER_SECONDS,
    PIPELINE_ANNOTATION,
    STEP_ANNOTATION,
    CheckpointPolicy,
    GpuRequest,
    StepKind,
    StepSpec,
)
from tiphys.records import (
    AttemptClaim,
    AttemptEnd,
    AttemptEndOutcome,
    Cause,
    CheckpointManifest,
    CheckpointRef,
    RunRecord,
    Shard,
    StartTimes,
    json_digest,
)
from tiphys.store import Attempt, LineageLayout, RunLayout, Store
from tiphys.store.run_markers import mark, newest_marker

RUN = "digits-1"
STEP = "fit"
LINEAGE = f"{RUN}/{STEP}"
START_TIMES = StartTimes(opened_at=datetime(2026, 1, 1, tzinfo=UTC))


def ref(attempt: int, global_step: int, lineage: str = LINEAGE) -> CheckpointRef:
    return CheckpointRef(lineage=lineage, attempt=attempt, global_step=global_step)


def claim_of(
    attempt: int, starts_from: CheckpointRef | None = None, *, run: str = RUN, step: str = STEP, submission: int = 1
) -> AttemptClaim:
    return AttemptClaim(
        run=run,
        step=step,
        attempt=attempt,
        submission=submission,
        uid="uid-1",
        node=f"wf.{step}({attempt - 1}).admit",
        instance=f"wf.{step}",
        step_key="k" * 64,
        lineage=f"{run}/{step}",
        starts_from=starts_from,
    )


def end_of(
    attempt: int,
    cause: Cause | None = Cause.PREEMPTION,
    *,
    outcome: AttemptEndOutcome = AttemptEndOutcome.FAILED,
    progress: bool = False,
    submission: int = 1,
    message: str = "",
) -> AttemptEnd:
    return AttemptEnd(
        run=RUN,
        step=STEP,
        attempt=attempt,
        submission=submission,
        outcome=outcome,
        cause=cause if outcome is AttemptEndOutcome.FAILED else None,
        progress=progress,
        message=message,
    )


def attempts_of(*starts: CheckpointRef | None) -> list[Attempt]:
    """Attempts 1, 2, … of the step, with what each started from."""
    return [Attempt(claim_of(number, start), None) for number, start in enumerate(starts, start=1)]


def commit(
    store: Store, checkpoint: CheckpointRef, *, data: tuple[bytes, ...] = (b"weights", b"tree"), **changes: Any
) -> CheckpointManifest:
    """Write a checkpoint of opaque bytes: shards, then the manifest. ``changes`` replace fields of the manifest."""
    layout = LineageLayout(checkpoint.lineage)
    prefix = layout.shards(checkpoint.attempt, checkpoint.global_step)
    shards = []
    for index, content in enumerate(data):
        shard = Shard(key=f"{prefix}{index}", size=len(content), sha256=hashlib.sha256(content).hexdigest())
        store.create(shard.key, content)
        shards.append(shard)
    run, _, step = checkpoint.lineage.partition("/")
    fields: dict[str, Any] = {
        "lineage": checkpoint.lineage,
        "run": run,
        "step": step,
        "attempt": checkpoint.attempt,
        "global_step": checkpoint.global_step,
        "shards": tuple(shards),
        "began": START_TIMES,
    }
    manifest = CheckpointManifest(**(fields | changes)).with_seal()
    store.create(layout.manifest(checkpoint.attempt, checkpoint.global_step), manifest.to_bytes())
    return manifest


def resealed(data: bytes, **changes: Any) -> bytes:
    """A stored manifest with other fields, and the seal that goes with them."""
    manifest = CheckpointManifest.model_validate_json(data)
    return manifest.model_copy(update=changes).with_seal().to_bytes()


def write_run(
    store: Store,
    *,
    checkpoint_store: str = "",
    run: str = RUN,
    step: str = STEP,
    gpu: GpuRequest | None = None,
    every_bounds: tuple[float, float] | None = None,
    items: Sequence[str] = (),
    keep_last: int | None = 3,
    delete_after_seconds: float = DELETE_AFTER_SECONDS,
    **fields: Any,
) -> RunRecord:
    """Record a run of one training step, as the first admit does; ``fields`` of the record may be given."""
    policy = CheckpointPolicy(
        store=checkpoint_store,
        every_bounds=every_bounds,
        keep_last=keep_last,
        delete_after_seconds=delete_after_seconds,
    )
    spec = StepSpec(name=step, kind=StepKind.TRAIN, template="t" * 64, checkpoints=policy, gpu=gpu, fan_out=bool(items))
    task = {"name": step, "template": step, **({"withItems": list(items)} if items else {})}
    workflow = {
        "metadata": {"annotations": {PIPELINE_ANNOTATION: "digits"}},
        "spec": {
            "entrypoint": "main",
            "templates": [
                {"name": "main", "dag": {"tasks": [task]}},
                {"name": step, "metadata": {"annotations": {STEP_ANNOTATION: spec.model_dump_json()}}, "steps": []},
            ],
        },
    }
    record = RunRecord(run=run, pipeline="digits", workflow=workflow, digest=json_digest(workflow), **fields)
    mark(store, newest_marker(run, record.written_at))
    store.create(RunLayout(run).run_record, record.to_bytes())
    return record


def write_claim(store: Store, claim: AttemptClaim) -> AttemptClaim:
    store.create(RunLayout(claim.run).attempt(claim.step, claim.attempt), claim.to_bytes())
    return claim


def write_end(store: Store, end: AttemptEnd) -> AttemptEnd:
    store.create(RunLayout(end.run).attempt_end(end.step, end.attempt), end.to_bytes())
    return end
