"""Whether a run goes on by itself: the decision, its brakes and its doubts, without any I/O.

| the last submission | decision |
|---|---|
| runs; succeeded; went to another cluster | left |
| was decided to be followed by another | resumed, whoever decided |
| ended by a person | left |
| a step failed by a cause that is not the author's to be repeated | left |
| failed from outside | resumed at once if it got further; else after a cool-down that grows; else the breaker opens |
| its Workflow is gone, or was never sent | the same, and not before it was so for a while |
"""

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiphys_controller import LiveWorkflow
from tiphys_controller.auto_resume.decide import (
    AutoResumeAction,
    backoff_seconds,
    count_fruitless_resumes,
    decide_auto_resume,
)
from tiphys_controller.auto_resume.observation_health import (
    ObservationHealth,
    ObservationHealthTracker,
    TokenBucket,
    find_distrust_reason,
)
from tiphys_controller.auto_resume.state import (
    AutoResumeLimits,
    RunObservation,
    StepFailure,
    SubmissionStatus,
    determine_submission_status,
)

from tiphys.protocol.auto_resume_policy import AutoResumePolicy
from tiphys.records import (
    AutoResumeRecord,
    Cause,
    RunProgress,
    SubmissionBinding,
    SubmissionClaim,
    SubmissionEnd,
    SubmissionKind,
)
from tiphys.store import Submission

LIMITS = AutoResumeLimits()
POLICY = AutoResumePolicy()
FAILED = RunObservation("digits-1", 1, SubmissionStatus.FAILED, POLICY)

standings = st.sampled_from(SubmissionStatus)
policies = st.builds(
    AutoResumePolicy,
    max_without_progress=st.integers(1, 5),
    cooldown_seconds=st.floats(0, 600),
    retry_after_seconds=st.none() | st.floats(1, 86400),
)
observations = st.builds(
    RunObservation,
    run=st.just("digits-1"),
    submission=st.integers(1, 50),
    status=standings,
    policy=st.none() | policies,
    person_reason=st.sampled_from(["", "somebody stopped it"]),
    failures=st.lists(st.builds(StepFailure, st.just("fit"), st.sampled_from(Cause), st.just("")), max_size=2).map(
        tuple
    ),
    fruitless_resumes=st.integers(0, 12),
)


def submission(bound: str = "uid-1", end: str = "", cluster: str = "west") -> Submission:
    named = {"run": "r", "submission": 1, "workflow_name": "r", "namespace": "ml", "cluster": cluster}
    return Submission(
        SubmissionClaim(kind=SubmissionKind.ORIGINAL, **named),
        SubmissionBinding(uid=bound, **named) if bound else None,
        SubmissionEnd(run="r", submission=1, status=end) if end else None,
    )


@pytest.mark.parametrize(
    ("last", "live", "expected"),
    [
        (None, None, SubmissionStatus.UNSENT),
        (submission(), ("uid-1", "Running"), SubmissionStatus.RUNNING),
        (submission(), ("uid-1", "Succeeded"), SubmissionStatus.SUCCEEDED),
        (submission(), ("uid-1", "Failed"), SubmissionStatus.FAILED),
        (submission(end="Failed"), ("uid-1", "Running"), SubmissionStatus.RUNNING),  # its exit handler is not over
        (submission(end="Failed"), None, SubmissionStatus.FAILED),
        (submission(end="Succeeded"), None, SubmissionStatus.SUCCEEDED),
        (submission(), None, SubmissionStatus.WORKFLOW_GONE),
        (submission(), ("uid-of-another", "Running"), SubmissionStatus.WORKFLOW_GONE),
        (submission(bound=""), None, SubmissionStatus.UNSENT),
        (submission(bound=""), ("uid-1", "Running"), SubmissionStatus.RUNNING),
        (submission(cluster="east"), None, SubmissionStatus.OTHER_CLUSTER),
        (submission(cluster="east", end="Failed"), None, SubmissionStatus.OTHER_CLUSTER),
    ],
)
def test_the_submission_status_follows_from_record_and_workflow(
    last: Submission | None, live: tuple[str, str] | None, expected: SubmissionStatus
) -> None:
    shown = LiveWorkflow("r", "ml", live[0], live[1], live[1] == "Running") if live else None
    assert determine_submission_status(last, shown, "west") is expected


