"""What every operation needs from the world, handed down instead of reached for."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from tiphys.lineage.fork_history import Ancestor
from tiphys.protocol.step_spec import StepSpec
from tiphys.store import RunLayout, Store
from tiphys_plugin.attempts.liveness import Stores
from tiphys_plugin.attempts.run_binding import Binding
from tiphys_plugin.cluster.interface import Cluster
from tiphys_plugin.quota.lease import AdmissionBackend
from tiphys_plugin.runtime.background import OutputHasher
from tiphys_plugin.runtime.concurrency import Together
from tiphys_plugin.runtime.metrics import Metrics
from tiphys_plugin.runtime.settings import Settings


class Waits:
    """How long something has been waited for, by this process.

    It is kept in memory only: after a restart the wait begins again, which
    errs on the side of patience. So does a clock that jumps, or a machine that
    slept: between two calls, no more than ``longest_gap_seconds`` count.
    """

    def __init__(self) -> None:
        self._seen: dict[str, tuple[datetime, float]] = {}
        self._given_up: set[str] = set()
        self._lock = threading.Lock()

    def seconds(self, what: str, now: datetime, longest_gap_seconds: float) -> float:
        """Seconds since the first call with ``what``."""
        with self._lock:
            last, waited = self._seen.get(what, (now, 0.0))
            waited += min(max((now - last).total_seconds(), 0.0), longest_gap_seconds)
            self._seen[what] = (now, waited)
            return waited

    def over(self, what: str) -> None:
        """``what`` has come, or need not."""
        with self._lock:
            self._seen.pop(what, None)
            self._given_up.discard(what)

    def give_up(self, what: str) -> None:
        """``what`` has not come, and nobody waits for it any more."""
        with self._lock:
            self._seen.pop(what, None)
            self._given_up.add(what)

    def gave_up(self, what: str) -> bool:
        with self._lock:
            return what in self._given_up


@dataclass(frozen=True)
class Tenant:
    """What a core holds to that serves one namespace among others."""

    namespace: str
    stores: Stores


class OnlyStore:
    """The `Stores` of a plugin that has one store, for whatever namespace."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def serves(self, namespace: str) -> bool:  # noqa: ARG002
        return True

    def store(self, namespace: str) -> Store:  # noqa: ARG002
        return self._store


@dataclass(frozen=True)
class Services:
    """Adapters and settings of one plugin."""

    store: Store
    stores: Stores
    """Those of all who share the ledger, ``store`` among them."""
    cluster: Cluster
    ledger: AdmissionBackend
    clock: Callable[[], datetime]
    settings: Settings
    metrics: Metrics
    hasher: OutputHasher
    waits: Waits
    together: Together


@dataclass(frozen=True)
class StepCall:
    """One call about one step: who asks, for which step id, under which policy."""

    services: Services
    binding: Binding
    spec: StepSpec
    step: str
    """Step id: with the item and its ordinal for a fan-out."""
    instance: str
    node: str
    input_keys: str = ""
    """Where the pods of a gang find the step's input artifacts, in JSON."""

    @property
    def store(self) -> Store:
        return self.services.store

    @property
    def run(self) -> str:
        return self.binding.run

    @property
    def layout(self) -> RunLayout:
        return self.binding.layout

    @property
    def fresh_since(self) -> int:
        """Where the step was asked to run again: the submission from which on its results count; else 0."""
        return self.binding.fresh_since.get(self.spec.name, 0)

    @property
    def family(self) -> tuple[Ancestor, ...]:
        """The runs whose results and checkpoints the step may go on from, the nearest first."""
        return () if self.fresh_since else self.binding.family

    @property
    def volume(self) -> str:
        """URL of the volume that the step's checkpoints lie on, out of the plugin's sight; empty without one."""
        return self.binding.pipeline.volume(self.spec.name)
