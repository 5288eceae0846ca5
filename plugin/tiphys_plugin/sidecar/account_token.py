"""The token by which the service knows the namespace of this sidecar.

Argo mounts the token of the service account from a Secret: it never expires, and
it is valid for the API server and for every service that trusts it. Argo can
mount no other (``workflow/controller/agent.go``, ``getServiceAccountTokenVolume``).
So the sidecar shows it to the API server only, over TLS, and gets a token in
exchange (TokenRequest) that expires after ten minutes and is valid for one
audience. The service sees only this one.
"""

import http.client
import json
import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tiphys.errors import StoreError
from tiphys_plugin.sidecar.settings import SidecarSettings

SERVICE_ACCOUNT = "tiphys-executor-plugin"
_LIFETIME_SECONDS = 600
"""The shortest that Kubernetes issues."""
_RENEW_SECONDS = 0.8 * _LIFETIME_SECONDS
_TIMEOUT_SECONDS = 10.0


class AccountToken:
    """Reads the account's token, or exchanges it for one of the audience. Thread-safe."""

    def __init__(self, settings: SidecarSettings, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._file = settings.account_token_file
        self._audience = settings.token_audience
        self._api_server = settings.api_server
        self._monotonic = monotonic
        self._issued = ""
        self._issued_at = float("-inf")
        self._lock = threading.Lock()

    def read(self) -> str:
        """The token to send to the service.

        Raises:
            StoreError: the account's token cannot be read, or the API server did not exchange it.
        """
        if not self._audience:
            return _read(self._file)
        with self._lock:
            now = self._monotonic()
            if now - self._issued_at >= _RENEW_SECONDS:
                self._issued = self._request_token()
                self._issued_at = now
            return self._issued

    def _request_token(self) -> str:
        folder = self._file.parent
        namespace, token = _read(folder / "namespace"), _read(self._file)
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{SERVICE_ACCOUNT}/token"
        body = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"audiences": [self._audience], "expirationSeconds": _LIFETIME_SECONDS},
        }
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        try:
            tls = ssl.create_default_context(cafile=str(folder / "ca.crt"))
            connection = http.client.HTTPSConnection(*self._api_server, timeout=_TIMEOUT_SECONDS, context=tls)
            try:
                connection.request("POST", path, json.dumps(body), headers)
                response = connection.getresponse()
                status, answer = response.status, json.loads(response.read())
            finally:
                connection.close()
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise StoreError(f"the API server did not exchange the token of {SERVICE_ACCOUNT}: {error}") from error
        if status != 201:
            reason = answer.get("message", status) if isinstance(answer, dict) else status
            raise StoreError(
                f"the API server did not exchange the token of {SERVICE_ACCOUNT} for one of audience "
                f"{self._audience}: {reason}; `helm upgrade` with {namespace} among its namespaces gives it the right"
            )
        return str(answer["status"]["token"])


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError as error:
        raise StoreError(
            f"the sidecar has no token of its service account ({error.filename}: {error.strerror}); create the "
            f"ServiceAccount {SERVICE_ACCOUNT} and its token Secret in the workflow's namespace"
        ) from error
