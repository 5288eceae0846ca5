"""A rank that works longer than the others of its gang is a hint at its node, and no more than that.

| what the ranks tell                         | what follows                                        |
|---------------------------------------------|-----------------------------------------------------|
| one is slow, window after window            | a hint at the node of its pod; it is not cordoned    |
| the same, and another source speaks against the node | suspect: nothing new starts there          |
| it is well again, or the training is over   | no hint                                             |
| nothing, or the store does not answer       | no hint                                             |
"""

from dataclasses import replace
from datetime import datetime, timedelta

import pytest
from support.builders.cluster_nodes import condition, node
from support.builders.ledger import NOW, lease
from support.fakes.memory_store import MemoryStore
from support.stories.plugin import Clock
from tiphys_plugin.cluster.interface import PodStatus
from tiphys_plugin.nodes.cluster_state import ClusterState
from tiphys_plugin.nodes.health import NodeHealth, judge_node_health
from tiphys_plugin.nodes.straggler_watch import StragglerDetection
from tiphys_plugin.nodes.stragglers import evidence_by_node, find_slow_gangs
from tiphys_plugin.quota.flavors import ClusterNodes
from tiphys_plugin.quota.lease import Lease, LedgerState
from tiphys_plugin.runtime.context import SingleStore

from tiphys.errors import StoreError
from tiphys.kube import ListSnapshot
from tiphys.store import LineageLayout, Store
from tiphys.store.layout import STEP_TIME_WINDOW_SECONDS, RankStepTime, parse_step_time

GANG: Lease = replace(lease(8, "g", members=4), nodes=("n0", "n1", "n2", "n3"))
LATEST = int(NOW.timestamp()) // STEP_TIME_WINDOW_SECONDS - 1


def write_step_times(store: Store, slow: int | None, windows: int = 4, latest: int = LATEST) -> None:
    """What four pods of one rank each have told of the last windows."""
    layout = LineageLayout(f"{GANG.request.run}/fit")
    for window in range(latest - windows + 1, latest + 1):
        for member in range(4):
            pace = RankStepTime(window, member, member, 1.5 if member == slow else 1.0)
            store.create(layout.step_time(1, pace), b"")


def pods(*hosts: str) -> list[PodStatus]:
    labels = {"tiphys.dev/run": GANG.request.run, "tiphys.dev/step": "fit", "tiphys.dev/attempt": "1"}
    return [
        PodStatus(
            name=f"pod-{rank}",
            workflow_uid=GANG.request.uid,
            namespace=GANG.request.namespace,
            node="wf-g.fit(0).run",
            labels=labels,
            rank=rank,
            host=host,
        )
        for rank, host in enumerate(hosts)
    ]


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.mark.parametrize("change", [{"namespace": "vision"}, {"workflow_uid": "uid-of-another"}])
def test_a_training_named_like_another_says_nothing_about_the_nodes_of_the_other(store, change):
    write_step_times(store, slow=2)
    slow = find_slow_gangs(SingleStore(store), [GANG], NOW)
    foreign = [pod.model_copy(update=change) for pod in pods("a", "b", "c", "d")]
    assert slow
    assert evidence_by_node(slow, foreign) == {}


def test_trainings_of_the_same_namespace_are_one_source(store):
    write_step_times(store, slow=2)
    [(lease, slow)] = find_slow_gangs(SingleStore(store), [GANG], NOW)
    again = [(lease, slow), (lease, slow)]
    [evidence] = evidence_by_node(again, pods("a", "b", "c", "d")).values()
    assert len(evidence) == 2
    assert judge_node_health(evidence, NOW, timedelta(hours=6)).state is NodeHealth.HEALTHY


def test_a_step_time_of_many_digits_is_none():
    assert parse_step_time("data/lineages/r/fit/step-times/000000001/000000001-000000001-00001-" + "9" * 400) is None


