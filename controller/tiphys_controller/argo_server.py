"""Submits and watches Workflows through an argo-server.

An argo-server shows Workflows only: no pods, no Leases, and not its cluster. If
the API server is also readable, each answer is compared with it, and the cluster
gets its name. Otherwise the cluster is known by the server's address, and only
uids prove anything (`tiphys_controller.submit.submission`).

The connection is configured by the variables of Argo's own command. Neither
Hera's service nor Argo's SDK is used: their models drop the bodies of plugin
templates, and Hera's calls have no timeout.
"""

import json
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from typing import NamedTuple
from urllib.parse import quote, urlsplit

from urllib3 import PoolManager, disable_warnings
from urllib3.exceptions import InsecureRequestWarning

from tiphys.errors import (
    ConflictError,
    ForbiddenError,
    NotFoundError,
    ObjectExistsError,
    StoreError,
    TiphysError,
    UsageError,
)
from tiphys.kube import KubeApi, Object
from tiphys.kube.resources import WORKFLOWS
from tiphys.kube.transport import RemoteServer, Transport
from tiphys.protocol.compiled_workflow import Manifest
from tiphys_controller.kubernetes.workflow_view import build_live_workflow, is_workflow_finished
from tiphys_controller.submit.submitter import ADDRESS_PREFIX, LiveWorkflow, ShutdownStrategy

URL_VARIABLE, TOKEN_VARIABLE = "ARGO_SERVER", "ARGO_TOKEN"
_SECURE_VARIABLE, _INSECURE_VARIABLE, _BASE_HREF_VARIABLE = "ARGO_SECURE", "ARGO_INSECURE_SKIP_VERIFY", "ARGO_BASE_HREF"
_NO_REASON = "no reason given"


class ArgoServer(NamedTuple):
    """An argo-server: its URL and its transport."""

    address: str
    transport: Transport


def connect_argo_server(
    host_or_url: str, environ: Mapping[str, str], authorization: Callable[[], str] = lambda: ""
) -> ArgoServer:
    """Connect to the argo-server at ``host:port``, as in Argo's command, or at a URL.

    Args:
        host_or_url: Address of the server.
        environ: ARGO_TOKEN, ARGO_SECURE, ARGO_INSECURE_SKIP_VERIFY and ARGO_BASE_HREF, as Argo's command has them
            (``cmd/argo/commands/client/conn.go``). A scheme and a path in ``host_or_url`` go first. ARGO_HTTP1 has no
            meaning here: it is always HTTP/1.1.
        authorization: Credentials where ARGO_TOKEN is not set: those of the kubeconfig.

    Raises:
        UsageError: the address is not valid.
    """
    address = _parse_address(host_or_url, environ)
    if untrusted := environ.get(_INSECURE_VARIABLE) == "true":
        disable_warnings(InsecureRequestWarning)  # the variable's name is explicit, so each request need not warn
    token = environ.get(TOKEN_VARIABLE, "").strip()
    # Argo expects the scheme in the variable; a token without one is taken as a bearer token.
    token = token if " " in token or not token else f"Bearer {token}"
    pool = PoolManager(maxsize=4, cert_reqs="CERT_NONE" if untrusted else "CERT_REQUIRED")
    return ArgoServer(address, Transport(address, pool, (lambda: token) if token else authorization, _ARGO_SERVER_PEER))


def _parse_address(host_or_url: str, environ: Mapping[str, str]) -> str:
    scheme = "http" if environ.get(_SECURE_VARIABLE) == "false" else "https"
    url = host_or_url if "://" in host_or_url else f"{scheme}://{host_or_url}"
    parts = urlsplit(url)
    try:
        usable = parts.scheme in ("http", "https") and parts.hostname and (parts.port or True)
    except ValueError:  # the port is not a number
        usable = False
    if not usable or parts.query or parts.fragment or parts.username:
        raise UsageError(
            f"argo-server {host_or_url!r}: give host:port, such as argo.example:2746, or a URL; see {URL_VARIABLE}"
        )
    base = parts.path.strip("/") or environ.get(_BASE_HREF_VARIABLE, "").strip("/")
    return f"{parts.scheme}://{parts.netloc}" + (f"/{base}" if base else "")


