"""The controller, put together: it stands by until it leads, then watches, heals and tells.

Puts together what acts by itself while this controller leads.

Listens for Kubernetes, Prometheus and `tiphys doctor`, and for the calls behind the door.
"""

import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from urllib.parse import urlsplit

from starlette.routing import Route

from tiphys.errors import StoreError
from tiphys.kube import KubeApi, LeaderLease, cluster_name
from tiphys.kube.resources import GPU_LEDGERS, LEASES, LEDGER_NAME
from tiphys.records import utc_now
from tiphys.service.http_server import AppServer
from tiphys.store import Store
from tiphys_controller.alerts.rules import NOTIFY_OF_ALL, Rules
from tiphys_controller.alerts.webhook import Inbox
from tiphys_controller.auto_resume.act import Attendant
from tiphys_controller.auto_resume.act import Surroundings as AttendantSurroundings
from tiphys_controller.auto_resume.observation_health import Sight
from tiphys_controller.auto_resume.state import Limits, Mode
from tiphys_controller.kubernetes.alert_worker import AlertWorker
from tiphys_controller.kubernetes.auto_resume_loop import Given, Resumer
from tiphys_controller.kubernetes.events.auto_resume_events import ResumeNews
from tiphys_controller.kubernetes.events.recorder import Narrator
from tiphys_controller.kubernetes.gpu_projections import Projector
from tiphys_controller.kubernetes.janitor import Janitor
from tiphys_controller.kubernetes.kubernetes_submitter import KubernetesSubmitter
from tiphys_controller.kubernetes.metrics import Metrics
from tiphys_controller.kubernetes.pod_cleanup import Gangs, Healer
from tiphys_controller.kubernetes.watch_cache import ClusterView, Watching
from tiphys_controller.kubernetes.writer import COMPONENT, Writer
from tiphys_controller.server.app import create_app

Work = tuple[str, Callable[[threading.Event], None]]
"""A name, and what works until the event is set."""


@dataclass(frozen=True)
class Parts:
    """What a controller has while it leads."""

    api: KubeApi
    namespaces: tuple[str, ...] | None
    stores: Callable[[str], Store]
    view: ClusterView
    watching: Watching
    writer: Writer
    metrics: Metrics
    may_write: Callable[[], bool]
    limits: Limits
    monotonic: Callable[[], float]
    inbox: Inbox | None = None
    """Where alerts arrive; None where none do."""
    janitor: Mode = Mode.OFF
    now: Callable[[], datetime] = utc_now
    rules: Rules = field(default_factory=lambda: NOTIFY_OF_ALL)
    home: str = ""
    """Namespace of the release, where the ledger is."""


def submitter_of(api: KubeApi) -> Callable[[], KubernetesSubmitter]:
    """The cluster as a place for Workflows; its name is asked for when it is needed first."""
    return functools.cache(lambda: KubernetesSubmitter(api, cluster_name(api)))


class Automation:
    """The loop that resumes runs, and the worker that acts on alerts; both have one attendant."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        view = parts.view
        self._sight = Sight(
            lambda: _blind(parts.watching),
            lambda: sum(one.auto_resume and not one.finished for one in view.workflows()),
            parts.limits,
            parts.monotonic,
        )
        surroundings = AttendantSurroundings(
            parts.stores, submitter_of(parts.api), parts.may_write, self._sight.health, parts.monotonic
        )
        self._attendant = Attendant(surroundings, parts.limits)

    def works(self) -> Iterator[Work]:
        """What there is to do."""
        if self._parts.limits.mode is not Mode.OFF:
            yield "resumer", self.resumer().run
        if self._parts.inbox is not None:
            yield "alerts", self.alerts(self._parts.inbox).run
        if self._parts.janitor is not Mode.OFF:
            yield "janitor", self.janitor().run

    def resumer(self) -> Resumer:
        parts = self._parts
        news = ResumeNews(parts.writer, parts.stores, parts.metrics, parts.limits, parts.monotonic)
        return Resumer(
            Given(
                parts.view,
                self._attendant,
                self._sight,
                parts.stores,
                news,
                parts.limits,
                parts.monotonic,
                parts.namespaces,
            )
        )

    def alerts(self, inbox: Inbox) -> AlertWorker:
        parts = self._parts
        around = (parts.stores, parts.view, parts.writer, parts.metrics, parts.namespaces)
        return AlertWorker(inbox, parts.rules, self._attendant, *around)

    def janitor(self) -> Janitor:
        parts = self._parts
        submitter = submitter_of(parts.api)

        def tenants() -> list[str]:
            return list(parts.namespaces) if parts.namespaces is not None else parts.view.namespaces()

        return Janitor(
            parts.stores,
            tenants,
            parts.view,
            lambda: _blind(parts.watching),
            lambda: submitter().cluster,
            lambda: parts.api.get(GPU_LEDGERS, parts.home, LEDGER_NAME),
            parts.may_write,
            parts.metrics,
            parts.now,
            parts.janitor,
        )


def _blind(watching: Watching) -> str:
    """Why the watches do not show all that there is; empty if they do."""
    for what, why in sorted(watching.troubles.items()):
        return f"{what}: {why}"
    return "" if watching.synced else "not everything was listed yet"


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


class HealthServer(AppServer):
    """Answers between ``__enter__`` and ``__exit__``. ``port`` 0 takes a free one.

    Raises:
        ConflictError: the port is in use.
        UsageError: the host cannot be listened on.
    """

    def __init__(self, controller: Controller, host: str, port: int, calls: Sequence[Route] = ()) -> None:
        super().__init__(create_app(controller.check, controller.metrics.render, calls), host, port)

    @property
    def port(self) -> int:
        return urlsplit(self.url).port or 0
