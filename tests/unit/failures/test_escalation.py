"""What an attempt is given because of how those before it have ended.

| ends so far | the next attempt |
|---|---|
| out of memory | × factor, up to the ceiling, above what was too little |
| out of memory, then evictions, another submission | keeps it |
| n preemptions since the last checkpoint | no spot node |
| preemptions up to the last one that the budget allows | no spot node |
| n failures by the fault of one node | rather another one |
| the GPU was too small for this very program | half the batch, at least a quarter |
"""

import itertools

from support.builders.lineage import claim_of, end_of

from tiphys.failures.escalation import AttemptBaseline, compute_escalation
from tiphys.protocol.step_spec import RetryPolicy
from tiphys.records import AttemptEnd, AttemptEndOutcome, Cause, Escalation, FailureEvidence, Preemption, utc_now
from tiphys.store import Attempt

GI = 1024**3
OOM, PREEMPTED, INFRA, HANG = Cause.OUT_OF_MEMORY, Cause.PREEMPTION, Cause.INFRASTRUCTURE, Cause.HANG
TWICE = RetryPolicy()
LADDER = RetryPolicy(memory_ceiling_bytes=20 * GI, memory_factor=1.5)


def run(
    policy: RetryPolicy, ends: list[AttemptEnd], submission: int = 1, base: int | None = 8 * GI
) -> Escalation | None:
    """What the attempt after ``ends`` is given, each of which was given what follows from those before it."""
    attempts: list[Attempt] = []
    for end in [*ends, None]:
        now = AttemptBaseline(submission, "k", base)
        given = compute_escalation(attempts, policy, now)
        claim = claim_of(len(attempts) + 1).model_copy(update={"escalation": given})
        attempts.append(Attempt(claim, end))
    return attempts[-1].claim.escalation


def memory(policy: RetryPolicy, *causes: Cause, **more) -> float:
    given = run(policy, [end_of(number, cause) for number, cause in enumerate(causes, start=1)], **more)
    return (given.memory_bytes or 0) / GI if given else 0


def on(node: str, number: int, cause: Cause, rule: str = "program-failed", **more) -> AttemptEnd:
    return end_of(number, cause, **more).model_copy(update={"evidence": FailureEvidence(rule=rule, node=node)})


def test_memory_grows_with_each_lack_of_it_up_to_the_ceiling():
    assert [memory(LADDER, *[OOM] * count) for count in range(5)] == [8, 12, 18, 20, 20]


def test_memory_stays_over_evictions_and_submissions():
    assert memory(LADDER, OOM, PREEMPTED, INFRA, OOM, PREEMPTED) == 18
    assert memory(LADDER, OOM, PREEMPTED, submission=2) == 12


def test_a_memory_request_above_the_escalation_is_kept_as_it_is():
    ends = [end_of(1, OOM)]
    attempts = [Attempt(claim_of(1).model_copy(update={"escalation": Escalation(memory_bytes=8 * GI)}), ends[0])]
    assert compute_escalation(attempts, LADDER, AttemptBaseline(2, "k", 16 * GI)).memory_bytes == 16 * GI


def test_without_a_ceiling_or_a_limit_memory_is_left_alone():
    assert run(RetryPolicy(), [end_of(1, OOM)]) is None
    assert memory(LADDER, OOM, base=None) == 0


def test_a_full_gpu_does_not_raise_the_memory_of_the_pod():
    assert memory(LADDER, Cause.GPU_OUT_OF_MEMORY) == 8


def preemptions(policy: RetryPolicy, *progress: bool, submissions: tuple[int, ...] = (1,) * 9) -> bool:
    ends = [
        end_of(number, PREEMPTED, progress=saved, submission=submissions[number - 1])
        for number, saved in enumerate(progress, start=1)
    ]
    given = run(policy, ends, submission=max(submissions))
    return given is not None and given.on_demand


