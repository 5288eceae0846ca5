"""Watches Workflows and agent pods, and caches their facts for the workers.

Each watch runs in its own thread while this controller leads. A watch that fails
is recorded, because a worker must not conclude anything from an incomplete cache.
"""

import threading
from collections.abc import Callable, Hashable
from typing import NamedTuple, TypeVar

import structlog

from tiphys.errors import StoreError, TiphysError
from tiphys.kube import KubeApi, ListSnapshot, Object, Resource, WatchEvent, WatchEventType, watch_objects
from tiphys.kube.resources import PODS, WORKFLOWS
from tiphys.kube.unreadable import UnreadableObjects
from tiphys.protocol.step_spec import PIPELINE_ANNOTATION
from tiphys_controller.kubernetes.agent_pods import AGENT_LABELS, StuckAgentPod, parse_stuck_agent_pod
from tiphys_controller.kubernetes.metrics import ControllerMetrics
from tiphys_controller.kubernetes.workflow_view import WorkflowView, build_workflow_view

_log = structlog.get_logger()
ViewT = TypeVar("ViewT")
Uid = str


class _ScopedViews(dict[Uid, ViewT]):
    """Views by uid, of several scopes (namespaces, or all). A new list replaces only the views of its scope.

    An object that cannot be read has no view.
    """

    def __init__(self, build_view: Callable[[Object], ViewT | None], unreadable: UnreadableObjects) -> None:
        super().__init__()
        self._build_view = build_view
        self._unreadable = unreadable
        self._scope_by_uid: dict[Uid, Hashable] = {}

    def apply(self, scope: Hashable, change: ListSnapshot | WatchEvent) -> list[ViewT]:
        """Apply a change of a watch; returns the views of objects that are gone."""
        if isinstance(change, ListSnapshot):
            present = {item["metadata"]["uid"] for item in change.objects}
            removed = [
                uid for uid, view_scope in self._scope_by_uid.items() if view_scope == scope and uid not in present
            ]
            changed = change.objects
        else:
            removed = [change.object["metadata"]["uid"]] if change.type is WatchEventType.DELETED else []
            changed = [] if removed else [change.object]
        lost = [view for uid in removed if (view := self._drop(uid)) is not None]
        for item in changed:
            self._put(scope, item)
        return lost

    def _put(self, scope: Hashable, document: Object) -> None:
        uid, facts = document["metadata"]["uid"], self._build(document)
        if facts is None:
            self._drop(uid)
        else:
            self[uid] = facts
            self._scope_by_uid[uid] = scope

    def _build(self, document: Object) -> ViewT | None:
        try:
            return self._build_view(document)
        except Exception as error:  # noqa: BLE001  a tenant may write any content, which must not end the watch of all
            self._unreadable.record(document, error)
            return None

    def _drop(self, uid: Uid) -> ViewT | None:
        self._scope_by_uid.pop(uid, None)
        return self.pop(uid, None)


class WatchCache:
    """Workflows of Tiphys, and agent pods that have failed. Thread-safe.

    ``on_workflow`` is called with each new state of a Workflow, ``on_gone`` with the uid of one that is gone; both
    must return at once and not fail.
    """

    def __init__(
        self,
        unreadable: UnreadableObjects | None = None,
        on_workflow: Callable[[Object], object] = lambda _: None,
        on_gone: Callable[[Uid], object] = lambda _: None,
    ) -> None:
        self._on_workflow = on_workflow
        self._on_gone = on_gone
        self._changed = threading.Condition()
        unreadable = unreadable or UnreadableObjects()
        self._workflows: _ScopedViews[WorkflowView] = _ScopedViews(build_workflow_view, unreadable)
        self._agents: _ScopedViews[StuckAgentPod] = _ScopedViews(parse_stuck_agent_pod, unreadable)
        self._deleted: list[WorkflowView] = []
        self._synced: set[Hashable] = set()
        self._version = 0

    def apply_workflow_change(self, scope: Hashable, change: ListSnapshot | WatchEvent) -> None:
        """Apply a change of a Workflow watch."""
        with self._changed:
            lost = self._workflows.apply(scope, change)
            self._deleted += [gone for gone in lost if not gone.finished]
            self._note_change(("workflows", scope), change)
        for gone in lost:
            self._on_gone(gone.uid)
        is_deleted = isinstance(change, WatchEvent) and change.type is WatchEventType.DELETED
        for workflow in change.objects if isinstance(change, ListSnapshot) else [] if is_deleted else [change.object]:
            self._on_workflow(workflow)

    def apply_agent_pod_change(self, scope: Hashable, change: ListSnapshot | WatchEvent) -> None:
        """Apply a change of an agent pod watch."""
        with self._changed:
            self._agents.apply(scope, change)
            self._note_change(("agents", scope), change)

    def workflows(self) -> list[WorkflowView]:
        """All present Workflows."""
        with self._changed:
            return list(self._workflows.values())

    def namespaces(self) -> list[str]:
        """Namespaces with a Workflow."""
        with self._changed:
            return sorted({workflow.namespace for workflow in self._workflows.values()})

    def stuck_agent_pods(self) -> list[StuckAgentPod]:
        """All agent pods that do not work."""
        with self._changed:
            return list(self._agents.values())

    def pop_deleted_workflows(self) -> list[WorkflowView]:
        """Workflows deleted before they finished; each is returned once."""
        with self._changed:
            deleted, self._deleted = self._deleted, []
            return deleted

    def wait(self, version: int, seconds: float) -> int:
        """Wait for a version newer than ``version``, at most ``seconds``; returns the current version."""
        with self._changed:
            self._changed.wait_for(lambda: self._version != version, seconds)
            return self._version

    def wake(self) -> None:
        """End every `wait`."""
        with self._changed:
            self._version += 1
            self._changed.notify_all()

    def count_synced(self) -> int:
        """Number of watches that have completed their first list."""
        with self._changed:
            return len(self._synced)

    def _note_change(self, what: Hashable, change: ListSnapshot | WatchEvent) -> None:
        if isinstance(change, ListSnapshot):
            self._synced.add(what)
        self._version += 1
        self._changed.notify_all()


