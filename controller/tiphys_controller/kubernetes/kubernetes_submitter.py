"""Workflow objects of a Kubernetes cluster, through its API server. No argo-server is needed; see `argo_server`."""

import threading
from collections.abc import Callable, Iterator

from tiphys.errors import NotFoundError, StoreError
from tiphys.kube import Change, ChangeType, KubeApi, Object, Synced, changes
from tiphys.kube.resources import WORKFLOWS
from tiphys.protocol.compiled_workflow import Manifest
from tiphys_controller.kubernetes.workflow_view import is_over, live
from tiphys_controller.submit.submitter import LiveWorkflow, Shutdown

_NO_ARGO = "the cluster has no Workflows: Argo Workflows is not installed there; see `tiphys doctor --cluster`"


class KubernetesSubmitter:
    """A `tiphys_controller.ClusterSubmitter`. ``cluster`` is what `tiphys.kube.cluster_name` says of the API server."""

    def __init__(self, api: KubeApi, cluster: str) -> None:
        self._api = api
        self._cluster = cluster

    @property
    def cluster(self) -> str:
        return self._cluster

    def find(self, namespace: str, name: str) -> LiveWorkflow | None:
        found = self._api.get(WORKFLOWS, namespace, name)
        return live(found) if found else None

    def create(self, manifest: Manifest) -> LiveWorkflow:
        """Create the Workflow under its ``metadata.name``, in its ``metadata.namespace``.

        Raises:
            ConflictError: an object of that name exists.
            NotFoundError: there is no such namespace, or no Argo.
            UsageError: the API server finds the Workflow invalid.
        """
        namespace = manifest["metadata"]["namespace"]
        try:
            return live(self._api.create(WORKFLOWS, namespace, manifest))
        except NotFoundError as error:
            raise NotFoundError(f"cannot create a Workflow in namespace {namespace}: {error}; {_NO_ARGO}") from error

    def stop(self, workflow: LiveWorkflow, how: Shutdown = Shutdown.STOP) -> None:
        patch: Object = {"metadata": {"uid": workflow.uid}, "spec": {"shutdown": how.value}}
        self._api.patch(WORKFLOWS, workflow.namespace, workflow.name, patch)

    def watch(
        self,
        workflow: LiveWorkflow,
        stop: threading.Event,
        lost: Callable[[StoreError], object] = lambda _: None,
    ) -> Iterator[Object]:
        seen = changes(
            self._api,
            WORKFLOWS,
            workflow.namespace,
            fields=f"metadata.name={workflow.name}",
            pause=stop.wait,
            stopped=stop.is_set,
            lost=lost,
        )
        for one in seen:
            document = _present(one, workflow.uid)
            if document is None:
                raise NotFoundError(f"Workflow {workflow.namespace}/{workflow.name} was deleted")
            yield document
            if is_over(document):
                return


def _present(seen: Synced | Change, uid: str) -> Object | None:
    found = seen.objects if isinstance(seen, Synced) else [seen.object]
    if isinstance(seen, Change) and seen.type is ChangeType.DELETED:
        return None
    return next((one for one in found if one["metadata"]["uid"] == uid), None)
