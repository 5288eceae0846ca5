"""Placement on nodes, by examples.

| free on the nodes                | request                | where, or why not               |
|----------------------------------|------------------------|---------------------------------|
| 8, 4, 2                          | 2                      | the smallest hole               |
| 2 with more memory, 2 with less  | 2                      | least memory headroom           |
| racks of 4+4 and 8               | 4 pods of 2            | one node before one rack        |
| racks of 8+8, 8+8+8              | 3 pods of 8            | the rack that holds them        |
| NVLink domains of 3 and of 3     | 2 groups of 2 pods     | each group in one domain        |
| racks of 2 and 3                 | 3 pods, one rack       | the rack of 3                   |
| racks of 2 and 3                 | 4 pods, one rack       | TopologyPlacementFailed         |
| 4 where it failed, 8             | 4                      | the other node                  |
| 4, 4, 4, 4                       | 8                      | GangFragmented, "at most 4"     |
"""

from collections import Counter
from typing import Any

import pytest
from pydantic import ValidationError
from tiphys_plugin.quota.placement.inventory import ClusterFreeCapacity, NodeInventory
from tiphys_plugin.quota.placement.model import GangRequest, GpuNode, Placement, PodRequest
from tiphys_plugin.quota.placement.place import (
    PlacementFailure,
    UnschedulableReason,
    find_placement,
    find_placement_by_preference,
)
from tiphys_plugin.quota.placement.scoring import (
    BestFitScorer,
    FragmentationScorer,
    PlacementPolicy,
    best_fit,
    compute_relative_demand,
)

BEST_FIT = PlacementPolicy(best_fit)


def node(name: str, gpus: int = 8, **more) -> GpuNode:
    return GpuNode(name=name, gpu_type=more.pop("gpu_type", "A100"), gpus=gpus, **more)


def free(*nodes: GpuNode) -> ClusterFreeCapacity:
    return ClusterFreeCapacity(NodeInventory(nodes))


def where(found: Placement | PlacementFailure) -> tuple[str, ...]:
    assert isinstance(found, Placement), found
    return found.nodes


def why(found: Placement | PlacementFailure) -> PlacementFailure:
    assert isinstance(found, PlacementFailure), found
    return found


def test_best_fit_takes_the_smallest_free_capacity_that_fits() -> None:
    assert where(
        find_placement(free(node("a", 8), node("b", 2), node("c", 4)), GangRequest(PodRequest(2)), BEST_FIT)
    ) == ("b",)


def test_a_node_with_the_least_memory_is_taken_among_equal_free_capacities() -> None:
    nodes = free(node("a", 2, memory_mb=80_000), node("b", 2, memory_mb=40_000), node("c", 2))
    assert where(find_placement(nodes, GangRequest(PodRequest(2, min_gpu_memory_mb=24_000)), BEST_FIT)) == ("b",)


def test_fragmentation_leaves_what_others_usually_want() -> None:
    """Everybody else wants four GPUs of one node: one of five is a fragment, and one of four is a loss of four."""
    nodes = free(node("a", 4), node("b", 5))
    usual = PlacementPolicy(FragmentationScorer({PodRequest(4): 9, PodRequest(1): 1}, {}))
    assert where(find_placement(nodes, GangRequest(PodRequest(1)), BEST_FIT)) == ("a",)
    assert where(find_placement(nodes, GangRequest(PodRequest(1)), usual)) == ("b",)


def test_expected_fragmentation_is_the_mean_of_what_typical_requests_cannot_use() -> None:
    measure = FragmentationScorer(
        {PodRequest(4): 1, PodRequest(1): 1, PodRequest(1, gpu_milli=500): 1, PodRequest(1, "T4"): 1}, {}
    )
    hole = next(iter(free(node("a", 3)).distinct_capacities()))
    assert measure.expected_fragmentation_milli(hole) == pytest.approx((3000 + 0 + 0 + 3000) / 4)
    shared = hole._replace(free_gpus=1, shared_gpu_free_milli=(300, 600))
    assert measure.expected_fragmentation_milli(shared) == pytest.approx((1900 + 900 + 300 + 1900) / 4)


