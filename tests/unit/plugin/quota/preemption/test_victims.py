"""Who is asked to leave for a request, and what is said where nobody is.

| the request waits, and                            | who is asked                              |
|---------------------------------------------------|-------------------------------------------|
| its queue says nothing                            | nobody                                    |
| lower priorities hold its queue                   | those of them that lose least             |
| others hold what its quota has lent               | borrowers, last in, first out by priority |
| those who could go have only just started         | nobody: MinRuntimeProtected               |
| enough leaves already, for it or for others       | nobody                                    |
| who was asked is long overdue                     | others                                    |
| it would not start all the same                   | nobody                                    |
"""

from dataclasses import replace
from datetime import timedelta

import pytest
from support.builders.ledger import NOW, ask, cohort, lease, waiting
from support.checks.preemption_rounds import Arena
from tiphys_plugin.quota.lease import (
    AdmissionReason,
    Admitted,
    Deferred,
    Lease,
    LedgerState,
    PendingRequest,
    PreemptionNotice,
)
from tiphys_plugin.quota.preemption import victims
from tiphys_plugin.quota.preemption.victims import NoVictims, VictimSelection, select_victims
from tiphys_plugin.quota.queues import Queues

HOUR = timedelta(hours=1)
LATER = NOW + HOUR
OWN = {"preempts_lower_priority": True}


def one_queue(count: int = 8, **fields) -> Queues:
    return Queues.model_validate({"queues": [{"name": "research", "gpus": {"A100": count}, **fields}]})


def chosen(state: LedgerState, mine: PendingRequest, lost=None, now=LATER) -> VictimSelection | NoVictims:
    weighed = lost or {}
    return select_victims(
        state, mine, lambda leases: {one.id: weighed.get(one.request.uid, 1.0) for one in leases}, now
    )


def names(found: VictimSelection | NoVictims) -> list[str]:
    assert isinstance(found, VictimSelection), found
    return sorted(one.request.uid for one in found.leases)


def why(found: VictimSelection | NoVictims) -> str:
    assert isinstance(found, NoVictims), found
    return found.message


def leaving(one: Lease, uid: str, after: timedelta = HOUR) -> Lease:
    return replace(one, preemption=PreemptionNotice(uid, "fit", LATER, LATER + after))


HIGH = waiting(4, 9, "high", priority=5)
FOUR = (lease(2, "a"), lease(2, "b"), lease(2, "c"), lease(2, "d"))


def test_victims_are_the_fewest_leases_with_the_least_loss():
    found = chosen(LedgerState(FOUR, queues=one_queue(**OWN)), HIGH, {"a": 50.0, "b": 3.0, "c": 40.0, "d": 2.0})
    assert names(found) == ["b", "d"]
    assert isinstance(found, VictimSelection)
    assert (found.gpu_seconds_by_lease, found.gpu_seconds_lost) == ({"lease-b": 3.0, "lease-d": 2.0}, 5.0)


def test_a_costlier_victim_is_chosen_if_it_spares_two_others():
    held = (lease(4, "big"), lease(2, "a"), lease(2, "b"))
    assert names(chosen(LedgerState(held, queues=one_queue(**OWN)), HIGH, {"big": 9.0, "a": 5.0, "b": 5.0})) == ["big"]
    assert names(chosen(LedgerState(held, queues=one_queue(**OWN)), HIGH, {"big": 11.0, "a": 5.0, "b": 5.0})) == [
        "a",
        "b",
    ]


def test_a_queue_without_a_rule_preempts_no_lease():
    assert "it sets none of preempts_lower_priority, reclaims, preempts_longer and backfill: preemptible" in why(
        chosen(LedgerState(FOUR, queues=one_queue()), HIGH)
    )


@pytest.mark.parametrize("priority", [5, 6])
def test_a_lease_of_the_same_or_a_higher_priority_is_not_preempted(priority):
    state = LedgerState((lease(4, "a", priority=priority),), queues=one_queue(4, **OWN))
    assert why(chosen(state, HIGH)) == "no training has a lower priority in its own queue"


def test_a_protected_lease_stays_and_the_message_says_until_when():
    state = LedgerState((lease(4, "a"),), queues=one_queue(4, min_runtime_seconds=7200, **OWN))
    found = chosen(state, HIGH)
    assert isinstance(found, NoVictims)
    assert found.reason is AdmissionReason.MIN_RUNTIME_PROTECTED
    assert found.message == "run-a/fit may only be preempted after min_runtime_seconds of queue research, at 02:00:00"
    assert names(chosen(state, HIGH, now=NOW + 2 * HOUR)) == ["a"]


def test_free_gpus_are_used_before_any_preemption():
    held = (lease(2, "a"), lease(4, "b"))
    assert names(chosen(LedgerState(held, queues=one_queue(8, **OWN)), HIGH, {"a": 1.0, "b": 2.0})) == ["a"]
    assert "enough GPUs are free" in why(chosen(LedgerState(held, queues=one_queue(10, **OWN)), HIGH))


