"""The book as the status of a `GPULedger` object.

Other versions of Tiphys and people with an editor write there too. What is not
exactly a book is refused: taken as empty, it would hand out GPUs that are held.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, PositiveInt, ValidationError
from pydantic.alias_generators import to_camel

from tiphys.errors import IntegrityError
from tiphys.protocol.step_spec import SpotUse
from tiphys_plugin.quota.lease import Lease, LeaseRequest, Leaving, Waiting
from tiphys_plugin.quota.ledger.state import Book
from tiphys_plugin.quota.scheduler.fair_share import Consumed

VERSION = 4
_NAMES = {field.name: to_camel(field.name) for field in fields(LeaseRequest)}
_DEFAULTS = (("priority", 0), ("members", 1), ("tensorParallel", 1), ("spot", "no"), ("attained", 0.0))
_Time = Annotated[AwareDatetime, Field(strict=False)]
_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False, strict=False)]


_Entry = TypeVar("_Entry")
Content = Mapping[str, Any]
Earlier = tuple[Content, Book]
"""A status, and the book in it, of which most is the same in the next."""
_NOTHING: Earlier = ({"leases": [], "waiting": []}, Book())


def encode(book: Book, earlier: Earlier | None = None) -> dict[str, Any]:
    """The status for ``book``, the same for equal books; fields without a value are left out.

    ``summary`` is for the columns of `kubectl get gpuledgers`, and is not read back.
    """
    before, old = earlier or _NOTHING
    leases = {id(one): raw for raw, one in zip(before["leases"], old.leases, strict=True)}
    waiting = {id(one): raw for raw, one in zip(before["waiting"], old.waiting, strict=True)}
    return {
        "version": _least_version(book),
        "summary": _summary(book),
        "leases": [leases.get(id(one)) or _lease(one) for one in book.leases],
        "waiting": [waiting.get(id(one)) or _place(one) for one in book.waiting],
        "history": [
            {"queue": one.queue, "pool": one.pool, "gpus": one.gpus, "at": _time(one.at)} for one in book.history
        ],
    }


def decode(status: object, earlier: Earlier | None = None) -> Book:
    """The book in a status that is there; what is as ``earlier`` gives the objects that it gave then.

    Raises:
        IntegrityError: it is not exactly what `encode` writes; the message names the field.
    """
    if isinstance(status, dict) and isinstance(version := status.get("version"), int) and version > VERSION:
        raise IntegrityError(f"it has format {version}, this Tiphys knows up to {VERSION}; upgrade Tiphys")
    before, old = earlier or _NOTHING
    try:
        read = _Status.model_validate(status)
    except ValidationError as error:
        raise _damaged(error) from error
    leases = zip(before["leases"], old.leases, strict=True)
    waiting = zip(before["waiting"], old.waiting, strict=True)
    book = Book(
        _entries("leases", read.leases, "id", leases, lambda raw: _Lease.model_validate(raw).lease()),
        _entries("waiting", read.waiting, "arrival", waiting, lambda raw: _Waiting.model_validate(raw).place()),
        tuple(Consumed(one.queue, one.pool, one.gpus, one.at) for one in read.history),
    )
    _check_that_nothing_is_there_twice(book)
    return book


def _entries(
    part: str,
    raws: Sequence[Content],
    name: str,
    known: Iterable[tuple[Content, _Entry]],
    read: Callable[[Content], _Entry],
) -> tuple[_Entry, ...]:
    objects = {raw[name]: (raw, one) for raw, one in known}
    found: list[_Entry] = []
    for number, raw in enumerate(raws):
        before = objects.get(raw.get(name))
        try:
            found.append(before[1] if before is not None and before[0] == raw else read(raw))
        except ValidationError as error:
            raise _damaged(error, part, number) from error
    return tuple(found)


def _damaged(error: ValidationError, *where: object) -> IntegrityError:
    first = error.errors()[0]
    field = ".".join(str(part) for part in (*where, *first["loc"])) or "the whole"
    return IntegrityError(f"{field}: {first['msg']}")


def _check_that_nothing_is_there_twice(book: Book) -> None:
    _once("lease", (one.id for one in book.leases))
    _once("lease of node", (one.request.key for one in book.leases))
    _once("place in the line of step", ((one.request.uid, one.request.step) for one in book.waiting))
    _once("mean of queue", ((one.queue, one.pool) for one in book.history))
    arrivals = [one.arrival for one in book.waiting]
    if arrivals != sorted(set(arrivals)):
        raise IntegrityError("the whole: the waiting requests are not in order of arrival")


def _once(what: str, names: Iterable[object]) -> None:
    name, times = max(Counter(names).items(), key=lambda item: item[1], default=("", 0))
    if times > 1:
        raise IntegrityError(f"the whole: {what} {name!r} is there twice")


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
    spot: SpotUse | Literal["avoided"] = "no"
    attained: _Seconds = 0.0
    first_start: _Seconds | None = None
    min_members: PositiveInt | None = None
    max_members: PositiveInt | None = None

    def request(self) -> LeaseRequest:
        return LeaseRequest(**{name: getattr(self, name) for name in _NAMES})


class _Leaving(_Wire):
    uid: str
    step: str
    asked_at: _Time
    deadline: _Time
    keeps: PositiveInt | None = None


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
    promised_at: _Time | None = None

    def place(self) -> Waiting:
        return Waiting(self.request(), self.arrival, self.since, self.seen_at, self.promised_at)


class _Consumed(_Wire):
    queue: str
    pool: str
    gpus: Annotated[float, Field(gt=0, allow_inf_nan=False, strict=False)]
    at: _Time


class _Status(_Wire):
    version: Literal[1, 2, 3, 4]
    summary: dict[str, Any] = {}
    leases: list[dict[str, Any]]
    waiting: list[dict[str, Any]]
    history: list[_Consumed] = []
    """Format 1 had none."""


def _lease(one: Lease) -> dict[str, Any]:
    times = {"grantedAt": _time(one.granted_at), "checkAt": _time(one.check_at)}
    return {"id": one.id, "pool": one.pool, **times, **_request(one.request), **_whereabouts(one)}


def _place(one: Waiting) -> dict[str, Any]:
    times = {"since": _time(one.since), "seenAt": _time(one.seen_at)}
    if one.promised_at is not None:
        times["promisedAt"] = _time(one.promised_at)
    return {"arrival": one.arrival, **times, **_request(one.request)}


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
    if any(request.spot != "no" or request.min_members is not None for request in requests):
        return VERSION
    if any(one.promised_at is not None for one in book.waiting):
        return VERSION
    return 3 if any(map(_needs_third, requests)) or any(map(_whereabouts, book.leases)) else 2


def _needs_third(request: LeaseRequest) -> bool:
    return request.members > 1 or request.attained > 0 or request.first_start is not None


def _request(request: LeaseRequest) -> dict[str, Any]:
    values = {told: getattr(request, name) for name, told in _NAMES.items()}
    return {told: value for told, value in values.items() if value is not None and (told, value) not in _DEFAULTS}


def _whereabouts(lease: Lease) -> dict[str, Any]:
    said: dict[str, Any] = {"nodes": list(lease.nodes)} if lease.nodes else {}
    if (leaving := lease.leaving) is not None:
        times = {"askedAt": _time(leaving.asked_at), "deadline": _time(leaving.deadline)}
        keeps = {} if leaving.keeps is None else {"keeps": leaving.keeps}
        said["leaving"] = {"uid": leaving.uid, "step": leaving.step, **times, **keeps}
    return said


def _time(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat().replace("+00:00", "Z")
