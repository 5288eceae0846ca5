"""Count what the agent and the core ask of the API server: it is shared by the whole cluster."""

from collections.abc import Callable, Generator

from tiphys.kube import KubeApi, Listing, Object, Patch, Resource
from tiphys.kube.api import Body, Keep


class CountedApi(KubeApi):
    """The API server of ``api``; ``count`` is told verb and plural of each request."""

    def __init__(self, api: KubeApi, count: Callable[[str, str], object]) -> None:
        self._transport = api._transport
        self.namespace, self.server = api.namespace, api.server
        self._count = count

    def get(self, resource: Resource, namespace: str | None, name: str) -> Object | None:
        self._count("get", resource.plural)
        return super().get(resource, namespace, name)

    def list(
        self,
        resource: Resource,
        namespace: str | None = None,
        labels: str = "",
        fields: str = "",
        limit: int = 500,
        keep: Keep = lambda found: found,
    ) -> Listing:
        self._count("list", resource.plural)
        return super().list(resource, namespace, labels, fields, limit, keep)

    def create(self, resource: Resource, namespace: str | None, body: Object) -> Object:
        self._count("create", resource.plural)
        return super().create(resource, namespace, body)

    def replace(self, resource: Resource, namespace: str | None, body: Object, subresource: str = "") -> Object:
        self._count("update", resource.plural)
        return super().replace(resource, namespace, body, subresource)

    def patch(
        self,
        resource: Resource,
        namespace: str | None,
        name: str,
        body: Body,
        how: Patch = Patch.MERGE,
        subresource: str = "",
    ) -> Object:
        self._count("patch", resource.plural)
        return super().patch(resource, namespace, name, body, how, subresource)

    def watch(
        self,
        resource: Resource,
        namespace: str | None,
        resource_version: str,
        labels: str = "",
        fields: str = "",
        timeout_seconds: int = 300,
    ) -> Generator[Object, None, None]:
        self._count("watch", resource.plural)
        return super().watch(resource, namespace, resource_version, labels, fields, timeout_seconds)
