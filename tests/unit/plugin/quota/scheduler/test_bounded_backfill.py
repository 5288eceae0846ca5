"""What starts on idle GPUs of a queue in which nothing may be preempted, while a request is blocked.

| a later request fits on what stands idle, and        | it       |
|------------------------------------------------------|----------|
| the first has been the first for a shorter time      | starts   |
| the first has been the first for ``backfill_hours``  | waits    |
| a request before the first started since             | starts   |
| only later ones than the first started since         | waits    |
| its priority is lower, or its queue another one      | waits    |
| backfill is strict, or 0 hours                       | waits    |
"""

import random
from dataclasses import replace
from datetime import timedelta

import pytest
from support.builders.ledger import NOW, lease, waiting
from tiphys_plugin.quota.lease import AdmissionReason, Admitted, Deferred, Lease, LedgerState, PendingRequest
from tiphys_plugin.quota.ledger.transitions import admit_or_queue
from tiphys_plugin.quota.queue import DEFAULT_BACKFILL_HOURS
from tiphys_plugin.quota.queues import Queues
from tiphys_plugin.quota.scheduler.cache import SchedulerCache
from tiphys_plugin.quota.scheduler.decide import decide_pending
from tiphys_plugin.quota.simulation.jobs import ReplayResult, TraceJob
from tiphys_plugin.quota.simulation.replay import replay_jobs

HOUR = 3600.0


def rules(**changes) -> Queues:
    queue = {"name": "research", "gpus": {"A100": 8}, "backfill_hours": 2, **changes}
    return Queues.model_validate({"queues": [queue]})


def started(hours_ago: float, asked_hours_ago: float, gpus: int = 2, uid: str = "holder", **changes) -> Lease:
    asked_at = (NOW - timedelta(hours=asked_hours_ago)).timestamp()
    return replace(lease(gpus, uid, first_start=asked_at, **changes), granted_at=NOW - timedelta(hours=hours_ago))


def asked(hours_ago: float, gpus: int, arrival: int, **changes) -> PendingRequest:
    return replace(waiting(gpus, arrival, **changes), since=NOW - timedelta(hours=hours_ago))


def answer(queues: Queues, leases: tuple[Lease, ...], first: PendingRequest, later: PendingRequest):
    return decide_pending(LedgerState(leases, (first,), queues=queues), later, NOW)


LATER = asked(0, 2, 9)


@pytest.mark.parametrize(
    ("leases", "first_asked_hours_ago", "starts"),
    [
        ((started(5, 5),), 1.9, True),
        ((started(5, 5),), 2.0, False),
        ((started(5, 5), started(1, 4, uid="before")), 3.0, True),
        ((started(5, 5), started(1, 2.5, uid="later")), 3.0, False),
        ((started(5, 5), started(2.5, 4, uid="before"), started(1, 2, uid="later")), 3.0, False),
        ((started(5, 5), started(1, 0.5, uid="urgent", priority=5)), 3.0, True),
    ],
)
def test_the_first_is_overtaken_for_its_hours_and_no_longer(leases, first_asked_hours_ago, starts):
    first = asked(first_asked_hours_ago, 8, 1)
    assert isinstance(answer(rules(), leases, first, LATER), Admitted) is starts


def test_backfill_is_closed_to_a_lower_priority_and_to_another_queue():
    first = asked(1, 8, 1, priority=3)
    assert isinstance(answer(rules(), (started(5, 5),), first, LATER), Deferred)
    own = {**rules().model_dump()["queues"][0], "cohort": "lab", "weight": 1000}
    two = Queues.model_validate({"queues": [own, {"name": "other", "gpus": {"A100": 0}, "cohort": "lab"}]})
    held = (started(5, 5), started(5, 5, 1, "others", queue="other"))
    assert isinstance(answer(two, held, first, asked(0, 2, 9, priority=3)), Admitted)
    assert isinstance(answer(two, held, first, asked(0, 2, 9, queue="other", priority=3)), Deferred)


@pytest.mark.parametrize(
    "changes", [{"backfill": "strict", "backfill_hours": DEFAULT_BACKFILL_HOURS}, {"backfill_hours": 0}]
)
def test_the_line_may_always_be_closed(changes):
    assert isinstance(answer(rules(**changes), (started(5, 5),), asked(0, 8, 1), LATER), Deferred)