def test_a_second_victim_is_not_chosen_while_the_first_one_leaves():
    held = (leaving(FOUR[0], "high"), *FOUR[1:])
    assert (
        why(chosen(LedgerState(held, queues=one_queue(**OWN)), HIGH))
        == "others were asked to leave for run-high/fit already"
    )


def test_preemptions_under_way_that_free_enough_add_no_victim():
    held = tuple(leaving(one, "gone") for one in FOUR[:2]) + FOUR[2:]
    assert "after the preemptions under way" in why(chosen(LedgerState(held, queues=one_queue(**OWN)), HIGH))


def test_requests_that_wait_together_have_different_victims():
    other = waiting(4, 8, "other", priority=5)
    held = tuple(leaving(one, "other") for one in FOUR[:2]) + FOUR[2:]
    assert names(chosen(LedgerState(held, (other,), queues=one_queue(**OWN)), HIGH)) == ["c", "d"]


def test_an_overdue_victim_is_not_waited_for():
    overdue = timedelta(seconds=-1) - victims.OVERDUE_AFTER
    held = tuple(leaving(one, "high", overdue) for one in FOUR[:2]) + FOUR[2:]
    assert names(chosen(LedgerState(held, queues=one_queue(**OWN)), HIGH)) == ["c", "d"]


def test_a_request_that_would_not_start_preempts_none():
    state = LedgerState((lease(2, "a"), lease(2, "b", priority=5)), queues=one_queue(4, **OWN))
    assert "it would not start without the one training that it may preempt" in why(chosen(state, HIGH))
    first = waiting(4, 1, "first", priority=7)
    assert isinstance(chosen(LedgerState((lease(4, "a"),), (first,), queues=one_queue(4, **OWN)), HIGH), NoVictims)


LENT = {"gpus": {"A100": 4}}
LAB = cohort(research={**LENT, "reclaims": True}, b=LENT, c=LENT)


def borrowed(*leases: Lease) -> LedgerState:
    return LedgerState(leases, queues=LAB)


def test_lent_gpus_are_taken_back_from_the_lease_that_borrows():
    late = replace(lease(4, "more", queue="b"), granted_at=NOW + timedelta(seconds=1))
    state = borrowed(lease(4, "own", queue="b"), late, lease(4, "c", queue="c"))
    mine = waiting(4, 9, "mine")
    assert names(chosen(state, mine)) == ["more"]


def test_a_lease_within_its_quota_stays_although_it_would_lose_less():
    first = replace(lease(4, "own", queue="b"), granted_at=NOW - HOUR)
    state = borrowed(first, lease(4, "more", queue="b"), lease(4, "c", queue="c"))
    assert names(chosen(state, waiting(4, 9, "mine"), {"own": 0.0, "more": 99.0, "c": 0.0})) == ["more"]


def test_the_higher_priority_of_a_queue_is_the_one_that_keeps_to_its_quota():
    late = replace(lease(4, "urgent", queue="b", priority=9), granted_at=NOW + timedelta(minutes=1))
    state = borrowed(lease(4, "early", queue="b"), late, lease(4, "c", queue="c"))
    assert names(chosen(state, waiting(4, 9, "mine"))) == ["early"]


def test_a_request_that_would_borrow_takes_nothing_back():
    state = borrowed(lease(2, "own"), lease(6, "b", queue="b"), lease(4, "c", queue="c"))
    assert isinstance(chosen(state, waiting(4, 9, "mine", priority=9)), NoVictims)


def test_a_queue_that_does_not_reclaim_preempts_no_lease_of_another():
    lab = cohort(research={**LENT, **OWN}, b=LENT)
    state = LedgerState((lease(8, "b", queue="b"),), queues=lab)
    assert why(chosen(state, waiting(4, 9, "mine", priority=9))) == "no training has a lower priority in its own queue"


def test_a_foreign_cohort_is_out_of_reach():
    document = {"queues": [{"name": "research", **LENT, "cohort": "lab", "reclaims": True}, {"name": "b", **LENT}]}
    stock = {"inventory": {"A100": {"count": 4}}}
    state = LedgerState((lease(4, "b", queue="b"),), queues=Queues.model_validate({**document, **stock}))
    assert isinstance(chosen(state, waiting(4, 9, "mine")), NoVictims)


def test_own_ones_of_lower_priority_go_before_it_takes_back_more_than_its_quota():
    lab = cohort(research={**LENT, **OWN, "reclaims": True}, b={"gpus": {"A100": 2}}, c={"gpus": {"A100": 1}})
    state = LedgerState((lease(2, "own"), lease(5, "b", queue="b")), queues=lab)
    assert names(chosen(state, waiting(3, 9, "mine", priority=9))) == ["b", "own"]


