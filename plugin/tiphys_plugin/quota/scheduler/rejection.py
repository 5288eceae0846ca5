"""Why queues can never serve a request, whatever ends or is released."""

from collections.abc import Iterable
from dataclasses import replace

from tiphys_plugin.quota.lease import AdmissionReason, LeaseRequest, Rejected
from tiphys_plugin.quota.placement.place import PlacementFailure, find_placement
from tiphys_plugin.quota.queue import ANY_TYPE, Queue
from tiphys_plugin.quota.queues import Queues, format_gpus
from tiphys_plugin.quota.scheduler import pools


def find_rejection(queues: Queues, queue: Queue, request: LeaseRequest) -> Rejected | None:
    """Why the request can never be served under these queues; None if it can."""
    inventory = queues.gpu_inventory
    if queue.gpus and not any(pools.serves_resource(queues, pool, request) for pool in queue.gpus):
        return _reject_by_resource(queues, queue, request)
    wanted = {request.gpu_type} if request.gpu_type else set(request.gpu_types)
    if inventory is not None and wanted and not wanted & queues.gpu_types:
        gpu_types = ", ".join(sorted(queues.gpu_types)) or "none"
        return Rejected(
            AdmissionReason.NO_MATCHING_GPU_TYPE, f"the cluster has no {request.type_text}; it has: {gpu_types}"
        )
    if inventory is not None and not pools.find_suitable_kinds(queues, request):
        return _reject_by_kind(queues, inventory, request)
    eligible_pools = pools.find_eligible_pools(queues, queue, request)
    if not eligible_pools:
        declared = ", ".join(sorted(queue.gpus)) or "none"
        missing = request.type_text or "GPU that fits"
        message = f"queue {queue.name} has no {missing}; it has: {declared}"
        return Rejected(
            AdmissionReason.NO_MATCHING_GPU_TYPE, f"{message}{_untyped_request_hint(queues, queue, request)}"
        )
    return _reject_by_size(queues, queue, request, eligible_pools)


def _reject_by_resource(queues: Queues, queue: Queue, request: LeaseRequest) -> Rejected:
    existing = sorted({queues.flavor_set.resource_of(pool) for pool in queue.gpus})
    return Rejected(
        AdmissionReason.NO_MATCHING_GPU_TYPE,
        f"queue {queue.name} has no {request.resource}; it has: {', '.join(existing)}; name that in the step "
        f"(gpu_resource={existing[0]!r}), or declare a flavor with `resource: {request.resource}` and a quota of it",
    )


def _reject_by_kind(queues: Queues, gpu_kinds: Iterable[str], request: LeaseRequest) -> Rejected:
    """Rejects a request whose GPU type exists, but of which no GPU kind is suitable."""
    any_memory = replace(request, min_gpu_memory_mb=None)
    if not queues.flavors or any(pools.is_kind_suitable(queues, kind, any_memory) for kind in gpu_kinds):
        return Rejected(
            AdmissionReason.GPU_MEMORY_TOO_SMALL,
            f"no GPU of the wanted type has {request.min_gpu_memory_mb} MB; ask for less memory or another type",
        )
    message = f"no flavor of {request.type_text or 'any type'} is for this step{_spot_hint(queues, request)}"
    return Rejected(AdmissionReason.NO_MATCHING_GPU_TYPE, message)


def _untyped_request_hint(queues: Queues, queue: Queue, request: LeaseRequest) -> str:
    """Hint for a step without a GPU type in a queue whose only quota is ``*``; else the `_spot_hint`."""
    if queues.flavors and request.gpu_type is None and ANY_TYPE in queue.gpus:
        return (
            f"; beside flavors, {ANY_TYPE} is only for steps that name a type which has none: name one (gpu_type), or "
            "give the queue a quota of a flavor"
        )
    return _spot_hint(queues, request)


def _spot_hint(queues: Queues, request: LeaseRequest) -> str:
    """Hint that ``spot`` of the request may exclude flavors."""
    if not any(flavor.spot for flavor in queues.flavors) or request.spot == "allowed":
        return ""
    if request.spot == "only":
        return "; the step requests spot nodes only"
    return "; flavors of spot nodes are for steps with spot=True"


