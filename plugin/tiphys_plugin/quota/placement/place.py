"""Many pods on many nodes: as near to each other as they find room, all of them or none.

The smallest domain that holds all of them is taken, and of those that are
equally small the one with the least room to spare. Within it they go to as few
domains of the next level as possible, and so on down to the hosts. Source of
the rule: Kueue, "Topology Aware Scheduling".

Why a request finds no place, with numbers: what is free, and how it is scattered.

Where a request goes, or what it lacks: a pure function of what is free.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate

from tiphys_plugin.quota.placement.inventory import Domain, Fleet, Free
from tiphys_plugin.quota.placement.model import Ask, Gang, Hole, Placement, members_in, suits
from tiphys_plugin.quota.placement.scoring import Policy


def spread(free: Free, gang: Gang, policy: Policy) -> tuple[int, ...] | None:
    """Number of the node of each member, in the order of the topology; None if they do not fit."""
    kind = gang.member.gpu_type
    fleets = [fleet for fleet in free.inventory.fleets.values() if kind in (None, fleet.gpu_type)]
    large = [fleet for fleet in fleets if members_in_all(free, fleet, gang.member) >= gang.members]
    rooms = [room for fleet in large if (room := Room(free, fleet, gang)).groups >= gang.groups]
    if not rooms:
        return None
    return tuple(sorted(min(rooms, key=lambda room: room.rank).fill(policy)))


def members_in_all(free: Free, fleet: Fleet, ask: Ask) -> int:
    """Pods that find room on the nodes of ``fleet``, wherever these stand."""
    return sum(members_in(hole, ask) * len(free.nodes_with(hole)) for hole in free.offered(fleet.gpu_type))


class Room:
    """How many members find room on each node of a fleet, and how many groups of them in each domain."""

    def __init__(self, free: Free, fleet: Fleet, gang: Gang) -> None:
        self._free = free
        self._fleet = fleet
        self._gang = gang
        self._start = fleet.whole.start
        self._members = self._count()
        self._running = list(accumulate(self._members, initial=0))
        if gang.tensor_parallel > 1:
            self._running = list(accumulate(self._count_groups(), initial=0))

    @property
    def groups(self) -> int:
        return self._running[-1]

    @property
    def rank(self) -> tuple[int, float, int, str]:
        """Which of several fleets should serve the gang: the nearer, the smaller, the fuller one."""
        level, home = self._home()
        return level, self._fleet.memory_mb, self._in(home), self._fleet.gpu_type

    def fill(self, policy: Policy) -> Iterator[int]:
        """A node for each member; they fit."""
        level, home = self._home()
        return self._fill(level, home, self._gang.groups, policy)

    def _count(self) -> list[int]:
        found = [0] * (self._fleet.whole.stop - self._start)
        for hole in self._free.offered(self._fleet.gpu_type):
            if room := members_in(hole, self._gang.member):
                for number in self._free.nodes_with(hole):
                    found[number - self._start] = room
        return found

    def _count_groups(self) -> list[int]:
        """Groups in each NVLink domain, at its first node."""
        found = [0] * len(self._members)
        for link in self._fleet.links.domains:
            found[link.start - self._start] = self._in(link) // self._gang.tensor_parallel
        return found

    def _in(self, domain: Domain) -> int:
        return self._running[domain.stop - self._start] - self._running[domain.start - self._start]

    def _home(self) -> tuple[int, Domain]:
        """The smallest domain that holds the gang, and its level; the last is the whole fleet."""
        for level, one in enumerate(self._fleet.levels):
            known = [(self._in(domain), domain) for domain in one.domains if domain.known]
            if large := [found for found in known if found[0] >= self._gang.groups]:
                return level, min(large)[1]
        return len(self._fleet.levels), self._fleet.whole

    def _fill(self, level: int, home: Domain, groups: int, policy: Policy) -> Iterator[int]:
        if level > 0:
            for domain, part in self._fewest(self._fleet.levels[level - 1].within(home), groups):
                yield from self._fill(level - 1, domain, part, policy)
        elif self._gang.tensor_parallel > 1:
            for link, part in self._fewest(self._fleet.links.within(home), groups):
                yield from self._hosts(link, part * self._gang.tensor_parallel, policy)
        else:
            yield from self._hosts(home, groups, policy)

    def _fewest(self, domains: Sequence[Domain], groups: int) -> Iterator[tuple[Domain, int]]:
        """The largest first; what is left then goes where it leaves the least room."""
        inside = [(room, domain) for domain in domains if (room := self._in(domain))]
        inside.sort(key=lambda found: (-found[0], found[1]))
        for number, (room, domain) in enumerate(inside):
            if room >= groups:
                yield min(found for found in inside[number:] if found[0] >= groups)[1], groups
                return
            yield domain, room
            groups -= room

    def _hosts(self, home: Domain, members: int, policy: Policy) -> Iterator[int]:
        """The same for hosts, where the policy says which of those that hold the rest should."""
        numbers = [number for number in range(home.start, home.stop) if self._members[number - self._start]]
        numbers.sort(key=lambda number: -self._members[number - self._start])
        for position, number in enumerate(numbers):
            if (room := self._members[number - self._start]) < members:
                yield from [number] * room
                members -= room
                continue
            holes = {self._free.holes[one]: one for one in reversed(numbers[position:])}
            pick = policy.choose(holes, self._gang.member.times(members))
            assert pick is not None  # it has room for each of them, so it has for all
            yield from [holes[pick.hole]] * members
            return


class Shortage(StrEnum):
    """The words are those that a deferred request is told."""

    NO_MATCHING_GPU_TYPE = "NoMatchingGpuType"
    GPU_MEMORY_TOO_SMALL = "GpuMemoryTooSmall"
    WAITING_FOR_INVENTORY = "WaitingForInventory"
    GANG_FRAGMENTED = "GangFragmented"
    TOPOLOGY_PLACEMENT_FAILED = "TopologyPlacementFailed"


@dataclass(frozen=True)
class Unplaceable:
    """No place now. The numbers are of the GPU type that comes nearest."""

    reason: Shortage
    message: str
    gpu_type: str = ""
    free: int = 0
    """GPUs that nobody uses, on nodes that offer them."""
    largest_node: int = 0
    """The most of them on one node."""
    room: int = 0
    """Members that would find room, each by itself."""
    groups: int = 0
    """Groups that would find room, each in its NVLink domain."""


def shortage(free: Free, gang: Gang) -> Unplaceable:
    """What ``gang`` lacks; it has no place."""
    ask = gang.member
    if ask.gpus == 0:
        return Unplaceable(Shortage.WAITING_FOR_INVENTORY, "no node has the CPUs and the memory free")
    if (never := _unsuitable(free, gang)) is not None:
        return never
    if ask.is_share:
        what = f"no GPU{_of(ask.gpu_type)} has {ask.gpu_milli}/1000 free{_host(gang)}"
        return Unplaceable(Shortage.GANG_FRAGMENTED, what)
    return max((_of_fleet(free, gang, fleet) for fleet in _fleets(free, gang)), key=lambda it: (it.room, it.free))


def _unsuitable(free: Free, gang: Gang) -> Unplaceable | None:
    ask = gang.member
    fleets = free.inventory.fleets
    if ask.gpu_type not in (None, *fleets):
        known = ", ".join(sorted(fleets)) or "no GPU"
        return Unplaceable(Shortage.NO_MATCHING_GPU_TYPE, f"the nodes have no {ask.gpu_type}; they have: {known}")
    if not fleets:
        return Unplaceable(Shortage.NO_MATCHING_GPU_TYPE, "no node has a GPU")
    if not _fleets(free, gang):
        why = f"no GPU{_of(ask.gpu_type)} has {ask.min_gpu_memory_mb} MB"
        return Unplaceable(Shortage.GPU_MEMORY_TOO_SMALL, f"{why}; ask for less memory or another type")
    return None


def _fleets(free: Free, gang: Gang) -> list[Fleet]:
    """Nodes of one type each that have what is wanted, free or not."""
    kind, memory = gang.member.gpu_type, gang.member.min_gpu_memory_mb or 0
    fleets = free.inventory.fleets.values()
    return [fleet for fleet in fleets if kind in (None, fleet.gpu_type) and fleet.memory_mb >= memory]


def _of_fleet(free: Free, gang: Gang, fleet: Fleet) -> Unplaceable:
    offered = {hole: len(free.nodes_with(hole)) for hole in free.offered(fleet.gpu_type) if _serves(hole, gang)}
    total = sum(max(0, hole.whole) * nodes for hole, nodes in offered.items())
    largest = max((max(0, hole.whole) for hole in offered), default=0)
    room = members_in_all(free, fleet, gang.member)
    groups = 0
    each = gang.member.gpus
    if total < gang.gpus:
        reason, but = Shortage.WAITING_FOR_INVENTORY, f"and {gang.gpus} {_are(gang.gpus)} needed"
    elif room < gang.members:
        pods = f"; {room} of {gang.members} pods find room" if gang.members > 1 else ""
        reason, but = Shortage.GANG_FRAGMENTED, f"but at most {largest} on one node, and {each} are needed on one{pods}"
    else:
        groups = Room(free, fleet, gang).groups
        found = f"{groups} of the {gang.groups} groups of {gang.tensor_parallel * each} that must not leave one"
        reason, but = Shortage.TOPOLOGY_PLACEMENT_FAILED, f"but NVLink domains hold {found}"
    are = f"{total} {fleet.gpu_type} {_are(total)} free{_host(gang)}"
    return Unplaceable(reason, f"{are}, {but}{_withheld(free, fleet)}", fleet.gpu_type, total, largest, room, groups)


def _serves(hole: Hole, gang: Gang) -> bool:
    """Whether its GPUs are of use to a member, as far as some are free."""
    ask = gang.member
    return suits(hole, ask) and hole.cpu_milli >= ask.cpu_milli and hole.host_memory_mb >= ask.host_memory_mb


def _withheld(free: Free, fleet: Fleet) -> str:
    """What cordoned nodes would add."""
    whole = fleet.whole
    numbers = (number for number in free.withheld if whole.start <= number < whole.stop)
    gpus = sum(max(0, free.holes[number].whole) for number in numbers)
    return f"; {gpus} more {_are(gpus)} free on cordoned nodes" if gpus else ""


def _host(gang: Gang) -> str:
    """A reminder that GPUs without the CPUs and the memory for them do not count."""
    needs_host = gang.member.cpu_milli or gang.member.host_memory_mb
    return " beside enough CPUs and memory" if needs_host else ""


def _of(gpu_type: str | None) -> str:
    return f" of type {gpu_type}" if gpu_type else ""


def _are(gpus: int) -> str:
    return "is" if gpus == 1 else "are"


def place(free: Free, gang: Gang, policy: Policy) -> Placement | Unplaceable:
    """A node for each member, or why there is none. ``free`` is not changed: `Free.take` what was found.

    All members go to one node if one has room for all: to which, says the
    policy. Otherwise they go to nodes that are near each other.
    """
    nodes = free.inventory.nodes
    pick = policy.choose(free.offered(_type(gang)), gang.member.times(gang.members))
    if pick is not None:
        name = nodes[free.nodes_with(pick.hole)[0]].name
        return Placement(gang, (name,) * gang.members, pick.device_milli)
    if gang.members > 1 and (numbers := spread(free, gang, policy)) is not None:
        return Placement(gang, tuple(nodes[number].name for number in numbers))
    return shortage(free, gang)


def _type(gang: Gang) -> str | None:
    """Nodes of other types need not be looked at; for what needs no GPU all nodes are the same."""
    return gang.member.gpu_type if gang.member.gpus else None
