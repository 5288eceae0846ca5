"""Reads what `decide` is made of: storage first, and of the cluster only whether one Workflow is there.

Costs one listing and three small reads for each submission while a run goes on;
what a decision needs beyond that is read once it has ended.
"""

from collections.abc import Mapping
from dataclasses import replace
from itertools import groupby
from types import MappingProxyType

from tiphys.protocol.auto_resume_policy import AutoResumePolicy
from tiphys.protocol.compiled_workflow import tells_of_shutdown
from tiphys.records import Advance, AttemptEnd, AutomaticResume, Cause, LeftAlone, Outcome
from tiphys.store import LineageLayout, RunLayout, Store, Submission, find_record, read_record, submissions
from tiphys.store.layout import LINEAGES, parse_attempt, parse_done
from tiphys.store.runs import concurrently
from tiphys_controller.auto_resume.decide import count_fruitless
from tiphys_controller.auto_resume.state import Failure, Observed, Standing, standing_of
from tiphys_controller.submit.submission import place
from tiphys_controller.submit.submitter import Submitter

_MOST_COUNTED = 100


def look(
    store: Store,
    submitter: Submitter,
    run: str,
    policy: AutoResumePolicy | None,
    shutdowns: Mapping[str, str] = MappingProxyType({}),
    *,
    thorough: bool = False,
) -> Observed:
    """Look at one run.

    Args:
        store: Where it is kept.
        submitter: The cluster that is asked for its Workflow.
        run: Its name.
        policy: What its author asked for.
        shutdowns: By uid, ``spec.shutdown`` of Workflows of this run for which that was seen.
        thorough: Read all there is, also of a run that goes on.

    Raises:
        StoreError: storage or API server is out of reach.
        IntegrityError: a record is damaged.
    """
    held = submissions(store, run)
    last = held[-1] if held else None
    live = submitter.find(*place(last)) if last else None
    number, standing = last.claim.submission if last else 0, standing_of(last, live, submitter.cluster)
    uid = last.bound.uid if last and last.bound else ""
    if standing in (Standing.RUNS, Standing.SUCCEEDED, Standing.ELSEWHERE) and not thorough:
        return Observed(run, number, standing, policy, uid)
    done = _done(store, run)
    advance = _advance(store, run, len(done))
    seen = Observed(
        run,
        number,
        standing,
        policy,
        uid,
        told=last.end.message if last and last.end else "",
        ended_by=_ended_by(store, run, last, shutdowns),
        failures=_failures(store, run, number, done),
        fruitless=count_fruitless(advance, _resumes(store, run, number)),
        advance=advance,
    )
    intent = find_record(store, RunLayout(run).automatic(seen.next_submission), AutomaticResume)
    return replace(seen, intended=intent is not None)


def _done(store: Store, run: str) -> dict[str, int]:
    """The newest attempt of each step that was ever finished."""
    found: dict[str, int] = {}
    for info in store.list(RunLayout(run).done):
        if (projection := parse_done(info.key)) is not None:
            step, attempt, _ = projection
            found[step] = max(attempt, found.get(step, 0))
    return found


def _advance(store: Store, run: str, steps: int) -> Advance:
    found = {}
    for prefix in store.prefixes(f"{LINEAGES}{run}/"):
        lineage = LineageLayout(prefix.removeprefix(LINEAGES).rstrip("/"))
        refs = (lineage.parse_checkpoint(info.key) for info in store.list(lineage.manifests))
        if reached := [ref.global_step for ref in refs if ref]:
            found[lineage.lineage.rpartition("/")[2]] = max(reached)
    on_volumes = sum(1 for _ in store.list(RunLayout(run).all_progress))
    return Advance(steps=steps, checkpoints=found, on_volumes=on_volumes)


def _resumes(store: Store, run: str, newest: int) -> list[AutomaticResume]:
    """Records of the last submissions that were made by themselves, the newest first.

    Keys are read and not listed: a listing may come late.
    """
    found: list[AutomaticResume] = []
    for number in range(newest, max(newest - _MOST_COUNTED, 0), -1):
        record = find_record(store, RunLayout(run).automatic(number), AutomaticResume)
        if record is None:
            break
        found.append(record)
    return found


def _ended_by(store: Store, run: str, last: Submission | None, shutdowns: Mapping[str, str]) -> str:
    if last is None:
        return ""
    if shutdown := shutdowns.get(last.bound.uid) if last.bound else "":
        return f"somebody asked its Workflow to {shutdown.lower()}"
    if last.end and tells_of_shutdown(last.end.message):
        return "its Workflow was stopped"
    left = find_record(store, RunLayout(run).left_alone(last.claim.submission), LeftAlone)
    return left.reason if left else ""


def _failures(store: Store, run: str, submission: int, done: Mapping[str, int]) -> tuple[Failure, ...]:
    """Steps that were given up in ``submission``: their newest attempt has failed."""
    layout = RunLayout(run)
    places = (found for info in store.list(layout.attempts) if (found := parse_attempt(info.key)))
    newest: list[tuple[str, int]] = []
    for step, of_step in groupby(sorted(places), key=lambda found: found[0]):
        numbers = list(of_step)
        last = max(number for _, number, _ in numbers)
        if last > done.get(step, 0) and (step, last, True) in numbers:
            newest.append((step, last))
    ends = concurrently(lambda found: read_record(store, layout.attempt_end(*found), AttemptEnd), newest)
    return tuple(
        Failure(end.step, end.cause or Cause.UNKNOWN, end.message)
        for end in ends
        if end.outcome is Outcome.FAILED and end.submission == submission
    )
