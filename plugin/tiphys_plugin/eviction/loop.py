"""The job of every service that has trainings go: choose, mark, ask, every few seconds.

Any number of services may do it at the same time. The mark is one step of the
book, decided by the book as it is at that instant, so that one of them wins; to
ask twice does no more than to ask once. Whatever is marked is asked in every
round until its pods are gone, so a service that dies between the two leaves
nothing behind.
"""

from collections.abc import Callable
from datetime import datetime, timedelta

import structlog

from tiphys.errors import TiphysError
from tiphys.faults import failpoint
from tiphys.records import utc_now
from tiphys_plugin.attempts.liveness import Stores
from tiphys_plugin.cluster.interface import Cluster
from tiphys_plugin.eviction.cost import Losses
from tiphys_plugin.eviction.evict import ask, give_back, grace_seconds, living_pods
from tiphys_plugin.quota.lease import AdmissionBackend, Lease, Snapshot, Waiting
from tiphys_plugin.quota.ledger.state import Book
from tiphys_plugin.quota.ledger.transitions import FORGET_AFTER, case_of
from tiphys_plugin.quota.preemption.victims import Victims, choose, comes_free, whole
from tiphys_plugin.quota.queues import Queue, Queues
from tiphys_plugin.quota.scheduler.decide import called
from tiphys_plugin.quota.scheduler.fair_share import place_in_queue
from tiphys_plugin.runtime.background import Rounds
from tiphys_plugin.runtime.settings import Settings

_MOST_IN_VAIN = 4
"""After so many of a queue for whom nobody goes, those who wait behind them are not looked at in this round."""
_LONGEST_END_SECONDS = 20.0
"""How long a service that ends waits for a round under way; the API server may hang."""
_log = structlog.get_logger()


class Preemptions(Rounds):
    """Looks every ``every_seconds`` between ``__enter__`` and ``__exit__``.

    Where no queue preempts it only gives back what elastic trainings have lost.
    """

    def __init__(
        self,
        ledger: AdmissionBackend,
        cluster: Cluster,
        stores: Stores,
        *,
        every_seconds: float = Settings.preemption_seconds,
        clock: Callable[[], datetime] = utc_now,
        forget_after: timedelta = FORGET_AFTER,
    ) -> None:
        super().__init__("preemption", every_seconds, _LONGEST_END_SECONDS)
        self._ledger = ledger
        self._cluster = cluster
        self._stores = stores
        self._clock = clock
        self._forget_after = forget_after
        self._lost = Losses(stores, clock)

    def look(self) -> None:
        """One round.

        Raises:
            StoreError: the ledger did not answer.
        """
        seen = self._ledger.snapshot()
        give_back(self._ledger, self._cluster, self._stores, seen.leases)
        for lease in seen.leases:
            if lease.leaving is not None:
                self._ask(lease)
        if isinstance(seen.queues, Queues):
            for queue in filter(lambda one: one.preempts, seen.queues.queues):
                self._help_queue(queue)

    def _help_queue(self, queue: Queue) -> None:
        """Have others leave for those with the best places of a queue, until it was in vain for some of them."""
        seen, in_vain = self._ledger.snapshot(), 0
        coming = [one.leaving for one in seen.leases if one.leaving is not None and comes_free(one, self._clock())]
        promised = {(leaving.uid, leaving.step) for leaving in coming}
        line = [one for one in seen.waiting if one.request.queue == queue.name]
        for mine in sorted(line, key=lambda one: place_in_queue(queue, one.request, one.arrival)):
            if in_vain == _MOST_IN_VAIN:
                return
            if (mine.request.uid, mine.request.step) in promised:
                continue
            if self._help(mine, seen):
                seen = self._ledger.snapshot()
            else:
                in_vain += 1

    def _help(self, mine: Waiting, seen: Snapshot) -> bool:
        """Have others leave for one that waits, if the rules have it so; whether they do."""
        who, now = (mine.request.uid, mine.request.step), self._clock()
        found = case_of(Book(seen.leases, seen.waiting, seen.history), seen.queues, who, now, self._forget_after)
        if found is None:
            return False
        out_of_reach = {one.id for one in seen.leases if not self._stores.serves(one.request.namespace)}
        chosen = choose(*found, self._lost, now, out_of_reach)
        if not isinstance(chosen, Victims):
            return False
        graces = {one.id: grace_seconds(living_pods(self._cluster, one)) for one in chosen.leases}
        marked = self._ledger.ask_to_leave(who, graces)
        failpoint("preemption.after_mark")
        for lease in marked:
            _tell(lease, mine, chosen)
            self._ask(lease)
        return bool(marked)

    def _ask(self, lease: Lease) -> None:
        """One that cannot be asked now is asked in the next round, and keeps nobody else from being asked."""
        held = lease.request
        try:
            if self._stores.serves(held.namespace) and ask(self._cluster, lease):
                _log.info("preemption.asked", run=held.run, step=held.step, attempt=held.attempt)
        except TiphysError as error:
            _log.error("preemption.not_asked", run=held.run, step=held.step, attempt=held.attempt, error=str(error))


def _tell(lease: Lease, mine: Waiting, chosen: Victims) -> None:
    held, leaving = lease.request, lease.leaving
    going = [one for one in chosen.leases if whole(one.id) == lease.id]
    _log.info(
        "preemption.decided",
        run=held.run,
        step=held.step,
        attempt=held.attempt,
        gpus=sum(one.request.gpus for one in going),
        for_whom=called(mine.request),
        deadline=str(leaving.deadline) if leaving else "",
        gpu_seconds_lost_at_most=round(sum(chosen.lost[one.id] for one in going)),
    )
