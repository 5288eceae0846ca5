"""Ends what makes the pods of a training on several nodes: its Workflow is stopped or over, or a node is lost.

Argo stops its own pods. Of what a step has created it stops only the pod that
watched; the members would train on, and hold their GPUs, until the Workflow is
deleted. And a member whose node nobody reaches keeps the others waiting: what
made it makes no other, nor counts it as failed, before somebody has heard from
that node.

Deletes agent pods that stand in the way, as soon as they are seen.
"""

import threading
import time
from collections.abc import Callable
from datetime import datetime
from typing import NamedTuple

import structlog

from tiphys.errors import ConflictError, FencedError, TiphysError
from tiphys.kube import KubeApi, Object
from tiphys.kube.gang_workloads import RESOURCES, is_elastic, stage_of
from tiphys.kube.resources import PODS
from tiphys.protocol.gang import GANG_LABEL, MEMBER_LABEL, WORKFLOW_UID_LABEL, Backend, Stage
from tiphys.records import utc_now
from tiphys_controller.kubernetes.agent_pods import OVERDUE, StuckAgent, to_delete
from tiphys_controller.kubernetes.events.messages import agent_deleted
from tiphys_controller.kubernetes.metrics import Metrics
from tiphys_controller.kubernetes.watch_cache import ClusterView
from tiphys_controller.kubernetes.workflow_view import SeenWorkflow
from tiphys_controller.kubernetes.writer import Writer

_PAUSE_SECONDS = 2.0
LATE_SECONDS = 30.0
"""When to look a second time: a pod of Argo that was just about to create something does so before it ends."""
PATROL_SECONDS = 30.0
"""How often the members of running trainings are looked at; a lost node takes minutes to be found out."""
_log = structlog.get_logger()


class _Watched(NamedTuple):
    """A Workflow in the state in which it was seen: stopped, or over, or both."""

    uid: str
    namespace: str
    state: tuple[str, bool]


def is_ended(workflow: SeenWorkflow) -> bool:
    """Whether no pod of a gang of this Workflow shall live."""
    return bool(workflow.gangs) and (bool(workflow.shutdown) or workflow.finished)


