"""Trainings that move to other nodes, so that a larger request finds room on one.

| a smaller training of the same queue, and enough idle GPUs on several nodes | it moves |
|------------------------------------------------------------------------------|----------|
| it has had its GPUs for an hour, and three times `min_runtime_seconds`       | yes      |
| it has had them for less, or the request has not waited for twenty minutes   | no       |
| its priority is higher, or it is as large as the request                     | no       |
| it finds no room elsewhere, or others that wait go there first               | no       |
| together those that would move hold as many GPUs as the request              | no       |
| it would lose more than a tenth of what it has done since its start          | no       |
| it avoids nodes after a failure, or its declared end is near                 | no       |
| another may be asked to yield in some minutes                                | no       |
| its queue would borrow                                                       | no       |
| `consolidates: false`, or another backfill than preemptible                  | no       |
"""

import random
from dataclasses import replace
from datetime import timedelta

import pytest
from support.builders.ledger import NOW, ask, lease, waiting
from support.checks.preemption_laws import come_to_rest
from support.checks.preemption_rounds import Arena
from support.stories.plugin import commit, fit, gpus, outputs, phase, said, world
from tiphys_plugin.eviction.cost import CACHE_DURATION
from tiphys_plugin.eviction.loop import PreemptionLoop
from tiphys_plugin.quota.lease import Admitted, Deferred, Lease, LedgerState, PreemptionNotice
from tiphys_plugin.quota.ledger.transitions import admit_or_queue, mark_victims, release
from tiphys_plugin.quota.preemption import victims as choice
from tiphys_plugin.quota.preemption.victims import NoVictims, VictimSelection, check_victims, select_victims
from tiphys_plugin.quota.queues import Queues
from tiphys_plugin.quota.scheduler.cache import FORGET_AFTER, SchedulerCache
from tiphys_plugin.quota.scheduler.capacity import Capacity
from tiphys_plugin.quota.scheduler.decide import decide_pending
from tiphys_plugin.quota.simulation.jobs import PreemptionCosts, TraceJob
from tiphys_plugin.quota.simulation.replay import replay_jobs
from tiphys_plugin.runtime.context import SingleStore

HOUR = timedelta(hours=1)
ENOUGH = timedelta(minutes=20)
NEARLY = ENOUGH - timedelta(seconds=1)


def rules(nodes: int = 2, **changes) -> Queues:
    queue = {"name": "research", "gpus": {"A100": 8 * nodes}, "backfill": "preemptible"}
    fleet = [{"name": f"n{number}", "gpu_type": "A100", "gpus": 8} for number in range(nodes)]
    return Queues.model_validate({"queues": [{**queue, **changes}], "nodes": fleet})


def on(node: str, gpus: int, uid: str, held: timedelta = HOUR, **changes) -> Lease:
    """A training that asked long before everything that waits here, so nothing is behind anything."""
    one = lease(gpus, uid, first_start=0.0, **changes)
    return replace(one, granted_at=NOW - held, nodes=(node,) * one.request.members)


def waits(gpus: int, since: timedelta = ENOUGH, **changes):
    return replace(waiting(gpus, 9, "large", **changes), since=NOW - since)


def select(queues: Queues, leases, mine):
    state = LedgerState(tuple(leases), queues=queues)
    return select_victims(state, mine, lambda some: {one.id: 1.0 for one in some}, NOW)


def moved(queues: Queues, leases, mine) -> list[str]:
    found = select(queues, leases, mine)
    return [one.request.uid for one in found.leases] if isinstance(found, VictimSelection) else []


def test_the_smaller_one_of_two_nodes_moves_to_the_other():
    leases = [on("n0", 3, "three"), on("n1", 2, "two")]
    mine = waits(8)
    assert moved(rules(), leases, mine) == ["two"]
    after = decide_pending(LedgerState((leases[0],), queues=rules()), mine, NOW)
    assert isinstance(after, Admitted)
    assert after.nodes == ("n1",)


