"""The book as the status of a `GPULedger` object.

Other versions of Tiphys and people with an editor write there too. What is not
exactly a book is refused: taken as empty, it would hand out GPUs that are held.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import fields
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, PositiveInt, ValidationError, model_validator
from pydantic.alias_generators import to_camel

from tiphys.errors import IntegrityError
from tiphys_plugin.ledger.book import Book
from tiphys_plugin.ledger.model import Lease, LeaseRequest, Leaving, Waiting
from tiphys_plugin.ledger.shares import Consumed

VERSION = 3
_NAMES = {field.name: to_camel(field.name) for field in fields(LeaseRequest)}
_DEFAULTS = (("priority", 0), ("members", 1), ("tensorParallel", 1))
_Time = Annotated[AwareDatetime, Field(strict=False)]


def encode(book: Book) -> dict[str, Any]:
    """The status for ``book``, the same for equal books; fields without a value are left out.

    ``summary`` is for the columns of `kubectl get gpuledgers`, and is not read back.
    """
    return {
        "version": _least_version(book),
        "summary": _summary(book),
        "leases": [
            {
                "id": one.id,
                "pool": one.pool,
                "grantedAt": _time(one.granted_at),
                "checkAt": _time(one.check_at),
                **_request(one.request),
                **_whereabouts(one),
            }
            for one in book.leases
        ],
        "waiting": [
            {
                "arrival": one.arrival,
                "since": _time(one.since),
                "seenAt": _time(one.seen_at),
                **_request(one.request),
            }
            for one in book.waiting
        ],
        "history": [
            {"queue": one.queue, "pool": one.pool, "gpus": one.gpus, "at": _time(one.at)} for one in book.history
        ],
    }


def decode(status: object) -> Book:
    """The book in a status that is there.

    Raises:
        IntegrityError: it is not exactly what `encode` writes; the message names the field.
    """
    if isinstance(status, dict) and isinstance(version := status.get("version"), int) and version > VERSION:
        raise IntegrityError(f"it has format {version}, this Tiphys knows up to {VERSION}; upgrade Tiphys")
    try:
        read = _Status.model_validate(status)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "the whole"
        raise IntegrityError(f"{field}: {first['msg']}") from error
    return Book(
        tuple(one.lease() for one in read.leases),
        tuple(one.place() for one in read.waiting),
        tuple(Consumed(one.queue, one.pool, one.gpus, one.at) for one in read.history),
    )


class _Wire(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, alias_generator=to_camel)


class _Request(_Wire):
    uid: str
    step: str
    node: str
    namespace: str
    workflow: str
    instance: str
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

    def request(self) -> LeaseRequest:
        return LeaseRequest(**{name: getattr(self, name) for name in _NAMES})


class _Leaving(_Wire):
    uid: str
    step: str
    asked_at: _Time
    deadline: _Time


class _Lease(_Request):
    id: str
    pool: str
    granted_at: _Time
    check_at: _Time
    nodes: list[str] = []
    leaving: _Leaving | None = None

    def lease(self) -> Lease:
        gone = Leaving(**dict(self.leaving)) if self.leaving is not None else None
        return Lease(self.id, self.request(), self.pool, self.granted_at, self.check_at, tuple(self.nodes), gone)


class _Waiting(_Request):
    arrival: PositiveInt
    since: _Time
    seen_at: _Time

    def place(self) -> Waiting:
        return Waiting(self.request(), self.arrival, self.since, self.seen_at)


class _Consumed(_Wire):
    queue: str
    pool: str
    gpus: Annotated[float, Field(gt=0, allow_inf_nan=False, strict=False)]
    at: _Time


class _Status(_Wire):
    version: Literal[1, 2, 3]
    summary: dict[str, Any] = {}
    leases: list[_Lease]
    waiting: list[_Waiting]
    history: list[_Consumed] = []
    """Format 1 had none."""

    @model_validator(mode="after")
    def _nothing_is_there_twice(self) -> "_Status":
        _once("lease", (one.id for one in self.leases))
        _once("lease of node", ((one.uid, one.step, one.node) for one in self.leases))
        _once("place in the line of step", ((one.uid, one.step) for one in self.waiting))
        _once("mean of queue", ((one.queue, one.pool) for one in self.history))
        arrivals = [one.arrival for one in self.waiting]
        if arrivals != sorted(set(arrivals)):
            raise ValueError("the waiting requests are not in order of arrival")
        return self


def _once(what: str, names: Iterable[object]) -> None:
    name, times = max(Counter(names).items(), key=lambda item: item[1], default=("", 0))
    if times > 1:
        raise ValueError(f"{what} {name!r} is there twice")


def _summary(book: Book) -> dict[str, Any]:
    held: Counter[str] = Counter()
    for lease in book.leases:
        held[lease.request.queue] += lease.request.gpus
    return {
        "leases": len(book.leases),
        "gpus": sum(held.values()),
        "held": ", ".join(f"{queue} {gpus}" for queue, gpus in sorted(held.items())),
        "waiting": len(book.waiting),
    }


def _least_version(book: Book) -> int:
    """The oldest format that can say it: services of the version before read on while nobody needs more."""
    requests = [one.request for one in book.leases] + [one.request for one in book.waiting]
    new = any(request.members > 1 for request in requests) or any(map(_whereabouts, book.leases))
    return VERSION if new else 2


def _request(request: LeaseRequest) -> dict[str, Any]:
    values = {told: getattr(request, name) for name, told in _NAMES.items()}
    return {told: value for told, value in values.items() if value is not None and (told, value) not in _DEFAULTS}


def _whereabouts(lease: Lease) -> dict[str, Any]:
    said: dict[str, Any] = {"nodes": list(lease.nodes)} if lease.nodes else {}
    if (leaving := lease.leaving) is not None:
        times = {"askedAt": _time(leaving.asked_at), "deadline": _time(leaving.deadline)}
        said["leaving"] = {"uid": leaving.uid, "step": leaving.step, **times}
    return said


def _time(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat().replace("+00:00", "Z")
