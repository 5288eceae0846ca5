"""Going on with a run: when it is refused, and what is written in which order.

| last submission | Workflow in this cluster | outcome |
|---|---|---|
| bound here | runs | refused; --force goes on |
| bound here | ended, or gone | next submission |
| bound here | the name, with another uid | next submission |
| bound elsewhere | – | refused, unless sealed; --force goes on |
| claimed, not bound | – | the claimed number is sent |
| claimed, not bound | runs | bound, and nothing else |
| claimed, not bound | ended | bound; next submission |
| claimed for elsewhere, not bound | – | refused; --force goes on |
| none (died after the record) | – | the first submission |
"""

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from support.builders.compiled_workflows import History, gated, pipeline_of
from support.fakes.counting_store import CountingStore
from support.fakes.submitter import FakeSubmitter
from support.processes.failpoints import dying_at
from tiphys_controller import LiveWorkflow, plan_run, resume_run, start_run
from tiphys_controller.submit import resume, submission

from tiphys.errors import ConflictError, IntegrityError, NotFoundError, ObjectMissingError, UsageError
from tiphys.records import (
    AttemptClaim,
    AttemptEnd,
    AttemptEndOutcome,
    SubmissionBinding,
    SubmissionEnd,
    SubmissionKind,
    utc_now,
)
from tiphys.store import (
    RunLayout,
    Store,
    claim_record,
    end_submission,
    list_open_submissions,
    read_events,
    read_record,
    read_submissions,
)

RUN = "digits-1"
LAYOUT = RunLayout(RUN)
PIPELINE = pipeline_of(
    gated("prep"),
    gated(
        "fit",
        depends="prep",
        arguments={"artifacts": [{"name": "data", "from": "{{tasks.prep.outputs.artifacts.data}}"}]},
    ),
    gated("register", depends="fit"),
)


@pytest.fixture
def history(store: Store, submitter: FakeSubmitter) -> History:
    """A run whose first Workflow died while fit ran."""
    start_run(store, submitter, PIPELINE, RUN)
    history = History(store, RUN)
    history.done("prep", artifacts={"data": b"xyz"})
    history.opened("fit")
    submitter.end(RUN)
    return history


def tasks(manifest: dict[str, Any]) -> list[str]:
    return [task["name"] for task in manifest["spec"]["templates"][0]["dag"]["tasks"]]


def keys(store: Store) -> list[str]:
    return [info.key for info in store.list("")]


def test_a_resume_submits_the_missing_steps(store: Store, submitter: FakeSubmitter, history: History) -> None:
    resumed = resume_run(store, submitter, RUN)

    assert (resumed.submission, resumed.workflow_name) == (2, "digits-1-2")
    assert resumed.plan.running == ("fit", "register")
    manifest = submitter.manifest("digits-1-2")
    assert tasks(manifest) == ["fit", "register"]
    [first, _] = manifest["spec"]["templates"][0]["dag"]["tasks"]
    key = f"{LAYOUT.outputs('prep', 1)}artifacts/data"
    assert first["arguments"] == {"artifacts": [{"name": "data", "s3": {"key": key}}]}


def test_a_resume_in_the_cluster_of_a_run_stays_in_its_namespace(
    store: Store, submitter: FakeSubmitter, history: History
) -> None:
    assert resume_run(store, submitter, RUN, namespace="elsewhere").submission == 2
    assert submitter.manifest("digits-1-2")["metadata"]["namespace"] == "default"


def test_a_run_whose_workflow_was_deleted_after_its_last_step_has_ended(store: Store, submitter: FakeSubmitter) -> None:
    start_run(store, submitter, pipeline_of(gated("prep")), RUN)
    History(store, RUN).done("prep")
    assert resume_run(store, submitter, RUN).submission is None
    assert read_submissions(store, RUN)[-1].end is None  # its exit handler may be about to record it

    submitter.delete(RUN)
    resume_run(store, submitter, RUN, dry_run=True)
    assert read_submissions(store, RUN)[-1].end is None
    assert resume_run(store, submitter, RUN).submission is None

    [submission] = read_submissions(store, RUN)
    assert submission.end is not None
    assert submission.end.status == "Succeeded"
    assert list_open_submissions(store) == []


