"""Positions of waiting Workloads: those that Kueue serves, or else counted by priority and age."""

import contextlib
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from tiphys.errors import TiphysError
from tiphys.kube import KubeApi, Object
from tiphys.kube.resources import KUEUE_WORKLOADS
from tiphys_plugin.quota.kueue.status import condition_is_true
from tiphys_plugin.quota.kueue.workload import KueueWorkload

_POSITIONS_VALID = timedelta(seconds=2)
_VISIBILITY = "/apis/visibility.kueue.x-k8s.io/v1beta2/namespaces/{}/localqueues/{}/pendingworkloads"


class _WaitingWorkload(NamedTuple):
    """A waiting Workload of anyone; sorted by priority and age."""

    negative_priority: int
    created_at: str
    name: str
    queue: str

    @classmethod
    def parse(cls, manifest: Object) -> "_WaitingWorkload":
        metadata, spec = manifest["metadata"], manifest["spec"]
        priority = int(spec.get("priority") or 0)
        return cls(-priority, metadata["creationTimestamp"], metadata["name"], spec.get("queueName", ""))


class QueuePositions:
    """Looks positions up. Thread-safe."""

    def __init__(self, api: KubeApi, clock: Callable[[], datetime]) -> None:
        self._api = api
        self._clock = clock
        self._lock = threading.Lock()
        self._waiting: dict[str, tuple[datetime, list[_WaitingWorkload]]] = {}

    def find(self, workload: KueueWorkload) -> tuple[int, str]:
        """Position among the waiting Workloads, counted from 1, and a phrase that says in which line."""
        queue = workload.request.queue
        with contextlib.suppress(TiphysError):  # its API is an addition that an installation may lack
            items = self._api.get_path(_VISIBILITY.format(workload.namespace, queue)).get("items") or []
            for item in items:
                if item["metadata"]["name"] == workload.name:
                    in_queue, in_all = item["positionInLocalQueue"] + 1, item["positionInClusterQueue"] + 1
                    return in_all, f"position {in_queue} in LocalQueue {queue}, {in_all} in its ClusterQueue"
        names = [other.name for other in self._list_waiting(workload.namespace) if other.queue == queue]
        position = names.index(workload.name) + 1 if workload.name in names else len(names) + 1
        return position, f"position {position} in LocalQueue {queue}, counted by priority and age"

    def _list_waiting(self, namespace: str) -> list["_WaitingWorkload"]:
        """The waiting Workloads of a namespace in order, not older than two seconds: all waiting steps ask for them."""
        with self._lock:
            read_at, waiting = self._waiting.get(namespace, (datetime.min.replace(tzinfo=UTC), []))
        if self._clock() - read_at < _POSITIONS_VALID:
            return waiting
        found = self._api.list(KUEUE_WORKLOADS, namespace, transform=lambda item: item if _is_waiting(item) else None)
        waiting = sorted(map(_WaitingWorkload.parse, found.items))
        with self._lock:
            self._waiting[namespace] = (self._clock(), waiting)
        return waiting


def _is_waiting(manifest: Object) -> bool:
    return not any(condition_is_true(manifest, kind) for kind in ("QuotaReserved", "Finished"))
