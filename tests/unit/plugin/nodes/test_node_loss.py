"""Which nodes are lost, and which trainings end with them.

Nodes:

| what happens                                              | which nodes are lost                        |
|-----------------------------------------------------------|---------------------------------------------|
| a node renews no more                                     | it, 50 s after its last renewal was seen    |
| a kubelet restarts for 30 s                               | none                                        |
| the clock of a node is wrong, or jumps                    | none                                        |
| the API server answers nobody for ten minutes             | none                                        |
| it answers and takes no renewals for ten minutes          | none, nor while they come back one by one   |
| the service is paused for ten minutes                     | none that lives                             |
| the service starts after the node has died                | it, after 50 s                              |
| more than half of the nodes fall silent at once           | none for five minutes                       |
| nodes were switched off long ago, or lost one by one      | they do not hide the next one               |
| any of this, at random                                    | none that renews whenever it can            |

Trainings, where a pod is on a lost node:

| attempt        | program      | lost members                | what follows                       |
|----------------|--------------|-----------------------------|------------------------------------|
| single, gang   | silent       | any                         | it ends                            |
| single, gang   | stores       | any                         | nothing: the node is cut off       |
| elastic gang   | any          | others than rank 0, spared  | it loses them and goes on          |
| elastic gang   | silent       | rank 0, or too many         | it ends                            |
| elastic gang   | stores       | rank 0, or too many         | nothing: the node is cut off       |
| has an end     | any          | any                         | its pods go                        |
"""

import random
from collections.abc import Iterable

import pytest
from support.builders.seeds import SEED
from support.stories.plugin_with_gangs import pod
from tiphys_plugin.nodes.node_loss import (
    LOST_SECONDS,
    SILENT_PROGRAM_SECONDS,
    NodeLeases,
    Silence,
    decide_training_loss,
    observe_leases,
)

ROUND = 5.0
NODES = ("a", "b", "c", "d")


class Observer:
    """A service that lists the Leases every five seconds, and kubelets that renew them every ten."""

    def __init__(self, nodes: Iterable[str] = NODES) -> None:
        self.now = 0.0
        self.renewals = dict.fromkeys(nodes, 0)
        self.leases = NodeLeases({})
        self.ever_lost: set[str] = set()

    @property
    def lost(self) -> set[str]:
        return set(self.leases.silent_for(LOST_SECONDS))

    def look(self) -> None:
        self.leases = observe_leases(self.leases, {node: str(at) for node, at in self.renewals.items()}, self.now)
        self.ever_lost |= self.lost

    def pass_time(self, seconds: float, *, without: Iterable[str] = ()) -> None:
        """Kubelets renew and the service looks, but for nodes ``without`` a kubelet."""
        silent = set(without)
        for step in range(round(seconds / ROUND)):
            self.now += ROUND
            for node in self.renewals.keys() - silent if step % 2 else ():
                self.renewals[node] += 1
            self.look()


def test_a_node_that_renews_no_more_is_lost_after_fifty_seconds_and_not_before():
    here = Observer()
    here.pass_time(60)
    here.pass_time(45, without="d")
    assert here.lost == set()
    here.pass_time(5, without="d")
    assert here.lost == {"d"}
    here.pass_time(10)
    assert here.lost == set(), "it has come back"


def test_a_kubelet_that_restarts_for_half_a_minute_loses_nothing():
    here = Observer()
    here.pass_time(60)
    here.pass_time(40, without="d")  # it had just renewed, and renews again ten seconds after it is back
    here.pass_time(60)
    assert here.ever_lost == set()


def test_only_changes_count_whatever_the_clock_of_a_node_says():
    here = Observer()
    for at in (10, -500, 10**9, 3, 2, 1):
        here.renewals["d"] = at
        here.pass_time(45, without="d")
    assert here.ever_lost == set()


def test_an_api_server_that_answers_nobody_loses_nothing():
    here = Observer()
    here.pass_time(60)
    here.now += 600  # no list succeeds, and no renewal
    here.look()
    here.pass_time(60)
    assert here.ever_lost == set()


@pytest.mark.parametrize("seconds", [120, 600])
def test_an_api_server_that_takes_no_renewals_loses_nothing_nor_when_they_come_back_one_by_one(seconds):
    here = Observer()
    here.pass_time(60)
    here.pass_time(30, without=NODES)
    assert here.leases.is_outage
    here.pass_time(seconds, without=NODES)
    for returned in range(1, len(NODES)):
        here.renewals[NODES[returned]] += 1
        here.now += ROUND
        here.look()
    here.pass_time(60)
    assert here.ever_lost == set()
    assert not here.leases.is_outage


def test_a_service_that_was_paused_loses_only_what_it_sees_silent_afterwards():
    here = Observer()
    here.pass_time(60)
    here.now += 600
    for node in "abc":
        here.renewals[node] += 1
    here.look()
    assert here.lost == set(), "d may just be about to renew"
    here.pass_time(60)
    assert here.ever_lost == set()
    here.now += 600
    here.pass_time(40, without="d")
    assert here.lost == set(), "the pause counts as ten seconds"
    here.pass_time(10, without="d")
    assert here.lost == {"d"}


def test_a_service_that_starts_later_finds_the_lost_node_too():
    here = Observer()
    here.pass_time(65, without="d")
    assert here.lost == {"d"}