def test_a_submission_that_was_never_sent_has_ended_once_all_steps_are_done(
    store: Store, submitter: FakeSubmitter
) -> None:
    start_run(store, submitter, pipeline_of(gated("prep")), RUN)
    with dying_at("resume.after_claim"):
        resume_run(store, submitter, RUN, force=True)
    History(store, RUN).done("prep", submission=2)
    assert resume_run(store, submitter, RUN).submission is None

    last = read_submissions(store, RUN)[-1]
    assert (last.claim.submission, last.binding) == (2, None)
    assert last.end is not None
    assert (last.end.status, last.end.message[:21]) == ("Succeeded", "it was never sent, an")


def test_a_submission_that_has_ended_is_not_sent_by_a_process_that_stood_still(
    store: Store, submitter: FakeSubmitter, history: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    def overtaken(point: str) -> None:
        if point == "resume.after_claim":
            end_submission(store, SubmissionEnd(run=RUN, submission=2, status="Succeeded"), may_be_resumed=False)

    monkeypatch.setattr(submission, "failpoint", overtaken)
    monkeypatch.setattr(submission, "utc_now", lambda: utc_now() + timedelta(minutes=1))  # it stood still
    with pytest.raises(ConflictError, match="has ended before it was sent"):
        resume_run(store, submitter, RUN)
    assert submitter.find("default", f"{RUN}-2") is None


def test_the_submission_is_recorded(store: Store, submitter: FakeSubmitter, history: History) -> None:
    resume_run(store, submitter, RUN)

    _, second = read_submissions(store, RUN)
    assert second.claim.kind is SubmissionKind.RESUME
    assert second.claim.steps == ("fit", "register")
    assert second.binding is not None
    assert (second.binding.workflow_name, second.binding.uid) == ("digits-1-2", "uid-of-digits-1-2")
    [event] = read_events(store, RUN)
    assert event.name == "run.resumed"
    assert event.message == "submission 2 runs fit, register; finished before: prep"
    assert event.data["fenced"] == ["fit/1"]


def test_the_record_of_the_run_stays_as_it_is(store: Store, submitter: FakeSubmitter, history: History) -> None:
    before = store.read(LAYOUT.run_record)

    resume_run(store, submitter, RUN)

    assert store.read(LAYOUT.run_record) == before


def test_unfinished_attempts_are_fenced(store: Store, submitter: FakeSubmitter, history: History) -> None:
    history.failed("register")

    resumed = resume_run(store, submitter, RUN)

    assert resumed.fenced == ("fit/1",)
    end = read_record(store, LAYOUT.attempt_end("fit", 1), AttemptEnd)
    assert (end.outcome, end.submission) == (AttemptEndOutcome.FENCED, 1)
    assert read_record(store, LAYOUT.attempt_end("register", 1), AttemptEnd).outcome is AttemptEndOutcome.FAILED


@pytest.mark.parametrize("how", ["finished", "gone", "sealed", "stopped", "forced"])
def test_a_fence_says_when_the_workflow_ended_and_whether_it_was_stopped(
    store: Store, submitter: FakeSubmitter, history: History, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    over = datetime(2100, 1, 1, tzinfo=UTC)
    live = submitter.find("default", RUN)
    assert live is not None
    found = {"gone": None, "forced": live._replace(running=True, phase="Running")}.get(
        how, live._replace(running=False, phase="Failed", finished_at=over, stopped=how == "stopped")
    )
    if how == "sealed":
        end = SubmissionEnd(run=RUN, submission=1, status="Failed", message="Stopped with strategy 'Stop'")
        claim_record(store, LAYOUT.submission_end(1), end)
    monkeypatch.setattr(submitter, "find", lambda _, name: found if name == RUN else None)

    resume_run(store, submitter, RUN, force=how == "forced")

    fence = read_record(store, LAYOUT.attempt_end("fit", 1), AttemptEnd)
    claim = read_record(store, LAYOUT.attempt("fit", 1), AttemptClaim)
    assert fence.stopped is (how in ("sealed", "stopped"))
    assert fence.message.startswith({"forced": "fenced", "finished": "lost", "gone": "lost"}.get(how, "stopped"))
    [fit] = [step for step in plan_run(store, RUN).steps if step.name == "fit"]
    found_state = "stopped" if fence.stopped else "lost and fenced by a resume"
    assert fit.reason == f"never finished: attempt 1 was {found_state}"
    if how in ("finished", "stopped"):
        assert fence.last_alive_at == over
    if how == "gone":
        assert fence.last_alive_at is not None
        assert claim.written_at <= fence.last_alive_at < over
    if how == "forced":
        assert fence.last_alive_at is None


@pytest.mark.parametrize(
    ("exists", "running", "force", "ended"),
    [
        (True, True, False, False), (True, True, True, False), (True, False, True, True),
        (False, False, False, True), (False, False, True, False),
    ],
)  # fmt: skip
def test_a_workflow_that_is_not_visible_has_ended_unless_force_is_needed(
    submitter: FakeSubmitter, history: History, exists: bool, running: bool, force: bool, ended: bool
) -> None:
    live = submitter.find("default", RUN)
    assert live is not None
    found = live._replace(running=running) if exists else None
    assert (resume.find_workflow_end(None, found, force=force) is not None) == ended


def test_a_dry_run_writes_nothing(store: Store, submitter: FakeSubmitter, history: History) -> None:
    before = keys(store)

    resumed = resume_run(store, submitter, RUN, dry_run=True)

    assert resumed.submission is None
    assert resumed.plan.running == ("fit", "register")
    assert keys(store) == before
    assert submitter.names() == [RUN]


def test_a_finished_run_is_left_alone(store: Store, submitter: FakeSubmitter, history: History) -> None:
    history.finish("fit")
    history.done("register")
    before = keys(store)

    resumed = resume_run(store, submitter, RUN)

    assert (resumed.submission, resumed.plan.running) == (None, ())
    assert keys(store) == before
    assert submitter.names() == [RUN]


def test_an_unknown_run_is_named(store: Store, submitter: FakeSubmitter) -> None:
    with pytest.raises(NotFoundError, match="digits-1"):
        resume_run(store, submitter, RUN)


def test_a_running_run_is_refused_and_left_alone(store: Store, submitter: FakeSubmitter) -> None:
    start_run(store, submitter, PIPELINE, RUN)
    History(store, RUN).opened("prep")
    before = keys(store)

    with pytest.raises(ConflictError, match=r"Workflow default/digits-1 \(Running\) in cluster west.*--force"):
        resume_run(store, submitter, RUN)

    assert keys(store) == before
    assert submitter.names() == [RUN]


def test_force_takes_the_work_from_a_running_workflow(store: Store, submitter: FakeSubmitter) -> None:
    start_run(store, submitter, PIPELINE, RUN)
    History(store, RUN).opened("prep")

    resumed = resume_run(store, submitter, RUN, force=True)

    assert (resumed.submission, resumed.fenced) == (2, ("prep/1",))


def test_a_deleted_workflow_does_not_matter(store: Store, submitter: FakeSubmitter, history: History) -> None:
    submitter.delete(RUN)

    assert resume_run(store, submitter, RUN).submission == 2


def test_a_stranger_under_the_old_name_does_not_matter(
    store: Store, submitter: FakeSubmitter, history: History
) -> None:
    submitter.delete(RUN)
    submitter.create({"metadata": {"name": RUN, "namespace": "default", "uid": "another"}})

    assert resume_run(store, submitter, RUN).submission == 2


def test_a_stranger_under_the_new_name_is_not_taken_for_the_submission(
    store: Store, submitter: FakeSubmitter, history: History
) -> None:
    submitter.create({"metadata": {"name": f"{RUN}-2", "namespace": "default"}})
    before = keys(store)

    with pytest.raises(ConflictError, match="no submission of this run"):
        resume_run(store, submitter, RUN)

    assert keys(store) == before


def test_a_second_resume_is_refused_with_the_name_of_the_first(
    store: Store, submitter: FakeSubmitter, history: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = submitter.find

    def overtaken(namespace: str, name: str) -> LiveWorkflow | None:
        monkeypatch.setattr(submitter, "find", look)
        assert resume_run(store, submitter, RUN).submission == 2
        return look(namespace, name)

    monkeypatch.setattr(submitter, "find", overtaken)

    with pytest.raises(ConflictError, match=rf"another process resumes run {RUN}: submission 2 was claimed"):
        resume_run(store, submitter, RUN)

    assert submitter.names() == [RUN, f"{RUN}-2"]


def test_a_run_that_went_elsewhere_is_refused(store: Store, submitter: FakeSubmitter, history: History) -> None:
    east = FakeSubmitter(submitter.folder / "east", cluster="east")

    with pytest.raises(ConflictError, match=r"went to cluster west .* cluster east does not show whether it runs"):
        resume_run(store, east, RUN)

    assert resume_run(store, east, RUN, force=True).submission == 2
    assert east.names() == ["digits-1-2"]


def test_a_run_that_ended_elsewhere_goes_on_here(store: Store, submitter: FakeSubmitter, history: History) -> None:
    store.create(LAYOUT.submission_end(1), SubmissionEnd(run=RUN, submission=1, status="Failed").to_bytes())

    assert resume_run(store, FakeSubmitter(submitter.folder / "east", cluster="east"), RUN).submission == 2


def test_a_resume_of_a_resume_of_a_resume_keeps_what_is_done(
    store: Store, submitter: FakeSubmitter, history: History
) -> None:
    for number, attempt in ((2, 2), (3, 3), (4, 4)):
        resumed = resume_run(store, submitter, RUN)
        assert (resumed.submission, resumed.plan.running) == (number, ("fit", "register"))
        history.opened("fit", attempt, submission=number)
        submitter.end(f"{RUN}-{number}")
        submitter.delete(f"{RUN}-{number}")

    history.finish("fit", 4)
    last = resume_run(store, submitter, RUN)

    assert (last.submission, last.plan.running) == (5, ("register",))
    assert tasks(submitter.manifest("digits-1-5")) == ["register"]


def test_a_submission_that_ran_nothing_is_not_taken_for_success(
    store: Store, submitter: FakeSubmitter, history: History
) -> None:
    resume_run(store, submitter, RUN)
    submitter.end(f"{RUN}-2")

    assert resume_run(store, submitter, RUN).plan.running == ("fit", "register")


def test_a_workflow_that_cannot_be_pruned_is_refused_before_any_write(store: Store, submitter: FakeSubmitter) -> None:
    arguments = {"parameters": [{"name": "x", "value": "{{tasks.cleanup.outputs.parameters.n}}"}]}
    pipeline = pipeline_of(
        gated("fit"),
        gated("cleanup", depends="fit.Failed"),
        gated("next", depends="cleanup.Omitted", arguments=arguments),
    )
    start_run(store, submitter, pipeline, RUN)
    submitter.end(RUN)
    History(store, RUN).done("fit")
    before = keys(store)

    with pytest.raises(UsageError, match=r"task next reads \{\{tasks.cleanup.outputs.parameters.n\}\}"):
        resume_run(store, submitter, RUN)

    assert keys(store) == before


def test_a_late_finish_that_beats_the_fence_counts(
    store: Store, submitter: FakeSubmitter, history: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    def finishing_first(*arguments: Any) -> Any:
        history.finish("fit")
        return fence(*arguments)

    fence = resume.fence_attempts
    monkeypatch.setattr(resume, "fence_attempts", finishing_first)

    resumed = resume_run(store, submitter, RUN)

    assert resumed.plan.running == ("register",)
    assert resumed.fenced == ()
    assert read_record(store, LAYOUT.attempt_end("fit", 1), AttemptEnd).outcome is AttemptEndOutcome.DONE


def test_an_attempt_whose_claim_is_gone_stops_the_resume_because_nothing_fences_it(
    store: Store, submitter: FakeSubmitter, history: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    def losing_the_claim(*arguments: Any) -> Any:
        store.delete(LAYOUT.attempt("fit", 1))
        return fence(*arguments)

    fence = resume.fence_attempts
    monkeypatch.setattr(resume, "fence_attempts", losing_the_claim)

    with pytest.raises(ObjectMissingError, match=r"attempt 1 of fit cannot be fenced"):
        resume_run(store, submitter, RUN)

    assert len(read_submissions(store, RUN)) == 1
    assert submitter.names() == [RUN]


@pytest.mark.parametrize("point", ["after_record", "after_claim", "after_create", "after_bind"])
def test_a_start_that_died_is_completed_by_resume(store: Store, submitter: FakeSubmitter, point: str) -> None:
    with dying_at(f"start.{point}"):
        start_run(store, submitter, PIPELINE, RUN)

    if point == "after_bind":
        with pytest.raises(ConflictError, match="is still running"):
            resume_run(store, submitter, RUN)
    else:
        assert resume_run(store, submitter, RUN).submission == 1

    [only] = read_submissions(store, RUN)
    assert only.binding is not None
    assert submitter.names() == [RUN]
    assert tasks(submitter.manifest(RUN)) == ["prep", "fit", "register"]


@pytest.mark.parametrize("point", ["after_fence", "after_claim", "after_create", "after_bind"])
def test_a_resume_that_died_is_completed_by_the_next(
    store: Store, submitter: FakeSubmitter, history: History, point: str
) -> None:
    with dying_at(f"resume.{point}"):
        resume_run(store, submitter, RUN)

    if point == "after_bind":
        with pytest.raises(ConflictError, match="is still running"):
            resume_run(store, submitter, RUN)
    else:
        assert resume_run(store, submitter, RUN).submission == 2

    _, second = read_submissions(store, RUN)
    assert second.binding is not None
    assert submitter.names() == [RUN, f"{RUN}-2"]
    assert tasks(submitter.manifest(f"{RUN}-2")) == ["fit", "register"]


def test_a_claimed_submission_is_sent_only_when_attempts_that_opened_meanwhile_are_fenced(
    store: Store, submitter: FakeSubmitter, history: History
) -> None:
    with dying_at("resume.after_claim"):
        resume_run(store, submitter, RUN)
    history.opened("fit", attempt=2)

    assert resume_run(store, submitter, RUN).fenced == ("fit/2",)

    assert read_record(store, LAYOUT.attempt_end("fit", 2), AttemptEnd).outcome is AttemptEndOutcome.FENCED


def test_a_submission_that_another_process_has_sent_meanwhile_is_not_sent_again(
    store: Store, submitter: FakeSubmitter, history: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    def overtaken(point: str) -> None:
        if point == "resume.after_claim":
            monkeypatch.setattr(submission, "failpoint", lambda _: None)
            resume_run(store, submitter, RUN)
            submitter.delete(f"{RUN}-2")

    monkeypatch.setattr(submission, "failpoint", overtaken)
    monkeypatch.setattr(submission, "utc_now", lambda: utc_now() + timedelta(minutes=1))  # it stood still
    with pytest.raises(ConflictError, match="sent meanwhile and which is not found"):
        resume_run(store, submitter, RUN)
    assert submitter.names() == [RUN]


def test_a_workflow_that_was_created_and_ended_unbound_is_bound_and_followed_by_the_next(
    store: Store, submitter: FakeSubmitter, history: History
) -> None:
    with dying_at("resume.after_create"):
        resume_run(store, submitter, RUN)
    submitter.end(f"{RUN}-2")

    assert resume_run(store, submitter, RUN).submission == 3
    assert read_submissions(store, RUN)[1].binding is not None


def test_a_number_claimed_for_another_cluster_is_not_sent_from_here(
    store: Store, submitter: FakeSubmitter, history: History
) -> None:
    with dying_at("resume.after_claim"):
        resume_run(store, submitter, RUN)
    east = FakeSubmitter(submitter.folder / "east", cluster="east")

    with pytest.raises(ConflictError, match="went to cluster west"):
        resume_run(store, east, RUN)

    assert east.names() == []
    assert resume_run(store, east, RUN, force=True).submission == 3


def test_a_lost_claim_names_the_winner(
    store: Store, submitter: FakeSubmitter, history: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    def beaten(*arguments: Any) -> Any:
        monkeypatch.undo()
        resume_run(store, submitter, RUN)
        return []

    monkeypatch.setattr(resume, "fence_attempts", beaten)

    with pytest.raises(ConflictError, match=r"another process resumes run digits-1: .* 2 .* default/digits-1-2"):
        resume_run(store, submitter, RUN)

    assert submitter.names() == [RUN, f"{RUN}-2"]


@pytest.mark.parametrize(("finishes", "plans"), [(False, 1), (True, 2)])
def test_a_resume_plans_again_only_if_a_step_finished_before_the_fence(
    store: Store,
    submitter: FakeSubmitter,
    history: History,
    monkeypatch: pytest.MonkeyPatch,
    finishes: bool,
    plans: int,
) -> None:
    fence = resume.fence_attempts

    def overtaken(*arguments: Any) -> Any:
        monkeypatch.undo()
        if finishes:
            history.finish("fit")
        resume_run(store, submitter, RUN, key="the same")
        return fence(*arguments)

    monkeypatch.setattr(resume, "fence_attempts", overtaken)
    counting = CountingStore(store)

    resumed = resume_run(counting, submitter, RUN, key="the same")

    assert (resumed.submission, resumed.created) == (2, False)
    assert resumed.plan.submissions == 2
    # Each plan lists submissions, attempts, projections, reuses and outputs. The last Workflow is looked up first, and
    # the lost race lists submissions once more.
    assert counting.requests["list"] == 5 * plans + 2


def test_the_same_plan_makes_the_same_workflow(store: Store, submitter: FakeSubmitter, history: History) -> None:
    east = FakeSubmitter(submitter.folder / "east")
    resume_run(store, submitter, RUN)
    for key in (LAYOUT.submission(2), LAYOUT.submission_binding(2)):
        store.delete(key)
    resume_run(store, east, RUN)

    assert json.dumps(east.manifest("digits-1-2")) == json.dumps(submitter.manifest("digits-1-2"))


def test_a_submission_that_another_workflow_holds_is_not_bound_again(
    store: Store, submitter: FakeSubmitter, history: History
) -> None:
    taken = SubmissionBinding(
        run=RUN, submission=2, cluster="west", namespace="default", workflow_name="other", uid="another"
    )
    store.create(LAYOUT.submission_binding(2), taken.to_bytes())

    with pytest.raises(IntegrityError, match="submission 2 has records but no claim"):
        resume_run(store, submitter, RUN)

    store.delete(LAYOUT.submission_binding(2))
    with dying_at("resume.after_create"):
        resume_run(store, submitter, RUN)
    store.create(LAYOUT.submission_binding(2), taken.to_bytes())
    assert resume_run(store, submitter, RUN).submission == 3


def test_a_create_that_is_refused_for_good_says_so(store: Store, submitter: FakeSubmitter, history: History) -> None:
    class Refusing(FakeSubmitter):
        def create(self, manifest: dict[str, Any]) -> Any:
            raise ConflictError("the namespace is being deleted")

    with pytest.raises(ConflictError, match="the namespace is being deleted"):
        resume_run(store, Refusing(submitter.folder), RUN)

    assert resume_run(store, submitter, RUN).submission == 2