STOCK = {"A100": 8, "T4": 4, "K80": 4, "A10": 0}


def test_the_demand_for_a_type_is_what_is_typically_asked_of_its_gpus() -> None:
    """8 of 16 ask for any GPU, 4 for a T4, and 4 for an A100 or a K80, of which there are 12."""
    typical = {PodRequest(8): 1.0, PodRequest(4, "T4"): 1.0, PodRequest(2, gpu_types=("A100", "K80", "A10")): 2.0}
    demand = compute_relative_demand(typical, STOCK)
    assert demand == pytest.approx({"A100": 8 / 16 + 4 / 12, "T4": 8 / 16 + 4 / 4, "K80": 8 / 16 + 4 / 12}, abs=1e-6)
    halves = {PodRequest(1, "T4", gpu_milli=500): 2.0, PodRequest(1, "K80"): 1.0}
    assert compute_relative_demand(halves, STOCK) == {"A100": 0, "T4": 2, "K80": 2}
    assert compute_relative_demand({PodRequest(8): 3, PodRequest(1): 1}, STOCK) == {"A100": 1, "T4": 1, "K80": 1}
    assert compute_relative_demand({PodRequest(1, "H100"): 1}, STOCK) == {}
    assert compute_relative_demand({}, STOCK) == compute_relative_demand({PodRequest(1): 1}, {}) == {}


@pytest.mark.parametrize("scorer", [BestFitScorer, FragmentationScorer])
def test_a_request_for_any_type_leaves_the_types_that_others_must_have(
    scorer: type[BestFitScorer | FragmentationScorer],
) -> None:
    nodes = [node("t", 4, gpu_type="T4"), node("a1", gpu_type="A100"), node("k", 4, gpu_type="K80")]
    for wanted, taken in (("T4", "k"), ("K80", "t")):
        policy = PlacementPolicy(scorer({PodRequest(1): 8, PodRequest(4, wanted): 4}, STOCK))
        cluster, used = free(*nodes), []
        for _ in range(3):
            found = find_placement(cluster, GangRequest(PodRequest(4)), policy)
            assert isinstance(found, Placement)
            used.append(found.nodes[0])
            cluster.allocate(found)
        assert used.index(taken) < 2 and {"T4": "t", "K80": "k"}[wanted] not in used


def test_the_first_type_with_room_is_taken_and_another_rather_than_a_node_that_failed() -> None:
    nodes = free(node("t", gpu_type="T4"), node("a", gpu_type="A100"))

    def of(*types: str, **more: Any) -> Placement | PlacementFailure:
        gang = GangRequest(PodRequest(more.pop("gpus", 8), gpu_types=types), **more)
        return find_placement_by_preference(nodes, gang, BEST_FIT)

    assert [where(of("T4", "A100")), where(of("A100", "T4"))] == [("t",), ("a",)]
    assert where(of("H100", "A100", "T4")) == ("a",)
    assert where(of("T4", "A100", avoided_nodes=("t",))) == ("a",)
    assert where(of("T4", "A100", avoided_nodes=("t", "a"))) == ("t",)
    assert "9 are needed" in why(of("T4", "A100", gpus=9)).message


def test_members_go_to_one_node_if_it_has_room_for_them() -> None:
    nodes = free(node("a", 4, rack="r1"), node("b", 4, rack="r1"), node("c", 8, rack="r2"))
    assert where(find_placement(nodes, GangRequest(PodRequest(2), 4), BEST_FIT)) == ("c",) * 4


def test_a_gang_goes_to_the_smallest_rack_that_holds_it() -> None:
    racks = {"r1": "ab", "r2": "cdef", "r3": "ghi"}
    nodes = free(*(node(name, rack=rack, block="k") for rack, names in racks.items() for name in names))
    assert where(find_placement(nodes, GangRequest(PodRequest(8), 3), BEST_FIT)) == ("g", "h", "i")
    assert Counter(where(find_placement(nodes, GangRequest(PodRequest(8), 2), BEST_FIT))) == Counter("ab")


