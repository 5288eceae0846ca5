"""Preemption with a hole in it is caught, and without one it is not.

The first part plants bugs into who is chosen and marked, and searches by a
seeded walk; the second into the handshake, which is played once.
"""

import random
from collections.abc import Callable

import pytest
from support.ledger import ask
from support.preempting import Arena
from support.preemption_oracle import come_to_rest, examine
from support.world import World, fit, gpus, outputs, phase, world
from tiphys_plugin import DirectoryCluster, Queues
from tiphys_plugin.eviction import loop
from tiphys_plugin.eviction.loop import PreemptionLoop
from tiphys_plugin.operations import end_attempt
from tiphys_plugin.quota.ledger import transitions
from tiphys_plugin.quota.preemption import rights
from tiphys_plugin.quota.preemption import victims as choice
from tiphys_plugin.quota.preemption.rights import PreemptionPolicy
from tiphys_plugin.quota.preemption.victims import PreemptionCase, VictimSelection
from tiphys_plugin.quota.scheduler import snapshot
from tiphys_plugin.runtime.context import SingleStore

SEEDS = range(20_261_122, 20_261_150)
Plant = Callable[..., None]


def rules(source: random.Random) -> Queues:
    queues = [
        {
            "name": name,
            "gpus": {"A100": source.choice([2, 4, 4, 6])},
            "cohort": "lab" if name != "d" else "other",
            "preempts_lower_priority": source.random() < 0.7,
            "reclaims": source.random() < 0.7,
            "min_runtime_seconds": source.choice([0, 0, 8]),
        }
        for name in "abcd"
    ]
    return Queues.model_validate({"queues": queues, "inventory": {"A100": {"count": 12}}})


def walk() -> None:
    """Trainings come, others make room, and some choices are marked only after the book has moved on."""
    snapshot._latest_states.clear()  # what a bug has worked out is no truth for the next
    for seed in SEEDS:
        source = random.Random(seed)
        arena = Arena(rules(source), {f"u{number}": source.choice([0.0, 1.0, 9.0]) for number in range(12)})
        stale: dict[str, VictimSelection] = {}
        for number in range(12):
            size, queue, priority = (
                source.choice([1, 1, 2, 3, 4]),
                source.choice("aabbccd"),
                source.choice([0, 0, 1, 5]),
            )
            arena.ask(ask(size, f"u{number}", queue=queue, priority=priority))
            for uid, found in stale.items():
                arena.mark(uid, found.leases)
            if source.random() < 0.5:
                come_to_rest(arena)
            if source.random() < 0.3 and arena.book.leases:
                arena.book = arena.book.release(source.choice(arena.book.leases).id, arena.rules, arena.now)
            chosen = {one.request.uid: arena.choose(one.request.uid) for one in arena.book.pending}
            stale = {uid: found for uid, found in chosen.items() if isinstance(found, VictimSelection)}
        for mark in arena.marks:
            examine(arena, mark)


def test_who_is_chosen_and_marked_keeps_every_law():
    walk()


def one_of_the_same_priority_goes(plant: Plant) -> None:
    may_go = PreemptionPolicy._may_preempt

    def lenient(self, lease, *now):
        equal = self._is_in_same_queue(lease) and lease.request.priority == self._request.priority
        return (equal and self._queue.preempts_lower_priority) or may_go(self, lease, *now)

    plant(PreemptionPolicy, "_may_preempt", lenient)


def one_that_keeps_to_its_quota_goes(plant: Plant) -> None:
    plant(rights, "_find_borrowing_leases", lambda queues, counted, leases: iter([one.id for one in leases]))


def one_of_another_cohort_goes(plant: Plant) -> None:
    may_go = PreemptionPolicy._may_preempt
    plant(
        PreemptionPolicy,
        "_may_preempt",
        lambda self, lease, *now: may_go(self, lease, *now) or lease.request.queue == "d",
    )


def a_borrower_takes_back(plant: Plant) -> None:
    plant(PreemptionPolicy, "allows", lambda self, victims, pool: True)


def one_that_has_just_started_goes(plant: Plant) -> None:
    plant(rights, "protected_until", lambda queues, lease: lease.granted_at)


def more_go_than_have_to(plant: Plant) -> None:
    cheapest = PreemptionCase.select_cheapest
    plant(PreemptionCase, "select_cheapest", lambda self, leases, cost: cheapest(self, leases, cost) and tuple(leases))
    plant(transitions, "check_victims", lambda *_: frozenset())


