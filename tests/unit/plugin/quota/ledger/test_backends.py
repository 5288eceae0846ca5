"""What every ledger promises beside the laws of `tests/property/test_ledger.py`: places in the line, lapses, checks."""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from support.builders.ledger import ask, deferral, ledger_api, queues
from support.stories.plugin import Clock
from tiphys_plugin.quota.admission_backend import AdmissionBackend
from tiphys_plugin.quota.lease import AdmissionReason, Admitted, PreemptionNotice, hash_node_name
from tiphys_plugin.quota.ledger.backend import MemoryLedger
from tiphys_plugin.quota.ledger.kubernetes_ledger import KubernetesLedger
from tiphys_plugin.quota.ledger.sqlite_ledger import SqliteLedger
from tiphys_plugin.quota.queues import Queues
from tiphys_plugin.quota.scheduler.fair_share import held_gpu_seconds

from tiphys.errors import StoreError

EIGHT = queues(research={"A100": 8})


@pytest.fixture(params=["memory", "sqlite", "kubernetes"])
def ledger(request, tmp_path, clock):
    if request.param == "memory":
        yield MemoryLedger(EIGHT, clock=clock)
        return
    if request.param == "kubernetes":
        yield KubernetesLedger(ledger_api(EIGHT), "tiphys", clock=clock)
        return
    opened = SqliteLedger(tmp_path / "ledger.db", EIGHT, clock=clock)
    yield opened
    opened.close()


def held(ledger: AdmissionBackend) -> list[tuple[str, int]]:
    return [(lease.request.uid, lease.request.gpus) for lease in ledger.snapshot().leases]


def queued(ledger: AdmissionBackend) -> list[str]:
    return [w.request.uid for w in ledger.snapshot().pending]


def test_released_gpus_go_to_the_first_pending_request(ledger, clock):
    first = ledger.request(ask(8, "u1"))
    assert isinstance(first, Admitted)
    ledger.request(ask(8, "u2"))
    ledger.request(ask(8, "u3"))
    ledger.release(first.lease)
    clock.advance(30)
    assert deferral(ledger.request(ask(8, "u3"))) is AdmissionReason.BEHIND_EARLIER_REQUEST
    second = ledger.request(ask(8, "u2"))
    assert isinstance(second, Admitted)
    assert second.waited_seconds == 30
    assert queued(ledger) == ["u3"]


def test_an_elastic_gang_gets_what_fits_and_gives_back_a_member_at_a_time(ledger, clock):
    ledger.request(ask(2, "u1"))
    given = ledger.request(ask(4, "u2", members=2, min_members=2, max_members=4))
    assert isinstance(given, Admitted)
    assert (given.members, held(ledger)) == (3, [("u1", 2), ("u2", 6)])
    assert ledger.request(ask(4, "u2", members=2, min_members=2, max_members=4)).members == 3
    clock.advance(86_400)
    for members, gpus in [(3, 6), (4, 6), (0, 6), (2, 4), (3, 4)]:
        ledger.shrink(given.lease, members)
        assert held(ledger) == [("u1", 2), ("u2", gpus)], "a lease never grows, and never vanishes in this way"
    [used] = ledger.snapshot().history
    assert 0 < used.gpus < 2, "what was given back has been used until now"
    ledger.shrink("unknown", 1)
    assert isinstance(ledger.request(ask(2, "u3")), Admitted)
    ledger.release(given.lease)
    ledger.shrink(given.lease, 1)
    assert held(ledger) == [("u1", 2), ("u3", 2)]


