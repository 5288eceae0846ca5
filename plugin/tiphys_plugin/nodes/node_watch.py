"""Watches Nodes and pods of the cluster, and answers queues with the nodes that there are.

It begins when queues first ask for it: nobody else needs the right to read the
Nodes of a cluster. Where it has not seen them yet nothing new is granted; where
it has lost sight of them, what it saw last goes on to count.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from types import TracebackType
from typing import NamedTuple

import structlog

from tiphys.errors import StoreError, TiphysError
from tiphys.kube import Change, KubeApi, Object, Resource, Synced, changes
from tiphys.kube.resources import NODES, PODS
from tiphys.records import utc_now
from tiphys_plugin.nodes.cluster_state import ClusterFacts, next_change
from tiphys_plugin.nodes.health import Evidence
from tiphys_plugin.nodes.node import SeenNode, facts_of
from tiphys_plugin.quota.queues import Misconfigured, QueueRules, Queues

_UNFINISHED = "spec.nodeName!=,status.phase!=Succeeded"
"""Pods that have a node. Failed ones may point at it."""
_WATCH_SECONDS = 60
"""A watch that nobody needs any more ends only with its next event, or after this time."""
_PAUSE_SECONDS = 10.0
_FIRST_LOOK_SECONDS = 5.0
"""How long the first call waits for the lists, which then are there for all others."""
_log = structlog.get_logger()


class _Subject(NamedTuple):
    resource: Resource
    fields: str
    keep: Callable[[Object], Object | None]
    """What is kept of each object of a list: there may be ten thousand pods, of which few count."""
    take: Callable[[Synced | Change], None]


@dataclass(frozen=True)
class _Answer:
    """Queues on the nodes of one instant, and until when that is the answer to the same declared ones."""

    declared: Queues
    version: tuple[int, int, int]
    until: datetime | None
    seen: tuple[SeenNode, ...]
    queues: Queues

    def holds(self, declared: Queues, version: tuple[int, int, int], now: datetime) -> bool:
        still = self.version == version and (self.until is None or now < self.until)
        return still and (self.declared is declared or self.declared == declared)


class ClusterInventory:
    """The nodes of the cluster behind ``api``, until ``__exit__``. Thread-safe."""

    def __init__(self, api: KubeApi, clock: Callable[[], datetime] = utc_now) -> None:
        self._api = api
        self._clock = clock
        self._facts = ClusterFacts()
        self._troubles: dict[str, str] = {}
        self._answer: _Answer | None = None
        self._lock = threading.Condition()
        self._over = threading.Event()
        self._watches = False

    def __enter__(self) -> "ClusterInventory":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()

    def rules(self, declared: QueueRules) -> QueueRules:
        """``declared``, on the nodes that there are now if it asks for them: the same object until they change."""
        if not isinstance(declared, Queues) or declared.cluster_nodes is None:
            return declared
        with self._lock:
            self._begin()
            if not self._lock.wait_for(lambda: self._facts.synced or self._troubles, _FIRST_LOOK_SECONDS):
                return Misconfigured("the nodes of the cluster have not been listed yet; it may take some seconds")
            if not self._facts.synced:
                return Misconfigured(self._blind())
            now, version = self._clock(), self._facts.version
            if self._answer is None or not self._answer.holds(declared, version, now):
                seen = tuple(self._facts.inventory(declared.cluster_nodes, now, declared.kinds.labels))
                self._answer = _Answer(declared, version, next_change(seen), seen, self._queues(declared, seen))
            return self._answer.queues

    @property
    def seen(self) -> tuple[SeenNode, ...]:
        """The nodes, as the last answer went by them."""
        with self._lock:
            return self._answer.seen if self._answer is not None else ()

    def hear(self, told: Mapping[str, tuple[Evidence, ...]]) -> None:
        """What others than the API server say of nodes now, by Node object; it counts from the next decision on."""
        with self._lock:
            self._facts.hear(told)

    def _queues(self, declared: Queues, seen: tuple[SeenNode, ...]) -> Queues:
        nodes, before = tuple(one.node for one in seen), self._answer
        if before is not None and before.declared == declared and before.queues.nodes == nodes:
            return before.queues
        return declared.on(nodes, changing=True)

    def _blind(self) -> str:
        why = "; ".join(f"{what}: {told}" for what, told in sorted(self._troubles.items()))
        return (
            f"the queues go by the nodes of the cluster (cluster_nodes), which cannot be seen: {why}. Give the service "
            "the right to see them by `nodes.observe: true` in the values of the chart, or declare `nodes`"
        )

    def _begin(self) -> None:
        if self._watches:
            return
        self._watches = True
        for subject in (
            _Subject(NODES, "", _without_images, self._facts.nodes.take),
            _Subject(PODS, _UNFINISHED, _if_it_counts, self._facts.pods.take),
        ):
            name = f"watch {subject.resource.plural} of the cluster"
            threading.Thread(target=self._watch, args=(subject,), name=name, daemon=True).start()

    def _watch(self, subject: _Subject) -> None:
        while not self._over.is_set():
            try:
                self._follow(subject)
            except TiphysError as error:
                self._lost(subject.resource, error)
            except Exception as error:  # noqa: BLE001  the worker loop: without its watch nothing is known
                _log.exception("nodes.crashed", what=subject.resource.plural)
                self._lost(subject.resource, error)
            self._over.wait(_PAUSE_SECONDS)

    def _follow(self, subject: _Subject) -> None:
        def lost(error: StoreError) -> None:
            self._lost(subject.resource, error)

        for change in changes(
            self._api,
            subject.resource,
            None,
            fields=subject.fields,
            timeout_seconds=_WATCH_SECONDS,
            keep=subject.keep,
            pause=self._over.wait,
            stopped=self._over.is_set,
            lost=lost,
        ):
            with self._lock:
                self._troubles.pop(subject.resource.plural, None)
                subject.take(change)
                self._lock.notify_all()

    def _lost(self, resource: Resource, error: Exception) -> None:
        if not self._over.is_set():
            with self._lock:
                self._troubles[resource.plural] = str(error)
                self._lock.notify_all()
            _log.warning("nodes.unseen", what=resource.plural, error=str(error))


def _without_images(node: Object) -> Object:
    """The images that a node has are most of what it says."""
    status = node.get("status") or {}
    return {**node, "status": {key: value for key, value in status.items() if key != "images"}}


def _if_it_counts(pod: Object) -> Object | None:
    return pod if facts_of(pod) is not None else None
