"""Which objects show what a `GPULedger` says: a pure function of it.

They are made from the object as it is stored, whose form the kind declares.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from tiphys.kube import Object
from tiphys.kube.resources import GPU_FLAVORS, GPU_LEASES, GPU_LEDGERS, GPU_QUEUES, Resource
from tiphys_controller.kubernetes.projections.counting import Counting, Sums

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
