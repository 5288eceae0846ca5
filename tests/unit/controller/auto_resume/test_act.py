"""The attendant over real records: what it reads, what it counts, and that nothing is made twice."""

import itertools
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
from support.builders.compiled_workflows import History, gated, pipeline_of
from support.builders.lineage import START_TIMES
from support.fakes.submitter import FakeSubmitter
from support.processes.failpoints import dying_at
from tiphys_controller import resume_run, start_run
from tiphys_controller.auto_resume.act import AutoResumeReconciler, ReconcileResult
from tiphys_controller.auto_resume.observation_health import ObservationHealth
from tiphys_controller.auto_resume.state import AutomationMode, AutoResumeLimits

from tiphys.errors import ConflictError, FencedError, StoreError, TiphysError
from tiphys.protocol.auto_resume_policy import AUTO_RESUME_ANNOTATION, AutoResumePolicy
from tiphys.protocol.compiled_workflow import Manifest
from tiphys.records import AutoResumeRecord, Cause, CheckpointManifest, SubmissionClaim, SubmissionEnd, SubmissionKind
from tiphys.store import LineageLayout, ObjectInfo, RunLayout, Store, read_record, read_submissions

RUN = "digits-1"
KEY = ("default", RUN)
LAYOUT = RunLayout(RUN)
SOUND = ObservationHealth()


def asking(policy: AutoResumePolicy | None = None) -> Manifest:
    """A pipeline whose author wants its runs to go on by themselves."""
    manifest = pipeline_of(gated("prep"), gated("fit", depends="prep"))
    text = (policy or AutoResumePolicy()).model_dump_json()
    manifest["metadata"]["annotations"][AUTO_RESUME_ANNOTATION] = text
    return manifest


@dataclass
class Desk:
    """One attendant, and the world around it in the test's hands."""

    store: Store
    submitter: FakeSubmitter
    mode: AutomationMode = AutomationMode.ON
    per_minute: float = 600.0
    now: float = 1000.0
    leads: bool = True
    health: ObservationHealth = SOUND
    attendant: AutoResumeReconciler = field(init=False)

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """A new process: nothing is remembered."""
        self.attendant = AutoResumeReconciler(
            lambda _: self.store,
            lambda: self.submitter,
            lambda: self.leads,
            lambda _: self.health,
            lambda: self.now,
            AutoResumeLimits(mode=self.mode, resumes_per_minute=self.per_minute),
        )

    def attend(self, **given: Any) -> ReconcileResult:
        return self.attendant.reconcile(KEY, **given)

    def reason(self, **given: Any) -> str:
        return self.attend(**given).decision.reason

    def fail(self, submission: int = 1, attempt: int | None = None, cause: Cause = Cause.PREEMPTION) -> None:
        """The Workflow of a submission ended because its training did."""
        History(self.store, RUN).failed("fit", attempt or submission, cause, "it was taken away", submission)
        self.submitter.end(RUN if submission == 1 else f"{RUN}-{submission}")

    def commit(self, step: int, attempt: int = 1) -> None:
        """A checkpoint of the training."""
        manifest = CheckpointManifest(
            run=RUN, step="fit", lineage=f"{RUN}/fit", attempt=attempt, global_step=step, shards=(), began=START_TIMES
        )
        self.store.create(LineageLayout(f"{RUN}/fit").manifest(attempt, step), manifest.to_bytes())


@pytest.fixture
def desk(store: Store, submitter: FakeSubmitter) -> Desk:
    start_run(store, submitter, asking(), RUN)
    History(store, RUN).done("prep")
    return Desk(store, submitter)


def test_a_run_that_failed_from_outside_goes_on_at_once_with_what_is_missing(desk: Desk) -> None:
    desk.fail()

    attended = desk.attend()

    assert attended.resumed is not None
    assert (attended.resumed.submission, attended.resumed.plan.running) == (2, ("fit",))
    record = read_record(desk.store, LAYOUT.auto_resume(2), AutoResumeRecord)
    assert (record.cause, record.advance.steps) == (Cause.PREEMPTION, 1)
    assert desk.reason() == "Runs"


