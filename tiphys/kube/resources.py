"""Which kinds of objects Tiphys reads and writes, and under which path the API server keeps them."""

from typing import NamedTuple
from urllib.parse import quote

from tiphys.errors import UsageError


class Resource(NamedTuple):
    """A kind of object. ``group`` is empty for the core group."""

    group: str
    version: str
    plural: str
    kind: str

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str | None = None) -> str:
        """Path of the collection; ``namespace`` None: of all namespaces, or of a kind that belongs to none."""
        return "/".join([*self._root(namespace), self.plural])

    def path_of(self, namespace: str | None, name: str, subresource: str = "") -> str:
        """Path of an object, or of its subresource.

        Raises:
            UsageError: this cannot be a name, and would lead to something else.
        """
        parts = [*self._root(namespace), self.plural, _part(name), *([subresource] if subresource else [])]
        return "/".join(parts)

    def _root(self, namespace: str | None) -> list[str]:
        root = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        return [root] if namespace is None else [root, "namespaces", _part(namespace)]


def _part(name: str) -> str:
    """Kubernetes, ``apimachinery/pkg/api/validation/path``: what no name may be."""
    if name in ("", ".", "..") or "/" in name or "%" in name:
        raise UsageError(f"{name!r} is no name of a Kubernetes object: it is empty, or says where to go in a path")
    return quote(name, safe=":")


CONFIG_MAPS = Resource("", "v1", "configmaps", "ConfigMap")
ENDPOINT_SLICES = Resource("discovery.k8s.io", "v1", "endpointslices", "EndpointSlice")
EVENTS = Resource("", "v1", "events", "Event")
NAMESPACES = Resource("", "v1", "namespaces", "Namespace")
NODES = Resource("", "v1", "nodes", "Node")
PODS = Resource("", "v1", "pods", "Pod")
SECRETS = Resource("", "v1", "secrets", "Secret")
SERVICE_ACCOUNTS = Resource("", "v1", "serviceaccounts", "ServiceAccount")
DEPLOYMENTS = Resource("apps", "v1", "deployments", "Deployment")
JOBS = Resource("batch", "v1", "jobs", "Job")
JOB_SETS = Resource("jobset.x-k8s.io", "v1alpha2", "jobsets", "JobSet")
PYTORCH_JOBS = Resource("kubeflow.org", "v1", "pytorchjobs", "PyTorchJob")
TRAIN_JOBS = Resource("trainer.kubeflow.org", "v1alpha1", "trainjobs", "TrainJob")
LEASES = Resource("coordination.k8s.io", "v1", "leases", "Lease")
CUSTOM_RESOURCE_DEFINITIONS = Resource(
    "apiextensions.k8s.io", "v1", "customresourcedefinitions", "CustomResourceDefinition"
)
ROLES = Resource("rbac.authorization.k8s.io", "v1", "roles", "Role")
ROLE_BINDINGS = Resource("rbac.authorization.k8s.io", "v1", "rolebindings", "RoleBinding")
TOKEN_REVIEWS = Resource("authentication.k8s.io", "v1", "tokenreviews", "TokenReview")
SELF_SUBJECT_ACCESS_REVIEWS = Resource(
    "authorization.k8s.io", "v1", "selfsubjectaccessreviews", "SelfSubjectAccessReview"
)
SUBJECT_ACCESS_REVIEWS = Resource("authorization.k8s.io", "v1", "subjectaccessreviews", "SubjectAccessReview")
WORKFLOWS = Resource("argoproj.io", "v1alpha1", "workflows", "Workflow")
WORKFLOW_TASK_SETS = Resource("argoproj.io", "v1alpha1", "workflowtasksets", "WorkflowTaskSet")
GPU_FLAVORS = Resource("tiphys.dev", "v1alpha1", "gpuflavors", "GPUFlavor")
GPU_LEASES = Resource("tiphys.dev", "v1alpha1", "gpuleases", "GPULease")
GPU_QUEUES = Resource("tiphys.dev", "v1alpha1", "gpuqueues", "GPUQueue")
GPU_LEDGERS = Resource("tiphys.dev", "v1alpha1", "gpuledgers", "GPULedger")
LEDGER_NAME = "default"
"""What a ledger is called where nobody says otherwise."""
