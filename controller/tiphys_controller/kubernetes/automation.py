"""Puts together what acts by itself while this controller leads."""

import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime

from tiphys.kube import KubeApi, cluster_name
from tiphys.kube.resources import GPU_LEDGERS, LEDGER_NAME
from tiphys.records import utc_now
from tiphys.store import Store
from tiphys_controller.alerts.inbox import Inbox
from tiphys_controller.alerts.rules import NOTIFY_OF_ALL, Rules
from tiphys_controller.automatic.attendant import Attendant
from tiphys_controller.automatic.attendant import Surroundings as AttendantSurroundings
from tiphys_controller.automatic.limits import Limits, Mode
from tiphys_controller.automatic.sight import Sight
from tiphys_controller.kubernetes.alert_worker import AlertWorker
from tiphys_controller.kubernetes.janitor import Janitor
from tiphys_controller.kubernetes.metrics import Metrics
from tiphys_controller.kubernetes.resume_news import ResumeNews
from tiphys_controller.kubernetes.resumer import Given, Resumer
from tiphys_controller.kubernetes.submitter import KubernetesSubmitter
from tiphys_controller.kubernetes.view import ClusterView
from tiphys_controller.kubernetes.watching import Watching
from tiphys_controller.kubernetes.writer import Writer

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
