"""List, then watch, for ever: the loop that every client of the API server needs and that is easy to get wrong.

A watch ends whenever the server likes, and versions are forgotten after some
minutes. So every loss of the thread is answered by a new list, which the caller
sees as `Synced` and compares with what it knows; between two lists nothing is
missed and nothing is seen twice.
"""

from collections.abc import Callable, Iterator
from contextlib import closing
from enum import StrEnum
from typing import NamedTuple

from tiphys.errors import NotFoundError, StoreError
from tiphys.kube.api import ExpiredError, Keep, KubeApi, Object
from tiphys.kube.resources import Resource

_SHORTEST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.5, 30.0


class ChangeType(StrEnum):
    ADDED = "ADDED"
    MODIFIED = "MODIFIED"
    DELETED = "DELETED"


class Change(NamedTuple):
    """One object was added, modified or deleted."""

    type: ChangeType
    object: Object


class Synced(NamedTuple):
    """All objects there are; whatever is not among them is gone."""

    objects: list[Object]


def changes(
    api: KubeApi,
    resource: Resource,
    namespace: str | None,
    *,
    labels: str = "",
    fields: str = "",
    timeout_seconds: int = 300,
    keep: Keep = lambda found: found,
    pause: Callable[[float], object],
    stopped: Callable[[], bool] = lambda: False,
    lost: Callable[[StoreError], object] = lambda _: None,
) -> Iterator[Synced | Change]:
    """What there is, then what changes, until ``stopped``.

    Args:
        api: The API server.
        resource: Kind of object.
        namespace: None for all namespaces.
        labels: Label selector.
        fields: Field selector.
        timeout_seconds: After this time the server ends a watch, and the next one goes on where it ended.
        keep: What is kept of each object of a list, see `KubeApi.list`; changes are told whole.
        pause: Waits before the next try while the server is out of reach.
        stopped: Asked after each event. One that must stop at once runs this in a daemon thread: a watch of a
            quiet kind waits for ``timeout_seconds``.
        lost: Told of each failure, for the log; also of a kind that the server does not know, or not yet.

    Raises:
        UsageError: a selector is wrong.
    """
    version, wait = "", _SHORTEST_PAUSE_SECONDS
    while not stopped():
        try:
            if not version:
                listing = api.list(resource, namespace, labels, fields, keep=keep)
                version = listing.resource_version
                yield Synced(listing.items)
                if stopped():
                    return
            silent = True
            # Closed at once, however this ends: an error that somebody keeps would keep its connection open, too.
            with closing(api.watch(resource, namespace, version, labels, fields, timeout_seconds)) as events:
                wait = _SHORTEST_PAUSE_SECONDS
                for event in events:
                    silent = False
                    version = event["object"]["metadata"]["resourceVersion"]
                    if event["type"] != "BOOKMARK":
                        yield Change(ChangeType(event["type"]), event["object"])
                    if stopped():
                        return
            if silent:  # whoever ends watches at once must not be asked again at once
                pause(wait)
        except ExpiredError:
            version = ""
            pause(wait)
        except (StoreError, NotFoundError) as error:
            lost(StoreError(str(error)) if isinstance(error, NotFoundError) else error)
            pause(wait)
            wait = min(wait * 2, _LONGEST_PAUSE_SECONDS)
