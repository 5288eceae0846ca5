"""What people on the cluster are told of a run: Events, title and description, from what storage says."""

from collections.abc import Iterator

import pytest
from support.builders.argo_objects import workflow
from support.builders.compiled_workflows import History
from support.fakes.memory_store import MemoryStore
from tiphys_controller.kubernetes.events import run_log
from tiphys_controller.kubernetes.events.description import describe_refused_workflow, describe_workflow
from tiphys_controller.kubernetes.events.messages import build_event_messages
from tiphys_controller.kubernetes.events.recorder import LOOK_AFTER_CHANGE_SECONDS, StorageLook, is_look_due
from tiphys_controller.kubernetes.events.run_log import RunLog
from tiphys_controller.kubernetes.workflow_view import SubmissionRef, build_workflow_view, find_submission

from tiphys.errors import StoreError
from tiphys.kube import Object
from tiphys.records import (
    AttemptClaim,
    AttemptEnd,
    AttemptEndOutcome,
    Cause,
    CheckpointRef,
    Event,
    SkippedCheckpoint,
    SubmissionBinding,
    SubmissionClaim,
    SubmissionKind,
    TrainingProgress,
    utc_now,
)
from tiphys.store import RunLayout, append_events

RUN, RESUME = "digits-1", "`tiphys resume digits-1`"
LAYOUT = RunLayout(RUN)
OLD = CheckpointRef(lineage=f"{RUN}/fit", attempt=1, global_step=90)
OLDER = CheckpointRef(lineage=f"{RUN}/fit", attempt=1, global_step=80)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def history(store: MemoryStore) -> History:
    return History(store, RUN)


def posted(store: MemoryStore, submission: int = 1, found: Object | None = None) -> Iterator[tuple[str, str]]:
    log = RunLog(RUN)
    log.read(store)
    for one in build_event_messages(
        build_workflow_view(found or workflow()), SubmissionRef(RUN, submission), log, RESUME
    ):
        yield one.reason, one.message


def narrated(store: MemoryStore, submission: int = 1, found: Object | None = None) -> dict[str, str]:
    log = RunLog(RUN)
    log.read(store)
    return describe_workflow(build_workflow_view(found or workflow()), SubmissionRef(RUN, submission), log, RESUME)


def resumed_from(store: MemoryStore, attempt: int, start: CheckpointRef, skipped: CheckpointRef | None = None) -> None:
    passed_over = (SkippedCheckpoint(checkpoint=skipped, reason="its bytes do not match"),) if skipped else ()
    record = AttemptClaim(
        run=RUN,
        step="fit",
        attempt=attempt,
        submission=1,
        uid="u",
        node="n",
        instance="i",
        step_key="k",
        starts_from=start,
        skipped=passed_over,
    )
    store.create(LAYOUT.attempt("fit", attempt), record.to_bytes())


def test_a_failed_attempt_is_an_event_with_its_cause_and_the_next_one_with_its_start(
    store: MemoryStore, history: History
) -> None:
    history.failed("fit", 1, Cause.PREEMPTION, "the node was taken away")
    resumed_from(store, 2, OLDER, skipped=OLD)
    assert list(posted(store)) == [
        ("AttemptFailed", "fit: attempt 1 ended by preemption: the node was taken away"),
        ("AttemptStarted", "fit: attempt 2 starts from checkpoint 80 of attempt 1"),
        ("CheckpointSkipped", "fit: checkpoint 90 of attempt 1 was skipped: its bytes do not match"),
    ]


def test_items_are_named_as_people_type_them(store: MemoryStore) -> None:
    item = "fit.0123456789ab.0"
    claim = AttemptClaim(
        run=RUN, step=item, attempt=1, submission=1, uid="u", node="n", instance="wf-1.fit(2:lr:0.1)", step_key="k"
    )
    store.create(LAYOUT.attempt(item, 1), claim.to_bytes())
    end = AttemptEnd(run=RUN, step=item, attempt=1, submission=1, outcome=AttemptEndOutcome.FAILED, cause=Cause.HANG)
    store.create(LAYOUT.attempt_end(item, 1), end.to_bytes())
    retry = claim.model_copy(update={"attempt": 2, "written_at": utc_now()})
    store.create(LAYOUT.attempt(item, 2), retry.to_bytes())
    append_events(store, RUN, "w", [Event(name="lease.forced", step=item, attempt=2, message="by force")])
    assert list(posted(store)) == [
        ("AttemptFailed", "fit[2]: attempt 1 ended by hang"),
        ("AttemptStarted", "fit[2]: attempt 2 starts from the beginning"),
        ("LeaseForced", "fit[2]: by force"),
    ]
    assert narrated(store)["description"].startswith("Under way: fit[2] (attempt 2). Attempt 1 of fit[2] ended by hang")


