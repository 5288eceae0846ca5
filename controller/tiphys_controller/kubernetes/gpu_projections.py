"""Which objects show what a `GPULedger` says: a pure function of it.

They are made from the object as it is stored, whose form the kind declares.

Against which quota leases and requests count, by flavor or GPU type: sums from the ledger as it is stored.

The words are those of the service, which decides: a test holds these sums
against its own.

Keeps the projections as the ledger is, while this controller leads.

A round costs one GET of the ledger, and one write for each queue or lease that
has changed since the last; once a minute, a list of both kinds, by which changes
of others are found and undone. Rounds are seconds apart and write a bounded
number of objects, so that a burst of admissions never becomes one of writes.
"""

import hashlib
import re
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import structlog

from tiphys.errors import ConflictError, FencedError, NotFoundError, TiphysError
from tiphys.kube import KubeApi, Object
from tiphys.kube.resources import GPU_FLAVORS, GPU_LEASES, GPU_LEDGERS, GPU_QUEUES, LEDGER_NAME, Resource
from tiphys_controller.kubernetes.events.messages import leaving
from tiphys_controller.kubernetes.metrics import Metrics
from tiphys_controller.kubernetes.watch_cache import ClusterView
from tiphys_controller.kubernetes.writer import Writer

ANY_TYPE = "*"
Sums = defaultdict[str, Counter[str]]
"""GPUs by queue and pool."""


class Counting:
    """Sums under the queues and flavors of ``spec``."""

    def __init__(self, spec: Object) -> None:
        self.flavors: dict[str, Object] = {one["name"]: one for one in spec.get("flavors") or ()}
        self._queues: dict[str, Object] = {one["name"]: one for one in spec.get("queues") or ()}

    def held(self, leases: Iterable[Object]) -> Sums:
        """What leases hold."""
        return _summed((one, self._pool(one, one["pool"])) for one in leases)

    def pending(self, waiting: Iterable[Object]) -> Sums:
        """What is waited for: of flavors, the first that suits."""
        return _summed((one, next(self._suiting(one), None) or self._pool(one, ANY_TYPE)) for one in waiting)

    def _pool(self, one: Object, given: str) -> str:
        queue = self._queues.get(one["queue"])
        kind = given if given in self.flavors and queue is not None else one.get("gpuType") or given
        if queue is None or kind in queue["gpus"]:
            return str(kind)
        alike = (name for name in self._named(queue) if self.flavors and self._type(name) == self._type(kind))
        return next(alike, ANY_TYPE)

    def _suiting(self, one: Object) -> Iterator[str]:
        queue = self._queues.get(one["queue"])
        names = self._named(queue) if self.flavors and queue is not None else []
        if one.get("spot") == "avoided":
            names.sort(key=lambda name: bool(self.flavors.get(name, {}).get("spot")))
        for name in names:
            flavor = self.flavors.get(name, {})
            uses = ("allowed", "only", "avoided") if flavor.get("spot") else ("no", "allowed", "avoided")
            memory = flavor.get("memory_mb") or one.get("minGpuMemoryMb", 0)
            suits = one.get("gpuType") in (None, self._type(name)) and memory >= one.get("minGpuMemoryMb", 0)
            if suits and (not flavor or one.get("spot", "no") in uses):
                yield name

    def _named(self, queue: Object) -> list[str]:
        """Its pools but ``*``, in the order in which they are tried."""
        first, declared = queue.get("flavor_order") or [], list(self.flavors)
        rest = [name for name in queue["gpus"] if name != ANY_TYPE and name not in first]
        return [*first, *sorted(rest, key=lambda name: (_place(declared, name), name))]

    def _type(self, kind: str) -> Any:
        return self.flavors[kind]["gpu_type"] if kind in self.flavors else kind


def _place(declared: list[str], name: str) -> int:
    return declared.index(name) if name in declared else len(declared)