@pytest.mark.parametrize(
    ("queues", "leases", "mine"),
    [
        (rules(consolidates=False), [on("n0", 2, "two"), on("n1", 3, "three")], waits(8)),
        (rules(backfill=None), [on("n0", 2, "two"), on("n1", 3, "three")], waits(8)),
        (rules(), [on("n0", 2, "two", HOUR - timedelta(seconds=1)), on("n1", 8, "eight")], waits(8)),
        (rules(min_runtime_seconds=1201), [on("n0", 2, "two"), on("n1", 3, "three")], waits(8)),
        (rules(), [on("n0", 2, "two"), on("n1", 3, "three")], waits(8, NEARLY)),
        (rules(), [on("n0", 2, "two", priority=1), on("n1", 3, "three", priority=1)], waits(8)),
        (rules(), [on("n0", 4, "four"), on("n1", 4, "another")], waits(4)),
        (rules(), [on("n0", 6, "six"), on("n1", 6, "another")], waits(4)),
        (rules(), [on("n0", 6, "six"), on("n1", 3, "three")], waits(8)),
        (rules(3), [on("n0", 3, "a"), on("n0", 3, "b"), on("n1", 5, "c"), on("n2", 4, "d")], waits(6)),
        (rules(), [on("n0", 2, "two", avoided_nodes=("n1",)), on("n1", 3, "three", avoided_nodes=("n0",))], waits(8)),
        (rules(), [on("n0", 2, "two", spot="avoided"), on("n1", 3, "three", spot="avoided")], waits(8)),
        (rules(), [on("n0", 2, "two", seconds=4700), on("n1", 3, "three", seconds=4700)], waits(8)),
        (
            rules(),
            [replace(on("n0", 4, "young", timedelta(minutes=19)), request=ask(4, "young")), on("n1", 2, "old")],
            waits(8, timedelta(hours=2)),
        ),
    ],
    ids=[
        "switched off",
        "bounded backfill",
        "too young",
        "too young by its queue",
        "no patience",
        "higher priority",
        "fits as it is",
        "not enough idle GPUs",
        "no room elsewhere",
        "as many GPUs as the request",
        "avoids a node",
        "avoids spot nodes",
        "ends soon",
        "another yields soon",
    ],
)
def test_a_lease_is_not_moved_without_room_time_or_permission(queues, leases, mine):
    assert moved(queues, leases, mine) == []


@pytest.mark.parametrize("backfill", ["bounded", "strict", None])
def test_a_queue_with_another_backfill_cannot_move_trainings(backfill):
    with pytest.raises(ValueError, match="consolidates, which needs `backfill: preemptible`"):
        rules(backfill=backfill, consolidates=True)
    assert not rules(backfill=backfill, consolidates=False).queues[0].moves_trainings


def test_trainings_of_another_queue_stay():
    document = rules().model_dump(exclude_unset=True)
    research = {**document["queues"][0], "cohort": "lab"}
    other = {"name": "other", "gpus": {"A100": 0}, "cohort": "lab"}
    queues = Queues.model_validate({**document, "queues": [research, other]})
    assert moved(queues, [on("n0", 3, "three", queue="other"), on("n1", 2, "two", queue="other")], waits(8)) == []


def test_the_fewest_gpus_move_and_no_needless_training():
    leases = [on("n0", 2, "a"), on("n0", 2, "b"), on("n1", 1, "c"), on("n1", 4, "d"), on("n2", 6, "e")]
    assert moved(rules(3), leases, waits(8)) == ["a", "b"]
    assert moved(rules(3), leases, waits(5)) == ["a"] or moved(rules(3), leases, waits(5)) == ["b"]


def test_a_gang_gets_several_nodes():
    leases = [on(f"n{number}", 2, f"u{number}") for number in range(4)]
    gang = waits(16, members=2)
    chosen = moved(rules(4), leases, gang)
    assert len(chosen) == 2
    kept = tuple(one for one in leases if one.request.uid not in chosen)
    assert isinstance(decide_pending(LedgerState(kept, queues=rules(4)), gang, NOW), Admitted)


def test_a_lease_that_the_rules_preempt_needs_no_room_elsewhere():
    """Of two that stand in the way, one is behind the request and ends, and the other moves."""
    behind = replace(on("n0", 4, "behind"), request=ask(4, "behind"), granted_at=NOW - timedelta(minutes=21))
    leases = [behind, on("n0", 2, "moves"), on("n1", 6, "stays")]
    mine = waits(8, timedelta(hours=2))
    assert sorted(moved(rules(), leases, mine)) == ["behind", "moves"]
    graces = {one.id: 30.0 for one in leases[:2]}
    _, marked = mark_victims(
        LedgerState(tuple(leases), (mine,), queues=rules()),
        mine.request.workflow_step,
        graces,
        NOW,
        SchedulerCache(),
    )
    assert {one.request.uid: one.preemption and one.preemption.moves for one in marked} == {
        "behind": False,
        "moves": True,
    }


