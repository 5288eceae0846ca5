"""Placement on nodes: laws that hold whatever the nodes, what is used of them, and the request.

| law                                                                         | test              |
|-----------------------------------------------------------------------------|-------------------|
| each member has its GPUs on one node, all of one type; a group, one NVLink domain | `..._placement_is` |
| no smaller domain could have held what is in a larger one                   | `..._placement_is` |
| what is given back leaves no trace                                          | `..._placement_is` |
| a place is found if there is any, by trying all                             | `..._any`         |
| a request has a place once what it is said to lack is added, and not before | `..._lacks`       |
"""

from collections import Counter
from dataclasses import replace
from itertools import product

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tiphys_plugin.quota.placement.inventory import ClusterFreeCapacity, NodeInventory
from tiphys_plugin.quota.placement.model import GangRequest, GpuNode, Placement, PodRequest
from tiphys_plugin.quota.placement.place import PlacementFailure, UnschedulableReason, find_placement
from tiphys_plugin.quota.placement.scoring import BestFitScorer, FragmentationScorer, PlacementPolicy

TYPES = ["A100", "T4"]
TYPICAL = {PodRequest(1): 2, PodRequest(2, "A100"): 1, PodRequest(4): 1}
POLICIES = [PlacementPolicy(scorer(TYPICAL, {"A100": 8, "T4": 8})) for scorer in (BestFitScorer, FragmentationScorer)]


@st.composite
def nodes(draw: st.DrawFn, most: int = 6) -> list[GpuNode]:
    return [
        GpuNode(
            name=f"n{number}",
            gpu_type=draw(st.sampled_from([*TYPES, TYPES[0]])),
            gpus=draw(st.sampled_from([0, 1, 2, 3, 4, 8])),
            memory_mb=draw(st.sampled_from([None, 16_000, 80_000])),
            block=draw(st.sampled_from(["", "b1"])),
            rack=draw(st.sampled_from(["", "r1", "r2"])),
            nvlink_domain=draw(st.sampled_from(["", "d1"])),
            cordoned=draw(st.sampled_from([False, False, False, True])),
        )
        for number in range(draw(st.integers(1, most)))
    ]


