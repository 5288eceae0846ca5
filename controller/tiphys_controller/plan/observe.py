"""Reads from storage what a plan is made of: a few listings, and the records that they leave in doubt.

Neither the Workflow object nor any cluster is asked. A listing shows sizes, so
no request is made per output.

Turns each listing of a run, row by row as it comes, into what it shows of the steps.

No listing is kept: there may be hundreds of thousands of rows, and while one
page is awaited, another is read.

Which steps stand by a result that a submission took over, instead of by an attempt of their own.

A step that was taken over opens no attempt. Looking at attempts alone, a plan
would run a step that another run has made again and again, or answer for it
with its last attempt where an older one was taken.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from tiphys.protocol.compiled_workflow import Manifest
from tiphys.records import AdoptedRecord, AttemptClaim, AttemptEnd, RunRecord
from tiphys.store import (
    ObjectInfo,
    RunLayout,
    Store,
    Submission,
    find_record,
    read_record,
    read_run,
    submissions,
    workflow_of,
)
from tiphys.store.layout import parse_adopted, parse_adopted_attempt, parse_attempt, parse_done, parse_output
from tiphys.store.runs import concurrently, of_place
from tiphys_controller.plan.step_state import Adoption, EndKey, Standing, StepListing, Verdict, judge, judge_adopted

Projections = Mapping[str, Mapping[int, frozenset[str]]]
"""Listing digests of done projections, by step id and by attempt."""
Sizes = Mapping[str, Mapping[int, Mapping[str, int]]]
"""Sizes of outputs, by step id, by attempt, and by key relative to the outputs of the attempt."""


class Attempts(NamedTuple):
    """Numbers of attempts, by step id."""

    claimed: Mapping[str, set[int]]
    ended: Mapping[str, set[int]]


def attempts_of(rows: Iterable[ObjectInfo]) -> Attempts:
    """What ``attempts/`` shows."""
    claimed: dict[str, set[int]] = defaultdict(set)
    ended: dict[str, set[int]] = defaultdict(set)
    for info in rows:
        if place := parse_attempt(info.key):
            (ended if place[2] else claimed)[place[0]].add(place[1])
    return Attempts(claimed, ended)


def projections_of(rows: Iterable[ObjectInfo]) -> Projections:
    """What ``done/`` shows."""
    found: dict[str, dict[int, frozenset[str]]] = defaultdict(dict)
    for info in rows:
        if projection := parse_done(info.key):
            step, attempt, digest = projection
            found[step][attempt] = found[step].get(attempt, frozenset()) | {digest}
    return found


def sizes_of(rows: Iterable[ObjectInfo]) -> Sizes:
    """What ``outputs/`` shows."""
    found: dict[str, dict[int, dict[str, int]]] = defaultdict(lambda: defaultdict(dict))
    for info in rows:
        if output := parse_output(info.key):
            _, step, attempt, key = output
            found[step][attempt][key] = info.size
    return found


def by_step(attempts: Attempts, projections: Projections, sizes: Sizes) -> dict[str, StepListing]:
    """What is listed of each step that has an attempt, by step id."""
    return {
        step: StepListing(
            attempts=frozenset(numbers),
            ended=frozenset(attempts.ended.get(step, ())),
            projections=projections.get(step, {}),
            outputs=sizes.get(step, {}),
        )
        for step, numbers in attempts.claimed.items()
    }


_NOTHING = StepListing()


class AdoptionState(NamedTuple):
    """``adoption`` is None where the last attempt of the step stands. Finding out took so many requests."""

    adoption: Adoption | None
    requests: int


class TakenOver(NamedTuple):
    """What keys below ``adopted/`` say."""

    submissions: dict[str, int]
    """The last submission that took over a result for a step, by step id."""
    attempts: set[tuple[int, str, int]]
    """Submission, step id, and the attempt of that step which it took over; not all have left that."""


def taken_over(keys: Iterable[str]) -> TakenOver:
    """Read what is told by the keys alone."""
    found = TakenOver({}, set())
    for key in keys:
        if place := parse_adopted(key):
            found.submissions[place[1]] = max(place[0], found.submissions.get(place[1], 0))
        elif own := parse_adopted_attempt(key):
            found.attempts.add(own)
    return found


def standing(store: Store, run: str, taken: TakenOver, steps: Mapping[str, StepListing]) -> dict[str, AdoptionState]:
    """What steps stand by that were taken over, but for those whose last attempt stands, as the keys alone tell.

    Each costs one read, and three more requests if it is not its last attempt.

    Raises:
        IntegrityError: a record is damaged.
    """
    places = [
        (step, submission)
        for step, submission in sorted(taken.submissions.items())
        if (submission, step, steps.get(step, _NOTHING).last) not in taken.attempts
    ]
    found = concurrently(lambda place: _standing(store, RunLayout(run), *place, steps.get(place[0], _NOTHING)), places)
    return {step: one for (step, _), one in zip(places, found, strict=True)}


def _standing(store: Store, layout: RunLayout, step: str, submission: int, listing: StepListing) -> AdoptionState:
    record = read_record(store, layout.adopted(submission, step), AdoptedRecord)
    last = listing.last
    own = (record.source_run, record.source_step) == (layout.run, step)
    if own and record.source_attempt == last:
        return AdoptionState(None, 1)
    if not last:
        return AdoptionState(_adoption(store, record, own), 3)
    # Who took a result over opens no attempt afterwards; a later submission may.
    later = read_record(store, layout.attempt(step, last), AttemptClaim).submission > submission
    return AdoptionState(None, 2) if later else AdoptionState(_adoption(store, record, own), 4)


def _adoption(store: Store, record: AdoptedRecord, own: bool) -> Adoption:
    source = RunLayout(record.source_run)
    where = "" if own else f"run {record.source_run}, step {record.source_step}, "
    return Adoption(
        source=f"{where}attempt {record.source_attempt}",
        attempt=record.source_attempt if own else 0,
        end=find_record(store, source.attempt_end(record.source_step, record.source_attempt), AttemptEnd),
        sizes={info.key: info.size for info in store.list(source.outputs(record.source_step, record.source_attempt))},
    )


_READERS = 16


@dataclass(frozen=True)
class RunState:
    """What storage says of one run. ``ends`` holds the end records read so far."""

    record: RunRecord
    submissions: tuple[Submission, ...] = ()
    steps: Mapping[str, StepListing] = field(default_factory=dict)
    """By step id."""
    adopted: Mapping[str, Adoption] = field(default_factory=dict)
    """Steps that stand by a result other than that of their last attempt."""
    ends: Mapping[EndKey, AttemptEnd] = field(default_factory=dict)
    requests: int = 0
    """Requests made to storage; a listing counts as one, however many pages it has."""
    workflow: Manifest = field(default_factory=dict)
    """The Workflow that the last submission was made of."""
    taken: Mapping[str, int] = field(default_factory=dict)
    """The last submission that took over a result, by step id."""
    renewed: Mapping[str, str] = field(default_factory=dict)
    """Steps that shall run again although they are done, by name, each with the reason."""

    def verdict(self, step: str) -> Verdict:
        """Where one step stands."""
        found, name = self._evidence(step), step.partition(".")[0]
        if not found.done:
            return found
        if name in self.renewed:
            return Verdict(Standing.MISSING, self.renewed[name], found.attempt)
        since = self.since.get(name, 0)
        if since <= self.taken.get(step, 0):
            return found
        return self._since(step, found, since)

    @cached_property
    def since(self) -> Mapping[str, int]:
        """By step, the last submission that was to run it: what is older may rest on inputs that have changed."""
        return {step: one.claim.submission for one in self.submissions for step in one.claim.steps}

    def _since(self, step: str, found: Verdict, since: int) -> Verdict:
        end = self.ends.get((step, found.attempt)) if found.attempt else None
        if end is None and found.attempt:
            return replace(found, standing=Standing.UNREAD)
        if end is not None and end.submission >= since:
            return found
        if self.succeeded and since == self.submissions[-1].claim.submission:
            return Verdict(Standing.NEVER, f"submission {since} succeeded without it", found.attempt)
        reason = f"its result is older than submission {since}, which was to run it or to check it against its inputs"
        return Verdict(Standing.MISSING, reason, found.attempt)

    def _evidence(self, step: str) -> Verdict:
        if (adoption := self.adopted.get(step)) is not None:
            return judge_adopted(adoption)
        return judge(step, self.steps.get(step), self.ends, self._layout)

    @cached_property
    def _layout(self) -> RunLayout:
        return RunLayout(self.record.run)

    @property
    def in_doubt(self) -> list[EndKey]:
        """End records without which nothing can be said of a step: no projection vouches for its last attempt."""
        listed = ((step, listing) for step, listing in self.steps.items() if step not in self.adopted)
        return sorted((step, one.last) for step, one in listed if one.last in one.ended and not one.verified)

    @property
    def damaged(self) -> bool:
        """Whether what an end record names is not listed as it says, of any step whose last attempt decides."""
        return any(self._evidence(step).standing is Standing.DAMAGED for step, _ in self.in_doubt)

    @property
    def unfinished(self) -> list[EndKey]:
        """Attempts that nobody has ended: the last one of each such step."""
        last = (
            (step, max(listing.attempts), listing.ended) for step, listing in self.steps.items() if listing.attempts
        )
        return sorted((step, attempt) for step, attempt, ended in last if attempt not in ended)

    @property
    def succeeded(self) -> bool:
        """Whether the last submission ran to its end and sealed success."""
        last = self.submissions[-1].end if self.submissions else None
        return last is not None and last.status == "Succeeded"


def observe(store: Store, run: str) -> RunState:
    """List one run.

    Raises:
        NotFoundError: there is no such run.
        IntegrityError: a record is damaged.
    """
    layout = RunLayout(run)
    with ThreadPoolExecutor(max_workers=_READERS) as pool:
        # What does not depend on each other is asked for at once: ten thousand steps are dozens of pages.
        reading, submitting = pool.submit(read_run, store, run), pool.submit(submissions, store, run)
        attempting = pool.submit(lambda: attempts_of(store.list(layout.attempts)))
        projecting = pool.submit(lambda: projections_of(store.list(layout.done)))
        adopting = pool.submit(lambda: taken_over(info.key for info in store.list(layout.adoptions)))
        sizing = pool.submit(lambda: sizes_of(store.list(layout.all_outputs)))
        record, held = reading.result(), tuple(submitting.result())
        steps, taken = by_step(attempting.result(), projecting.result(), sizing.result()), adopting.result()
    workflow = workflow_of(store, record, held[-1].claim if held else None)
    read = sum(1 + (one.bound is not None) + (one.end is not None) for one in held)
    found = standing(store, run, taken, steps)
    stands = {step: one.adoption for step, one in found.items() if one.adoption}
    return RunState(
        record=record,
        submissions=held,
        steps={**dict.fromkeys(taken.submissions, StepListing()), **steps},
        adopted=stands,
        ends={(step, one.attempt): one.end for step, one in stands.items() if one.end},
        requests=1 + 1 + read + 4 + sum(one.requests for one in found.values()) + (workflow is not record.workflow),
        workflow=workflow,
        taken=taken.submissions,
    )


def with_ends(store: Store, state: RunState, wanted: Iterable[EndKey]) -> RunState:
    """``state`` with the end records of ``wanted`` read.

    Raises:
        ObjectMissingError: one of them is gone since it was listed.
        IntegrityError: one of them is damaged.
    """
    keys = sorted(set(wanted) - state.ends.keys())
    layout = RunLayout(state.record.run)

    def read(key: EndKey) -> AttemptEnd:
        end = read_record(store, layout.attempt_end(*key), AttemptEnd)
        return of_place(store, layout.attempt_end(*key), end, run=layout.run, step=key[0], attempt=key[1])

    with ThreadPoolExecutor(max_workers=_READERS) as pool:
        ends = dict(zip(keys, pool.map(read, keys), strict=True))
    return replace(state, ends={**state.ends, **ends}, requests=state.requests + len(keys))


def looked_again(store: Store, state: RunState) -> RunState:
    """``state``, with outputs listed anew where a record that was read names one that was not listed as it says.

    A step that ended while the run was listed may be listed without its outputs, which were written before its record.
    """
    if not state.damaged:
        return state
    sizes = sizes_of(store.list(RunLayout(state.record.run).all_outputs))
    steps = {step: replace(one, outputs=sizes.get(step, {})) for step, one in state.steps.items()}
    return replace(state, steps=steps, requests=state.requests + 1)
