"""Everything that the controller writes to the cluster, each time only while it leads."""

import hashlib
from collections.abc import Callable, Mapping
from datetime import datetime

import structlog

from tiphys.errors import FencedError, ObjectExistsError
from tiphys.kube import KubeApi, Object
from tiphys.kube.gang_workloads import RESOURCES
from tiphys.kube.resources import EVENTS, WORKFLOWS, Resource
from tiphys.protocol.gang import Backend
from tiphys.protocol.step_spec import DESCRIPTION_ANNOTATION, TITLE_ANNOTATION
from tiphys_controller.kubernetes.agent_pods import StuckAgent, delete_agent
from tiphys_controller.kubernetes.events.messages import News
from tiphys_controller.kubernetes.metrics import Metrics
from tiphys_controller.kubernetes.workflow_view import SeenWorkflow

COMPONENT = "tiphys-controller"
_LONGEST_MESSAGE = 1024
_LONGEST_NAME_PREFIX = 200
_ANNOTATIONS = {"title": TITLE_ANNOTATION, "description": DESCRIPTION_ANNOTATION}
_log = structlog.get_logger()


class Writer:
    """Writes while ``may_write`` says so, which is asked right before each request.

    Every method raises `StoreError` if the API server is out of reach, and
    `FencedError` if another controller may lead by now.
    """

    def __init__(
        self,
        api: KubeApi,
        may_write: Callable[[], bool],
        metrics: Metrics,
        now: Callable[[], datetime],
        instance: str = COMPONENT,
    ) -> None:
        self._api = api
        self._may_write = may_write
        self._metrics = metrics
        self._now = now
        self._instance = instance

    def tell(self, workflow: SeenWorkflow, news: News) -> None:
        """Make the Event, unless it was made before: its name is a function of the Workflow and of the news."""
        self._check()
        try:
            self._api.create(EVENTS, workflow.namespace, self._event(workflow, news))
        except ObjectExistsError:
            return
        self._metrics.events.labels(news.reason).inc()

    def describe(self, workflow: SeenWorkflow, texts: Mapping[str, str]) -> None:
        """Give the Workflow these annotations."""
        self._check()
        annotations = {_ANNOTATIONS[name]: text for name, text in texts.items()}
        patch: Object = {"metadata": {"uid": workflow.uid, "annotations": annotations}}
        self._api.patch(WORKFLOWS, workflow.namespace, workflow.name, patch)
        self._metrics.descriptions.inc()

    def delete_agent(self, pod: StuckAgent) -> bool:
        """As `tiphys_controller.kubernetes.agent_pods.delete_agent`."""
        self._check()
        deleted = delete_agent(self._api, pod)
        if deleted:
            self._metrics.agents_deleted.inc()
            _log.info("agent.deleted", namespace=pod.namespace, pod=pod.name, reason=pod.reason)
        return deleted

    def end_gang(self, backend: Backend, found: Object) -> None:
        """Delete what makes the pods of a gang, this one and no other of its name; its pods get their grace period."""
        self._check()
        metadata = found["metadata"]
        where, name = metadata["namespace"], metadata["name"]
        if self._api.delete(RESOURCES[backend], where, name, uid=metadata["uid"], propagation="Background"):
            self._metrics.gangs_ended.inc()
            _log.info("gang.ended", namespace=where, kind=backend.value, name=name)

    def project(self, resource: Resource, body: Object, over: Object | None = None) -> Object:
        """Make an object, or write it over the version that was read; what the server made of it."""
        self._check()
        namespace = body["metadata"]["namespace"]
        if over is None:
            written = self._api.create(resource, namespace, body)
        else:
            metadata = {**body["metadata"], "resourceVersion": over["metadata"]["resourceVersion"]}
            written = self._api.replace(resource, namespace, {**body, "metadata": metadata})
        self._metrics.projected.inc()
        return written

    def withdraw(self, resource: Resource, found: Object) -> None:
        """Delete an object, this one and no other of its name."""
        self._check()
        metadata = found["metadata"]
        if self._api.delete(resource, metadata["namespace"], metadata["name"], uid=metadata["uid"]):
            self._metrics.projected.inc()

    def _check(self) -> None:
        if not self._may_write():
            raise FencedError("this controller does not lead any more; whoever does goes on from the same storage")

    def _event(self, workflow: SeenWorkflow, news: News) -> Object:
        digest = hashlib.sha256(f"{workflow.uid}/{news.key}".encode()).hexdigest()[:16]
        moment = (news.at or self._now()).strftime("%Y-%m-%dT%H:%M:%SZ")
        return {
            "metadata": {"name": f"{workflow.name[:_LONGEST_NAME_PREFIX]}.{digest}", "namespace": workflow.namespace},
            "involvedObject": {
                "apiVersion": WORKFLOWS.api_version,
                "kind": WORKFLOWS.kind,
                "namespace": workflow.namespace,
                "name": workflow.name,
                "uid": workflow.uid,
            },
            "type": "Warning" if news.warning else "Normal",
            "reason": news.reason,
            "message": _shortened(news.message),
            "source": {"component": COMPONENT},
            "reportingComponent": COMPONENT,
            "reportingInstance": self._instance,
            "firstTimestamp": moment,
            "lastTimestamp": moment,
            "count": 1,
        }


def _shortened(message: str) -> str:
    return message if len(message) <= _LONGEST_MESSAGE else f"{message[: _LONGEST_MESSAGE - 1]}…"
