"""What a kind of request may draw from, and which limits it meets there: what no lease changes.

A walk asks this for everybody who waits, and of thousands only few differ in what
decides whether they fit. So it is worked out once for each kind under the same
queues, and those that are alike have the very same terms.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from tiphys_plugin.ledger import pools
from tiphys_plugin.ledger.model import LeaseRequest
from tiphys_plugin.placement import Ask, Gang
from tiphys_plugin.queues import Queue, Queues

Alike = tuple[str, str | None, int, int, int, int | None, str]
"""All of a request that decides whether it fits."""
_REMEMBERED = 4096
"""Kinds under the same queues; whoever invents new ones all the time is not remembered for ever."""


class Limit(NamedTuple):
    """Something that can be used up: the quota of a queue, what a cohort lends, the GPUs of a type."""

    kind: str
    name: str
    pool: str = ""


@dataclass(frozen=True, eq=False)
class Source:
    """A pool that may serve it. ``types`` are limits of GPUs that exist; there are none where nobody declared them."""

    pool: str
    kind: str | None
    """Of the GPUs that it would get; None if they may be any."""
    existing: float
    types: frozenset[Limit]
    own: frozenset[Limit]
    """What it brings nearer while its queue has to borrow nothing."""
    borrowed: frozenset[Limit]
    """What it brings nearer, and can lack, otherwise."""
    gang: Gang


@dataclass(frozen=True, eq=False)
class Terms:
    """``sources`` are in the order in which they are tried, ``wants`` is all that requests of the kind could lack."""

    sources: tuple[Source, ...]
    wants: frozenset[Limit]


def alike_of(request: LeaseRequest) -> Alike:
    """Requests for which this is the same fit where one of them does."""
    shape = (request.gpus, request.members, request.tensor_parallel)
    return request.queue, request.gpu_type, *shape, request.min_gpu_memory_mb, request.spot


def terms_of(queues: Queues, queue: Queue, request: LeaseRequest) -> Terms:
    """The terms of ``request`` in ``queue``, which is its own; the same object for all that are alike."""
    alike = alike_of(request)
    if (known := queues.terms.get(alike)) is None:
        if len(queues.terms) >= _REMEMBERED:
            queues.terms.clear()
        known = queues.terms[alike] = _terms(queues, queue, request)
    assert isinstance(known, Terms)
    return known


def gang(request: LeaseRequest, pool: str) -> Gang:
    """What the nodes are asked for."""
    each, kind = request.gpus // request.members, pools.gpu_type(request, pool)
    return _gang(each, kind, request.min_gpu_memory_mb, request.members, request.tensor_parallel)


@lru_cache(maxsize=4096)
def _gang(gpus: int, gpu_type: str | None, memory_mb: int | None, members: int, tensor_parallel: int) -> Gang:
    return Gang(Ask(gpus, gpu_type, memory_mb), members, tensor_parallel)


def _terms(queues: Queues, queue: Queue, request: LeaseRequest) -> Terms:
    sources = tuple(_source(queues, queue, request, pool) for pool in pools.of(queues, queue, request))
    return Terms(sources, frozenset(limit for source in sources for limit in source.borrowed))


def _source(queues: Queues, queue: Queue, request: LeaseRequest, pool: str) -> Source:
    types = _types(queues, request, pool)
    own = {Limit("queue", queue.name, pool)} | types
    lent = {Limit("cohort", queue.cohort, pool)} if queue.cohort is not None else set()
    return Source(
        pool,
        pools.gpu_type(request, pool),
        pools.existing(queues, request, pool),
        frozenset(types),
        frozenset(own),
        frozenset(own | lent),
        gang(request, pool),
    )


def _types(queues: Queues, request: LeaseRequest, pool: str) -> set[Limit]:
    if queues.stock is None:
        return set()
    wanted = pools.gpu_type(request, pool)
    return {Limit("type", name) for name in ([wanted] if wanted else pools.fitting_types(queues, request))}
