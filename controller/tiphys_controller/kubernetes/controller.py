"""The controller, put together: it stands by until it leads, then watches, heals and tells."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime

from tiphys.errors import StoreError
from tiphys.kube import KubeApi, LeaderLease
from tiphys.kube.resources import LEASES
from tiphys.records import utc_now
from tiphys.store import Store
from tiphys_controller.alerts.inbox import Inbox
from tiphys_controller.alerts.rules import NOTIFY_OF_ALL, Rules
from tiphys_controller.automatic.limits import Limits, Mode
from tiphys_controller.kubernetes.automation import Automation, Parts, Work
from tiphys_controller.kubernetes.gangs import Gangs
from tiphys_controller.kubernetes.healer import Healer
from tiphys_controller.kubernetes.metrics import Metrics
from tiphys_controller.kubernetes.narrator import Narrator
from tiphys_controller.kubernetes.projections import Projector
from tiphys_controller.kubernetes.view import ClusterView
from tiphys_controller.kubernetes.watching import Watching
from tiphys_controller.kubernetes.writer import COMPONENT, Writer

LEASE = "tiphys-controller"
_END_SECONDS = 5.0


@dataclass(frozen=True)
class Surroundings:
    """What a controller is given."""

    api: KubeApi
    namespaces: tuple[str, ...] | None
    """Namespaces of workflows; None for all."""
    stores: Callable[[str], Store]
    identity: str
    """Name of the pod; unique among the controllers."""
    lease_namespace: str
    ledger: str = ""
    """Name of the `GPULedger` beside the Lease that is shown as objects; empty: none is."""
    limits: Limits = field(default_factory=lambda: Limits(mode=Mode.OFF))
    """Whether runs go on by themselves, and how many."""
    inbox: Inbox | None = None
    """Where alerts arrive; None where none do."""
    rules: Rules = field(default_factory=lambda: NOTIFY_OF_ALL)
    """What to do for which alert."""
    janitor: Mode = Mode.OFF
    """Whether what nobody needs is removed."""
    now: Callable[[], datetime] = utc_now
    monotonic: Callable[[], float] = time.monotonic


class Controller:
    """One candidate for leadership. Several may run; one leads.

    Args:
        given: Its surroundings.
        lease_seconds: After this time without a renewal another one leads.
        renew_seconds: Time between two renewals.
    """

    def __init__(self, given: Surroundings, lease_seconds: float = 15.0, renew_seconds: float = 2.0) -> None:
        self.metrics = Metrics()
        self._given = given
        self._lease = LeaderLease(
            given.api,
            given.lease_namespace,
            LEASE,
            given.identity,
            monotonic=given.monotonic,
            duration_seconds=lease_seconds,
            renew_seconds=renew_seconds,
        )
        self._watching: Watching | None = None
        self._narrator: Narrator | None = None

    def run(self, stop: threading.Event) -> None:
        """Stand by and lead until ``stop``; returns within seconds of it."""
        self._lease.lead(stop, self._work)

    def check(self) -> None:
        """Raise `StoreError` that says why this controller is not ready.

        One that stands by is ready if it sees the Lease; one that leads, if it
        sees everything that it has to watch, and can read and write.
        """
        watching, narrator = self._watching, self._narrator
        if watching is None or narrator is None:
            self._given.api.get(LEASES, self._given.lease_namespace, LEASE)
            return
        for what, why in sorted(watching.troubles.items()):
            raise StoreError(f"cannot watch {what}: {why}")
        if not watching.synced:
            raise StoreError("not all Workflows and pods have been listed yet")
        if narrator.trouble:
            raise StoreError(narrator.trouble)

    def _work(self, over: threading.Event) -> None:
        given, view = self._given, ClusterView()
        writer = Writer(given.api, lambda: self._lease.held, self.metrics, given.now, given.identity or COMPONENT)
        narrator = Narrator(view, given.stores, writer, self.metrics, given.now, given.monotonic)
        healer = Healer(view, writer, self.metrics)
        gangs = Gangs(view, given.api, writer, self.metrics, given.monotonic)
        self._watching, self._narrator = Watching(given.api, given.namespaces, view, self.metrics), narrator
        works: list[Work] = [("healer", healer.run), ("gangs", gangs.run), ("narrator", narrator.run)]
        works += Automation(self._parts(view, self._watching, writer)).works()
        if given.ledger:
            where = (given.lease_namespace, view, writer, self.metrics, given.monotonic, given.ledger)
            works.append(("projector", Projector(given.api, *where).run))
        workers = [threading.Thread(target=work, args=(over,), name=name, daemon=True) for name, work in works]
        self.metrics.leads.set(1)
        self._watching.start(over)
        for worker in workers:
            worker.start()
        over.wait()
        view.wake()
        for worker in workers:
            # One that waits for storage may take longer; it writes nothing any more, and dies with the process.
            worker.join(_END_SECONDS)
        self.metrics.leads.set(0)
        self._watching = self._narrator = None

    def _parts(self, view: ClusterView, watching: Watching, writer: Writer) -> Parts:
        given = self._given
        return Parts(
            given.api,
            given.namespaces,
            given.stores,
            view,
            watching,
            writer,
            self.metrics,
            lambda: self._lease.held,
            given.limits,
            given.monotonic,
            given.inbox,
            given.janitor,
            given.now,
            given.rules,
            given.lease_namespace,
        )