def test_a_run_that_goes_on_is_left_in_peace(desk: Desk) -> None:
    History(desk.store, RUN).opened("fit")
    for _ in range(3):
        desk.now += 1e6
        assert desk.reason() == "Runs"
    assert desk.submitter.names() == [RUN]


def test_an_end_that_only_storage_knows_is_enough(desk: Desk) -> None:
    desk.submitter.delete(RUN)
    sealed = SubmissionEnd(run=RUN, submission=1, status="Failed", message="fit: failed")
    desk.store.create(LAYOUT.submission_end(1), sealed.to_bytes())
    assert desk.reason() == "Resume"
    assert desk.submitter.names() == [f"{RUN}-2"]


def test_a_workflow_that_is_gone_counts_after_a_while_and_on_the_clock_that_never_jumps(desk: Desk) -> None:
    desk.submitter.delete(RUN)
    assert desk.reason() == "NotSureYet"
    desk.now += 59
    assert desk.reason() == "NotSureYet"
    desk.now += 1
    assert desk.reason() == "Resume"
    desk.commit(10)
    desk.submitter.delete(f"{RUN}-2")
    assert desk.reason() == "NotSureYet", "the time of the one before does not count"


def test_a_workflow_that_was_only_not_shown_for_a_moment_begins_anew(desk: Desk) -> None:
    desk.submitter.delete(RUN)
    desk.reason()
    desk.now += 59
    desk.submitter.create({"metadata": {"name": RUN, "namespace": "default", "uid": f"uid-of-{RUN}"}})
    assert desk.reason() == "Runs"
    desk.submitter.delete(RUN)
    desk.now += 30
    assert desk.reason() == "NotSureYet"


@pytest.mark.parametrize("cause", [Cause.USER_ERROR, Cause.OUT_OF_MEMORY, Cause.DEADLINE, Cause.OUTPUT_MISSING])
def test_a_failure_that_a_retry_cannot_help_waits_for_a_person(desk: Desk, cause: Cause) -> None:
    desk.fail(cause=cause)
    attended = desk.attend()
    assert attended.decision.reason == "NeedsPerson"
    assert "step fit failed by" in attended.decision.message
    assert desk.submitter.names() == [RUN]


@pytest.mark.parametrize("step", ["prep", "fit"])
def test_a_damaged_end_record_waits_for_a_person_and_is_named(desk: Desk, step: str) -> None:
    """``prep`` is done by its end record alone, and ``fit`` failed for a cause that a resume would help."""
    desk.fail()
    for marker in list(desk.store.list(LAYOUT.done_markers)):
        desk.store.delete(marker.key)
    key = LAYOUT.attempt_end(step, 1)
    damaged = desk.store.read(key).replace(b'"attempt": 1', b'"attempt": 3')
    desk.store.delete(key)
    desk.store.create(key, damaged)

    left = desk.attend()

    assert (left.resumed, desk.submitter.names()) == (None, [RUN])
    assert key in left.decision.message


def test_a_run_that_a_person_stopped_stays_stopped_when_its_workflow_is_gone(desk: Desk) -> None:
    desk.fail()
    assert desk.reason(shutdowns={f"uid-of-{RUN}": "Stop"}) == "EndedByPerson"
    desk.submitter.delete(RUN)
    desk.restart()
    desk.now += 1e6
    assert desk.reason() == "EndedByPerson", "as it was recorded"


@pytest.mark.parametrize(
    "message", ["fit-run: workflow shutdown with strategy:  Stop", "fit-admit: Stopped with strategy 'Stop'"]
)
def test_an_unobserved_stop_is_recognised_by_the_state_of_its_workflow(desk: Desk, message: str) -> None:
    desk.fail()
    desk.store.create(
        LAYOUT.submission_end(1), SubmissionEnd(run=RUN, submission=1, status="Failed", message=message).to_bytes()
    )
    assert desk.reason() == "EndedByPerson"


