"""What a Kubernetes API server keeps: objects of any kind, one counter of versions, a history for watches.

It knows no kinds. What differs between kinds in a real server is said by
`Collection.custom` (objects of a CustomResourceDefinition are held more
strictly) and by the names of those that have a status of their own.
"""

import itertools
import re
import threading
import uuid
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple

Object = dict[str, Any]

_OWNED = ("uid", "name", "namespace", "creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds")
"""Metadata that a write cannot change."""


class RefusedError(Exception):
    """The server's answer to what it does not do: HTTP status, reason and message of a Status object."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.message = message

    def document(self) -> Object:
        words = {"status": "Failure", "message": self.message, "reason": self.reason, "code": self.status}
        return {"kind": "Status", "apiVersion": "v1", "metadata": {}, **words}


class Collection(NamedTuple):
    group: str
    plural: str

    @property
    def custom(self) -> bool:
        """Whether a CustomResourceDefinition makes this kind; the server's own groups end so, or have no dot."""
        return "." in self.group and not self.group.endswith(".k8s.io")

    @property
    def title(self) -> str:
        return f"{self.plural}.{self.group}" if self.group else self.plural


class Place(NamedTuple):
    """Where an object lives; ``namespace`` is empty for what belongs to none."""

    collection: Collection
    namespace: str
    name: str


class Event(NamedTuple):
    version: int
    collection: Collection
    before: Object | None
    after: Object | None
    """None: it was deleted, and ``before`` is its last state."""


class Selector(NamedTuple):
    """Which objects of a collection are meant."""

    collection: Collection
    namespace: str = ""
    labels: str = ""
    fields: str = ""

    def matches(self, found: Object | None) -> bool:
        if found is None:
            return False
        metadata = found["metadata"]
        inside = not self.namespace or metadata.get("namespace") == self.namespace
        return inside and _labelled(metadata.get("labels") or {}, self.labels) and self._fields_match(found)

    def seen(self, event: Event) -> tuple[str, Object] | None:
        """The event as a watch of these objects sees it, to which what stops matching is deleted."""
        if event.collection != self.collection:
            return None
        was, is_now = self.matches(event.before), self.matches(event.after)
        if is_now and event.after is not None:
            return ("MODIFIED" if was else "ADDED"), event.after
        if was and event.before is not None:
            last = event.after or event.before
            return "DELETED", {**last, "metadata": {**last["metadata"], "resourceVersion": str(event.version)}}
        return None

    def _fields_match(self, found: Object) -> bool:
        for term in filter(None, self.fields.split(",")):
            path, unequal, wanted = _parted(term)
            if self.collection.custom and path not in ("metadata.name", "metadata.namespace"):
                raise RefusedError(400, "BadRequest", f"field label not supported: {path}")
            if (str(_dig(found, path.split("."))) == wanted) == unequal:
                return False
        return True