@pytest.mark.parametrize(
    ("changes", "waited", "expected"),
    [
        ({"status": SubmissionStatus.RUNNING}, 0, "leave Runs"),
        ({"status": SubmissionStatus.SUCCEEDED}, 0, "leave Succeeded"),
        ({"status": SubmissionStatus.OTHER_CLUSTER}, 0, "leave Elsewhere"),
        ({}, 0, "resume Resume"),
        ({"policy": None}, 0, "leave NotAsked"),
        ({"person_reason": "somebody stopped it"}, 0, "leave EndedByPerson"),
        ({"failures": (StepFailure("fit", Cause.PREEMPTION, ""),)}, 0, "resume Resume"),
        ({"failures": (StepFailure("fit", Cause.USER_ERROR, "exit code 1"),)}, 9e9, "leave NeedsPerson"),
        (
            {"failures": (StepFailure("a", Cause.PREEMPTION, ""), StepFailure("b", Cause.OUT_OF_MEMORY, ""))},
            9e9,
            "leave NeedsPerson",
        ),
        ({"failures": (StepFailure("fit", Cause.STORAGE, ""), StepFailure("b", Cause.HANG, ""))}, 0, "resume Resume"),
        ({"failures": (StepFailure("fit", Cause.IMAGE, ""),)}, 9e9, "leave NeedsPerson"),
        (
            {
                "failures": (StepFailure("a", Cause.STORAGE, ""),),
                "policy": AutoResumePolicy(causes=("infrastructure",)),
            },
            9e9,
            "leave NeedsPerson",
        ),
        ({"fruitless_resumes": 1}, 59, "wait CoolingDown"),
        ({"fruitless_resumes": 1}, 60, "resume Resume"),
        ({"fruitless_resumes": 2}, 60, "wait BreakerOpen"),
        ({"fruitless_resumes": 2}, 6 * 3600, "resume Resume"),
        ({"fruitless_resumes": 5}, 9e9, "leave BreakerOpen"),
        ({"fruitless_resumes": 2, "policy": AutoResumePolicy(retry_after_seconds=None)}, 9e9, "leave BreakerOpen"),
        ({"fruitless_resumes": 5, "is_intended": True}, 0, "resume Intended"),
        ({"status": SubmissionStatus.WORKFLOW_GONE}, 59, "wait NotSureYet"),
        ({"status": SubmissionStatus.WORKFLOW_GONE}, 60, "resume Resume"),
        ({"status": SubmissionStatus.UNSENT}, 119, "wait NotSureYet"),
        ({"status": SubmissionStatus.UNSENT}, 120, "resume Resume"),
    ],
)
def test_the_decision(changes: dict[str, object], waited: float, expected: str) -> None:
    decision = decide_auto_resume(replace(FAILED, **changes), waited, LIMITS)  # type: ignore[arg-type]
    assert f"{decision.action} {decision.reason}" == expected
    assert (decision.wait_seconds > 0) == (decision.action is AutoResumeAction.WAIT)


def test_an_alert_may_ask_for_what_the_author_did_not_and_all_brakes_hold() -> None:
    unasked = replace(FAILED, policy=None)
    assert decide_auto_resume(unasked, 0, LIMITS, requested_by_alert=True).action is AutoResumeAction.RESUME
    assert (
        decide_auto_resume(replace(unasked, fruitless_resumes=2), 0, LIMITS, requested_by_alert=True).reason
        == "BreakerOpen"
    )
    assert (
        decide_auto_resume(replace(unasked, person_reason="a person"), 0, LIMITS, requested_by_alert=True).reason
        == "EndedByPerson"
    )


@given(observations, st.floats(0, 1e7), st.booleans())
def test_auto_resume_never_acts_on_a_running_run_or_one_that_a_person_ended(
    seen: RunObservation, waited: float, demanded: bool
) -> None:
    decision = decide_auto_resume(seen, waited, LIMITS, requested_by_alert=demanded)
    if decision.action is AutoResumeAction.RESUME:
        assert seen.status in (SubmissionStatus.FAILED, SubmissionStatus.WORKFLOW_GONE, SubmissionStatus.UNSENT)
        assert not seen.person_reason
        assert demanded or seen.policy is not None


@given(observations, st.floats(0, 1e7))
def test_waiting_as_long_as_was_said_is_enough(seen: RunObservation, waited: float) -> None:
    for _ in range(3):
        decision = decide_auto_resume(seen, waited, LIMITS)
        if decision.action is not AutoResumeAction.WAIT:
            return
        waited += decision.wait_seconds * (1 + 1e-9)
    assert decide_auto_resume(seen, waited, LIMITS).action is not AutoResumeAction.WAIT


@given(policies, st.integers(0, 40))
def test_pauses_only_grow_and_end_with_a_person(policy: AutoResumePolicy, fruitless: int) -> None:
    assert backoff_seconds(policy, 0) == 0
    below = fruitless < policy.max_without_progress
    if fruitless and (fruitless + 1 < policy.max_without_progress) == below:
        assert backoff_seconds(policy, fruitless + 1) >= backoff_seconds(policy, fruitless)
    assert math.isinf(backoff_seconds(policy, policy.max_without_progress + 3))


