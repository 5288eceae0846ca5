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
from itertools import product

from hypothesis import assume, given
from hypothesis import strategies as st
from tiphys_plugin.quota.placement.inventory import Free, Inventory
from tiphys_plugin.quota.placement.model import Ask, Gang, Node, Placement
from tiphys_plugin.quota.placement.place import Shortage, Unplaceable, place
from tiphys_plugin.quota.placement.scoring import Fragmentation, Policy, best_fit

TYPES = ["A100", "T4"]
POLICIES = [Policy(best_fit), Policy(Fragmentation({Ask(1): 2, Ask(2, "A100"): 1, Ask(4): 1}))]


@st.composite
def nodes(draw: st.DrawFn, most: int = 6) -> list[Node]:
    return [
        Node(
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
def gangs(draw: st.DrawFn, most: int = 6) -> Gang:
    group = draw(st.sampled_from([1, 1, 2]))
    members = group * draw(st.integers(1, max(1, most // group)))
    ask = Ask(
        draw(st.sampled_from([1, 1, 2, 4])),
        draw(st.sampled_from([*TYPES, None])),
        draw(st.sampled_from([None, None, 40_000])),
    )
    return Gang(ask, members, group)


@st.composite
def used(draw: st.DrawFn, most: int = 6) -> Free:
    """A cluster where some requests have their places, and some of them have gone again."""
    free = Free(Inventory(draw(nodes(most))))
    for one in draw(st.lists(gangs(), max_size=4)):
        found = place(free, one, draw(st.sampled_from(POLICIES)))
        if isinstance(found, Placement):
            free.take(found)
            if draw(st.booleans()) and draw(st.booleans()):
                free.give_back(found)
    return free


def lawful(free: Free, gang: Gang, names: tuple[str, ...]) -> bool:
    """By hand, from the definition."""
    inventory = free.inventory
    members = [inventory.nodes[inventory.number[name]] for name in names]
    by_node = Counter(names)
    ask = gang.member
    return (
        len(names) == gang.members
        and len({node.gpu_type for node in members}) == 1
        and all(ask.gpu_type in (None, node.gpu_type) and not node.cordoned for node in members)
        and all(node.memory_mb is None or node.memory_mb >= (ask.min_gpu_memory_mb or 0) for node in members)
        and all(free.holes[inventory.number[name]].whole >= ask.gpus * times for name, times in by_node.items())
        and all(
            len({link(node) for node in members[first : first + gang.tensor_parallel]}) == 1
            for first in range(0, gang.members, gang.tensor_parallel)
        )
    )


def link(node: Node) -> tuple[str, ...]:
    return node.block, node.rack, node.nvlink_domain, "" if node.nvlink_domain else node.name


@given(free=used(), gang=gangs(), policy=st.sampled_from(POLICIES))
def test_a_placement_is_lawful_and_near_together_and_leaves_no_trace(free: Free, gang: Gang, policy: Policy) -> None:
    found = place(free, gang, policy)
    assume(isinstance(found, Placement))
    assert lawful(free, gang, found.nodes)
    assert is_in_the_smallest_domain(free, found, policy)
    twin = free.copy()
    twin.take(found)
    taken = Counter(found.nodes)
    for node, before, after in zip(free.inventory.nodes, free.holes, twin.holes, strict=True):
        assert before.whole - after.whole == gang.member.gpus * taken[node.name]
    twin.give_back(found)
    assert books(twin) == books(free)
    assert place(twin, gang, policy) == found


def books(free: Free) -> object:
    return free.holes, {hole: tuple(free.nodes_with(hole)) for hole in free.offered()}


def is_in_the_smallest_domain(free: Free, found: Placement, policy: Policy) -> bool:
    inventory = free.inventory
    levels = (
        lambda node: (node.gpu_type, node.name),
        lambda node: (node.gpu_type, *link(node)) if node.nvlink_domain else None,
        lambda node: (node.gpu_type, node.block, node.rack) if node.rack else None,
        lambda node: (node.gpu_type, node.block) if node.block else None,
    )
    for level in levels:
        members = {level(inventory.nodes[inventory.number[name]]) for name in found.nodes}
        if len(members) == 1 and None not in members:
            return True
        for domain in {level(node) for node in inventory.nodes} - {None}:
            inside = like(free, [node for node in inventory.nodes if level(node) == domain])
            if isinstance(place(inside, found.gang, policy), Placement):
                return False
    return True


@given(free=used(most=4), gang=gangs(most=3), policy=st.sampled_from(POLICIES))
def test_a_place_is_found_if_there_is_any(free: Free, gang: Gang, policy: Policy) -> None:
    names = [node.name for node in free.inventory.nodes]
    possible = any(lawful(free, gang, choice) for choice in product(names, repeat=gang.members))
    assert isinstance(place(free, gang, policy), Placement) is possible


@given(free=used(), gang=gangs(), policy=st.sampled_from(POLICIES))
def test_a_request_has_a_place_once_it_gets_what_it_lacks_and_not_before(
    free: Free, gang: Gang, policy: Policy
) -> None:
    found = place(free, gang, policy)
    assume(isinstance(found, Unplaceable))
    if found.reason is Shortage.TOPOLOGY_PLACEMENT_FAILED:
        lacks = gang.tensor_parallel * (gang.groups - found.groups)
    elif gang.tensor_parallel > 1:
        lacks = gang.members
    else:
        lacks = gang.members - found.room
        assert isinstance(place(grown(free, gang, found, lacks - 1), gang, policy), Unplaceable)
    assert isinstance(place(grown(free, gang, found, lacks), gang, policy), Placement)
    assert (found.reason is Shortage.WAITING_FOR_INVENTORY) is (bool(found.gpu_type) and found.free < gang.gpus)


def grown(free: Free, gang: Gang, found: Unplaceable, members: int) -> Free:
    """The cluster with nodes for so many more members, in one NVLink domain."""
    kind = found.gpu_type or gang.member.gpu_type or "A100"
    nodes = [
        Node(name=f"added-{number}", gpu_type=kind, gpus=gang.member.gpus, nvlink_domain="added")
        for number in range(members)
    ]
    return like(free, [*free.inventory.nodes, *nodes])


def like(free: Free, nodes: list[Node]) -> Free:
    """Other nodes, of which those that are in ``free`` are used as there."""
    twin = Free(Inventory(nodes))
    for node in nodes:
        number = free.inventory.number.get(node.name)
        if number is not None and (gpus := node.gpus - free.holes[number].whole):
            twin.take(Placement(Gang(Ask(gpus)), (node.name,)))
    return twin