def test_optional_members_of_a_gang_do_not_move_one_by_one():
    """Without the last two of its four members there would be room on n0, and for the two on n1."""
    elastic = on("n0", 4, "elastic", members=4, min_members=2, max_members=4)
    queues, mine = rules(), waits(6)
    assert moved(queues, [elastic, on("n1", 5, "five", priority=1)], mine) == []
    fixed = [on("n0", 2, "stays", priority=1), on("n0", 2, "two"), on("n1", 5, "five", priority=1)]
    assert moved(queues, fixed, mine) == ["two"]


def test_a_training_that_would_lose_much_stays_and_another_moves():
    leases, mine = [on("n0", 3, "three"), on("n1", 2, "two")], waits(8)
    held = HOUR.total_seconds()

    def chosen(lost_of_two: float) -> list[str]:
        losses = {"lease-three": 3.0, "lease-two": lost_of_two}
        found = select_victims(LedgerState(tuple(leases), queues=rules()), mine, lambda _: losses, NOW)
        return [one.request.uid for one in found.leases] if isinstance(found, VictimSelection) else []

    assert chosen(0.1 * 2 * held) == ["two"]
    assert chosen(0.1 * 2 * held + 1) == ["three"]


def test_a_request_that_goes_first_takes_the_room_and_nothing_moves():
    """It has not asked since GPUs became idle, and would leave the one that moved without any."""
    leases, mine = [on("n0", 3, "three"), on("n1", 2, "two")], waits(8)
    other = replace(waiting(5, 1, "other"), since=NOW - HOUR)
    state = LedgerState(tuple(leases), (other,), queues=rules())
    assert isinstance(select_victims(state, mine, lambda some: {one.id: 1.0 for one in some}, NOW), NoVictims)


def test_a_queue_that_would_borrow_moves_nothing():
    """Of trainings that borrow, the one that started last is reclaimed first, and a move is a start."""
    document = rules().model_dump(exclude_unset=True)
    mine = {**document["queues"][0], "cohort": "lab"}
    leases = [on("n0", 3, "three"), on("n1", 2, "two")]
    for quota, chosen in ((13, ["two"]), (12, [])):
        lender = {"name": "lender", "gpus": {"A100": 16 - quota}, "cohort": "lab"}
        queues = Queues.model_validate({**document, "queues": [{**mine, "gpus": {"A100": quota}}, lender]})
        assert moved(queues, leases, waits(8)) == chosen, quota


def test_large_requests_are_not_promised_the_same_room():
    """24 GPUs: 2 on n0, 2 on n1 and 6 on n2, which has room for one of the small ones only."""
    leases = (on("n0", 2, "v0"), on("n1", 2, "v1"), on("n2", 6, "v2"))
    first, second = (replace(waits(8), arrival=number, request=ask(8, f"large-{number}")) for number in (7, 8))
    state, marked = mark(LedgerState(leases, (first, second), queues=rules(3)), first)
    assert [one.request.uid for one in marked] == ["v0"]
    again, none = mark(state, second)
    assert (again, none) == (state, ())


def mark(book: LedgerState, mine):
    state = replace(book, pending=tuple(one for one in book.pending if one is not mine))
    found = select_victims(state, mine, lambda some: {one.id: 1.0 for one in some}, NOW)
    stale = tuple(one for one in book.leases if one.id == "lease-v1")
    chosen = found.leases if isinstance(found, VictimSelection) else stale
    graces = {one.id: 30.0 for one in chosen}
    return mark_victims(book, mine.request.workflow_step, graces, NOW, SchedulerCache())


def test_room_is_kept_for_a_training_that_moves_until_it_asks():
    """A newcomer asks while it saves, and again between its end and its next attempt."""
    queues = rules()
    arena = Arena(queues)
    arena.book = LedgerState((on("n0", 3, "stays"), on("n1", 2, "moves")), queues=queues)
    arena.ask(ask(8, "large"))
    arena.now += ENOUGH
    arena.ask(ask(8, "large"))
    found = arena.choose("large")
    assert [one.request.uid for one in found.leases] == ["moves"]
    arena.mark("large", found.leases)
    assert isinstance(arena.ask(ask(5, "newcomer")), Deferred)
    arena.book = release(arena.book, "lease-moves", arena.now, arena.cache)
    assert isinstance(arena.ask(ask(5, "newcomer")), Deferred)
    assert isinstance(arena.ask(ask(8, "large")), Admitted)
    assert isinstance(arena.ask(ask(5, "newcomer")), Deferred), "the room of the one that moves is gone"
    back = arena.ask(ask(2, "moves", attempt=2, first_start=0.0))
    assert isinstance(back, Admitted)
    assert back.nodes == ("n0",)


