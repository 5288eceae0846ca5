"""Reads a `GPULedger` object, replaces its status, and detects that it was lost or damaged.

A missing, damaged or recreated object is never taken for an empty ledger state:
that would grant GPUs that are held. Only a service that starts, or that recovers
a lost ledger, may begin with an empty state, because it restores the leases of
live pods first.
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
from tiphys_plugin.quota.lease import LedgerLostError
from tiphys_plugin.quota.ledger import status_codec
from tiphys_plugin.quota.ledger.room import MAX_STATUS_BYTES
from tiphys_plugin.quota.ledger.state import LedgerState
from tiphys_plugin.quota.queues import MisconfiguredQueues, QueueRules, parse_queues


class LedgerFullError(StoreError):
    """The status of the object has no room for the new ledger state."""


@dataclass(frozen=True)
class LedgerVersion:
    """The parsed content of one resourceVersion of the object."""

    manifest: Object
    rules: QueueRules
    state: LedgerState

    @property
    def object_version(self) -> tuple[str, str]:
        return _object_version(self.manifest)

    @property
    def decoded_status(self) -> status_codec.DecodedStatus | None:
        """Status and state, from which the codec reuses unchanged entries; None without a status."""
        return (self.manifest["status"], self.state) if "status" in self.manifest else None


class LedgerObject:
    """The object ``name`` in ``namespace``, created empty if it does not exist."""

    def __init__(self, api: KubeApi, namespace: str, name: str) -> None:
        self._api = api
        self._namespace = namespace
        self._name = name
        self.last_version: LedgerVersion | None = None
        """The last version that this service read or wrote; other services may have written since."""

    def __str__(self) -> str:
        return f"GPULedger {self._namespace}/{self._name}"

    def read(self) -> LedgerVersion:
        """Read the newest version, by one request.

        Raises:
            StoreError: it cannot be read, or must not be trusted; the message says what to do.
        """
        manifest = self._get() or self._create()
        if self.last_version is None or self.last_version.object_version != _object_version(manifest):
            self.last_version = self._parse_version(manifest)
        return self.last_version

    def accept_replacement(self) -> None:
        """Take the object that is there now for the ledger, after the one before was lost.

        Raises:
            LedgerLostError: there is none, or it has no queues and the one before had some.
            StoreError: it cannot be read.
        """
        manifest, lost = self._get(), self.last_version
        if manifest is None:
            raise self._lost_error("was deleted")
        if lost is not None and lost.rules is not None and manifest.get("spec") is None:
            raise self._lost_error("was made again without queues")
        self.last_version = None
        try:
            self.last_version = self._parse_version(manifest)
        finally:  # a damaged object is not accepted, so the one before still counts as lost
            self.last_version = self.last_version or lost

    def write(self, version: LedgerVersion, ledger_state: LedgerState, spare_bytes: int = 0) -> None:
        """Replace ``version`` with ``ledger_state``.

        Args:
            version: The version that the state was derived from.
            ledger_state: The new state.
            spare_bytes: Bytes that must remain free in the status.

        Raises:
            ConflictError: ``version`` is not the newest one; nothing was written.
            LedgerFullError: fewer bytes would remain free; nothing was written.
            StoreError: no answer; the state may have been written.
        """
        content = status_codec.encode_status(ledger_state, version.decoded_status)
        self._check_room(ledger_state, content, spare_bytes)
        metadata = {key: version.manifest["metadata"][key] for key in ("name", "namespace", "uid", "resourceVersion")}
        unchanged = {key: value for key, value in version.manifest.items() if key in ("apiVersion", "kind", "spec")}
        body = {**unchanged, "metadata": metadata, "status": content}
        try:
            written = self._api.replace(GPU_LEDGERS, self._namespace, body, "status")
        except NotFoundError as error:
            raise ConflictError(f"{self} is gone, or its kind has no status: {error}") from error
        except UsageError as error:
            raise StoreError(f"{self}: {error}; bring its kind up to date with the chart") from error
        self.last_version = LedgerVersion(written, version.rules, ledger_state)

    def _get(self) -> Object | None:
        try:
            return self._api.get(GPU_LEDGERS, self._namespace, self._name)
        except UsageError as error:
            raise StoreError(f"{self} cannot be read: {error}") from error

    def _create(self) -> Object:
        if self.last_version is not None:
            raise self._lost_error("was deleted")
        try:
            return self._api.create(GPU_LEDGERS, self._namespace, {"metadata": {"name": self._name}})
        except ObjectExistsError:
            manifest = self._get()  # another service has created it meanwhile
            if manifest is None:
                raise self._lost_error("was made and deleted again") from None
            return manifest
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

    def _parse_version(self, manifest: Object) -> LedgerVersion:
        if self.last_version is not None and manifest["metadata"]["uid"] != self.last_version.object_version[0]:
            raise self._lost_error("is another object of the same name")
        if "status" not in manifest:
            if self.last_version is not None and "status" in self.last_version.manifest:
                raise self._lost_error("has lost its status")
            return LedgerVersion(manifest, self._rules(manifest), LedgerState())
        try:
            previous = self.last_version.decoded_status if self.last_version is not None else None
            return LedgerVersion(
                manifest, self._rules(manifest), status_codec.decode_status(manifest["status"], previous)
            )
        except IntegrityError as error:
            raise StoreError(
                f"the status of {self} is damaged: {error}. Nothing is granted until it is repaired: with "
                f"`kubectl edit gpuledgers {self._name} -n {self._namespace} --subresource=status`; or delete the "
                f"object and apply its queues again with {self._recovery_phrase}"
            ) from error

    def _rules(self, manifest: Object) -> QueueRules:
        """The queues of the spec; the same object for an unchanged spec, because it holds caches."""
        if self.last_version is not None and self.last_version.manifest.get("spec") == manifest.get("spec"):
            return self.last_version.rules
        return parse_ledger_queues(manifest)

    def _lost_error(self, how: str) -> LedgerLostError:
        return LedgerLostError(
            f"{self} {how} while leases were kept in it, so no GPUs are granted; unless it is there, make it with "
            f"{self._recovery_phrase}"
        )

    @property
    def _recovery_phrase(self) -> str:
        return (
            f"`tiphys queues apply -f FILE -n {self._namespace}`, and the services record the leases of live pods in "
            "it and go on within seconds"
        )

    def _check_room(self, ledger_state: LedgerState, content: dict[str, Any], spare_bytes: int) -> None:
        size = len(json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode())
        if size + spare_bytes > MAX_STATUS_BYTES:
            raise LedgerFullError(
                f"{self} has no room for more: {len(ledger_state.leases)} leases and "
                f"{len(ledger_state.pending)} waiting requests "
                f"take {size} of {MAX_STATUS_BYTES} bytes; start fewer steps with GPUs at once, or release some"
            )


def parse_ledger_queues(manifest: Object) -> QueueRules:
    """The queues in the spec of a `GPULedger` manifest; None without a spec."""
    if manifest.get("spec") is None:
        return None
    namespace, name = manifest["metadata"]["namespace"], manifest["metadata"]["name"]
    try:
        return parse_queues(manifest["spec"], f"the spec of GPULedger {namespace}/{name}")
    except UsageError as error:
        return MisconfiguredQueues(f"{error}; repair it with `tiphys queues apply -f FILE -n {namespace}`")


def _object_version(manifest: Object) -> tuple[str, str]:
    return manifest["metadata"]["uid"], manifest["metadata"]["resourceVersion"]
