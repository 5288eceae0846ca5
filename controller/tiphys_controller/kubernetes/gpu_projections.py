"""Shows the `GPULedger` as objects that kubectl can list: queues, flavors and leases.

The objects are a pure function of the ledger as it is stored. The service that
schedules counts the same sums; a test compares both.

A round costs one GET of the ledger, one for each new record of its log, and one write per changed object. Once a
minute the kinds are listed, to undo changes made by others. Rounds are seconds
apart and write a bounded number of objects, so that a burst of admissions never
becomes a burst of writes.
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
from tiphys.kube.ledger_log import LEDGER_LABEL, WholeLedgerReader
from tiphys.kube.resources import DEFAULT_LEDGER_NAME, GPU_FLAVORS, GPU_LEASES, GPU_LEDGERS, GPU_QUEUES, Resource
from tiphys_controller.kubernetes.events.messages import preempted_message
from tiphys_controller.kubernetes.metrics import ControllerMetrics
from tiphys_controller.kubernetes.watch_cache import WatchCache
from tiphys_controller.kubernetes.writer import ClusterWriter

ANY_TYPE = "*"
GpuSums = defaultdict[str, Counter[str]]
"""GPUs by queue and pool."""


class QuotaCounter:
    """Sums GPUs by queue and pool, under the queues and flavors of a ledger's ``spec``."""

    def __init__(self, spec: Object) -> None:
        self.flavors: dict[str, Object] = {one["name"]: one for one in spec.get("flavors") or ()}
        self._queues: dict[str, Object] = {one["name"]: one for one in spec.get("queues") or ()}

    def count_held(self, leases: Iterable[Object]) -> GpuSums:
        """GPUs held by leases."""
        return _sum_gpus((one, self._find_pool(one, one["pool"])) for one in leases)

    def count_pending(self, waiting: Iterable[Object]) -> GpuSums:
        """GPUs that requests wait for; a request counts against the first suitable flavor."""
        return _sum_gpus(
            (one, next(self._find_suitable_pools(one), None) or self._find_pool(one, ANY_TYPE)) for one in waiting
        )

    def _find_pool(self, entry: Object, pool: str) -> str:
        queue = self._queues.get(entry["queue"])
        kind = pool if pool in self.flavors and queue is not None else entry.get("gpuType") or pool
        if queue is None or kind in queue["gpus"]:
            return str(kind)
        alike = (
            name
            for name in self._order_pools(queue)
            if self.flavors and self._find_gpu_type(name) == self._find_gpu_type(kind)
        )
        return next(alike, ANY_TYPE)

    def _find_suitable_pools(self, one: Object) -> Iterator[str]:
        queue = self._queues.get(one["queue"])
        names = self._order_pools(queue) if self.flavors and queue is not None else []
        if one.get("spot") == "avoided":
            names.sort(key=lambda name: bool(self.flavors.get(name, {}).get("spot")))
        for name in names:
            flavor = self.flavors.get(name, {})
            uses = ("allowed", "only", "avoided") if flavor.get("spot") else ("no", "allowed", "avoided")
            memory = flavor.get("memory_mb") or one.get("minGpuMemoryMb", 0)
            suits = one.get("gpuType") in (None, self._find_gpu_type(name)) and memory >= one.get("minGpuMemoryMb", 0)
            if suits and (not flavor or one.get("spot", "no") in uses):
                yield name

    def _order_pools(self, queue: Object) -> list[str]:
        """Pools of a queue except ``*``, in the order in which the scheduler tries them."""
        first, declared = queue.get("flavor_order") or [], list(self.flavors)
        rest = [name for name in queue["gpus"] if name != ANY_TYPE and name not in first]
        return [*first, *sorted(rest, key=lambda name: (_declared_position(declared, name), name))]

    def _find_gpu_type(self, kind: str) -> Any:
        return self.flavors[kind]["gpu_type"] if kind in self.flavors else kind


def _declared_position(declared: list[str], name: str) -> int:
    return declared.index(name) if name in declared else len(declared)


def _sum_gpus(entries: Iterable[tuple[Object, str]]) -> GpuSums:
    sums: GpuSums = defaultdict(Counter)
    for one, pool in entries:
        sums[one["queue"]][pool] += one["gpus"]
    return sums


MAX_LEASES = 2500
"""Most leases that are shown."""
_NOT_IN_NAMES = re.compile(r"[^a-z0-9.-]+")
_LONGEST_PREFIX = 200


class ProjectionKey(NamedTuple):
    """Kind and name of a projection."""

    resource: Resource
    name: str


def build_projections(ledger: Object) -> dict[ProjectionKey, Object]:
    """Build the objects that should exist, in the namespace of the ledger."""
    spec, status = ledger.get("spec") or {}, ledger.get("status") or {}
    counting = QuotaCounter(spec)
    used, pending = counting.count_held(status.get("leases") or ()), counting.count_pending(status.get("waiting") or ())
    objects = [*_build_queues(ledger, used, pending), *_build_flavors(ledger, used, pending), *_build_leases(ledger)]
    return {ProjectionKey(resource, body["metadata"]["name"]): body for resource, body in objects}


