"""Reading records in order to check them: what is wrong with one is a finding, and the next is read.

Claims, ends and outputs of a run: each as it was written, and none missing that another one implies.

The checkpoints of one lineage: manifests, quarantine, the sizes of shards, and what has to be there.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from pydantic import ValidationError

from tiphys.errors import ObjectMissingError
from tiphys.lineage.audit.findings import Barred, Damage, Layer, Place, Wanted, damage, size_damage
from tiphys.lineage.select import commits_of
from tiphys.lineage.validity import manifest_fault
from tiphys.protocol.compiled_workflow import CompiledPipeline
from tiphys.records import (
    AttemptClaim,
    AttemptEnd,
    CheckpointManifest,
    CheckpointRef,
    Outcome,
    QuarantineRecord,
    RunRecord,
    RunSealed,
    StoredRecord,
    SubmissionBound,
    SubmissionClaim,
    WorkflowRecord,
    digest,
    stored_form,
)
from tiphys.store import LineageLayout, RunLayout, Store, lineage_of, open_store
from tiphys.store.layout import parse_attempt, parse_done, parse_submission
from tiphys.store.runs import concurrently

RecordT = TypeVar("RecordT", bound=StoredRecord)

_SUBMISSIONS: dict[str, type[SubmissionClaim | SubmissionBound | RunSealed]] = {
    "claim": SubmissionClaim,
    "bound": SubmissionBound,
    "end": RunSealed,
}


class Reader:
    """Reads records of one run from one store, and collects what is wrong and what they vouch for."""

    def __init__(self, store: Store, run: str) -> None:
        self.store = store
        self.run = run
        self.found: list[Damage] = []
        self.wanted: list[Wanted] = []
        self.notes: list[str] = []
        self._read: dict[str, bytes] = {}

    def say(self, place: Place, key: str, fault: str, *, barred: bool = False) -> None:
        """Note that the object at ``key`` is not what it has to be."""
        self.found.append(damage(place, key, fault, run=self.run, barred=barred))

    def read(self, place: Place, key: str, kind: type[RecordT], *, barred: bool = False) -> RecordT | None:
        """The record, or None with a finding if it is not, byte for byte, what was written.

        One that has been removed since it was listed is None without a finding.
        """
        try:
            data = self._read.pop(key, None) or self.store.read(key)
            record = kind.model_validate_json(data)
        except ObjectMissingError:
            return None
        except ValidationError as error:
            self.say(place, key, f"it is no valid {kind.__name__}: {error.errors()[0]['msg']}", barred=barred)
            return None
        if stored_form(json.loads(data)) != data:
            self.say(place, key, "it is not byte for byte what was written", barred=barred)
            return None
        return record

    def read_ahead(self, keys: Sequence[str]) -> None:
        """Fetch records that will be read next, several at once."""

        def fetch(key: str) -> bytes:
            try:
                return self.store.read(key)
            except ObjectMissingError:
                return b""

        self._read |= dict(zip(keys, concurrently(fetch, keys), strict=True))

    def run_record(self) -> RunRecord | None:
        """The run's own record; None if there is none, or if it is damaged."""
        key = RunLayout(self.run).record
        place = Place(Layer.RUN)
        record = self.read(place, key, RunRecord)
        if record is None:
            return None
        if record.run != self.run:
            self.say(place, key, f"it is that of run {record.run}")
        elif record.digest != digest(record.workflow):
            self.say(place, key, "its Workflow was changed after it was written, its digest does not match")
        else:
            return record
        return None

    def check_submissions(self) -> None:
        """Read all that is recorded about the Workflows of the run."""
        for info in self.store.list(RunLayout(self.run).submissions):
            if (found := parse_submission(info.key)) is None:
                continue
            number, what = found
            record = self.read(Place(Layer.RUN), info.key, _SUBMISSIONS[what])
            if record is not None and (record.run, record.submission) != (self.run, number):
                self.say(Place(Layer.RUN), info.key, f"it is that of {record.run}, submission {record.submission}")
            elif isinstance(record, SubmissionClaim) and record.workflow:
                self._check_workflow(record)

    def _check_workflow(self, claimed: SubmissionClaim) -> None:
        key = RunLayout(self.run).workflow(claimed.workflow)
        record = self.read(Place(Layer.RUN), key, WorkflowRecord)
        if record is not None and (record.run, digest(record.workflow)) != (self.run, claimed.workflow):
            self.say(Place(Layer.RUN), key, f"it is not the Workflow that submission {claimed.submission} was made of")
        elif record is None and not any(info.key == key for info in self.store.list(key)):
            self.say(Place(Layer.RUN), key, f"it is missing, and submission {claimed.submission} was made of it")