def test_a_gang_that_no_rack_holds_stays_in_one_block_and_in_few_racks() -> None:
    blocks = {"k1": {"r1": "ab", "r2": "cd", "r3": "e"}, "k2": {"r1": "fgh", "r2": "ij", "r3": "kl", "r4": "m"}}
    nodes = free(
        *(
            node(name, rack=rack, block=block)
            for block, racks in blocks.items()
            for rack, names in racks.items()
            for name in names
        )
    )
    assert where(find_placement(nodes, GangRequest(PodRequest(8), 4), BEST_FIT)) == tuple("abcd")
    assert where(find_placement(nodes, GangRequest(PodRequest(8), 6), BEST_FIT)) == tuple("fghijm")


def test_as_few_nodes_as_possible_and_the_rest_in_the_smallest_free_capacity() -> None:
    nodes = free(node("a", 2), node("b", 8), node("c", 4), node("d", 6))
    assert where(find_placement(nodes, GangRequest(PodRequest(2), 6), BEST_FIT)) == ("b",) * 4 + ("c",) * 2
    assert where(find_placement(nodes, GangRequest(PodRequest(2), 8), BEST_FIT)) == ("a",) + ("b",) * 4 + ("d",) * 3


def test_ranks_follow_the_topology() -> None:
    nodes = free(node("a", rack="r1"), node("b", rack="r2"), node("c", rack="r2"))
    assert where(find_placement(nodes, GangRequest(PodRequest(8), 3), BEST_FIT)) == ("a", "b", "c")


def test_nodes_of_which_no_rack_is_known_are_not_taken_to_be_near_each_other() -> None:
    nodes = free(node("a"), node("b"), node("c", rack="r"), node("d", rack="r"), node("e", rack="r"))
    assert where(find_placement(nodes, GangRequest(PodRequest(8), 2), BEST_FIT)) == ("c", "d")


def test_the_same_name_of_a_rack_in_two_blocks_is_two_racks() -> None:
    nodes = free(*(node(f"{block}{n}", rack="r1", block=block) for block in "kl" for n in range(2)))
    assert len({name[0] for name in where(find_placement(nodes, GangRequest(PodRequest(8), 2), BEST_FIT))}) == 1


def test_a_tensor_parallel_group_does_not_leave_its_nvlink_domain() -> None:
    domains = {"x": "abc", "y": "def"}
    nodes = free(*(node(name, rack="r", nvlink_domain=domain) for domain, names in domains.items() for name in names))
    assert where(find_placement(nodes, GangRequest(PodRequest(8), 4, tensor_parallel=2), BEST_FIT)) == (
        "a",
        "b",
        "d",
        "e",
    )
    found = why(find_placement(nodes, GangRequest(PodRequest(8), 6, tensor_parallel=2), BEST_FIT))
    assert found.reason is UnschedulableReason.TOPOLOGY_PLACEMENT_FAILED
    assert found.message == (
        "48 A100 are free, but NVLink domains hold 2 of the 3 groups of 16 that must not leave one"
    )


def test_without_a_declared_nvlink_domain_a_group_stays_on_one_node() -> None:
    nodes = free(node("a", rack="r"), node("b", rack="r"))
    assert where(find_placement(nodes, GangRequest(PodRequest(4), 4, tensor_parallel=2), BEST_FIT)) == (
        "a",
        "a",
        "b",
        "b",
    )
    assert why(find_placement(nodes, GangRequest(PodRequest(8), 2, tensor_parallel=2), BEST_FIT)).placeable_groups == 0


def test_a_gang_that_must_share_a_rack_waits_for_room_in_one() -> None:
    racks = {"r": "ab", "s": "cd", "t": "efg"}
    nodes = free(*(node(name, rack=rack) for rack, names in racks.items() for name in names), node("z"))
    assert where(find_placement(nodes, GangRequest(PodRequest(8), 3, within="rack"), BEST_FIT)) == ("e", "f", "g")
    found = why(find_placement(nodes, GangRequest(PodRequest(8), 4, within="rack"), BEST_FIT))
    assert found.reason is UnschedulableReason.TOPOLOGY_PLACEMENT_FAILED
    assert found.message == "64 A100 are free, but one rack has room for at most 3 of the 4 pods that must share one"
    assert len(where(find_placement(nodes, GangRequest(PodRequest(8), 4), BEST_FIT))) == 4
    assert len({*where(find_placement(nodes, GangRequest(PodRequest(4), 2, within="rack"), BEST_FIT))}) == 1