def _build_queues(ledger: Object, used: GpuSums, pending: GpuSums) -> Iterator[tuple[Resource, Object]]:
    spec, status = ledger.get("spec") or {}, ledger.get("status") or {}
    declared = {queue["name"]: queue for queue in spec.get("queues") or ()}
    leases, waiting = status.get("leases") or (), status.get("waiting") or ()
    requests, holders = Counter(one["queue"] for one in waiting), Counter(one["queue"] for one in leases)
    for name in sorted({*declared, *used, *pending}):
        queue = declared.get(name)
        nominal: dict[str, int] = queue["gpus"] if queue else {}
        used_gpus = dict(sorted(used[name].items()))
        borrowed = {
            pool: gpus - nominal.get(pool, 0) for pool, gpus in used_gpus.items() if gpus > nominal.get(pool, 0)
        }
        counts = {
            "nominal": nominal,
            "used": used_gpus,
            "borrowed": borrowed,
            "pending": dict(sorted(pending[name].items())),
            "leases": holders[name],
            "requests": requests[name],
            **({"cohort": queue["cohort"]} if queue and queue.get("cohort") else {}),
        }
        columns = {what: _format_gpus(counts[what]) for what in ("nominal", "used", "borrowed", "pending")}
        condition = _build_admitting_condition(queue)
        yield (
            GPU_QUEUES,
            _build_object(ledger, _object_name(name), {"queue": name}, {**counts, "summary": columns, **condition}),
        )


def _build_flavors(ledger: Object, used: GpuSums, pending: GpuSums) -> Iterator[tuple[Resource, Object]]:
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
            **_build_condition("Offered", bool(quotas), *_offer_reason(quotas)),
        }
        yield GPU_FLAVORS, _build_object(ledger, _object_name(name), {"flavor": name}, status)


def _offer_reason(quotas: dict[str, int]) -> tuple[str, str]:
    return (
        ("QuotaDeclared", "")
        if quotas
        else ("NoQuota", "no queue has a quota of this flavor, so no step gets its GPUs")
    )


def _build_leases(ledger: Object) -> Iterator[tuple[Resource, Object]]:
    for lease in ((ledger.get("status") or {}).get("leases") or ())[:MAX_LEASES]:
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
            "summary": {"nodes": _format_nodes(nodes), "leavesBy": leaving["deadline"] if leaving else ""},
            **_build_condition(
                "Leaving",
                leaving is not None,
                *_leaving_reason(leaving),
                leaving["askedAt"] if leaving else lease["grantedAt"],
            ),
        }
        yield GPU_LEASES, _build_object(ledger, _object_name(lease["id"]), spec, status)


def _build_admitting_condition(queue: Object | None) -> Object:
    if queue is None:
        return _build_condition(
            "Admitting", False, "QueueUnknown", "the queue is no longer declared; running steps continue"
        )
    if queue.get("stopped"):
        return _build_condition(
            "Admitting", False, "QueueStopped", "the queue is stopped: no step starts; running steps continue"
        )
    return _build_condition("Admitting", True, "Open", "")


def _leaving_reason(leaving: Object | None) -> tuple[str, str]:
    if leaving is None:
        return "Stays", ""
    step = f"step {leaving['step']} of another workflow"
    if leaving.get("moves"):
        return "Moves", f"asked at {leaving['askedAt']} to save and move to other nodes, to make room for {step}"
    return "Preempted", f"asked at {leaving['askedAt']} to save and stop, for {step}"


def _build_condition(name: str, holds: bool, reason: str, message: str, since: str = "") -> Object:
    condition = {"type": name, "status": str(holds), "reason": reason, "message": message}
    return {"conditions": [{**condition, **({"lastTransitionTime": since} if since else {})}]}


def _build_object(ledger: Object, name: str, spec: Object, status: Object) -> Object:
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


def _object_name(text: str) -> str:
    """Turn a text into a Kubernetes name; a changed text gets a hash suffix, so that names stay unique."""
    plain = _NOT_IN_NAMES.sub("-", text.lower()).strip(".-")[:_LONGEST_PREFIX]
    if plain == text:
        return plain
    return f"{plain or 'queue'}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _format_gpus(gpus: dict[str, int]) -> str:
    return ", ".join(f"{pool} {count}" for pool, count in gpus.items() if count) or "0"


def _format_nodes(nodes: list[str]) -> str:
    return nodes[0] if len(nodes) == 1 else f"{nodes[0]} and {len(nodes) - 1} more" if nodes else ""


ROUND_SECONDS = 5.0
LIST_SECONDS = 60.0
WRITES_PER_ROUND = 100
_KINDS = (GPU_QUEUES, GPU_FLAVORS, GPU_LEASES)
_log = structlog.get_logger()


