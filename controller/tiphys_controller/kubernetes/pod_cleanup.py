"""Deletes pods that would block or outlive their Workflow: gangs and agent pods.

Argo stops its own pods. Of what a step has created it stops only the pod that
watched; the members of a gang would train on and hold their GPUs until the
Workflow is deleted. And a member on an unreachable node keeps the others
waiting: its controller neither replaces it nor counts it as failed before the
node reports again.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import NamedTuple

import structlog

from tiphys.errors import ConflictError, FencedError
from tiphys.kube import KubeApi, Object
from tiphys.kube.gang_workloads import GANG_RESOURCES, gang_phase, is_elastic_job
from tiphys.kube.resources import PODS
from tiphys.protocol.gang import GANG_LABEL, MEMBER_LABEL, WORKFLOW_UID_LABEL, GangBackend, GangPhase
from tiphys.protocol.phases import is_final_pod_phase
from tiphys.records import utc_now
from tiphys.service.tenant_guard import TenantGuard
from tiphys_controller.kubernetes.agent_pods import DELETION_GRACE, StuckAgentPod, select_agent_pods_to_delete
from tiphys_controller.kubernetes.events.messages import agent_pod_deleted_message
from tiphys_controller.kubernetes.metrics import ControllerMetrics
from tiphys_controller.kubernetes.watch_cache import WatchCache
from tiphys_controller.kubernetes.workflow_view import WorkflowView
from tiphys_controller.kubernetes.writer import ClusterWriter

_PAUSE_SECONDS = 2.0
SECOND_LOOK_SECONDS = 30.0
"""Delay of a second check: a pod of Argo may create a gang while its Workflow is being stopped."""
LOST_MEMBER_CHECK_SECONDS = 30.0
"""Interval between checks for lost members, which Kubernetes deletes after minutes; the plugin may be faster."""
_log = structlog.get_logger()


class _EndedWorkflow(NamedTuple):
    """A Workflow in one observed end state: stopped, finished, or both."""

    uid: str
    namespace: str
    state: tuple[str, bool]


def must_end_gangs(workflow: WorkflowView) -> bool:
    """Whether the gangs of this Workflow must be deleted."""
    return bool(workflow.gangs) and (bool(workflow.shutdown) or workflow.finished)


@dataclass
class GangCleaner:
    """Deletes gangs of ended Workflows, and gangs that wait for a lost member."""

    view: WatchCache
    api: KubeApi
    writer: ClusterWriter
    metrics: ControllerMetrics
    monotonic: Callable[[], float] = time.monotonic
    now: Callable[[], datetime] = utc_now
    _first_looks: dict[_EndedWorkflow, float] = field(default_factory=dict)
    _done: set[_EndedWorkflow] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._guard = TenantGuard("gang", self.metrics.failures.labels("gang").inc)
        self._lost_checked_at = self.monotonic()

    def run(self, stop: threading.Event) -> None:
        """Work until ``stop``."""
        version = -1
        while not stop.is_set():
            version = self.view.wait(version, _PAUSE_SECONDS)
            self.end_finished()
            if self.monotonic() - self._lost_checked_at >= LOST_MEMBER_CHECK_SECONDS:
                self._lost_checked_at = self.monotonic()
                self.end_lost()

    def end_finished(self) -> None:
        """Delete the gangs of ended Workflows. A namespace that fails is checked again in the next round."""
        ended = {_ended_workflow(workflow): workflow for workflow in self.view.workflows() if must_end_gangs(workflow)}
        self._done &= ended.keys()
        self._first_looks = {key: at for key, at in self._first_looks.items() if key in ended}
        due = {key: view for key, view in ended.items() if self._is_due(key)}
        for namespace, backend in sorted({(view.namespace, kind) for view in due.values() for kind in view.gangs}):
            with self._guard.visit(namespace=namespace, kind=backend.value) as visit:
                self._end_matching(
                    *(backend, namespace, WORKFLOW_UID_LABEL),
                    values={key.uid for key in due if key.namespace == namespace},
                    is_due=_is_active,
                )
            if visit.failure is not None:
                due = {key: view for key, view in due.items() if key.namespace != namespace}
        for key in due:
            self._record_look(key)

    def end_lost(self) -> None:
        """Delete gangs with a member that its node did not end long after the deletion."""
        live = [workflow for workflow in self.view.workflows() if workflow.gangs and not workflow.finished]
        for namespace in sorted({workflow.namespace for workflow in live}):
            backends = {kind for workflow in live if workflow.namespace == namespace for kind in workflow.gangs}
            with self._guard.visit(namespace=namespace):
                lost = {name for pod in self._members(namespace) if (name := self._find_lost_gang(pod))}
                for backend in sorted(backends) if lost else ():
                    self._end_matching(backend, namespace, GANG_LABEL, lost, _is_active_and_rigid)

    def _members(self, namespace: str) -> list[Object]:
        return self.api.list(PODS, namespace, f"{MEMBER_LABEL}=true").items

    def _find_lost_gang(self, pod: Object) -> str:
        """Gang of a pod whose deletion is overdue; empty for any other pod."""
        deadline = pod["metadata"].get("deletionTimestamp")
        overdue = deadline is not None and self.now() - datetime.fromisoformat(deadline) > DELETION_GRACE
        ended = is_final_pod_phase((pod.get("status") or {}).get("phase"))
        return str(pod["metadata"]["labels"].get(GANG_LABEL, "")) if overdue and not ended else ""

    def _is_due(self, key: _EndedWorkflow) -> bool:
        first = self._first_looks.get(key)
        return key not in self._done and (first is None or self.monotonic() - first >= SECOND_LOOK_SECONDS)

    def _record_look(self, key: _EndedWorkflow) -> None:
        if key in self._first_looks:
            self._done.add(key)
        else:
            self._first_looks[key] = self.monotonic()

    def _end_matching(
        self, backend: GangBackend, namespace: str, label: str, values: set[str], is_due: Callable[[Object], bool]
    ) -> None:
        def select(workload: Object) -> Object | None:
            return workload if workload["metadata"]["labels"].get(label) in values and is_due(workload) else None

        for workload in self.api.list(GANG_RESOURCES[backend], namespace, GANG_LABEL, transform=select).items:
            try:
                self.writer.end_gang(backend, workload)
            except FencedError:
                raise
            except ConflictError:
                continue  # another object has its name by now


def _is_active(found: Object) -> bool:
    return gang_phase(found) is GangPhase.ACTIVE


def _is_active_and_rigid(found: Object) -> bool:
    """Whether the gang runs and cannot continue without a lost member, as an elastic one can."""
    return _is_active(found) and not is_elastic_job(found)


def _ended_workflow(workflow: WorkflowView) -> _EndedWorkflow:
    return _EndedWorkflow(workflow.uid, workflow.namespace, (workflow.shutdown, workflow.finished))


@dataclass
class AgentPodCleaner:
    """Deletes agent pods that block their Workflow."""

    view: WatchCache
    writer: ClusterWriter
    metrics: ControllerMetrics
    now: Callable[[], datetime] = utc_now
    _deleted: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        # Another pod may have its name by now, or another controller leads.
        self._guard = TenantGuard("agent", self.metrics.failures.labels("agent").inc, ConflictError)

    def run(self, stop: threading.Event) -> None:
        """Work until ``stop``."""
        version = -1
        while not stop.is_set():
            version = self.view.wait(version, _PAUSE_SECONDS)
            self.delete_stuck_pods()

    def delete_stuck_pods(self) -> None:
        """Delete agent pods that block a running Workflow. A failed deletion is retried in the next round."""
        live = {workflow.uid: workflow for workflow in self.view.workflows() if not workflow.finished}
        stuck = self.view.stuck_agent_pods()
        self._deleted &= {pod.uid for pod in stuck}
        for pod in select_agent_pods_to_delete(stuck, live, self.now()):
            if pod.uid not in self._deleted:
                self._delete(pod, live[pod.workflow_uid])

    def _delete(self, pod: StuckAgentPod, workflow: WorkflowView) -> None:
        with self._guard.visit(namespace=pod.namespace, pod=pod.name) as visit:
            deleted = self.writer.delete_agent_pod(pod)
            self._deleted.add(pod.uid)
            if deleted:
                self.writer.record_event(workflow, agent_pod_deleted_message(pod.name, pod.uid, pod.reason))
        if isinstance(visit.failure, ConflictError):
            self._deleted.add(pod.uid)