def _error_for_status(status: int, body: str, server: str, path: str) -> TiphysError:
    """The error for a status. Argo answers as the gRPC gateway does, with a code and a message."""
    code, message = _parse_error_body(body)
    refusal = f"argo-server {server} refused: {message}"
    match status:
        case 401:
            return ForbiddenError(
                f"argo-server {server} does not accept these credentials: {message}; set {TOKEN_VARIABLE}, for "
                f'instance by `export {TOKEN_VARIABLE}="Bearer $(kubectl create token ACCOUNT)"`, or see '
                "`argo auth token`"
            )
        case 403:
            return ForbiddenError(
                f"{refusal}; let the account of {TOKEN_VARIABLE} get, create, watch and patch workflows"
            )
        case 404 if code is None:
            return UsageError(f"argo-server {server} does not serve {path}: {message}; {_BASE_PATH_REMEDY}")
        case 404:
            return NotFoundError(f"argo-server {server} says: {message}")
        case 409:
            return ObjectExistsError(message) if code == _ALREADY_EXISTS else ConflictError(message)
        case 400 | 405 | 413 | 415 | 422:
            tls_remedy = (
                f" It speaks TLS: leave {_SECURE_VARIABLE}=false out, or write https://" if "HTTPS" in message else ""
            )
            return UsageError(f"{refusal}{tls_remedy}")
    if 300 <= status < 400:
        return UsageError(
            f"argo-server {server} sends {path} elsewhere ({status}): a log-in, or a wrong URL; {_BASE_PATH_REMEDY}"
        )
    return StoreError(f"argo-server {server} answered {status}: {message}")


def _parse_error_body(body: str) -> tuple[int | None, str]:
    """Code and message of an error body; None and its beginning if it is not from the gRPC gateway."""
    try:
        answer = json.loads(body)
        return int(answer["code"]), str(answer.get("message") or _NO_REASON)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None, " ".join(body.split())[:300] or _NO_REASON


_ALREADY_EXISTS = 6  # google.golang.org/grpc/codes
_BASE_PATH_REMEDY = f"where it lies behind a path, such as /argo, say so by {_BASE_HREF_VARIABLE} or in the URL"
_ARGO_SERVER_PEER = RemoteServer(
    name="argo-server",
    error_for_status=_error_for_status,
    web_page_remedy=_BASE_PATH_REMEDY,
    tls_remedy=(
        f"name its certificate authority by SSL_CERT_FILE, or skip verification with {_INSECURE_VARIABLE}=true; "
        f"if the server does not use TLS, set {_SECURE_VARIABLE}=false"
    ),
)


_ARCHIVED = "workflows.argoproj.io/workflow-archiving-status"
_WATCH_SECONDS, _SILENCE_SECONDS = 45, 60.0
_SHORTEST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.5, 30.0


