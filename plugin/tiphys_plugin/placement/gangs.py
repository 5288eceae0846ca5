"""Many pods on many nodes: as near to each other as they find room, all of them or none.

The smallest domain that holds all of them is taken, and of those that are
equally small the one with the least room to spare. Within it they go to as few
domains of the next level as possible, and so on down to the hosts. Source of
the rule: Kueue, "Topology Aware Scheduling".
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate

from tiphys_plugin.placement.free import Free
from tiphys_plugin.placement.hole import members_in
from tiphys_plugin.placement.inventory import Domain, Fleet
from tiphys_plugin.placement.policies import Policy
from tiphys_plugin.placement.request import Ask, Gang


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