def test_a_domain_that_no_node_names_is_reported() -> None:
    nodes = free(node("a", block="k"), node("b", block="k"))
    assert where(find_placement(nodes, GangRequest(PodRequest(8), 2, within="block"), BEST_FIT)) == ("a", "b")
    assert why(find_placement(nodes, GangRequest(PodRequest(8), 2, within="rack"), BEST_FIT)).message == (
        "16 A100 are free, but no node of the type names its rack, and all 2 pods must share one"
    )


def test_a_node_that_failed_the_step_is_used_only_if_no_other_has_room() -> None:
    nodes = free(node("a", 4), node("b", 8))
    assert where(find_placement(nodes, GangRequest(PodRequest(4)), BEST_FIT)) == ("a",)
    assert where(find_placement(nodes, GangRequest(PodRequest(4), avoided_nodes=("a",)), BEST_FIT)) == ("b",)
    assert where(find_placement(nodes, GangRequest(PodRequest(8), avoided_nodes=("b",)), BEST_FIT)) == ("b",)
    assert where(find_placement(nodes, GangRequest(PodRequest(4), 3, avoided_nodes=("a",)), BEST_FIT)) == tuple("abb")


def test_a_gang_gets_gpus_of_one_type() -> None:
    nodes = free(node("a"), node("b", gpu_type="H100"))
    found = why(find_placement(nodes, GangRequest(PodRequest(8), 2), BEST_FIT))
    assert (found.reason, found.free_gpus, found.placeable_members) == (UnschedulableReason.WAITING_FOR_INVENTORY, 8, 1)


@pytest.mark.parametrize(
    ("gang", "reason", "message"),
    [
        (
            GangRequest(PodRequest(8)),
            UnschedulableReason.GANG_FRAGMENTED,
            "16 A100 are free, but at most 4 on one node, and 8 are needed on one",
        ),
        (
            GangRequest(PodRequest(3), 5),
            UnschedulableReason.GANG_FRAGMENTED,
            "16 A100 are free, but at most 4 on one node, and 3 are needed on one; 4 of 5 pods find room",
        ),
        (
            GangRequest(PodRequest(4), 5),
            UnschedulableReason.WAITING_FOR_INVENTORY,
            "16 A100 are free, and 20 are needed",
        ),
        (
            GangRequest(PodRequest(1, "H100")),
            UnschedulableReason.NO_MATCHING_GPU_TYPE,
            "the nodes have no H100; they have: A100",
        ),
        (
            GangRequest(PodRequest(1, min_gpu_memory_mb=80_000)),
            UnschedulableReason.GPU_MEMORY_TOO_SMALL,
            "no GPU has 80000 MB; ask for less memory or another type",
        ),
        (
            GangRequest(PodRequest(1, cpu_milli=9000)),
            UnschedulableReason.WAITING_FOR_INVENTORY,
            "0 A100 are free beside enough CPUs and memory, and 1 is needed",
        ),
        (
            GangRequest(PodRequest(0, cpu_milli=9000)),
            UnschedulableReason.WAITING_FOR_INVENTORY,
            "no node has the CPUs and the memory free",
        ),
    ],
)
def test_a_gang_without_a_placement_gets_the_reason(
    gang: GangRequest, reason: UnschedulableReason, message: str
) -> None:
    nodes = free(*(node(name, 4, memory_mb=40_000, cpu_milli=8000) for name in "abcd"))
    found = why(find_placement(nodes, gang, BEST_FIT))
    assert (found.reason, found.message) == (reason, message)


