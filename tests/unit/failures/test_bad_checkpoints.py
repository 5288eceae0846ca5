"""When deaths make a checkpoint suspect.

what the attempts before did, after loading X       the newest death, after loading X      X is suspect
--------------------------------------------------  -------------------------------------  ------------
nothing                                             A                                      no, K = 2
died of A                                           A                                      yes
died of B                                           A                                      no
died of A, then of B                                A                                      yes
died of A, then were preempted                      A                                      yes
died of A, then committed or got beyond M steps     A                                      no
died of A after loading Y                           A                                      no
died of A                                           A, more than M steps after the load    no
died of A                                           A, after a commit                      no
committed X, was restarted in its pod, died of A    A                                      yes
died of A from the beginning                        A from the beginning                   no
"""

import pytest
from support.builders.lineage import claim_of, end_of, ref

from tiphys.failures.bad_checkpoints import (
    MAX_STEPS_AFTER_LOAD,
    MIN_CRASHES,
    derive_checkpoint_crash,
    find_suspect,
    list_suspects,
)
from tiphys.failures.retry_budget import evaluate_retry_budget
from tiphys.protocol.step_spec import RetryPolicy
from tiphys.records import (
    AttemptEnd,
    Cause,
    CheckpointCrash,
    CheckpointRef,
    CrashRecord,
    LastCheckpoint,
    StartTimes,
    utc_now,
)
from tiphys.store import Attempt

X, Y = ref(1, 20), ref(1, 10)
UNKNOWN = Cause.UNKNOWN


def died(
    attempt: int, fingerprint: str = "A", loaded: CheckpointRef = X, steps: int | None = 3, progress: bool = False
) -> Attempt:
    death = CheckpointCrash(loaded=loaded, fingerprint=fingerprint, steps=steps)
    end = end_of(attempt, Cause.USER_ERROR, progress=progress).model_copy(update={"checkpoint_crash": death})
    return Attempt(claim_of(attempt, loaded), end)


def restarted(attempt: int, newest: CheckpointRef = X) -> Attempt:
    """Committed ``newest``, was started again in its pod, loaded X and died."""
    claim, end = died(attempt, progress=True)
    assert end is not None
    last = LastCheckpoint(checkpoint=newest, at=utc_now(), began=StartTimes(opened_at=utc_now()))
    return Attempt(claim, end.model_copy(update={"last_checkpoint": last}))


def preempted(attempt: int, loaded: CheckpointRef | None = X, progress: bool = False) -> Attempt:
    return Attempt(claim_of(attempt, loaded), end_of(attempt, Cause.PREEMPTION, progress=progress))


def judge(*attempts: Attempt, **limits: int) -> CheckpointRef | None:
    *earlier, newest = attempts
    assert newest.end is not None
    found = find_suspect(earlier, newest.end, **limits)
    return found.checkpoint if found else None


@pytest.mark.parametrize(
    ("attempts", "expected"),
    [
        ([died(2)], None),
        ([died(2), died(3)], X),
        ([died(2, "B"), died(3)], None),
        ([died(2), died(3, "B"), died(4)], X),
        ([died(2), preempted(3), died(4)], X),
        ([died(2), preempted(3, progress=True), died(4)], None),
        ([died(2), died(3, progress=True), died(4)], None),
        ([died(2), died(3, steps=MAX_STEPS_AFTER_LOAD + 1), died(4)], None),
        ([died(2), died(3, "B", steps=MAX_STEPS_AFTER_LOAD + 1), died(4)], None),
        ([died(2, loaded=Y), died(3)], None),
        ([died(2), died(3, loaded=Y), died(4)], X),
        ([died(2), died(3, steps=MAX_STEPS_AFTER_LOAD)], X),
        ([died(2), died(3, steps=MAX_STEPS_AFTER_LOAD + 1)], None),
        ([died(2), died(3, progress=True)], None),
        ([died(2), died(3, steps=None)], X),
        ([died(2), preempted(3, loaded=None, progress=True), died(4)], X),
        ([preempted(2), preempted(3)], None),
        ([restarted(1), died(2)], X),
        ([restarted(1, newest=ref(1, 30)), died(2)], None),
        ([died(2), restarted(3)], X),
        ([died(2), restarted(3, newest=ref(3, 30))], None),
    ],
)
def test_the_table(attempts, expected):
    assert judge(*attempts) == expected


def test_the_order_in_which_attempts_are_read_does_not_matter():
    assert judge(died(3, progress=True), died(2), died(4)) is None


