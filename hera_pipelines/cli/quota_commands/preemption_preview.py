"""Who would have to go for a step that waits, as `tiphys why` tells it: the service's own choice, without a mark."""

from collections.abc import Iterator
from datetime import datetime
from typing import Any

from rich.text import Text
from tiphys_plugin.attempts.liveness import Stores
from tiphys_plugin.eviction.cost import Losses
from tiphys_plugin.quota.lease import Lease, Waiting
from tiphys_plugin.quota.ledger.state import Book
from tiphys_plugin.quota.ledger.transitions import FORGET_AFTER, case_of
from tiphys_plugin.quota.preemption.victims import Lost, Nobody, Victims, choose, held_gpu_seconds
from tiphys_plugin.quota.queues import QueueRules, in_words
from tiphys_plugin.quota.scheduler.decide import called, clock
from tiphys_plugin.runtime.context import OnlyStore

from tiphys.records import utc_now
from tiphys.store import TenantStores, open_store
from tiphys.store.open import PLACEHOLDER


def losses(url: str | None, now: datetime) -> Lost:
    """What trainings would lose: since their last checkpoint in this store; without one, all that they have done."""
    if url is None:
        return lambda leases: {one.id: held_gpu_seconds(one, now) for one in leases}
    return Losses(stores_at(url), utc_now)


def stores_at(url: str) -> Stores:
    """The stores of all tenants at a URL, {namespace} in it for the name of each."""
    return TenantStores(url, None) if PLACEHOLDER in url else OnlyStore(open_store(url, must_exist=True))


def rehearsed(rules: QueueRules, book: Book, one: Waiting, lost: Lost, now: datetime) -> Victims | Nobody:
    """Who would be asked now to leave for ``one``."""
    # It is looked at as one that waits, however long ago it has asked.
    patience = max(FORGET_AFTER, now - one.seen_at)
    found = case_of(book, rules, (one.request.uid, one.request.step), now, patience)
    return choose(*found, lost, now) if found is not None else Nobody("it does not wait any more")


def told(found: Victims | Nobody, *, exactly: bool) -> Iterator[Text]:
    """The same in words; ``exactly`` if the losses are those since the last checkpoint."""
    if isinstance(found, Nobody):
        reason = f"{found.reason}: " if found.reason else ""
        yield Text(f"  nobody goes for it: {reason}{found.message}")
        return
    for lease in found.leases:
        request, lost = lease.request, found.lost[lease.id]
        gpus = in_words(request.gpus, request.gpu_type)
        amount = f"{'' if exactly else 'at most '}{lost / request.gpus:.0f} s, {lost:.0f} GPU-seconds"
        yield Text(
            f"  {called(request)} ({gpus} of queue {request.queue}, priority {request.priority}) would be asked to "
            f"save and go, and lose {amount} if it saved nothing"
        )


def document(found: Victims | Nobody) -> dict[str, Any]:
    """The same for a program."""
    if isinstance(found, Nobody):
        reason = {"reason": str(found.reason)} if found.reason else {}
        return {"victims": [], **reason, "message": found.message}
    return {
        "victims": [
            {
                "run": one.request.run,
                "step": one.request.step,
                "gpus": one.request.gpus,
                "queue": one.request.queue,
                "gpuSecondsLost": round(found.lost[one.id], 1),
            }
            for one in found.leases
        ]
    }


def leaves(lease: Lease) -> str:
    """What is said of one that holds GPUs and was asked; empty for others."""
    leaving = lease.leaving
    if leaving is None:
        return ""
    return f"; it was asked to save and go at {clock(leaving.asked_at)}, by {clock(leaving.deadline)} at the latest"
