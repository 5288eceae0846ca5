"""Client for the API server: the verbs of Kubernetes, each for one `Resource`.

Objects are plain dictionaries, as parsed from JSON. Typed models cost a
millisecond per pod, drop unknown fields, and do not exist for Argo's kinds.
"""

from collections.abc import Callable, Generator, Iterator, Mapping
from enum import StrEnum
from typing import Literal, NamedTuple

from urllib3 import PoolManager

from tiphys.errors import NotFoundError, UsageError
from tiphys.kube.resources import Resource
from tiphys.kube.transport import TOO_DEEP, Body, ExpiredError, Object, Transport
from tiphys.kube.unreadable import UnreadableObjects
from tiphys.protocol.json_documents import CUT

__all__ = ["Body", "ExpiredError", "KubeApi", "Object", "ObjectList", "ObjectTransform", "PatchType"]

_PAGE_OBJECTS = 500
METADATA_ONLY = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
"""Form of an object without spec, status and data (Kubernetes API concepts, "Metadata-only fetches")."""
_METADATA_LIST = METADATA_ONLY.replace("PartialObjectMetadata", "PartialObjectMetadataList")
_SILENCE_SECONDS = 90.0
"""The server sends a bookmark each minute. A watch without any event for this long has lost its connection."""


ObjectTransform = Callable[[Object], Object | None]
"""Reduces an object to the needed fields; None drops the object."""


def _keep_whole_object(kube_object: Object) -> Object | None:
    return kube_object


class PatchType(StrEnum):
    """Format of a patch; the value is its media type."""

    MERGE = "application/merge-patch+json"
    JSON = "application/json-patch+json"


class ObjectList(NamedTuple):
    """A consistent list, and the resource version from which a watch continues."""

    items: list[Object]
    resource_version: str


