"""Checks of an audit: records of the run, its attempts and outputs, and the checkpoints of each lineage.

`AuditReader` turns a damaged record into a finding and continues, so that one
audit reports all damage. The checks also find missing records that another
record implies, and collect the objects whose bytes a deep audit reads.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from pydantic import ValidationError

from tiphys.errors import IntegrityError, ObjectMissingError
from tiphys.lineage.audit.findings import (
    AuditFinding,
    AuditLayer,
    ExpectedObject,
    ObjectLocation,
    QuarantinedCheckpoint,
    check_size,
    make_finding,
)
from tiphys.lineage.select import list_commits
from tiphys.lineage.step_names import selects_step
from tiphys.lineage.validity import manifest_fault
from tiphys.protocol.compiled_workflow import CompiledPipeline
from tiphys.records import (
    AttemptClaim,
    AttemptEnd,
    AttemptEndOutcome,
    CheckpointManifest,
    CheckpointRef,
    QuarantineRecord,
    RunRecord,
    StoredRecord,
    SubmissionBinding,
    SubmissionClaim,
    SubmissionEnd,
    WorkflowRecord,
    encode_document,
    json_digest,
    task_name,
)
from tiphys.store import LineageLayout, RunLayout, Store, lineage_name, list_outputs, open_store
from tiphys.store.layout import parse_attempt, parse_done, parse_submission
from tiphys.store.runs import read_concurrently

RecordT = TypeVar("RecordT", bound=StoredRecord)

_SUBMISSION_RECORDS: dict[str, type[SubmissionClaim | SubmissionBinding | SubmissionEnd]] = {
    "claim": SubmissionClaim,
    "bound": SubmissionBinding,
    "end": SubmissionEnd,
}


class AuditReader:
    """Reads records of one run from one store, and collects findings and expected objects."""

    def __init__(self, store: Store, run: str) -> None:
        self.store = store
        self.run = run
        self.findings: list[AuditFinding] = []
        self.expected_objects: list[ExpectedObject] = []
        self.notes: list[str] = []
        self._prefetched: dict[str, bytes] = {}

    def add_finding(self, location: ObjectLocation, key: str, fault: str, *, is_quarantined: bool = False) -> None:
        self.findings.append(make_finding(location, key, fault, run=self.run, is_quarantined=is_quarantined))

    def read(
        self, location: ObjectLocation, key: str, kind: type[RecordT], *, is_quarantined: bool = False
    ) -> RecordT | None:
        """The record; None with a finding if its bytes are not those that were written.

        A record that was removed since it was listed is None without a finding.
        """
        try:
            data = self._prefetched.pop(key, None) or self.store.read(key)
            record = kind.model_validate_json(data)
        except ObjectMissingError:
            return None
        except IntegrityError as error:
            self.add_finding(location, key, str(error), is_quarantined=is_quarantined)
            return None
        except ValidationError as error:
            self.add_finding(
                location,
                key,
                f"it is no valid {kind.__name__}: {error.errors()[0]['msg']}",
                is_quarantined=is_quarantined,
            )
            return None
        if encode_document(json.loads(data)) != data:
            self.add_finding(location, key, "it is not byte for byte what was written", is_quarantined=is_quarantined)
            return None
        return record

    def prefetch(self, keys: Sequence[str]) -> None:
        """Fetch the records that will be read next, in parallel."""

        def fetch(key: str) -> bytes:
            try:
                return self.store.read(key)
            except (ObjectMissingError, IntegrityError):
                return b""  # `read` tries again, and says why

        self._prefetched |= dict(zip(keys, read_concurrently(fetch, keys), strict=True))

    def read_run_record(self) -> RunRecord | None:
        """The record of the run; None if it is missing or damaged."""
        key = RunLayout(self.run).run_record
        location = ObjectLocation(AuditLayer.RUN)
        record = self.read(location, key, RunRecord)
        if record is None:
            return None
        if record.run != self.run:
            self.add_finding(location, key, f"it is the record of run {record.run}")
        elif record.digest != json_digest(record.workflow):
            self.add_finding(location, key, "its Workflow was changed after it was written, its digest does not match")
        else:
            return record
        return None

    def check_submissions(self) -> None:
        """Check the records of the submissions and their Workflows."""
        for info in self.store.list(RunLayout(self.run).submissions):
            if (parsed := parse_submission(info.key)) is None:
                continue
            number, kind = parsed
            record = self.read(ObjectLocation(AuditLayer.RUN), info.key, _SUBMISSION_RECORDS[kind])
            if record is not None and (record.run, record.submission) != (self.run, number):
                self.add_finding(
                    ObjectLocation(AuditLayer.RUN),
                    info.key,
                    f"it is the record of {record.run}, submission {record.submission}",
                )
            elif isinstance(record, SubmissionClaim) and record.workflow:
                self._check_workflow(record)

    def _check_workflow(self, claimed: SubmissionClaim) -> None:
        key = RunLayout(self.run).workflow(claimed.workflow)
        record = self.read(ObjectLocation(AuditLayer.RUN), key, WorkflowRecord)
        if record is not None and (record.run, json_digest(record.workflow)) != (self.run, claimed.workflow):
            self.add_finding(
                ObjectLocation(AuditLayer.RUN),
                key,
                f"it is not the Workflow that submission {claimed.submission} was made of",
            )
        elif record is None and not any(info.key == key for info in self.store.list(key)):
            self.add_finding(
                ObjectLocation(AuditLayer.RUN),
                key,
                f"it is missing, and submission {claimed.submission} was made of it",
            )


def checkpoint_store_resolver(store: Store, record: RunRecord | None) -> Callable[[str], Store]:
    """Return a function that opens the checkpoint store of a step: a separate volume, or the run's store.

    The function raises `NotFoundError` for a volume that is not mounted on this machine.
    """
    pipeline = CompiledPipeline.from_manifest(record.workflow) if record else None

    def open_checkpoint_store(step: str) -> Store:
        volume = pipeline.checkpoint_volume_url(task_name(step)) if pipeline else ""
        return open_store(volume, must_exist=True) if volume else store

    return open_checkpoint_store


@dataclass
class AttemptRecords:
    """Readable claims and ends of the attempts of one step, by number, and the numbers of all their keys."""

    claims: dict[int, AttemptClaim] = field(default_factory=dict)
    ends: dict[int, AttemptEnd] = field(default_factory=dict)
    claimed: set[int] = field(default_factory=set)
    ended: set[int] = field(default_factory=set)


def audit_attempts(reader: AuditReader, step: str = "") -> Mapping[str, AttemptRecords]:
    """Check the attempts of all steps, or of one step with its items; return their records by step id."""
    steps: dict[str, AttemptRecords] = {}
    listed = {info.key: parse_attempt(info.key) for info in reader.store.list(RunLayout(reader.run).attempts)}
    parsed = {key: parts for key, parts in listed.items() if parts is not None and selects_step(step, parts[0])}
    reader.prefetch(list(parsed))
    for key, parts in parsed.items():
        _read_attempt_record(reader, steps.setdefault(parts[0], AttemptRecords()), key, *parts)
    for name, records in sorted(steps.items()):
        _check_numbers(reader, name, records)
        for end in records.ends.values():
            _check_outputs(reader, end)
    _check_done(reader, steps, step)
    return steps


def _read_attempt_record(
    reader: AuditReader, records: AttemptRecords, key: str, step: str, number: int, is_end: bool
) -> None:
    location = ObjectLocation(AuditLayer.END if is_end else AuditLayer.CLAIM, step, number)
    (records.ended if is_end else records.claimed).add(number)
    record: AttemptClaim | AttemptEnd | None
    record = reader.read(location, key, AttemptEnd) if is_end else reader.read(location, key, AttemptClaim)
    if record is None:
        return
    if not _has_identity(record, reader.run, step, number):
        fault = f"it is the record of attempt {record.attempt} of {record.run}/{record.step}"
        reader.add_finding(location, key, fault)
    elif isinstance(record, AttemptEnd):
        records.ends[number] = record
    else:
        records.claims[number] = record


def _has_identity(record: AttemptClaim | AttemptEnd, run: str, step: str, number: int) -> bool:
    return (record.run, record.step, record.attempt) == (run, step, number)


def _check_numbers(reader: AuditReader, step: str, records: AttemptRecords) -> None:
    """Check that attempts are numbered from 1 without a gap, and that all but the newest have an end."""
    layout = RunLayout(reader.run)
    newest = max(records.claimed | records.ended)
    for number in range(1, newest + 1):
        if number not in records.claimed:
            proof = "its end exists" if number in records.ended else f"attempt {newest} was opened after it"
            reader.add_finding(
                ObjectLocation(AuditLayer.CLAIM, step, number),
                layout.attempt(step, number),
                f"it is missing, although {proof}",
            )
        if number not in records.ended and number < newest:
            fault = f"it is missing, although attempt {newest} was opened after it"
            reader.add_finding(ObjectLocation(AuditLayer.END, step, number), layout.attempt_end(step, number), fault)


def _check_outputs(reader: AuditReader, end: AttemptEnd) -> None:
    objects = [obj for output in end.outputs for obj in output.objects] if end.outcome is AttemptEndOutcome.DONE else []
    if not objects:
        return
    sizes = {key: info.size for key, info in list_outputs(reader.store, end).items()}
    location = ObjectLocation(AuditLayer.OUTPUT, end.step, end.attempt)
    for obj in objects:
        expected = ExpectedObject(location, reader.store, obj.key, obj.size, obj.sha256)
        reader.expected_objects.append(expected)
        if (finding := check_size(expected, sizes.get(obj.key), run=reader.run)) is not None:
            reader.findings.append(finding)


def _check_done(reader: AuditReader, steps: Mapping[str, AttemptRecords], step: str) -> None:
    """Check that each done marker has an end record, from which it is derived."""
    layout = RunLayout(reader.run)
    for info in reader.store.list(layout.done_markers):
        marker = parse_done(info.key)
        if marker is None or not selects_step(step, marker[0]):
            continue
        name, number, _ = marker
        if number not in steps.get(name, AttemptRecords()).ended:
            fault = "it is missing, although the attempt has a done marker"
            reader.add_finding(ObjectLocation(AuditLayer.END, name, number), layout.attempt_end(name, number), fault)


class LineageAudit:
    """Checks the checkpoints of ``step`` in the store of ``reader``, which collects the findings."""

    def __init__(self, reader: AuditReader, step: str, attempts: AttemptRecords) -> None:
        self._reader = reader
        self._step = step
        self._attempts = attempts
        self._lineage = lineage_name(reader.run, step)
        self._layout = LineageLayout(self._lineage)
        self.commits = list_commits(reader.store, self._lineage)
        self.quarantined: dict[CheckpointRef, QuarantinedCheckpoint] = {}

    def check(self) -> None:
        """Check everything except the bytes of shards."""
        for info in self._reader.store.list(self._layout.all_quarantined):
            if (ref := self._layout.parse_checkpoint(info.key)) is not None:
                self.quarantined[ref] = self._read_quarantine(ref, info.key)
        self._reader.prefetch([self._layout.manifest(ref.attempt, ref.global_step) for ref in self.commits])
        sizes = {info.key: info.size for info in self._reader.store.list(self._layout.all_shards)}
        for ref in self.commits:
            self._check_checkpoint(ref, sizes)
        for attempt in {ref.attempt: ref for ref in self.commits if ref.attempt not in self._attempts.claimed}:
            key = RunLayout(self._reader.run).attempt(self._step, attempt)
            fault = "it is missing, although the attempt has committed checkpoints"
            self._reader.add_finding(ObjectLocation(AuditLayer.CLAIM, self._step, attempt), key, fault)
        self._check_required_checkpoints()

    def _read_quarantine(self, ref: CheckpointRef, key: str) -> QuarantinedCheckpoint:
        location = ObjectLocation(AuditLayer.QUARANTINE, self._step, ref.attempt, ref)
        record = self._reader.read(location, key, QuarantineRecord)
        if record is None:
            return QuarantinedCheckpoint(checkpoint=ref, reason="its record cannot be read", by="unknown")
        if record.checkpoint != ref:
            self._reader.add_finding(location, key, f"it is the record of checkpoint {record.checkpoint}")
        return QuarantinedCheckpoint(checkpoint=ref, reason=record.reason, by=record.by)

    def _check_checkpoint(self, ref: CheckpointRef, sizes: Mapping[str, int]) -> None:
        key = self._layout.manifest(ref.attempt, ref.global_step)
        location = ObjectLocation(AuditLayer.MANIFEST, self._step, ref.attempt, ref)
        is_quarantined = ref in self.quarantined
        manifest = self._reader.read(location, key, CheckpointManifest, is_quarantined=is_quarantined)
        if manifest is None:
            return
        if (fault := manifest_fault(manifest, ref)) is not None:
            self._reader.add_finding(location, key, fault, is_quarantined=is_quarantined)
            return
        shards = [
            ExpectedObject(
                location._replace(layer=AuditLayer.SHARD), self._reader.store, shard.key, shard.size, shard.sha256
            )
            for shard in manifest.shards
        ]
        findings = [
            check_size(shard, sizes.get(shard.key), run=self._reader.run, is_quarantined=is_quarantined)
            for shard in shards
        ]
        if any(findings) and is_deleted(self._reader.store, key):
            return  # retention deleted the checkpoint after it was listed
        self._reader.expected_objects += shards
        self._reader.findings += [finding for finding in findings if finding is not None]

    def _check_required_checkpoints(self) -> None:
        """Check the checkpoints that retention never deletes: the newest, and the start of the newest attempt."""
        newest = max(self._attempts.claims, default=0)
        if not newest or any(ref.attempt == newest for ref in self.commits):
            return
        start, end = self._attempts.claims[newest].starts_from, self._attempts.ends.get(newest)
        if end is not None and end.progress:
            fault = f"attempt {newest} has committed checkpoints, but none of them has a manifest"
            self._reader.add_finding(
                ObjectLocation(AuditLayer.MANIFEST, self._step, newest), self._layout.manifests, fault
            )
        elif (
            start is not None
            and start.lineage == self._lineage
            and {start}.isdisjoint({*self.commits, *self.quarantined})
        ):
            key = self._layout.manifest(start.attempt, start.global_step)
            fault = f"it is missing, although attempt {newest} starts from it"
            self._reader.add_finding(ObjectLocation(AuditLayer.MANIFEST, self._step, start.attempt, start), key, fault)


def is_deleted(store: Store, key: str) -> bool:
    """Whether the object no longer exists."""
    return next((info for info in store.list(key) if info.key == key), None) is None