def test_the_stop_of_an_earlier_workflow_says_nothing_about_this_one(desk: Desk) -> None:
    desk.fail()
    resume_run(desk.store, desk.submitter, RUN)
    desk.fail(2)
    assert desk.reason(shutdowns={f"uid-of-{RUN}": "Stop"}) == "Resume"


def test_a_run_without_progress_is_given_up_after_two_cycles_across_controllers(desk: Desk) -> None:
    for submission, expected in ((1, "Resume"), (2, "CoolingDown")):
        desk.fail(submission)
        desk.restart()
        assert desk.reason() == expected
    desk.now += 60
    assert desk.reason() == "Resume"
    desk.fail(3)
    desk.restart()
    desk.now += 3600
    assert desk.reason() == "BreakerOpen"
    assert desk.submitter.names() == [RUN, f"{RUN}-2", f"{RUN}-3"]


def test_progress_pays_back_and_a_person_closes_the_breaker(desk: Desk) -> None:
    desk.commit(10)
    desk.fail(1)
    desk.attend()
    desk.now += 1  # another token in the bucket of all runs
    desk.commit(20, attempt=2)
    desk.fail(2)
    assert desk.reason() == "Resume", "a new checkpoint"
    desk.commit(15, attempt=3)
    desk.fail(3)
    assert desk.reason() == "CoolingDown", "an older one is none"
    resume_run(desk.store, desk.submitter, RUN)
    desk.fail(4)
    assert desk.reason() == "Resume", "somebody went on with it"


@pytest.mark.parametrize(
    "point", ["automatic.after_intent", "resume.after_fence", "resume.after_claim", "resume.after_create"]
)
def test_a_controller_after_a_crash_continues_and_makes_one_workflow(desk: Desk, point: str) -> None:
    desk.fail()
    with dying_at(point):
        desk.attend()
    desk.restart()
    desk.now += 200
    desk.attend()
    desk.attend()
    assert desk.submitter.names() == [RUN, f"{RUN}-2"]
    assert [one.claim.submission for one in read_submissions(desk.store, RUN)] == [1, 2]