class ObjectStore:
    """Objects are never changed in place, so whoever reads one keeps what it has read."""

    def __init__(self, with_status: set[str]) -> None:
        self.changed = threading.Condition(threading.RLock())
        """Held by every method; told of every new version."""
        self.with_status = with_status
        self.version = 1000
        self._objects: dict[Place, Object] = {}
        self._history: list[Event] = []
        self._compacted = 0
        self._pages: dict[str, tuple[list[Object], int]] = {}
        self._numbers = itertools.count(1)

    def places(self) -> list[Place]:
        with self.changed:
            return list(self._objects)

    def get(self, place: Place) -> Object:
        with self.changed:
            if (found := self._objects.get(place)) is None:
                raise RefusedError(404, "NotFound", f'{place.collection.title} "{place.name}" not found')
            return found

    def select(self, selector: Selector) -> list[Object]:
        with self.changed:
            places = sorted(place for place in self._objects if place.collection == selector.collection)
            return [found for place in places if selector.matches(found := self._objects[place])]

    def page(self, selector: Selector, limit: int, token: str) -> tuple[list[Object], int, str]:
        """Some objects of one moment, its version, and the token for the rest."""
        with self.changed:
            if token and token not in self._pages:
                raise RefusedError(
                    410, "Expired", "The provided continue parameter is too old to display a consistent list"
                )
            items, version = self._pages[token] if token else (self.select(selector), self.version)
            if not limit or len(items) <= limit:
                return items, version, ""
            following = f"page-{next(self._numbers)}"
            self._pages[following] = (items[limit:], version)
            return items[:limit], version, following

    def create(self, collection: Collection, namespace: str, body: Object) -> Object:
        with self.changed:
            metadata = dict(body.get("metadata") or {})
            name = metadata.get("name") or self._generated(metadata.get("generateName"))
            if metadata.get("namespace", namespace) != namespace:
                raise RefusedError(400, "BadRequest", "the namespace of the object does not match the request")
            if metadata.get("resourceVersion"):
                raise RefusedError(400, "BadRequest", "resourceVersion should not be set on objects to be created")
            place = Place(collection, namespace, name)
            if place in self._objects:
                raise RefusedError(409, "AlreadyExists", f'{collection.title} "{name}" already exists')
            made = {"name": name, "uid": str(uuid.uuid4()), "creationTimestamp": _now()}
            owned = {**made, "namespace": namespace} if namespace else made
            stored = {**body, "metadata": {**metadata, **owned}}
            if collection.plural in self.with_status:
                stored.pop("status", None)
                stored["metadata"]["generation"] = 1
            return self._put(place, None, stored)

    def write(self, place: Place, subresource: str, make: Callable[[Object], Object]) -> Object:
        """Store what ``make`` makes of the object; what a write may not touch stays as it is."""
        with self.changed:
            before = self.get(place)
            sent = make(before)
            _check_preconditions(place, before, sent.get("metadata") or {})
            after = self._allowed(place, before, sent, subresource)
            if after == before:
                return before
            if "deletionTimestamp" in after["metadata"] and not after["metadata"].get("finalizers"):
                return self._remove(place, after)
            return self._put(place, before, after)

    def delete(self, place: Place, preconditions: Mapping[str, str]) -> tuple[Object, bool]:
        """Delete it, or mark it as long as somebody's finalizer keeps it; the object, and whether it is gone."""
        with self.changed:
            before = self.get(place)
            for name, wanted in preconditions.items():
                if before["metadata"].get(name) != wanted:
                    found = before["metadata"].get(name)
                    words = f"Precondition failed: {name} in precondition: {wanted}, in object meta: {found}"
                    raise RefusedError(409, "Conflict", words)
            if not before["metadata"].get("finalizers"):
                return self._remove(place, before), True
            if "deletionTimestamp" in before["metadata"]:
                return before, False
            marks = {"deletionTimestamp": _now(), "deletionGracePeriodSeconds": 0}
            return self._put(place, before, {**before, "metadata": {**before["metadata"], **marks}}), False

    def since(self, version: int) -> list[Event]:
        with self.changed:
            if version < self._compacted:
                raise RefusedError(410, "Expired", f"too old resource version: {version} ({self._compacted})")
            return [event for event in self._history if event.version > version]

    def compact(self) -> None:
        """Forget every version before the present one."""
        with self.changed:
            self._compacted = self.version
            self._history.clear()
            self._pages.clear()

    def _allowed(self, place: Place, before: Object, sent: Object, subresource: str) -> Object:
        if subresource == "status":
            return {**before, "status": sent["status"]} if "status" in sent else before
        kept = {key: before["metadata"][key] for key in _OWNED if key in before["metadata"]}
        metadata = {key: value for key, value in (sent.get("metadata") or {}).items() if key not in _OWNED}
        version = before["metadata"]["resourceVersion"]
        after = {**sent, "metadata": {**metadata, **kept, "resourceVersion": version}}
        if place.collection.plural in self.with_status:
            after.pop("status", None)
            after |= {"status": before["status"]} if "status" in before else {}
            rest = [{**one, "metadata": None, "status": None} for one in (before, after)]
            after["metadata"]["generation"] = before["metadata"]["generation"] + (rest[0] != rest[1])
        return after

    def _put(self, place: Place, before: Object | None, after: Object) -> Object:
        after = {**after, "metadata": {**after["metadata"], "resourceVersion": str(self.version + 1)}}
        self._objects[place] = after
        self._happened(place.collection, before, after)
        return after

    def _remove(self, place: Place, last: Object) -> Object:
        before = self._objects.pop(place)
        self._happened(place.collection, {**before, **last}, None)
        return last

    def _happened(self, collection: Collection, before: Object | None, after: Object | None) -> None:
        self.version += 1
        self._history.append(Event(self.version, collection, before, after))
        self.changed.notify_all()

    def _generated(self, prefix: str | None) -> str:
        if not prefix:
            raise RefusedError(422, "Invalid", "metadata.name: Required value: name or generateName is required")
        return f"{prefix}{next(self._numbers):05x}"


def _check_preconditions(place: Place, before: Object, sent: Object) -> None:
    version = before["metadata"]["resourceVersion"]
    if sent.get("resourceVersion") not in (None, "", version):
        words = "the object has been modified; please apply your changes to the latest version and try again"
        raise RefusedError(
            409, "Conflict", f'Operation cannot be fulfilled on {place.collection.title} "{place.name}": {words}'
        )
    if not sent.get("resourceVersion") and place.collection.custom:
        raise RefusedError(422, "Invalid", "metadata.resourceVersion: Invalid value: must be specified for an update")
    if sent.get("uid") not in (None, "", before["metadata"]["uid"]) and place.collection.custom:
        raise RefusedError(422, "Invalid", f'metadata.uid: Invalid value: "{sent["uid"]}": field is immutable')
    if sent.get("uid") not in (None, "", before["metadata"]["uid"]):
        raise RefusedError(409, "Conflict", "Precondition failed: UID in precondition differs from UID in object meta")
    if sent.get("name", place.name) != place.name:
        raise RefusedError(400, "BadRequest", "the name of the object does not match the name on the URL")


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _dig(found: Any, path: list[str]) -> Any:
    for key in path:
        found = found.get(key, "") if isinstance(found, dict) else ""
    return found


def _parted(term: str) -> tuple[str, bool, str]:
    """Path, whether it must differ, and the value, of ``path=value`` or ``path!=value``."""
    path, operator, value = re.split(r"(!=|==|=)", term, maxsplit=1)
    return path.strip(), operator == "!=", value.strip()


def _labelled(labels: Mapping[str, str], selector: str) -> bool:
    """Kubernetes, ``Labels and Selectors``: equality and sets, joined by commas."""
    return all(_term_matches(labels, term.strip()) for term in re.split(r",(?![^(]*\))", selector) if term.strip())


def _term_matches(labels: Mapping[str, str], term: str) -> bool:
    if listed := re.fullmatch(r"(\S+)\s+(in|notin)\s+\((.*)\)", term):
        key, operator, values = listed.groups()
        return (labels.get(key) in [value.strip() for value in values.split(",")]) == (operator == "in")
    if "=" in term:
        key, unequal, value = _parted(term)
        return (labels.get(key) == value) != unequal
    return (term.removeprefix("!") in labels) != term.startswith("!")