class ArgoServerSubmitter:
    """A `tiphys_controller.ClusterSubmitter`.

    ``cluster`` is named by `tiphys.kube.identify_cluster`; None if unknown. ``kube_api`` is the API server of that
    cluster, with the right to get Workflows, to verify answers; None: no check.
    """

    def __init__(self, server: ArgoServer, cluster: str | None = None, kube_api: KubeApi | None = None) -> None:
        self._server = server
        self._cluster = cluster or f"{ADDRESS_PREFIX}{server.address}"
        self._kube_api = kube_api

    @property
    def cluster(self) -> str:
        return self._cluster

    def find(self, namespace: str, name: str) -> LiveWorkflow | None:
        """The live object; None if there is none, or only one in Argo's archive.

        Raises:
            UsageError: the argo-server belongs to another cluster than the API server.
        """
        found = self.read(namespace, name)
        return build_live_workflow(found) if found else None

    def read(self, namespace: str, name: str) -> Object | None:
        """Like `find`, the whole object. Argo-server has read offloaded nodes into it."""
        for _ in range(2):  # it may appear or vanish between the two reads
            workflow = _exclude_archived(self._read(namespace, name))
            if self._kube_api is None or _uid(workflow) == _uid(self._kube_api.get(WORKFLOWS, namespace, name)):
                return workflow
        raise self._wrong_cluster_error(f"they return different objects for Workflow {namespace}/{name}")

    def create(self, manifest: Manifest) -> LiveWorkflow:
        """Create the Workflow under its ``metadata.name``, in its ``metadata.namespace``.

        If the answer is lost, the Workflow is looked up by its name, which belongs to this submission.

        Raises:
            ConflictError: an object of that name exists.
            NotFoundError: there is no such namespace.
            UsageError: Argo finds the Workflow invalid, or the argo-server belongs to another cluster than the API
                server.
        """
        namespace, name = manifest["metadata"]["namespace"], manifest["metadata"]["name"]
        try:
            created = self._request("POST", namespace, body={"workflow": manifest})
        except ForbiddenError:
            raise
        except NotFoundError as error:
            raise NotFoundError(f"cannot create a Workflow in namespace {namespace}: {error}") from error
        except StoreError:
            existing = _exclude_archived(self._read(namespace, name))
            if existing is None:
                raise
            created = existing
        if self._kube_api and _uid(self._kube_api.get(WORKFLOWS, namespace, name)) != _uid(created):
            raise self._wrong_cluster_error(self._delete_misplaced(namespace, name))
        return build_live_workflow(created)

    def stop(self, workflow: LiveWorkflow, strategy: ShutdownStrategy = ShutdownStrategy.STOP) -> None:
        """Implements `ClusterSubmitter.stop`. Argo's call takes no uid, so the uid is checked right before."""
        location = f"{workflow.namespace}/{workflow.name}"
        current = _exclude_archived(self._read(workflow.namespace, workflow.name))
        if current is None:
            raise NotFoundError(f"Workflow {location} is gone")
        if _uid(current) != workflow.uid:
            raise ConflictError(f"another Workflow has the name {location} now (uid {_uid(current)})")
        self._request("PUT", workflow.namespace, workflow.name, strategy.value.lower(), body={})

    def watch(
        self, workflow: LiveWorkflow, stop: threading.Event, on_error: Callable[[StoreError], object] = lambda _: None
    ) -> Iterator[Object]:
        """Implements `ClusterSubmitter.watch`: read, then stream changes, and read again when the stream ends."""
        pause, seen_version = _SHORTEST_PAUSE_SECONDS, ""
        while not stop.is_set():
            try:
                document = self._read_workflow(workflow)
                pause = _SHORTEST_PAUSE_SECONDS
            except StoreError as error:
                on_error(error)
                stop.wait(pause)
                pause = min(pause * 2, _LONGEST_PAUSE_SECONDS)
                continue
            with closing(self._stream_changes(document, workflow)) as documents:
                for workflow_document in documents:
                    if (
                        version := workflow_document["metadata"].get("resourceVersion", "")
                    ) != seen_version or not version:
                        yield workflow_document
                    seen_version = version
                    if is_workflow_finished(workflow_document) or stop.is_set():
                        return
            stop.wait(pause)

    def _read_workflow(self, workflow: LiveWorkflow) -> Object:
        """The Workflow, live or archived."""
        document = self._read(workflow.namespace, workflow.name)
        if document is None or _uid(document) != workflow.uid:
            raise NotFoundError(f"Workflow {workflow.namespace}/{workflow.name} was deleted")
        return document

    def _stream_changes(self, document: Object, workflow: LiveWorkflow) -> Generator[Object, None, None]:
        """Yield ``document`` and its changes until the stream ends or breaks; the next read finds out why."""
        yield document
        query = {
            "listOptions.fieldSelector": f"metadata.name={workflow.name}",
            "listOptions.resourceVersion": document["metadata"].get("resourceVersion", ""),
            "listOptions.timeoutSeconds": str(_WATCH_SECONDS),
        }
        path = _path("workflow-events", workflow.namespace)
        try:
            with closing(self._server.transport.stream_objects(path, query, _SILENCE_SECONDS)) as changes:
                for change in changes:
                    event = change.get("result") or {}
                    if event.get("type") not in ("ADDED", "MODIFIED") or _uid(event["object"]) != workflow.uid:
                        return
                    yield event["object"]
        except TiphysError:
            return

    def _read(self, namespace: str, name: str) -> Object | None:
        try:
            return self._request("GET", namespace, name)
        except NotFoundError:
            return None

    def _request(self, method: str, *parts: str, body: Object | None = None) -> Object:
        return self._server.transport.request_json(method, _path("workflows", *parts), body=body)

    def _delete_misplaced(self, namespace: str, name: str) -> str:
        try:
            self._request("DELETE", namespace, name)
        except TiphysError as error:
            return f"Workflow {namespace}/{name} was created in the wrong cluster; delete it there ({error})"
        return f"Workflow {namespace}/{name} was created in the wrong cluster, and is deleted again"

    def _wrong_cluster_error(self, evidence: str) -> UsageError:
        other = self._kube_api.server if self._kube_api else ""
        return UsageError(
            f"argo-server {self._server.address} belongs to another cluster than API server {other}: "
            f"{evidence}; choose the "
            "right one with --argo-server, --context or --kubeconfig"
        )


def _path(*parts: str) -> str:
    return "/api/v1/" + "/".join(quote(part, safe="") for part in parts)


def _uid(workflow: Object | None) -> str:
    return str(workflow["metadata"]["uid"]) if workflow else ""


def _exclude_archived(workflow: Object | None) -> Object | None:
    """None for an archived Workflow: Argo answers from its archive (``workflow_archive.go``) once an object is gone."""
    archived = workflow is not None and (workflow["metadata"].get("labels") or {}).get(_ARCHIVED) == "Persisted"
    return None if archived else workflow
