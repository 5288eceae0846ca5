"""Where a request goes, or what it lacks: a pure function of what is free."""

from tiphys_plugin.placement.free import Free
from tiphys_plugin.placement.gangs import spread
from tiphys_plugin.placement.policies import Policy
from tiphys_plugin.placement.request import Gang, Placement
from tiphys_plugin.placement.shortage import Unplaceable, shortage


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