def test_an_attempt_that_is_still_running_says_nothing():
    assert judge(Attempt(claim_of(2, X), None), died(3)) is None


def test_limits_of_crashes_can_be_set():
    assert judge(died(2), died(3), min_crashes=3) is None
    assert judge(died(2), died(3), died(4), min_crashes=3) == X
    assert judge(died(2), died(3, steps=MAX_STEPS_AFTER_LOAD + 1), within_steps=MAX_STEPS_AFTER_LOAD + 1) == X
    assert judge(died(2), died(3), within_steps=2) is None


def test_the_reason_says_how_often_when_and_what():
    newest = died(3).end
    assert newest is not None
    found = find_suspect([died(2)], newest)
    assert found is not None
    assert found.reason == "2 attempts that loaded it crashed in the same way, the last one 3 steps after the load: A"


def crash(fingerprint: str = "A", step: int | None = 23, restored: CheckpointRef | None = X) -> CrashRecord:
    return CrashRecord(
        run="r", step="fit", attempt=2, error="e", fingerprint=fingerprint, global_step=step, restored=restored
    )


@pytest.mark.parametrize(
    ("starts", "cause", "code", "left", "expected"),
    [
        # The program's own account: what it really loaded, and how far it got.
        (X, Cause.USER_ERROR, 1, crash(), CheckpointCrash(loaded=X, fingerprint="A", steps=3)),
        (X, Cause.USER_ERROR, 1, crash(restored=Y), CheckpointCrash(loaded=Y, fingerprint="A", steps=13)),
        (X, Cause.USER_ERROR, 1, crash(step=None, restored=None), CheckpointCrash(loaded=X, fingerprint="A")),
        (X, Cause.USER_ERROR, 1, crash(step=4), CheckpointCrash(loaded=X, fingerprint="A", steps=0)),
        (None, Cause.USER_ERROR, 1, crash(restored=None), None),
        (X, Cause.USER_ERROR, 1, crash(fingerprint=""), None),
        # Without one: only signals of the program's own making.
        (X, Cause.USER_ERROR, 139, None, CheckpointCrash(loaded=X, fingerprint="SIGSEGV")),
        (X, Cause.UNKNOWN, 134, None, CheckpointCrash(loaded=X, fingerprint="SIGABRT")),
        (X, Cause.USER_ERROR, 1, None, None),
        (X, Cause.UNKNOWN, None, None, None),
        (None, Cause.USER_ERROR, 139, None, None),
        # Never what others did to it, whatever it left.
        *((X, cause, 1, crash(), None) for cause in Cause if cause not in (Cause.USER_ERROR, Cause.UNKNOWN)),
        (X, Cause.OUT_OF_MEMORY, 137, None, None),
        # Started again in its pod: its last process is at fault, or what that found there.
        (X, Cause.INFRASTRUCTURE, 80, crash(), CheckpointCrash(loaded=X, fingerprint="A", steps=3)),
        (X, Cause.INFRASTRUCTURE, 80, None, None),
        (X, None, 0, crash(), None),
    ],
)
def test_a_checkpoint_crash_is_derived_from_claim_cause_and_crash_report(starts, cause, code, left, expected):
    assert derive_checkpoint_crash(claim_of(2, starts), cause, code, left, progress=False) == expected


def test_a_signal_after_a_commit_says_nothing():
    assert derive_checkpoint_crash(claim_of(2, X), Cause.USER_ERROR, 139, None, progress=True) is None


def end_suspecting(attempt: int, checkpoint: CheckpointRef | None) -> AttemptEnd:
    return end_of(attempt, Cause.USER_ERROR).model_copy(update={"suspect": checkpoint})


def test_an_end_that_made_a_checkpoint_suspect_is_followed_by_another_try_although_the_budget_is_spent():
    policy = RetryPolicy(user_error=0)
    spent = [end_suspecting(1, None), end_suspecting(2, X)]
    decision = evaluate_retry_budget(spent, policy, 1)
    assert decision.retry
    assert decision.message == "checkpoint 1-20 is suspect, so an older one gets a try"
    assert not evaluate_retry_budget([*spent, end_suspecting(3, None)], policy, 1).retry


def test_suspects_are_known_from_the_ends():
    attempts = [Attempt(claim_of(1), end_suspecting(1, None)), Attempt(claim_of(2), end_suspecting(2, X))]
    assert list_suspects([*attempts, Attempt(claim_of(3), None)]) == {X}


def test_a_second_death_is_enough():
    assert MIN_CRASHES == 2
