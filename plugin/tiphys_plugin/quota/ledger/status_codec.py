"""The stored form of leases, pending requests and usage history, which follows from their records.

`kubectl edit` and other versions of Tiphys write, too, so the decoder refuses every deviation: a damaged lease that
is taken for none would grant GPUs that are held.
"""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Generic, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError

from tiphys.errors import IntegrityError, UsageError
from tiphys_plugin.quota.lease import EndedUsage, Lease, LedgerState, PendingRequest

JsonObject = Mapping[str, Any]
_Record = TypeVar("_Record")


class RecordCodec(Generic[_Record]):
    """The stored form of one ``kind`` of record, as an object or as JSON text. Fields with their default are left out.

    `decode` and `parse` raise `IntegrityError`, which names the field, for what `encode` and `format` do not write.
    """

    def __init__(self, record: type[_Record], kind: str) -> None:
        self._adapter: TypeAdapter[_Record] = TypeAdapter(record)
        self._kind = kind

    def encode(self, record: _Record) -> dict[str, Any]:
        encoded: dict[str, Any] = self._adapter.dump_python(record, mode="json", by_alias=True, exclude_defaults=True)
        return encoded

    def decode(self, raw: JsonObject) -> _Record:
        return self.parse(json.dumps(raw))

    def format(self, record: _Record) -> str:
        """The record as JSON text.

        Raises:
            UsageError: a text of it has half of a surrogate pair, which no JSON has, so it could not be read back.
        """
        try:
            return self._adapter.dump_json(record, by_alias=True, exclude_defaults=True).decode()
        except PydanticSerializationError as error:
            raise UsageError(f"a request for GPUs cannot be stored: {error}; name what it names in Unicode") from error

    def parse(self, text: str) -> _Record:
        try:
            # Strict validation takes times and tuples from JSON text alone, where they cannot be anything else.
            return self._adapter.validate_json(text)
        except ValidationError as error:
            mistake = error.errors()[0]
            raise IntegrityError(f"{'.'.join((self._kind, *map(str, mistake['loc'])))}: {mistake['msg']}") from error


LEASES = RecordCodec(Lease, "lease")
PENDING = RecordCodec(PendingRequest, "waiting request")
HISTORY = RecordCodec(EndedUsage, "history")


def encode_state(ledger_state: LedgerState) -> dict[str, list[dict[str, Any]]]:
    """All of the ledger, as a snapshot of its log holds it."""
    return {
        "leases": list(map(LEASES.encode, ledger_state.leases)),
        "waiting": list(map(PENDING.encode, ledger_state.pending)),
        "history": list(map(HISTORY.encode, ledger_state.history)),
    }


def decode_state(document: JsonObject) -> LedgerState:
    """The ledger state that `encode_state` encoded.

    Raises:
        IntegrityError: it writes no such document; the message names the field.
    """
    return LedgerState(
        tuple(map(LEASES.decode, document["leases"])),
        tuple(map(PENDING.decode, document["waiting"])),
        tuple(map(HISTORY.decode, document["history"])),
    )


def encode_summary(ledger_state: LedgerState, held_gpus: Mapping[str, int]) -> dict[str, Any]:
    """Sums for the columns of `kubectl get gpuledgers`, which are not read back; ``held_gpus`` are those of queues."""
    return {
        "leases": len(ledger_state.leases),
        "gpus": sum(held_gpus.values()),
        "held": ", ".join(f"{queue} {gpus}" for queue, gpus in sorted(held_gpus.items())),
        "waiting": len(ledger_state.pending),
    }


def format_timestamp(moment: datetime) -> str:
    """A time as it is stored."""
    return moment.astimezone(UTC).isoformat().replace("+00:00", "Z")


def parse_timestamp(text: str) -> datetime:
    """The time that `format_timestamp` formatted.

    Raises:
        IntegrityError: it is no such time.
    """
    try:
        moment = datetime.fromisoformat(text)
    except (TypeError, ValueError) as error:
        raise IntegrityError(f"{text!r} is no time") from error
    if moment.tzinfo is None:
        raise IntegrityError(f"{text!r} has no time zone")
    return moment
