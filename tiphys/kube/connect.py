"""Find the API server: that of the cluster this process runs in, or of a kubeconfig; and what cluster it is."""

import hashlib
import os
from pathlib import Path

from kubernetes import config
from kubernetes.client import ApiClient, Configuration

from tiphys.errors import NotFoundError, UsageError
from tiphys.kube.api import KubeApi
from tiphys.kube.resources import CONFIG_MAPS

_SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_ROOT_CA = "kube-root-ca.crt"
_CONNECTIONS = 64


def connect(kubeconfig: Path | None = None, context: str | None = None) -> KubeApi:
    """Connect to the cluster of this pod; elsewhere, or with either argument, to that of a kubeconfig.

    Raises:
        UsageError: there is no cluster to connect to, or the kubeconfig is wrong.
    """
    settings = Configuration()
    settings.connection_pool_maxsize = _CONNECTIONS
    try:
        if kubeconfig is None and context is None and "KUBECONFIG" not in os.environ and _in_cluster():
            config.load_incluster_config(client_configuration=settings)  # type: ignore[no-untyped-call]
            namespace = (_SERVICE_ACCOUNT / "namespace").read_text().strip()
        else:
            file = str(kubeconfig) if kubeconfig else None
            config.load_kube_config(file, context, settings, persist_config=False)  # type: ignore[no-untyped-call]
            namespace = _namespace_of_context(file, context)
    except (config.ConfigException, OSError, ValueError, TypeError) as error:
        raise UsageError(
            f"no Kubernetes cluster to connect to: {error}; set KUBECONFIG or give --context, "
            "and try it out with `kubectl get namespaces`"
        ) from error
    return KubeApi(ApiClient(settings), namespace)


def cluster_name(api: KubeApi) -> str:
    """Identity of the cluster: ``kubernetes:`` and a hash of its root certificate, the same for pod and desk.

    Clusters that share a store must not be taken for one another, and the
    address of the API server differs inside and outside. Every namespace holds
    the root certificate in a ConfigMap (Kubernetes, ``rootcacertpublisher``).

    Raises:
        NotFoundError: the namespace does not exist, or publishes no certificate.
    """
    found = api.get(CONFIG_MAPS, api.namespace, _ROOT_CA)
    certificate = ((found or {}).get("data") or {}).get("ca.crt", "")
    if not certificate:
        raise NotFoundError(
            f"namespace {api.namespace} of {api.server} has no ConfigMap {_ROOT_CA}, by which a cluster is told from "
            "others; choose an existing namespace with -n"
        )
    return f"kubernetes:{hashlib.sha256(certificate.strip().encode()).hexdigest()[:12]}"


def _in_cluster() -> bool:
    return "KUBERNETES_SERVICE_HOST" in os.environ and (_SERVICE_ACCOUNT / "token").exists()


def _namespace_of_context(file: str | None, context: str | None) -> str:
    contexts, current = config.list_kube_config_contexts(file)  # type: ignore[no-untyped-call]
    chosen = next((one for one in contexts if one["name"] == context), current)
    return str(chosen["context"].get("namespace") or "default")
