"""Watches the Nodes and pods of the cluster, and resolves queues that use them to the current nodes.

The watches start when queues first need them, because only such installations
have the right to read Nodes. Before the first list, no new GPUs are granted. If
a watch is lost later, the last state remains valid.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from types import TracebackType
from typing import NamedTuple

import structlog

from tiphys.errors import StoreError, TiphysError
from tiphys.kube import KubeApi, ListSnapshot, Object, Resource, WatchEvent, watch_objects
from tiphys.kube.resources import NODES, PODS
from tiphys.records import utc_now
from tiphys_plugin.nodes.cluster_state import ClusterState, next_verdict_change
from tiphys_plugin.nodes.health import NodeEvidence
from tiphys_plugin.nodes.node import ObservedNode, read_pod_facts
from tiphys_plugin.quota.lease import Lease
from tiphys_plugin.quota.queues import MisconfiguredQueues, QueueRules, Queues

_UNFINISHED_POD_FIELDS = "spec.nodeName!=,status.phase!=Succeeded"
"""Pods that have a node. Failed pods are included, because they may be evidence against it."""
_WATCH_SECONDS = 60
"""Timeout of a watch: after ``__exit__``, the watch ends with its next event, or after this time."""
_RETRY_SECONDS = 10.0
_INITIAL_LIST_SECONDS = 5.0
"""How long the first call waits for the lists; later calls find them."""
_log = structlog.get_logger()


class _WatchTarget(NamedTuple):
    resource: Resource
    fields: str
    keep: Callable[[Object], Object | None]
    """Reduces each listed object to what is needed: of ten thousand pods, only a few are relevant."""
    apply: Callable[[ListSnapshot | WatchEvent], None]


@dataclass(frozen=True)
class _ResolvedRules:
    """Queues resolved to the nodes of one instant, and until when the result is valid for the same declared queues."""

    declared: Queues
    leases: Sequence[Lease] | None
    version: tuple[int, int, int]
    valid_until: datetime | None
    observed_nodes: tuple[ObservedNode, ...]
    queues: Queues

    def is_valid_for(
        self, declared: Queues, leases: Sequence[Lease] | None, version: tuple[int, int, int], now: datetime
    ) -> bool:
        """Whether the result still holds for these queues and leases."""
        unchanged = self.version == version and (self.valid_until is None or now < self.valid_until)
        unchanged = unchanged and self.leases == leases
        return unchanged and (self.declared is declared or self.declared == declared)


class ClusterInventory:
    """The nodes of the cluster behind ``api``, until ``__exit__``. Thread-safe."""

    def __init__(self, api: KubeApi, clock: Callable[[], datetime] = utc_now) -> None:
        self._api = api
        self._clock = clock
        self._state = ClusterState()
        self._watch_errors: dict[str, str] = {}
        self._resolved: _ResolvedRules | None = None
        self._lock = threading.Condition()
        self._stop = threading.Event()
        self._is_watching = False

    def __enter__(self) -> "ClusterInventory":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()

    def resolve_rules(self, declared: QueueRules, leases: Sequence[Lease] | None = None) -> QueueRules:
        """Resolve queues with ``cluster_nodes`` to the current nodes; returns the same object until they change.

        ``leases`` are all leases; None believes each pod that it belongs to the attempt that it names.

        Returns `MisconfiguredQueues` if the nodes cannot be listed, so that no GPUs are granted.
        """
        if not isinstance(declared, Queues) or declared.cluster_nodes is None:
            return declared
        with self._lock:
            self._start_watches()
            if not self._lock.wait_for(lambda: self._state.synced or self._watch_errors, _INITIAL_LIST_SECONDS):
                return MisconfiguredQueues(
                    "the nodes of the cluster have not been listed yet; it may take some seconds"
                )
            if not self._state.synced:
                return MisconfiguredQueues(self._not_observed_message())
            now, version = self._clock(), self._state.version
            if self._resolved is None or not self._resolved.is_valid_for(declared, leases, version, now):
                observed = tuple(self._state.observe_nodes(declared.cluster_nodes, now, declared.flavor_set, leases))
                queues = self._resolve_queues(declared, observed)
                self._resolved = _ResolvedRules(
                    declared, leases, version, next_verdict_change(observed), observed, queues
                )
            return self._resolved.queues

    @property
    def observed_nodes(self) -> tuple[ObservedNode, ...]:
        """The nodes of the last resolved queues; empty before the first, or if the queues do not use nodes."""
        with self._lock:
            return self._resolved.observed_nodes if self._resolved is not None else ()

    def set_external_evidence(self, source: str, evidence: Mapping[str, tuple[NodeEvidence, ...]]) -> None:
        """Replace the evidence of ``source``, which is not in the Node objects; used from the next decision on."""
        with self._lock:
            self._state.set_external_evidence(source, evidence)

    def _resolve_queues(self, declared: Queues, observed_nodes: tuple[ObservedNode, ...]) -> Queues:
        nodes, before = tuple(observed.node for observed in observed_nodes), self._resolved
        if before is not None and before.declared == declared and before.queues.nodes == nodes:
            return before.queues
        return declared.with_nodes(nodes, are_current=True)

    def _not_observed_message(self) -> str:
        errors = "; ".join(f"{plural}: {error}" for plural, error in sorted(self._watch_errors.items()))
        return (
            f"the queues use the nodes of the cluster (cluster_nodes), which cannot be read: {errors}. Allow the "
            "service to read them by `nodes.observe: true` in the values of the chart, or declare `nodes`"
        )

    def _start_watches(self) -> None:
        if self._is_watching:
            return
        self._is_watching = True
        for subject in (
            _WatchTarget(NODES, "", _without_images, self._state.nodes.apply),
            _WatchTarget(PODS, _UNFINISHED_POD_FIELDS, _keep_relevant_pod, self._state.pods.apply),
        ):
            name = f"watch {subject.resource.plural} of the cluster"
            threading.Thread(target=self._watch, args=(subject,), name=name, daemon=True).start()

    def _watch(self, subject: _WatchTarget) -> None:
        while not self._stop.is_set():
            try:
                self._watch_until_error(subject)
            except TiphysError as error:
                self._record_watch_error(subject.resource, error)
            except Exception as error:  # noqa: BLE001  the worker loop: without the watch the state would grow stale
                _log.exception("nodes.crashed", what=subject.resource.plural)
                self._record_watch_error(subject.resource, error)
            self._stop.wait(_RETRY_SECONDS)

    def _watch_until_error(self, subject: _WatchTarget) -> None:
        def record_error(error: StoreError) -> None:
            self._record_watch_error(subject.resource, error)

        for change in watch_objects(
            self._api,
            subject.resource,
            None,
            fields=subject.fields,
            timeout_seconds=_WATCH_SECONDS,
            transform=subject.keep,
            sleep=self._stop.wait,
            should_stop=self._stop.is_set,
            on_error=record_error,
        ):
            with self._lock:
                self._watch_errors.pop(subject.resource.plural, None)
                subject.apply(change)
                self._lock.notify_all()

    def _record_watch_error(self, resource: Resource, error: Exception) -> None:
        if not self._stop.is_set():
            with self._lock:
                self._watch_errors[resource.plural] = str(error)
                self._lock.notify_all()
            _log.warning("nodes.unseen", what=resource.plural, error=str(error))


def _without_images(node: Object) -> Object:
    """Drop the list of images, which is the largest part of a Node object."""
    status = node.get("status") or {}
    return {**node, "status": {key: value for key, value in status.items() if key != "images"}}


def _keep_relevant_pod(pod: Object) -> Object | None:
    return pod if read_pod_facts(pod) is not None else None
