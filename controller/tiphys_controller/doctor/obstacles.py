"""What keeps the Workflows of a cluster from going on, as kubelet, scheduler and Argo say it: cause and remedy.

A pod that does not start writes no log, and what Tiphys records says only that its attempt runs. The objects say more.
"""

import re
from collections.abc import Container, Iterable, Iterator, Mapping
from datetime import datetime, timedelta
from typing import NamedTuple

from tiphys.errors import ForbiddenError
from tiphys.kube import KubeApi, Object
from tiphys.kube.resources import EVENTS, PODS, WORKFLOWS
from tiphys.protocol.gang import WORKFLOW_UID_LABEL
from tiphys.protocol.phases import is_final_pod_phase, is_final_workflow_phase
from tiphys.protocol.step_spec import PIPELINE_ANNOTATION
from tiphys.protocol.workflow_nodes import WORKFLOW_LABEL, node_of_pod, read_nodes
from tiphys_controller.doctor.pod_readiness import container_statuses

_PATIENCE = timedelta(seconds=20)
"""A pod that starts, or a Workflow that waits for its first look, is no obstacle before."""
_UNANSWERED = timedelta(seconds=60)
"""How long a plugin step may be unanswered: the services answer within seconds."""
_TRY = re.compile(r"\(\d+\)")
"""What tells the tries of a step apart in the names of Argo's nodes."""
_REFUSED = re.compile(r"is forbidden|denied the request")
"""What the API server answers to a pod that no retry will get through."""
_EVENT_REASONS = ("FailedMount", "FailedAttachVolume", "FailedCreatePodSandBox", "FailedBinding", "ProvisioningFailed")

_REMEDIES = tuple(
    (re.compile(pattern, re.IGNORECASE), remedy)
    for pattern, remedy in (
        (
            r"unauthori[sz]ed|authentication required|denied: |pull access denied|403 forbidden",
            "give the service account of the pods an image pull secret for this registry",
        ),
        (
            r"dial tcp|no such host|i/o timeout|connection refused",
            "check the name of the registry, and how the nodes reach it",
        ),
        (r"errimage|imagepull|invalidimage|failed to pull|manifest unknown", "correct the image of the step"),
        (r"admission webhook", "what this webhook asks for must stand in the step, or its owner exempts the namespace"),
        (
            r"exceeded quota|must specify limits",
            "raise the quota of the namespace, or lower what the step asks",
        ),
        (r"service ?account \S{0,260} not found|error looking up service account", "create the service account"),
        (r"persistentvolumeclaim|volume binding|unbound", "create the claim, or a volume and storage class for it"),
        (r"secret \S{0,260} not found", "create this Secret in the namespace; tiphys-store has the keys of the store"),
        (r"configmap \S{0,260} not found", "create this ConfigMap in the namespace"),
        (r"untolerated taint", "add a toleration to the step (spot=True for nodes of spot), or remove the taint"),
        (r"insufficient|didn't match|node\(s\)", "free or add nodes, or lower what the step asks of one"),
    )
)
_NO_REMEDY = "kubectl describe shows more"


class Obstacle(NamedTuple):
    """One reason why a Workflow waits.

    Attributes:
        workflow: Name of the Workflow.
        namespace: Its namespace.
        step: Argo's name of the node that waits, without that of the Workflow; empty: the whole Workflow.
        sentence: What is in the way, in the words of who noticed it.
        remedy: What to do about it.
    """

    workflow: str
    namespace: str
    step: str
    sentence: str
    remedy: str

    @property
    def task(self) -> str:
        """Name of the task of the entry point that waits; empty: the whole Workflow."""
        return re.split(r"[.(]", self.step, maxsplit=1)[0]

    @property
    def reason(self) -> str:
        """Who waits, for what, and the remedy, beside the name of the run."""
        return f"{self.task or 'its Workflow'} waits: {self.sentence}; {self.remedy}"

    def __str__(self) -> str:
        where = f"{self.namespace}/{self.workflow}{f', {self.step}' if self.step else ''}"
        return f"{where}: {self.sentence}"


def observe_obstacles(
    api: KubeApi, namespace: str | None, now: datetime, names: Container[str] | None = None
) -> list[Obstacle]:
    """The obstacles of the unfinished Workflows of Tiphys of a namespace and of these ``names``; None: of all.

    Raises:
        ForbiddenError: the account may not list Workflows or pods.
        StoreError: the API server does not answer.
    """
    found = api.list(WORKFLOWS, namespace, PIPELINE_ANNOTATION).items
    alive = [
        workflow
        for workflow in found
        if not is_final_workflow_phase((workflow.get("status") or {}).get("phase", ""))
        and (names is None or workflow["metadata"]["name"] in names)
    ]
    obstacles: list[Obstacle] = []
    for place in sorted({workflow["metadata"]["namespace"] for workflow in alive}):
        pods = api.list(PODS, place, fields="status.phase=Pending").items
        try:
            events = api.list(EVENTS, place, fields="type=Warning").items if pods else []
        except ForbiddenError:
            events = []
        own = [workflow for workflow in alive if workflow["metadata"]["namespace"] == place]
        obstacles += [obstacle for workflow in own for obstacle in find_obstacles(workflow, pods, events, now)]
    return obstacles