def test_an_elastic_gang_grows_into_idle_gpus_once_in_ten_minutes(ledger, clock):
    other = ledger.request(ask(4, "u1"))
    given = ledger.request(ask(4, "u2", members=2, min_members=2, max_members=4))
    ledger.release(other.lease)
    assert ledger.grow(given.lease, 2) is None, "it has just started"
    clock.advance(600)
    before = ledger.snapshot().leases[0]
    grown = ledger.grow(given.lease, 2)
    assert (grown.request.members, grown.growth.made, held(ledger)) == (4, 4, [("u2", 8)])
    assert ledger.snapshot().leases == (grown,)
    used = held_gpu_seconds(before, clock())
    assert held_gpu_seconds(grown, clock()) == pytest.approx(used), "it pays for no GPUs that it did not hold"
    ledger.shrink(given.lease, 2, (), 2)
    assert held(ledger) == [("u2", 8)], "that was seen before the others were made"
    ledger.shrink(given.lease, 3, (), 4)
    assert held(ledger) == [("u2", 6)]
    assert ledger.grow(given.lease, 4) is None, "it has just grown"
    clock.advance(600)
    assert ledger.grow(given.lease, 4).growth.made == 5, "a lost member is never made again"
    assert ledger.grow("unknown", 4) is None


def test_an_elastic_gang_does_not_grow_while_another_request_waits(ledger, clock):
    given = ledger.request(ask(4, "u2", members=2, min_members=2, max_members=4))
    ledger.shrink(given.lease, 2, (), 4)
    clock.advance(600)
    ledger.request(ask(8, "u3"))
    assert ledger.grow(given.lease, 4) is None
    assert held(ledger) == [("u2", 4)]
    clock.advance(600)
    assert ledger.grow(given.lease, 4) is not None, "that request is no longer repeated"
    assert held(ledger) == [("u2", 8)]


def test_an_elastic_gang_that_waits_holds_back_no_more_than_its_fewest(ledger):
    ledger.request(ask(6, "u1"))
    assert (
        deferral(ledger.request(ask(4, "u2", members=2, min_members=2, max_members=4)))
        is AdmissionReason.WAITING_FOR_QUOTA
    )
    [waits] = ledger.snapshot().pending
    assert (waits.request.gpus, waits.request.members, waits.request.max_members) == (4, 2, 4)


def test_releasing_twice_takes_nothing_from_the_next_holder(ledger):
    first = ledger.request(ask(8, "u1"))
    assert isinstance(first, Admitted)
    ledger.release(first.lease)
    ledger.request(ask(8, "u2"))
    ledger.release(first.lease)
    assert held(ledger) == [("u2", 8)]


def test_a_request_that_stops_asking_blocks_no_other_and_keeps_its_place(ledger, clock):
    first = ledger.request(ask(8, "u1"))
    assert isinstance(first, Admitted)
    ledger.request(ask(8, "dead"))
    ledger.request(ask(2, "u3"))
    ledger.release(first.lease)
    clock.advance(121)
    third = ledger.request(ask(2, "u3"))
    assert isinstance(third, Admitted)
    assert deferral(ledger.request(ask(8, "dead"))) is AdmissionReason.WAITING_FOR_QUOTA
    ledger.request(ask(7, "u4"))
    ledger.release(third.lease)
    assert deferral(ledger.request(ask(7, "u4"))) is AdmissionReason.BEHIND_EARLIER_REQUEST, (
        "the one that came back is ahead again"
    )


def test_time_alone_never_takes_a_lease_away(ledger, clock):
    ledger.request(ask(8, "u1"))
    clock.advance(timedelta(days=30).total_seconds())
    assert ledger.release_dead_leases(lambda lease: False) == []
    assert held(ledger) == [("u1", 8)]


def test_sweep_checks_only_leases_that_are_due_and_releases_the_gone(ledger, clock):
    ledger.request(ask(4, "u2"))
    ledger.release_dead_leases(lambda lease: False)
    ledger.request(ask(4, "u1"))
    asked = []

    def is_gone(lease):
        asked.append(lease.request.uid)
        return True

    assert [lease.request.uid for lease in ledger.release_dead_leases(is_gone)] == ["u1"]
    assert asked == ["u1"]
    assert held(ledger) == [("u2", 4)]


def test_lease_found_alive_is_not_asked_about_at_once_again(ledger, clock):
    ledger.request(ask(4, "u1"))
    ledger.release_dead_leases(lambda lease: False)
    assert ledger.release_dead_leases(lambda lease: pytest.fail("asked again")) == []
    clock.advance(31)
    assert len(ledger.release_dead_leases(lambda lease: True)) == 1


