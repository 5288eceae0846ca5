"""Where nodes are declared, each pod is given one, and who finds no room is told how the GPUs are scattered.

| what is free                              | what is asked                | answer                          |
|-------------------------------------------|------------------------------|---------------------------------|
| holes of several sizes                    | a pod                        | the smallest that fits          |
| enough in all, too little on each node    | a pod                        | GangFragmented, with numbers    |
| enough on several nodes                   | a gang                       | a node for each member          |
| room for some of its members              | a gang                       | nothing for any of them         |
| room, but not within one NVLink domain    | a tensor-parallel group      | TopologyPlacementFailed         |
| never enough on one node                  | a pod                        | rejected, with the most there is |
"""

import json
from datetime import timedelta

import pytest
from pydantic import ValidationError
from support.builders.ledger import NOW, ask, deferral, lease, waiting
from tiphys_plugin.quota.lease import AdmissionReason, Admitted, Deferred, Lease, LedgerState, Rejected
from tiphys_plugin.quota.queues import Queues, parse_queues
from tiphys_plugin.quota.scheduler.decide import decide_admission

from tiphys.errors import UsageError


def cluster(*sizes: int, nvlink_domain: list[str] | None = None, **fields) -> Queues:
    """Nodes n1, n2, ... of so many GPUs."""
    domains = nvlink_domain or [""] * len(sizes)
    nodes = [
        {"name": f"n{number}", "gpu_type": "A100", "gpus": gpus, "nvlink_domain": domain}
        for number, (gpus, domain) in enumerate(zip(sizes, domains, strict=True), 1)
    ]
    queue = {"name": "research", "gpus": {"A100": 64}}
    return Queues.model_validate({"queues": [queue], "nodes": nodes, **fields})


def on(node: str, gpus: int, uid: str, **changes) -> Lease:
    return Lease(uid, ask(gpus, uid, **changes), "A100", NOW, NOW, (node,))


def decided(state: LedgerState, request, arrival: int = 100):
    return decide_admission(state, request, arrival, NOW)


def test_a_pod_takes_the_node_with_the_smallest_free_capacity_that_fits():
    state = LedgerState((on("n1", 4, "a"), on("n2", 6, "b")), queues=cluster(8, 8, 8))
    assert decided(state, ask(2)) == Admitted("", "A100", nodes=("n2",))
    assert decided(state, ask(4)) == Admitted("", "A100", nodes=("n1",))
    assert decided(state, ask(5)) == Admitted("", "A100", nodes=("n3",))


def test_scattered_gpus_are_distinguished_from_missing_ones():
    state = LedgerState((on("n1", 4, "a"), on("n2", 5, "b")), queues=cluster(8, 8))
    answer = decided(state, ask(6))
    assert isinstance(answer, Deferred)
    assert answer.reason is AdmissionReason.GANG_FRAGMENTED
    assert "7 A100 are free, but at most 4 on one node, and 6 are needed on one; 6 A100 asked" in answer.message


def test_a_gang_gets_a_node_for_each_member_or_nothing():
    state = LedgerState((on("n1", 1, "a"),), queues=cluster(8, 8, 8))
    assert decided(state, ask(16, members=2)) == Admitted("", "A100", nodes=("n2", "n3"))
    answer = decided(LedgerState((on("n1", 1, "a"), on("n2", 1, "b")), queues=cluster(8, 8, 8)), ask(16, members=2))
    assert isinstance(answer, Deferred)
    assert "1 of 2 pods find room" in answer.message


def test_a_tensor_parallel_group_stays_in_its_nvlink_domain():
    rules = cluster(8, 8, 8, 8, nvlink_domain=["d1", "d1", "d2", "d2"])
    group = {"members": 2, "tensor_parallel": 2}
    one_each = (on("n1", 8, "a"), on("n3", 8, "b"))
    answer = decided(LedgerState(one_each, queues=rules), ask(16, **group))
    assert isinstance(answer, Deferred)
    assert answer.reason is AdmissionReason.TOPOLOGY_PLACEMENT_FAILED
    assert decided(LedgerState(one_each, queues=rules), ask(16, members=2)).nodes == ("n2", "n4")
    assert set(decided(LedgerState(one_each[:1], queues=rules), ask(16, **group)).nodes) == {"n3", "n4"}


def test_a_request_larger_than_every_node_is_rejected_with_the_largest_possible():
    answer = decided(LedgerState(queues=cluster(8, 4)), ask(12))
    assert isinstance(answer, Rejected)
    assert "12 A100 can never be had" in answer.message
    assert "ask for at most 8 on one node, or for several nodes" in answer.message


def test_a_cordoned_node_gives_nothing_new_and_may_come_back():
    rules = cluster(8, 8)
    assert isinstance(decided(LedgerState((on("n2", 4, "a"),), queues=rules), ask(8)), Admitted)
    nodes = [node.model_copy(update={"cordoned": node.name == "n1"}) for node in rules.nodes or ()]
    state = LedgerState((on("n2", 4, "a"),), queues=rules.with_nodes(nodes))
    answer = decided(state, ask(8))
    assert isinstance(answer, Deferred), "it is not impossible for ever"
    assert "8 more are free on cordoned nodes" in answer.message


