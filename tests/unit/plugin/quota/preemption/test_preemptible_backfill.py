"""What starts behind a blocked request, if that request may preempt it.

| a later request of the same queue fits         | it               |
|------------------------------------------------|------------------|
| backfill is preemptible                        | starts           |
| backfill is strict, or of another queue        | waits            |
| the blocked one lacks only what is behind it   | waits            |
| the blocked one has victims                    | waits            |

| a lease of the same level, and a request that waits     | may be preempted |
|---------------------------------------------------------|------------------|
| it started later than the request was made              | yes              |
| it started before, or its step had asked before         | no               |
| its priority is higher, or backfill is not preemptible  | no               |
"""

import random
from dataclasses import replace
from datetime import timedelta
from functools import cache
from typing import Any

import pytest
from support.builders.ledger import NOW, ask, lease, waiting
from tiphys_plugin.quota.lease import Admitted, Deferred, Lease, LedgerState, PendingRequest
from tiphys_plugin.quota.ledger.transitions import admit_or_queue, mark_victims
from tiphys_plugin.quota.preemption.victims import NoVictims, VictimSelection, select_victims
from tiphys_plugin.quota.queue import PREEMPTIBLE_MIN_RUNTIME_SECONDS
from tiphys_plugin.quota.queues import Queues
from tiphys_plugin.quota.scheduler.cache import SchedulerCache
from tiphys_plugin.quota.scheduler.decide import decide_pending
from tiphys_plugin.quota.scheduler.fair_share import held_gpu_seconds
from tiphys_plugin.quota.simulation.jobs import PreemptionCosts, ReplayResult, TraceJob
from tiphys_plugin.quota.simulation.replay import replay_jobs

HOUR = 3600.0


def rules(**changes) -> Queues:
    queue = {"name": "research", "gpus": {"A100": 8}, "backfill": "preemptible", "min_runtime_seconds": 600}
    return Queues.model_validate({"queues": [{**queue, **changes}]})


ATTAINED = {"order": "attained", "preempts_longer": True, "backfill": None, "attained_gpu_hours": [1, 8]}


def ran(seconds: float, name: str, gpus: int = 4, **changes) -> Lease:
    return replace(lease(gpus, name, **changes), granted_at=NOW - timedelta(seconds=seconds))


def waits(seconds: float, gpus: int, arrival: int, **changes) -> PendingRequest:
    return replace(waiting(gpus, arrival, **changes), since=NOW - timedelta(seconds=seconds))


def answer(queues: Queues, leases: tuple[Lease, ...], blocked: PendingRequest, later: PendingRequest):
    return decide_pending(LedgerState(leases, (blocked,), queues=queues), later, NOW)


def victims(queues: Queues, leases: tuple[Lease, ...], mine: PendingRequest) -> list[str]:
    def lost(some):
        return {one.id: held_gpu_seconds(one, NOW) for one in some}

    found = select_victims(LedgerState(leases, queues=queues), mine, lost, NOW)
    return [one.request.uid for one in found.leases] if isinstance(found, VictimSelection) else []


@pytest.mark.parametrize("changes", [{}, ATTAINED])
def test_idle_gpus_are_used_behind_a_blocked_request(changes):
    senior, blocked, later = ran(800, "senior", 4, first_start=0.0), waits(7000, 8, 1), waits(10, 4, 2)
    assert isinstance(answer(rules(**changes), (senior,), blocked, later), Admitted)
    strict = rules(**{**changes, "backfill": "strict"})
    assert isinstance(answer(strict, (senior,), blocked, later), Deferred)


def test_a_foreign_queue_gets_nothing_that_the_blocked_request_lacks():
    document = rules(cohort="lab").model_dump()["queues"]
    other = {"name": "other", "gpus": {"A100": 0}, "cohort": "lab"}
    queues = Queues.model_validate({"queues": [*document, other]})
    state = (ran(2000, "senior", 4),)
    assert isinstance(answer(queues, state, waits(1000, 8, 1, priority=1), waits(10, 4, 2, queue="other")), Deferred)


def test_the_line_closes_once_only_trainings_behind_the_request_are_in_its_way():
    blocked, later = waits(1000, 8, 1), waits(10, 4, 2)
    young = ran(300, "young")
    assert isinstance(answer(rules(), (young,), blocked, later), Deferred)
    assert victims(rules(), (young,), blocked) == [], "it has not run for long enough to be asked"
    assert victims(rules(), (ran(700, "young"),), blocked) == ["young"]


def test_gpus_of_victims_are_not_used_for_backfill():
    queues, blocked = rules(), waits(1000, 8, 1)
    state, marked = mark_victims(
        LedgerState((ran(700, "young"),), (blocked,), queues=queues),
        blocked.request.workflow_step,
        {"lease-young": 30.0},
        NOW,
        SchedulerCache(),
    )
    assert len(marked) == 1
    assert isinstance(answer(queues, state.leases, blocked, waits(10, 4, 2)), Deferred)


@pytest.mark.parametrize(
    ("changes", "held"),
    [
        ({}, ran(1001, "earlier", 8)),
        ({}, ran(900, "recalled", 8, first_start=(NOW - timedelta(hours=1)).timestamp())),
        ({}, ran(900, "urgent", 8, priority=1)),
        ({"backfill": "strict"}, ran(900, "later", 8)),
        ({"backfill": None}, ran(900, "later", 8)),
    ],
)
def test_a_lease_that_is_not_behind_the_request_stays(changes, held):
    mine = waits(1000, 8, 1)
    assert victims(rules(), (ran(900, "later", 8),), mine) == ["later"]
    assert victims(rules(**changes), (held,), mine) == []


