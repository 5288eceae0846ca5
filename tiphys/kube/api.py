"""A narrow door to the API server: a few verbs, each for one kind of object.

Objects stay the dictionaries that they are on the wire. Typed models cost a
millisecond per pod, drop fields they do not know, and there are none for Argo's
kinds.
"""

from collections.abc import Callable, Generator
from enum import StrEnum
from typing import Literal, NamedTuple

from urllib3 import PoolManager

from tiphys.errors import NotFoundError
from tiphys.kube.resources import Resource
from tiphys.kube.transport import Body, ExpiredError, Object, Transport

__all__ = ["Body", "ExpiredError", "Keep", "KubeApi", "Listing", "Object", "Patch"]

_PAGE = 500
_SILENCE_SECONDS = 90.0
"""A server sends a bookmark each minute; a watch that says nothing for longer has lost its line."""


Keep = Callable[[Object], Object | None]
"""What is kept of an object."""


def _whole(found: Object) -> Object | None:
    return found


class Patch(StrEnum):
    """How a patch is meant; the value is its media type."""

    MERGE = "application/merge-patch+json"
    JSON = "application/json-patch+json"


class Listing(NamedTuple):
    """A consistent list, and the version from which a watch goes on."""

    items: list[Object]
    resource_version: str


class KubeApi:
    """The verbs, each for one `Resource`. Thread-safe.

    Every method raises `StoreError` if the API server does not answer within
    half a minute or is in trouble, `ForbiddenError`, with its words, if it
    refuses, and `UsageError` if it finds the request wrong. A write that ended
    in `StoreError` may have happened.

    Args:
        server: URL of the API server.
        pool: Connections to it.
        namespace: Namespace of this pod, or of the context of the kubeconfig.
        authorization: Value of the header ``Authorization`` for the next request; empty for none.
    """

    def __init__(
        self, server: str, pool: PoolManager, namespace: str, authorization: Callable[[], str] = lambda: ""
    ) -> None:
        self._transport = Transport(server, pool, authorization)
        self.namespace = namespace
        self.authorization = authorization
        self.server = self._transport.server

    def get(self, resource: Resource, namespace: str | None, name: str) -> Object | None:
        """The object, or None if there is none."""
        try:
            return self._transport.json("GET", resource.path_of(namespace, name))
        except NotFoundError:
            return None

    def list(
        self,
        resource: Resource,
        namespace: str | None = None,
        labels: str = "",
        fields: str = "",
        limit: int = _PAGE,
        keep: Keep = _whole,
    ) -> Listing:
        """All objects that match the selectors, read in pages of ``limit``; whole if pages expire meanwhile.

        ``keep`` says what is kept of each object, as soon as its page is read; None: nothing. All pods of a large
        cluster, for one, would take more memory than a service has.

        Raises:
            NotFoundError: the API server does not know this kind of object.
        """
        try:
            return self._list(resource, namespace, labels, fields, limit, keep)
        except ExpiredError:
            return self._list(resource, namespace, labels, fields, 0, keep)

    def create(self, resource: Resource, namespace: str | None, body: Object) -> Object:
        """Create an object, or ask for a review; the answer is what the server made of it.

        Raises:
            ObjectExistsError: one of this name exists.
            NotFoundError: the namespace does not exist, or the API server does not know this kind of object.
        """
        return self._transport.json("POST", resource.path(namespace), body=_typed(resource, body))

    def replace(self, resource: Resource, namespace: str | None, body: Object, subresource: str = "") -> Object:
        """Write the object back; with ``metadata.resourceVersion`` only if nobody else has written since.

        Raises:
            ConflictError: somebody has.
            NotFoundError: it is gone.
        """
        path = resource.path_of(namespace, body["metadata"]["name"], subresource)
        return self._transport.json("PUT", path, body=_typed(resource, body))

    def patch(
        self,
        resource: Resource,
        namespace: str | None,
        name: str,
        body: Body,
        how: Patch = Patch.MERGE,
        subresource: str = "",
    ) -> Object:
        """Change fields of an object; like `replace` where it names a ``metadata.resourceVersion``, or a ``uid``."""
        path = resource.path_of(namespace, name, subresource)
        return self._transport.json("PATCH", path, body=body, media_type=how.value)

    def delete(
        self,
        resource: Resource,
        namespace: str | None,
        name: str,
        uid: str = "",
        grace: int | None = None,
        propagation: Literal["Background", "Foreground", "Orphan"] | None = None,
    ) -> bool:
        """Delete an object; False if there is none. With ``uid``, only the one that is meant.

        ``propagation`` says what becomes of what it owns; None: what the kind has by itself, which for a Job leaves
        its pods running.

        Raises:
            ConflictError: the object of this name has another uid.
        """
        options: Object = {"preconditions": {"uid": uid}} if uid else {}
        if grace is not None:
            options["gracePeriodSeconds"] = grace
        if propagation is not None:
            options["propagationPolicy"] = propagation
        try:
            self._transport.json("DELETE", resource.path_of(namespace, name), body=options)
        except NotFoundError:
            return False
        return True

    def get_path(self, path: str) -> Object:
        """GET of a path that is no resource, such as ``/version``."""
        return self._transport.json("GET", path)

    def get_text(self, path: str) -> tuple[int, str]:
        """Status and body of a path, such as a pod's behind ``…/proxy/``; no status is an error."""
        return self._transport.text(path)

    def watch(
        self,
        resource: Resource,
        namespace: str | None,
        resource_version: str,
        labels: str = "",
        fields: str = "",
        timeout_seconds: int = 300,
    ) -> Generator[Object, None, None]:
        """The server's watch events after ``resource_version``, bookmarks included, until it ends the stream.

        Raises:
            ExpiredError: the version is too old; here, or from the iterator.
        """
        query = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": resource_version,
            "timeoutSeconds": str(timeout_seconds),
            "labelSelector": labels,
            "fieldSelector": fields,
        }
        return self._transport.events(resource.path(namespace), query, _SILENCE_SECONDS)

    def close(self) -> None:
        """Close the connections that are not in use; the next request opens new ones."""
        self._transport.close()

    def _list(
        self, resource: Resource, namespace: str | None, labels: str, fields: str, limit: int, keep: Keep
    ) -> Listing:
        items: list[Object] = []
        query = {"labelSelector": labels, "fieldSelector": fields, "limit": str(limit) if limit else ""}
        while True:
            page = self._transport.json("GET", resource.path(namespace), query)
            kept = (keep(_typed(resource, item)) for item in page.get("items") or [])
            items += [one for one in kept if one is not None]
            metadata = page.get("metadata") or {}
            if not (token := metadata.get("continue")):
                return Listing(items, metadata.get("resourceVersion", ""))
            query["continue"] = token


def _typed(resource: Resource, body: Object) -> Object:
    """The object with its kind, which a list of the server's own kinds leaves out."""
    return {"apiVersion": resource.api_version, "kind": resource.kind, **body}