def resumes(*advances: RunProgress) -> list[AutoResumeRecord]:
    return [AutoResumeRecord(run="r", submission=9 - n, reason="", advance=one) for n, one in enumerate(advances)]


@pytest.mark.parametrize(
    ("now", "before", "expected"),
    [
        (RunProgress(), [], 0),
        (RunProgress(), [RunProgress()], 1),
        (RunProgress(), [RunProgress(), RunProgress(), RunProgress()], 3),
        (RunProgress(steps=1), [RunProgress(), RunProgress()], 0),
        (RunProgress(steps=1), [RunProgress(steps=1), RunProgress(), RunProgress()], 1),
        (RunProgress(checkpoints={"fit": 20}), [RunProgress(checkpoints={"fit": 10})], 0),
        (RunProgress(checkpoints={"fit": 10}), [RunProgress(checkpoints={"fit": 10})], 1),
        (RunProgress(checkpoints={"fit": 0}), [RunProgress()], 0),
        (RunProgress(on_volumes=2), [RunProgress(on_volumes=1)], 0),
        # What retention has removed, or an older checkpoint that it went back to, is no progress.
        (RunProgress(checkpoints={"fit": 5}), [RunProgress(checkpoints={"fit": 10})], 1),
        (RunProgress(checkpoints={"fit": 5}), [RunProgress(checkpoints={"fit": step}) for step in (10, 5)], 1),
    ],
)
def test_resumes_that_got_no_further_are_counted(now: RunProgress, before: list[RunProgress], expected: int) -> None:
    assert count_fruitless_resumes(now, resumes(*before)) == expected


def test_a_run_that_never_gets_further_costs_at_most_two_cycles_before_a_pause_of_hours() -> None:
    moment, started = 0.0, []
    for fruitless in itertools.count():
        seen = replace(FAILED, fruitless_resumes=fruitless)
        decision = decide_auto_resume(seen, 0, LIMITS)
        if decision.action is AutoResumeAction.LEAVE_ALONE:
            break
        moment += decision.wait_seconds
        started.append(moment)
    assert sum(at < 3600 for at in started) == 2
    assert len(started) == 5, "and three more over days, then it is a person's"


@pytest.mark.parametrize(
    ("health", "vanished", "trusted"),
    [
        (ObservationHealth(), False, True),
        (ObservationHealth(), True, True),
        (ObservationHealth(blind_reason="the watch is broken"), False, False),
        (ObservationHealth(healthy_seconds=14), False, False),
        (ObservationHealth(healthy_seconds=15), False, True),
        (ObservationHealth(failed_runs=4), False, True),
        (ObservationHealth(failed_runs=5), False, False),
        (ObservationHealth(failed_runs=5, running_runs=5), False, True),
        (ObservationHealth(failed_runs=50, running_runs=49), False, False),
        (ObservationHealth(vanished_workflows=5), False, True),
        (ObservationHealth(vanished_workflows=5), True, False),
        (ObservationHealth(vanished_workflows=5, running_runs=6), True, True),
    ],
)
def test_an_observation_is_trusted_only_while_it_is_healthy(
    health: ObservationHealth, vanished: bool, trusted: bool
) -> None:
    assert (find_distrust_reason(health, LIMITS, vanished=vanished) == "") == trusted


def test_an_outage_concerns_its_namespace_or_all_and_a_vanished_workflow_counts_for_longer() -> None:
    now, limits = [0.0], AutoResumeLimits()
    tracker = ObservationHealthTracker(str, int, limits, lambda: now[0])
    for now[0], namespace, expected in ((10, "ml", (0, 10)), (20, "", (0, 0)), (30, "vision", (10, 0))):
        tracker.record_outage(namespace)
        assert tuple(tracker.measure_health(name).healthy_seconds for name in ("ml", "vision")) == expected
    for name, vanished in (("a", True), ("b", True), ("c", False)):
        tracker.record_end(("ml", name), vanished=vanished)
    counts = []
    for wait in (0.0, limits.mass_failure_seconds, limits.mass_vanished_seconds):
        now[0] = 30 + wait
        health = tracker.measure_health("ml")
        counts.append((health.failed_runs, health.vanished_workflows))
    assert counts == [(3, 2), (0, 2), (0, 0)]


def test_a_bucket_gives_no_more_than_its_rate_and_burst() -> None:
    now = 0.0
    bucket = TokenBucket(0.5, 3, lambda: now)
    assert bucket.take() == 0, "the first, and no more: a process that restarts gains nothing"
    assert bucket.take() == 2.0
    now = 100.0
    assert [bucket.take() for _ in range(4)] == [0, 0, 0, 2.0]
    now = 50.0  # a clock that goes back takes nothing away, and gives nothing
    assert bucket.take() == 2.0
