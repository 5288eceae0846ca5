"""All writes of the controller to the cluster, each fenced by leadership."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime

import structlog

from tiphys.errors import ObjectExistsError
from tiphys.kube import KubeApi, Object, require_leadership
from tiphys.kube.gang_workloads import GANG_RESOURCES
from tiphys.kube.resources import EVENTS, WORKFLOWS
from tiphys.protocol.gang import GangBackend
from tiphys.protocol.step_spec import DESCRIPTION_ANNOTATION, TITLE_ANNOTATION
from tiphys_controller.kubernetes.agent_pods import StuckAgentPod, delete_agent_pod
from tiphys_controller.kubernetes.events.messages import EventMessage
from tiphys_controller.kubernetes.metrics import ControllerMetrics
from tiphys_controller.kubernetes.workflow_view import WorkflowView

COMPONENT = "tiphys-controller"
_LONGEST_MESSAGE = 1024
_LONGEST_NAME_PREFIX = 200
_ANNOTATIONS = {"title": TITLE_ANNOTATION, "description": DESCRIPTION_ANNOTATION}
_log = structlog.get_logger()


@dataclass
class ClusterWriter:
    """Writes to the cluster; checks ``is_leader`` right before each request.

    Every method raises `StoreError` if the API server is out of reach, and
    `FencedError` if another controller may lead by now.
    """

    api: KubeApi
    is_leader: Callable[[], bool]
    metrics: ControllerMetrics
    now: Callable[[], datetime]
    instance: str = COMPONENT

    def record_event(self, workflow: WorkflowView, message: EventMessage) -> None:
        """Create the Event unless it exists: its name is a function of Workflow and message key."""
        require_leadership(self.is_leader)
        try:
            self.api.create(EVENTS, workflow.namespace, self._build_event(workflow, message))
        except ObjectExistsError:
            return
        self.metrics.events.labels(message.reason).inc()

    def record_unreadable(self, kube_object: Object, reason: str) -> None:
        """Create the Event of an object that every list and watch leaves out, see `tiphys.kube.unreadable`."""
        metadata = kube_object["metadata"]
        if "namespace" in metadata:
            require_leadership(self.is_leader)
            message = f"Tiphys leaves this {kube_object['kind']} out, because it cannot be read: {reason}"
            self.api.create(EVENTS, metadata["namespace"], self._event(kube_object, "Unreadable", message, "Warning"))
            self.metrics.events.labels("Unreadable").inc()

    def annotate(self, workflow: WorkflowView, texts: Mapping[str, str]) -> None:
        """Set annotations of a Workflow. ``texts`` are keyed by ``title`` and ``description``."""
        require_leadership(self.is_leader)
        annotations = {_ANNOTATIONS[name]: text for name, text in texts.items()}
        patch: Object = {"metadata": {"uid": workflow.uid, "annotations": annotations}}
        self.api.patch(WORKFLOWS, workflow.namespace, workflow.name, patch)
        self.metrics.descriptions.inc()

    def delete_agent_pod(self, pod: StuckAgentPod) -> bool:
        """As `tiphys_controller.kubernetes.agent_pods.delete_agent_pod`."""
        require_leadership(self.is_leader)
        deleted = delete_agent_pod(self.api, pod)
        if deleted:
            self.metrics.agents_deleted.inc()
            _log.info("agent.deleted", namespace=pod.namespace, pod=pod.name, reason=pod.reason)
        return deleted

    def end_gang(self, backend: GangBackend, workload: Object) -> None:
        """Delete the object that creates the pods of a gang, by uid; the pods get their grace period."""
        require_leadership(self.is_leader)
        metadata = workload["metadata"]
        namespace, name = metadata["namespace"], metadata["name"]
        if self.api.delete(GANG_RESOURCES[backend], namespace, name, uid=metadata["uid"], propagation="Background"):
            self.metrics.gangs_ended.inc()
            _log.info("gang.ended", namespace=namespace, kind=backend.value, name=name)

    def _build_event(self, workflow: WorkflowView, message: EventMessage) -> Object:
        metadata = {"namespace": workflow.namespace, "name": workflow.name, "uid": workflow.uid}
        involved = {"apiVersion": WORKFLOWS.api_version, "kind": WORKFLOWS.kind, "metadata": metadata}
        kind = "Warning" if message.is_warning else "Normal"
        return self._event(involved, message.reason, message.message, kind, message.key, message.recorded_at)

    def _event(
        self, involved: Object, reason: str, message: str, kind: str, key: str = "", at: datetime | None = None
    ) -> Object:
        metadata = involved["metadata"]
        namespace, name, uid = metadata["namespace"], metadata["name"], metadata["uid"]
        digest = hashlib.sha256(f"{uid}/{key or reason}".encode()).hexdigest()[:16]
        moment = (at or self.now()).strftime("%Y-%m-%dT%H:%M:%SZ")
        return {
            "metadata": {"name": f"{name[:_LONGEST_NAME_PREFIX]}.{digest}", "namespace": namespace},
            "involvedObject": {
                "apiVersion": involved["apiVersion"],
                "kind": involved["kind"],
                "namespace": namespace,
                "name": name,
                "uid": uid,
            },
            "type": kind,
            "reason": reason,
            "message": _truncate_message(message),
            "source": {"component": COMPONENT},
            "reportingComponent": COMPONENT,
            "reportingInstance": self.instance,
            "firstTimestamp": moment,
            "lastTimestamp": moment,
            "count": 1,
        }


def _truncate_message(message: str) -> str:
    return message if len(message) <= _LONGEST_MESSAGE else f"{message[: _LONGEST_MESSAGE - 1]}…"