def _summed(entries: Iterable[tuple[Object, str]]) -> Sums:
    sums: Sums = defaultdict(Counter)
    for one, pool in entries:
        sums[one["queue"]][pool] += one["gpus"]
    return sums


LEDGER_LABEL = "tiphys.dev/ledger"
MOST_LEASES = 2500
"""As many as a ledger holds at the most."""
_NOT_IN_NAMES = re.compile(r"[^a-z0-9.-]+")
_LONGEST_PREFIX = 200


class Key(NamedTuple):
    """A projection, by kind and name."""

    resource: Resource
    name: str


def projections(ledger: Object) -> dict[Key, Object]:
    """The objects that there should be, in the namespace of the ledger."""
    spec, status = ledger.get("spec") or {}, ledger.get("status") or {}
    counting = Counting(spec)
    used, pending = counting.held(status.get("leases") or ()), counting.pending(status.get("waiting") or ())
    found = [*_queues(ledger, used, pending), *_flavors(ledger, used, pending), *_leases(ledger)]
    return {Key(resource, body["metadata"]["name"]): body for resource, body in found}


def _queues(ledger: Object, used: Sums, pending: Sums) -> Iterator[tuple[Resource, Object]]:
    spec, status = ledger.get("spec") or {}, ledger.get("status") or {}
    declared = {queue["name"]: queue for queue in spec.get("queues") or ()}
    leases, waiting = status.get("leases") or (), status.get("waiting") or ()
    requests, holders = Counter(one["queue"] for one in waiting), Counter(one["queue"] for one in leases)
    for name in sorted({*declared, *used, *pending}):
        queue = declared.get(name)
        nominal: dict[str, int] = queue["gpus"] if queue else {}
        held = dict(sorted(used[name].items()))
        beyond = {pool: gpus - nominal.get(pool, 0) for pool, gpus in held.items() if gpus > nominal.get(pool, 0)}
        told = {
            "nominal": nominal,
            "used": held,
            "borrowed": beyond,
            "pending": dict(sorted(pending[name].items())),
            "leases": holders[name],
            "requests": requests[name],
            **({"cohort": queue["cohort"]} if queue and queue.get("cohort") else {}),
        }
        columns = {what: _words(told[what]) for what in ("nominal", "used", "borrowed", "pending")}
        condition = _admitting(queue)
        yield GPU_QUEUES, _object(ledger, _name(name), {"queue": name}, {**told, "summary": columns, **condition})


def _flavors(ledger: Object, used: Sums, pending: Sums) -> Iterator[tuple[Resource, Object]]:
    spec = ledger.get("spec") or {}
    for flavor in spec.get("flavors") or ():
        name, labels = flavor["name"], flavor.get("node_labels") or {}
        quotas = {queue["name"]: queue["gpus"][name] for queue in spec["queues"] if name in queue["gpus"]}
        status = {
            "gpuType": flavor["gpu_type"],
            "spot": flavor.get("spot", False),
            "nodeLabels": labels,
            "tolerations": flavor.get("tolerations") or [],
            **({"memoryMb": flavor["memory_mb"]} if flavor.get("memory_mb") else {}),
            "nominal": sum(quotas.values()),
            "used": sum(pools[name] for pools in used.values()),
            "pending": sum(pools[name] for pools in pending.values()),
            "queues": sorted(quotas),
            "summary": {"nodeLabels": ", ".join(f"{key}={value}" for key, value in sorted(labels.items()))},
            **_conditions("Offered", bool(quotas), *_who_offers(quotas)),
        }
        yield GPU_FLAVORS, _object(ledger, _name(name), {"flavor": name}, status)


def _who_offers(quotas: dict[str, int]) -> tuple[str, str]:
    return ("QuotaDeclared", "") if quotas else ("NoQuota", "no queue has a quota of it, so nobody gets its GPUs")