def _reject_by_size(queues: Queues, queue: Queue, request: LeaseRequest, eligible_pools: list[str]) -> Rejected | None:
    largest = max(queues.max_gpus(queue, pool) for pool in eligible_pools)
    if request.gpus > largest:
        borrowed = ", borrowed ones included" if largest > max(queue.gpus[pool] for pool in eligible_pools) else ""
        return Rejected(
            AdmissionReason.EXCEEDS_MAX_QUOTA,
            f"{format_requested_gpus(request)} can never be had: queue {queue.name} may hold at most "
            f"{largest}{borrowed}; "
            f"{_too_large_hint(queues, queue, request)}",
        )
    existing = {pool: pools.count_existing_gpus(queues, request, pool) for pool in eligible_pools}
    if request.gpus > max(existing.values()):
        return Rejected(
            _inventory_reason(queues),
            f"{_format_refused_gpus(queues, request)}: the cluster has {max(existing.values()):g}; ask for fewer",
        )
    largest_in_one_pool = max(min(queues.max_gpus(queue, pool), existing[pool]) for pool in eligible_pools)
    if request.gpus > largest_in_one_pool:
        return Rejected(
            _inventory_reason(queues),
            f"{_format_refused_gpus(queues, request)}: no single GPU type is in both the cluster and the "
            f"quota of queue {queue.name} in this number; ask for at most {largest_in_one_pool:g}",
        )
    return _reject_by_placement(queues, request, eligible_pools)


def _reject_by_placement(queues: Queues, request: LeaseRequest, eligible_pools: list[str]) -> Rejected | None:
    """Rejects a request that not even an empty cluster could place; None if it could."""
    if queues.empty_cluster_capacity is None:
        return _reject_without_nodes(request)
    placements = [
        find_placement(
            queues.empty_cluster_capacity, pools.build_gang_request(queues, request, pool), queues.placement_policy
        )
        for pool in eligible_pools
    ]
    failures = [placement for placement in placements if isinstance(placement, PlacementFailure)]
    if len(failures) < len(placements):
        return None
    nearest = max(failures, key=lambda failure: (failure.placeable_members, failure.largest_node_gpus))
    return Rejected(
        AdmissionReason(nearest.reason.value),
        f"{_format_refused_gpus(queues, request)}: {nearest.message} even if nothing else ran; "
        f"ask for at most {nearest.largest_node_gpus} on one node, or for several nodes",
    )


def _reject_without_nodes(request: LeaseRequest) -> Rejected | None:
    """Rejects a gang whose pods must share a domain of the topology, where the service knows no nodes."""
    if request.members == 1 or (request.within is None and request.tensor_parallel == 1):
        return None
    return Rejected(
        AdmissionReason.TOPOLOGY_PLACEMENT_FAILED,
        "the pods of the step must be near each other (within, tensor_parallel), and the queues know no nodes; declare "
        "nodes in the queue file, or read those of the cluster (cluster_nodes), or drop the condition",
    )


def _inventory_reason(queues: Queues) -> AdmissionReason:
    """Reason of a request for more GPUs than exist. Nodes of a cluster may be added, a declared inventory is final."""
    return AdmissionReason.WAITING_FOR_INVENTORY if queues.has_current_nodes else AdmissionReason.EXCEEDS_MAX_QUOTA


def _format_refused_gpus(queues: Queues, request: LeaseRequest) -> str:
    return f"{format_requested_gpus(request)} {'cannot' if queues.has_current_nodes else 'can never'} be had"


def _too_large_hint(queues: Queues, queue: Queue, request: LeaseRequest) -> str:
    """Hint for a request that is too large for its queue."""
    ceilings = {
        q.name: max((queues.max_gpus(q, p) for p in pools.find_eligible_pools(queues, q, request)), default=0)
        for q in queues.queues
        if q.accepts(request.namespace, request.priority)
    }
    name = max(sorted(ceilings), key=lambda n: ceilings[n])
    if ceilings[name] >= request.gpus:
        return f"queue {name} may hold {ceilings[name]}"
    if ceilings[name] > ceilings[queue.name]:
        return f"ask for fewer; the largest quota is {ceilings[name]}, of queue {name}"
    return "ask for fewer"


def format_requested_gpus(request: LeaseRequest) -> str:
    """The GPUs of a request for people, such as ``4 A100``."""
    return format_gpus(request.gpus, request.type_text)
