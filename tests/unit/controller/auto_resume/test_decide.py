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
from tiphys_controller.auto_resume.decide import Action, count_fruitless, decide, pause_seconds
from tiphys_controller.auto_resume.observation_health import Health, TokenBucket, distrust
from tiphys_controller.auto_resume.state import Failure, Limits, Observed, Standing, standing_of

from tiphys.protocol.auto_resume_policy import AutoResumePolicy
from tiphys.records import Advance, AutomaticResume, Cause, RunSealed, SubmissionBound, SubmissionClaim, SubmissionKind
from tiphys.store import Submission

LIMITS = Limits()
POLICY = AutoResumePolicy()
FAILED = Observed("digits-1", 1, Standing.FAILED, POLICY)

standings = st.sampled_from(Standing)
policies = st.builds(
    AutoResumePolicy,
    max_without_progress=st.integers(1, 5),
    cooldown_seconds=st.floats(0, 600),
    retry_after_seconds=st.none() | st.floats(1, 86400),
)
observations = st.builds(
    Observed,
    run=st.just("digits-1"),
    submission=st.integers(1, 50),
    standing=standings,
    policy=st.none() | policies,
    ended_by=st.sampled_from(["", "somebody stopped it"]),
    failures=st.lists(st.builds(Failure, st.just("fit"), st.sampled_from(Cause), st.just("")), max_size=2).map(tuple),
    fruitless=st.integers(0, 12),
)


def submission(bound: str = "uid-1", end: str = "", cluster: str = "west") -> Submission:
    named = {"run": "r", "submission": 1, "workflow_name": "r", "namespace": "ml", "cluster": cluster}
    return Submission(
        SubmissionClaim(kind=SubmissionKind.ORIGINAL, **named),
        SubmissionBound(uid=bound, **named) if bound else None,
        RunSealed(run="r", submission=1, status=end) if end else None,
    )


@pytest.mark.parametrize(
    ("last", "live", "expected"),
    [
        (None, None, Standing.UNSENT),
        (submission(), ("uid-1", "Running"), Standing.RUNS),
        (submission(), ("uid-1", "Succeeded"), Standing.SUCCEEDED),
        (submission(), ("uid-1", "Failed"), Standing.FAILED),
        (submission(end="Failed"), ("uid-1", "Running"), Standing.RUNS),  # its exit handler is not over
        (submission(end="Failed"), None, Standing.FAILED),
        (submission(end="Succeeded"), None, Standing.SUCCEEDED),
        (submission(), None, Standing.GONE),
        (submission(), ("uid-of-another", "Running"), Standing.GONE),
        (submission(bound=""), None, Standing.UNSENT),
        (submission(bound=""), ("uid-1", "Running"), Standing.RUNS),
        (submission(cluster="east"), None, Standing.ELSEWHERE),
        (submission(cluster="east", end="Failed"), None, Standing.ELSEWHERE),
    ],
)
def test_where_a_run_stands(last: Submission | None, live: tuple[str, str] | None, expected: Standing) -> None:
    shown = LiveWorkflow("r", "ml", live[0], live[1], live[1] == "Running") if live else None
    assert standing_of(last, shown, "west") is expected


@pytest.mark.parametrize(
    ("changes", "waited", "expected"),
    [
        ({"standing": Standing.RUNS}, 0, "leave Runs"),
        ({"standing": Standing.SUCCEEDED}, 0, "leave Succeeded"),
        ({"standing": Standing.ELSEWHERE}, 0, "leave Elsewhere"),
        ({}, 0, "resume Resume"),
        ({"policy": None}, 0, "leave NotAsked"),
        ({"ended_by": "somebody stopped it"}, 0, "leave EndedByPerson"),
        ({"failures": (Failure("fit", Cause.PREEMPTION, ""),)}, 0, "resume Resume"),
        ({"failures": (Failure("fit", Cause.USER_ERROR, "exit code 1"),)}, 9e9, "leave NeedsPerson"),
        (
            {"failures": (Failure("a", Cause.PREEMPTION, ""), Failure("b", Cause.OUT_OF_MEMORY, ""))},
            9e9,
            "leave NeedsPerson",
        ),
        ({"fruitless": 1}, 59, "wait CoolingDown"),
        ({"fruitless": 1}, 60, "resume Resume"),
        ({"fruitless": 2}, 60, "wait BreakerOpen"),
        ({"fruitless": 2}, 6 * 3600, "resume Resume"),
        ({"fruitless": 5}, 9e9, "leave BreakerOpen"),
        ({"fruitless": 2, "policy": AutoResumePolicy(retry_after_seconds=None)}, 9e9, "leave BreakerOpen"),
        ({"fruitless": 5, "intended": True}, 0, "resume Intended"),
        ({"standing": Standing.GONE}, 59, "wait NotSureYet"),
        ({"standing": Standing.GONE}, 60, "resume Resume"),
        ({"standing": Standing.UNSENT}, 119, "wait NotSureYet"),
        ({"standing": Standing.UNSENT}, 120, "resume Resume"),
    ],
)
def test_the_decision(changes: dict[str, object], waited: float, expected: str) -> None:
    decision = decide(replace(FAILED, **changes), waited, LIMITS)  # type: ignore[arg-type]
    assert f"{decision.action} {decision.reason}" == expected
    assert (decision.seconds > 0) == (decision.action is Action.WAIT)