def _leases(ledger: Object) -> Iterator[tuple[Resource, Object]]:
    for lease in ((ledger.get("status") or {}).get("leases") or ())[:MOST_LEASES]:
        spec = {
            key: lease[key] for key in ("queue", "gpus", "run", "step", "namespace", "workflow", "uid") if key in lease
        }
        leaving = lease.get("leaving")
        nodes = list(dict.fromkeys(lease.get("nodes") or ()))
        status = {
            "attempt": lease.get("attempt", 1),
            "gpuType": lease.get("gpuType") or lease["pool"],
            "pool": lease["pool"],
            "nodes": nodes,
            "grantedAt": lease["grantedAt"],
            **({"leaving": leaving} if leaving else {}),
            "summary": {"nodes": _shown(nodes), "leavesBy": leaving["deadline"] if leaving else ""},
            **_conditions(
                "Leaving",
                leaving is not None,
                *_why_leaving(leaving),
                leaving["askedAt"] if leaving else lease["grantedAt"],
            ),
        }
        yield GPU_LEASES, _object(ledger, _name(lease["id"]), spec, status)


def _admitting(queue: Object | None) -> Object:
    if queue is None:
        return _conditions("Admitting", False, "QueueUnknown", "no such queue is declared any more; what runs goes on")
    if queue.get("stopped"):
        return _conditions("Admitting", False, "QueueStopped", "nothing new starts; what runs goes on")
    return _conditions("Admitting", True, "Open", "")


def _why_leaving(leaving: Object | None) -> tuple[str, str]:
    if leaving is None:
        return "Stays", ""
    return "Preempted", f"asked at {leaving['askedAt']} to save and go, for step {leaving['step']} of another workflow"


def _conditions(name: str, holds: bool, reason: str, message: str, since: str = "") -> Object:
    told = {"type": name, "status": str(holds), "reason": reason, "message": message}
    return {"conditions": [{**told, **({"lastTransitionTime": since} if since else {})}]}


def _object(ledger: Object, name: str, spec: Object, status: Object) -> Object:
    metadata = ledger["metadata"]
    owner = {"apiVersion": GPU_LEDGERS.api_version, "kind": GPU_LEDGERS.kind, "name": metadata["name"]}
    return {
        "metadata": {
            "name": name,
            "namespace": metadata["namespace"],
            "labels": {LEDGER_LABEL: metadata["name"]},
            "ownerReferences": [{**owner, "uid": metadata["uid"]}],
        },
        "spec": spec,
        "status": status,
    }


def _name(text: str) -> str:
    """What Kubernetes takes as a name; a text that is none gets one that no other text gets."""
    plain = _NOT_IN_NAMES.sub("-", text.lower()).strip(".-")[:_LONGEST_PREFIX]
    if plain == text:
        return plain
    return f"{plain or 'queue'}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _words(gpus: dict[str, int]) -> str:
    return ", ".join(f"{pool} {count}" for pool, count in gpus.items() if count) or "0"


def _shown(nodes: list[str]) -> str:
    return nodes[0] if len(nodes) == 1 else f"{nodes[0]} and {len(nodes) - 1} more" if nodes else ""


ROUND_SECONDS = 5.0
LIST_SECONDS = 60.0
WRITES_OF_A_ROUND = 100
_KINDS = (GPU_QUEUES, GPU_FLAVORS, GPU_LEASES)
_log = structlog.get_logger()


