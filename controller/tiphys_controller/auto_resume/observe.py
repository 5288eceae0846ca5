"""Reads a `RunObservation`: storage first, and of the cluster only one Workflow.

A running run costs one listing and up to three small reads per submission.
Everything else a decision needs is read only after the Workflow has ended.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from tiphys.errors import IntegrityError
from tiphys.protocol.auto_resume_policy import AutoResumePolicy
from tiphys.protocol.compiled_workflow import is_shutdown_message
from tiphys.records import AttemptEndOutcome, AutoResumeRecord, Cause, ManualStopRecord, RunProgress
from tiphys.store import LineageLayout, RunLayout, Store, Submission, find_record, read_attempt_end, read_submissions
from tiphys.store.layout import LINEAGES
from tiphys.store.runs import list_attempts, read_concurrently
from tiphys_controller.auto_resume.decide import count_fruitless_resumes
from tiphys_controller.auto_resume.state import (
    RunObservation,
    StepFailure,
    SubmissionStatus,
    determine_submission_status,
)
from tiphys_controller.plan.listing import RunListing
from tiphys_controller.submit.submission import find_workflow
from tiphys_controller.submit.submitter import Submitter
from tiphys_controller.submit.takeovers import record_live_workflow

_MAX_COUNTED_RESUMES = 100


def observe_run(
    store: Store,
    submitter: Submitter,
    run: str,
    policy: AutoResumePolicy | None,
    shutdowns: Mapping[str, str] = MappingProxyType({}),
    *,
    is_thorough: bool = False,
) -> RunObservation:
    """Observe one run.

    ``shutdowns`` has ``spec.shutdown`` of the run's Workflows by uid. ``is_thorough``: read failures and progress of a
    running run, too.

    Raises:
        StoreError: storage or API server is out of reach.
        IntegrityError: a record is damaged.
    """
    submissions = read_submissions(store, run)
    last = submissions[-1] if submissions else None
    live = find_workflow(submitter, last) if last else None
    number, status = last.claim.submission if last else 0, determine_submission_status(last, live, submitter.cluster)
    uid = last.binding.uid if last and last.binding else ""
    if (
        status in (SubmissionStatus.RUNNING, SubmissionStatus.SUCCEEDED, SubmissionStatus.OTHER_CLUSTER)
        and not is_thorough
    ):
        return RunObservation(run, number, status, policy, uid)
    if status is not SubmissionStatus.RUNNING:
        record_live_workflow(store, submitter, run, last)  # the causes of its failures decide
    done = _read_newest_done(store, run)
    advance = _read_advance(store, run, len(done))
    observation = RunObservation(
        run,
        number,
        status,
        policy,
        uid,
        end_message=last.end.message if last and last.end else "",
        person_reason=_find_person_reason(store, run, last, shutdowns),
        failures=_read_failures(store, run, number, done),
        fruitless_resumes=count_fruitless_resumes(advance, _read_auto_resumes(store, run, number)),
        advance=advance,
    )
    intent = find_record(store, RunLayout(run).auto_resume(observation.next_submission), AutoResumeRecord)
    return replace(observation, is_intended=intent is not None)


def _read_newest_done(store: Store, run: str) -> dict[str, int]:
    """The newest finished attempt of each step that has one."""
    listing = RunListing().add(store.list(RunLayout(run).done_markers))
    return {step: max(digests) for step, digests in listing.projections.items()}


def _read_advance(store: Store, run: str, steps: int) -> RunProgress:
    newest_steps = {}
    for prefix in store.prefixes(f"{LINEAGES}{run}/"):
        lineage = LineageLayout(prefix.removeprefix(LINEAGES).rstrip("/"))
        refs = (lineage.parse_checkpoint(info.key) for info in store.list(lineage.manifests))
        if reached := [ref.global_step for ref in refs if ref]:
            newest_steps[lineage.lineage.rpartition("/")[2]] = max(reached)
    on_volumes = sum(1 for _ in store.list(RunLayout(run).all_progress))
    return RunProgress(steps=steps, checkpoints=newest_steps, on_volumes=on_volumes)


def _read_auto_resumes(store: Store, run: str, newest: int) -> list[AutoResumeRecord]:
    """Records of the automatic resumes in a row up to the newest submission, the newest first.

    The keys are read and not listed: a listing may lag behind.
    """
    resumes: list[AutoResumeRecord] = []
    for number in range(newest, max(newest - _MAX_COUNTED_RESUMES, 0), -1):
        record = find_record(store, RunLayout(run).auto_resume(number), AutoResumeRecord)
        if record is None:
            break
        resumes.append(record)
    return resumes


def _find_person_reason(store: Store, run: str, last: Submission | None, shutdowns: Mapping[str, str]) -> str:
    if last is None:
        return ""
    if shutdown := shutdowns.get(last.binding.uid) if last.binding else "":
        return f"a person set its Workflow to {shutdown.lower()}"
    if last.end and is_shutdown_message(last.end.message):
        return "its Workflow was stopped"
    stop = find_record(store, RunLayout(run).manual_stop(last.claim.submission), ManualStopRecord)
    return stop.reason if stop else ""


def _read_failures(store: Store, run: str, submission: int, done: Mapping[str, int]) -> tuple[StepFailure, ...]:
    """Steps that failed in ``submission``: their newest attempt ended as failed, or its end record is damaged."""
    newest = {
        step: (max(found.claimed | found.ended), found.ended) for step, found in list_attempts(store, run).items()
    }
    failed = sorted((step, last) for step, (last, ended) in newest.items() if done.get(step, 0) < last in ended)

    def read_failure(place: tuple[str, int]) -> StepFailure | None:
        try:
            end = read_attempt_end(store, run, *place)
        except IntegrityError as error:
            return StepFailure(place[0], Cause.UNKNOWN, str(error))
        if end.outcome is not AttemptEndOutcome.FAILED or end.submission != submission:
            return None
        return StepFailure(end.step, end.cause or Cause.UNKNOWN, end.message)

    return tuple(failure for failure in read_concurrently(read_failure, failed) if failure is not None)