def test_an_alert_may_ask_for_what_the_author_did_not_and_all_brakes_hold() -> None:
    unasked = replace(FAILED, policy=None)
    assert decide(unasked, 0, LIMITS, demanded=True).action is Action.RESUME
    assert decide(replace(unasked, fruitless=2), 0, LIMITS, demanded=True).reason == "BreakerOpen"
    assert decide(replace(unasked, ended_by="a person"), 0, LIMITS, demanded=True).reason == "EndedByPerson"


@given(observations, st.floats(0, 1e7), st.booleans())
def test_nothing_that_runs_or_that_a_person_ended_is_ever_resumed_first(
    seen: Observed, waited: float, demanded: bool
) -> None:
    decision = decide(seen, waited, LIMITS, demanded=demanded)
    if decision.action is Action.RESUME:
        assert seen.standing in (Standing.FAILED, Standing.GONE, Standing.UNSENT)
        assert not seen.ended_by
        assert demanded or seen.policy is not None


@given(observations, st.floats(0, 1e7))
def test_waiting_as_long_as_was_said_is_enough(seen: Observed, waited: float) -> None:
    for _ in range(3):
        decision = decide(seen, waited, LIMITS)
        if decision.action is not Action.WAIT:
            return
        waited += decision.seconds * (1 + 1e-9)
    assert decide(seen, waited, LIMITS).action is not Action.WAIT


@given(policies, st.integers(0, 40))
def test_pauses_only_grow_and_end_with_a_person(policy: AutoResumePolicy, fruitless: int) -> None:
    assert pause_seconds(policy, 0) == 0
    below = fruitless < policy.max_without_progress
    if fruitless and (fruitless + 1 < policy.max_without_progress) == below:
        assert pause_seconds(policy, fruitless + 1) >= pause_seconds(policy, fruitless)
    assert math.isinf(pause_seconds(policy, policy.max_without_progress + 3))


def resumes(*advances: Advance) -> list[AutomaticResume]:
    return [AutomaticResume(run="r", submission=9 - n, reason="", advance=one) for n, one in enumerate(advances)]


@pytest.mark.parametrize(
    ("now", "before", "expected"),
    [
        (Advance(), [], 0),
        (Advance(), [Advance()], 1),
        (Advance(), [Advance(), Advance(), Advance()], 3),
        (Advance(steps=1), [Advance(), Advance()], 0),
        (Advance(steps=1), [Advance(steps=1), Advance(), Advance()], 1),
        (Advance(checkpoints={"fit": 20}), [Advance(checkpoints={"fit": 10})], 0),
        (Advance(checkpoints={"fit": 10}), [Advance(checkpoints={"fit": 10})], 1),
        (Advance(checkpoints={"fit": 0}), [Advance()], 0),
        (Advance(on_volumes=2), [Advance(on_volumes=1)], 0),
        # What retention has removed, or an older checkpoint that it went back to, is no progress.
        (Advance(checkpoints={"fit": 5}), [Advance(checkpoints={"fit": 10})], 1),
    ],
)
def test_resumes_that_got_no_further_are_counted(now: Advance, before: list[Advance], expected: int) -> None:
    assert count_fruitless(now, resumes(*before)) == expected


def test_a_run_that_never_gets_further_costs_at_most_two_cycles_before_a_pause_of_hours() -> None:
    moment, started = 0.0, []
    for fruitless in itertools.count():
        seen = replace(FAILED, fruitless=fruitless)
        decision = decide(seen, 0, LIMITS)
        if decision.action is Action.LEAVE:
            break
        moment += decision.seconds
        started.append(moment)
    assert sum(at < 3600 for at in started) == 2
    assert len(started) == 5, "and three more over days, then it is a person's"


@pytest.mark.parametrize(
    ("health", "vanished", "trusted"),
    [
        (Health(), False, True),
        (Health(), True, True),
        (Health(blind="the watch is broken"), False, False),
        (Health(calm_seconds=14), False, False),
        (Health(calm_seconds=15), False, True),
        (Health(failed=4), False, True),
        (Health(failed=5), False, False),
        (Health(failed=5, running=5), False, True),
        (Health(failed=50, running=49), False, False),
        (Health(vanished=5), False, True),
        (Health(vanished=5), True, False),
        (Health(vanished=5, running=6), True, True),
    ],
)
def test_what_can_be_believed(health: Health, vanished: bool, trusted: bool) -> None:
    assert (distrust(health, LIMITS, vanished=vanished) == "") == trusted


def test_a_bucket_gives_no_more_than_its_rate_and_burst() -> None:
    now = 0.0
    bucket = TokenBucket(0.5, 3, lambda: now)
    assert bucket.take() == 0, "the first, and no more: a process that restarts gains nothing"
    assert bucket.take() == 2.0
    now = 100.0
    assert [bucket.take() for _ in range(4)] == [0, 0, 0, 2.0]
    now = 50.0  # a clock that goes back takes nothing away, and gives nothing
    assert bucket.take() == 2.0
