"""Who goes for a training that has had less GPU time, in a queue with ``preempts_longer``.

| lease of the same queue                               | may be asked |
|-------------------------------------------------------|--------------|
| of a higher level, priority not higher                | yes          |
| of the same or a lower level                          | no           |
| of a higher level and a higher priority               | no           |
| within ``min_runtime_seconds``                        | not yet      |
| of another queue of the cohort                        | no           |
"""

from dataclasses import replace
from datetime import timedelta

import pytest
from support.builders.ledger import NOW, lease, waiting
from tiphys_plugin.quota.lease import AdmissionReason, Lease, LedgerState, PendingRequest
from tiphys_plugin.quota.preemption.victims import NoVictims, VictimSelection, select_victims
from tiphys_plugin.quota.queue import PREEMPTIBLE_MIN_RUNTIME_SECONDS
from tiphys_plugin.quota.queues import Queues
from tiphys_plugin.quota.scheduler.fair_share import held_gpu_seconds

HOUR = 3600.0
NEW = waiting(4, 9, "new")


def rules(**changes) -> Queues:
    queue = {"name": "research", "gpus": {"A100": 8}, "order": "attained", "attained_gpu_hours": [1, 8]}
    return Queues.model_validate({"queues": [{"preempts_longer": True, "min_runtime_seconds": 0, **queue, **changes}]})


def chosen(
    queues: Queues, leases: tuple[Lease, ...], mine: PendingRequest = NEW, others: tuple[PendingRequest, ...] = ()
):
    return select_victims(LedgerState(leases, others, queues=queues), mine, lost, NOW)


def lost(leases) -> dict[str, float]:
    return {one.id: held_gpu_seconds(one, NOW) for one in leases}


def ran(seconds: float, name: str, gpus: int = 4, **changes) -> Lease:
    return replace(lease(gpus, name, **changes), granted_at=NOW - timedelta(seconds=seconds))


def names(found: VictimSelection | NoVictims) -> list[str]:
    assert isinstance(found, VictimSelection), found
    return [one.request.uid for one in found.leases]


def test_the_lease_of_a_higher_level_with_the_least_loss_is_the_victim():
    assert names(chosen(rules(), (ran(HOUR, "long"), ran(600, "short")))) == ["long"]
    resumed = ran(60, "resumed", attained=20 * HOUR)
    assert names(chosen(rules(), (ran(HOUR, "long"), resumed))) == ["resumed"], "its earlier attempts count"


@pytest.mark.parametrize(
    ("changes", "leases", "mine"),
    [
        ({"preempts_longer": False}, (ran(HOUR, "a"), ran(HOUR, "b")), NEW),
        ({}, (ran(890, "a"), ran(600, "b")), NEW),
        ({}, (ran(HOUR, "a"), ran(HOUR, "b")), waiting(4, 9, "new", attained=5 * HOUR)),
        ({}, (ran(HOUR, "a", priority=1), ran(HOUR, "b", priority=1)), NEW),
        ({"cohort": "lab"}, (ran(9 * HOUR, "a", queue="other"), ran(9 * HOUR, "b", queue="other")), NEW),
    ],
)
def test_a_lease_outside_the_rules_of_preempts_longer_stays(changes, leases, mine):
    queues = rules(**changes)
    if "cohort" in changes:
        other = {"name": "other", "gpus": {"A100": 0}, "cohort": "lab"}
        queues = Queues.model_validate({"queues": [*queues.model_dump()["queues"], other]})
    assert isinstance(chosen(queues, leases, mine), NoVictims)


def test_a_higher_priority_takes_from_a_higher_level_without_any_other_right():
    mine = waiting(8, 9, "new", priority=3)
    assert sorted(names(chosen(rules(), (ran(HOUR, "a"), ran(HOUR, "b", priority=3)), mine))) == ["a", "b"]


def test_the_shortest_time_of_the_queue_protects():
    patient = replace(NEW, since=NOW - timedelta(hours=2))
    found = chosen(rules(min_runtime_seconds=7200), (ran(HOUR, "a"), ran(HOUR, "b")), patient)
    assert isinstance(found, NoVictims)
    assert found.reason is AdmissionReason.MIN_RUNTIME_PROTECTED
    by_default = rules(min_runtime_seconds=None)
    leases = (ran(PREEMPTIBLE_MIN_RUNTIME_SECONDS - 1, "a"), ran(PREEMPTIBLE_MIN_RUNTIME_SECONDS, "b"))
    waited = replace(NEW, since=NOW - timedelta(seconds=PREEMPTIBLE_MIN_RUNTIME_SECONDS))
    assert names(chosen(by_default, leases, waited)) == ["b"], "at 4 GPUs both have had more than an hour"


def test_a_request_that_waited_less_than_a_preemption_costs_preempts_none():
    leases = (ran(HOUR, "a"), ran(HOUR, "b"))
    for seconds, goes in ((PREEMPTIBLE_MIN_RUNTIME_SECONDS - 1, False), (PREEMPTIBLE_MIN_RUNTIME_SECONDS, True)):
        waited = replace(NEW, since=NOW - timedelta(seconds=seconds))
        found = chosen(rules(min_runtime_seconds=None), leases, waited)
        assert isinstance(found, VictimSelection) is goes


def test_a_request_that_is_not_next_preempts_none():
    earlier = waiting(4, 1, "earlier")
    found = chosen(rules(), (ran(HOUR, "long"), ran(600, "short")), NEW, (earlier,))
    assert isinstance(found, NoVictims), "what comes free would go to the earlier one"
