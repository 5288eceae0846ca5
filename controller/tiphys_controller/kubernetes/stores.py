"""Which store a namespace keeps its runs in. The URL is one for all; ``{namespace}`` in it keeps them apart."""

import threading

from tiphys.errors import UsageError
from tiphys.store import Store, open_store

PLACEHOLDER = "{namespace}"


class NamespaceStores:
    """Opens the store of a namespace when it is first asked for. Thread-safe.

    Args:
        url: URL of the store; must hold ``{namespace}`` where more than one is watched.
        namespaces: Those that are watched; None for all of the cluster.

    Raises:
        UsageError: two namespaces would share a store.
    """

    def __init__(self, url: str, namespaces: tuple[str, ...] | None) -> None:
        if (namespaces is None or len(namespaces) > 1) and PLACEHOLDER not in url:
            raise UsageError(
                f"more than one namespace would keep its runs in {url}; put {PLACEHOLDER} into the URL, such as "
                f"{url.rstrip('/')}/{PLACEHOLDER}"
            )
        self._url = url
        self._open: dict[str, Store] = {}
        self._lock = threading.Lock()

    def __call__(self, namespace: str) -> Store:
        """The store of a namespace.

        Raises:
            UsageError: no store can have its URL.
            StoreError: it cannot be opened now.
        """
        with self._lock:
            if namespace not in self._open:
                self._open[namespace] = open_store(self._url.replace(PLACEHOLDER, namespace))
            return self._open[namespace]
