"""What the watches have seen of the cluster, shared between those who watch and those who act.

The watches that feed the view, each in a thread of its own for as long as this controller leads.
"""

import threading
from collections.abc import Callable, Hashable
from typing import NamedTuple, TypeVar

import structlog

from tiphys.errors import StoreError, TiphysError
from tiphys.kube import Change, ChangeType, KubeApi, Object, Resource, Synced, changes
from tiphys.kube.resources import PODS, WORKFLOWS
from tiphys.protocol.step_spec import PIPELINE_ANNOTATION
from tiphys_controller.kubernetes.agent_pods import AGENT_LABELS, StuckAgent, stuck_agent
from tiphys_controller.kubernetes.metrics import Metrics
from tiphys_controller.kubernetes.workflow_view import SeenWorkflow, see

FactsT = TypeVar("FactsT")
Uid = str


class _Kept(dict[Uid, FactsT]):
    """Facts by uid, of several scopes (namespaces, or all): a new list of one scope replaces only its own."""

    def __init__(self, facts_of: Callable[[Object], FactsT | None]) -> None:
        super().__init__()
        self._facts_of = facts_of
        self._scopes: dict[Uid, Hashable] = {}

    def take(self, scope: Hashable, seen: Synced | Change) -> list[FactsT]:
        """Take in what a watch says; answers the facts of objects that are gone."""
        if isinstance(seen, Synced):
            present = {one["metadata"]["uid"] for one in seen.objects}
            gone = [uid for uid, of in self._scopes.items() if of == scope and uid not in present]
            changed = seen.objects
        else:
            gone = [seen.object["metadata"]["uid"]] if seen.type is ChangeType.DELETED else []
            changed = [] if gone else [seen.object]
        lost = [found for uid in gone if (found := self._drop(uid)) is not None]
        for one in changed:
            self._put(scope, one)
        return lost

    def _put(self, scope: Hashable, document: Object) -> None:
        uid, facts = document["metadata"]["uid"], self._facts_of(document)
        if facts is None:
            self._drop(uid)
        else:
            self[uid] = facts
            self._scopes[uid] = scope

    def _drop(self, uid: Uid) -> FactsT | None:
        self._scopes.pop(uid, None)
        return self.pop(uid, None)


class ClusterView:
    """Workflows of Tiphys, and agent pods that have failed. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._workflows: _Kept[SeenWorkflow] = _Kept(see)
        self._agents: _Kept[StuckAgent] = _Kept(stuck_agent)
        self._deleted: list[SeenWorkflow] = []
        self._synced: set[Hashable] = set()
        self._version = 0

    def take_workflows(self, scope: Hashable, seen: Synced | Change) -> None:
        """Take in what a watch of Workflows says."""
        with self._changed:
            self._deleted += [gone for gone in self._workflows.take(scope, seen) if not gone.finished]
            self._note(("workflows", scope), seen)

    def take_agents(self, scope: Hashable, seen: Synced | Change) -> None:
        """Take in what a watch of agent pods says."""
        with self._changed:
            self._agents.take(scope, seen)
            self._note(("agents", scope), seen)

    def workflows(self) -> list[SeenWorkflow]:
        """All Workflows that exist."""
        with self._changed:
            return list(self._workflows.values())

    def namespaces(self) -> list[str]:
        """Those in which there is a Workflow."""
        with self._changed:
            return sorted({one.namespace for one in self._workflows.values()})

    def stuck_agents(self) -> list[StuckAgent]:
        """All agent pods that do not work."""
        with self._changed:
            return list(self._agents.values())

    def take_deleted(self) -> list[SeenWorkflow]:
        """Workflows that were deleted before they were over, each answered once."""
        with self._changed:
            deleted, self._deleted = self._deleted, []
            return deleted

    def wait(self, version: int, seconds: float) -> int:
        """Wait for something newer than ``version``, at most ``seconds``; answers the present version."""
        with self._changed:
            self._changed.wait_for(lambda: self._version != version, seconds)
            return self._version

    def wake(self) -> None:
        """End every `wait`."""
        with self._changed:
            self._version += 1
            self._changed.notify_all()

    def synced(self) -> int:
        """How many watches have seen all that there is."""
        with self._changed:
            return len(self._synced)

    def _note(self, what: Hashable, seen: Synced | Change) -> None:
        if isinstance(seen, Synced):
            self._synced.add(what)
        self._version += 1
        self._changed.notify_all()


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
