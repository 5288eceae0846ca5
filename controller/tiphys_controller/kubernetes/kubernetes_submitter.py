"""Submits Workflows through the API server of a Kubernetes cluster.

It needs no argo-server; see `tiphys_controller.argo_server` for that.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import chain

from tiphys.errors import NotFoundError, StoreError
from tiphys.kube import KubeApi, ListSnapshot, Object, WatchEvent, WatchEventType, watch_objects
from tiphys.kube.resources import WORKFLOWS
from tiphys.protocol.compiled_workflow import Manifest
from tiphys_controller.doctor.obstacles import Obstacle, distinct_obstacles, observe_obstacles
from tiphys_controller.kubernetes.workflow_view import build_live_workflow, is_workflow_finished
from tiphys_controller.submit.submitter import LiveWorkflow, ShutdownStrategy

_NO_ARGO = "the cluster has no Workflows: Argo Workflows is not installed there; see `tiphys doctor --cluster`"


@dataclass
class KubernetesSubmitter:
    """The `ClusterSubmitter` of an API server; ``cluster`` is its name by `tiphys.kube.identify_cluster`."""

    api: KubeApi
    cluster: str

    def find(self, namespace: str, name: str) -> LiveWorkflow | None:
        found = self.read(namespace, name)
        return build_live_workflow(found) if found else None

    def read(self, namespace: str, name: str) -> Object | None:
        """The whole object of that name; None if there is none."""
        return self.api.get(WORKFLOWS, namespace, name)

    def find_obstacles(self, workflows: Collection[str], now: datetime) -> list[Obstacle]:
        """As of `tiphys_controller.submit.submitter.ObstacleFinder`."""
        names = defaultdict[str, set[str]](set)
        for namespace, _, name in (workflow.partition("/") for workflow in workflows):
            names[namespace].add(name)
        found = (observe_obstacles(self.api, namespace, now, chosen) for namespace, chosen in sorted(names.items()))
        return distinct_obstacles(chain.from_iterable(found))

    def create(self, manifest: Manifest) -> LiveWorkflow:
        """Create the Workflow under its ``metadata.name``, in its ``metadata.namespace``.

        Raises:
            ConflictError: an object of that name exists.
            NotFoundError: there is no such namespace, or no Argo.
            UsageError: the API server finds the Workflow invalid.
        """
        namespace = manifest["metadata"]["namespace"]
        try:
            return build_live_workflow(self.api.create(WORKFLOWS, namespace, manifest))
        except NotFoundError as error:
            raise NotFoundError(f"cannot create a Workflow in namespace {namespace}: {error}; {_NO_ARGO}") from error

    def stop(self, workflow: LiveWorkflow, strategy: ShutdownStrategy = ShutdownStrategy.STOP) -> None:
        patch: Object = {"metadata": {"uid": workflow.uid}, "spec": {"shutdown": strategy.value}}
        self.api.patch(WORKFLOWS, workflow.namespace, workflow.name, patch)

    def watch(
        self,
        workflow: LiveWorkflow,
        stop: threading.Event,
        on_error: Callable[[StoreError], object] = lambda _: None,
    ) -> Iterator[Object]:
        changes = watch_objects(
            self.api,
            WORKFLOWS,
            workflow.namespace,
            fields=f"metadata.name={workflow.name}",
            sleep=stop.wait,
            should_stop=stop.is_set,
            on_error=on_error,
        )
        for change in changes:
            document = _find_object(change, workflow.uid)
            if document is None:
                raise NotFoundError(f"Workflow {workflow.namespace}/{workflow.name} was deleted")
            yield document
            if is_workflow_finished(document):
                return


def _find_object(change: ListSnapshot | WatchEvent, uid: str) -> Object | None:
    objects = change.objects if isinstance(change, ListSnapshot) else [change.object]
    if isinstance(change, WatchEvent) and change.type is WatchEventType.DELETED:
        return None
    return next((workflow for workflow in objects if workflow["metadata"]["uid"] == uid), None)
