"""An API server of Kubernetes for tests: real HTTP on the loopback device, any kind of object, faults on demand.

    with kube_server.serving() as server:
        api = server.api("ml")
        api.create(PODS, "ml", {"metadata": {"name": "one"}})
        server.fail_next(503, verb="update", plural="leases")

`tests/cluster/test_kube_api.py` holds it against a real one.
"""

import json
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

from urllib3 import PoolManager

from support.servers.kube_patch import edited, merged
from support.servers.kube_store import Collection, Object, ObjectStore, Place, RefusedError, Selector
from tiphys.kube import KubeApi

DEFAULT_STATUS = frozenset({"gpuledgers", "workflowtasksets", "workloads"})

_STATUS_ALSO_IN_THE_OBJECT = frozenset({"pods", "nodes", "namespaces", "services", "deployments"})
"""Unlike a real server, this one takes their status with the object as well: tests have no kubelet that reports it."""

API_AUDIENCE = "https://kubernetes.default.svc.cluster.local"
_VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch"}
_OF_THE_SERVER = ("tokenreviews", "subjectaccessreviews", "selfsubjectaccessreviews")


class Request(NamedTuple):
    """One request in the words of RBAC. ``path`` is set instead for what is no resource, such as ``/version``."""

    verb: str
    plural: str = ""
    subresource: str = ""
    namespace: str = ""
    name: str = ""
    user: str = ""
    group: str = ""
    path: str = ""
    metadata_only: bool = False
    """Whether the client wants no more of the object than its metadata."""

    @property
    def place(self) -> Place:
        return Place(Collection(self.group, self.plural), self.namespace, self.name)


class UnservedError(Exception):
    """A path of nothing, which is answered without a Status."""


class Fault(NamedTuple):
    """What answers in place of the server; ``status`` 0: nobody, the connection is closed."""

    status: int
    message: str
    body: bytes | None
    done: bool