def test_events_that_argo_shows_by_itself_are_not_posted(store: MemoryStore, history: History) -> None:
    history.opened("fit")
    history.done("prep")
    assert list(posted(store)) == []


def test_other_submissions_have_workflows_of_their_own(store: MemoryStore, history: History) -> None:
    history.failed("fit", 1, submission=1)
    history.failed("fit", 2, Cause.GPU_OUT_OF_MEMORY, submission=2)
    assert list(posted(store, submission=2)) == [
        ("AttemptStarted", "fit: attempt 2 starts from the beginning"),
        ("AttemptFailed", "fit: attempt 2 ended by GPU out of memory"),
    ]


def test_events_of_the_training_program_and_of_a_resume_are_posted(store: MemoryStore, history: History) -> None:
    history.opened("fit", 1, submission=2)
    events = [
        Event(name="run.resumed", message="submission 2 runs fit", data={"submission": 2}),
        Event(name="run.triggered", message="submission 2 was made for s3://raw/a", data={"submission": 2}),
        Event(name="checkpoint.skipped", step="fit", attempt=1, message="checkpoint 90 of attempt 1 is corrupt"),
        Event(name="checkpoint.restored", step="fit", attempt=1, message="starts from 80"),
        Event(name="checkpoint.save_failed", step="fit", attempt=7, message="of another submission"),
    ]
    append_events(store, RUN, "test", events)
    assert list(posted(store, submission=2)) == [
        ("RunResumed", "submission 2 runs fit"),
        ("RunTriggered", "submission 2 was made for s3://raw/a"),
        ("CheckpointSkipped", "fit: checkpoint 90 of attempt 1 is corrupt"),
    ]


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (workflow(), []),
        (workflow(phase="Succeeded"), []),
        (
            workflow(phase="Failed", status={"message": "child 'fit' failed"}),
            [("RunFailed", f"the Workflow ended as Failed: child 'fit' failed; run the missing steps with {RESUME}")],
        ),
        (
            workflow(spec={"shutdown": "Terminate"}),
            [
                (
                    "WorkflowStopped",
                    f"the Workflow is being terminated; finished steps are kept: go on with {RESUME} once it has ended",
                )
            ],
        ),
    ],
    ids=["runs", "succeeded", "failed", "terminated"],
)
def test_the_end_of_a_workflow_is_an_event_with_what_to_do(
    found: Object, expected: list[tuple[str, str]], store: MemoryStore
) -> None:
    assert list(posted(store, found=found)) == expected


def test_the_description_says_where_the_run_stands(store: MemoryStore, history: History) -> None:
    history.done("prep")
    history.failed("fit", 1, Cause.PREEMPTION)
    history.opened("fit", 2)
    assert narrated(store) == {
        "title": "digits-1",
        "description": "Under way: fit (attempt 2). Done: prep. Attempt 1 of fit ended by preemption. "
        "Run `digits-1` of pipeline `digits`, submission 1.",
    }


@pytest.mark.parametrize(
    ("found", "beginning"),
    [
        (workflow(phase="Failed"), f"Failed: without a message; resume with {RESUME}. "),
        (workflow(phase="Error", status={"message": "no\nnode."}), f"Error: no node; resume with {RESUME}. "),
        (workflow(phase="Failed", spec={"shutdown": "Stop"}), f"Stopped: resume with {RESUME}. "),
        (workflow(phase="Succeeded"), "Succeeded. "),
        (workflow(spec={"shutdown": "Stop"}), f"Stopping: then resume with {RESUME}. "),
    ],
)
def test_the_description_begins_with_what_is_the_matter(found: Object, beginning: str, store: MemoryStore) -> None:
    described = narrated(store, submission=2, found=found)
    assert described["title"] == "digits-1 (submission 2)"
    assert described["description"].startswith(beginning)