def test_a_cordoned_node_gets_nothing_new_and_is_spoken_of() -> None:
    inventory = NodeInventory([node("a", 8, cordoned=True), node("b", 2)])
    now, one_day = ClusterFreeCapacity(inventory), ClusterFreeCapacity(inventory, include_cordoned=True)
    now.allocate(Placement(GangRequest(PodRequest(4)), ("a",)))
    assert why(find_placement(now, GangRequest(PodRequest(4)), BEST_FIT)).message == (
        "2 A100 are free, and 4 are needed; 4 more are free on cordoned nodes"
    )
    assert where(find_placement(one_day, GangRequest(PodRequest(4)), BEST_FIT)) == ("a",)


def test_a_node_that_was_overfilled_offers_nothing_until_enough_is_given_back() -> None:
    nodes = free(node("a", 2))
    too_much = Placement(GangRequest(PodRequest(3)), ("a",))
    nodes.allocate(too_much)
    assert why(find_placement(nodes, GangRequest(PodRequest(1)), BEST_FIT)).free_gpus == 0
    nodes.release(too_much)
    assert where(find_placement(nodes, GangRequest(PodRequest(2)), BEST_FIT)) == ("a",)


def test_a_lost_node_holds_no_gpus_in_use() -> None:
    nodes = free(node("a", 2))
    nodes.allocate(Placement(GangRequest(PodRequest(2), 2), ("a", "gone")))
    assert why(find_placement(nodes, GangRequest(PodRequest(1)), BEST_FIT)).free_gpus == 0
    nodes.release(Placement(GangRequest(PodRequest(2), 2), ("a", "gone")))
    assert where(find_placement(nodes, GangRequest(PodRequest(2)), BEST_FIT)) == ("a",)


def test_a_share_comes_from_the_fullest_gpu_and_cannot_be_given_back() -> None:
    nodes = free(node("a", 2))
    for milli, left in ((600, (400,)), (300, (100,)), (500, (100, 500))):
        found = find_placement(nodes, GangRequest(PodRequest(1, gpu_milli=milli)), BEST_FIT)
        assert isinstance(found, Placement)
        nodes.allocate(found)
        assert nodes.node_capacities[0].shared_gpu_free_milli == left
    assert (
        why(find_placement(nodes, GangRequest(PodRequest(1, gpu_milli=501)), BEST_FIT)).message
        == "no GPU has 501/1000 free"
    )
    with pytest.raises(ValueError, match="its device is not recorded"):
        nodes.release(found)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: GangRequest(PodRequest(1), 3, tensor_parallel=2), "3 members cannot form groups of 2"),
        (lambda: GangRequest(PodRequest(1), 0), "0 members"),
        (lambda: GangRequest(PodRequest(0), 2), "at least one"),
        (lambda: PodRequest(-1), "must not be negative"),
        (lambda: PodRequest(2, gpu_milli=500), "a part of one GPU"),
        (lambda: NodeInventory([node("a"), node("b"), node("a")]), "node 'a' is declared twice"),
    ],
)
def test_an_invalid_gang_or_inventory_is_refused(wrong, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        wrong()


@pytest.mark.parametrize(
    "wrong", [{"gpus": -1}, {"gpus": 10_000}, {"memory_mb": 0}, {"name": ""}, {"racks": "r"}, {"gpu_type": ""}]
)
def test_a_node_is_declared_with_care(wrong) -> None:
    with pytest.raises(ValidationError):
        GpuNode.model_validate({"name": "n", "gpu_type": "A100", "gpus": 8} | wrong)


def test_among_ten_thousand_nodes_a_placement_compares_a_few_free_capacities() -> None:
    """Counted, and not timed: as many as there are different holes, once for each request that is new."""
    compared: list[object] = []

    def counting(before, left):
        compared.append(before)
        return best_fit(before, left)

    policy = PlacementPolicy(counting)
    nodes = ClusterFreeCapacity(
        NodeInventory(node(f"n{n}", gpu_type=f"type-{n % 4}", rack=f"r{n // 16}") for n in range(10_000))
    )
    most = 0
    for number in range(300):
        gang = GangRequest(PodRequest((1, 2, 4, 8)[number % 4], f"type-{number % 3}"))
        most = max(most, len(list(nodes.distinct_capacities(gang.pod.gpu_type))))
        nodes.allocate(find_placement(nodes, gang, policy))
    assert most <= 9
    assert len(compared) <= 4 * 3 * 9