class KubeServer:
    """The server as a test sees it. Change its attributes at any time."""

    def __init__(self, with_status: frozenset[str] = DEFAULT_STATUS) -> None:
        self.store = ObjectStore(set(with_status))
        self.url = ""
        self.requests: list[Request] = []
        """Every request that arrived, also those that failed."""
        self.tokens: dict[str, str] = {}
        """User names by bearer token, for TokenReview and for who asks."""
        self.audiences: dict[str, str] = {}
        """Audiences of tokens that are for another than the API server, by token; TokenRequest adds to both."""
        self.authenticate = False
        """Whether a request without a known token is refused with 401."""
        self.authorize: Callable[[Request], bool] = lambda _: True
        """Who may do what: asked before each request (403), and by access reviews."""
        self.unknown: set[str] = set()
        """Plurals of kinds that this server does not have."""
        self.raw: dict[bytes, bytes] = {}
        """Bytes that are sent in the place of others: values that a Go server sends and Python's JSON cannot make."""
        self.paths: dict[str, Object] = {"/version": {"major": "1", "minor": "34", "gitVersion": "v1.34.0"}}
        """What a GET of a path that is no resource answers."""
        self.subresources: dict[tuple[str, str, str], Object] = {}
        """What a GET of a subresource answers, by subresource, namespace and name of the object."""
        self._faults: list[tuple[Callable[[Request], bool], Fault]] = []
        self._lock = threading.Lock()
        self._paused = False
        self._clients: list[KubeApi] = []
        self.watch_round = 0
        self.bookmark_round = 0
        self.broken_off = False
        self.bugs: list[BaseException] = []

    def api(self, namespace: str = "ml", token: str = "") -> KubeApi:
        """A client of this server, in a namespace that is made if it is not there."""
        self.add_namespace(namespace)
        client = KubeApi(self.url, PoolManager(maxsize=16), namespace, lambda: f"Bearer {token}" if token else "")
        self._clients.append(client)
        return client

    def add_namespace(self, name: str) -> None:
        """A namespace and what every namespace holds: the root certificate of the cluster."""
        with suppress(RefusedError):
            namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
            self.store.create(Collection("", "namespaces"), "", namespace)
            root = {"metadata": {"name": "kube-root-ca.crt"}, "data": {"ca.crt": "root certificate of the fake"}}
            self.store.create(Collection("", "configmaps"), name, {"apiVersion": "v1", "kind": "ConfigMap", **root})

    def objects(self, plural: str, namespace: str = "") -> list[Object]:
        """What is stored of a kind, without a request."""
        with self.store.changed:
            found = {place.collection for place in self.store.places() if place.collection.plural == plural}
            return [one for kind in sorted(found) for one in self.store.select(Selector(kind, namespace))]

    def count(self, verb: str = "", plural: str = "") -> int:
        """How many such requests arrived; empty: any."""
        with self._lock:
            return sum(verb in ("", one.verb) and plural in ("", one.plural) for one in self.requests)

    def fail_next(
        self,
        status: int,
        times: int = 1,
        *,
        verb: str = "",
        plural: str = "",
        subresource: str | None = None,
        message: str = "a fault of this test",
        body: bytes | None = None,
        done: bool = False,
    ) -> None:
        """Answer the next requests that match with an error, or with the bytes of ``body``.

        ``status`` 0 closes the connection without an answer. With ``done`` the
        request is carried out first, so only its answer is lost.
        """

        def matches(request: Request) -> bool:
            said = verb in ("", request.verb) and plural in ("", request.plural)
            return said and subresource in (None, request.subresource)

        with self._lock:
            self._faults += [(matches, Fault(status, message, body, done))] * times

    def pause(self) -> None:
        """Answer nobody, and break off every watch, until `resume`."""
        self._paused = True
        self.drop_watches()

    def resume(self) -> None:
        self._paused = False

    def compact(self) -> None:
        """Forget all old versions: watches and pages that go on from one get 410."""
        self.store.compact()

    def drop_watches(self, clean: bool = False) -> None:
        """End every watch that is open: in the middle of the stream, or as the server's own timeout does."""
        with self.store.changed:
            self.broken_off = not clean
            self.watch_round += 1
            self.store.changed.notify_all()

    def send_bookmarks(self) -> None:
        """Tell every open watch that asked for bookmarks how far it has come."""
        with self.store.changed:
            self.bookmark_round += 1
            self.store.changed.notify_all()

    def fault(self, request: Request) -> Fault | None:
        """Note the request; the fault that hits it."""
        with self._lock:
            self.requests.append(request)
            if self._paused:
                return Fault(0, "", None, False)
            for index, (matches, fault) in enumerate(self._faults):
                if matches(request):
                    del self._faults[index]
                    return fault
            return None

    def answer(self, request: Request, query: dict[str, str], body: Any, media_type: str) -> tuple[int, Object]:
        """Carry out everything but a watch."""
        if request.path:
            if request.path not in self.paths:
                raise UnservedError
            return 200, self.paths[request.path]
        if request.plural in _OF_THE_SERVER:
            return 201, self._review(request, body)
        if (request.verb, request.plural, request.subresource) == ("create", "serviceaccounts", "token"):
            return 201, self._issue_token(request, body)
        self._check_subresource(request)
        match request.verb:
            case "get":
                return 200, self.subresources.get(request[2:5]) or self.store.get(request.place)
            case "list":
                return 200, self._listed(request, query)
            case "create":
                return 201, self.store.create(request.place.collection, request.namespace, body)
            case "update" | "patch":
                change = _change(request, body, media_type)
                return 200, self.store.write(request.place, request.subresource, change)
            case "delete":
                return 200, self._deleted(request, body or {})
        raise RefusedError(405, "MethodNotAllowed", "the server does not allow this method on the requested resource")

    def close(self) -> None:
        self.pause()
        for client in self._clients:
            client.close()

    def _check_subresource(self, request: Request) -> None:
        has_status = request.plural in self.store.with_status | _STATUS_ALSO_IN_THE_OBJECT
        if request[2:5] in self.subresources:
            return
        if request.subresource not in ("", "status") or (request.subresource == "status" and not has_status):
            raise RefusedError(404, "NotFound", "the server could not find the requested resource")

    def _listed(self, request: Request, query: dict[str, str]) -> Object:
        kind = request.place.collection
        limit, token = int(query.get("limit", 0)), query.get("continue", "")
        items, version, following = self.store.page(_selector(request, query), limit, token)
        if not kind.custom:  # the server's own kinds are listed without it, as in a real list
            items = [{key: one[key] for key in one if key not in ("kind", "apiVersion")} for one in items]
        metadata = {"resourceVersion": str(version), **({"continue": following} if following else {})}
        return {"kind": "List", "apiVersion": "v1", "metadata": metadata, "items": items}

    def _deleted(self, request: Request, options: Object) -> Object:
        found, gone = self.store.delete(request.place, options.get("preconditions") or {})
        details = {"name": request.name, "kind": request.plural, "uid": found["metadata"]["uid"]}
        return {"kind": "Status", "apiVersion": "v1", "status": "Success", "details": details} if gone else found

    def _review(self, request: Request, body: Object) -> Object:
        spec = body.get("spec") or {}
        if request.plural == "tokenreviews":
            return {**body, "status": self._reviewed(str(spec.get("token", "")), spec.get("audiences"))}
        asked = spec.get("resourceAttributes") or {}
        user = request.user if request.plural.startswith("self") else str(spec.get("user", ""))
        names = {"plural": "resource", "subresource": "subresource", "namespace": "namespace", "name": "name"}
        attributes = {ours: str(asked.get(theirs, "")) for ours, theirs in names.items()}
        meant = Request(verb=str(asked.get("verb", "")), user=user, group=str(asked.get("group", "")), **attributes)
        return {**body, "status": {"allowed": self.authorize(meant)}}

    def _issue_token(self, request: Request, body: Object) -> Object:
        spec = body["spec"]
        token = f"issued-{len(self.audiences) + 1}-to-{request.name}-of-{request.namespace}"
        self.tokens[token] = f"system:serviceaccount:{request.namespace}:{request.name}"
        self.audiences[token] = spec["audiences"][0]
        return {**body, "status": {"token": token}}

    def _reviewed(self, token: str, audiences: list[str] | None) -> Object:
        name = self.tokens.get(token)
        if name is None:
            return {"user": {}, "error": "[invalid bearer token]"}
        meant_for = self.audiences.get(token, API_AUDIENCE)
        if meant_for not in (audiences or [API_AUDIENCE]):
            return {"user": {}, "error": f'token audiences ["{meant_for}"] is invalid for the target audiences'}
        groups = ["system:authenticated"]
        if name.startswith("system:serviceaccount:"):
            groups += ["system:serviceaccounts", f"system:serviceaccounts:{name.split(':')[2]}"]
        user = {"username": name, "uid": f"uid-of-{name}", "groups": groups}
        return {"authenticated": True, "user": user, **({"audiences": audiences} if audiences else {})}


