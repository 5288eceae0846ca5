"""The list-and-watch loop that every client of the API server needs.

A watch can end at any time, and the server drops resource versions after some
minutes. If a version has expired, the loop lists again and yields a
`ListSnapshot`, which the caller compares with its state. Between two snapshots
no change is lost or repeated.
"""

from collections.abc import Callable, Iterator
from contextlib import closing
from enum import StrEnum
from typing import NamedTuple

from tiphys.errors import NotFoundError, StoreError
from tiphys.kube.api import ExpiredError, KubeApi, Object, ObjectTransform
from tiphys.kube.resources import Resource

_MIN_BACKOFF_SECONDS, _MAX_BACKOFF_SECONDS = 0.5, 30.0


class WatchEventType(StrEnum):
    ADDED = "ADDED"
    MODIFIED = "MODIFIED"
    DELETED = "DELETED"


class WatchEvent(NamedTuple):
    """One object was added, modified or deleted."""

    type: WatchEventType
    object: Object


class ListSnapshot(NamedTuple):
    """All existing objects; any other object was deleted."""

    objects: list[Object]


def watch_objects(
    api: KubeApi,
    resource: Resource,
    namespace: str | None,
    *,
    labels: str = "",
    fields: str = "",
    timeout_seconds: int = 300,
    transform: ObjectTransform = lambda kube_object: kube_object,
    sleep: Callable[[float], object],
    should_stop: Callable[[], bool] = lambda: False,
    on_error: Callable[[StoreError], object] = lambda _: None,
) -> Iterator[ListSnapshot | WatchEvent]:
    """Yield all objects, then their changes, until ``should_stop``.

    Args:
        api: The API server.
        resource: Kind of object.
        namespace: None for all namespaces.
        labels: Label selector.
        fields: Field selector.
        timeout_seconds: The server ends a watch after this time, and the next watch continues there.
        transform: Applied to each object of a list and of a change, see `KubeApi.list`. An object that it drops, or
            that cannot be read, counts as deleted.
        sleep: Waits before the next try while the server is unavailable.
        should_stop: Called after each event. A caller that must stop immediately runs the loop in a daemon thread,
            because a watch without events lasts ``timeout_seconds``.
        on_error: Called with each failure, for the log; also if the server does not serve this kind (yet).

    Raises:
        UsageError: a selector is not valid.
    """
    version, wait = "", _MIN_BACKOFF_SECONDS
    while not should_stop():
        try:
            if not version:
                listing = api.list(resource, namespace, labels, fields, transform=transform)
                version = listing.resource_version
                yield ListSnapshot(listing.items)
                if should_stop():
                    return
            is_empty = True
            # Closed explicitly: a stored exception would otherwise keep the connection open through its traceback.
            with closing(api.watch(resource, namespace, version, labels, fields, timeout_seconds)) as events:
                wait = _MIN_BACKOFF_SECONDS
                for event in events:
                    is_empty = False
                    version = event["object"]["metadata"]["resourceVersion"]
                    if event["type"] != "BOOKMARK":
                        yield _read_change(api, event, transform)
                    if should_stop():
                        return
            if is_empty:  # a server that ends watches immediately must not be called in a tight loop
                sleep(wait)
        except ExpiredError:
            version = ""
            sleep(wait)
        except (StoreError, NotFoundError) as error:
            on_error(StoreError(str(error)) if isinstance(error, NotFoundError) else error)
            sleep(wait)
            wait = min(wait * 2, _MAX_BACKOFF_SECONDS)


def _read_change(api: KubeApi, event: Object, transform: ObjectTransform) -> WatchEvent:
    change = WatchEvent(WatchEventType(event["type"]), event["object"])
    if change.type is WatchEventType.DELETED:
        return change
    kept = api.read_object(change.object, transform)
    return WatchEvent(WatchEventType.DELETED, change.object) if kept is None else change._replace(object=kept)