def checkpoint_stores(store: Store, record: RunRecord | None) -> Callable[[str], Store]:
    """Where the checkpoints of a step lie: on a volume of its own, or where the run does.

    What is returned raises `NotFoundError` for a volume that is not mounted here.
    """
    pipeline = CompiledPipeline.from_manifest(record.workflow) if record else None

    def of(step: str) -> Store:
        volume = pipeline.volume(step.partition(".")[0]) if pipeline else ""
        return open_store(volume, must_exist=True) if volume else store

    return of


@dataclass
class AttemptRecords:
    """What could be read of the attempts of one step, by number, and which keys there are."""

    claims: dict[int, AttemptClaim] = field(default_factory=dict)
    ends: dict[int, AttemptEnd] = field(default_factory=dict)
    claimed: set[int] = field(default_factory=set)
    ended: set[int] = field(default_factory=set)


def audit_attempts(reader: Reader, step: str = "") -> Mapping[str, AttemptRecords]:
    """Check the attempts of all steps, or of one with its items."""
    steps: dict[str, AttemptRecords] = {}
    listed = {info.key: parse_attempt(info.key) for info in reader.store.list(RunLayout(reader.run).attempts)}
    places = {key: place for key, place in listed.items() if place is not None and belongs(place[0], step)}
    reader.read_ahead(list(places))
    for key, place in places.items():
        _read(reader, steps.setdefault(place[0], AttemptRecords()), key, *place)
    for name, records in sorted(steps.items()):
        _check_numbers(reader, name, records)
        for end in records.ends.values():
            _check_outputs(reader, end)
    _check_done(reader, steps, step)
    return steps


def belongs(name: str, step: str) -> bool:
    """Whether step id ``name`` is what a person means by ``step``: the same, or an item of it."""
    return step in ("", name, name.partition(".")[0])


def _read(reader: Reader, records: AttemptRecords, key: str, step: str, number: int, is_end: bool) -> None:
    place = Place(Layer.END if is_end else Layer.CLAIM, step, number)
    (records.ended if is_end else records.claimed).add(number)
    record: AttemptClaim | AttemptEnd | None
    record = reader.read(place, key, AttemptEnd) if is_end else reader.read(place, key, AttemptClaim)
    if record is None:
        return
    if not _is_of(record, reader.run, step, number):
        reader.say(place, key, f"it is that of attempt {record.attempt} of {record.run}/{record.step}")
    elif isinstance(record, AttemptEnd):
        records.ends[number] = record
    else:
        records.claims[number] = record


def _is_of(record: AttemptClaim | AttemptEnd, run: str, step: str, number: int) -> bool:
    return (record.run, record.step, record.attempt) == (run, step, number)


def _check_numbers(reader: Reader, step: str, records: AttemptRecords) -> None:
    """Attempts count from 1 without a gap, and the next one is claimed only once there is an end."""
    layout = RunLayout(reader.run)
    newest = max(records.claimed | records.ended)
    for number in range(1, newest + 1):
        if number not in records.claimed:
            why = "it has an end" if number in records.ended else f"attempt {newest} was opened after it"
            reader.say(Place(Layer.CLAIM, step, number), layout.attempt(step, number), f"it is missing, and {why}")
        if number not in records.ended and number < newest:
            fault = f"it is missing, and attempt {newest} was opened after it"
            reader.say(Place(Layer.END, step, number), layout.attempt_end(step, number), fault)


def _check_outputs(reader: Reader, end: AttemptEnd) -> None:
    objects = [one for output in end.outputs for one in output.objects] if end.outcome is Outcome.DONE else []
    if not objects:
        return
    sizes = {info.key: info.size for info in reader.store.list(RunLayout(end.run).outputs(end.step, end.attempt))}
    place = Place(Layer.OUTPUT, end.step, end.attempt)
    for one in objects:
        wanted = Wanted(place, reader.store, one.key, one.size, one.sha256)
        reader.wanted.append(wanted)
        if (found := size_damage(wanted, sizes.get(one.key), run=reader.run)) is not None:
            reader.found.append(found)