def test_lease_is_not_checked_by_a_second_call_while_a_first_one_checks_it(ledger):
    ledger.request(ask(4, "u1"))
    asked = []

    def is_gone(lease):
        asked.append(lease.request.uid)
        assert ledger.release_dead_leases(is_gone) == []
        return True

    assert len(ledger.release_dead_leases(is_gone)) == 1
    assert asked == ["u1"]


def test_sweep_follows_one_that_failed(ledger):
    ledger.request(ask(4, "u1"))
    with pytest.raises(StoreError):
        ledger.release_dead_leases(lambda _: (_ for _ in ()).throw(StoreError("no answer")))
    assert len(ledger.release_dead_leases(lambda _: True)) == 1


def test_released_workflow_is_checked_at_the_next_sweep(ledger):
    ledger.request(ask(4, "u1"))
    ledger.request(ask(4, "u2"))
    ledger.request(ask(1, "u1", step="other"))
    ledger.release_dead_leases(lambda lease: False)
    ledger.release_workflow("u1")
    assert held(ledger) == [("u1", 4), ("u2", 4)], "marked, not yet free: its pods may still run"
    assert [lease.request.uid for lease in ledger.release_dead_leases(lambda lease: True)] == ["u1"]
    assert queued(ledger) == []


def test_next_try_of_the_same_attempt_takes_over_what_the_one_before_left(ledger):
    left = ledger.request(ask(8, node="u1.fit(0).admit"))
    found = ledger.request(ask(8, node="u1.fit(1).admit"))
    assert isinstance(left, Admitted)
    assert isinstance(found, Admitted)
    assert found.lease == left.lease
    [lease] = ledger.snapshot().leases
    assert lease.request.node_hash == hash_node_name("u1.fit(1).admit")


def test_node_that_holds_a_lease_gets_it_and_not_that_of_another_node_of_its_attempt(ledger):
    own = ledger.request(ask(2, node="u1.fit(0).admit", attempt=1))
    ledger.request(ask(2, node="u1.fit(1).admit", attempt=2))
    again = ledger.request(ask(2, node="u1.fit(0).admit", attempt=2))
    assert isinstance(own, Admitted)
    assert isinstance(again, Admitted)
    assert again.lease == own.lease


def test_items_keep_their_names(ledger):
    for index in (0, 11):
        ledger.request(ask(8, step=f"fit.0123456789ab.{index}", item_index=index))
    snapshot = ledger.snapshot()
    assert [lease.request.step_name for lease in snapshot.leases] == ["fit[0]"]
    assert [one.request.step_name for one in snapshot.pending] == ["fit[11]"]


def test_next_attempt_is_not_given_the_gpus_of_the_one_before(ledger):
    ledger.request(ask(8, node="u1.fit(0).admit"))
    assert deferral(ledger.request(ask(8, node="u1.fit(1).admit", attempt=2))) is AdmissionReason.WAITING_FOR_QUOTA


def test_a_different_step_of_the_workflow_takes_nothing_over(ledger):
    ledger.request(ask(8, step="fit"))
    assert deferral(ledger.request(ask(8, step="tune"))) is AdmissionReason.WAITING_FOR_QUOTA


def test_next_try_keeps_the_place_of_the_one_before(ledger):
    ledger.request(ask(8, "u1"))
    ledger.request(ask(8, "u2", node="u2.fit(0).admit"))
    ledger.request(ask(8, "u3"))
    answer = ledger.request(ask(8, "u2", node="u2.fit(1).admit"))
    assert deferral(answer) is AdmissionReason.WAITING_FOR_QUOTA
    assert answer.position == 1
    assert queued(ledger) == ["u2", "u3"]


def test_lease_is_looked_up_under_the_attempt_that_asked_last(ledger):
    ledger.request(ask(8, attempt=2))
    ledger.request(ask(8, attempt=3))
    assert [lease.request.attempt for lease in ledger.snapshot().leases] == [3]


