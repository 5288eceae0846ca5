"""Clears away what nobody else does, and counts what a person should know of.

| what | what is done |
|---|---|
| uploads that never became an object, older than a day | aborted |
| what is known of alerts that were done with a week ago | removed |
| submissions that were claimed an hour ago and never sent | counted; the loop sends those whose pipelines ask for it |
| runs whose Workflow was deleted before it ended | counted; the same |
| leases of attempts that are over, or whose Workflow is | counted; the plugin's service takes them back |

Shards that no checkpoint names are retention's business. In a dry run nothing is
removed, and everything counted. `tiphys janitor` goes the same round by hand.
"""

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime

import structlog

from tiphys.errors import IntegrityError, TiphysError, UsageError
from tiphys.kube import Object
from tiphys.store import Store
from tiphys_controller.automatic.limits import Mode
from tiphys_controller.cleaning import Found, HeldLease, Sight, What, held_leases, litter, orphaned, unfinished
from tiphys_controller.kubernetes.metrics import Metrics
from tiphys_controller.kubernetes.view import ClusterView

_PERIOD_SECONDS = 3600.0
_FIRST_SECONDS = 60.0
_ANEW_ROUNDS = 24
"""After so many rounds also runs that had settled are looked at again: somebody may have gone on with them."""
_log = structlog.get_logger()


@dataclass
class Janitor:
    """One round goes through the storage of every tenant, and through the ledger."""

    stores: Callable[[str], Store]
    namespaces: Callable[[], list[str]]
    view: ClusterView
    blind: Callable[[], str]
    """Why the view does not show all that there is; empty if it does."""
    cluster: Callable[[], str]
    """Name of this cluster."""
    ledger: Callable[[], Object | None]
    """The `GPULedger`; None without one."""
    may_write: Callable[[], bool]
    metrics: Metrics
    now: Callable[[], datetime]
    mode: Mode
    _settled: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    _rounds: int = 0

    def run(self, over: threading.Event) -> None:
        """Work until ``over``."""
        pause = _FIRST_SECONDS
        while not over.wait(pause):
            pause = _PERIOD_SECONDS
            self.round(over)

    def round(self, over: threading.Event) -> None:
        """Go through all tenants once."""
        if self._rounds % _ANEW_ROUNDS == 0:
            self._settled.clear()
        self._rounds += 1
        counted: Counter[What] = Counter()
        for namespace in self.namespaces():
            self._guarded(namespace, lambda of=namespace: self._tenant(of, counted, over))  # type: ignore[misc]
        self._guarded("", lambda: self._note(self._leases(over), counted, over))
        for what in (What.UNSENT, What.GONE):
            self.metrics.unfinished.labels(what).set(counted[what])
        self.metrics.orphaned_leases.set(counted[What.LEASE])

    def _guarded(self, namespace: str, work: Callable[[], None]) -> None:
        try:
            work()
        except TiphysError as error:
            self.metrics.failures.labels("janitor").inc()
            _log.warning("janitor.failed", namespace=namespace, error=str(error))
        except Exception:  # noqa: BLE001  the worker loop: a bug about one tenant must not silence the others
            self.metrics.failures.labels("janitor").inc()
            _log.exception("janitor.crashed", namespace=namespace)

    def _tenant(self, namespace: str, counted: Counter[What], over: threading.Event) -> None:
        store, now = self.stores(namespace), self.now()
        self._note(litter(store, now), counted, over)
        present, blind = {one.uid for one in self.view.workflows()}, bool(self.blind())
        sight = Sight(self.cluster(), lambda bound: blind or bound.uid in present)
        self._note(unfinished(store, sight, now, self._settled[namespace], over.is_set), counted, over)

    def _leases(self, over: threading.Event) -> Iterator[Found]:
        """Those of tenants that are seen; one whose records cannot be read does not keep the others from being told."""
        alive = {one.uid for one in self.view.workflows() if not one.finished}
        served = set() if self.blind() else set(self.namespaces())
        for lease in held_leases(self.ledger()):
            if over.is_set():
                return
            if lease.namespace in served and (found := self._orphaned(lease, lease.uid in alive)) is not None:
                yield found

    def _orphaned(self, lease: HeldLease, alive: bool) -> Found | None:
        try:
            return orphaned(lease, self.stores(lease.namespace), alive, self.now())
        except (IntegrityError, UsageError) as error:
            _log.warning("janitor.lease", namespace=lease.namespace, run=lease.run, error=str(error))
            return None

    def _note(self, found: Iterable[Found], counted: Counter[What], over: threading.Event) -> None:
        for one in found:
            if over.is_set():
                return
            counted[one.what] += 1
            if one.remove is not None:
                self._remove(one, one.remove)

    def _remove(self, found: Found, remove: Callable[[], object]) -> None:
        if not self.may_write():
            return
        self.metrics.litter.labels(found.what).inc()
        dry = self.mode is not Mode.ON
        _log.info("janitor.removes", what=found.what, store=found.where, name=found.name, dry_run=dry)
        if not dry:
            remove()
