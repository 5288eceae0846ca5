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

One look at a namespace, for a round that a person goes by hand: lists in the place of the controller's watches.
"""

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial

import structlog

from tiphys.errors import IntegrityError, TiphysError, UsageError
from tiphys.kube import KubeApi, Object, cluster_name
from tiphys.kube.resources import GPU_LEDGERS, LEDGER_NAME, PODS, WORKFLOWS
from tiphys.protocol.step_spec import PIPELINE_ANNOTATION
from tiphys.records import RunRecord
from tiphys.store import RunLayout, Store, find_record
from tiphys_controller.auto_resume.state import Mode
from tiphys_controller.cleanup import Found, HeldLease, Sight, What, held_leases, litter, orphaned, unfinished
from tiphys_controller.kubernetes.agent_pods import AGENT_LABELS, delete_agent, stuck_agent, to_delete
from tiphys_controller.kubernetes.metrics import Metrics
from tiphys_controller.kubernetes.watch_cache import ClusterView
from tiphys_controller.kubernetes.workflow_view import see

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


class Look:
    """What there is in the namespace that ``api`` looks at, listed once.

    Raises:
        StoreError: the API server is out of reach.
        NotFoundError: it has no Workflows.
        ForbiddenError: they may not be listed.
    """

    def __init__(self, api: KubeApi) -> None:
        self._api = api
        self.namespace = api.namespace
        self._workflows = [see(one) for one in api.list(WORKFLOWS, self.namespace, PIPELINE_ANNOTATION).items]

    def sight(self) -> Sight:
        """For runs; those of other namespaces count as seen."""
        present = {one.uid for one in self._workflows}
        return Sight(cluster_name(self._api), lambda bound: bound.namespace != self.namespace or bound.uid in present)

    def agents(self, now: datetime) -> Iterator[Found]:
        """Agent pods that stand in the way of a Workflow that goes on."""
        pods = self._api.list(PODS, self.namespace, AGENT_LABELS).items
        stuck = [found for pod in pods if (found := stuck_agent(pod)) is not None]
        for pod in to_delete(stuck, self._alive(), now):
            why = f"no plugin step of its Workflow goes on: {pod.reason}"
            yield Found(What.AGENT, pod.namespace, pod.name, why, partial(delete_agent, self._api, pod))

    def leases(self, stores: Sequence[Store], ledger_namespace: str, now: datetime) -> Iterator[Found]:
        """Leases of this namespace, in a ledger beside it, that nobody counts on."""
        ledger, alive = self._api.get(GPU_LEDGERS, ledger_namespace, LEDGER_NAME), self._alive()
        for lease in held_leases(ledger):
            if lease.namespace != self.namespace:
                continue
            of = next((one for one in stores if find_record(one, RunLayout(lease.run).record, RunRecord)), stores[0])
            if (found := orphaned(lease, of, lease.uid in alive, now)) is not None:
                yield found

    def _alive(self) -> set[str]:
        return {one.uid for one in self._workflows if not one.finished}