def test_the_node_of_a_slow_member_is_named_with_numbers(store):
    write_step_times(store, slow=2)
    slow = find_slow_gangs(SingleStore(store), [GANG, lease(8, "single")], NOW)
    found = evidence_by_node(slow, pods("a", "b", "c", "d"))
    assert list(found) == ["c"]
    [evidence] = found["c"]
    assert (evidence.source, evidence.means, evidence.at) == (f"step times in {GANG.request.namespace}", "hint", None)
    assert evidence.message == (
        f"{GANG.request.run}/fit: member 2 of 4 works 1.50 times as long for a step as their median, in 4 of 4 windows "
        "of 5 min"
    )


def test_a_member_whose_pod_has_no_node_points_at_nothing(store):
    write_step_times(store, slow=2)
    assert evidence_by_node(find_slow_gangs(SingleStore(store), [GANG], NOW), pods("a", "b", "")) == {}


def test_an_old_step_time_names_no_straggler(store):
    write_step_times(store, slow=2, latest=LATEST - 10)
    assert find_slow_gangs(SingleStore(store), [GANG], NOW) == []


def test_a_store_that_does_not_answer_makes_no_straggler():
    class Silent(MemoryStore):
        def list(self, prefix):
            raise StoreError("no answer")

    assert find_slow_gangs(SingleStore(Silent()), [GANG], NOW) == []


class Heard:
    """What a `StragglerDetection` needs of inventory, ledger and cluster."""

    def __init__(self, *leases: Lease) -> None:
        self.observed_nodes = ("some node",)
        self.leases = leases
        self.heard: list[dict] = []
        self.listed = 0

    def set_external_evidence(self, source, found) -> None:
        self.heard.append(dict(found))

    def snapshot(self) -> LedgerState:
        return LedgerState(self.leases, ())

    def attempt_pods(self) -> list[PodStatus]:
        self.listed += 1
        return pods("a", "b", "c", "d")


def test_a_straggler_is_looked_up_again_and_ends_with_its_cause(store):
    world, clock = Heard(GANG), Clock()
    looks = StragglerDetection(world, world, SingleStore(store), world, clock)
    looks.run_once()
    assert (world.heard, world.listed) == ([{}], 0), "pods are not asked where nobody is slow"
    write_step_times(store, slow=1, latest=int(clock().timestamp()) // STEP_TIME_WINDOW_SECONDS - 1)
    looks.run_once()
    assert list(world.heard[-1]) == ["b"]
    world.leases = ()
    looks.run_once()
    assert world.heard[-1] == {}
    world.observed_nodes = ()
    looks.run_once()
    assert len(world.heard) == 3, "nobody goes by nodes"


def verdict(facts: ClusterState, now: datetime = NOW):
    [seen] = facts.observe_nodes(ClusterNodes(), now)
    return seen


def test_a_hint_alone_cordons_nothing_and_ends_when_it_is_no_longer_heard(store):
    write_step_times(store, slow=0)
    found = evidence_by_node(find_slow_gangs(SingleStore(store), [GANG], NOW), pods("n1", "b", "c", "d"))
    facts = ClusterState()
    facts.nodes.apply(ListSnapshot([node("n1")]))
    facts.set_external_evidence("slow ranks", found)
    before = facts.version
    assert verdict(facts).verdict.state is NodeHealth.HEALTHY
    assert "1.50 times" in verdict(facts).verdict.message
    assert not verdict(facts).node.cordoned
    facts.nodes.apply(ListSnapshot([node("n1", 8, condition("IBLinkFlapping"))]))
    assert verdict(facts).verdict.state is NodeHealth.SUSPECT, "two sources agree"
    assert verdict(facts).node.cordoned
    facts.set_external_evidence("slow ranks", {})
    assert facts.version != before
    assert verdict(facts).verdict.state is NodeHealth.HEALTHY


def test_items_of_a_fan_out_are_distinguished(store):
    write_step_times(store, slow=2)
    slow = find_slow_gangs(SingleStore(store), [GANG], NOW)
    other = [pod.model_copy(update={"node": "wf-g.fit(1:b)(0).run"}) for pod in pods("x", "x", "x", "x")]
    assert list(evidence_by_node(slow, [*pods("a", "b", "c", "d"), *other])) == ["c"]
