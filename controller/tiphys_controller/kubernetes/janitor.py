"""Removes what nothing else cleans up, and counts what a person should know.

| finding | action |
|---|---|
| incomplete uploads older than a day | aborted |
| records of alerts that were handled a week ago | removed |
| markers of submissions that are no longer open | removed |
| submissions that were claimed an hour ago and never sent | counted; auto-resume sends those of enabled pipelines |
| runs whose Workflow was deleted before it ended | counted; auto-resume resumes those of enabled pipelines |
| leases whose attempt or Workflow is over | counted; the plugin's service releases them |

Retention, not the janitor, removes shards that no checkpoint names. A dry run
counts everything and removes nothing. `tiphys janitor` makes the same round on
demand, with a `NamespaceSnapshot` in place of the controller's watches.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial

import structlog

from tiphys.errors import IntegrityError, UsageError
from tiphys.kube import KubeApi, Object, identify_cluster
from tiphys.kube.resources import DEFAULT_LEDGER_NAME, PODS, WORKFLOWS
from tiphys.kube.whole_ledger import WholeLedgerReader
from tiphys.protocol.step_spec import PIPELINE_ANNOTATION
from tiphys.records import RunRecord
from tiphys.service.tenant_guard import TenantGuard
from tiphys.store import RunLayout, Store, find_record
from tiphys_controller.auto_resume.state import AutomationMode
from tiphys_controller.cleanup import (
    CleanupFinding,
    CleanupKind,
    HeldLease,
    WorkflowPresence,
    find_garbage,
    find_orphaned_lease,
    find_stalled_runs,
    parse_held_leases,
)
from tiphys_controller.kubernetes.agent_pods import (
    AGENT_LABELS,
    delete_agent_pod,
    parse_stuck_agent_pod,
    select_agent_pods_to_delete,
)
from tiphys_controller.kubernetes.metrics import ControllerMetrics
from tiphys_controller.kubernetes.watch_cache import WatchCache
from tiphys_controller.kubernetes.workflow_view import build_workflow_view

_PERIOD_SECONDS = 3600.0
_FIRST_SECONDS = 60.0
_log = structlog.get_logger()


@dataclass
class Janitor:
    """Cleans the stores of all tenants, and checks the GPU ledger, in rounds."""

    stores: Callable[[str], Store]
    tenants: Callable[[], list[str]]
    view: WatchCache
    find_blind_reason: Callable[[], str]
    """Returns why the watch cache may lack objects; empty if it is complete."""
    cluster_name: Callable[[], str]
    read_ledger: Callable[[], Object | None]
    """The `GPULedger`; None without one."""
    is_leader: Callable[[], bool]
    metrics: ControllerMetrics
    now: Callable[[], datetime]
    mode: AutomationMode

    def run(self, stop: threading.Event) -> None:
        """Work until ``stop``."""
        pause = _FIRST_SECONDS
        while not stop.wait(pause):
            pause = _PERIOD_SECONDS
            self.run_round(stop)

    def run_round(self, stop: threading.Event) -> None:
        """Go through all tenants once."""
        counted: Counter[CleanupKind] = Counter()
        guard = TenantGuard("janitor", self.metrics.failures.labels("janitor").inc)
        for namespace in self.tenants():
            with guard.visit(namespace=namespace):
                self._clean_namespace(namespace, counted, stop)
        with guard.visit():
            self._count_and_remove(self._find_orphaned_leases(stop), counted, stop)
        for what in (CleanupKind.UNSENT, CleanupKind.GONE):
            self.metrics.unfinished.labels(what).set(counted[what])
        self.metrics.orphaned_leases.set(counted[CleanupKind.LEASE])

    def _clean_namespace(self, namespace: str, counted: Counter[CleanupKind], stop: threading.Event) -> None:
        store, now = self.stores(namespace), self.now()
        self._count_and_remove(find_garbage(store, now), counted, stop)
        present, is_blind = {workflow.uid for workflow in self.view.workflows()}, bool(self.find_blind_reason())
        presence = WorkflowPresence(self.cluster_name(), lambda bound: is_blind or bound.uid in present)
        self._count_and_remove(find_stalled_runs(store, presence, now, stop.is_set), counted, stop)

    def _find_orphaned_leases(self, stop: threading.Event) -> Iterator[CleanupFinding]:
        """Orphaned leases of served tenants. A damaged record hides only its own lease."""
        alive = {workflow.uid for workflow in self.view.workflows() if not workflow.finished}
        served = set() if self.find_blind_reason() else set(self.tenants())
        for lease in parse_held_leases(self.read_ledger()):
            if stop.is_set():
                return
            if (
                lease.namespace in served
                and (finding := self._check_lease(lease, lease.workflow_uid in alive)) is not None
            ):
                yield finding

    def _check_lease(self, lease: HeldLease, is_workflow_running: bool) -> CleanupFinding | None:
        try:
            return find_orphaned_lease(lease, self.stores(lease.namespace), is_workflow_running, self.now())
        except (IntegrityError, UsageError) as error:
            _log.warning("janitor.lease", namespace=lease.namespace, run=lease.run, error=str(error))
            return None

    def _count_and_remove(
        self, findings: Iterable[CleanupFinding], counted: Counter[CleanupKind], stop: threading.Event
    ) -> None:
        for finding in findings:
            if stop.is_set():
                return
            counted[finding.kind] += 1
            if finding.remove is not None:
                self._remove(finding, finding.remove)

    def _remove(self, finding: CleanupFinding, remove: Callable[[], object]) -> None:
        if not self.is_leader():
            return
        self.metrics.garbage.labels(finding.kind).inc()
        is_dry_run = self.mode is not AutomationMode.ON
        _log.info("janitor.removes", what=finding.kind, store=finding.location, name=finding.name, dry_run=is_dry_run)
        if not is_dry_run:
            remove()


class NamespaceSnapshot:
    """The objects of the namespace of ``api``, listed once.

    Raises:
        StoreError: the API server is out of reach.
        NotFoundError: the cluster has no Workflow kind.
        ForbiddenError: the account may not list Workflows.
    """

    def __init__(self, api: KubeApi) -> None:
        self._api = api
        self.namespace = api.namespace
        found = api.list(
            WORKFLOWS,
            self.namespace,
            PIPELINE_ANNOTATION,
            transform=lambda workflow: workflow if build_workflow_view(workflow) else None,
        )
        self._workflows = [build_workflow_view(workflow) for workflow in found.items]

    def build_workflow_presence(self) -> WorkflowPresence:
        """Presence of the namespace's Workflows; Workflows of other namespaces count as present."""
        present = {workflow.uid for workflow in self._workflows}
        return WorkflowPresence(
            identify_cluster(self._api), lambda bound: bound.namespace != self.namespace or bound.uid in present
        )

    def find_stuck_agent_pods(self, now: datetime) -> Iterator[CleanupFinding]:
        """Agent pods that block a running Workflow."""
        pods = self._api.list(PODS, self.namespace, AGENT_LABELS).items
        stuck = [stuck_pod for pod in pods if (stuck_pod := parse_stuck_agent_pod(pod)) is not None]
        for pod in select_agent_pods_to_delete(stuck, self._running_workflow_uids(), now):
            why = f"it blocks all plugin steps of its Workflow: {pod.reason}"
            yield CleanupFinding(
                CleanupKind.AGENT, pod.namespace, pod.name, why, partial(delete_agent_pod, self._api, pod)
            )

    def find_orphaned_leases(
        self, stores: Sequence[Store], ledger_namespace: str, now: datetime
    ) -> Iterator[CleanupFinding]:
        """Orphaned leases of this namespace, in the ledger of ``ledger_namespace``."""
        reader, alive = (
            WholeLedgerReader(self._api, ledger_namespace, DEFAULT_LEDGER_NAME),
            self._running_workflow_uids(),
        )
        for lease in parse_held_leases(reader.read()):
            if lease.namespace != self.namespace:
                continue
            store = next(
                (own for own in stores if find_record(own, RunLayout(lease.run).run_record, RunRecord)), stores[0]
            )
            if (finding := find_orphaned_lease(lease, store, lease.workflow_uid in alive, now)) is not None:
                yield finding

    def _running_workflow_uids(self) -> set[str]:
        return {workflow.uid for workflow in self._workflows if not workflow.finished}
