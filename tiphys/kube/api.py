"""A narrow door to the API server: a few verbs, JSON in and out, and our own errors.

Objects stay the dictionaries that they are on the wire. The typed models of the
client library cost a millisecond per pod, drop fields they do not know, and
have none for Argo's kinds.
"""

import json
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any, NamedTuple

from kubernetes.client import ApiClient, ApiException
from urllib3.exceptions import HTTPError

from tiphys.errors import ConflictError, ForbiddenError, NotFoundError, ObjectExistsError, StoreError, UsageError
from tiphys.kube.resources import Resource

Object = dict[str, Any]
"""A Kubernetes object as parsed from JSON."""

Body = Object | list[Object]
"""What is sent: an object, or the operations of a JSON patch."""

_TIMEOUT_SECONDS = (5.0, 25.0)
_PAGE = 500


class Patch(StrEnum):
    """How a patch is meant; the value is its media type."""

    MERGE = "application/merge-patch+json"
    JSON = "application/json-patch+json"


class Listing(NamedTuple):
    """A consistent list, and the version from which a watch goes on."""

    items: list[Object]
    resource_version: str


class ExpiredError(NotFoundError):
    """The API server has forgotten this resource version (410); list again."""


class KubeApi:
    """The verbs, each for one `Resource`. Thread-safe.

    Every method raises `StoreError` if the API server does not answer within 25
    seconds or is in trouble, and `ForbiddenError`, with its words, if it refuses.
    """

    def __init__(self, client: ApiClient, namespace: str) -> None:
        self._client = client
        self.namespace = namespace
        """Namespace of this pod, or of the context of the kubeconfig."""
        self.server = str(client.configuration.host)

    def get(self, resource: Resource, namespace: str | None, name: str) -> Object | None:
        """The object, or None if there is none."""
        try:
            return self._json("GET", resource.path(namespace, name))
        except NotFoundError:
            return None

    def list(
        self, resource: Resource, namespace: str | None = None, labels: str = "", fields: str = "", limit: int = _PAGE
    ) -> Listing:
        """All objects that match the selectors, read in pages of ``limit``.

        Raises:
            NotFoundError: the API server does not know this kind of object.
            ExpiredError: listing took longer than the server remembers.
        """
        items: list[Object] = []
        query = {"labelSelector": labels, "fieldSelector": fields, "limit": str(limit)}
        while True:
            page = self._json("GET", resource.path(namespace), query)
            items += page.get("items") or []
            metadata = page.get("metadata") or {}
            if not (token := metadata.get("continue")):
                return Listing(items, metadata.get("resourceVersion", ""))
            query["continue"] = token

    def create(self, resource: Resource, namespace: str | None, body: Object) -> Object:
        """Create an object, or ask for a review; the answer is what the server made of it.

        Raises:
            ObjectExistsError: one of this name exists.
            UsageError: the server finds it invalid.
        """
        typed = {"apiVersion": resource.api_version, "kind": resource.kind, **body}
        return self._json("POST", resource.path(namespace), body=typed)

    def replace(self, resource: Resource, namespace: str | None, body: Object, subresource: str = "") -> Object:
        """Write the object back; with ``metadata.resourceVersion`` only if nobody else has written since.

        Raises:
            ConflictError: somebody has.
            NotFoundError: it is gone.
        """
        return self._json("PUT", resource.path(namespace, body["metadata"]["name"], subresource), body=body)

    def patch(
        self,
        resource: Resource,
        namespace: str | None,
        name: str,
        body: Body,
        how: Patch = Patch.MERGE,
        subresource: str = "",
    ) -> Object:
        """Change fields of an object; like `replace` where ``body`` names a ``metadata.resourceVersion``."""
        return self._json("PATCH", resource.path(namespace, name, subresource), body=body, media_type=how)

    def delete(
        self, resource: Resource, namespace: str | None, name: str, uid: str = "", grace: int | None = None
    ) -> bool:
        """Delete an object; False if there is none. With ``uid``, only the one that is meant.

        Raises:
            ConflictError: the object of this name has another uid.
        """
        options: Object = {"preconditions": {"uid": uid}} if uid else {}
        if grace is not None:
            options["gracePeriodSeconds"] = grace
        try:
            self._json("DELETE", resource.path(namespace, name), body=options)
        except NotFoundError:
            return False
        return True

    def get_path(self, path: str) -> Object:
        """GET of a path that is no resource, such as ``/version``."""
        return self._json("GET", path)

    def watch(
        self,
        resource: Resource,
        namespace: str | None,
        resource_version: str,
        labels: str = "",
        fields: str = "",
        timeout_seconds: int = 300,
    ) -> Iterator[Object]:
        """The server's watch events after ``resource_version``, bookmarks included, until it ends the stream.

        Raises:
            ExpiredError: the version is too old.
        """
        query = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": resource_version,
            "timeoutSeconds": str(timeout_seconds),
            "labelSelector": labels,
            "fieldSelector": fields,
        }
        # Longer than the server waits between two bookmarks; a line that stays silent for longer is dead.
        response = self._send("GET", resource.path(namespace), query, timeout=(5.0, float(timeout_seconds) + 15.0))
        try:
            for line in _lines(response):
                event: Object = json.loads(line)
                if event.get("type") == "ERROR":
                    _refuse(
                        int((event.get("object") or {}).get("code") or 500), json.dumps(event["object"]), self.server
                    )
                yield event
        except (HTTPError, ValueError) as error:
            raise StoreError(f"the watch of {resource.plural} at {self.server} broke off: {error}") from error
        finally:
            response.close()

    def _json(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Body | None = None,
        media_type: str = "application/json",
    ) -> Object:
        response = self._send(method, path, query or {}, body, media_type)
        try:
            answer: Object = json.loads(response.read() or b"{}")
        except (HTTPError, ValueError) as error:
            raise StoreError(
                f"the API server {self.server} broke off its answer to {method} {path}: {error}"
            ) from error
        return answer

    def _send(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: Body | None = None,
        media_type: str = "application/json",
        timeout: tuple[float, float] = _TIMEOUT_SECONDS,
    ) -> Any:
        request = self._client.param_serialize(
            method,
            path,
            query_params=[(key, value) for key, value in query.items() if value],
            header_params={"Accept": "application/json", "Content-Type": media_type},
            body=body,
            auth_settings=["BearerToken"],
        )
        method, url, headers, sent, _ = request
        try:
            response = self._client.call_api(method, url, headers, sent, _request_timeout=timeout).response
            if response.status >= 300:
                _refuse(response.status, response.read().decode(errors="replace"), self.server)
        except (HTTPError, ApiException) as error:
            raise StoreError(f"the API server {self.server} did not answer {method} {path}: {error}") from error
        return response


def _lines(response: Any) -> Iterator[bytes]:
    rest = b""
    for piece in response.stream(64 << 10, decode_content=False):
        *whole, rest = (rest + piece).split(b"\n")
        yield from (line for line in whole if line.strip())


def _refuse(status: int, body: str, server: str) -> None:
    try:
        answer = json.loads(body)
        reason, message = str(answer.get("reason", "")), str(answer.get("message", body))
    except (ValueError, AttributeError):
        reason, message = "", body.strip()[:300]
    match status:
        case 404:
            raise NotFoundError(f"the API server {server} says: {message}")
        case 409 if reason == "AlreadyExists":
            raise ObjectExistsError(message)
        case 409:
            raise ConflictError(message)
        case 410:
            raise ExpiredError(message)
        case 400 | 413 | 415 | 422:
            raise UsageError(f"the API server {server} refused the object: {message}")
        case 401 | 403:
            raise ForbiddenError(f"the API server {server} refused: {message or 'no reason given'}")
    raise StoreError(f"the API server {server} answered {status}: {message}")
