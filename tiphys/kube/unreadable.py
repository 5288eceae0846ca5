"""Objects that cannot be read: left out of every list and watch, and named once each.

Whoever may write an object of a namespace chooses its content. So what cannot be read is the problem of that object
alone: it counts as absent, and log, metric and, where the process may write it, an Event of its namespace name it.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import structlog
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from tiphys.errors import TiphysError

_MAX_NAMED_PER_NAMESPACE = 20
"""Further objects of a namespace are counted without their names, and nothing announces them."""
_log = structlog.get_logger()


class UnreadableObject(NamedTuple):
    """Identity of an object; ``name`` is empty for those beyond the limit of their namespace."""

    kind: str
    namespace: str
    name: str


class UnreadableObjects(Collector):
    """Counts and announces objects that were left out. Thread-safe."""

    def __init__(self) -> None:
        self.announce: Callable[[dict[str, Any], str], object] = lambda _object, _reason: None
        """Called once for each object, with the object and the reason; may raise `TiphysError`."""
        self._counts: Counter[UnreadableObject] = Counter()
        self._named: Counter[str] = Counter()
        self._lock = threading.Lock()

    def record(self, kube_object: dict[str, Any], error: Exception) -> None:
        """Count an object that was left out because of ``error``; announce it if it is new."""
        metadata = kube_object.get("metadata") or {}
        kind, namespace = str(kube_object.get("kind")), str(metadata.get("namespace") or "")
        name = str(metadata.get("name"))
        with self._lock:
            identity = UnreadableObject(kind, namespace, name)
            if is_new := identity not in self._counts:
                if is_new := self._named[namespace] < _MAX_NAMED_PER_NAMESPACE:
                    self._named[namespace] += 1
                else:
                    identity = identity._replace(name="")
            self._counts[identity] += 1
        if is_new:
            reason = f"{error if isinstance(error, TiphysError) else repr(error)}"[:300]
            _log.warning("object.not_read", kind=kind, namespace=namespace, name=name, error=reason)
            try:
                self.announce(kube_object, reason)
            except TiphysError as problem:
                _log.warning("object.not_announced", kind=kind, namespace=namespace, name=name, error=str(problem))

    def collect(self) -> Iterator[CounterMetricFamily]:
        """The metric, for the registry of Prometheus."""
        family = CounterMetricFamily(
            "tiphys_unreadable_objects",
            "Times that an object of the API server was left out because it cannot be read; correct or delete it.",
            labels=UnreadableObject._fields,
        )
        with self._lock:
            for identity, count in self._counts.items():
                family.add_metric(identity, count)
        yield family