@pytest.mark.parametrize(
    ("message", "beginning"),
    [
        ("the program exited with 1 (ValueError)", "Failed: report exited with 1 (ValueError); resume with"),
        ("no memory was left", "Failed: report: no memory was left; resume with"),
        ("see [here](http://x) <b>`rm`</b>", "Failed: report: see (here)(http://x) ‹b›'rm'‹/b›; resume with"),
        ("x" * 1000, f"Failed: report: {'x' * 299}…; resume with"),
        ("", "Failed: report: user error; resume with"),
    ],
)
def test_a_failure_is_an_event_with_its_step_and_reason_first(
    message: str, beginning: str, store: MemoryStore, history: History
) -> None:
    history.failed("fit", 1, message="a failure that was made good")
    history.done("fit", 2)
    history.failed("report", 1, Cause.USER_ERROR, message)
    described = narrated(store, found=workflow(phase="Failed", status={"message": "child 'x' failed"}))
    assert described["description"].startswith(beginning)


@pytest.mark.parametrize(
    ("message", "beginning"),
    [
        ("queue a holds 8 of 8; 2 A100 asked; position 3", "Waits for 2 A100 at position 3: fit, queue a holds 8 of 8"),
        ("the ledger is full", "Waits for GPUs: fit, the ledger is full."),
        ("1 <b>[a](x) asked; position 3", "Waits for 1 ‹b›(a)(x) at position 3: fit,"),
        pytest.param("1 A100 asked" * 50_000, "Waits for GPUs: fit, 1 A100 asked1 A100", id="long"),
    ],
)
def test_a_wait_for_gpus_is_an_event_with_their_number_and_the_position(
    message: str, beginning: str, store: MemoryStore
) -> None:
    described = narrated(store, found=waiting("WaitingForQuota", message))
    assert described["description"].startswith(beginning)


def test_a_training_is_described_with_its_step_first(store: MemoryStore) -> None:
    view, reference = build_workflow_view(workflow()), SubmissionRef(RUN, 1)
    first, second = TrainingProgress(global_step=1200, total_steps=5000), TrainingProgress(global_step=7)

    def begins(*trainings: tuple[str, TrainingProgress]) -> str:
        return describe_workflow(view, reference, RunLog(RUN), RESUME, trainings)["description"].partition(". ")[0]

    assert begins(("fit", first)) == "Training: step 1,200 of 5,000 (fit)"
    assert begins(("fit", second), ("tune", first)) == "Training: step 7 (fit and 1 more)"
    full = TrainingProgress(global_step=7, hindrance="the disk\nis [full](http://x) <b>now</b>.")
    assert begins(("fit", full)).startswith("Training: step 7 (fit), no commit yet, because the disk is ")
    assert not {"[", "<", "\n"} & set(begins(("fit", full)))


def test_a_workflow_that_belongs_to_no_run_says_why_it_was_refused() -> None:
    nodes = {
        "old": {"type": "Plugin", "phase": "Error", "message": "first", "finishedAt": "2026-01-01T00:00:00Z"},
        "new": {"type": "Plugin", "phase": "Failed", "message": "taken", "finishedAt": "2026-01-01T00:00:09Z"},
        "pod": {"type": "Pod", "phase": "Failed", "message": "pod", "finishedAt": "2026-01-01T00:00:10Z"},
        "run": {"type": "Plugin", "phase": "Pending", "message": "wait", "finishedAt": "2026-01-01T00:00:11Z"},
    }
    refused = build_workflow_view(workflow("digits-1-x", phase="Failed", status={"nodes": nodes}))
    assert describe_refused_workflow(refused) == {
        "title": "digits-1-x",
        "description": "Failed: taken. This Workflow of pipeline `digits` is part of no run.",
    }


def test_items_of_a_fan_out_are_counted(store: MemoryStore, history: History) -> None:
    for ordinal in range(3):
        history.done(f"sweep.0123456789ab.{ordinal}")
    assert "Done: sweep (3 items)." in narrated(store)["description"]