def test_room_is_not_kept_for_ever_for_a_training_that_does_not_come_back():
    moving = on("n1", 2, "moves")
    notice = PreemptionNotice("large", "fit", NOW, NOW, moves=True)
    book = release(LedgerState((replace(moving, preemption=notice),), queues=rules()), moving.id, NOW, SchedulerCache())
    [kept] = book.pending
    assert (kept.request.attempt, kept.promised_at) == (2, NOW)
    later = NOW + FORGET_AFTER + timedelta(seconds=1)
    _, answer = admit_or_queue(book, ask(16, "all", members=2), later, "lease", SchedulerCache())
    assert isinstance(answer, Admitted)


def test_a_mark_is_refused_once_the_room_elsewhere_has_gone():
    leases, mine = [on("n0", 3, "three"), on("n1", 2, "two")], waits(8)
    chosen = select(rules(), leases, mine).leases
    graces = {one.id: 30.0 for one in chosen}
    step = mine.request.workflow_step
    before, cache = LedgerState(tuple(leases), (mine,), queues=rules()), SchedulerCache()
    after, marked = mark_victims(before, step, graces, NOW, cache)
    assert [one.request.uid for one in marked] == ["two"]
    assert [one.preemption is not None and one.preemption.moves for one in after.leases] == [False, True]

    full = replace(before, leases=(*leases, on("n0", 4, "came", timedelta(seconds=1))))
    assert mark_victims(full, step, graces, NOW, cache) == (full, ())
    said = check_victims(replace(full, pending=()), mine, chosen, NOW, cache)
    assert said == NoVictims("a training that would move finds no room on other nodes")


SEEDS = range(20_261_124, 20_261_324)


def scattered(source: random.Random, nodes: int) -> list[Lease]:
    leases = []
    for number in range(nodes):
        room = 8
        while (gpus := source.choice([1, 1, 2, 3, 4])) <= room and source.random() < 0.7:
            room -= gpus
            held = timedelta(minutes=source.choice([10, 70, 300]))
            leases.append(on(f"n{number}", gpus, f"u{number}-{room}", held, priority=source.choice([0, 0, 0, 1])))
    return leases


def search() -> int:
    """How many random clusters had trainings moved; each choice keeps the laws, counted without the code under test."""
    moves = 0
    for seed in SEEDS:
        source = random.Random(seed)
        nodes = source.choice([3, 5, 8])
        queues, leases = rules(nodes), scattered(source, nodes)
        mine = waits(source.choice([4, 6, 8, 8]))
        found = select(queues, leases, mine)
        if isinstance(found, NoVictims):
            continue
        moves += 1
        chosen = {one.id for one in found.leases}
        assert all(NOW - one.granted_at >= HOUR and one.request.priority == 0 for one in found.leases), seed
        assert sum(one.request.gpus for one in found.leases) < mine.request.gpus, seed
        kept = [one for one in leases if one.id not in chosen]
        started = decide_pending(LedgerState(tuple(kept), queues=queues), mine, NOW)
        assert isinstance(started, Admitted), seed
        capacity = Capacity(queues, (*kept, replace(on("", mine.request.gpus, "large"), nodes=started.nodes)))
        for one in sorted(found.leases, key=lambda one: -one.request.gpus):
            pools = capacity.find_fitting_pools(queues.queues[0], one.request)
            assert pools, (seed, "one that moved has lost its place")
            capacity.add(capacity.held_gpus_if_placed(one.request, pools[0]))
    return moves


def test_a_moved_training_starts_again_at_once():
    assert search() >= 10


def test_a_choice_that_forgets_those_that_move_is_caught(monkeypatch):
    monkeypatch.setattr(choice.PreemptionCase, "start_elsewhere", lambda *_: True)
    with pytest.raises(AssertionError):
        search()


def test_moves_come_to_an_end_and_cost_no_training_its_gpus():
    """Nothing ends by itself here. Whoever moved holds GPUs again, and hours later nothing moves any more."""
    assert sum(map(play_moves, SEEDS[:40])) >= 5


