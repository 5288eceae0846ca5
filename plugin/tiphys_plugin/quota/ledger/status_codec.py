"""The stored form of leases, pending requests and usage history, and the document that holds all of them.

The document is what commands read of a `GPULedger`: its log, as one status. `kubectl edit` and other versions of
Tiphys write, too, so the decoder refuses every deviation: a damaged status that is taken as empty would grant GPUs
that are held.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, ValidationError
from pydantic.alias_generators import to_camel

from tiphys.errors import IntegrityError
from tiphys.kube.ledger_log import WHOLE_STATUS_FORMAT
from tiphys.protocol.step_spec import Proximity, SpotUse
from tiphys_plugin.quota.lease import EndedUsage, Lease, LeaseRequest, PendingRequest, PreemptionNotice
from tiphys_plugin.quota.ledger.entry_index import lease_index
from tiphys_plugin.quota.ledger.state import LedgerState

STATUS_VERSION = WHOLE_STATUS_FORMAT
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


_Entry = TypeVar("_Entry")
JsonObject = Mapping[str, Any]


def encode_status(ledger_state: LedgerState) -> dict[str, Any]:
    """The whole ledger state as a document; fields without a value are left out."""
    return {
        "version": STATUS_VERSION,
        "summary": encode_summary(ledger_state),
        "leases": list(map(encode_lease, ledger_state.leases)),
        "waiting": list(map(encode_pending, ledger_state.pending)),
        "history": encode_history(ledger_state.history),
    }


def decode_status(status: object) -> LedgerState:
    """The ledger state in a status that `encode_status` wrote.

    Raises:
        IntegrityError: `encode_status` writes no such status; the message names the field.
    """
    try:
        document = _StatusDocument.model_validate(status)
    except ValidationError as error:
        raise _integrity_error(error) from error
    ledger_state = LedgerState(
        _decode_entries("leases", document.leases, decode_lease),
        _decode_entries("waiting", document.waiting, decode_pending),
        tuple(map(_to_ended_usage, document.history)),
    )
    check_no_duplicates(ledger_state)
    return ledger_state


def decode_lease(raw: JsonObject) -> Lease:
    """The lease that `encode_lease` encoded.

    Raises:
        IntegrityError: it writes no such lease.
    """
    try:
        return _LeaseModel.model_validate(raw).to_lease()
    except ValidationError as error:
        raise _integrity_error(error) from error


def decode_pending(raw: JsonObject) -> PendingRequest:
    """The request that `encode_pending` encoded.

    Raises:
        IntegrityError: it writes no such request.
    """
    try:
        return _PendingModel.model_validate(raw).to_pending()
    except ValidationError as error:
        raise _integrity_error(error) from error


def decode_history(raw: Sequence[JsonObject]) -> tuple[EndedUsage, ...]:
    """The usage history that `encode_history` encoded.

    Raises:
        IntegrityError: it writes no such history.
    """
    try:
        return tuple(_to_ended_usage(_EndedUsageModel.model_validate(one)) for one in raw)
    except ValidationError as error:
        raise _integrity_error(error) from error


def _to_ended_usage(model: "_EndedUsageModel") -> EndedUsage:
    return EndedUsage(model.queue, model.pool, model.gpus, model.at)


def _decode_entries(
    section: str, raw_entries: Sequence[JsonObject], decode: Callable[[JsonObject], _Entry]
) -> tuple[_Entry, ...]:
    entries: list[_Entry] = []
    for number, raw in enumerate(raw_entries):
        try:
            entries.append(decode(raw))
        except IntegrityError as error:
            raise IntegrityError(f"{section}.{number}.{error}") from error
    return tuple(entries)


def _integrity_error(error: ValidationError) -> IntegrityError:
    first = error.errors()[0]
    field = ".".join(map(str, first["loc"])) or "the whole"
    return IntegrityError(f"{field}: {first['msg']}")


def check_no_duplicates(ledger_state: LedgerState) -> None:
    """Check what holds for every ledger state.

    Raises:
        IntegrityError: it does not hold.
    """
    _check_unique("lease", (one.id for one in ledger_state.leases))
    _check_unique("lease of node", (one.request.key for one in ledger_state.leases))
    _check_unique("pending request of step", (one.request.workflow_step for one in ledger_state.pending))
    _check_unique("usage history of queue", ((one.queue, one.pool) for one in ledger_state.history))
    arrivals = [one.arrival for one in ledger_state.pending]
    if arrivals != sorted(set(arrivals)):
        raise IntegrityError("the whole: the waiting requests are not in order of arrival")


def _check_unique(description: str, names: Iterable[object]) -> None:
    name, times = max(Counter(names).items(), key=lambda item: item[1], default=("", 0))
    if times > 1:
        raise IntegrityError(f"the whole: {description} {name!r} is there twice")


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


class _StatusDocument(_StatusModel):
    version: Literal[5]
    summary: dict[str, Any] = {}
    leases: list[dict[str, Any]]
    waiting: list[dict[str, Any]]
    history: list[_EndedUsageModel]


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
