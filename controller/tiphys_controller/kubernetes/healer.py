"""Deletes agent pods that stand in the way, as soon as they are seen."""

import threading
from collections.abc import Callable
from datetime import datetime

import structlog

from tiphys.errors import ConflictError, TiphysError
from tiphys.records import utc_now
from tiphys_controller.kubernetes.agent_pods import StuckAgent, to_delete
from tiphys_controller.kubernetes.metrics import Metrics
from tiphys_controller.kubernetes.news import agent_deleted
from tiphys_controller.kubernetes.seen import SeenWorkflow
from tiphys_controller.kubernetes.view import ClusterView
from tiphys_controller.kubernetes.writer import Writer

_PAUSE_SECONDS = 2.0
_log = structlog.get_logger()


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
