"""Kinds of objects that Tiphys reads and writes, and their paths at the API server."""

from typing import NamedTuple
from urllib.parse import quote

from tiphys.errors import UsageError


class Resource(NamedTuple):
    """A kind of object. ``group`` is empty for the core API group."""

    group: str
    version: str
    plural: str
    kind: str

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    def collection_path(self, namespace: str | None = None) -> str:
        """Path of the collection. None as ``namespace`` means all namespaces, or a kind without namespaces."""
        return "/".join([*self._root_segments(namespace), self.plural])

    def object_path(self, namespace: str | None, name: str, subresource: str = "") -> str:
        """Path of an object, or of its subresource.

        Raises:
            UsageError: ``name`` or ``namespace`` is not valid and would change the path.
        """
        parts = [
            *self._root_segments(namespace),
            self.plural,
            _path_segment(name),
            *([subresource] if subresource else []),
        ]
        return "/".join(parts)

    def _root_segments(self, namespace: str | None) -> list[str]:
        root = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        return [root] if namespace is None else [root, "namespaces", _path_segment(namespace)]


def _path_segment(name: str) -> str:
    """``name`` as a part of a path, by the rules of Kubernetes, ``apimachinery/pkg/api/validation/path``."""
    if name in ("", ".", "..") or "/" in name or "%" in name:
        raise UsageError(
            f"{name!r} is no valid name of a Kubernetes object: it must not be empty, '.' or '..', nor contain '/' or "
            "'%'"
        )
    return quote(name, safe=":")


CONFIG_MAPS = Resource("", "v1", "configmaps", "ConfigMap")
EVENTS = Resource("", "v1", "events", "Event")
NAMESPACES = Resource("", "v1", "namespaces", "Namespace")
NODES = Resource("", "v1", "nodes", "Node")
PERSISTENT_VOLUME_CLAIMS = Resource("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim")
PODS = Resource("", "v1", "pods", "Pod")
SECRETS = Resource("", "v1", "secrets", "Secret")
SERVICE_ACCOUNTS = Resource("", "v1", "serviceaccounts", "ServiceAccount")
DEPLOYMENTS = Resource("apps", "v1", "deployments", "Deployment")
JOBS = Resource("batch", "v1", "jobs", "Job")
JOB_SETS = Resource("jobset.x-k8s.io", "v1alpha2", "jobsets", "JobSet")
TRAIN_JOBS = Resource("trainer.kubeflow.org", "v1alpha1", "trainjobs", "TrainJob")
LEASES = Resource("coordination.k8s.io", "v1", "leases", "Lease")
CUSTOM_RESOURCE_DEFINITIONS = Resource(
    "apiextensions.k8s.io", "v1", "customresourcedefinitions", "CustomResourceDefinition"
)
TOKEN_REVIEWS = Resource("authentication.k8s.io", "v1", "tokenreviews", "TokenReview")
SELF_SUBJECT_ACCESS_REVIEWS = Resource(
    "authorization.k8s.io", "v1", "selfsubjectaccessreviews", "SelfSubjectAccessReview"
)
SUBJECT_ACCESS_REVIEWS = Resource("authorization.k8s.io", "v1", "subjectaccessreviews", "SubjectAccessReview")
WORKFLOWS = Resource("argoproj.io", "v1alpha1", "workflows", "Workflow")
WORKFLOW_TEMPLATES = Resource("argoproj.io", "v1alpha1", "workflowtemplates", "WorkflowTemplate")
WORKFLOW_TASK_SETS = Resource("argoproj.io", "v1alpha1", "workflowtasksets", "WorkflowTaskSet")
GPU_LEDGERS = Resource("tiphys.dev", "v1beta1", "gpuledgers", "GPULedger")
KUEUE_WORKLOADS = Resource("kueue.x-k8s.io", "v1beta2", "workloads", "Workload")
KUEUE_LOCAL_QUEUES = Resource("kueue.x-k8s.io", "v1beta2", "localqueues", "LocalQueue")
KUEUE_FLAVORS = Resource("kueue.x-k8s.io", "v1beta2", "resourceflavors", "ResourceFlavor")
GPU_LEDGER_RECORDS = Resource("tiphys.dev", "v1beta1", "gpuledgerrecords", "GPULedgerRecord")
DEFAULT_LEDGER_NAME = "default"
"""Default name of a GPULedger."""
NODE_LEASE_NAMESPACE = "kube-node-lease"
"""Namespace of the Leases that the kubelets renew; each has the name of its Node."""
AGENT_POD_LABEL = ("workflows.argoproj.io/component", "agent")
"""Label of the pods in which Argo calls its plugins."""