@contextmanager
def serving(with_status: frozenset[str] = DEFAULT_STATUS, tls: ssl.SSLContext | None = None) -> Iterator[KubeServer]:
    """A server on a free port of the loopback device; ``with_status``: kinds with a status of their own."""
    server = KubeServer(with_status)
    http = _Http(server)
    server.url = f"{'https' if tls else 'http'}://127.0.0.1:{http.server_port}"
    if tls:  # the handshake is left to the thread of the connection
        http.socket = tls.wrap_socket(http.socket, server_side=True, do_handshake_on_connect=False)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        thread.join()
        server.close()
        http.close_connections()
        http.server_close()
    assert not server.bugs, "the server of this test failed, see above"


def write_kubeconfig(folder: Path, url: str, namespace: str = "ml", **user: str) -> Path:
    """A file in ``folder`` whose one context leads to the API server at ``url``."""
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "test", "cluster": {"server": url}}],
        "users": [{"name": "me", "user": user}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "me", "namespace": namespace}}],
        "current-context": "test",
    }
    file = folder / "kubeconfig"
    file.write_text(json.dumps(document))
    return file


class _Watch:
    """One open watch, and how far it has come."""

    def __init__(self, kube: KubeServer, selector: Selector, query: dict[str, str], watch_round: int) -> None:
        self._kube = kube
        self._round = watch_round
        self._selector = selector
        self._deadline = time.monotonic() + float(query.get("timeoutSeconds", 1800))
        self._wants_bookmarks = query.get("allowWatchBookmarks") == "true"
        with kube.store.changed:
            self._bookmarked = kube.bookmark_round
            asked = int(query.get("resourceVersion") or 0)
            self._present = [] if asked else [("ADDED", one) for one in kube.store.select(selector)]
            self._version = asked or kube.store.version

    def events(self) -> Iterator[tuple[str, Object]]:
        """What it sends, until its time is over or it is dropped."""
        yield from self._present
        changed = self._kube.store.changed
        while True:
            with changed:
                changed.wait_for(self._has_news, max(0.0, self._deadline - time.monotonic()))
                if self._round != self._kube.watch_round:
                    return
                over = time.monotonic() >= self._deadline
                try:
                    news = self._news(over)
                except RefusedError as expired:
                    news, over = [("ERROR", expired.document())], True
            yield from news
            if over:
                return

    def _has_news(self) -> bool:
        kube = self._kube
        is_current = (self._round, self._bookmarked) == (kube.watch_round, kube.bookmark_round)
        return kube.store.version > self._version or not is_current

    def _news(self, over: bool) -> list[tuple[str, Object]]:
        kube = self._kube
        news = [seen for event in kube.store.since(self._version) if (seen := self._selector.seen(event))]
        self._version = kube.store.version
        if self._wants_bookmarks and (over or self._bookmarked != kube.bookmark_round):
            news.append(
                (
                    "BOOKMARK",
                    {"kind": "Bookmark", "apiVersion": "v1", "metadata": {"resourceVersion": str(self._version)}},
                )
            )
        self._bookmarked = kube.bookmark_round
        return news