def test_the_default_is_bounded():
    queues = Queues.model_validate({"queues": [{"name": "research", "gpus": {"A100": 8}}]})
    held = (started(100, 100),)
    assert isinstance(answer(queues, held, asked(DEFAULT_BACKFILL_HOURS - 0.1, 8, 1), LATER), Admitted)
    assert isinstance(answer(queues, held, asked(DEFAULT_BACKFILL_HOURS, 8, 1), LATER), Deferred)


def test_hours_without_bounded_backfill_are_refused():
    for changes in ({"backfill": "strict"}, {"order": "attained", "preempts_longer": True}):
        with pytest.raises(ValueError, match="backfill_hours"):
            rules(**changes)


def reasons(admission) -> dict[AdmissionReason, str]:
    assert isinstance(admission, Deferred)
    return {one.reason: one.message for one in admission.reasons}


def test_the_reasons_name_the_bound_and_its_end():
    held, first = (started(5, 5),), asked(1, 8, 1)
    state = LedgerState(held, (LATER,), queues=rules())
    own = reasons(decide_pending(state, first, NOW))
    assert "until 2026-01-01 01:00:00 UTC (backfill_hours 2)" in own[AdmissionReason.FIRST_IN_LINE]
    closed = reasons(decide_pending(state, asked(3, 8, 1), NOW))
    assert "since 2025-12-31 23:00:00 UTC (backfill_hours 2)" in closed[AdmissionReason.FIRST_IN_LINE]
    behind = reasons(answer(rules(), held, asked(3, 8, 1), LATER))
    assert "nothing starts before run-waiter-1/fit (8 A100)" in behind[AdmissionReason.LINE_CLOSED]
    strict = rules(backfill="strict", backfill_hours=DEFAULT_BACKFILL_HOURS)
    found = reasons(answer(strict, held, asked(3, 8, 1), LATER))
    assert AdmissionReason.LINE_CLOSED not in found
    preemptible = rules(backfill="preemptible", backfill_hours=DEFAULT_BACKFILL_HOURS)
    own = reasons(decide_pending(LedgerState(held, (), queues=preemptible), first, NOW))
    assert "it may preempt them once they have run for 1200 s" in own[AdmissionReason.FIRST_IN_LINE]


def test_a_lease_remembers_when_it_was_asked_for():
    state = LedgerState(pending=(asked(2, 8, 1, uid="first"),), queues=rules())
    after, _ = admit_or_queue(state, state.pending[0].request, NOW, "lease", SchedulerCache())
    assert after.leases[0].request.first_start == (NOW - timedelta(hours=2)).timestamp()


GPUS, LONGEST = 8, 2 * HOUR


def endless(seed: int, backfill_hours: float) -> ReplayResult:
    """Small jobs that ask for twice all GPUs, for forty hours, and one that needs every GPU."""
    draw, at = random.Random(seed), 0.0
    jobs = [TraceJob("gang", HOUR, HOUR, GPUS, "research")]
    while at < 40 * HOUR:
        gpus, seconds = draw.randint(1, 2), draw.uniform(60, LONGEST)
        jobs.append(TraceJob(f"small-{at}", at, seconds, gpus, "research"))
        at += gpus * seconds / (2 * GPUS)
    return replay_jobs(rules(backfill_hours=backfill_hours), jobs)


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("hours", [0, 3, 12])
def test_the_wait_of_a_gang_in_an_endless_stream_is_bounded(seed, hours):
    """By the last start before it, the hours of its queue, and the longest of those that run then."""
    runs = endless(seed, hours).runs
    gang = next(run for run in runs if run.job.name == "gang")
    before = [run.started_seconds for run in runs if run.submitted_seconds < gang.submitted_seconds]
    promised = max(before) + hours * HOUR + LONGEST
    assert promised - LONGEST < gang.started_seconds <= promised
    overtakers = [one for one in runs if gang.submitted_seconds < one.submitted_seconds < gang.started_seconds]
    assert any(one.started_seconds < gang.started_seconds for one in overtakers) is (hours > 0)
    assert all(
        one.started_seconds < max(before) + hours * HOUR
        for one in overtakers
        if one.started_seconds < gang.started_seconds
    )
