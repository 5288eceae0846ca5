"""Shows a `GPULedger` to people and to the controller, which decide nothing by it.

They read the leases as they are stored, and need no plugin.
"""

import itertools
from collections.abc import Sequence

from tiphys.errors import IntegrityError
from tiphys.kube.api import KubeApi, Object
from tiphys.kube.ledger_log import JsonObject, LedgerRecords, LogDamagedError, LogHead, LogReader, parse_head
from tiphys.kube.resources import GPU_LEDGERS

_READ_TRIES = 4


class StoredForm:
    """`BookCodec` that leaves leases and requests as they are stored."""

    def lease(self, raw: JsonObject) -> JsonObject:
        return raw

    def pending(self, raw: JsonObject) -> JsonObject:
        return raw

    def history(self, raw: Sequence[JsonObject]) -> Sequence[JsonObject]:
        return tuple(raw)

    def lease_id(self, lease: JsonObject) -> str:
        return str(lease["id"])

    def arrival(self, pending: JsonObject) -> int:
        return int(pending["arrival"])

    def checked(self, lease: JsonObject, check_at: str) -> JsonObject:
        return {**lease, "checkAt": check_at}

    def seen(self, pending: JsonObject, seen_at: str) -> JsonObject:
        return {**pending, "seenAt": seen_at}


class WholeLedgerReader:
    """Reads a `GPULedger` whose status then has all ``leases``, ``waiting`` and ``history`` in the place of its log.

    Repeated reads cost one request, and those for the entries that are new.
    """

    def __init__(self, api: KubeApi, namespace: str, name: str) -> None:
        self._api = api
        self._namespace = namespace
        self._name = name
        self._uid = ""
        self._new_reader()

    def read(self) -> Object | None:
        """The newest ledger, without a status if it has none yet; None if it does not exist.

        Raises:
            IntegrityError: its status is of another format, or the head of its log is damaged.
            LogDamagedError: a record of its log is missing or damaged.
        """
        for try_number in itertools.count(1):
            ledger = self._api.get(GPU_LEDGERS, self._namespace, self._name)
            if ledger is None or "status" not in ledger:
                return ledger
            head = self._parse_head(ledger["status"])
            if self._uid != ledger["metadata"]["uid"]:
                self._uid = ledger["metadata"]["uid"]
                self._new_reader()
            try:
                book = self._reader.read(head)
            except LogDamagedError as error:  # or its service has just deleted records before a newer snapshot
                if try_number == _READ_TRIES:
                    raise LogDamagedError(
                        f"{error}, so the leases of GPULedger {self._namespace}/{self._name} cannot be shown; the "
                        "services notice that within 5 s and write them to a new log, so repeat this in half a minute; "
                        "if it stays so, the log of the plugin says why"
                    ) from error
                self._new_reader()
                continue
            whole = {"leases": list(book.leases), "waiting": list(book.pending), "history": list(book.history)}
            return {**ledger, "status": whole}
        raise AssertionError("the numbers end")

    def _parse_head(self, status: JsonObject) -> LogHead:
        try:
            return parse_head(status)
        except IntegrityError as error:
            raise IntegrityError(
                f"the status of GPULedger {self._namespace}/{self._name} is damaged: {error}; repair it with "
                "`kubectl edit --subresource=status`, or delete the object and apply its queues again"
            ) from error

    def _new_reader(self) -> None:
        records = LedgerRecords(self._api, self._namespace, self._name)
        self._reader: LogReader[JsonObject, JsonObject] = LogReader(records, StoredForm())
