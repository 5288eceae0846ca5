"""The GPU ledger state and its transitions: leases, pending requests and usage history.

Every rule about leases except the scheduling decision is here or in
`tiphys_plugin.quota.ledger.transitions`, as a pure function from one state to
the next. Callers pass in the time and new lease ids. A backend only loads the
state, applies one transition, and stores the difference atomically; a
transition without an effect returns an equal state.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from itertools import compress, count
from operator import attrgetter, not_

from tiphys_plugin.quota.lease import EndedUsage, Lease, LeaseRequest, LedgerSnapshot, PendingRequest
from tiphys_plugin.quota.ledger.entry_index import lease_index, pending_index
from tiphys_plugin.quota.queues import QueueRules, Queues
from tiphys_plugin.quota.scheduler import pools
from tiphys_plugin.quota.scheduler.capacity import Capacity
from tiphys_plugin.quota.scheduler.changes import find_changes
from tiphys_plugin.quota.scheduler.fair_share import add_ended_usage, attained_gpu_seconds
from tiphys_plugin.quota.scheduler.queue_order import drop_unused_attained, with_cohort

_lease_id = attrgetter("id")
_granted_at = attrgetter("granted_at")
_FEW = 16


@dataclass(frozen=True)
class LedgerState:
    """Leases, pending requests in order of arrival, and the decayed usage of ended leases.

    A replay key has at most one lease, and a step of a workflow at most one pending request.
    """

    leases: tuple[Lease, ...] = ()
    pending: tuple[PendingRequest, ...] = ()
    history: tuple[EndedUsage, ...] = ()

    @property
    def next_arrival(self) -> int:
        """Arrival number of the next pending request. The number of a request that left the end may be reused."""
        return self.pending[-1].arrival + 1 if self.pending else 1

    def snapshot(self, rules: QueueRules) -> LedgerSnapshot:
        return LedgerSnapshot(self.leases, self.pending, rules, self.history)

    def restore(
        self,
        lease: str,
        request: LeaseRequest,
        gpu_type: str | None,
        nodes: tuple[str, ...],
        running_members: int,
        rules: QueueRules,
        now: datetime,
    ) -> "tuple[LedgerState, int]":
        """Record a lease that was granted before, see `AdmissionBackend.restore`; also the GPUs that it holds then."""
        attempt = (request.workflow_step, request.attempt)
        for recorded in self.leases:
            if recorded.id == lease or attempt == (recorded.request.workflow_step, recorded.request.attempt):
                return self, recorded.request.gpus
        queue = rules.find(request.queue) if isinstance(rules, Queues) else None
        if queue is not None and not queue.is_usable_by(request.namespace):
            return self, 0
        if queue is not None and queue.max_priority is not None:
            request = replace(request, priority=min(request.priority, queue.max_priority))
        request = with_cohort(rules, request)
        pool = gpu_type or pools.find_pool_of_request(rules, request, None)
        if running_members < request.members and not self._has_quota(rules, request, pool):
            if running_members == 0:
                return self, 0
            request, nodes = request.with_members(running_members), nodes[:running_members]
        restored = Lease(lease, request, pool, granted_at=now, check_at=now, nodes=nodes)
        return replace(self, leases=(*self.leases, restored)), request.gpus

    def _has_quota(self, rules: QueueRules, request: LeaseRequest, granted_pool: str) -> bool:
        """Whether the queue may hold the GPUs of ``request`` beside what it holds."""
        queue = rules.find(request.queue) if isinstance(rules, Queues) else None
        if not isinstance(rules, Queues) or queue is None:
            return False
        pool = pools.find_pool_of_request(rules, request, granted_pool)
        return pool in queue.gpus and Capacity(rules, self.leases).available_gpus(queue, pool) >= request.gpus

    def withdraw(self, uid: str) -> "LedgerState":
        """Drop the pending requests of a workflow."""
        return replace(self, pending=tuple(one for one in self.pending if one.request.uid != uid))

    def release(self, lease: str, rules: QueueRules, now: datetime) -> "LedgerState":
        """Release a lease; the same state if there is no such lease."""
        found = lease_index.find_by_id(self.leases, lease)
        return self if found is None else self._without_leases([found], rules, now)

    def shrink(
        self, lease: str, members: int, nodes: tuple[str, ...], rules: QueueRules, now: datetime
    ) -> "LedgerState":
        """Release the GPUs of lost members of an elastic gang, of which ``members`` remain on ``nodes``."""
        before = lease_index.find_by_id(self.leases, lease)
        if before is None or not 0 < members < before.request.members:
            return self
        if before.nodes and (len(nodes) != members or Counter(nodes) - Counter(before.nodes)):
            return self
        notice = before.preemption
        has_shrunk_enough = notice is not None and notice.keeps is not None and members <= notice.keeps
        remaining = replace(
            before,
            request=before.request.with_members(members),
            nodes=nodes if before.nodes else (),
            preemption=None if has_shrunk_enough else notice,
        )
        released = replace(before, request=before.request.with_members(before.request.members - members))
        return replace(
            self._promise_freed_gpus([released], now),
            leases=tuple(remaining if one.id == before.id else one for one in self.leases),
            history=add_ended_usage(self.history, [released], rules, now),
        )

    def release_workflow(self, uid: str, now: datetime) -> "LedgerState":
        """Drop the pending requests of a workflow, and make its leases due for a check."""
        leases = tuple(replace(one, check_at=now) if one.request.uid == uid else one for one in self.leases)
        return replace(self.withdraw(uid), leases=leases)

    def leases_due_for_check(self, now: datetime, check_every: timedelta) -> list[Lease]:
        """Leases whose check is due. A check later than ``check_every`` ahead is due too: the clock was set back."""
        return [one for one in self.leases if one.check_at <= now or one.check_at > now + check_every]

    def record_check(
        self, checked: Collection[Lease], gone: Sequence[Lease], check_at: datetime, rules: QueueRules, now: datetime
    ) -> "LedgerState":
        """Release the leases ``gone``, and set the next check of the other ``checked`` leases to ``check_at``."""
        checked_ids = {one.id for one in checked}
        # A lease that was transferred to another attempt since the check is kept: its request differs.
        gone_requests = {one.id: one.request for one in gone}
        ended = [one for one in self.leases if gone_requests.get(one.id) == one.request]
        remaining = self._without_leases(ended, rules, now)
        leases = tuple(replace(one, check_at=check_at) if one.id in checked_ids else one for one in remaining.leases)
        return replace(remaining, leases=leases)

    def with_seen_at(self, seen_at: Mapping[tuple[str, str, str], datetime]) -> "LedgerState":
        """The state with later ``seen_at`` times of pending requests, by replay key."""

        def update(one: PendingRequest) -> PendingRequest:
            latest = seen_at.get(one.request.key, one.seen_at)
            return replace(one, seen_at=latest) if latest > one.seen_at else one

        return replace(self, pending=tuple(map(update, self.pending)))

    def _without_leases(self, ended_leases: Sequence[Lease], rules: QueueRules, now: datetime) -> "LedgerState":
        if not ended_leases:
            return self
        after = replace(
            self._promise_freed_gpus(ended_leases, now),
            leases=_without(self.leases, ended_leases),
            history=add_ended_usage(self.history, ended_leases, rules, now),
        )
        for one in ended_leases:
            if one.preemption is not None and one.preemption.moves:
                after = after._with_promised_move(one, rules, now)
        return after

    def _with_promised_move(self, moved: Lease, rules: QueueRules, now: datetime) -> "LedgerState":
        """The state in which the next attempt of a lease that moves waits already, and GPUs are kept for it.

        Its request comes some seconds later. Meanwhile others would take the room that it leaves its nodes for.
        """
        if pending_index.find(self.pending, moved.request.workflow_step):
            return self
        request = drop_unused_attained(
            rules,
            replace(moved.request, attempt=moved.request.attempt + 1, attained=attained_gpu_seconds(moved, now)),
        )
        pending = PendingRequest(request, self.next_arrival, since=now, seen_at=now, promised_at=now)
        return replace(self, pending=(*self.pending, pending))

    def _promise_freed_gpus(self, ended_leases: Sequence[Lease], now: datetime) -> "LedgerState":
        """Keep the GPUs of ended victims for their preemptors, which repeat their requests only every few seconds."""
        preemptors = {one.preemption.preemptor for one in ended_leases if one.preemption is not None}
        if not preemptors:
            return self

        def promise(one: PendingRequest) -> PendingRequest:
            return replace(one, promised_at=now) if one.request.workflow_step in preemptors else one

        return replace(self, pending=tuple(map(promise, self.pending)))

    def needs_write(self, earlier: "LedgerState", refresh_after: timedelta) -> bool:
        """Whether the state differs from ``earlier`` by more than ``seen_at`` times that moved less than
        ``refresh_after``.
        """
        if self.leases != earlier.leases or len(self.pending) != len(earlier.pending):
            return True
        removed, added = find_changes(earlier.pending, self.pending)
        return len(removed) != len(added) or any(
            replace(one, seen_at=other.seen_at) != other or abs(one.seen_at - other.seen_at) >= refresh_after
            for one, other in zip(added, removed, strict=True)
        )


def _without(leases: tuple[Lease, ...], ended: Sequence[Lease]) -> tuple[Lease, ...]:
    """``leases`` without those that have the ids of ``ended``."""
    if len(ended) > _FEW:
        ended_ids = {one.id for one in ended}
        return tuple(compress(leases, map(not_, map(ended_ids.__contains__, map(_lease_id, leases)))))
    for one in ended:
        if (index := _index_of(leases, one)) is not None:
            leases = leases[:index] + leases[index + 1 :]
    return leases


def _index_of(leases: tuple[Lease, ...], lease: Lease) -> int | None:
    """The place of the lease with this id. Leases are in order of their grants unless clocks of services differ."""
    first = bisect_left(leases, lease.granted_at, key=_granted_at)
    for index in range(first, min(first + _FEW, len(leases))):
        if leases[index].id == lease.id:
            return index
    return next(compress(count(), map(lease.id.__eq__, map(_lease_id, leases))), None)
