"""A cluster with Argo and Tiphys in sidecar mode, with which `tiphys doctor --cluster` finds nothing wrong."""

from typing import Any

from support.servers.kube_server import KubeServer
from tiphys.kube import KubeApi
from tiphys.kube.resources import CONFIG_MAPS, DEPLOYMENTS, LEASES, PODS, SECRETS, SERVICE_ACCOUNTS

KINDS = ("workflows", "workflowtasksets", "workflowtaskresults", "workflowtemplates")


def install(server: KubeServer, store: str = "/mnt/runs/{namespace}") -> KubeApi:
    """Install into ``server``; the plugin serves the namespaces ``ml`` and ``vision``."""
    api = server.api("ml")
    for namespace in ("argo", "tiphys", "kube-node-lease"):
        server.add_namespace(namespace)
    server.paths["/apis/argoproj.io/v1alpha1"] = {"resources": [{"name": name} for name in KINDS]}
    server.paths["/apis/tiphys.dev/v1beta1"] = {"resources": [{"name": "gpuledgers"}, {"name": "gpuledgerrecords"}]}
    variables = {
        "DEFAULT_REQUEUE_TIME": "1s",
        "ARGO_AGENT_PATCH_RATE": "200ms",
        "ARGO_EXECUTOR_PLUGINS": "true",
        "ARGO_POD_STATUS_CAPTURE_FINALIZER": "true",
    }
    container = {
        "image": "example.org/workflow-controller:v4.1.2",
        "env": [{"name": name, "value": value} for name, value in variables.items()],
    }
    api.create(DEPLOYMENTS, "argo", deployment("workflow-controller", container))
    api.create(CONFIG_MAPS, "argo", {"metadata": {"name": "workflow-controller-configmap"}})
    served = [f"--store={store}", "--namespace=ml", "--namespace=vision"]
    for component, arguments in (
        ("plugin", ["tiphys_plugin", "serve", *served]),
        ("controller", ["tiphys_controller"]),
    ):
        labels = {"app.kubernetes.io/name": "tiphys", "app.kubernetes.io/component": component}
        api.create(DEPLOYMENTS, "tiphys", deployment(f"tiphys-{component}", {"args": arguments}, labels))
        ready = {"conditions": [{"type": "Ready", "status": "True"}]}
        api.create(PODS, "tiphys", {"metadata": {"name": f"{component}-1", "labels": labels}, "status": ready})
    for account in ("tiphys-workflow", "tiphys-executor", "tiphys-executor-plugin"):
        api.create(SERVICE_ACCOUNTS, "ml", {"metadata": {"name": account}})
        token = {"metadata": {"name": f"{account}.service-account-token"}, "data": {"token": "c2VjcmV0"}}
        api.create(SECRETS, "ml", token)
    api.create(CONFIG_MAPS, "ml", {"metadata": {"name": "tiphys-executor-plugin"}})
    api.create(SECRETS, "ml", {"metadata": {"name": "tiphys-store"}, "data": {"AWS_ACCESS_KEY_ID": "c2VjcmV0"}})
    written = [{"manager": "kubelet", "time": "2026-05-04T12:00:00Z"}]
    lease = {
        "metadata": {"name": "node-1", "managedFields": written},
        "spec": {"renewTime": "2026-05-04T12:00:00.300000Z"},
    }
    api.create(LEASES, "kube-node-lease", lease)
    return api


def deployment(name: str, container: dict[str, Any], labels: dict[str, str] | None = None) -> dict[str, Any]:
    spec = {"template": {"spec": {"containers": [container]}}}
    return {"metadata": {"name": name, "labels": labels or {}}, "spec": spec}