class ProjectionWriter:
    """Keeps the projections of one ledger up to date.

    Args:
        api: The API server.
        namespace: Namespace of ledger and projections.
        view: Workflows that get an Event if a step of theirs is preempted.
        writer: Writes only while this controller leads.
        metrics: Counters.
        monotonic: Monotonic clock in seconds.
        name: Name of the ledger.
    """

    def __init__(
        self,
        api: KubeApi,
        namespace: str,
        view: WatchCache,
        writer: ClusterWriter,
        metrics: ControllerMetrics,
        monotonic: Callable[[], float] = time.monotonic,
        name: str = DEFAULT_LEDGER_NAME,
    ) -> None:
        self._api = api
        self._namespace = namespace
        self._view = view
        self._writer = writer
        self._metrics = metrics
        self._monotonic = monotonic
        self._name = name
        self._ledger = WholeLedgerReader(api, namespace, name)
        self._existing: dict[ProjectionKey, Object] | None = None
        """The existing projections; None before the first list and after a failure."""
        self._listed_at = 0.0
        self._recorded_keys: set[str] = set()

    def run(self, stop: threading.Event) -> None:
        """Work until ``stop``."""
        while not stop.is_set():
            try:
                self.run_round()
            except FencedError:
                self._existing = None  # the new leader writes the projections
            except TiphysError as error:
                self._record_failure(str(error))
            except Exception:  # noqa: BLE001  the worker loop: the next round begins anew
                _log.exception("projection.crashed")
                self._record_failure("internal error; the log has the traceback")
            stop.wait(ROUND_SECONDS)

    def run_round(self) -> int:
        """Update the projections, up to the limit of one round; returns the number of writes.

        Raises:
            StoreError: the API server is out of reach.
            FencedError: another controller may lead by now.
        """
        ledger = self._ledger.read()
        desired = build_projections(ledger) if ledger is not None else {}
        present, writes = self._read_existing(), 0
        for write in self._plan_writes(desired, present):
            if writes == WRITES_PER_ROUND:
                break
            write()
            writes += 1
        self._record_preemptions(ledger or {})
        return writes

    def _read_existing(self) -> dict[ProjectionKey, Object]:
        if self._existing is None or self._monotonic() - self._listed_at >= LIST_SECONDS:
            labels = f"{LEDGER_LABEL}={self._name}"
            listed = ((kind, self._api.list(kind, self._namespace, labels).items) for kind in _KINDS)
            self._existing = {
                ProjectionKey(kind, one["metadata"]["name"]): one for kind, items in listed for one in items
            }
            self._listed_at = self._monotonic()
        return self._existing

    def _plan_writes(
        self, desired: dict[ProjectionKey, Object], present: dict[ProjectionKey, Object]
    ) -> Iterator[Callable[[], None]]:
        for key in present.keys() - desired.keys():
            yield lambda key=key: self._delete(present, key)  # type: ignore[misc]
        for key, body in desired.items():
            if not _is_up_to_date(present.get(key), body):
                yield lambda key=key, body=body: self._put(present, key, body)  # type: ignore[misc]

    def _put(self, present: dict[ProjectionKey, Object], key: ProjectionKey, body: Object) -> None:
        """Create or replace a projection. Specs are immutable, so a changed spec takes a new object."""
        previous = present.get(key)
        if previous is not None and previous.get("spec") != body["spec"]:
            self._delete(present, key)
            previous = None
        try:
            present[key] = self._writer.write_projection(key.resource, body, previous=previous)
        except FencedError:
            raise
        except (ConflictError, NotFoundError):
            self._existing = None  # another client changed it: list again

    def _delete(self, present: dict[ProjectionKey, Object], key: ProjectionKey) -> None:
        projection = present.pop(key)
        try:
            self._writer.delete_projection(key.resource, projection)
        except FencedError:
            raise
        except ConflictError:
            self._existing = None

    def _record_preemptions(self, ledger: Object) -> None:
        """Record Events of the Workflows with preempted steps."""
        leases = [one for one in (ledger.get("status") or {}).get("leases") or () if one.get("leaving")]
        workflows = {one.uid: one for one in self._view.workflows()} if leases else {}
        for lease in leases:
            message, workflow = preempted_message(lease), workflows.get(lease["uid"])
            if workflow is not None and message.key not in self._recorded_keys:
                self._writer.record_event(workflow, message)
                self._recorded_keys.add(message.key)
        self._recorded_keys &= {preempted_message(one).key for one in leases}

    def _record_failure(self, why: str) -> None:
        self._existing = None
        self._metrics.failures.labels("projection").inc()
        _log.warning("projection.failed", namespace=self._namespace, ledger=self._name, error=why)


def _is_up_to_date(existing: Object | None, desired: Object) -> bool:
    return existing is not None and all(existing.get(part) == desired[part] for part in ("spec", "status"))