class KubeApi:
    """Client for one API server. Thread-safe.

    Every method raises `StoreError` if the API server does not answer within
    half a minute or reports an internal error, `ForbiddenError` if it denies
    access, and `UsageError` if the request is invalid. A write that failed with
    `StoreError` may have happened.

    Args:
        namespace: Namespace of this pod, or of the context of the kubeconfig.
        authorization: Returns the header ``Authorization`` of the next request; empty for none.
    """

    def __init__(
        self, server: str, pool: PoolManager, namespace: str, authorization: Callable[[], str] = lambda: ""
    ) -> None:
        self._transport = Transport(server, pool, authorization)
        self.namespace = namespace
        self.authorization = authorization
        self.server = self._transport.server
        self.unreadable = UnreadableObjects()

    def get(self, resource: Resource, namespace: str | None, name: str) -> Object | None:
        """Get an object; None if it does not exist."""
        try:
            return self._transport.request_json("GET", resource.object_path(namespace, name))
        except NotFoundError:
            return None

    def exists(self, resource: Resource, namespace: str | None, name: str) -> bool:
        """Whether an object exists. The server sends its metadata alone, so nothing of a Secret's content."""
        try:
            self._transport.request_json("GET", resource.object_path(namespace, name), accept=METADATA_ONLY)
        except NotFoundError:
            return False
        return True

    def list(
        self,
        resource: Resource,
        namespace: str | None = None,
        labels: str = "",
        fields: str = "",
        limit: int = _PAGE_OBJECTS,
        transform: ObjectTransform = _keep_whole_object,
        *,
        metadata_only: bool = False,
    ) -> ObjectList:
        """List the objects that match the selectors.

        Pages have ``limit`` objects; if a page token expires, all are read in one page. ``transform`` is applied to
        each object when its page is read, because all pods of a large cluster may not fit into memory. An object for
        which it fails is left out, see `read_object`. With ``metadata_only`` the server sends no more of each than its
        metadata.

        Raises:
            NotFoundError: the API server does not serve this kind of object.
        """
        path, accept = resource.collection_path(namespace), _METADATA_LIST if metadata_only else "application/json"
        query = {"labelSelector": labels, "fieldSelector": fields}
        try:
            return self._list(resource, path, {**query, "limit": str(limit)}, transform, accept)
        except ExpiredError:
            return self._list(resource, path, query, transform, accept)

    def create(self, resource: Resource, namespace: str | None, body: Object) -> Object:
        """Create an object or a review; return the object in the server's reply.

        Raises:
            ObjectExistsError: an object with this name exists.
            NotFoundError: the namespace does not exist, or the API server does not serve this kind of object.
        """
        return self._transport.request_json(
            "POST", resource.collection_path(namespace), body=_with_type_meta(resource, body)
        )

    def replace(self, resource: Resource, namespace: str | None, body: Object, subresource: str = "") -> Object:
        """Replace an object. With ``metadata.resourceVersion`` the write fails if the object was changed since.

        Raises:
            ConflictError: the object was changed.
            NotFoundError: the object does not exist.
        """
        path = resource.object_path(namespace, body["metadata"]["name"], subresource)
        return self._transport.request_json("PUT", path, body=_with_type_meta(resource, body))

    def patch(
        self,
        resource: Resource,
        namespace: str | None,
        name: str,
        body: Body,
        patch_type: PatchType = PatchType.MERGE,
        subresource: str = "",
    ) -> Object:
        """Change fields of an object.

        Raises:
            ConflictError: the patch names a ``metadata.resourceVersion`` or ``uid`` that the object does not have.
            NotFoundError: the object does not exist.
        """
        path = resource.object_path(namespace, name, subresource)
        return self._transport.request_json("PATCH", path, body=body, media_type=patch_type.value)

    def delete(
        self,
        resource: Resource,
        namespace: str | None,
        name: str,
        uid: str = "",
        resource_version: str = "",
        grace_seconds: int | None = None,
        propagation: Literal["Background", "Foreground", "Orphan"] | None = None,
    ) -> bool:
        """Delete an object; False if it does not exist.

        ``uid`` and ``resource_version``, unless empty, must be those of the object. Without ``propagation`` the default
        of the kind decides about the objects that it owns, which leaves the pods of a Job running.

        Raises:
            ConflictError: the object has another uid or resource version.
        """
        conditions = {"uid": uid, "resourceVersion": resource_version}
        preconditions = {name: value for name, value in conditions.items() if value}
        options: Object = {"preconditions": preconditions} if preconditions else {}
        if grace_seconds is not None:
            options["gracePeriodSeconds"] = grace_seconds
        if propagation is not None:
            options["propagationPolicy"] = propagation
        try:
            self._transport.request_json("DELETE", resource.object_path(namespace, name), body=options)
        except NotFoundError:
            return False
        return True

    def get_path(self, path: str) -> Object:
        """GET a path that is no resource, such as ``/version``, and return its JSON."""
        return self._transport.request_json("GET", path)

    def get_text(self, path: str) -> tuple[int, str]:
        """GET a path, such as that of a pod behind ``…/proxy/``; return status and body. No status raises an error."""
        return self._transport.get_text(path)

    def read_lines(self, path: str, query: Mapping[str, str]) -> Iterator[str]:
        """GET a path that answers with text, such as the log of a pod; yield its lines, as they come.

        Raises:
            NotFoundError: the path does not exist.
        """
        return self._transport.stream_lines(path, query)

    def watch(
        self,
        resource: Resource,
        namespace: str | None,
        resource_version: str,
        labels: str = "",
        fields: str = "",
        timeout_seconds: int = 300,
    ) -> Generator[Object, None, None]:
        """Watch events after ``resource_version``, bookmarks included, until the server ends the stream.

        Raises:
            ExpiredError: the version is too old. Raised by this call or by the iterator.
        """
        query = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": resource_version,
            "timeoutSeconds": str(timeout_seconds),
            "labelSelector": labels,
            "fieldSelector": fields,
        }
        return self._transport.watch_events(resource.collection_path(namespace), query, _SILENCE_SECONDS)

    def read_object(self, kube_object: Object, transform: ObjectTransform) -> Object | None:
        """The result of ``transform``; None, with a word about the object, if that fails or it is incomplete."""
        try:
            if CUT in kube_object:
                raise UsageError(f"it {TOO_DEEP}")
            return transform(kube_object)
        except Exception as error:  # noqa: BLE001  a tenant may write any content, which must not end the list of all
            self.unreadable.record(kube_object, error)
            return None

    def close(self) -> None:
        """Close idle connections; the next request opens a new one."""
        self._transport.close()

    def _list(
        self, resource: Resource, path: str, query: dict[str, str], transform: ObjectTransform, accept: str
    ) -> ObjectList:
        items: list[Object] = []
        while True:
            page = self._transport.request_json("GET", path, query, accept=accept)
            kept = (self.read_object(_with_type_meta(resource, item), transform) for item in page.get("items") or [])
            items += [item for item in kept if item is not None]
            metadata = page.get("metadata") or {}
            if not (token := metadata.get("continue")):
                return ObjectList(items, metadata.get("resourceVersion", ""))
            query["continue"] = token


def _with_type_meta(resource: Resource, body: Object) -> Object:
    """The object with its kind and API version, which the server leaves out in lists of built-in kinds."""
    return {"apiVersion": resource.api_version, "kind": resource.kind, **body}
