"""Watches Nodes and pods of the cluster, and answers queues with the nodes that there are.

It begins when queues first ask for it: nobody else needs the right to read the
Nodes of a cluster. Where it has not seen them yet nothing new is granted; where
it has lost sight of them, what it saw last goes on to count.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from types import TracebackType

import structlog

from tiphys.errors import StoreError, TiphysError
from tiphys.kube import KubeApi, Resource, changes
from tiphys.kube.resources import NODES, PODS
from tiphys.records import utc_now
from tiphys_plugin.nodes.facts import ClusterFacts, Kept, next_change
from tiphys_plugin.nodes.reading import SeenNode
from tiphys_plugin.queues import Misconfigured, QueueRules, Queues

_UNFINISHED = "spec.nodeName!=,status.phase!=Succeeded"
"""Pods that have a node. Failed ones may point at it."""
_WATCH_SECONDS = 60
"""A watch that nobody needs any more ends only with its next event, or after this time."""
_PAUSE_SECONDS = 10.0
_log = structlog.get_logger()


@dataclass(frozen=True)
class _Answer:
    """Queues on the nodes of one instant, and until when that is the answer to the same declared ones."""

    declared: Queues
    version: tuple[int, int]
    until: datetime | None
    seen: tuple[SeenNode, ...]
    queues: Queues

    def holds(self, declared: Queues, version: tuple[int, int], now: datetime) -> bool:
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
        self._lock = threading.Lock()
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
            if not self._facts.synced:
                return Misconfigured(self._blind())
            now, version = self._clock(), self._facts.version
            if self._answer is None or not self._answer.holds(declared, version, now):
                seen = tuple(self._facts.inventory(declared.cluster_nodes, now))
                self._answer = _Answer(declared, version, next_change(seen), seen, self._queues(declared, seen))
            return self._answer.queues

    @property
    def seen(self) -> tuple[SeenNode, ...]:
        """The nodes, as the last answer went by them."""
        with self._lock:
            return self._answer.seen if self._answer is not None else ()

    def _queues(self, declared: Queues, seen: tuple[SeenNode, ...]) -> Queues:
        nodes, before = tuple(one.node for one in seen), self._answer
        if before is not None and before.declared == declared and before.queues.nodes == nodes:
            return before.queues
        return declared.on(nodes, changing=True)

    def _blind(self) -> str:
        if not self._troubles:
            return "the nodes of the cluster have not been listed yet; it takes some seconds"
        why = "; ".join(f"{what}: {told}" for what, told in sorted(self._troubles.items()))
        return (
            f"the queues go by the nodes of the cluster (cluster_nodes), which cannot be seen: {why}. Give the service "
            "the right to see them by `nodes.observe: true` in the values of the chart, or declare `nodes`"
        )

    def _begin(self) -> None:
        if self._watches:
            return
        self._watches = True
        self._start(NODES, "", self._facts.nodes)
        self._start(PODS, _UNFINISHED, self._facts.pods)

    def _start(self, resource: Resource, fields: str, kept: "Kept[object] | Kept[dict[str, object]]") -> None:
        name = f"watch {resource.plural} of the cluster"
        threading.Thread(target=self._watch, args=(resource, fields, kept), name=name, daemon=True).start()

    def _watch(self, resource: Resource, fields: str, kept: "Kept[object]") -> None:
        while not self._over.is_set():
            try:
                self._follow(resource, fields, kept)
            except TiphysError as error:
                self._lost(resource, error)
            except Exception as error:  # noqa: BLE001  the worker loop: without its watch nothing is known
                _log.exception("nodes.crashed", what=resource.plural)
                self._lost(resource, error)
            self._over.wait(_PAUSE_SECONDS)

    def _follow(self, resource: Resource, fields: str, kept: "Kept[object]") -> None:
        def lost(error: StoreError) -> None:
            self._lost(resource, error)

        for change in changes(
            self._api,
            resource,
            None,
            fields=fields,
            timeout_seconds=_WATCH_SECONDS,
            pause=self._over.wait,
            stopped=self._over.is_set,
            lost=lost,
        ):
            with self._lock:
                self._troubles.pop(resource.plural, None)
                kept.take(change)

    def _lost(self, resource: Resource, error: Exception) -> None:
        if not self._over.is_set():
            with self._lock:
                self._troubles[resource.plural] = str(error)
            _log.warning("nodes.unseen", what=resource.plural, error=str(error))
