"""The pods of the trainings as the API server shows them, and the end that a kubelet would report."""

import queue
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from tiphys.errors import NotFoundError
from tiphys.kube import KubeApi, ListSnapshot, Object, WatchEventType, watch_objects
from tiphys.kube.resources import PODS, Resource
from tiphys.protocol.step_spec import ATTEMPT_LABEL, RUN_LABEL

TASK_RESULTS = Resource("argoproj.io", "v1alpha1", "workflowtaskresults", "WorkflowTaskResult")
_WORKFLOW_LABEL = "workflows.argoproj.io/workflow"
_REPORTED_LABEL = "workflows.argoproj.io/report-outputs-completed"
_NODE_ID = "workflows.argoproj.io/node-id"


@dataclass
class PodSeen:
    """One pod of an attempt; times are of `time.monotonic`, when the change reached this process."""

    name: str
    run: str
    attempt: int
    document: Object
    created: float
    running: float | None = None
    ended: float | None = None
    why: str = ""
    """What ended it, if this process did."""

    @property
    def node(self) -> str:
        """Its node; empty before it is bound."""
        name: str = self.document["spec"].get("nodeName", "")
        return name

    @property
    def environ(self) -> dict[str, str]:
        """What its program is given."""
        main = next(each for each in self.document["spec"]["containers"] if each["name"] == "main")
        return {each["name"]: each.get("value", "") for each in main["env"] if "valueFrom" not in each}


@dataclass
class Pods:
    """All pods of attempts in a namespace, by uid, from a watch; ``changes`` has those that began to run or ended."""

    api: KubeApi
    namespace: str
    seen: dict[str, PodSeen] = field(default_factory=dict)
    changes: "queue.Queue[PodSeen]" = field(default_factory=queue.Queue)

    def watch(self) -> threading.Event:
        """Begin to watch; setting the event that is returned ends it."""
        stop = threading.Event()
        # A daemon: a watch without events ends only after minutes.
        threading.Thread(target=self._watch, args=(stop,), daemon=True).start()
        return stop

    def lose_all(self, why: str) -> None:
        """The cluster is gone, and all pods with it."""
        for pod in list(self.seen.values()):
            self._end(pod, why)

    def succeed(self, pod: PodSeen) -> None:
        """Report that its program has ended with 0, as kubelet and executor do. A pod that is gone has no end."""
        metadata = pod.document["metadata"]
        labels = {_WORKFLOW_LABEL: metadata["labels"][_WORKFLOW_LABEL], _REPORTED_LABEL: "true"}
        result = {"metadata": {"name": metadata["annotations"][_NODE_ID], "labels": labels}}
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        ended = {"terminated": {"exitCode": 0, "reason": "Completed", "startedAt": now, "finishedAt": now}}
        statuses = [
            {
                "name": each["name"],
                "image": each["image"],
                "imageID": "",
                "ready": False,
                "restartCount": 0,
                "state": ended,
            }
            for each in pod.document["spec"]["containers"]
        ]
        try:
            self.api.create(TASK_RESULTS, self.namespace, result)
            status = {"phase": "Succeeded", "containerStatuses": statuses}
            self.api.patch(PODS, self.namespace, pod.name, {"status": status}, subresource="status")
        except NotFoundError:
            return

    def _watch(self, stop: threading.Event) -> None:
        changes = watch_objects(
            self.api, PODS, self.namespace, labels=ATTEMPT_LABEL, sleep=time.sleep, should_stop=stop.is_set
        )
        for change in changes:
            if stop.is_set():
                return
            if isinstance(change, ListSnapshot):
                here = {each["metadata"]["uid"] for each in change.objects}
                for uid in set(self.seen) - here:
                    self._end(self.seen[uid], "")
                for document in change.objects:
                    self._see(document)
            elif change.type is WatchEventType.DELETED:
                if pod := self.seen.get(change.object["metadata"]["uid"]):
                    self._end(pod, "")
            else:
                self._see(change.object)

    def _see(self, document: Object) -> None:
        metadata, now = document["metadata"], time.monotonic()
        labels: dict[str, Any] = metadata["labels"]
        pod = self.seen.get(metadata["uid"])
        if pod is None:
            attempt = int(labels[ATTEMPT_LABEL])
            pod = self.seen[metadata["uid"]] = PodSeen(metadata["name"], labels[RUN_LABEL], attempt, document, now)
        pod.document = document
        phase = document.get("status", {}).get("phase")
        if phase in ("Succeeded", "Failed"):
            self._end(pod, "")
        elif phase == "Running" and pod.running is None:
            pod.running = now
            self.changes.put(pod)

    def _end(self, pod: PodSeen, why: str) -> None:
        if pod.ended is None:
            pod.ended = time.monotonic()
            pod.why = pod.why or why
            self.changes.put(pod)