class Gangs:
    """One round looks after the gangs of every Workflow that ended since the last."""

    def __init__(
        self,
        view: ClusterView,
        api: KubeApi,
        writer: Writer,
        metrics: Metrics,
        monotonic: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = utc_now,
    ) -> None:
        self._view = view
        self._api = api
        self._writer = writer
        self._metrics = metrics
        self._monotonic = monotonic
        self._now = now
        self._patrolled = monotonic()
        self._first_looks: dict[_Watched, float] = {}
        self._done: set[_Watched] = set()

    def run(self, over: threading.Event) -> None:
        """Work until ``over``."""
        version = -1
        while not over.is_set():
            version = self._view.wait(version, _PAUSE_SECONDS)
            self.end()
            if self._monotonic() - self._patrolled >= PATROL_SECONDS:
                self._patrolled = self._monotonic()
                self.end_lost()

    def end(self) -> None:
        """Delete what goes on for an ended Workflow; what could not be looked at is so in the next round."""
        ended = {_watched(one): one for one in self._view.workflows() if is_ended(one)}
        self._done &= ended.keys()
        self._first_looks = {key: at for key, at in self._first_looks.items() if key in ended}
        due = {key: one for key, one in ended.items() if self._is_due(key)}
        for namespace, backend in sorted({(one.namespace, kind) for one in due.values() for kind in one.gangs}):
            try:
                self._end_where(
                    *(backend, namespace, WORKFLOW_UID_LABEL),
                    values={key.uid for key in due if key.namespace == namespace},
                    is_due=_goes_on,
                )
            except TiphysError as error:
                self._metrics.failures.labels("gang").inc()
                _log.warning("gang.not_ended", namespace=namespace, kind=backend.value, error=str(error))
                due = {key: one for key, one in due.items() if key.namespace != namespace}
        for key in due:
            self._note(key)

    def end_lost(self) -> None:
        """Delete what waits for a member that its node has not ended long after it was told to."""
        live = [one for one in self._view.workflows() if one.gangs and not one.finished]
        for namespace in sorted({one.namespace for one in live}):
            backends = {kind for one in live if one.namespace == namespace for kind in one.gangs}
            try:
                lost = {name for pod in self._members(namespace) if (name := self._gang_of_lost(pod))}
                for backend in sorted(backends) if lost else ():
                    self._end_where(backend, namespace, GANG_LABEL, lost, _waits_for_all)
            except TiphysError as error:
                self._metrics.failures.labels("gang").inc()
                _log.warning("gang.not_ended", namespace=namespace, error=str(error))

    def _members(self, namespace: str) -> list[Object]:
        return self._api.list(PODS, namespace, f"{MEMBER_LABEL}=true").items

    def _gang_of_lost(self, pod: Object) -> str:
        """Name of the gang of a pod that should be gone; empty for any other pod."""
        gone_by = pod["metadata"].get("deletionTimestamp")
        overdue = gone_by is not None and self._now() - datetime.fromisoformat(gone_by) > OVERDUE
        ended = (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")
        return str(pod["metadata"]["labels"].get(GANG_LABEL, "")) if overdue and not ended else ""

    def _is_due(self, key: _Watched) -> bool:
        first = self._first_looks.get(key)
        return key not in self._done and (first is None or self._monotonic() - first >= LATE_SECONDS)

    def _note(self, key: _Watched) -> None:
        if key in self._first_looks:
            self._done.add(key)
        else:
            self._first_looks[key] = self._monotonic()

    def _end_where(
        self, backend: Backend, namespace: str, label: str, values: set[str], is_due: Callable[[Object], bool]
    ) -> None:
        for found in self._api.list(RESOURCES[backend], namespace, GANG_LABEL).items:
            if found["metadata"]["labels"].get(label) in values and is_due(found):
                try:
                    self._writer.end_gang(backend, found)
                except FencedError:
                    raise
                except ConflictError:
                    continue  # another one has its name by now


def _goes_on(found: Object) -> bool:
    return stage_of(found) is Stage.ACTIVE


def _waits_for_all(found: Object) -> bool:
    """An elastic one goes on without a member that is lost."""
    return _goes_on(found) and not is_elastic(found)


def _watched(workflow: SeenWorkflow) -> _Watched:
    return _Watched(workflow.uid, workflow.namespace, (workflow.shutdown, workflow.finished))


class Healer:
    """One round looks at every agent pod in sight that does not work."""

    def __init__(
        self, view: ClusterView, writer: Writer, metrics: Metrics, now: Callable[[], datetime] = utc_now
    ) -> None:
        self._view = view
        self._writer = writer
        self._metrics = metrics
        self._now = now
        self._deleted: set[str] = set()

    def run(self, over: threading.Event) -> None:
        """Work until ``over``."""
        version = -1
        while not over.is_set():
            version = self._view.wait(version, _PAUSE_SECONDS)
            self.heal()

    def heal(self) -> None:
        """Delete what stands in the way now; what cannot be deleted is tried again in the next round."""
        live = {one.uid: one for one in self._view.workflows() if not one.finished}
        stuck = self._view.stuck_agents()
        self._deleted &= {pod.uid for pod in stuck}
        for pod in to_delete(stuck, live, self._now()):
            if pod.uid not in self._deleted:
                self._delete(pod, live[pod.workflow_uid])

    def _delete(self, pod: StuckAgent, workflow: SeenWorkflow) -> None:
        try:
            deleted = self._writer.delete_agent(pod)
            self._deleted.add(pod.uid)
            if deleted:
                self._writer.tell(workflow, agent_deleted(pod.name, pod.uid, pod.reason))
        except ConflictError:
            self._deleted.add(pod.uid)  # another pod has its name by now, or another controller leads
        except TiphysError as error:
            self._metrics.failures.labels("agent").inc()
            _log.warning("agent.not_deleted", namespace=pod.namespace, pod=pod.name, error=str(error))