def _check_done(reader: Reader, steps: Mapping[str, AttemptRecords], step: str) -> None:
    """A projection is derived from a done end, so where there is one, there was the other."""
    layout = RunLayout(reader.run)
    for info in reader.store.list(layout.done):
        found = parse_done(info.key)
        if found is None or not belongs(found[0], step):
            continue
        name, number, _ = found
        if number not in steps.get(name, AttemptRecords()).ended:
            fault = "it is missing, yet the attempt counts as done"
            reader.say(Place(Layer.END, name, number), layout.attempt_end(name, number), fault)


class LineageAudit:
    """Checks the checkpoints of ``step`` in the store of ``reader``, which collects what is found."""

    def __init__(self, reader: Reader, step: str, attempts: AttemptRecords) -> None:
        self._reader = reader
        self._step = step
        self._attempts = attempts
        self._lineage = lineage_of(reader.run, step)
        self._layout = LineageLayout(self._lineage)
        self.commits = commits_of(reader.store, self._lineage)
        self.barred: dict[CheckpointRef, Barred] = {}

    def check(self) -> None:
        """Everything but the bytes of shards."""
        for info in self._reader.store.list(self._layout.quarantine):
            if (ref := self._layout.parse_checkpoint(info.key)) is not None:
                self.barred[ref] = self._quarantine(ref, info.key)
        self._reader.read_ahead([self._layout.manifest(ref.attempt, ref.global_step) for ref in self.commits])
        sizes = {info.key: info.size for info in self._reader.store.list(self._layout.all_shards)}
        for ref in self.commits:
            self._check_checkpoint(ref, sizes)
        for attempt in {ref.attempt: ref for ref in self.commits if ref.attempt not in self._attempts.claimed}:
            key = RunLayout(self._reader.run).attempt(self._step, attempt)
            fault = "it is missing, yet it has committed checkpoints"
            self._reader.say(Place(Layer.CLAIM, self._step, attempt), key, fault)
        self._check_what_must_be_there()

    def _quarantine(self, ref: CheckpointRef, key: str) -> Barred:
        place = Place(Layer.QUARANTINE, self._step, ref.attempt, ref)
        record = self._reader.read(place, key, QuarantineRecord)
        if record is None:
            return Barred(checkpoint=ref, reason="its record cannot be read", by="unknown")
        if record.checkpoint != ref:
            self._reader.say(place, key, f"it is that of checkpoint {record.checkpoint}")
        return Barred(checkpoint=ref, reason=record.reason, by=record.by)

    def _check_checkpoint(self, ref: CheckpointRef, sizes: Mapping[str, int]) -> None:
        key = self._layout.manifest(ref.attempt, ref.global_step)
        place = Place(Layer.MANIFEST, self._step, ref.attempt, ref)
        barred = ref in self.barred
        manifest = self._reader.read(place, key, CheckpointManifest, barred=barred)
        if manifest is None:
            return
        if (fault := manifest_fault(manifest, ref)) is not None:
            self._reader.say(place, key, fault, barred=barred)
            return
        shards = [
            Wanted(place._replace(layer=Layer.SHARD), self._reader.store, shard.key, shard.size, shard.sha256)
            for shard in manifest.shards
        ]
        found = [size_damage(one, sizes.get(one.key), run=self._reader.run, barred=barred) for one in shards]
        if any(found) and is_gone(self._reader.store, key):
            return  # retention was faster
        self._reader.wanted += shards
        self._reader.found += [one for one in found if one is not None]

    def _check_what_must_be_there(self) -> None:
        """Retention leaves the newest checkpoint, and what an attempt that saved nothing yet is to start from."""
        newest = max(self._attempts.claims, default=0)
        if not newest or any(ref.attempt == newest for ref in self.commits):
            return
        start, end = self._attempts.claims[newest].starts_from, self._attempts.ends.get(newest)
        if end is not None and end.progress:
            fault = f"attempt {newest} has committed checkpoints, and none of them has a manifest"
            self._reader.say(Place(Layer.MANIFEST, self._step, newest), self._layout.manifests, fault)
        elif start is not None and start.lineage == self._lineage and {start}.isdisjoint({*self.commits, *self.barred}):
            key = self._layout.manifest(start.attempt, start.global_step)
            fault = f"it is missing, and attempt {newest} was to start from it"
            self._reader.say(Place(Layer.MANIFEST, self._step, start.attempt, start), key, fault)


def is_gone(store: Store, key: str) -> bool:
    """Whether there is no such object by now."""
    try:
        store.read(key)
    except ObjectMissingError:
        return True
    return False
