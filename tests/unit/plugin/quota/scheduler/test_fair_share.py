"""What queues have used lately: a mean that forgets, and needs no samples."""

from dataclasses import replace
from datetime import timedelta

import pytest
from support.builders.ledger import NOW, cohort, lease
from tiphys_plugin.quota.lease import EndedUsage, LedgerState
from tiphys_plugin.quota.scheduler.capacity import Capacity
from tiphys_plugin.quota.scheduler.fair_share import DecayedUsage, add_ended_usage, compute_fair_share

RULES = cohort(a={"gpus": {"A100": 8, "T4": 4}}, b={"gpus": {"A100": 8}, "weight": 2})
DAY = timedelta(hours=24)
A, B = RULES.queues


def share(queue, leases=(), history=(), at=NOW, rules=RULES) -> float:
    return compute_fair_share(queue, Capacity(rules, leases), DecayedUsage(rules, leases, history).usage_at(at))


def test_held_gpus_count_at_once():
    assert share(A, (lease(4, queue="a"),)) == pytest.approx(4 / 16)
    assert share(B, (lease(4, queue="b"),)) == pytest.approx(4 / 16 / 2)
    assert share(A) == 0


def test_the_type_that_weighs_most_counts():
    held = (lease(4, "x", queue="a"), lease(3, "y", queue="a", gpu_type="T4", pool="T4"))
    assert share(A, held) == pytest.approx(3 / 4)


def test_a_half_life_of_holding_is_half_of_it():
    held = (lease(8, queue="a"),)
    assert share(A, held, at=NOW + DAY) == pytest.approx((8 + 4) / 16)
    assert share(A, held, at=NOW + 20 * DAY) == pytest.approx((8 + 8) / 16, abs=1e-4)


def test_past_usage_is_halved_in_each_half_life():
    past = (EndedUsage("a", "A100", 8.0, NOW),)
    assert share(A, (), past) == pytest.approx(8 / 16)
    assert share(A, (), past, NOW + DAY) == pytest.approx(4 / 16)
    assert share(A, (), past, NOW - DAY) == pytest.approx(8 / 16), "the clock was put back"


def test_the_end_of_a_lease_takes_away_what_it_held_and_nothing_of_what_it_has_used():
    held = lease(8, queue="a")
    then = NOW + DAY
    past = add_ended_usage(LedgerState(queues=RULES), [held], then)
    assert past == (EndedUsage("a", "A100", 4.0, then),)
    assert share(A, (), past, then) == pytest.approx(share(A, (held,), (), then) - 8 / 16)


def test_ends_add_up_in_any_grouping():
    first, second = lease(2, "x", queue="a"), lease(4, "y", queue="a")
    later = NOW + timedelta(hours=7)
    state = LedgerState(queues=RULES)
    together = add_ended_usage(state, [first, second], later)
    state = replace(state, history=add_ended_usage(state, [first], later))
    one_by_one = add_ended_usage(state, [second], later)
    assert [one.gpus for one in together] == pytest.approx([one.gpus for one in one_by_one], abs=1e-3)


def test_usage_that_is_carried_on_is_that_which_would_be_counted_anew():
    stays, goes, comes = (lease(gpus, uid, queue="a") for gpus, uid in ((1, "x"), (2, "y"), (4, "z")))
    comes = replace(comes, granted_at=NOW + timedelta(hours=7))
    carried = DecayedUsage(RULES, (stays, goes), ()).with_changes((comes,), (goes,), ())
    anew = DecayedUsage(RULES, (stays, comes), ())
    for at in (NOW + timedelta(hours=7), NOW + DAY):
        assert carried.usage_at(at) == pytest.approx(anew.usage_at(at))


def test_nearly_forgotten_usage_takes_no_room():
    state = LedgerState(history=(EndedUsage("a", "A100", 8.0, NOW),), queues=RULES)
    assert add_ended_usage(state, [], NOW + 20 * DAY) == ()


def test_without_queues_nothing_is_compared():
    assert add_ended_usage(LedgerState(), [lease(8)], NOW + DAY) == ()
