"""What the plugin knows of a Kubernetes cluster: each question is a request of its own, asked where it is decided.

Whether a pod still lives decides on GPUs and on the next attempt, so it is
never answered from a cache: an informer that has lost its watch would call a
pod gone that it has not seen yet. What may be old is that a workflow goes on,
which every waiting step asks again and again.

One admitted training step costs a GET of the Workflow and two LISTs of its own
attempt's pods; each workflow, one more GET; each holder of GPUs that somebody
waits for, a LIST and at most a GET every 30 seconds. Where an attempt is a gang,
a GET of what makes its pods goes with each LIST.
"""

import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from tiphys.errors import ConflictError
from tiphys.kube import KubeApi, Object
from tiphys.kube.gang_workloads import RESOURCES, first_failure, remaining, stage_of
from tiphys.kube.resources import PODS, WORKFLOWS
from tiphys.protocol.gang import Backend
from tiphys.protocol.step_spec import ATTEMPT_LABEL, RUN_LABEL
from tiphys_plugin.cluster.interface import GangStatus, PodStatus
from tiphys_plugin.cluster.pod_status import pod_status

_GLANCE_SECONDS = 5.0
_MOST_GLANCES = 1024


class KubernetesCluster:
    """A `Cluster` behind an API server.

    Args:
        api: The API server.
        namespaces: Those that may be looked into; None for all.
        name: Identity of the cluster, see `tiphys.kube.cluster_name`.
        monotonic: Seconds on a clock that never jumps.
    """

    def __init__(
        self,
        api: KubeApi,
        namespaces: tuple[str, ...] | None,
        name: str,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._api = api
        self._namespaces = namespaces
        self._name = name
        self._monotonic = monotonic
        self._glances: OrderedDict[tuple[str, str], tuple[float, Object]] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        return self._name

    def workflow(self, namespace: str, name: str) -> dict[str, Any] | None:
        self._check_served(namespace)
        found = self._api.get(WORKFLOWS, namespace, name)
        if found is not None:
            self._remember(namespace, name, found)
        return found

    def glance(self, namespace: str, name: str) -> dict[str, Any] | None:
        with self._lock:
            read_at, known = self._glances.get((namespace, name), (0.0, None))
        if known is not None and self._monotonic() - read_at < _GLANCE_SECONDS:
            return known
        found = self.workflow(namespace, name)  # what does not exist is asked for each time: it may be there now
        return None if found is None else _glanced(found)

    def pods(self, namespace: str, run: str, workflow_uid: str, attempt: str) -> list[PodStatus]:
        self._check_served(namespace)
        # Argo's own label says the workflow; the pods of a gang, which Argo did not make, do without it.
        labels = f"{ATTEMPT_LABEL}={attempt},{RUN_LABEL}={run}"
        found = map(pod_status, self._api.list(PODS, namespace, labels).items)
        return [pod for pod in found if pod.workflow_uid == workflow_uid]

    def attempt_pods(self, namespace: str | None = None) -> list[PodStatus]:
        places = (namespace,) if namespace is not None else self._namespaces or (None,)
        return [pod_status(pod) for place in places for pod in self._api.list(PODS, place, ATTEMPT_LABEL).items]

    def end_pod(self, pod: PodStatus) -> None:
        self._check_served(pod.namespace)
        with contextlib.suppress(ConflictError):  # another one has its name by now
            self._api.delete(PODS, pod.namespace, pod.name, uid=pod.uid)

    def gang(self, backend: Backend, namespace: str, name: str) -> GangStatus | None:
        self._check_served(namespace)
        found = self._api.get(RESOURCES[backend], namespace, name)
        if found is None:
            return None
        uid = found["metadata"]["uid"]
        return GangStatus(backend, namespace, name, uid, stage_of(found), first_failure(found), remaining(found))

    def end_gang(self, gang: GangStatus) -> None:
        with contextlib.suppress(ConflictError):  # another one has its name by now
            self._api.delete(RESOURCES[gang.backend], gang.namespace, gang.name, uid=gang.uid, propagation="Background")

    def _check_served(self, namespace: str) -> None:
        if self._namespaces is not None and namespace not in self._namespaces:
            raise ConflictError(
                f"this plugin does not look into namespace {namespace}, where the workflow ran; "
                "have the administrator add it to the plugin's namespaces"
            )

    def _remember(self, namespace: str, name: str, workflow: Object) -> None:
        seen = _glanced(workflow)
        with self._lock:
            self._glances.pop((namespace, name), None)
            if not _goes_on(seen):  # `argo retry` may wake it at any time, and a refusal is for good
                return
            self._glances[namespace, name] = (self._monotonic(), seen)
            if len(self._glances) > _MOST_GLANCES:
                self._glances.popitem(last=False)


def _goes_on(seen: Object) -> bool:
    return not seen["spec"]["shutdown"] and seen["status"]["phase"] not in ("Succeeded", "Failed", "Error")


def _glanced(workflow: Object) -> Object:
    """What a waiting step wants to know of a Workflow, which itself may be a megabyte."""
    return {
        "metadata": {"uid": workflow["metadata"].get("uid")},
        "spec": {"shutdown": (workflow.get("spec") or {}).get("shutdown")},
        "status": {"phase": (workflow.get("status") or {}).get("phase")},
    }
