"""The dependencies of every operation, passed as arguments so that tests and the local engine can replace them."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime

from cachetools import LRUCache

from tiphys.lineage.fork_history import AncestorRun, find_rerun_submission
from tiphys.protocol.fan_out import find_item
from tiphys.protocol.step_spec import StepSpec
from tiphys.recording import RunBinding, WorkflowRecorder
from tiphys.store import RunLayout, Store
from tiphys_plugin.attempts.liveness import NamespaceStores
from tiphys_plugin.cluster.interface import Cluster
from tiphys_plugin.quota.admission_backend import AdmissionBackend
from tiphys_plugin.runtime.background import OutputHasher
from tiphys_plugin.runtime.concurrency import SingleFlight
from tiphys_plugin.runtime.metrics import PluginMetrics
from tiphys_plugin.runtime.settings import PluginSettings

_MAX_RECORDERS = 64
_MIN_OBSERVATIONS = 5
"""Least number of calls that must find a wait unfinished before it is overdue, even if the clock jumps."""


class WaitTracker:
    """How long this process has waited for something, such as the end of a pod. Thread-safe.

    The waits are in memory only: after a restart a wait begins again, which
    makes it longer, never shorter. The same holds for a clock that jumps and for
    a machine that slept: between two calls at most a fifth of the limit counts.
    """

    def __init__(self) -> None:
        self._waits: dict[str, tuple[datetime, float]] = {}
        self._given_up: set[str] = set()
        self._lock = threading.Lock()

    def is_overdue(self, key: str, now: datetime, limit_seconds: float) -> bool:
        """Whether the wait for ``key`` has taken ``limit_seconds``, over at least a few calls."""
        return self.waited_seconds(key, now, limit_seconds) >= limit_seconds

    def waited_seconds(self, key: str, now: datetime, limit_seconds: float) -> float:
        """Seconds since the first call with ``key``, of a wait that may take ``limit_seconds``."""
        max_gap_seconds = limit_seconds / _MIN_OBSERVATIONS
        with self._lock:
            last_call_at, waited = self._waits.get(key, (now, 0.0))
            waited += min(max((now - last_call_at).total_seconds(), 0.0), max_gap_seconds)
            self._waits[key] = (now, waited)
            return waited

    def clear(self, key: str) -> None:
        """End the wait for ``key``: it has finished, or is no longer needed."""
        with self._lock:
            self._waits.pop(key, None)
            self._given_up.discard(key)

    def give_up(self, key: str) -> None:
        """End the wait for ``key`` without a result; `has_given_up` is true from then on."""
        with self._lock:
            self._waits.pop(key, None)
            self._given_up.add(key)

    def has_given_up(self, key: str) -> bool:
        """Whether `give_up` was called for ``key``, and `clear` was not called since."""
        with self._lock:
            return key in self._given_up


@dataclass(frozen=True)
class Tenant:
    """The namespace that a core serves as one of several."""

    namespace: str
    stores: NamespaceStores


class SingleStore:
    """The `NamespaceStores` of a plugin with one store for all namespaces."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def serves(self, namespace: str) -> bool:  # noqa: ARG002
        return True

    def store(self, namespace: str) -> Store:  # noqa: ARG002
        return self._store


class RecorderCache:
    """The recorders of the Workflows that were recorded last. Thread-safe."""

    def __init__(self) -> None:
        self._recorders: LRUCache[str, WorkflowRecorder] = LRUCache(_MAX_RECORDERS)
        self._lock = threading.Lock()

    def get(self, uid: str, create: Callable[[], WorkflowRecorder]) -> WorkflowRecorder:
        """The recorder of the Workflow ``uid``, created at its first use."""
        with self._lock:
            recorder = self._recorders.get(uid) or create()
            self._recorders[uid] = recorder
            return recorder


@dataclass(frozen=True)
class PluginContext:
    """Adapters and settings of one plugin."""

    store: Store
    stores: NamespaceStores
    """The stores of all namespaces that share the ledger, including ``store``."""
    cluster: Cluster
    ledger: AdmissionBackend
    clock: Callable[[], datetime]
    settings: PluginSettings
    metrics: PluginMetrics
    hasher: OutputHasher
    wait_tracker: WaitTracker
    single_flight: SingleFlight
    recorders: RecorderCache = field(default_factory=RecorderCache)
    """Recorders of the steps without a gate, by Workflow."""


@dataclass(frozen=True)
class StepCall:
    """One call about one step: the workflow that calls, the step id, and the step's policy."""

    context: PluginContext
    binding: RunBinding
    spec: StepSpec
    step: str
    """Step id; for a fan-out it includes the item and its ordinal."""
    instance: str
    node: str
    input_keys: str = ""
    """Storage keys of the input artifacts of a gang, as JSON."""

    @property
    def name(self) -> str:
        """Name of the step or item for people, such as ``fit[2]``."""
        item = find_item(self.instance)
        return item.display_name if item else self.step

    @property
    def store(self) -> Store:
        return self.context.store

    @property
    def run(self) -> str:
        return self.binding.run

    @property
    def layout(self) -> RunLayout:
        return self.binding.layout

    @property
    def rerun_since(self) -> int:
        """First submission whose results of this step count, if a rerun was requested; else 0."""
        return find_rerun_submission(self.binding.rerun_since, self.step)

    @property
    def fork_ancestors(self) -> tuple[AncestorRun, ...]:
        """The runs whose results and checkpoints the step may use, the nearest first."""
        return () if self.rerun_since else self.binding.fork_ancestors

    @property
    def volume(self) -> str:
        """URL of the volume of the step's checkpoints, which the plugin cannot read; empty without one."""
        return self.binding.pipeline.checkpoint_volume_url(self.spec.name)