def find_obstacles(workflow: Object, pods: Iterable[Object], events: Iterable[Object], now: datetime) -> list[Obstacle]:
    """The obstacles of one Workflow, by the pods of its namespace, also of other Workflows, and the warnings in it."""
    metadata = workflow["metadata"]
    name, namespace = metadata["name"], metadata["namespace"]
    if not (workflow.get("status") or {}).get("phase"):
        if _age(metadata.get("creationTimestamp"), now) < _PATIENCE:
            return []
        sentence = "Argo's workflow-controller has not looked at it"
        remedy = (
            "start the controller, or let it watch this namespace (its options --namespaced and --managed-namespace)"
        )
        return [Obstacle(name, namespace, "", sentence, remedy)]
    marks = {(WORKFLOW_LABEL, name), (WORKFLOW_UID_LABEL, metadata.get("uid"))}
    own = [pod for pod in pods if marks & (pod["metadata"].get("labels") or {}).items()]
    warnings = {str((event.get("involvedObject") or {}).get("uid")): event for event in events}
    return [
        Obstacle(name, namespace, step, sentence, find_remedy(sentence, namespace))
        for step, sentence in (*_pod_obstacles(own, warnings, now), *_node_obstacles(workflow, own, now))
    ]


def distinct_obstacles(obstacles: Iterable[Obstacle]) -> list[Obstacle]:
    """The first obstacle of each cause in each Workflow: all items of a fan-out may wait for the same."""
    by_cause = {
        (obstacle.namespace, obstacle.workflow, obstacle.sentence): obstacle for obstacle in reversed(list(obstacles))
    }
    return list(reversed(by_cause.values()))


def find_remedy(sentence: str, namespace: str) -> str:
    """What to do about an obstacle."""
    if _UNSERVED in sentence:
        return f"add {namespace} to namespaces= of the chart, and see `tiphys doctor --cluster -n {namespace}`"
    return next((remedy for pattern, remedy in _REMEDIES if pattern.search(sentence)), _NO_REMEDY)


_UNSERVED = "no service of Tiphys answers"


def _pod_obstacles(pods: Iterable[Object], warnings: Mapping[str, Object], now: datetime) -> Iterator[tuple[str, str]]:
    for pod in pods:
        metadata, status = pod["metadata"], pod.get("status") or {}
        old = _age(metadata.get("creationTimestamp"), now) >= _PATIENCE
        if is_final_pod_phase(str(status.get("phase"))) or not old or metadata.get("deletionTimestamp"):
            continue
        if sentence := _describe_pod(pod, warnings.get(str(metadata.get("uid")))):
            yield node_of_pod(pod).partition(".")[2] or metadata["name"], sentence


def _describe_pod(pod: Object, warning: Object | None) -> str:
    """Why a pod has not started; empty if nothing says so."""
    status = pod.get("status") or {}
    for condition in status.get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return f"no node takes its pod: {_one_line(condition.get('message') or condition.get('reason'))}"
    for container in container_statuses(pod):
        waiting = (container.get("state") or {}).get("waiting") or {}
        if (reason := waiting.get("reason")) not in (None, "", "PodInitializing", "ContainerCreating"):
            message = _one_line(waiting.get("message") or "")
            image = f" of image {container['image']}" if "Image" in reason and container.get("image") else ""
            return f"container {container['name']}{image} does not start: {reason}{f': {message}' if message else ''}"
    if warning is not None and warning.get("reason") in _EVENT_REASONS:
        return f"its pod does not start: {warning['reason']}: {_one_line(warning.get('message') or '')}"
    return ""


def _node_obstacles(workflow: Object, pods: Iterable[Object], now: datetime) -> Iterator[tuple[str, str]]:
    """Nodes for which Argo cannot make a pod, and plugin steps that nobody answers."""
    made = {node_of_pod(pod) for pod in pods}
    newest: dict[str, Object] = {}
    for node in sorted(read_nodes(workflow), key=lambda node: (node.get("startedAt") or "", *_place(node["name"]))):
        newest[_TRY.sub("", node["name"])] = node
    for node in newest.values():
        step, message = node["name"].partition(".")[2], _one_line(node.get("message") or "")
        is_pending = node.get("phase") == "Pending"
        is_refused = node.get("phase") == "Error" and _REFUSED.search(message)
        if node.get("type") == "Pod" and node["name"] not in made and message and (is_pending or is_refused):
            yield step, f"Argo makes no pod: {message.rpartition('is forbidden: ')[2]}"
        is_asked = node.get("type") == "Plugin" and is_pending and not message
        if is_asked and _age(node.get("startedAt"), now) >= _UNANSWERED:
            yield step, f"{_UNSERVED} for this namespace"


def _place(name: str) -> tuple[int, str]:
    """Order of the names of tries that began in the same second: ``run(9)`` before ``run(10)``."""
    return len(name), name


def _one_line(text: object) -> str:
    return " ".join(str(text).split())


def _age(moment: str | None, now: datetime) -> timedelta:
    return now - datetime.fromisoformat(moment) if moment else timedelta()
