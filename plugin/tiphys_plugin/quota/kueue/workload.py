"""The Kueue `Workload` of one attempt: what Tiphys writes into it, and what its conditions say.

Kueue has no job behind the object: Tiphys creates the Workload before any pod
exists and finishes it after the last pod is gone. The request of the step and the
grant are annotations, so a service that starts later knows both. Source of the
conditions: Kueue, ``apis/kueue/v1beta2/workload_types.go``.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from tiphys.errors import IntegrityError
from tiphys.kube import Object
from tiphys.protocol.gang import HOSTNAME_LABEL, WORKFLOW_UID_LABEL
from tiphys.protocol.step_spec import ATTEMPT_LABEL, GPU_TYPE_LABEL, RUN_LABEL, STEP_LABEL
from tiphys.records import task_name
from tiphys_plugin.quota.flavors import Flavor, Toleration
from tiphys_plugin.quota.lease import AdmissionReason, Lease, LeaseRequest, PendingRequest, PreemptionNotice

POD_SET = "main"
"""Name of the only pod set: all members of an attempt are equal."""
MANAGED_BY = "app.kubernetes.io/managed-by=tiphys"
SPOT_LABEL = "tiphys.dev/spot"
"""Label of the ResourceFlavors of spot nodes, with the value ``true``."""
REQUEST_ANNOTATION, GRANT_ANNOTATION = "tiphys.dev/lease-request", "tiphys.dev/lease-grant"
EVICTION_GRACE = timedelta(seconds=30)
"""Time to save that is shown for an evicted attempt; the grace period of its pods decides."""
_LABEL_LENGTH = 63
_PREEMPTOR = re.compile(r"\(UID: ([-0-9a-f]+)")
_REQUESTS = TypeAdapter(LeaseRequest)


class AssignedFlavor(Flavor):
    """The `ResourceFlavor` of an assignment. Its labels alone select the nodes: it may be of no single GPU type."""

    @property
    def node_selector(self) -> dict[str, str]:
        """Node selector of the pods."""
        return dict(self.node_labels)


class Grant(BaseModel):
    """What an attempt was granted. Written by the service that answers the step, before it answers."""

    model_config = ConfigDict(frozen=True)

    granted_at: datetime
    flavor: AssignedFlavor
    members: int
    """Members that the attempt has now; an elastic gang may lose some."""
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Condition:
    """A condition of a Workload."""

    is_true: bool
    reason: str
    message: str
    since: datetime


@dataclass(frozen=True)
class KueueWorkload:
    """A Workload of Tiphys, as read from the API server."""

    namespace: str
    name: str
    uid: str
    created_at: datetime
    request: LeaseRequest
    grant: Grant | None
    conditions: Mapping[str, Condition]
    manifest: Object

    @property
    def lease_id(self) -> str:
        """Id of the lease that the Workload stands for."""
        return f"{self.namespace}/{self.name}"

    def find_true(self, kind: str) -> Condition | None:
        """The condition of this type, if it is true."""
        condition = self.conditions.get(kind)
        return condition if condition is not None and condition.is_true else None

    @property
    def is_finished(self) -> bool:
        return self.find_true("Finished") is not None

    @property
    def is_deleting(self) -> bool:
        return "deletionTimestamp" in self.manifest["metadata"]

    @property
    def is_reserved(self) -> bool:
        """Whether Kueue counts GPUs for it."""
        return bool(self.manifest.get("status", {}).get("admission"))

    @property
    def is_on_hold(self) -> bool:
        """Whether an administrator, or Kueue after too many tries, has set it inactive."""
        return self.manifest["spec"].get("active") is False

    @property
    def is_admitted(self) -> bool:
        """Whether Kueue admits the Workload now, and does not take the GPUs back."""
        return self.find_true("Admitted") is not None and self.eviction is None

    @property
    def eviction(self) -> Condition | None:
        """Why Kueue takes the GPUs back; None if it does not."""
        if (evicted := self.find_true("Evicted")) is not None or self.grant is None:
            return evicted
        reserved = self.conditions.get("QuotaReserved")
        return reserved if reserved is not None and not reserved.is_true else None

    @property
    def preemptor_uid(self) -> str:
        """UID of the Workload for which Kueue preempts this one; empty if it is unknown."""
        match = _PREEMPTOR.search(self.eviction.message) if self.eviction is not None else None
        return match[1] if match else ""

    @property
    def assignment(self) -> dict[str, Any]:
        """Kueue's assignment of the pod set; empty if there is none."""
        assignments = (self.manifest.get("status", {}).get("admission") or {}).get("podSetAssignments") or [{}]
        first: dict[str, Any] = assignments[0]
        return first

    @property
    def flavor_name(self) -> str:
        """Name of the `ResourceFlavor` that Kueue assigned; empty if it assigned none."""
        return str((self.assignment.get("flavors") or {}).get(self.request.resource, ""))

    @property
    def assigned_nodes(self) -> tuple[str, ...]:
        """The node of each member by Kueue's Topology Aware Scheduling; empty if it assigned none, or only racks."""
        topology = self.assignment.get("topologyAssignment") or {}
        if not topology or topology["levels"][-1] != HOSTNAME_LABEL:
            return ()
        return tuple(_expand_slices(topology["slices"]))

    @property
    def assigned_members(self) -> int:
        """Members that Kueue admitted: of an elastic gang possibly fewer than it can use."""
        return int(self.assignment.get("count") or self.request.members)


