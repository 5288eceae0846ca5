"""What Tiphys writes into the status of a `Workload`: conditions, and the admission of pods that run already."""

from datetime import datetime

from tiphys.kube import Object
from tiphys_plugin.quota.kueue.workload import POD_SET, KueueWorkload
from tiphys_plugin.quota.lease import LeaseRequest


def condition_is_true(manifest: Object, kind: str) -> bool:
    """Whether the condition of this type is true."""
    conditions = manifest.get("status", {}).get("conditions") or []
    return any(condition["type"] == kind and condition["status"] == "True" for condition in conditions)


def with_condition(
    manifest: Object, kind: str, is_true: bool, reason: str, message: str, now: datetime
) -> list[Object]:
    """The conditions of a Workload with one of them set."""
    others = [
        condition for condition in manifest.get("status", {}).get("conditions") or [] if condition["type"] != kind
    ]
    added = {
        "type": kind,
        "status": "True" if is_true else "False",
        "reason": reason or "Pending",
        "message": message[:32768],
        "lastTransitionTime": now.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "observedGeneration": manifest["metadata"].get("generation", 1),
    }
    return [*others, added]


def without_reservation(manifest: Object, reason: str, message: str, now: datetime) -> Object:
    """The status after the end of an eviction, as Kueue's ``jobframework`` writes it."""
    status = {name: value for name, value in manifest["status"].items() if name != "admission"}
    for kind, is_true, why in (
        ("QuotaReserved", False, "Pending"),
        ("Admitted", False, "NoReservation"),
        ("Requeued", True, reason),
    ):
        status["conditions"] = with_condition({**manifest, "status": status}, kind, is_true, why, message, now)
    return status


def with_reservation(
    workload: KueueWorkload, cluster_queue: str, flavor: str, request: LeaseRequest, now: datetime
) -> Object:
    """The status of an admitted Workload, as Kueue's importer writes it for pods that run already."""
    assignment = {
        "name": POD_SET,
        "count": request.members,
        "flavors": {request.resource: flavor},
        "resourceUsage": {request.resource: str(request.gpus)},
    }
    status = {**workload.manifest.get("status", {})}
    status["admission"] = {"clusterQueue": cluster_queue, "podSetAssignments": [assignment]}
    message = "the pods of the attempt run already"
    for kind in ("QuotaReserved", "Admitted"):
        status["conditions"] = with_condition(
            {**workload.manifest, "status": status}, kind, True, "Restored", message, now
        )
    return status