def test_a_start_is_expected_when_a_node_comes_free_and_not_when_enough_do():
    ends = (on("n1", 4, "a", seconds=60), on("n2", 4, "b", seconds=600), on("n1", 4, "c", seconds=1200))
    answer = decided(LedgerState(ends, queues=cluster(8, 8)), ask(8))
    assert answer.expected_start == NOW + timedelta(seconds=600)


def test_a_request_for_a_reserved_node_waits():
    state = LedgerState((on("n1", 8, "a", seconds=600), on("n2", 4, "b")), (waiting(8, 1),), queues=cluster(8, 8))
    assert isinstance(decided(state, ask(4, seconds=3600)), Admitted), "n2 is of no use to the one that waits"
    state = LedgerState((on("n1", 4, "a", seconds=600), on("n2", 8, "b")), (waiting(8, 1),), queues=cluster(8, 8))
    answer = decided(state, ask(4, seconds=3600))
    assert isinstance(answer, Deferred)
    assert answer.reason is AdmissionReason.RESERVED
    assert isinstance(decided(state, ask(4, seconds=300)), Admitted), "it is over before"


def test_fragmentation_keeps_whole_what_is_usually_asked_for():
    rules = cluster(8, 3, placement="fragmentation", typical_gpus={3: 1.0})
    assert decided(LedgerState(queues=rules), ask(2)).nodes == ("n1",), "of n2 nothing would be left that is of use"
    assert decided(LedgerState(queues=cluster(8, 3)), ask(2)).nodes == ("n2",)


@pytest.mark.parametrize("placement", ["best-fit", "fragmentation"])
def test_a_request_without_a_type_leaves_the_type_that_is_usually_asked_for(placement):
    nodes = [{"name": kind, "gpu_type": kind, "gpus": 8} for kind in ("A100", "H100")]
    queue = {"name": "research", "gpus": {"*": 16}}
    for wanted, taken in (("A100", "H100"), ("H100|B200", "A100")):
        rules = {"queues": [queue], "nodes": nodes, "placement": placement, "typical_gpus": {1: 9, f"1 {wanted}": 1}}
        for stored in (rules, json.loads(Queues.model_validate(rules).model_dump_json())):
            assert decided(LedgerState(queues=Queues.model_validate(stored)), ask(1, gpu_type=None)).nodes == (taken,)


def test_a_typical_request_for_a_type_is_one_for_its_flavors():
    """One GPU of five is a fragment for requests for four, and one of four is a loss of four."""
    flavors = [{"name": "h-rent", "gpu_type": "H100", "node_labels": {"pool": "rent"}}]
    nodes = [{"name": f"n{gpus}", "gpu_type": "H100", "gpus": gpus, "labels": {"pool": "rent"}} for gpus in (4, 5)]
    rules = {"queues": [{"name": "research", "gpus": {"h-rent": 9}}], "flavors": flavors, "nodes": nodes}
    for typical, taken in (({"4 H100": 1}, "n5"), ({"4 A100": 1}, "n4")):
        chosen = Queues.model_validate({**rules, "placement": "fragmentation", "typical_gpus": typical})
        assert decided(LedgerState(queues=chosen), ask(1, gpu_type="H100")).nodes == (taken,)


def test_typical_requests_for_the_same_types_are_added():
    nodes = [{"name": kind, "gpu_type": kind, "gpus": 8} for kind in ("A100", "H100", "T4")]
    rules = {"queues": [{"name": "research", "gpus": {"*": 24}}], "nodes": nodes}
    typical = {"1 T4|A100": 2, "1 A100|T4": 2, "1 H100": 1.5}
    chosen = Queues.model_validate({**rules, "typical_gpus": typical})
    assert decided(LedgerState(queues=chosen), ask(1, gpu_type=None)).nodes == ("H100",)


@pytest.mark.parametrize("key", ["A100", "0 A100", "8 A100|", "8  A100", "-1", "1.5", "99999 A100"])
def test_a_typical_request_that_is_none_is_refused_by_name(key):
    with pytest.raises(UsageError, match="typical_gpus"):
        parse_queues({"queues": [], "typical_gpus": {key: 1}}, "queue file q.yaml")


def test_a_lease_of_a_time_without_nodes_counts_among_all():
    state = LedgerState((lease(4),), queues=cluster(8))
    assert isinstance(decided(state, ask(4)), Admitted)
    assert deferral(decided(state, ask(5))) is AdmissionReason.WAITING_FOR_INVENTORY


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"inventory": {"A100": {"count": 8}}}, "declare the inventory or the nodes"),
        ({"nodes": [{"name": "n1", "gpu_type": "A100", "gpus": 8}] * 2}, "node 'n1' is declared twice"),
        ({"nodes": [{"name": "n1", "gpu_type": "A100", "gpus": -1}]}, "greater than or equal to 0"),
        ({"placement": "worst-fit"}, "'best-fit' or 'fragmentation'"),
    ],
)
def test_nodes_that_make_no_sense_are_refused(changes, says):
    with pytest.raises(ValidationError, match=says):
        Queues.model_validate({**cluster(8).model_dump(exclude_defaults=True), **changes})
