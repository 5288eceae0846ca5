"""An elastic training as those members that it needs, and each that it could do without.

So the choice of who has to go is made among members as it is among trainings,
by the same laws, and without a training that would have to go as a whole.
"""

from collections import Counter
from collections.abc import Collection, Container
from dataclasses import replace
from datetime import datetime, timedelta
from functools import lru_cache

from tiphys_plugin.ledger.decide import State
from tiphys_plugin.ledger.model import Lease, Leaving

_MARK = "/"
"""Between the id of a lease, which is hexadecimal, and the number of a member."""


def is_part(lease_id: str) -> bool:
    """Whether this is one member of a lease."""
    return _MARK in lease_id


def whole(lease_id: str) -> str:
    """The lease that a member belongs to; the lease itself."""
    return lease_id.partition(_MARK)[0]


def with_parts(state: State) -> State:
    """``state`` in which each member that can be spared is a lease of its own; the same object if there is none."""
    leases = tuple(part for one in state.leases for part in parts(one))
    return state if len(leases) == len(state.leases) else replace(state, leases=leases)


def only_parts(state: State, out_of_reach: Container[str]) -> frozenset[str]:
    """Ids of what may not be asked where only members may be: all other leases, and members of those out of reach."""
    return frozenset(one.id for one in state.leases if not is_part(one.id) or whole(one.id) in out_of_reach)


@lru_cache(maxsize=4096)
def parts(lease: Lease) -> tuple[Lease, ...]:
    """What a lease cannot do without, and each member that it can."""
    held = lease.request
    if held.min_members is None or lease.leaving is not None or held.tensor_parallel > 1:
        return (lease,)
    spare = [
        replace(lease, id=f"{lease.id}{_MARK}{number}", request=held.of(1), nodes=lease.nodes[number : number + 1])
        for number in range(held.min_members, held.members)
    ]
    return (stays(lease, held.min_members), *spare) if spare else (lease,)


def stays(lease: Lease, members: int) -> Lease:
    """What is left of a lease when all but its first members have gone."""
    return replace(lease, request=lease.request.of(members), nodes=lease.nodes[:members])


def asked(lease: Lease, going: Collection[Lease], for_whom: tuple[str, str], now: datetime, grace: timedelta) -> Lease:
    """The lease of which these members, or it as a whole, have been asked to leave; those that go are its last."""
    uid, step = for_whom
    if not all(is_part(one.id) for one in going):
        return replace(lease, leaving=Leaving(uid, step, now, now + grace))
    keeps = lease.request.members - len(going)
    last = [node for one in going for node in one.nodes]
    first = list((Counter(lease.nodes) - Counter(last)).elements())
    leaving = Leaving(uid, step, now, now + grace, keeps)
    return replace(lease, nodes=(*first, *last), leaving=leaving)
