"""Reading records in order to check them: what is wrong with one is a finding, and the next is read."""

import json
from collections.abc import Callable, Sequence
from typing import TypeVar

from pydantic import ValidationError

from tiphys.errors import ObjectMissingError
from tiphys.lineage.damage import Damage, Layer, Place, Wanted, damage
from tiphys.protocol.pipeline import CompiledPipeline
from tiphys.records import (
    RunRecord,
    RunSealed,
    StoredRecord,
    SubmissionBound,
    SubmissionClaim,
    WorkflowRecord,
    digest,
    stored_form,
)
from tiphys.store import RunLayout, Store, open_store
from tiphys.store.layout import parse_submission
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
