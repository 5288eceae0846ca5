"""Workflow objects through an argo-server.

It shows Workflows and nothing else: no pods, no Leases, and not which cluster it belongs to. So who can read the API
server as well has each answer compared with that, and the cluster gets its name; who cannot, goes by the address, from
which nothing is concluded that a uid does not prove (`tiphys_controller.submit.submission`).

Where an argo-server is and how it is asked: by the variables that Argo's own command has, and the same transport
as the API server.

Neither Hera's service nor Argo's SDK is used: their models drop the bodies of plugin templates on the way, and Hera's
calls wait for ever.
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
from tiphys.kube.transport import Peer, Transport
from tiphys.protocol.compiled_workflow import Manifest
from tiphys_controller.kubernetes.workflow_view import is_over, live
from tiphys_controller.submit.submitter import ADDRESS, LiveWorkflow, Shutdown

URL, TOKEN = "ARGO_SERVER", "ARGO_TOKEN"
_TLS, _UNTRUSTED, _BASE = "ARGO_SECURE", "ARGO_INSECURE_SKIP_VERIFY", "ARGO_BASE_HREF"
_NO_REASON = "no reason given"


class ArgoServer(NamedTuple):
    """An argo-server, and the way to it. ``address`` is its URL."""

    address: str
    transport: Transport


def argo_server(given: str, environ: Mapping[str, str], authorization: Callable[[], str] = lambda: "") -> ArgoServer:
    """The argo-server at ``host:port`` (as Argo's command takes it) or a URL.

    Args:
        given: Where it is.
        environ: ARGO_TOKEN, ARGO_SECURE, ARGO_INSECURE_SKIP_VERIFY and ARGO_BASE_HREF, as Argo's command has them
            (``cmd/argo/commands/client/conn.go``). A scheme and a path in ``given`` go first. ARGO_HTTP1 has no
            meaning here: it is always HTTP/1.1.
        authorization: Credentials where ARGO_TOKEN is not set: those of the kubeconfig.

    Raises:
        UsageError: this is no address.
    """
    address = _address(given, environ)
    if untrusted := environ.get(_UNTRUSTED) == "true":
        disable_warnings(InsecureRequestWarning)  # somebody has asked for it by a name that says as much
    token = environ.get(TOKEN, "").strip()
    # Argo wants the scheme in the variable; a bare token can only be meant as a bearer's.
    token = token if " " in token or not token else f"Bearer {token}"
    pool = PoolManager(maxsize=4, cert_reqs="CERT_NONE" if untrusted else "CERT_REQUIRED")
    return ArgoServer(address, Transport(address, pool, (lambda: token) if token else authorization, _PEER))


def _address(given: str, environ: Mapping[str, str]) -> str:
    scheme = "http" if environ.get(_TLS) == "false" else "https"
    url = given if "://" in given else f"{scheme}://{given}"
    parts = urlsplit(url)
    try:
        usable = parts.scheme in ("http", "https") and parts.hostname and (parts.port or True)
    except ValueError:  # a port that is none
        usable = False
    if not usable or parts.query or parts.fragment or parts.username:
        raise UsageError(f"argo-server {given!r}: give host:port, such as argo.example:2746, or a URL; see {URL}")
    base = parts.path.strip("/") or environ.get(_BASE, "").strip("/")
    return f"{parts.scheme}://{parts.netloc}" + (f"/{base}" if base else "")


def _refusal(status: int, body: str, server: str, path: str) -> TiphysError:
    """What a status means; Argo answers as gRPC's gateway does, with a code and a message."""
    code, message = _words(body)
    told = f"argo-server {server} refused: {message}"
    match status:
        case 401:
            return ForbiddenError(
                f"argo-server {server} does not accept these credentials: {message}; set {TOKEN}, for instance by "
                f'`export {TOKEN}="Bearer $(kubectl create token ACCOUNT)"`, or see `argo auth token`'
            )
        case 403:
            return ForbiddenError(f"{told}; let the account of {TOKEN} get, create, watch and patch workflows")
        case 404 if code is None:
            return UsageError(f"argo-server {server} does not serve {path}: {message}; {_PAGE}")
        case 404:
            return NotFoundError(f"argo-server {server} says: {message}")
        case 409:
            return ObjectExistsError(message) if code == _ALREADY_EXISTS else ConflictError(message)
        case 400 | 405 | 413 | 415 | 422:
            secure = f" It speaks TLS: leave {_TLS}=false out, or write https://" if "HTTPS" in message else ""
            return UsageError(f"{told}{secure}")
    if 300 <= status < 400:
        return UsageError(f"argo-server {server} sends {path} elsewhere ({status}): a log-in, or a wrong URL; {_PAGE}")
    return StoreError(f"argo-server {server} answered {status}: {message}")


def _words(body: str) -> tuple[int | None, str]:
    """Code and message, or None and the beginning of whatever it is."""
    try:
        answer = json.loads(body)
        return int(answer["code"]), str(answer.get("message") or _NO_REASON)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None, " ".join(body.split())[:300] or _NO_REASON


_ALREADY_EXISTS = 6  # google.golang.org/grpc/codes
_PAGE = f"where it lies behind a path, such as /argo, say so by {_BASE} or in the URL"
_PEER = Peer(
    name="argo-server",
    refusal=_refusal,
    remedy_of_page=_PAGE,
    remedy_of_tls=(
        f"name its certificate authority by SSL_CERT_FILE, or trust whoever answers by {_UNTRUSTED}=true; "
        f"where it speaks no TLS, set {_TLS}=false"
    ),
)


_ARCHIVED = "workflows.argoproj.io/workflow-archiving-status"
_WATCH_SECONDS, _SILENCE_SECONDS = 45, 60.0
_SHORTEST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.5, 30.0


class ArgoServerSubmitter:
    """A `tiphys_controller.ClusterSubmitter`.

    Args:
        server: The argo-server.
        cluster: What `tiphys.kube.cluster_name` says of the cluster behind it; None if nobody can tell.
        witness: The API server of that cluster, with the right to get Workflows.
    """

    def __init__(self, server: ArgoServer, cluster: str | None = None, witness: KubeApi | None = None) -> None:
        self._server = server
        self._cluster = cluster or f"{ADDRESS}{server.address}"
        self._witness = witness

    @property
    def cluster(self) -> str:
        return self._cluster

    def find(self, namespace: str, name: str) -> LiveWorkflow | None:
        """The live object; one that is only in Argo's archive is none.

        Raises:
            UsageError: the argo-server belongs to another cluster than the API server.
        """
        for _ in range(2):  # it may come or go between the two looks
            found = _unless_archived(self._read(namespace, name))
            if self._witness is None or _uid(found) == _uid(self._witness.get(WORKFLOWS, namespace, name)):
                return live(found) if found else None
        raise self._of_another_cluster(f"both were asked for Workflow {namespace}/{name} and do not agree")

    def create(self, manifest: Manifest) -> LiveWorkflow:
        """Create the Workflow under its ``metadata.name``, in its ``metadata.namespace``.

        Where the answer is lost, it is looked up by its name, which nobody else uses.

        Raises:
            ConflictError: an object of that name exists.
            NotFoundError: there is no such namespace.
            UsageError: Argo finds the Workflow invalid, or the argo-server belongs to another cluster than the API
                server.
        """
        namespace, name = manifest["metadata"]["namespace"], manifest["metadata"]["name"]
        try:
            created = self._ask("POST", namespace, body={"workflow": manifest})
        except ForbiddenError:
            raise
        except NotFoundError as error:
            raise NotFoundError(f"cannot create a Workflow in namespace {namespace}: {error}") from error
        except StoreError:
            found = _unless_archived(self._read(namespace, name))
            if found is None:
                raise
            created = found
        if self._witness and _uid(self._witness.get(WORKFLOWS, namespace, name)) != _uid(created):
            raise self._of_another_cluster(self._taken_back(namespace, name))
        return live(created)

    def stop(self, workflow: LiveWorkflow, how: Shutdown = Shutdown.STOP) -> None:
        """As `ClusterSubmitter` says. Argo's call names no uid, so it is looked at a moment before."""
        where = f"{workflow.namespace}/{workflow.name}"
        present = _unless_archived(self._read(workflow.namespace, workflow.name))
        if present is None:
            raise NotFoundError(f"Workflow {where} is gone")
        if _uid(present) != workflow.uid:
            raise ConflictError(f"another Workflow has the name {where} now (uid {_uid(present)})")
        self._ask("PUT", workflow.namespace, workflow.name, how.value.lower(), body={})

    def watch(
        self, workflow: LiveWorkflow, stop: threading.Event, lost: Callable[[StoreError], object] = lambda _: None
    ) -> Iterator[Object]:
        """As `ClusterSubmitter` says: read, then listen, and read again whenever that ends, for whatever reason."""
        pause, seen = _SHORTEST_PAUSE_SECONDS, ""
        while not stop.is_set():
            try:
                document = self._present(workflow)
                pause = _SHORTEST_PAUSE_SECONDS
            except StoreError as error:
                lost(error)
                stop.wait(pause)
                pause = min(pause * 2, _LONGEST_PAUSE_SECONDS)
                continue
            with closing(self._from(document, workflow)) as documents:
                for one in documents:
                    if (version := one["metadata"].get("resourceVersion", "")) != seen or not version:
                        yield one
                    seen = version
                    if is_over(one) or stop.is_set():
                        return
            stop.wait(pause)

    def _present(self, workflow: LiveWorkflow) -> Object:
        """The Workflow as it is, or as it is archived."""
        document = self._read(workflow.namespace, workflow.name)
        if document is None or _uid(document) != workflow.uid:
            raise NotFoundError(f"Workflow {workflow.namespace}/{workflow.name} was deleted")
        return document

    def _from(self, document: Object, workflow: LiveWorkflow) -> Generator[Object, None, None]:
        """``document``, then what follows it, until the stream ends or breaks off: the next read tells why."""
        yield document
        query = {
            "listOptions.fieldSelector": f"metadata.name={workflow.name}",
            "listOptions.resourceVersion": document["metadata"].get("resourceVersion", ""),
            "listOptions.timeoutSeconds": str(_WATCH_SECONDS),
        }
        path = _path("workflow-events", workflow.namespace)
        try:
            with closing(self._server.transport.stream(path, query, _SILENCE_SECONDS)) as lines:
                for line in lines:
                    event = line.get("result") or {}
                    if event.get("type") not in ("ADDED", "MODIFIED") or _uid(event["object"]) != workflow.uid:
                        return
                    yield event["object"]
        except TiphysError:
            return

    def _read(self, namespace: str, name: str) -> Object | None:
        try:
            return self._ask("GET", namespace, name)
        except NotFoundError:
            return None

    def _ask(self, method: str, *parts: str, body: Object | None = None) -> Object:
        return self._server.transport.json(method, _path("workflows", *parts), body=body)

    def _taken_back(self, namespace: str, name: str) -> str:
        try:
            self._ask("DELETE", namespace, name)
        except TiphysError as error:
            return f"Workflow {namespace}/{name} was created where it does not belong; delete it there ({error})"
        return f"Workflow {namespace}/{name} was not created where it belongs, and is deleted again"

    def _of_another_cluster(self, how: str) -> UsageError:
        other = self._witness.server if self._witness else ""
        return UsageError(
            f"argo-server {self._server.address} belongs to another cluster than API server {other}: {how}; choose the "
            "right one with --argo-server, --context or --kubeconfig"
        )


def _path(*parts: str) -> str:
    return "/api/v1/" + "/".join(quote(part, safe="") for part in parts)


def _uid(workflow: Object | None) -> str:
    return str(workflow["metadata"]["uid"]) if workflow else ""


def _unless_archived(workflow: Object | None) -> Object | None:
    """Argo answers from its archive when the object is gone, and marks such an answer (``workflow_archive.go``)."""
    archived = workflow is not None and (workflow["metadata"].get("labels") or {}).get(_ARCHIVED) == "Persisted"
    return None if archived else workflow