def test_spot_nodes_are_left_after_so_many_preemptions_without_a_checkpoint():
    policy = RetryPolicy(on_demand_after=3)
    assert not preemptions(policy, False, False)
    assert preemptions(policy, False, False, False)
    assert not preemptions(policy, False, False, True)
    assert preemptions(policy, True, False, False)
    assert preemptions(policy, False, False, False, submissions=(1, 1, 2))
    assert not preemptions(RetryPolicy(), *[False] * 9)


def test_the_last_try_that_the_budget_allows_is_on_demand():
    policy = RetryPolicy(on_demand_after=9, preemption=2)
    assert [preemptions(policy, *[False] * count) for count in range(4)] == [False, False, True, True]
    assert not preemptions(policy, False, False, submissions=(1, 2))


def test_going_for_another_of_the_queue_says_nothing_about_spot_nodes():
    went = Preemption(for_step="fit", asked_at=utc_now(), gone_at=utc_now(), gpus=1)
    ends = [end_of(n, PREEMPTED).model_copy(update={"preempted": went}) for n in (1, 2, 3)]
    assert run(RetryPolicy(on_demand_after=2), ends) is None


def avoided(*ends: AttemptEnd, policy: RetryPolicy = TWICE) -> tuple[str, ...]:
    given = run(policy, list(ends))
    return given.avoided_nodes if given else ()


def test_a_node_that_failed_twice_is_avoided():
    assert avoided(on("a", 1, INFRA)) == ()
    assert avoided(on("a", 1, INFRA), on("b", 2, INFRA), on("a", 3, HANG)) == ("a",)
    assert avoided(on("a", 1, INFRA), on("a", 2, INFRA), policy=RetryPolicy(avoid_node_after=None)) == ()


def test_a_node_is_not_blamed_for_what_it_did_not_do():
    for cause in (PREEMPTED, OOM, Cause.USER_ERROR, Cause.STORAGE, Cause.IMAGE):
        assert avoided(on("a", 1, cause), on("a", 2, cause)) == ()
    for rule in ("exit-code-76", "image-not-pulled"):
        assert avoided(on("a", 1, INFRA, rule), on("a", 2, INFRA, rule)) == ()
    assert avoided(end_of(1, INFRA), end_of(2, INFRA)) == ()


def test_an_attempt_that_gets_ahead_on_a_node_clears_it():
    assert avoided(on("a", 1, INFRA), on("a", 2, INFRA, progress=True)) == ()
    assert avoided(on("a", 1, INFRA), on("a", 2, INFRA, progress=True), on("a", 3, INFRA)) == ("a",)


def test_the_batch_is_halved_for_a_gpu_that_is_too_small_and_not_below_a_quarter():
    full = [end_of(n, Cause.GPU_OUT_OF_MEMORY).model_copy(update={"step_key": "k"}) for n in (1, 2, 3)]
    scales = [given.batch_scale if (given := run(RetryPolicy(), full[:count])) else 1 for count in range(4)]
    assert scales == [1, 0.5, 0.25, 0.25]


def test_a_changed_program_begins_with_its_whole_batch():
    other = end_of(1, Cause.GPU_OUT_OF_MEMORY).model_copy(update={"step_key": "before it was changed"})
    assert run(RetryPolicy(), [other]) is None


def test_an_escalation_is_explained_in_words():
    ends = [
        end_of(1, OOM),
        on("node-3", 2, INFRA),
        on("node-3", 3, INFRA),
        end_of(4, PREEMPTED),
        end_of(5, Cause.GPU_OUT_OF_MEMORY).model_copy(update={"step_key": "k"}),
    ]
    given = run(LADDER.model_copy(update={"on_demand_after": 1}), ends)
    assert given is not None
    assert given.explanation == "12Gi of memory, no spot node, rather not on node-3, batch scale 0.5"


def test_attempts_that_are_done_or_open_change_nothing():
    done = end_of(1, None, outcome=AttemptEndOutcome.DONE)
    assert run(LADDER, [done]) == Escalation(memory_bytes=8 * GI)


def test_the_next_attempt_never_gets_less_memory_than_one_before_it():
    for causes in itertools.product((OOM, PREEMPTED, INFRA), repeat=4):
        grown = [memory(LADDER, *causes[:count]) for count in range(5)]
        assert grown == sorted(grown)