def test_a_plain_queue_gives_back_its_place_to_a_recalled_training():
    """It asked before the others that wait, although its new request came last."""
    queues = rules()
    recalled = ask(8, "recalled", attempt=2, first_start=(NOW - timedelta(hours=1)).timestamp(), attained=5.0)
    state = LedgerState(pending=(waits(100, 8, 1, uid="other"),), queues=queues)
    after, admission = admit_or_queue(state, recalled, NOW, "lease", SchedulerCache())
    assert isinstance(admission, Admitted)
    [held] = after.leases
    assert held.request.attained == 0.0, "not counted in a queue that goes by arrival"


def test_a_lease_remembers_when_its_step_asked():
    first, cache = ask(8, "first"), SchedulerCache()
    state = LedgerState(pending=(replace(waiting(8, 1, "first"), since=NOW - timedelta(hours=2)),), queues=rules())
    after, _ = admit_or_queue(state, first, NOW, "lease", cache)
    assert after.leases[0].request.first_start == (NOW - timedelta(hours=2)).timestamp()
    strict = replace(state, queues=rules(backfill="strict"))
    plain, _ = admit_or_queue(strict, first, NOW, "lease", cache)
    assert plain.leases[0].request.first_start is None


def test_within_a_level_the_request_for_fewer_gpus_goes_first_for_a_bounded_time():
    """A tenth of the hour at which the level ends, for each GPU more: 7 GPUs make 42 minutes."""
    queues, gang = rules(**ATTAINED), waits(41 * 60, 8, 1)
    small = waits(0, 1, 2)
    assert isinstance(decide_pending(LedgerState((), (gang,), queues=queues), small, NOW), Admitted)
    assert isinstance(decide_pending(LedgerState((), (small,), queues=queues), gang, NOW), Deferred)
    older = replace(gang, since=NOW - timedelta(minutes=43))
    assert isinstance(decide_pending(LedgerState((), (small,), queues=queues), older, NOW), Admitted)
    later_level = replace(small, request=replace(small.request, attained=2 * HOUR))
    assert isinstance(decide_pending(LedgerState((), (later_level,), queues=queues), gang, NOW), Admitted)


COSTS = PreemptionCosts(save_seconds=30.0, restart_seconds=300.0)
GPUS = 16
LONGEST = 4 * HOUR
STREAMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "attained": {**ATTAINED, "min_runtime_seconds": None},
    "not preemptible": {"backfill": None},
}


@cache
def endless(seed: int, queue: str) -> ReplayResult:
    """Small jobs that ask for twice all GPUs, for eight hours, and a gang that needs every GPU.

    Their first levels, of one GPU-hour each, ask for less than all GPUs.
    """
    draw = random.Random(seed)
    jobs = [TraceJob("gang", 3600.0, 7200.0, GPUS, "research")]
    at = 0.0
    while at < 8 * HOUR:
        gpus, seconds = draw.randint(1, 2), draw.uniform(60, LONGEST)
        jobs.append(TraceJob(f"small-{at}", at, seconds, gpus, "research"))
        at += gpus * seconds / (2 * GPUS)
    return replay_jobs(rules(gpus={"A100": GPUS}, **STREAMS[queue]), jobs, costs=COSTS)


def gang_wait(done: ReplayResult) -> float:
    gang = next(run for run in done.runs if run.job.name == "gang")
    return gang.started_seconds - gang.submitted_seconds


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_wait_of_a_gang_in_an_endless_stream_is_bounded(seed):
    protected = PREEMPTIBLE_MIN_RUNTIME_SECONDS
    queue = rules(**STREAMS["attained"]).queues[0]
    levels_up = HOUR  # those before it leave the first level after one GPU-hour
    waits_for_victims = protected + COSTS.save_seconds  # the last one before the gang, and then the gang
    promised = queue.yield_seconds(0, GPUS) + levels_up + 2 * waits_for_victims
    assert gang_wait(endless(seed, "attained")) <= promised + 1


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_wait_of_a_gang_in_a_plain_queue_is_bounded_by_what_asked_before_it(seed):
    """All that came in the hour before it, twice what the GPUs can do, and the longest of these."""
    promised = 2 * HOUR + 2 * LONGEST + 600 + COSTS.save_seconds
    assert gang_wait(endless(seed, "plain")) <= promised


@pytest.mark.parametrize("queue", ["plain", "attained"])
def test_a_victim_has_run_for_its_protected_time(queue):
    protected = rules(**STREAMS[queue]).queues[0].protected_seconds
    asked = [one for run in endless(1, queue).runs for one in run.attempts[:-1]]
    assert asked
    assert all(one.held_seconds >= protected + COSTS.save_seconds for one in asked)


def test_preemption_is_absent_where_backfill_is_not_preemptible():
    assert sum(run.preemptions for run in endless(1, "not preemptible").runs) == 0
    found = select_victims(LedgerState(queues=rules(backfill=None)), waits(0, 8, 1), lambda _: {}, NOW)
    assert isinstance(found, NoVictims)
