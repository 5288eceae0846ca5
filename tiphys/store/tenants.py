"""Which store a namespace keeps its runs in. The URL is one for all; ``{namespace}`` in it keeps them apart."""

import threading

from tiphys.errors import NotFoundError, UsageError
from tiphys.store.base import Store
from tiphys.store.opening import open_store

PLACEHOLDER = "{namespace}"


class TenantStores:
    """Opens the store of a namespace when it is first asked for. Thread-safe.

    Args:
        url: URL of the store; must hold ``{namespace}`` where more than one is served.
        namespaces: Those that are served; None for all of the cluster.

    Raises:
        UsageError: two namespaces would share a store, or the URL holds another placeholder.
    """

    def __init__(self, url: str, namespaces: tuple[str, ...] | None) -> None:
        several = namespaces is None or len(namespaces) > 1
        if several and PLACEHOLDER not in url:
            raise UsageError(
                f"more than one namespace would keep its runs in {url}, where each could read and fence the runs of "
                f"the others; put {PLACEHOLDER} into the URL, such as {url.rstrip('/')}/{PLACEHOLDER}"
            )
        if "{" in url.replace(PLACEHOLDER, ""):
            raise UsageError(f"{url} holds a placeholder other than {PLACEHOLDER}, which is the only one there is")
        if namespaces is not None and not namespaces:
            raise UsageError("no namespace is served; name at least one with --namespace, or give --all-namespaces")
        self._url = url
        self.namespaces = namespaces
        self._open: dict[str, Store] = {}
        self._lock = threading.Lock()

    def serves(self, namespace: str) -> bool:
        return self.namespaces is None or namespace in self.namespaces

    def url(self, namespace: str) -> str:
        return self._url.replace(PLACEHOLDER, namespace)

    def store(self, namespace: str) -> Store:
        """The store of a namespace.

        Raises:
            NotFoundError: the namespace is not served.
            UsageError: no store can have its URL.
            StoreError: it cannot be opened now.
        """
        if not self.serves(namespace):
            raise NotFoundError(
                f"namespace {namespace} is not served by this installation of Tiphys; "
                "have the administrator add it to its namespaces"
            )
        with self._lock:
            if namespace not in self._open:
                self._open[namespace] = open_store(self.url(namespace))
            return self._open[namespace]
