"""The watches that feed the view, each in a thread of its own for as long as this controller leads."""

import threading
from collections.abc import Callable, Hashable
from typing import NamedTuple

import structlog

from tiphys.errors import StoreError, TiphysError
from tiphys.kube import Change, KubeApi, Resource, Synced, changes
from tiphys.kube.resources import PODS, WORKFLOWS
from tiphys.protocol.policy import PIPELINE_ANNOTATION
from tiphys_controller.kubernetes.agent_pods import AGENT_LABELS
from tiphys_controller.kubernetes.metrics import Metrics
from tiphys_controller.kubernetes.view import ClusterView

# A watch that nobody needs any more ends only with its next event, or after this time.
_WATCH_SECONDS = 60
_PAUSE_SECONDS = 10.0
_log = structlog.get_logger()


class _Subject(NamedTuple):
    resource: Resource
    namespace: str | None
    labels: str
    take: Callable[[Hashable, Synced | Change], None]

    def __str__(self) -> str:
        where = f"namespace {self.namespace}" if self.namespace else "all namespaces"
        return f"{self.resource.plural} of {where}"


class Watching:
    """Watches Workflows and agent pods of some namespaces; ``namespaces`` None: of all.

    ``troubles`` says, for each watch that does not work, why.
    """

    def __init__(self, api: KubeApi, namespaces: tuple[str, ...] | None, view: ClusterView, metrics: Metrics) -> None:
        self._api = api
        self._metrics = metrics
        self._view = view
        self.troubles: dict[str, str] = {}
        self._subjects = [
            subject
            for namespace in (namespaces if namespaces is not None else (None,))
            for subject in (
                _Subject(WORKFLOWS, namespace, PIPELINE_ANNOTATION, view.take_workflows),
                _Subject(PODS, namespace, AGENT_LABELS, view.take_agents),
            )
        ]

    @property
    def synced(self) -> bool:
        """Whether every watch has seen all that there is."""
        return self._view.synced() == len(self._subjects)

    def start(self, over: threading.Event) -> None:
        """Watch until ``over``."""
        for subject in self._subjects:
            threading.Thread(target=self._watch, args=(subject, over), name=f"watch {subject}", daemon=True).start()

    def _watch(self, subject: _Subject, over: threading.Event) -> None:
        while not over.is_set():
            try:
                self._follow(subject, over)
            except TiphysError as error:
                self._lost(subject, error)
                over.wait(_PAUSE_SECONDS)
            except Exception as error:  # noqa: BLE001  the worker loop: without its watch the controller is blind
                _log.exception("watch.crashed", what=str(subject))
                self._lost(subject, error)
                over.wait(_PAUSE_SECONDS)

    def _follow(self, subject: _Subject, over: threading.Event) -> None:
        def lost(error: StoreError) -> None:
            if not over.is_set():
                self._lost(subject, error)

        for seen in changes(
            self._api,
            subject.resource,
            subject.namespace,
            labels=subject.labels,
            timeout_seconds=_WATCH_SECONDS,
            pause=over.wait,
            stopped=over.is_set,
            lost=lost,
        ):
            self.troubles.pop(str(subject), None)
            subject.take(subject.namespace, seen)

    def _lost(self, subject: _Subject, error: Exception) -> None:
        self.troubles[str(subject)] = str(error)
        self._metrics.failures.labels("watch").inc()
        _log.warning("watch.lost", what=str(subject), error=str(error))
