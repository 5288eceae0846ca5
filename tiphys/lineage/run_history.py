"""The one reader of a run: it lists what a store holds about the run once, and reads each record once.

Plan, `get`, report, lineage, events, traces and pages show the same records in different ways. Each is given a
`RunHistory`, which reads what a view asks for when it asks: a summary reads no attempt, and a page those that it shows.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from tiphys.errors import IntegrityError
from tiphys.lineage.step_names import StepNames, read_item_bindings, selects_step
from tiphys.protocol.compiled_workflow import CompiledPipeline, Manifest
from tiphys.records import AttemptEnd, Event, RunRecord
from tiphys.store import (
    Attempt,
    DamagedRecord,
    RunLayout,
    Store,
    Submission,
    read_attempt_end,
    read_events,
    read_last_claim,
    read_run,
    read_submission_workflow,
    read_submissions,
)
from tiphys.store.layout import parse_submission
from tiphys.store.runs import (
    ALL_ATTEMPTS,
    AttemptNumbers,
    collect_damage,
    list_attempts,
    read_attempt,
    read_concurrently,
    select_attempts,
)

_PartT = TypeVar("_PartT")


class RunHistory:
    """What a store holds about one run, each part as it was when it was first asked for.

    Nothing is read again: whoever waits for a change makes another history. Threads may share one, and then may
    read a part twice.

    A damaged record is raised as an `IntegrityError`, except by one `for_display`.
    """

    def __init__(self, store: Store, run: str) -> None:
        self.store = store
        self.run = run
        self._damaged: list[DamagedRecord] | None = None
        self._max_event_batches: int | None = None
        self._parts: dict[str, Any] = {}
        self._attempts: dict[tuple[str, int], Attempt | None] = {}
        self._ends: dict[tuple[str, int], AttemptEnd | IntegrityError] = {}

    @classmethod
    def for_display(cls, store: Store, run: str, max_event_batches: int | None = None) -> "RunHistory":
        """A history whose damaged records do not hide the others: they are in `damaged`.

        An attempt whose end cannot be read has failed for an unknown cause; other damaged records are left out.
        ``max_event_batches`` are the most batches of events that are read of each kind, the newest; None for all.
        """
        history = cls(store, run)
        history._damaged, history._max_event_batches = [], max_event_batches
        return history

    @property
    def layout(self) -> RunLayout:
        """Keys of the run; raises `UsageError` if it has no name that a run can have."""
        return RunLayout(self.run)

    @property
    def damaged(self) -> tuple[str, ...]:
        """What is the matter with each damaged record that was found so far: its key, the damage, and what to do."""
        return tuple(record.message for record in sorted(self.damaged_records))

    @property
    def damaged_records(self) -> frozenset[DamagedRecord]:
        """The damaged records that were found so far."""
        return frozenset(self._damaged or ())

    @property
    def record(self) -> RunRecord:
        """The record of the run, with its first Workflow; raises `NotFoundError` if the store has none."""
        return self._once("record", lambda: read_run(self.store, self.run))

    @property
    def submissions(self) -> tuple[Submission, ...]:
        return self._once("submissions", lambda: tuple(read_submissions(self.store, self.run, self._damaged)))

    @property
    def last_submission(self) -> Submission | None:
        """The newest submission; None if the run was never submitted."""
        return self.submissions[-1] if self.submissions else None

    @property
    def workflow(self) -> Manifest:
        """The Workflow of the last submission, before pruning; costs no reads of the others."""

        def read() -> Manifest:
            if "submissions" in self._parts:
                claim = self.last_submission.claim if self.last_submission else None
            else:
                claim = read_last_claim(self.store, self.run)
            return read_submission_workflow(self.store, self.record, claim)

        return self._once("workflow", read)

    @property
    def pipeline(self) -> CompiledPipeline:
        """The pipeline of the last submission; raises `UsageError` if Tiphys did not compile it."""
        return self._once("pipeline", lambda: CompiledPipeline.from_manifest(self.workflow))

    @property
    def names(self) -> StepNames:
        """Names of the steps and items of the last submission for people."""
        return self._once("names", lambda: self.build_names(self.pipeline))

    def build_names(self, pipeline: CompiledPipeline) -> StepNames:
        """Names of the steps and items under a changed pipeline."""
        return StepNames(
            self.run, pipeline, lambda: read_item_bindings(self.store, self.run, self._submission_numbers())
        )

    def _submission_numbers(self) -> list[int]:
        """Numbers of all submissions. A damaged record of one hides no name: only keys are looked at."""
        if "submissions" in self._parts:
            return [submission.claim.submission for submission in self.submissions]
        parsed = (parse_submission(info.key) for info in self.store.list(self.layout.submissions))
        return sorted({submission[0] for submission in parsed if submission})

    @property
    def attempt_numbers(self) -> Mapping[str, AttemptNumbers]:
        """Numbers of the attempts by step id."""
        return self._once("attempt_numbers", lambda: list_attempts(self.store, self.run))

    def list_step_attempts(self, step: str) -> AttemptNumbers:
        """Numbers of the attempts of one step; costs no listing of the others."""
        if "attempt_numbers" in self._parts:
            return self.attempt_numbers.get(step) or AttemptNumbers(set(), set())
        return self._once(
            f"attempts of {step}",
            lambda: list_attempts(self.store, self.run, step).get(step) or AttemptNumbers(set(), set()),
        )

    @property
    def attempts(self) -> dict[str, list[Attempt]]:
        """All attempts of every step that has any, in order, by step id."""
        return self.read_attempts()

    def read_attempts(self, window: slice = ALL_ATTEMPTS, step: str = "") -> dict[str, list[Attempt]]:
        """Attempts by step id, in order.

        ``window`` is as in `select_attempts`. ``step`` is the id of the only step or item; the name of a fan-out
        selects its items, and empty all.
        """
        listed = {step_id: numbers for step_id, numbers in self.attempt_numbers.items() if selects_step(step, step_id)}
        selected = select_attempts(listed, window)
        missing = [place for place in selected if place not in self._attempts]
        self._attempts |= zip(missing, read_concurrently(self._read_attempt, missing), strict=True)
        found: dict[str, list[Attempt]] = {}
        for place in selected:
            if (attempt := self._attempts[place]) is not None:
                found.setdefault(place[0], []).append(attempt)
        return found

    def read_attempt(self, step: str, number: int) -> Attempt:
        """One attempt that is listed; raises `IntegrityError` if its claim is damaged."""
        place = step, number
        if place not in self._attempts:
            self._attempts[place] = self._read_attempt(place)
        if (attempt := self._attempts[place]) is None:
            key = self.layout.attempt(step, number)
            raise IntegrityError(next(record.message for record in self.damaged_records if record.key == key))
        return attempt

    def read_end(self, step: str, attempt: int) -> AttemptEnd:
        """The end of an attempt.

        Raises:
            ObjectMissingError: it has none.
            IntegrityError: its record is damaged, and was not passed over.
        """
        place = step, attempt
        if place not in self._ends:
            try:
                self._ends[place] = read_attempt_end(self.store, self.run, step, attempt)
            except IntegrityError as error:
                self._ends[place] = error
        if isinstance(end := self._ends[place], IntegrityError):
            raise end
        return end

    @property
    def events(self) -> list[Event]:
        """Events of the run, as `read_events` reads them."""
        return self._once("events", lambda: read_events(self.store, self.run, self._damaged, self._max_event_batches))

    def _read_attempt(self, place: tuple[str, int]) -> Attempt | None:
        with collect_damage(self.layout.attempt(*place), self._damaged):
            listed = self.list_step_attempts(place[0])
            return read_attempt(self.store, self.run, *place, listed, self.read_end, self._damaged)
        return None

    def _once(self, part: str, read: Callable[[], _PartT]) -> _PartT:
        if part not in self._parts:  # no `cached_property`: until Python 3.12 its lock is one for all instances
            self._parts[part] = read()
        known: _PartT = self._parts[part]
        return known