def test_a_long_run_is_read_piece_by_piece(
    store: MemoryStore, history: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_log, "READS", 4)
    for number in range(1, 4):
        history.failed("fit", number)
    log = RunLog(RUN)
    log.read(store)
    assert not log.is_complete
    assert len(log.attempt_starts) + len(log.attempt_outcomes) == 4
    log.read(store)
    assert log.is_complete
    assert (len(log.attempt_starts), len(log.attempt_outcomes)) == (3, 3)


def test_a_record_already_read_is_not_read_again(store: MemoryStore, history: History) -> None:
    history.failed("fit", 1)
    log = RunLog(RUN)
    log.read(store)
    store.refuses = lambda operation, key: operation == "read"
    log.read(store)
    history.opened("fit", 2)
    with pytest.raises(StoreError):
        log.read(store)


def bound(store: MemoryStore, run: str, submission: int, uid: str) -> None:
    layout, name = RunLayout(run), f"{run}-{submission}"
    claimed = SubmissionClaim(
        run=run, submission=submission, kind=SubmissionKind.RESUME, workflow_name=name, namespace="ml"
    )
    record = SubmissionBinding(run=run, submission=submission, cluster="c", namespace="ml", workflow_name=name, uid=uid)
    store.create(layout.submission(submission), claimed.to_bytes())
    store.create(layout.submission_binding(submission), record.to_bytes())


def test_the_place_of_a_workflow_is_where_its_uid_is_bound(store: MemoryStore) -> None:
    bound(store, "digits-1", 1, "uid-of-a-namesake")
    assert find_submission(store, build_workflow_view(workflow())) is None
    bound(store, "digits-1-uid-o", 1, "uid-before")
    bound(store, "digits-1-uid-o", 2, "uid-of-digits-1")
    assert find_submission(store, build_workflow_view(workflow())) == SubmissionRef("digits-1-uid-o", 2)


def waiting(reason: str, message: str, name: str = "digits-1.fit(0).admit") -> Object:
    said = f"Deferred: {reason}: {message}"
    node = {"name": name, "type": "Plugin", "phase": "Pending", "message": said}
    return workflow(
        status={"nodes": {"one": node, "two": {**node, "phase": "Succeeded"}, "three": {**node, "type": "Pod"}}}
    )


def test_a_step_that_waits_is_an_event_once_for_each_reason() -> None:
    def keys(found: Object) -> list[str]:
        return [one.key for one in build_event_messages(build_workflow_view(found), None, None, RESUME)]

    first = waiting("WaitingForQuota", "queue research holds 8 of 8 A100; 4 A100 asked; position 3")
    [one] = build_event_messages(build_workflow_view(first), None, None, RESUME)
    assert (one.reason, one.is_warning) == ("WaitingForQuota", False)
    assert one.message == "fit waits for GPUs: queue research holds 8 of 8 A100; 4 A100 asked; position 3"
    assert keys(first) == keys(waiting("WaitingForQuota", "queue research holds 6 of 8 A100; position 2"))
    assert keys(first) != keys(waiting("BehindHigherPriority", "behind digits-2/fit; position 2"))
    again = waiting("WaitingForQuota", "the next attempt", "digits-1.fit(1).admit")
    assert keys(first) != keys(again)

    item = waiting("WaitingForQuota", "position 3", "digits-1.fit(2:lr:0.1)(0).admit")
    [one] = build_event_messages(build_workflow_view(item), None, None, RESUME)
    assert one.message == "fit[2] waits for GPUs: position 3"

    assert keys(workflow()) == []


def test_numbers_that_change_while_a_step_waits_are_no_reason_to_look_at_storage() -> None:
    last = StorageLook(0.0, build_workflow_view(waiting("WaitingForQuota", "position 3")), is_complete=True)
    assert not is_look_due(
        build_workflow_view(waiting("WaitingForQuota", "position 2")), last, LOOK_AFTER_CHANGE_SECONDS
    )
    assert is_look_due(build_workflow_view(waiting("Reserved", "position 1")), last, LOOK_AFTER_CHANGE_SECONDS)