# An abandoned watch ends only with its next event, or after this time.
_WATCH_SECONDS = 60
_PAUSE_SECONDS = 10.0


class _WatchedResource(NamedTuple):
    resource: Resource
    namespace: str | None
    labels: str
    apply_change: Callable[[Hashable, ListSnapshot | WatchEvent], None]

    def __str__(self) -> str:
        where = f"namespace {self.namespace}" if self.namespace else "all namespaces"
        return f"{self.resource.plural} of {where}"


class ClusterWatches:
    """Watches Workflows and agent pods of some namespaces; None: of all.

    ``errors`` holds the error of each broken watch, by its resource. Without ``agent_pods`` it watches only Workflows.
    """

    def __init__(
        self,
        api: KubeApi,
        namespaces: tuple[str, ...] | None,
        cache: WatchCache,
        metrics: ControllerMetrics,
        agent_pods: bool = True,
    ) -> None:
        self._api = api
        self._metrics = metrics
        self._cache = cache
        self.errors: dict[str, str] = {}
        kinds = [(WORKFLOWS, PIPELINE_ANNOTATION, cache.apply_workflow_change)]
        if agent_pods:
            kinds.append((PODS, AGENT_LABELS, cache.apply_agent_pod_change))
        self._targets = [
            _WatchedResource(resource, namespace, labels, apply_change)
            for namespace in (namespaces if namespaces is not None else (None,))
            for resource, labels, apply_change in kinds
        ]

    @property
    def synced(self) -> bool:
        """Whether every watch has completed its first list."""
        return self._cache.count_synced() == len(self._targets)

    def start(self, stop: threading.Event) -> None:
        """Watch until ``stop``."""
        for subject in self._targets:
            threading.Thread(target=self._watch, args=(subject, stop), name=f"watch {subject}", daemon=True).start()

    def _watch(self, target: _WatchedResource, stop: threading.Event) -> None:
        while not stop.is_set():
            try:
                self._follow(target, stop)
            except TiphysError as error:
                self._record_error(target, error)
                stop.wait(_PAUSE_SECONDS)
            except Exception as error:  # noqa: BLE001  the worker loop: without its watch the controller is blind
                _log.exception("watch.crashed", what=str(target))
                self._record_error(target, error)
                stop.wait(_PAUSE_SECONDS)

    def _follow(self, target: _WatchedResource, stop: threading.Event) -> None:
        def record_loss(error: StoreError) -> None:
            if not stop.is_set():
                self._record_error(target, error)

        for change in watch_objects(
            self._api,
            target.resource,
            target.namespace,
            labels=target.labels,
            timeout_seconds=_WATCH_SECONDS,
            sleep=stop.wait,
            should_stop=stop.is_set,
            on_error=record_loss,
        ):
            self.errors.pop(str(target), None)
            target.apply_change(target.namespace, change)

    def _record_error(self, target: _WatchedResource, error: Exception) -> None:
        self.errors[str(target)] = str(error)
        self._metrics.failures.labels("watch").inc()
        _log.warning("watch.lost", what=str(target), error=str(error))


def find_incomplete_reason(watches: ClusterWatches) -> str:
    """Why the watch cache may lack objects of the cluster; empty if the watches show everything."""
    for target, error in sorted(watches.errors.items()):
        return f"cannot watch {target}: {error}"
    return "" if watches.synced else "not all Workflows and pods have been listed yet"
