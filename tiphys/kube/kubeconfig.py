"""Find the API server: that of the cluster this process runs in, or of a kubeconfig; and what cluster it is."""

import hashlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from urllib3 import PoolManager

from tiphys.errors import NotFoundError, StoreError, UsageError
from tiphys.kube.api import KubeApi
from tiphys.kube.resources import CONFIG_MAPS

_SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_ROOT_CA = "kube-root-ca.crt"
_CONNECTIONS = 64
_TOKEN_SECONDS = 60.0
"""How long a token is used before it is read again; Kubernetes replaces it long before it expires."""


def connect(kubeconfig: Path | None = None, context: str | None = None) -> KubeApi:
    """Connect to the cluster of this pod; elsewhere, or with either argument, to that of a kubeconfig.

    Raises:
        UsageError: there is no cluster to connect to, or the kubeconfig is wrong.
    """
    if kubeconfig is None and context is None and "KUBECONFIG" not in os.environ and _in_cluster():
        return connect_from_pod(_SERVICE_ACCOUNT)
    return _connect_by_kubeconfig(kubeconfig, context)


def connect_from_pod(account: Path, monotonic: Callable[[], float] = time.monotonic) -> KubeApi:
    """Connect with the service account that is mounted at ``account``, past any proxy."""
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    server = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
    try:
        namespace = (account / "namespace").read_text().strip()
        pool = PoolManager(maxsize=_CONNECTIONS, cert_reqs="CERT_REQUIRED", ca_certs=str(account / "ca.crt"))
    except OSError as error:
        raise UsageError(f"the service account of this pod is not mounted whole: {error}") from error
    return KubeApi(server, pool, namespace, _MountedToken(account / "token", monotonic).authorization)


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


class _MountedToken:
    """The token of a service account, which the kubelet replaces while the process runs."""

    def __init__(self, file: Path, monotonic: Callable[[], float]) -> None:
        self._file = file
        self._monotonic = monotonic
        self._read: tuple[str, float] | None = None

    def authorization(self) -> str:
        now = self._monotonic()
        if self._read is None or now - self._read[1] >= _TOKEN_SECONDS:
            try:
                self._read = (self._file.read_text().strip(), now)
            except OSError as error:
                raise StoreError(f"the token of the service account cannot be read: {error}") from error
        return f"Bearer {self._read[0]}"


def _in_cluster() -> bool:
    return "KUBERNETES_SERVICE_HOST" in os.environ and (_SERVICE_ACCOUNT / "token").exists()


def _connect_by_kubeconfig(kubeconfig: Path | None, context: str | None) -> KubeApi:
    # The client library is heavy, and nothing else of it is used: pods do without.
    from kubernetes import config
    from kubernetes.client import ApiClient, Configuration
    from yaml import YAMLError

    # Named, because the library looks at KUBECONFIG only once, when it is imported.
    files = str(kubeconfig) if kubeconfig else os.environ.get("KUBECONFIG") or "~/.kube/config"
    settings = Configuration()
    settings.connection_pool_maxsize = _CONNECTIONS
    try:
        config.load_kube_config(files, context, settings, persist_config=False)  # type: ignore[no-untyped-call]
        namespace = _namespace_of_context(config, files, context)
        pool = ApiClient(settings).rest_client.pool_manager
    except (config.ConfigException, YAMLError, OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        why = " ".join(str(error).split())
        raise UsageError(
            f"no Kubernetes cluster to connect to by {files}: {why}; set KUBECONFIG or give --context, "
            "and try it out with `kubectl get namespaces`"
        ) from error
    return KubeApi(settings.host, pool, namespace, _KubeconfigToken(settings, files).authorization)


class _KubeconfigToken:
    """The credentials of a kubeconfig, renewed by the client library, which may start a program for that."""

    def __init__(self, settings: Any, files: str) -> None:
        self._settings = settings
        self._files = files
        self._one_at_a_time = threading.Lock()

    def authorization(self) -> str:
        try:
            with self._one_at_a_time:
                found = self._settings.auth_settings().get("BearerToken", {})
        except Exception as error:
            raise StoreError(f"the credentials of {self._files} could not be renewed: {error}") from error
        return str(found.get("value") or "").strip()


def _namespace_of_context(config: Any, files: str, context: str | None) -> str:
    contexts, current = config.list_kube_config_contexts(files)
    chosen = next((one for one in contexts if one["name"] == context), current)
    return str(chosen["context"].get("namespace") or "default")