def _expand_slices(slices: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The lowest domain of each pod; values and counts that are equal for all domains of a slice are written once."""
    for part in slices:
        values, counts = part["valuesPerLevel"][-1], part["podCounts"]
        for index in range(part["domainCount"]):
            individual = values.get("individual") or {}
            prefix, suffix = individual.get("prefix", ""), individual.get("suffix", "")
            name = values.get("universal") or f"{prefix}{individual['roots'][index]}{suffix}"
            count = counts["universal"] if "universal" in counts else counts["individual"][index]
            yield from [name] * count


def workload_name(request: LeaseRequest) -> str:
    """Name of the Workload of an attempt. A repeated request has the same, so it finds what an earlier one created."""
    key = json.dumps([*request.key, request.attempt])
    return f"tiphys-{hashlib.sha256(key.encode(errors='surrogatepass')).hexdigest()[:24]}"


def split_lease_id(lease: str) -> tuple[str, str]:
    """Namespace and name of the Workload of a lease. Both are empty for a lease of another authority."""
    namespace, _, name = lease.partition("/")
    return (namespace, name) if name else ("", "")


def build_workload(request: LeaseRequest, spot_flavors: Sequence[Object] = (), *, is_running: bool = False) -> Object:
    """The Workload that asks for the GPUs of ``request``.

    An elastic gang asks for all the members that it can use, and accepts fewer (Kueue, "Partial Admission").

    ``spot_flavors`` are the ResourceFlavors of spot nodes, for a request that may use them. ``is_running``: an elastic
    gang has its members already.
    """
    pod_spec = {**_pod_spec(request), **_spot_fields(request, spot_flavors)}
    pod_set: Object = {"name": POD_SET, "count": request.members, "template": {"spec": pod_spec}}
    if request.max_members is not None and not is_running:
        pod_set.update(count=request.max_members, minCount=request.members)
    stored = _REQUESTS.dump_json(request, by_alias=True, exclude_defaults=True)
    return {
        "metadata": {
            "name": workload_name(request),
            "namespace": request.namespace,
            "labels": _labels(request),
            "annotations": {REQUEST_ANNOTATION: stored.decode()},
        },
        "spec": {"queueName": request.queue, "priority": request.priority, "podSets": [pod_set]},
    }


def _pod_spec(request: LeaseRequest) -> Object:
    gpus = {request.resource: str(request.gpus_per_member)}
    selector: Object = {"nodeSelector": {GPU_TYPE_LABEL: request.gpu_type}} if request.gpu_type else {}
    if request.gpu_types:
        expression = {"key": GPU_TYPE_LABEL, "operator": "In", "values": list(request.gpu_types)}
        terms = {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}
        affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}
        selector = {"affinity": affinity}
    # Kueue reads the template only for its requests and node selectors; no pod is made of it.
    container = {"name": "main", "image": "tiphys.invalid/none", "resources": {"requests": gpus, "limits": gpus}}
    return {**selector, "containers": [container], "restartPolicy": "Never"}


def is_spot_flavor(flavor: Object) -> bool:
    """Whether the administrator has marked a ResourceFlavor as one of spot nodes."""
    return (flavor["metadata"].get("labels") or {}).get(SPOT_LABEL) == "true"


def _spot_fields(request: LeaseRequest, spot_flavors: Sequence[Object]) -> Object:
    """Fields of a pod spec by which Kueue may, or with ``only`` must, assign a flavor of spot nodes.

    Other requests are kept from these flavors by their taints.
    """
    tolerations = [toleration for flavor in spot_flavors for toleration in _taint_tolerations(flavor)]
    fields: Object = {"tolerations": tolerations} if tolerations else {}
    if request.spot == "only":
        terms = [{"matchExpressions": _match_labels(flavor)} for flavor in spot_flavors]
        required = {"nodeSelectorTerms": terms}
        fields["affinity"] = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}
    return fields


def _match_labels(flavor: Object) -> list[Object]:
    labels = (flavor.get("spec") or {}).get("nodeLabels") or {}
    return [{"key": key, "operator": "In", "values": [value]} for key, value in labels.items()]


def _taint_tolerations(flavor: Object) -> list[Object]:
    """Tolerations of the taints that the nodes of a flavor have."""
    return [
        {"key": taint["key"], "operator": "Equal", "value": taint.get("value", ""), "effect": taint["effect"]}
        for taint in (flavor.get("spec") or {}).get("nodeTaints") or []
    ]


def _labels(request: LeaseRequest) -> dict[str, str]:
    """By these labels an administrator finds the Workloads of a run. The request itself is an annotation."""
    labels = {
        RUN_LABEL: request.run,
        STEP_LABEL: task_name(request.step),
        ATTEMPT_LABEL: str(request.attempt),
        WORKFLOW_UID_LABEL: request.uid,
    }
    key, _, value = MANAGED_BY.partition("=")
    return {key: value, **{name: text for name, text in labels.items() if len(text) <= _LABEL_LENGTH}}


def build_assigned_flavor(flavor: Object, workload: Object) -> AssignedFlavor:
    """The `ResourceFlavor` that Kueue assigned, with what the admission checks of the Workload add to its pods."""
    spec = flavor.get("spec") or {}
    labels: dict[str, str] = {}
    tolerations: list[Object] = []
    updates = [
        update
        for check in workload.get("status", {}).get("admissionChecks") or []
        for update in check.get("podSetUpdates") or []
    ]
    if is_spot_flavor(flavor):
        tolerations += _taint_tolerations(flavor)
    for source in (spec, *updates):
        labels.update(source.get("nodeLabels") or source.get("nodeSelector") or {})
        tolerations += source.get("tolerations") or []
    return AssignedFlavor(
        name=flavor["metadata"]["name"],
        gpu_type=labels.get(GPU_TYPE_LABEL, flavor["metadata"]["name"]),
        node_labels=labels,
        tolerations=tuple(_parse_toleration(toleration) for toleration in tolerations if toleration.get("key")),
        spot=is_spot_flavor(flavor),
    )


def _parse_toleration(manifest: Object) -> Toleration:
    fields = {name: manifest[name] for name in ("key", "operator", "value", "effect") if manifest.get(name)}
    return Toleration.model_validate(fields)


def parse_workload(manifest: Object) -> KueueWorkload:
    """Parse a Workload of Tiphys.

    Raises:
        IntegrityError: it is not one that Tiphys wrote, or its annotations were changed.
    """
    metadata = manifest["metadata"]
    annotations = metadata.get("annotations") or {}
    where = f"Workload {metadata.get('namespace')}/{metadata['name']}"
    if REQUEST_ANNOTATION not in annotations:
        raise IntegrityError(f"{where} has no annotation {REQUEST_ANNOTATION}, so it is not one of Tiphys")
    try:
        request = _REQUESTS.validate_json(annotations[REQUEST_ANNOTATION])
        grant = Grant.model_validate_json(annotations[GRANT_ANNOTATION]) if GRANT_ANNOTATION in annotations else None
    except ValidationError as error:
        raise IntegrityError(f"{where} has damaged annotations of Tiphys: {error}") from error
    request = replace(request, namespace=metadata["namespace"])  # a tenant may write the annotation, not the namespace
    if workload_name(request) != metadata["name"]:
        raise IntegrityError(f"{where} has the annotations of another attempt")
    return KueueWorkload(
        namespace=metadata["namespace"],
        name=metadata["name"],
        uid=metadata["uid"],
        created_at=datetime.fromisoformat(metadata["creationTimestamp"]),
        request=request,
        grant=grant,
        conditions=_parse_conditions(manifest.get("status", {}).get("conditions") or []),
        manifest=manifest,
    )


def _parse_conditions(conditions: Sequence[Mapping[str, Any]]) -> dict[str, Condition]:
    return {
        condition["type"]: Condition(
            condition["status"] == "True",
            condition.get("reason", ""),
            condition.get("message", ""),
            datetime.fromisoformat(condition["lastTransitionTime"]),
        )
        for condition in conditions
    }


def find_leases(workloads: Sequence[KueueWorkload]) -> Iterator[Lease]:
    """The leases among ``workloads``: granted, and not finished. Evicted ones are marked as preempted."""
    by_uid = {workload.uid: workload.request for workload in workloads}
    for workload in workloads:
        if workload.grant is None or workload.is_finished:
            continue
        notice = None
        if (eviction := workload.eviction) is not None:
            preemptor = by_uid.get(workload.preemptor_uid)
            uid, step = preemptor.workflow_step if preemptor else ("", "")
            reason = "" if preemptor else f"Kueue: {eviction.reason}: {eviction.message}"
            notice = PreemptionNotice(uid, step, eviction.since, eviction.since + EVICTION_GRACE, reason=reason)
        grant = workload.grant
        yield Lease(
            workload.lease_id,
            workload.request.with_members(grant.members),
            grant.flavor.name,
            grant.granted_at,
            grant.granted_at,
            grant.nodes,
            notice,
            grant.flavor,
        )


def find_pending(workloads: Sequence[KueueWorkload]) -> list[PendingRequest]:
    """The requests that wait among ``workloads``, the oldest first."""
    waiting = (workload for workload in workloads if workload.grant is None and not workload.is_finished)
    ordered = sorted(waiting, key=lambda workload: (workload.created_at, workload.name))
    return [
        PendingRequest(workload.request, number, workload.created_at, workload.created_at)
        for number, workload in enumerate(ordered, 1)
    ]


_REASONS = {
    "Inadmissible": AdmissionReason.MISCONFIGURED,
    "NoMatchingFlavor": AdmissionReason.NO_MATCHING_GPU_TYPE,
    "Suspended": AdmissionReason.QUEUE_STOPPED,
    "WaitingForPreemptedWorkloads": AdmissionReason.WAITING_FOR_PREEMPTED_CHECKPOINT,
}
"""Kueue's reasons that have another name here."""
_VAGUE = ("Pending", "Inadmissible", "Waiting")
"""Reasons of Kueue without its feature gate ``UnadmittedWorkloadsObservability``, which 0.19 has and leaves off: only
the sentence tells more (its ``flavorassigner.go``, ``scheduler.go`` and ``workload_controller.go``)."""
_SENTENCES = (
    (" is stopped", AdmissionReason.QUEUE_STOPPED),
    (" is inactive", AdmissionReason.QUEUE_STOPPED),
    ("Pending the preemption of", AdmissionReason.WAITING_FOR_PREEMPTED_CHECKPOINT),
    ("insufficient unused quota", AdmissionReason.WAITING_FOR_QUOTA),
    ("> maximum capacity", AdmissionReason.EXCEEDS_MAX_QUOTA),
    ("doesn't match node affinity", AdmissionReason.NO_MATCHING_GPU_TYPE),
    ("untolerated taint", AdmissionReason.NO_MATCHING_GPU_TYPE),
    ("unavailable in ClusterQueue", AdmissionReason.NO_MATCHING_GPU_TYPE),
)
_NOT_EXAMINED = (
    "Kueue has not examined the Workload yet; if this does not change, see whether its controller runs: "
    "`kubectl get pods -n kueue-system`"
)


def describe_wait(workload: KueueWorkload) -> tuple[AdmissionReason, str]:
    """Why Kueue has not admitted the Workload, with its own sentence."""
    condition = workload.conditions.get("QuotaReserved")
    if workload.is_on_hold:
        held = workload.find_true("Evicted")
        why = f" ({held.reason}: {held.message})" if held is not None else ""
        release = f"kubectl patch workload -n {workload.namespace} {workload.name} --type=merge"
        return (
            AdmissionReason.QUEUE_STOPPED,
            f'the Workload is inactive{why}; whoever may lets it go on: {release} -p \'{{"spec":{{"active":true}}}}\'',
        )
    if condition is None:
        return AdmissionReason.PENDING_EVALUATION, _NOT_EXAMINED
    if condition.is_true:
        checks = workload.manifest.get("status", {}).get("admissionChecks") or []
        waiting = [f"{check['name']} is {check['state']}" for check in checks if check.get("state") != "Ready"]
        return (
            AdmissionReason.ADMISSION_CHECK_PENDING,
            f"the quota is reserved; Kueue waits for its admission checks: {', '.join(waiting) or 'none is reported'}",
        )
    sentence = condition.message or condition.reason
    by_sentence = (reason for pattern, reason in _SENTENCES if condition.reason in _VAGUE and pattern in sentence)
    if (reason := next(by_sentence, None)) is None:
        try:
            reason = _REASONS.get(condition.reason) or AdmissionReason(condition.reason)
        except ValueError:  # a reason of a newer Kueue; its sentence says more
            reason = AdmissionReason.PENDING_EVALUATION
    return reason, f"Kueue: {sentence}"
