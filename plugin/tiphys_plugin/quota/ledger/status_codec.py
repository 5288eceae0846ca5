"""The stored form of leases, pending requests and usage history, which follows from their records.

`kubectl edit` and other versions of Tiphys write, too, so the decoder refuses every deviation: a damaged lease that
is taken for none would grant GPUs that are held.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError

from tiphys.errors import IntegrityError, UsageError
from tiphys_plugin.quota.lease import EndedUsage, Lease, LedgerState, PendingRequest

JsonObject = Mapping[str, Any]
_Record = TypeVar("_Record")
_LEASE = TypeAdapter(Lease)
_PENDING = TypeAdapter(PendingRequest)
_ENDED_USAGE = TypeAdapter(EndedUsage)


def encode_state(ledger_state: LedgerState) -> dict[str, list[dict[str, Any]]]:
    """All of the ledger, as a snapshot of its log holds it."""
    return {
        "leases": list(map(encode_lease, ledger_state.leases)),
        "waiting": list(map(encode_pending, ledger_state.pending)),
        "history": encode_history(ledger_state.history),
    }


def decode_state(document: JsonObject) -> LedgerState:
    """The ledger state that `encode_state` encoded.

    Raises:
        IntegrityError: it writes no such document; the message names the field.
    """
    return LedgerState(
        tuple(map(decode_lease, document["leases"])),
        tuple(map(decode_pending, document["waiting"])),
        decode_history(document["history"]),
    )


def encode_lease(lease: Lease) -> dict[str, Any]:
    """The lease as it is stored; fields with their default are left out."""
    return _encode(_LEASE, lease)


def encode_pending(pending: PendingRequest) -> dict[str, Any]:
    """The pending request as it is stored; fields with their default are left out."""
    return _encode(_PENDING, pending)


def encode_history(history: Iterable[EndedUsage]) -> list[dict[str, Any]]:
    """The usage history as it is stored."""
    return [_encode(_ENDED_USAGE, usage) for usage in history]


def decode_lease(raw: JsonObject) -> Lease:
    """The lease that `encode_lease` encoded.

    Raises:
        IntegrityError: it writes no such lease.
    """
    return parse_lease(json.dumps(raw))


def decode_pending(raw: JsonObject) -> PendingRequest:
    """The request that `encode_pending` encoded.

    Raises:
        IntegrityError: it writes no such request.
    """
    return parse_pending(json.dumps(raw))


def format_lease(lease: Lease) -> str:
    """The lease as JSON text.

    Raises:
        UsageError: a text of it has half of a surrogate pair, which no JSON has, so it could not be read back.
    """
    return _format(_LEASE, lease)


def format_pending(pending: PendingRequest) -> str:
    """The pending request as JSON text; raises as `format_lease` does."""
    return _format(_PENDING, pending)


def parse_lease(text: str) -> Lease:
    """The lease of a JSON text; raises as `decode_lease` does."""
    return _parse(_LEASE, "lease", text)


def parse_pending(text: str) -> PendingRequest:
    """The request of a JSON text; raises as `decode_pending` does."""
    return _parse(_PENDING, "waiting request", text)


def decode_history(raw: Sequence[JsonObject]) -> tuple[EndedUsage, ...]:
    """The usage history that `encode_history` encoded.

    Raises:
        IntegrityError: it writes no such history.
    """
    return tuple(_parse(_ENDED_USAGE, "history", json.dumps(usage)) for usage in raw)


def _encode(adapter: TypeAdapter[_Record], record: _Record) -> dict[str, Any]:
    encoded: dict[str, Any] = adapter.dump_python(record, mode="json", by_alias=True, exclude_defaults=True)
    return encoded


def _format(adapter: TypeAdapter[_Record], record: _Record) -> str:
    try:
        return adapter.dump_json(record, by_alias=True, exclude_defaults=True).decode()
    except PydanticSerializationError as error:
        raise UsageError(f"a request for GPUs cannot be stored: {error}; name what it names in Unicode") from error


def _parse(adapter: TypeAdapter[_Record], kind: str, text: str) -> _Record:
    try:
        # Strict validation takes times and tuples from JSON text alone, where they cannot be anything else.
        return adapter.validate_json(text)
    except ValidationError as error:
        mistake = error.errors()[0]
        raise IntegrityError(f"{'.'.join((kind, *map(str, mistake['loc'])))}: {mistake['msg']}") from error


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