def test_lease_that_went_to_another_attempt_while_it_was_looked_at_is_kept(ledger):
    ledger.request(ask(8, attempt=2))

    def meanwhile(_) -> bool:
        ledger.request(ask(8, attempt=3))
        return True

    ledger.release_dead_leases(meanwhile)
    assert held(ledger) == [("u1", 8)]


def test_named_leases_are_released_before_their_check_is_due_and_others_are_not_looked_at(ledger, clock):
    ledger.request(ask(2, uid="ü.1"))
    ledger.request(ask(2, uid="ü.2"))
    ledger.release_dead_leases(lambda _: False)
    before = ledger.snapshot().leases
    clock.advance(1)
    assert ledger.release_dead_leases(lambda _: False, before[:1]) == []
    assert ledger.snapshot().leases == before, "a look at named leases moves no check"
    gone = ledger.release_dead_leases(lambda lease: lease.request.uid == "ü.2", before[1:])
    assert [lease.request.uid for lease in gone] == ["ü.2"]
    assert ledger.snapshot().leases == before[:1]


def test_clock_that_is_put_back_does_not_keep_dead_holders(ledger, clock):
    ledger.request(ask(8))
    ledger.release_dead_leases(lambda _: False)
    clock.advance(-3600)
    ledger.release_dead_leases(lambda _: True)
    assert held(ledger) == []


def test_restored_lease_is_counted_whether_or_not_it_fits(ledger):
    ledger.request(ask(8, "u1"))
    ledger.restore("lost", ask(4, "u2"), None)
    ledger.restore("lost", ask(4, "u2"), None)
    assert held(ledger) == [("u1", 8), ("u2", 4)]
    assert ledger.request(ask(4, "u2")) == Admitted(lease="lost", pool="A100")


def test_restored_lease_keeps_the_nodes_of_its_members(ledger):
    gang = ask(8, "u2", members=2)
    ledger.restore("lost", gang, None, ("n1", "n2"))
    assert ledger.snapshot().leases[0].nodes == ("n1", "n2")
    again = ledger.request(gang)
    assert isinstance(again, Admitted)
    assert again.nodes == ("n1", "n2")
    assert ledger.restore("part", ask(8, "u3", members=2), None, ("n3", "n4"), 1) == 4
    assert ledger.snapshot().leases[1].nodes == ("n3",), "the other member has no GPUs, as the quota is used up"


def test_restored_lease_does_not_replace_the_one_that_the_node_holds(ledger):
    first = ledger.request(ask(8, "u1"))
    assert isinstance(first, Admitted)
    ledger.restore("other", ask(8, "u1"), None)
    assert [lease.id for lease in ledger.snapshot().leases] == [first.lease]


PREEMPTING = Queues.model_validate(
    {"queues": [{"name": "research", "gpus": {"A100": 8}, "preempts_lower_priority": True}]}
)
MOVING = Queues.model_validate(
    {
        "queues": [{"name": "research", "gpus": {"A100": 16}, "backfill": "preemptible"}],
        "nodes": [{"name": name, "gpu_type": "A100", "gpus": 8} for name in ("n1", "n2")],
    }
)


@pytest.fixture(params=["memory", "sqlite", "kubernetes"])
def two_services(request, tmp_path, clock):
    """Two services over one ledger whose queue has trainings go."""
    yield from open_two(request.param, PREEMPTING, tmp_path, clock)


@pytest.fixture(params=["memory", "sqlite", "kubernetes"])
def two_moving_services(request, tmp_path, clock):
    """Two services over one ledger whose queue moves trainings between two nodes of eight GPUs."""
    yield from open_two(request.param, MOVING, tmp_path, clock)


def open_two(kind: str, rules: Queues, folder: Path, clock: Clock) -> Iterator[list[AdmissionBackend]]:
    if kind == "memory":
        yield [MemoryLedger(rules, clock=clock)] * 2
        return
    if kind == "kubernetes":
        api = ledger_api(rules)
        yield [KubernetesLedger(api, "tiphys", clock=clock) for _ in range(2)]
        return
    opened = [SqliteLedger(folder / "ledger.db", rules, clock=clock) for _ in range(2)]
    yield opened
    for one in opened:
        one.close()