def play_moves(seed: int) -> bool:
    """Whether anything moved."""
    source = random.Random(seed)
    arena = Arena(rules(4))
    for number in range(12):
        arena.ask(ask(source.choice([1, 1, 2, 4]), f"u{number}"))
    for one in source.sample(arena.book.leases, len(arena.book.leases) // 2):
        arena.book = release(arena.book, one.id, arena.now, arena.cache)
    before = {one.request.uid for one in arena.book.leases}
    arena.now += 2 * HOUR
    arena.ask(ask(8, "large"))
    arena.now += ENOUGH
    come_to_rest(arena)
    held = {one.request.uid for one in arena.book.leases}
    assert before <= held, (seed, "one that moved has lost its place")
    marks = len(arena.marks)
    arena.now += 2 * HOUR
    come_to_rest(arena)
    assert len(arena.marks) == marks, seed
    assert not marks or "large" in held, seed
    return bool(marks)


def test_a_replay_uses_the_idle_gpus_of_several_nodes():
    """Trainings of 6 and 2 GPUs fill four nodes; those of 6 end, and one for a whole node comes."""
    jobs = [
        TraceJob(f"{size}-{number}", 0, hours * 3600.0, size, "research", members=1)
        for size, hours in ((6, 2), (2, 40))
        for number in range(4)
    ]
    jobs.append(TraceJob("large", 7200, 3600.0, 8, "research"))
    costs = PreemptionCosts(save_seconds=30, restart_seconds=300)
    ends = {}
    for consolidates in (True, False):
        done = replay_jobs(rules(4, consolidates=consolidates), jobs, costs=costs)
        ends[consolidates] = {run.job.name: run for run in done.runs}
    large = ends[True]["large"]
    assert large.started_seconds == pytest.approx(7200 + ENOUGH.total_seconds() + 30, abs=1)
    assert ends[False]["large"].started_seconds == 40 * 3600.0
    costs_seconds = [ends[True][f"2-{number}"].ended_seconds - 40 * 3600.0 for number in range(4)]
    assert sorted(costs_seconds) == pytest.approx([0, 0, 0, 330], abs=1)


def test_a_training_that_moves_saves_and_starts_again_on_another_node(tmp_path):
    """From the request of each attempt to the nodes that its pods must use."""
    here = world(tmp_path, rules())
    flows = {name: here.submit(fit(gpu=gpus(size)), name=name, uid=f"uid-{name}") for name, size in SIZES.items()}

    def admit(name: str, attempt: int) -> str:
        return outputs(flows[name].admit("fit", attempt - 1))["run"]

    def nodes() -> dict[str, tuple[str, ...]]:
        return {one.request.run: one.nodes for one in here.ledger.snapshot().leases}

    for name in ("ends", "stays", "moves"):
        assert admit(name, 1) == "true"
        flows[name].pod("fit", 1, grace_seconds=60.0)
    assert nodes() == {"ends": ("n0",), "stays": ("n1",), "moves": ("n0",)}
    flows["ends"].pod("fit", 1, phase="Succeeded", exit_code=0)
    flows["ends"].conclude("fit", 0)
    assert phase(flows["large"].admit("fit", 0)) == "Pending"
    loop = PreemptionLoop(here.ledger, here.cluster, SingleStore(here.store), clock=here.clock)
    loop.run_once()
    assert not any(one.preemption for one in here.ledger.snapshot().leases), "it has only just started"

    here.clock.advance(HOUR.total_seconds())
    assert phase(flows["large"].admit("fit", 0)) == "Pending"
    loop.run_once()
    assert not any(one.preemption for one in here.ledger.snapshot().leases), "it has never saved"

    commit(here.store, "moves/fit", 1, 7)
    here.clock.advance(CACHE_DURATION.total_seconds() + 1)
    assert phase(flows["large"].admit("fit", 0)) == "Pending"
    loop.run_once()
    assert [one.request.run for one in here.ledger.snapshot().leases if one.preemption] == ["moves"]
    assert [pod.ending for pod in here.cluster.workflow_pods("uid-moves")] == [True]
    flows["moves"].pod("fit", 1, phase="Failed", exit_code=75, reason="Deleted")
    verdict = flows["moves"].end_try("fit", 0, exit_code="75")
    assert phase(verdict) == "Error"
    assert "to save and move to other nodes for large/fit; " in said(verdict)
    assert admit("moves", 2) == "true", "it has lost its place"
    assert admit("large", 1) == "true"
    assert nodes() == {"stays": ("n1",), "moves": ("n1",), "large": ("n0",)}


SIZES = {"ends": 6, "stays": 3, "moves": 2, "large": 8}
