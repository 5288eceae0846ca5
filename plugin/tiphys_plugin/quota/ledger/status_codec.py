"""The stored form of leases, pending requests and usage history.

`kubectl edit` and other versions of Tiphys write, too, so the decoder refuses every deviation: a damaged lease that
is taken for none would grant GPUs that are held.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, ValidationError
from pydantic.alias_generators import to_camel

from tiphys.errors import IntegrityError
from tiphys.protocol.step_spec import Proximity, SpotUse
from tiphys_plugin.quota.lease import EndedUsage, Lease, LeaseRequest, PendingRequest, PreemptionNotice
from tiphys_plugin.quota.ledger.entry_index import lease_index
from tiphys_plugin.quota.ledger.state import LedgerState

_HASHES = {"node_hash": "node", "instance_hash": "instance"}
_JSON_NAMES = {field.name: _HASHES.get(field.name, to_camel(field.name)) for field in fields(LeaseRequest)}
_DEFAULTS = (
    ("priority", 0),
    ("members", 1),
    ("tensorParallel", 1),
    ("spot", "no"),
    ("attained", 0.0),
    ("gpuTypes", ()),
    ("avoidedNodes", ()),
)
_Time = Annotated[AwareDatetime, Field(strict=False)]
_Names = Annotated[tuple[str, ...], Field(strict=False)]
_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False, strict=False)]

JsonObject = Mapping[str, Any]


def encode_state(ledger_state: LedgerState) -> dict[str, list[dict[str, Any]]]:
    """All of the ledger, as a snapshot of its log holds it; fields without a value are left out."""
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


def decode_lease(raw: JsonObject) -> Lease:
    """The lease that `encode_lease` encoded.

    Raises:
        IntegrityError: it writes no such lease.
    """
    try:
        return _LeaseModel.model_validate(raw).to_lease()
    except ValidationError as error:
        raise _integrity_error("lease", error) from error


def decode_pending(raw: JsonObject) -> PendingRequest:
    """The request that `encode_pending` encoded.

    Raises:
        IntegrityError: it writes no such request.
    """
    try:
        return _PendingModel.model_validate(raw).to_pending()
    except ValidationError as error:
        raise _integrity_error("waiting request", error) from error


def decode_history(raw: Sequence[JsonObject]) -> tuple[EndedUsage, ...]:
    """The usage history that `encode_history` encoded.

    Raises:
        IntegrityError: it writes no such history.
    """
    try:
        return tuple(_EndedUsageModel.model_validate(one).to_ended_usage() for one in raw)
    except ValidationError as error:
        raise _integrity_error("history", error) from error


def _integrity_error(kind: str, error: ValidationError) -> IntegrityError:
    first = error.errors()[0]
    return IntegrityError(f"{'.'.join((kind, *map(str, first['loc'])))}: {first['msg']}")


class _StatusModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, alias_generator=to_camel)


class _RequestModel(_StatusModel):
    uid: str
    step: str
    node_hash: str = Field(alias="node")
    namespace: str
    workflow: str
    instance_hash: str = Field(alias="instance")
    run: str
    attempt: int
    queue: str
    gpus: PositiveInt
    gpu_type: str | None = None
    min_gpu_memory_mb: PositiveInt | None = None
    priority: int = 0
    seconds: PositiveInt | None = None
    members: PositiveInt = 1
    tensor_parallel: PositiveInt = 1
    spot: SpotUse | Literal["avoided"] = "no"
    attained: _Seconds = 0.0
    first_start: _Seconds | None = None
    min_members: PositiveInt | None = None
    max_members: PositiveInt | None = None
    item_index: NonNegativeInt | None = None
    gpu_types: _Names = ()
    within: Proximity | None = None
    avoided_nodes: _Names = ()
    cohort: str | None = None

    def to_request(self) -> LeaseRequest:
        return LeaseRequest(**{name: getattr(self, name) for name in _JSON_NAMES})


class _PreemptionModel(_StatusModel):
    uid: str
    step: str
    asked_at: _Time
    deadline: _Time
    keeps: PositiveInt | None = None
    moves: bool = False


class _LeaseModel(_RequestModel):
    id: str
    pool: str
    granted_at: _Time
    check_at: _Time
    nodes: list[str] = []
    leaving: _PreemptionModel | None = None

    def to_lease(self) -> Lease:
        notice = PreemptionNotice(**dict(self.leaving)) if self.leaving is not None else None
        return Lease(self.id, self.to_request(), self.pool, self.granted_at, self.check_at, tuple(self.nodes), notice)


class _PendingModel(_RequestModel):
    arrival: PositiveInt
    since: _Time
    seen_at: _Time
    promised_at: _Time | None = None

    def to_pending(self) -> PendingRequest:
        return PendingRequest(self.to_request(), self.arrival, self.since, self.seen_at, self.promised_at)


class _EndedUsageModel(_StatusModel):
    queue: str
    pool: str
    gpus: Annotated[float, Field(gt=0, allow_inf_nan=False, strict=False)]
    at: _Time

    def to_ended_usage(self) -> EndedUsage:
        return EndedUsage(self.queue, self.pool, self.gpus, self.at)


def encode_lease(one: Lease) -> dict[str, Any]:
    """The lease as it is stored."""
    times = {"grantedAt": format_timestamp(one.granted_at), "checkAt": format_timestamp(one.check_at)}
    return {
        "id": one.id,
        "pool": one.pool,
        **times,
        **encode_request(one.request),
        **_encode_nodes_and_preemption(one),
    }


def encode_pending(one: PendingRequest) -> dict[str, Any]:
    """The pending request as it is stored."""
    times = {"since": format_timestamp(one.since), "seenAt": format_timestamp(one.seen_at)}
    if one.promised_at is not None:
        times["promisedAt"] = format_timestamp(one.promised_at)
    return {"arrival": one.arrival, **times, **encode_request(one.request)}


def encode_history(history: Iterable[EndedUsage]) -> list[dict[str, Any]]:
    """The usage history as it is stored."""
    return [
        {"queue": one.queue, "pool": one.pool, "gpus": one.gpus, "at": format_timestamp(one.measured_at)}
        for one in history
    ]


def encode_summary(ledger_state: LedgerState) -> dict[str, Any]:
    """Sums for the columns of `kubectl get gpuledgers`, which are not read back."""
    held = lease_index.sum_gpus(ledger_state.leases)
    return {
        "leases": len(ledger_state.leases),
        "gpus": sum(held.values()),
        "held": ", ".join(f"{queue} {gpus}" for queue, gpus in sorted(held.items())),
        "waiting": len(ledger_state.pending),
    }


def encode_request(request: LeaseRequest) -> dict[str, Any]:
    """The part of an entry that is its request."""
    values = {key: getattr(request, name) for name, key in _JSON_NAMES.items()}
    return {key: value for key, value in values.items() if value is not None and (key, value) not in _DEFAULTS}


def _encode_nodes_and_preemption(lease: Lease) -> dict[str, Any]:
    fields: dict[str, Any] = {"nodes": list(lease.nodes)} if lease.nodes else {}
    if (notice := lease.preemption) is not None:
        times = {"askedAt": format_timestamp(notice.asked_at), "deadline": format_timestamp(notice.deadline)}
        keeps = {} if notice.keeps is None else {"keeps": notice.keeps}
        moves = {"moves": True} if notice.moves else {}
        fields["leaving"] = {"uid": notice.uid, "step": notice.step, **times, **keeps, **moves}
    return fields


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