def test_a_service_that_starts_while_no_renewals_are_taken_loses_nothing_when_they_come_back():
    here = Observer()
    here.pass_time(600, without=NODES)
    here.renewals["a"] += 1
    here.now += ROUND
    here.look()
    here.pass_time(60)
    assert here.ever_lost == set()


def test_of_nodes_that_fall_silent_at_once_most_are_lost_only_after_five_minutes():
    here = Observer()
    here.pass_time(60)
    here.pass_time(280, without="abc")
    assert (here.ever_lost, here.leases.is_outage) == (set(), True)
    here.pass_time(80, without="abc")
    assert (here.lost, here.leases.is_outage) == (set("abc"), False)


def test_half_of_the_nodes_may_be_lost_at_once():
    here = Observer()
    here.pass_time(60)
    here.pass_time(60, without="cd")
    assert here.lost == {"c", "d"}


def test_the_only_node_is_never_lost():
    here = Observer("a")
    here.pass_time(60)
    here.pass_time(600, without="a")
    assert here.ever_lost == set()


def test_nodes_that_were_switched_off_long_ago_do_not_hide_the_next_one():
    here = Observer("abcdefgh")
    here.pass_time(120, without="abcde")
    here.pass_time(60, without="abcdeh")
    assert here.lost == set("abcdeh")


def test_nodes_that_are_lost_one_by_one_do_not_hide_the_next_one():
    here = Observer("abcdefgh")
    here.pass_time(60)
    for number in range(1, 7):
        gone = "abcdefgh"[:number]
        here.pass_time(120, without=gone)
        assert here.lost == set(gone)


def test_no_node_that_renews_whenever_it_can_is_ever_lost():
    for trial in range(60):
        generator = random.Random(SEED + trial)
        here = Observer(f"n{number}" for number in range(generator.randint(2, 12)))
        next_renewal = {node: generator.uniform(0, 10) for node in here.renewals}
        outages = _random_spans(generator, 900, generator.randint(0, 3))
        pauses = _random_spans(generator, 900, generator.randint(0, 2))
        restarts = {node: _random_spans(generator, 900, generator.randint(0, 1), longest=30) for node in here.renewals}
        look_at = 0.0
        answers_lists = generator.random() < 0.5
        for second in range(900):
            for node, due in next_renewal.items():
                if second >= due and not _is_within(outages, second) and not _is_within(restarts[node], second):
                    here.renewals[node] += 1
                    next_renewal[node] = second + generator.uniform(10, 10.4)
            is_observed = not _is_within(pauses, second) and (answers_lists or not _is_within(outages, second))
            if second >= look_at and is_observed:
                here.now = second
                here.look()
                look_at = second + generator.uniform(ROUND, 1.5 * ROUND)
        assert here.ever_lost == set(), f"trial {trial} of seed {SEED}"


def _random_spans(generator: random.Random, end: int, count: int, longest: int = 300) -> list[tuple[float, float]]:
    starts = [generator.uniform(60, end) for _ in range(count)]
    return [(start, start + generator.uniform(1, longest)) for start in starts]


def _is_within(spans: list[tuple[float, float]], second: float) -> bool:
    return any(start <= second < end for start, end in spans)


def test_silence_of_a_program_ends_with_its_next_report():
    silence = Silence("", 0.0)
    for now in (5.0, 10.0, 30.0):
        silence = silence.observe("", now)
    assert silence.seconds == 20.0, "two observations far apart count as ten seconds"
    assert silence.observe("report", 35.0).seconds == 0.0


SILENT, STORES = SILENT_PROGRAM_SECONDS, SILENT_PROGRAM_SECONDS - 1
SINGLE = [pod(0, "Running", rank=None, host="lost")]
GANG = [pod(rank, "Running", host="lost" if rank == 1 else "here") for rank in range(3)]


def gang(*lost_ranks: int):
    return [pod(rank, "Running", host="lost" if rank in lost_ranks else "here") for rank in range(4)]


@pytest.mark.parametrize(
    ("members", "program", "min_members", "is_over", "ends", "lost"),
    [
        (SINGLE, SILENT, None, False, True, ["job-0"]),
        (SINGLE, STORES, None, False, None, []),
        (SINGLE, STORES, None, True, True, ["job-0"]),
        (GANG, SILENT, None, False, True, ["job-1"]),
        (GANG, STORES, None, False, None, []),
        (gang(), SILENT, None, False, None, []),
        (gang(2, 3), STORES, 2, False, False, ["job-2", "job-3"]),
        (gang(2, 3), SILENT, 2, False, False, ["job-2", "job-3"]),
        (gang(1, 2, 3), SILENT, 2, False, True, ["job-1", "job-2", "job-3"]),
        (gang(1, 2, 3), STORES, 2, False, None, []),
        (gang(0), SILENT, 2, False, False, ["job-0"]),
        (gang(0), STORES, 2, False, False, ["job-0"]),
        (gang(0), STORES, 2, True, False, ["job-0"]),
    ],
)
def test_a_training_ends_only_if_lease_and_program_are_silent(members, program, min_members, is_over, ends, lost):
    loss = decide_training_loss(members, {"lost"}, program, min_members, is_over=is_over)
    assert (loss.ends_attempt if loss else None) is ends
    assert [member.name for member in loss.pods] == lost if loss else not lost