class Projector:
    """Projects the ledger ``name`` of a namespace.

    Args:
        api: The API server.
        namespace: Where ledger and projections are.
        view: Workflows, to whom it is told that they were asked to leave.
        writer: Writes only while this controller leads.
        metrics: Counters.
        monotonic: A clock in seconds that never jumps.
        name: Name of the ledger.
    """

    def __init__(
        self,
        api: KubeApi,
        namespace: str,
        view: ClusterView,
        writer: Writer,
        metrics: Metrics,
        monotonic: Callable[[], float] = time.monotonic,
        name: str = LEDGER_NAME,
    ) -> None:
        self._api = api
        self._namespace = namespace
        self._view = view
        self._writer = writer
        self._metrics = metrics
        self._monotonic = monotonic
        self._name = name
        self._present: dict[Key, Object] | None = None
        """What is there, as far as is known; None before the first list and after a failure."""
        self._listed_at = 0.0
        self._told: set[str] = set()

    def run(self, over: threading.Event) -> None:
        """Work until ``over``."""
        while not over.is_set():
            try:
                self.round()
            except FencedError:
                self._present = None  # whoever leads now does it
            except TiphysError as error:
                self._failed(str(error))
            except Exception:  # noqa: BLE001  the worker loop: the next round begins anew
                _log.exception("projection.crashed")
                self._failed("a bug; the log has the trace")
            over.wait(ROUND_SECONDS)

    def round(self) -> int:
        """Bring the projections up to date, as far as one round may; the number of writes.

        Raises:
            StoreError: the API server is out of reach.
            FencedError: another controller may lead by now.
        """
        ledger = self._api.get(GPU_LEDGERS, self._namespace, self._name)
        wanted = projections(ledger) if ledger is not None else {}
        present, writes = self._known(), 0
        for write in self._writes(wanted, present):
            if writes == WRITES_OF_A_ROUND:
                break
            write()
            writes += 1
        self._tell_those_who_leave(ledger or {})
        return writes

    def _known(self) -> dict[Key, Object]:
        if self._present is None or self._monotonic() - self._listed_at >= LIST_SECONDS:
            labels = f"{LEDGER_LABEL}={self._name}"
            found = ((kind, self._api.list(kind, self._namespace, labels).items) for kind in _KINDS)
            self._present = {Key(kind, one["metadata"]["name"]): one for kind, items in found for one in items}
            self._listed_at = self._monotonic()
        return self._present

    def _writes(self, wanted: dict[Key, Object], present: dict[Key, Object]) -> Iterator[Callable[[], None]]:
        for key in present.keys() - wanted.keys():
            yield lambda key=key: self._delete(present, key)  # type: ignore[misc]
        for key, body in wanted.items():
            if not _is_same(present.get(key), body):
                yield lambda key=key, body=body: self._put(present, key, body)  # type: ignore[misc]

    def _put(self, present: dict[Key, Object], key: Key, body: Object) -> None:
        """Make it, or write over it; a spec that cannot be changed takes a new object."""
        before = present.get(key)
        if before is not None and before.get("spec") != body["spec"]:
            self._delete(present, key)
            before = None
        try:
            present[key] = self._writer.project(key.resource, body, over=before)
        except FencedError:
            raise
        except (ConflictError, NotFoundError):
            self._present = None  # somebody else was here: look again

    def _delete(self, present: dict[Key, Object], key: Key) -> None:
        gone = present.pop(key)
        try:
            self._writer.withdraw(key.resource, gone)
        except FencedError:
            raise
        except ConflictError:
            self._present = None

    def _tell_those_who_leave(self, ledger: Object) -> None:
        """Events on the Workflows whose trainings were asked to save and go."""
        leases = [one for one in (ledger.get("status") or {}).get("leases") or () if one.get("leaving")]
        workflows = {one.uid: one for one in self._view.workflows()} if leases else {}
        for lease in leases:
            news, workflow = leaving(lease), workflows.get(lease["uid"])
            if workflow is not None and news.key not in self._told:
                self._writer.tell(workflow, news)
                self._told.add(news.key)
        self._told &= {leaving(one).key for one in leases}

    def _failed(self, why: str) -> None:
        self._present = None
        self._metrics.failures.labels("projection").inc()
        _log.warning("projection.failed", namespace=self._namespace, ledger=self._name, error=why)


def _is_same(found: Object | None, wanted: Object) -> bool:
    return found is not None and all(found.get(part) == wanted[part] for part in ("spec", "status"))