class _Http(ThreadingHTTPServer):
    daemon_threads = False  # the end of a test waits for each of them

    def __init__(self, server: KubeServer) -> None:
        self.kube = server
        self._open: set[Any] = set()
        super().__init__(("127.0.0.1", 0), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def close_connections(self) -> None:
        for connection in list(self._open):
            with suppress(OSError):
                connection.shutdown(2)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is none of our business; anything else is a bug of the fake."""
        error = sys.exc_info()[1]
        if error is not None and not isinstance(error, OSError):
            self.kube.bugs.append(error)
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Http

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._reply()

    def do_POST(self) -> None:
        self._reply()

    def do_PUT(self) -> None:
        self._reply()

    def do_PATCH(self) -> None:
        self._reply()

    def do_DELETE(self) -> None:
        self._reply()

    def _reply(self) -> None:
        kube = self.server.kube
        query = {key: values[0] for key, values in parse_qs(urlsplit(self.path).query).items()}
        length = int(self.headers.get("Content-Length") or 0)
        if len(sent := self.rfile.read(length)) < length:  # whoever sent it was killed
            self.close_connection = True
            return None
        token = self.headers.get("Authorization", "").partition(" ")[2].strip()
        metadata_only = "as=PartialObjectMetadata" in self.headers.get("Accept", "")
        request = _request(self.command, self.path, query, kube.tokens.get(token, ""))
        request = request._replace(metadata_only=metadata_only)
        watch_round = kube.watch_round  # before anything else, so that no watch slips past a drop
        fault = kube.fault(request)
        if fault and not fault.done:
            return self._fail(fault)
        try:
            _check_access(kube, request)
            if request.verb == "watch":
                return self._watch(_Watch(kube, _selector(request, query), query, watch_round))
            status, document = kube.answer(
                request, query, json.loads(sent) if sent else None, self.headers.get("Content-Type", "")
            )
        except RefusedError as refused:
            status, document = refused.status, refused.document()
        except UnservedError:
            return self._send(404, b"404 page not found\n")
        if fault:
            return self._fail(fault)
        if metadata_only and status == 200:
            document = _only_metadata(document)
        return self._send(status, json.dumps(document).encode())

    def _fail(self, fault: Fault) -> None:
        if fault.status:
            words = RefusedError(fault.status, "", fault.message).document()
            return self._send(fault.status, json.dumps(words).encode() if fault.body is None else fault.body)
        self.close_connection = True
        return None

    def _raw(self, data: bytes) -> bytes:
        for text, raw in self.server.kube.raw.items():
            data = data.replace(text, raw)
        return data

    def _send(self, status: int, data: bytes) -> None:
        data = self._raw(data)
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _watch(self, watch: _Watch) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for kind, found in watch.events():
            self._chunk(json.dumps({"type": kind, "object": found}).encode() + b"\n")
        if self.server.kube.broken_off:
            self.close_connection = True
        else:
            self._chunk(b"")

    def _chunk(self, data: bytes) -> None:
        data = self._raw(data)
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))


def _check_access(kube: KubeServer, request: Request) -> None:
    if kube.authenticate and not request.user:
        raise RefusedError(401, "Unauthorized", "Unauthorized")
    if request.plural in kube.unknown:
        raise UnservedError
    if not kube.authorize(request):
        what = f'{request.place.collection.title} "{request.name}" is forbidden'
        where = f'in the namespace "{request.namespace}"'
        words = f'User "{request.user}" cannot {request.verb} resource "{request.plural}" {where}'
        raise RefusedError(403, "Forbidden", f"{what}: {words}")


def _request(method: str, target: str, query: dict[str, str], user: str) -> Request:
    path = urlsplit(target).path
    parts = [unquote(part) for part in path.strip("/").split("/")]
    if parts[0] == "api" and len(parts) > 2:
        group, rest = "", parts[2:]
    elif parts[0] == "apis" and len(parts) > 3:
        group, rest = parts[1], parts[3:]
    else:
        return Request(method.lower(), user=user, path=path)
    namespace = ""
    if rest[0] == "namespaces" and len(rest) > 2 and rest[2] not in ("status", "finalize"):
        namespace, rest = rest[1], rest[2:]
    plural, name, subresource = (*rest, "", "")[:3]
    return Request(_verb(method, name, query), plural, subresource, namespace, name, user, group)


def _verb(method: str, name: str, query: dict[str, str]) -> str:
    if method == "GET":
        return "watch" if query.get("watch") in ("true", "1") else "get" if name else "list"
    return _VERBS.get(method) or ("delete" if name else "deletecollection")


def _only_metadata(document: Object) -> Object:
    partial = {"apiVersion": "meta.k8s.io/v1", "metadata": document["metadata"]}
    if "items" not in document:
        return {"kind": "PartialObjectMetadata", **partial}
    items = [_only_metadata(item) for item in document["items"]]
    return {"kind": "PartialObjectMetadataList", **partial, "items": items}


def _selector(request: Request, query: dict[str, str]) -> Selector:
    labels, fields = query.get("labelSelector", ""), query.get("fieldSelector", "")
    return Selector(request.place.collection, request.namespace, labels, fields)


def _change(request: Request, body: Any, media_type: str) -> Callable[[Object], Object]:
    if request.verb == "update":
        return lambda _: body
    match media_type:
        case "application/merge-patch+json":
            return lambda before: merged(before, body)
        case "application/json-patch+json":
            return lambda before: edited(before, body)
    raise RefusedError(415, "UnsupportedMediaType", f"the body of the request was in an unknown format - {media_type}")