@st.composite
def gangs(draw: st.DrawFn, most: int = 6) -> GangRequest:
    group = draw(st.sampled_from([1, 1, 2]))
    members = group * draw(st.integers(1, max(1, most // group)))
    ask = PodRequest(
        draw(st.sampled_from([1, 1, 2, 4])),
        draw(st.sampled_from([*TYPES, None])),
        draw(st.sampled_from([None, None, 40_000])),
    )
    within = draw(st.sampled_from([None, None, None, "nvlink", "rack", "block"]))
    return GangRequest(ask, members, group, within)


@st.composite
def used(draw: st.DrawFn, most: int = 6) -> ClusterFreeCapacity:
    """A cluster where some requests have their places, and some of them have gone again."""
    free = ClusterFreeCapacity(NodeInventory(draw(nodes(most))))
    for one in draw(st.lists(gangs(), max_size=4)):
        found = find_placement(free, one, draw(st.sampled_from(POLICIES)))
        if isinstance(found, Placement):
            free.allocate(found)
            if draw(st.booleans()) and draw(st.booleans()):
                free.release(found)
    return free


def lawful(free: ClusterFreeCapacity, gang: GangRequest, names: tuple[str, ...]) -> bool:
    """By hand, from the definition."""
    inventory = free.inventory
    members = [inventory.nodes[inventory.node_numbers[name]] for name in names]
    by_node = Counter(names)
    ask = gang.pod
    return (
        len(names) == gang.members
        and len({node.gpu_type for node in members}) == 1
        and all(ask.gpu_type in (None, node.gpu_type) and not node.cordoned for node in members)
        and all(node.memory_mb is None or node.memory_mb >= (ask.min_gpu_memory_mb or 0) for node in members)
        and all(
            free.node_capacities[inventory.node_numbers[name]].free_gpus >= ask.gpus * times
            for name, times in by_node.items()
        )
        and all(
            len({link(node) for node in members[first : first + gang.tensor_parallel]}) == 1
            for first in range(0, gang.members, gang.tensor_parallel)
        )
        and are_within(members, gang.within)
    )


def are_within(members: list[GpuNode], within: str | None) -> bool:
    """Whether the nodes are one, or share a domain that is ``within`` or smaller."""
    paths = {
        "nvlink": lambda node: link(node) if node.nvlink_domain else None,
        "rack": lambda node: (node.block, node.rack) if node.rack else None,
        "block": lambda node: node.block or None,
    }
    allowed = [] if within is None else list(paths)[: list(paths).index(within) + 1]
    shared = ({paths[level](node) for node in members} for level in allowed)
    return (
        within is None
        or len({node.name for node in members}) == 1
        or any(len(names) == 1 and None not in names for names in shared)
    )


def link(node: GpuNode) -> tuple[str, ...]:
    return node.block, node.rack, node.nvlink_domain, "" if node.nvlink_domain else node.name


@settings(suppress_health_check=[HealthCheck.filter_too_much])  # by some seeds few gangs find a place
@given(free=used(), gang=gangs(), policy=st.sampled_from(POLICIES))
def test_a_placement_is_lawful_and_near_together_and_leaves_no_trace(
    free: ClusterFreeCapacity, gang: GangRequest, policy: PlacementPolicy
) -> None:
    found = find_placement(free, gang, policy)
    assume(isinstance(found, Placement))
    assert lawful(free, gang, found.nodes)
    assert is_in_the_smallest_domain(free, found, policy)
    twin = free.copy()
    twin.allocate(found)
    taken = Counter(found.nodes)
    for node, before, after in zip(free.inventory.nodes, free.node_capacities, twin.node_capacities, strict=True):
        assert before.free_gpus - after.free_gpus == gang.pod.gpus * taken[node.name]
    twin.release(found)
    assert books(twin) == books(free)
    assert find_placement(twin, gang, policy) == found


def books(free: ClusterFreeCapacity) -> object:
    return free.node_capacities, {hole: tuple(free.nodes_with_capacity(hole)) for hole in free.distinct_capacities()}


def is_in_the_smallest_domain(free: ClusterFreeCapacity, found: Placement, policy: PlacementPolicy) -> bool:
    inventory = free.inventory
    levels = (
        lambda node: (node.gpu_type, node.name),
        lambda node: (node.gpu_type, *link(node)) if node.nvlink_domain else None,
        lambda node: (node.gpu_type, node.block, node.rack) if node.rack else None,
        lambda node: (node.gpu_type, node.block) if node.block else None,
    )
    for level in levels:
        members = {level(inventory.nodes[inventory.node_numbers[name]]) for name in found.nodes}
        if len(members) == 1 and None not in members:
            return True
        for domain in {level(node) for node in inventory.nodes} - {None}:
            inside = like(free, [node for node in inventory.nodes if level(node) == domain])
            if isinstance(find_placement(inside, found.gang, policy), Placement):
                return False
    return True


@given(free=used(most=4), gang=gangs(most=3), policy=st.sampled_from(POLICIES))
def test_a_place_is_found_if_there_is_any(
    free: ClusterFreeCapacity, gang: GangRequest, policy: PlacementPolicy
) -> None:
    names = [node.name for node in free.inventory.nodes]
    possible = any(lawful(free, gang, choice) for choice in product(names, repeat=gang.members))
    assert isinstance(find_placement(free, gang, policy), Placement) is possible


@given(free=used(), gang=gangs(), policy=st.sampled_from(POLICIES))
def test_a_request_has_a_place_once_it_gets_what_it_lacks_and_not_before(
    free: ClusterFreeCapacity, gang: GangRequest, policy: PlacementPolicy
) -> None:
    found = find_placement(free, gang, policy)
    assume(isinstance(found, PlacementFailure) and gang.within is None)
    if found.reason is UnschedulableReason.TOPOLOGY_PLACEMENT_FAILED:
        lacks = gang.tensor_parallel * (gang.group_count - found.placeable_groups)
    elif gang.tensor_parallel > 1:
        lacks = gang.members
    else:
        lacks = gang.members - found.placeable_members
        assert isinstance(find_placement(grown(free, gang, found, lacks - 1), gang, policy), PlacementFailure)
    assert isinstance(find_placement(grown(free, gang, found, lacks), gang, policy), Placement)
    assert (found.reason is UnschedulableReason.WAITING_FOR_INVENTORY) is (
        bool(found.gpu_type) and found.free_gpus < gang.gpus
    )


def grown(free: ClusterFreeCapacity, gang: GangRequest, found: PlacementFailure, members: int) -> ClusterFreeCapacity:
    """The cluster with nodes for so many more members, in one NVLink domain."""
    kind = found.gpu_type or gang.pod.gpu_type or "A100"
    nodes = [
        GpuNode(name=f"added-{number}", gpu_type=kind, gpus=gang.pod.gpus, nvlink_domain="added")
        for number in range(members)
    ]
    return like(free, [*free.inventory.nodes, *nodes])


def like(free: ClusterFreeCapacity, nodes: list[GpuNode]) -> ClusterFreeCapacity:
    """Other nodes, of which those that are in ``free`` are used as there."""
    twin = ClusterFreeCapacity(NodeInventory(nodes))
    for node in nodes:
        number = free.inventory.node_numbers.get(node.name)
        if number is not None and (gpus := node.gpus - free.node_capacities[number].free_gpus):
            twin.allocate(Placement(GangRequest(PodRequest(gpus)), (node.name,)))
    return twin


@given(free=used(), gang=gangs(), policy=st.sampled_from(POLICIES), data=st.data())
def test_avoided_nodes_are_used_only_if_no_others_have_room(
    free: ClusterFreeCapacity, gang: GangRequest, policy: PlacementPolicy, data: st.DataObject
) -> None:
    avoided = tuple(data.draw(st.lists(st.sampled_from([node.name for node in free.inventory.nodes]), unique=True)))
    before = books(free)
    found = find_placement(free, replace(gang, avoided_nodes=(*avoided, "gone")), policy)
    elsewhere = find_placement(free.without_nodes(avoided), gang, policy)
    expected = elsewhere if isinstance(elsewhere, Placement) else find_placement(free, gang, policy)
    assert getattr(found, "nodes", None) == getattr(expected, "nodes", None)
    assert not isinstance(elsewhere, Placement) or not set(elsewhere.nodes) & set(avoided)
    assert books(free) == before
