"""Deletes runs: their records, outputs and checkpoints in the store.

A run stays while it runs, while a checkpoint is pinned, and while a run that
stays rests on it: a fork, or a run that shares one of its results.

A deletion claims the next submission of the run, so that of a deletion and a
resume only one begins. Then it looks for forks once more; a fork looks for that
claim after it is recorded. ``run.json`` goes first: from then on no command
takes what is left for a run, and the name stays taken until all is deleted. So
a deletion that was killed at any point is completed by the next one.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from itertools import islice
from typing import NamedTuple

from tiphys.errors import ConflictError, IntegrityError, NotFoundError
from tiphys.faults import failpoint
from tiphys.lineage.retention.policy import list_pins
from tiphys.lineage.run_history import RunHistory
from tiphys.records import (
    AttemptEndOutcome,
    IdempotencyKeyRecord,
    MemoRecord,
    ReuseRecord,
    RunRecord,
    SubmissionBinding,
    SubmissionClaim,
    SubmissionKind,
)
from tiphys.store import (
    Attempt,
    LineageLayout,
    RunLayout,
    Store,
    close_submission,
    fence_attempt,
    find_record,
    idempotency_record_key,
    list_open_submissions,
    list_runs,
    memo_key,
    open_submission,
    read_last_claim,
    read_run,
    read_submissions,
)
from tiphys.store.layout import parse_attempt, parse_reused, parse_reused_attempt, parse_submission
from tiphys.store.run_markers import newest_marker
from tiphys.store.runs import is_partly_deleted, read_concurrently
from tiphys.store.workflow_layout import output_origins, workflow_outputs
from tiphys_controller.run_phase import RunPhase, determine_run_phase, look_up_workflow
from tiphys_controller.submit.submitter import Submitter

_BATCH = 1000
"""Objects that are deleted between two listings; a page of a listing of S3."""
_FORK_PIN = "fork-"
"""Prefix of the names of the pins with which forks keep checkpoints of other runs; the name of the fork follows."""

Progress = Callable[[str], object]


class RunDeletion(NamedTuple):
    """What a deletion of one run deletes, or why it keeps the run."""

    run: str
    objects: int
    size_bytes: int
    kept_because: tuple[str, ...] = ()
    """Why the run stays; empty if it is deleted."""


class _Dependency(NamedTuple):
    """A run that rests on another one, and why."""

    dependent: str
    run: str
    reason: str


def plan_deletions(
    store: Store, submitter: Submitter, runs: Sequence[str], force: bool = False, progress: Progress = lambda _: None
) -> list[RunDeletion]:
    """What `delete_runs` would delete and keep, in the order of deletion; writes nothing.

    Costs a listing of all objects of ``runs``, and the records of forks and of shared results of all runs.

    ``force`` deletes runs whose last submission may still run where ``submitter`` does not show it. ``progress`` is
    called with a sentence about each part of the work.

    Raises:
        NotFoundError: the store has no such run.
        IntegrityError: a submission of one of them is damaged.
    """
    names = list(dict.fromkeys(runs))
    reasons = {run: _find_own_reasons(store, submitter, run, force) for run in names}
    return _decide(store, names, reasons, progress)


def delete_runs(
    store: Store, submitter: Submitter, runs: Sequence[str], force: bool = False, progress: Progress = lambda _: None
) -> list[RunDeletion]:
    """Delete ``runs``, except those that must stay; arguments and errors as `plan_deletions`.

    Returns:
        What was deleted and what was kept.
    """
    planned = plan_deletions(store, submitter, runs, force, progress)
    reasons = {deletion.run: list(deletion.kept_because) for deletion in planned}
    claimed: list[str] = []
    for run in [deletion.run for deletion in planned if not deletion.kept_because]:
        try:
            _claim_deletion(store, run)
            claimed.append(run)
        except ConflictError as error:
            reasons[run].append(str(error))
    failpoint("delete_run.after_claim")
    # Everything that may rest on these runs is recorded by now, or its writer finds the claims.
    for run in claimed:
        reasons[run] += _find_pins(store, run)
    decided = _decide(store, [deletion.run for deletion in planned], reasons, progress)
    for deletion in decided:
        if deletion.kept_because and deletion.run in claimed:
            _withdraw_claim(store, deletion.run)
    for deletion in decided:
        if not deletion.kept_because:
            progress(f"deleting {deletion.objects:,} objects of run {deletion.run}")
            _delete_run(store, deletion.run, progress)
    return decided


def _decide(
    store: Store, runs: Sequence[str], own_reasons: dict[str, list[str]], progress: Progress
) -> list[RunDeletion]:
    """Keep runs with a reason of their own, and all on which a run that stays rests; dependent runs come first."""
    whole = [run for run in runs if not is_partly_deleted(store, run)]
    dependencies = _find_dependencies(store, whole, progress)
    reasons = {run: list(own_reasons[run]) for run in runs}
    while True:
        deleted = {run for run in runs if not reasons[run]}
        found = [
            dependency
            for dependency in dependencies
            if dependency.run in deleted and dependency.dependent not in deleted
        ]
        if not found:
            break
        for dependency in found:
            reasons[dependency.run].append(dependency.reason)
    ordered: list[str] = []
    remaining = list(runs)
    while remaining:
        resting_on = {base for dependent, base, _ in dependencies if dependent in remaining and dependent != base}
        run = next((run for run in remaining if run not in resting_on), remaining[0])
        remaining.remove(run)
        ordered.append(run)
    return [RunDeletion(run, *_measure(store, run), tuple(dict.fromkeys(reasons[run]))) for run in ordered]


def _find_own_reasons(store: Store, submitter: Submitter, run: str, force: bool) -> list[str]:
    is_begun = is_partly_deleted(store, run)
    if not is_begun and not any(store.list(RunLayout(run).run_record)):
        read_run(store, run)  # raises, and names similar runs
    submissions = read_submissions(store, run)
    is_begun = is_begun or any(submission.claim.kind is SubmissionKind.DELETION for submission in submissions)
    workflows = [submission for submission in submissions if submission.claim.kind is not SubmissionKind.DELETION]
    reasons = []
    for submission in workflows:
        lookup = look_up_workflow(submission, submitter)
        phase, why = determine_run_phase(submission, lookup)
        if phase is RunPhase.RUNNING:
            reasons.append(f"it is running: {why}; stop it, or wait until it has ended")
        elif is_begun or force or submission is not workflows[-1]:
            continue
        elif phase is RunPhase.UNKNOWN:
            reasons.append(f"it may be running: {why}; add --cluster for its cluster, or --force if that is gone")
        elif submission.binding is None and lookup.live is None:
            number = submission.claim.submission
            reasons.append(
                f"submission {number} was claimed and not sent yet; if no process is about to send it, add --force"
            )
    return [*reasons, *_find_pins(store, run)]


def _find_pins(store: Store, run: str) -> list[str]:
    """Pins of the checkpoints of a run that has its record; those of forks are dependencies."""
    if is_partly_deleted(store, run):
        return []
    return [
        f"checkpoint {ref} of {layout.lineage} is pinned as {name}; `tiphys checkpoint unpin` removes the pin"
        for layout in _lineages(store, run)
        for ref, names in list_pins(store, layout.lineage).items()
        for name in names
        if not name.startswith(_FORK_PIN)
    ]


def _lineages(store: Store, run: str) -> list[LineageLayout]:
    prefix = RunLayout(run).lineages
    return [LineageLayout(f"{run}/{found.removeprefix(prefix).rstrip('/')}") for found in store.prefixes(prefix)]


def _find_dependencies(store: Store, runs: Sequence[str], progress: Progress) -> list[_Dependency]:
    """Which runs rest on ``runs``. One that cannot be read may rest on each of them."""
    names = list(list_runs(store))
    progress(f"looking for forks and shared results in {len(names):,} runs")

    def find(other: str) -> list[_Dependency]:
        try:
            return [dependency for dependency in _find_dependencies_of(store, other) if dependency.run in runs]
        except IntegrityError as error:
            reason = f"run {other} cannot be read, and may rest on it: {error}"
            return [_Dependency(other, run, reason) for run in runs if run != other]

    return [dependency for found in read_concurrently(find, names) for dependency in found]


def _find_dependencies_of(store: Store, other: str) -> Iterator[_Dependency]:
    layout = RunLayout(other)
    record = find_record(store, layout.run_record, RunRecord)
    if record is None:  # partly deleted
        return
    if record.parent:
        yield _Dependency(other, record.parent, f"run {other} is a fork of it")
    keys = [info.key for info in store.list(layout.all_reused)]
    own = {(reused.submission, reused.step) for key in keys if (reused := parse_reused_attempt(key)) is not None}
    for key in keys:
        parsed = parse_reused(key)
        if parsed is not None and (parsed.submission, parsed.step) not in own:
            source = find_record(store, key, ReuseRecord)
            if source is not None and source.source_run != other:
                step = f"step {source.source_step} of it"
                yield _Dependency(other, source.source_run, f"run {other} shares the result of {step}")


def _measure(store: Store, run: str) -> tuple[int, int]:
    """Number of objects of a run, and their bytes."""
    layout, objects, size_bytes = RunLayout(run), 0, 0
    for prefix in (layout.control, layout.data, layout.lineages, *_workflow_prefixes(store, run)):
        for info in store.list(prefix):
            objects, size_bytes = objects + 1, size_bytes + info.size
    return objects, size_bytes


def _workflow_prefixes(store: Store, run: str) -> list[str]:
    """Where the Workflows of a run have stored outputs of steps without a gate, and whose these are."""
    keys = [info.key for info in store.list(RunLayout(run).submissions)]
    bound = [key for key in keys if (parsed := parse_submission(key)) is not None and parsed[1] == "bound"]
    bindings = read_concurrently(lambda key: find_record(store, key, SubmissionBinding), bound)
    uids = [binding.uid for binding in bindings if binding]
    return [prefix for uid in uids for prefix in (workflow_outputs(uid), output_origins(uid))]


def _claim_deletion(store: Store, run: str) -> None:
    """Claim the next submission of the run for its deletion, unless its deletion was begun.

    Raises:
        ConflictError: another process claimed that submission.
    """
    if is_partly_deleted(store, run):
        return
    last = read_last_claim(store, run)
    if last is not None and last.kind is SubmissionKind.DELETION:
        return
    number = last.submission + 1 if last else 1
    claim = SubmissionClaim(
        run=run,
        submission=number,
        kind=SubmissionKind.DELETION,
        workflow_name="",
        namespace="",
        rerun_since=last.rerun_since if last else {},
        workflow=last.workflow if last else "",
    )
    stored = open_submission(store, claim).record
    if stored.kind is not SubmissionKind.DELETION:
        raise ConflictError(f"another process submitted it at the same time, as submission {number}")


def _withdraw_claim(store: Store, run: str) -> None:
    """Withdraw the claim of a deletion that has deleted nothing."""
    last = read_last_claim(store, run)
    if last is not None and last.kind is SubmissionKind.DELETION and not is_partly_deleted(store, run):
        store.delete(RunLayout(run).submission(last.submission))
        close_submission(store, run, last.submission)


def _delete_run(store: Store, run: str, progress: Progress) -> None:
    layout, deleted = RunLayout(run), 0

    def delete_all(prefix: str, is_kept: Callable[[str], bool] = lambda _: False) -> None:
        nonlocal deleted
        for count in _delete_batches(store, prefix, is_kept):
            deleted += count
            if count == _BATCH:
                progress(f"deleted {deleted:,} objects of run {run}")

    history = RunHistory.for_display(store, run)
    _delete_references(store, run, history.attempts)
    for moment in _listed_moments(history):
        store.delete(newest_marker(run, moment))
    store.delete(layout.run_record)
    failpoint("delete_run.after_record")
    for lineage in _lineages(store, run):  # without its manifest, a checkpoint is none
        delete_all(lineage.manifests)
    delete_all(layout.lineages)
    delete_all(layout.data)
    for prefix in _workflow_prefixes(store, run):
        delete_all(prefix)
    delete_all(layout.control, _is_kept_to_the_end)
    delete_all(layout.attempts)  # claims, which an end must not lack
    opened = list_open_submissions(store, run)  # before the name is free: a new run may have others
    for key in _submission_keys(store, layout):
        store.delete(key)
        failpoint("delete_run.after_submission")
    for submission in opened:
        store.delete(submission.marker)


def _listed_moments(history: RunHistory) -> Iterator[datetime]:
    """When the run was created, and when its submissions ended: the list of the newest runs has it under these."""
    with suppress(IntegrityError, NotFoundError):
        yield history.record.written_at
    yield from (submission.end.written_at for submission in history.submissions if submission.end)


def _delete_references(store: Store, run: str, attempts: dict[str, list[Attempt]]) -> None:
    """Fence open attempts, and delete what names the run elsewhere: shared results, pins, its idempotency key."""
    for attempt in (attempt for step in attempts.values() for attempt in step):
        claim = attempt.claim
        if attempt.end is None:
            fence_attempt(store, run, claim.step, claim.attempt, "fenced by the deletion of the run")
        elif attempt.end.outcome is AttemptEndOutcome.DONE:
            memo = find_record(store, memo_key(claim.step_key), MemoRecord)
            if memo is not None and memo.run == run:
                store.delete(memo_key(claim.step_key))
        start = claim.starts_from
        if start is not None and start.lineage != claim.lineage:
            store.delete(LineageLayout(start.lineage).pin(start.attempt, start.global_step, f"{_FORK_PIN}{run}"))
    try:
        record = find_record(store, RunLayout(run).run_record, RunRecord)
    except IntegrityError:  # its key, if it had one, names a run that is gone
        return
    if record is not None and record.key:
        key = idempotency_record_key(record.key)
        reservation = find_record(store, key, IdempotencyKeyRecord)
        if reservation is not None and reservation.run == run:
            store.delete(key)


def _is_kept_to_the_end(key: str) -> bool:
    """Whether the key is a claim, which the other records of an attempt or a submission must not lack."""
    attempt, submission = parse_attempt(key), parse_submission(key)
    return (attempt is not None and not attempt.is_end) or submission is not None


def _submission_keys(store: Store, layout: RunLayout) -> list[str]:
    """Keys below ``submissions/`` in the order of their deletion.

    Bindings and ends go before the claims. The claim of the deletion goes late, because it keeps resumes out, and the
    first claim last: it keeps the name of the run taken.
    """
    found = [(*parsed, info.key) for info in store.list(layout.submissions) if (parsed := parse_submission(info.key))]
    last = max((number for number, _, _ in found), default=0)
    ordered = sorted(found, key=lambda entry: (entry[1] == "claim", entry[0] == 1, entry[0] == last, entry[0]))
    return [key for _, _, key in ordered]


def _delete_batches(store: Store, prefix: str, is_kept: Callable[[str], bool]) -> Iterator[int]:
    """Delete everything below ``prefix`` that is not kept; yields the size of each batch."""
    while keys := list(islice((info.key for info in store.list(prefix) if not is_kept(info.key)), _BATCH)):
        read_concurrently(store.delete, keys)
        yield len(keys)
