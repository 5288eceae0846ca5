"""One `GPULedger` object: read it, replace its status, and notice when it is no longer the one it was.

What is missing, damaged or exchanged for another object is never taken for an
empty book: that would hand out GPUs that are held. Only a service that starts
may begin with an empty one, because it looks at the live pods first.
"""

import json
from dataclasses import dataclass
from typing import Any

from tiphys.errors import (
    ConflictError,
    ForbiddenError,
    IntegrityError,
    NotFoundError,
    ObjectExistsError,
    StoreError,
    UsageError,
)
from tiphys.kube.api import KubeApi, Object
from tiphys.kube.resources import GPU_LEDGERS
from tiphys_plugin.quota.ledger import status_codec as status
from tiphys_plugin.quota.ledger.state import Book
from tiphys_plugin.quota.queues import Misconfigured, QueueRules, parse_queues

STATUS_BYTES = 1_300_000
"""Largest status. etcd takes 1.5 MiB for a whole object; the rest is for the spec and what the API server adds."""


class LedgerFullError(StoreError):
    """The book has no room for what should be written."""


@dataclass(frozen=True)
class Version:
    """What one version of the object says."""

    object: Object
    rules: QueueRules
    book: Book

    @property
    def identity(self) -> tuple[str, str]:
        return _identity(self.object)

    @property
    def earlier(self) -> status.Earlier | None:
        """What the next version will mostly be."""
        return (self.object["status"], self.book) if "status" in self.object else None


class StoredBook:
    """The object ``name`` in ``namespace``, made empty if there is none."""

    def __init__(self, api: KubeApi, namespace: str, name: str) -> None:
        self._api = api
        self._namespace = namespace
        self._name = name
        self.known: Version | None = None
        """The last version that was read or written; others may have written since."""

    def __str__(self) -> str:
        return f"GPULedger {self._namespace}/{self._name}"

    def read(self) -> Version:
        """The newest version, by one request.

        Raises:
            StoreError: it cannot be had, or must not be trusted; the message says what to do.
        """
        found = self._get() or self._create()
        if self.known is None or self.known.identity != _identity(found):
            self.known = self._understood(found)
        return self.known

    def write(self, version: Version, book: Book, spare_bytes: int = 0) -> None:
        """Store ``book`` in the place of ``version``, and leave at least ``spare_bytes`` of room.

        Raises:
            ConflictError: ``version`` is not the newest one; nothing was written.
            LedgerFullError: there is not so much room; nothing was written.
            StoreError: no answer; it may have been written.
        """
        content = status.encode(book, version.earlier)
        self._check_room(book, content, spare_bytes)
        metadata = {key: version.object["metadata"][key] for key in ("name", "namespace", "uid", "resourceVersion")}
        kept = {key: value for key, value in version.object.items() if key in ("apiVersion", "kind", "spec")}
        body = {**kept, "metadata": metadata, "status": content}
        try:
            written = self._api.replace(GPU_LEDGERS, self._namespace, body, "status")
        except NotFoundError as error:
            raise ConflictError(f"{self} is gone, or its kind has no status: {error}") from error
        except UsageError as error:
            raise StoreError(f"{self}: {error}; bring its kind up to date with the chart") from error
        self.known = Version(written, version.rules, book)

    def _get(self) -> Object | None:
        try:
            return self._api.get(GPU_LEDGERS, self._namespace, self._name)
        except UsageError as error:
            raise StoreError(f"{self} cannot be read: {error}") from error

    def _create(self) -> Object:
        if self.known is not None:
            raise self._lost("was deleted")
        try:
            return self._api.create(GPU_LEDGERS, self._namespace, {"metadata": {"name": self._name}})
        except ObjectExistsError:
            found = self._get()  # another service was faster
            if found is None:
                raise self._lost("was made and deleted again") from None
            return found
        except (NotFoundError, UsageError) as error:
            raise StoreError(
                f"{self} cannot be made: {error}; install the chart of Tiphys, which brings the kind GPULedger, "
                "into this namespace"
            ) from error
        except ForbiddenError as error:
            raise StoreError(
                f"there is no {self}, and this account may not make one ({error}); make it with "
                f"`tiphys queues apply -f FILE -n {self._namespace}`, or by the chart"
            ) from error

    def _understood(self, found: Object) -> Version:
        if self.known is not None and found["metadata"]["uid"] != self.known.identity[0]:
            raise self._lost("is another object of the same name")
        if "status" not in found:
            if self.known is not None and "status" in self.known.object:
                raise self._lost("has lost its status")
            return Version(found, self._rules(found), Book())
        try:
            earlier = self.known.earlier if self.known is not None else None
            return Version(found, self._rules(found), status.decode(found["status"], earlier))
        except IntegrityError as error:
            raise StoreError(
                f"the status of {self} is damaged: {error}. Nothing is granted until it is repaired: with "
                f"`kubectl edit gpuledgers {self._name} -n {self._namespace} --subresource=status`; or delete the "
                "object, apply its queues again and restart the services, which record the leases of live pods"
            ) from error

    def _rules(self, found: Object) -> QueueRules:
        """The same object while the spec is the same, since much is remembered for it."""
        if self.known is not None and self.known.object.get("spec") == found.get("spec"):
            return self.known.rules
        return rules_of(found)

    def _lost(self, what: str) -> StoreError:
        return StoreError(
            f"{self} {what} while leases were kept in it; apply its queues again and restart the services, "
            "which record the leases of live pods"
        )

    def _check_room(self, book: Book, content: dict[str, Any], spare_bytes: int) -> None:
        size = len(json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode())
        if size + spare_bytes > STATUS_BYTES:
            raise LedgerFullError(
                f"{self} has no room for more: {len(book.leases)} leases and {len(book.waiting)} waiting requests "
                f"take {size} of {STATUS_BYTES} bytes; fewer steps with GPUs at the same time, or release some"
            )


def rules_of(found: Object) -> QueueRules:
    """The queues in the spec of a `GPULedger`; None if it has none."""
    if found.get("spec") is None:
        return None
    namespace, name = found["metadata"]["namespace"], found["metadata"]["name"]
    try:
        return parse_queues(found["spec"], f"the spec of GPULedger {namespace}/{name}")
    except UsageError as error:
        return Misconfigured(f"{error}; repair it with `tiphys queues apply -f FILE -n {namespace}`")


def _identity(found: Object) -> tuple[str, str]:
    return found["metadata"]["uid"], found["metadata"]["resourceVersion"]