def test_several_controllers_at_once_make_one_workflow(desk: Desk) -> None:
    desk.fail()
    desks = [Desk(desk.store, desk.submitter) for _ in range(3)]
    ready = threading.Barrier(3)

    def contend(one: Desk) -> None:
        ready.wait()
        with suppress(ConflictError):  # it learns who was faster
            one.attend()

    threads = [threading.Thread(target=contend, args=(one,)) for one in desks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert desk.submitter.names() == [RUN, f"{RUN}-2"]


def test_a_forgotten_run_keeps_its_lock_for_waiting_callers(desk: Desk) -> None:
    inside, most, entered = 0, 0, threading.Semaphore(0)
    go_on, count = threading.Event(), threading.Lock()

    def act() -> None:
        nonlocal inside, most
        with desk.attendant.lock_run(KEY):
            with count:
                inside += 1
                most = max(most, inside)
            entered.release()
            assert go_on.wait(60)
            with count:
                inside -= 1

    threads = [threading.Thread(target=act) for _ in range(3)]
    threads[0].start()
    assert entered.acquire(timeout=60)
    threads[1].start()
    desk.attendant.forget_run(KEY)
    threads[2].start()
    assert not entered.acquire(timeout=0.2), "a second thread acts on the run"
    go_on.set()
    for thread in threads:
        thread.join(60)

    assert most == 1
    assert desk.attendant._run_locks == {}


def test_a_claim_that_was_never_sent_is_sent_under_its_own_number(desk: Desk) -> None:
    desk.fail()
    with dying_at("resume.after_claim"):
        resume_run(desk.store, desk.submitter, RUN)
    assert desk.reason() == "NotSureYet", "whoever claimed it may be about to"
    desk.now += 120
    assert desk.reason() == "Resume"
    assert desk.submitter.names() == [RUN, f"{RUN}-2"]


@pytest.mark.parametrize(("cause", "reason"), [(Cause.PREEMPTION, "Resume"), (Cause.USER_ERROR, "NeedsPerson")])
def test_a_dry_run_writes_nothing(desk: Desk, cause: Cause, reason: str) -> None:
    desk.fail(cause=cause)
    desk.mode = AutomationMode.DRY_RUN
    desk.restart()
    before = list(desk.store.list(""))
    attended = desk.attend()
    assert (attended.decision.reason, attended.resumed) == (reason, None)
    assert list(desk.store.list("")) == before


def test_a_controller_that_lost_leadership_does_nothing(desk: Desk) -> None:
    desk.fail()
    desk.leads = False
    before = list(desk.store.list(""))
    with pytest.raises(FencedError):
        desk.attend()
    assert list(desk.store.list("")) == before


def test_bad_sight_and_too_many_at_once_put_it_off(desk: Desk) -> None:
    desk.fail()
    desk.health = ObservationHealth(blind_reason="the API server does not answer")
    assert desk.reason() == "HealthUnknown"
    desk.health = ObservationHealth()
    desk.per_minute = 1.0
    desk.restart()
    desk.attendant._bucket.take()
    assert desk.attend().decision[:2] == ("wait", "RateLimited")
    desk.now += 60
    assert desk.reason() == "Resume"


class LateListings:
    """A store whose listings do not show what was written in the last moments."""

    def __init__(self, store: Store, hidden: str) -> None:
        self._store, self._hidden = store, hidden

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return (info for info in self._store.list(prefix) if self._hidden not in info.key)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


@pytest.mark.parametrize("hidden", ["submissions/000000002", "auto-resumes/", "000000002.bound"])
def test_a_store_that_lists_late_makes_no_second_workflow(desk: Desk, hidden: str) -> None:
    desk.fail()
    desk.attend()
    late: Any = LateListings(desk.store, hidden)
    other = Desk(late, desk.submitter)
    for _ in range(3):
        other.now += 1e5
        with suppress(TiphysError):  # refused, in one way or another
            other.attend()
    assert desk.submitter.names() == [RUN, f"{RUN}-2"]


class Flaky:
    """A cluster that answers only now and then."""

    def __init__(self, submitter: FakeSubmitter) -> None:
        self._submitter, self._calls = submitter, itertools.count()

    @property
    def cluster(self) -> str:
        return self._submitter.cluster

    def find(self, namespace: str, name: str) -> Any:
        if next(self._calls) % 3:
            raise StoreError("the API server timed out")
        return self._submitter.find(namespace, name)

    def create(self, manifest: dict[str, Any]) -> Any:
        return self._submitter.create(manifest)


def test_an_api_server_that_does_not_answer_says_nothing_about_a_run(desk: Desk) -> None:
    flaky: Any = Flaky(desk.submitter)
    desk.submitter = flaky
    answers = []
    for _ in range(60):
        desk.now += 60
        try:
            answers.append(desk.reason())
        except StoreError:
            answers.append("unanswered")
    assert set(answers) == {"Runs", "unanswered"}


def test_a_run_whose_author_did_not_ask_is_resumed_for_an_alert_alone(store: Store, submitter: FakeSubmitter) -> None:
    start_run(store, submitter, pipeline_of(gated("fit")), RUN)
    desk = Desk(store, submitter)
    submitter.end(RUN)
    assert desk.reason() == "NotAsked"
    assert desk.reason(alert="ab" * 16) == "Resume"
    assert read_record(store, LAYOUT.auto_resume(2), AutoResumeRecord).alert == "ab" * 16


def test_a_submission_of_another_cluster_is_its_own_business(desk: Desk) -> None:
    claimed = SubmissionClaim(
        run=RUN, submission=2, kind=SubmissionKind.RESUME, workflow_name="x", namespace="default", cluster="east"
    )
    desk.store.create(LAYOUT.submission(2), claimed.to_bytes())
    desk.now += 1e6
    assert desk.reason() == "Elsewhere"