def test_a_request_beyond_its_own_quota_preempts_in_its_own_queue_although_others_borrow():
    """It may reclaim nothing, since it would borrow itself."""
    lab = cohort(research={"gpus": {"A100": 1}, **OWN, "reclaims": True}, b={"gpus": {"A100": 1}}, c=LENT)
    state = LedgerState((lease(1, "own"), lease(2, "other"), lease(2, "b", queue="b")), queues=lab)
    assert names(chosen(state, waiting(2, 9, "mine", priority=9), {"b": 0.0, "other": 9.0})) == ["own"]


def test_the_search_for_victims_is_bounded_and_still_preempts_none_in_vain(monkeypatch):
    monkeypatch.setattr(victims, "_MAX_TRIED_SETS", 3)
    held = tuple(lease(1 + number % 3, f"u{number}", seconds=None) for number in range(12))
    total = sum(one.request.gpus for one in held)
    mine = waiting(total - 2, 99, "mine", priority=5)
    found = chosen(LedgerState(held, queues=one_queue(total, **OWN)), mine, {f"u{n}": float(n) for n in range(12)})
    assert isinstance(found, VictimSelection)
    gone = sum(one.request.gpus for one in found.leases)
    assert gone >= total - 2
    assert all(gone - one.request.gpus < total - 2 for one in found.leases)


def test_an_unknown_loss_counts_as_the_whole_time_held():
    state = LedgerState((lease(4, "a"),), queues=one_queue(4, **OWN))
    found = select_victims(state, HIGH, lambda _: {}, LATER)
    assert isinstance(found, VictimSelection)
    assert found.gpu_seconds_lost == 4 * 3600


def test_leases_are_not_preempted_without_queues():
    assert why(chosen(LedgerState(FOUR, queues=None), HIGH)) == "there are no queues to go by"
    assert why(chosen(LedgerState(FOUR, queues=one_queue(**OWN)), replace(HIGH, request=ask(4, queue="none")))) == (
        "there are no queues to go by"
    )


def test_victims_make_room_on_one_node_although_others_would_lose_less():
    nodes = [{"name": name, "gpu_type": "A100", "gpus": 8} for name in ("n1", "n2")]
    rules = Queues.model_validate(
        {"queues": [{"name": "research", "gpus": {"A100": 16}, "preempts_lower_priority": True}], "nodes": nodes}
    )
    held = tuple(
        replace(lease(4, name), nodes=(node,)) for name, node in (("a", "n1"), ("b", "n1"), ("c", "n2"), ("d", "n2"))
    )
    mine = waiting(8, 9, "mine", priority=5)
    assert names(chosen(LedgerState(held, queues=rules), mine, {"a": 1.0, "b": 9.0, "c": 2.0, "d": 7.0})) == ["c", "d"]
    assert names(chosen(LedgerState(held, queues=rules), mine, {"a": 1.0, "b": 5.0, "c": 2.0, "d": 7.0})) == ["a", "b"]


def test_only_those_of_the_wanted_type_go():
    rules = Queues.model_validate(
        {"queues": [{"name": "research", "gpus": {"A100": 4, "T4": 4}, "preempts_lower_priority": True}]}
    )
    held = (lease(4, "a"), lease(4, "t", gpu_type="T4", pool="T4"))
    assert names(chosen(LedgerState(held, queues=rules), HIGH, {"a": 9.0, "t": 0.0})) == ["a"]
    untyped = waiting(4, 9, "any", priority=5, gpu_type=None)
    assert names(chosen(LedgerState(held, queues=rules), untyped, {"a": 9.0, "t": 0.0})) == ["t"]


def test_a_gang_larger_than_what_is_usually_weighed_has_as_many_go_as_it_takes():
    count = victims._MAX_WEIGHED_CANDIDATES + 40
    held = tuple(lease(1, f"u{number:03}") for number in range(count + 8))
    mine = waiting(count, 999, "mine", priority=5)
    found = chosen(LedgerState(held, queues=one_queue(count + 8, **OWN)), mine)
    assert isinstance(found, VictimSelection)
    assert len(found.leases) == count


def test_gpus_that_a_request_takes_back_for_its_queue_go_to_no_earlier_one_that_would_borrow_them():
    rules = Queues.model_validate(
        {
            "queues": [
                {"name": "a", "gpus": {"A100": 2}, "cohort": "lab", "reclaims": True},
                {"name": "c", "gpus": {"A100": 4}, "cohort": "lab"},
            ]
        }
    )
    arena = Arena(rules)
    held = (lease(1, "own", queue="a"), lease(4, "large", queue="c"), lease(1, "borrower", queue="c", priority=1))
    arena.book = LedgerState(held, queues=rules)
    for request in (ask(1, "of-c", queue="c"), ask(4, "earlier", queue="a"), ask(1, "mine", queue="a")):
        assert isinstance(arena.ask(request), Deferred)
    arena.look()
    assert [(mark.mine.request.uid, names(VictimSelection(mark.victims, {}))) for mark in arena.marks] == [
        ("mine", ["large"])
    ]
    arena.leave()
    assert isinstance(arena.ask(ask(4, "earlier", queue="a")), Deferred)
    assert isinstance(arena.ask(ask(1, "mine", queue="a")), Admitted)