def test_gpus_of_a_victim_are_reserved_by_every_service(two_services):
    here, there = two_services
    lease = here.request(ask(8, "u1"))
    there.request(ask(8, "u2", priority=5))
    assert here.mark_preempted(("u2", "fit"), {lease.lease: 30.0})
    there.release(lease.lease)
    assert deferral(here.request(ask(8, "u3", priority=9))) is AdmissionReason.RESERVED
    assert here.snapshot() == there.snapshot()
    assert isinstance(there.request(ask(8, "u2", priority=5)), Admitted)


def test_a_preemption_is_marked_for_all_services_and_once(two_services, clock):
    here, there = two_services
    lease = here.request(ask(8, "u1"))
    there.request(ask(8, "u2", priority=5))
    graces = {lease.lease: 90.0}
    [marked] = here.mark_preempted(("u2", "fit"), graces)
    assert marked.preemption == PreemptionNotice("u2", "fit", clock(), clock() + timedelta(seconds=90))
    assert there.mark_preempted(("u2", "fit"), graces) == ()
    assert [one.preemption for one in there.snapshot().leases] == [marked.preemption]
    there.release_dead_leases(lambda _: False)
    assert deferral(here.request(ask(8, "u2", priority=5))) is AdmissionReason.WAITING_FOR_PREEMPTED_CHECKPOINT, (
        "it is still there"
    )
    there.release(lease.lease)
    assert deferral(here.request(ask(8, "u1", attempt=2, node="later", priority=0))) is AdmissionReason.RESERVED
    assert isinstance(here.request(ask(8, "u2", priority=5)), Admitted)


def test_a_move_to_other_nodes_is_marked_for_all_services(two_moving_services, clock):
    here, there = two_moving_services
    leases = {uid: here.request(ask(gpus, uid)) for uid, gpus in (("ends", 6), ("stays", 3), ("moves", 2))}
    here.release(leases["ends"].lease)
    there.request(ask(8, "large"))
    clock.advance(3600)
    there.request(ask(8, "large"))
    [marked] = here.mark_preempted(("large", "fit"), {leases["moves"].lease: 90.0})
    asked = PreemptionNotice("large", "fit", clock(), clock() + timedelta(seconds=90), moves=True)
    assert marked.preemption == asked
    assert [one.preemption for one in there.snapshot().leases] == [None, asked]


def test_members_that_an_elastic_gang_can_spare_are_asked_to_leave_without_it(two_services, clock):
    here, there = two_services
    lease = here.request(ask(2, "u1", members=1, min_members=1, max_members=4))
    there.request(ask(3, "u2", priority=5))
    graces = {f"{lease.lease}/{number}": 30.0 * number for number in (2, 3)}
    [marked] = here.mark_preempted(("u2", "fit"), graces)
    assert marked.preemption == PreemptionNotice("u2", "fit", clock(), clock() + timedelta(seconds=90), keeps=2)
    assert there.mark_preempted(("u2", "fit"), graces) == ()
    assert there.mark_preempted(("u2", "fit"), {lease.lease: 30.0}) == ()
    assert [one.preemption for one in there.snapshot().leases] == [marked.preemption]
    there.shrink(lease.lease, 3)
    assert [one.preemption for one in there.snapshot().leases] == [marked.preemption], "one more has to go"
    here.shrink(lease.lease, 2)
    assert [one.preemption for one in there.snapshot().leases] == [None]
    assert isinstance(here.request(ask(3, "u2", priority=5)), Admitted)


def test_a_selection_from_an_outdated_state_marks_no_lease(two_services):
    here, there = two_services
    lease = here.request(ask(8, "u1"))
    there.request(ask(8, "u2", priority=5))
    there.release(lease.lease)
    again = there.request(ask(8, "u3", priority=5))
    assert deferral(again) is AdmissionReason.BEHIND_EARLIER_REQUEST
    assert isinstance(there.request(ask(8, "u2", priority=5)), Admitted)
    assert here.mark_preempted(("u2", "fit"), {lease.lease: 30.0}) == ()
    assert all(one.preemption is None for one in here.snapshot().leases)