def they_go_for_one_that_will_not_start(plant: Plant) -> None:
    plant(PreemptionCase, "starts_without", lambda self, victims: self.fits_without(victims))


def they_go_although_enough_leaves_already(plant: Plant) -> None:
    plant(choice, "_is_preempted_for", lambda lease, request: False)
    plant(choice, "is_expected_to_end", lambda lease, now: False)


def the_book_is_not_asked_again(plant: Plant) -> None:
    plant(transitions, "check_victims", lambda *_: frozenset())


CHOICE = [
    one_of_the_same_priority_goes,
    one_that_keeps_to_its_quota_goes,
    one_of_another_cohort_goes,
    a_borrower_takes_back,
    one_that_has_just_started_goes,
    more_go_than_have_to,
    they_go_for_one_that_will_not_start,
    they_go_although_enough_leaves_already,
    the_book_is_not_asked_again,
]


@pytest.mark.parametrize("bug", CHOICE, ids=lambda bug: bug.__name__)
def test_a_planted_bug_of_the_choice_is_caught(bug, monkeypatch):
    bug(monkeypatch.setattr)
    with pytest.raises(AssertionError):
        walk()


HANDSHAKE_RULES = Queues.model_validate(
    {"queues": [{"name": "research", "gpus": {"A100": 8}, "preempts_lower_priority": True}]}
)


def handshake(here: World) -> None:
    """Two attempts and one look after another; what the ledger holds must always have a pod, or the pod its GPUs."""
    low = here.submit(fit(gpu=gpus(8)), name="low", uid="uid-low")
    high = here.submit(fit(gpu=gpus(8, priority=5)), name="high", uid="uid-high")
    assert outputs(low.admit("fit", 0))["run"] == "true"
    low.pod("fit", 1, grace_seconds=60.0)
    assert phase(high.admit("fit", 0)) == "Pending"
    jobs = [PreemptionLoop(here.ledger, here.cluster, SingleStore(here.store), clock=here.clock) for _ in range(2)]
    for one in (*jobs, *jobs):
        one.run_once()
        here.clock.advance(1)
    [pod] = here.cluster.workflow_pods(low.uid)
    assert pod.ending, "it was marked and not asked"
    assert phase(low.end_try("fit", 0, exit_code="75")) == "Pending"
    assert phase(high.admit("fit", 0)) == "Pending", "its GPUs were given away while its pod is there"
    low.pod("fit", 1, phase="Failed", exit_code=75, reason="Deleted")
    assert phase(low.end_try("fit", 0, exit_code="75")) == "Error"
    assert outputs(high.admit("fit", 0)).get("run") == "true", "they did not come back"
    [end] = [
        attempt for attempt in here.store.list("control/runs/low/attempts/fit/") if attempt.key.endswith(".end.json")
    ]
    assert b'"preempted"' in here.store.read(end.key), "its end does not say that it was asked"


def test_the_handshake_keeps_every_law(tmp_path):
    handshake(world(tmp_path, HANDSHAKE_RULES))


def it_is_marked_and_not_asked(plant: Plant) -> None:
    plant(loop, "evict_lease", lambda cluster, lease: 0)


def its_gpus_come_back_when_it_is_asked(plant: Plant) -> None:
    end = DirectoryCluster.delete_pod

    def at_once(self, pod):
        end(self, pod)
        self.write_pod(pod.model_copy(update={"phase": "Failed"}))

    plant(DirectoryCluster, "delete_pod", at_once)


def conclude_does_not_wait_for_the_pods(plant: Plant) -> None:
    plant(end_attempt, "await_pods", lambda call, attempt, found: None)


def the_mark_is_not_kept(plant: Plant) -> None:
    plant(loop, "select_victims", lambda *_: choice.NoVictims(""))


def its_end_is_as_any_other(plant: Plant) -> None:
    plant(end_attempt, "build_preemption_record", lambda call, attempt: None)


HANDSHAKE = [
    it_is_marked_and_not_asked,
    its_gpus_come_back_when_it_is_asked,
    conclude_does_not_wait_for_the_pods,
    the_mark_is_not_kept,
    its_end_is_as_any_other,
]


@pytest.mark.parametrize("bug", HANDSHAKE, ids=lambda bug: bug.__name__)
def test_a_planted_bug_of_the_handshake_is_caught(bug, monkeypatch, tmp_path):
    bug(monkeypatch.setattr)
    with pytest.raises(AssertionError):
        handshake(world(tmp_path, HANDSHAKE_RULES))
