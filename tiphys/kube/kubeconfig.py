"""Connects to the API server of the pod's own cluster or of a kubeconfig, and identifies the cluster.

A pod uses its mounted service account. The Kubernetes client library is loaded
for kubeconfigs only; pods do not need it.
"""

import hashlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from urllib3 import PoolManager

from tiphys.errors import NotFoundError, StoreError, UsageError, install_command
from tiphys.kube.api import KubeApi
from tiphys.kube.resources import CONFIG_MAPS

_SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_ROOT_CA = "kube-root-ca.crt"
_CONNECTIONS = 64
_TOKEN_SECONDS = 60.0
"""A token is read again after this time. Kubernetes replaces the file long before the token expires."""


def connect_to_cluster(kubeconfig: Path | None = None, context: str | None = None) -> KubeApi:
    """Connect to the cluster of this pod; outside a pod, or with an argument, to that of a kubeconfig.

    Without ``kubeconfig`` the file is that of ``KUBECONFIG``, or ``~/.kube/config``; without ``context`` its current
    one counts.

    Raises:
        UsageError: there is no cluster to connect to, the kubeconfig is not valid, or the Kubernetes client library is
            not installed.
    """
    if kubeconfig is None and context is None and "KUBECONFIG" not in os.environ and _is_in_cluster():
        return connect_in_cluster(_SERVICE_ACCOUNT)
    return _connect_by_kubeconfig(kubeconfig, context)


def connect_in_cluster(account_folder: Path, monotonic: Callable[[], float] = time.monotonic) -> KubeApi:
    """Connect with the service account that is mounted at ``account_folder``, without a proxy.

    Raises:
        UsageError: the mount is incomplete.
    """
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    server = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
    try:
        namespace = (account_folder / "namespace").read_text().strip()
        pool = PoolManager(maxsize=_CONNECTIONS, cert_reqs="CERT_REQUIRED", ca_certs=str(account_folder / "ca.crt"))
    except OSError as error:
        raise UsageError(
            f"the mount of this pod's service account is incomplete: {error}; check automountServiceAccountToken"
        ) from error
    return KubeApi(server, pool, namespace, _MountedToken(account_folder / "token", monotonic).authorization)


def identify_cluster(api: KubeApi) -> str:
    """Identity of the cluster: ``kubernetes:`` and a hash of its root certificate.

    Clusters that share a store need distinct identities. The address of the API
    server is not suitable, because it differs inside and outside the cluster.
    Every namespace holds the root certificate in a ConfigMap (Kubernetes,
    ``rootcacertpublisher``).

    Raises:
        NotFoundError: the namespace does not exist, or has no root certificate.
    """
    config_map = api.get(CONFIG_MAPS, api.namespace, _ROOT_CA)
    certificate = ((config_map or {}).get("data") or {}).get("ca.crt", "")
    if not certificate:
        raise NotFoundError(
            f"namespace {api.namespace} of {api.server} has no ConfigMap {_ROOT_CA}, which identifies the cluster; "
            "choose an existing namespace with -n"
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
                raise StoreError(f"cannot read the token of the service account: {error}") from error
        return f"Bearer {self._read[0]}"


def _is_in_cluster() -> bool:
    return "KUBERNETES_SERVICE_HOST" in os.environ and (_SERVICE_ACCOUNT / "token").exists()


def _connect_by_kubeconfig(kubeconfig: Path | None, context: str | None) -> KubeApi:
    # The client library takes 123 MB and serves for kubeconfigs alone, so that images for pods are built without it.
    try:
        from kubernetes import config
        from kubernetes.client import ApiClient, Configuration
        from yaml import YAMLError
    except ModuleNotFoundError as error:
        raise UsageError(
            f"a kubeconfig cannot be read, because {error.name} is not installed; install it with "
            f"`{install_command('kubernetes')}`, or in a pod use its service account: leave KUBECONFIG unset"
        ) from error

    # Passed explicitly, because the library reads KUBECONFIG only when it is imported.
    files = str(kubeconfig) if kubeconfig else os.environ.get("KUBECONFIG") or "~/.kube/config"
    settings = Configuration()
    settings.connection_pool_maxsize = _CONNECTIONS
    try:
        config.load_kube_config(files, context, settings, persist_config=False)  # type: ignore[no-untyped-call]
        namespace = _namespace_of_context(config, files, context)
        pool = ApiClient(settings).rest_client.pool_manager
    except (config.ConfigException, YAMLError, OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise UsageError(
            f"cannot connect to a Kubernetes cluster with {files}: {reason}; set KUBECONFIG or give --context, "
            "and check it with `kubectl get namespaces`"
        ) from error
    return KubeApi(settings.host, pool, namespace, _KubeconfigCredentials(settings, files).authorization)


class _KubeconfigCredentials:
    """The credentials of a kubeconfig. The client library renews them, if necessary through a credential plugin."""

    def __init__(self, settings: Any, files: str) -> None:
        self._settings = settings
        self._files = files
        self._lock = threading.Lock()

    def authorization(self) -> str:
        try:
            with self._lock:
                bearer_token = self._settings.auth_settings().get("BearerToken", {})
        except Exception as error:
            raise StoreError(f"cannot renew the credentials of {self._files}: {error}") from error
        return str(bearer_token.get("value") or "").strip()


def _namespace_of_context(config: Any, files: str, context: str | None) -> str:
    contexts, current = config.list_kube_config_contexts(files)
    chosen = next((entry for entry in contexts if entry["name"] == context), current)
    return str(chosen["context"].get("namespace") or "default")
