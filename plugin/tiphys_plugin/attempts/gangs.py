"""A gang is an attempt of several pods. This module decides which pod's end is the cause of the attempt's end.

Argo watches the workload that creates the pods, and learns only that a pod has
failed. The other pods are then stopped, and exit with 75 like a preempted
program. So the cause of the attempt is that of the pod whose end began first. A
deleted pod leaves nothing but what the workload recorded about it.

An elastic gang continues after it has lost members. It ends by the loss of one
member more than it can spare, or by that of its host, if none takes its place;
members lost before that are no cause. The host is rank 0, or the one that has taken
its place. If its pod was deleted, the other members may fail too, because they cannot
rendezvous without it. If more of them fail than it can spare, the workload deletes
the pod of the host. Which came first cannot be seen afterwards, except from what the
program says: its crash record, an exit code of a wrong call, or the end of its log.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from tiphys.errors import UsageError
from tiphys.failures.classify import EXIT_CODES, AttemptObservation
from tiphys.protocol.execute_api import find_artifact_place
from tiphys.protocol.gang import HOSTNAME_LABEL, MEMBER_GATE, GangPhase, GangSpec, gang_name
from tiphys.records import AttemptClaim
from tiphys.store import Store
from tiphys_plugin.cluster.interface import GangStatus, PodStatus

NOT_STARTED_STATUSES = ("Skipped", "Omitted")
"""Argo's statuses of a node that it did not start."""
CONCLUSIVE_ARGO_STATUSES = ("Succeeded", *NOT_STARTED_STATUSES)
"""Argo's statuses that decide how an attempt ended, whatever its pods show."""
_LATEST = datetime.max.replace(tzinfo=UTC)
_WRONG_CALL_EXIT_CODES = (2, 64, 126, 127)
"""Of a program that was called with wrong arguments (64: EX_USAGE), cannot be executed, or does not exist."""
_CONNECTION_WORDS = re.compile(
    r"rendezvous|connect|tim(?:ed?|ing)[ -]?out|unreachable|resolve|broken pipe|nccl|gloo|tcpstore|c10d", re.IGNORECASE
)
"""In the log of a member that could not reach the host."""
_NO_FAILED_POD = "no pod of the gang shows how the attempt ended"


def with_started_members(gang: GangSpec, claim: AttemptClaim) -> GangSpec:
    """The gang with the number of members that this attempt was started with."""
    return gang if claim.members is None else gang.model_copy(update={"members": claim.members})


def observe_gang_end(
    gang: GangSpec, gang_status: GangStatus | None, pod_statuses: Sequence[PodStatus], status: str
) -> AttemptObservation:
    """Observe the end of a gang that cannot lose members; ``status`` is Argo's status of the run node.

    Argo's exit code is that of its own watching program, so it is not used.
    """
    if status in CONCLUSIVE_ARGO_STATUSES:
        return AttemptObservation(status=status, pod_seen=bool(pod_statuses))
    first_failure = gang_status.first_failure if gang_status else None
    if first_failure and first_failure.pod not in {pod.name for pod in pod_statuses}:
        # A failed pod stays in the API server; this one is missing, so it was deleted.
        exit_code = first_failure.exit_code
        return AttemptObservation(
            status=status,
            exit_code=exit_code,
            pod_reason="Deleted",
            pod_message=first_failure.message if exit_code is None else f"exit code {exit_code}",
            member=describe_member(gang, first_failure.pod, _rank_of_deleted_pod(first_failure.pod)),
        )
    failed = [pod for pod in pod_statuses if pod.phase == "Failed" or (pod.reason and not pod.finished)]
    if gang_status is None:  # its pods are deleted with it, sooner or later, so a deletion is no cause
        failed = [pod for pod in failed if pod.reason != "Deleted"]
    if not failed:
        message = _NO_FAILED_POD if gang_status else "the workload that creates its pods is gone, or never existed"
        return AttemptObservation(status="Error", pod_seen=bool(pod_statuses), pod_message=message)
    return observe_member_end(gang, min(failed, key=end_order))


def observe_member_end(gang: GangSpec, pod: PodStatus) -> AttemptObservation:
    """Observe the end of an attempt whose cause is the end of ``pod``."""
    return AttemptObservation(
        status="Failed",
        exit_code=pod.exit_code,
        pod_seen=True,
        pod_reason=pod.reason,
        pod_message=pod.message,
        member=describe_member(gang, pod.name, pod.rank),
        ended_at=pod.trouble_at,
        node=pod.host,
        termination_message=pod.termination_message,
    )


def describe_member(gang: GangSpec, pod: str, rank: int | None) -> str:
    """Name a member in messages: by its rank, or by its pod if the rank is unknown."""
    return f"pod {pod}" if rank is None else f"rank {rank} of {gang.members}"


def _rank_of_deleted_pod(pod: str) -> int | None:
    """Rank of a deleted pod, from its name: an Indexed Job appends the rank to its own name, then a random word."""
    match = re.search(r"-(\d+)-[^-]+$", pod)
    return int(match[1]) if match else None


def end_order(pod: PodStatus) -> tuple[datetime, int, str]:
    """Sort key of pods by the time of their end.

    Kubernetes records whole seconds. Within one second, a pod with a reason of
    Kubernetes comes first, because it may have broken the connections of the
    others. A pod that exited on its own comes next, and a deleted pod last.
    """
    weight = 2 if pod.reason == "Deleted" else 0 if pod.reason else 1
    return pod.trouble_at or _LATEST, weight, pod.name


def is_gang_succeeded(gang: GangSpec, gang_status: GangStatus | None, pod_statuses: Sequence[PodStatus]) -> bool:
    """Whether every member succeeded, also if pods are gone; an elastic gang has succeeded as soon as one has."""
    if gang_status is not None and gang_status.succeeded:
        return True
    if gang.min_members is not None:
        return any(pod.phase == "Succeeded" for pod in pod_statuses)
    return len([pod for pod in pod_statuses if pod.phase == "Succeeded"]) >= gang.members


def is_gang_active(gang: GangSpec, gang_status: GangStatus | None, pod_statuses: Sequence[PodStatus]) -> bool:
    """Whether the workload may create more pods, or waits for live ones."""
    if gang.min_members is not None:
        return gang_status is not None and gang_status.stage is GangPhase.ACTIVE
    finished_pods = [pod for pod in pod_statuses if pod.finished]
    return gang_status is not None and gang_status.stage is GangPhase.ACTIVE and len(finished_pods) < gang.members


def is_gang_orphaned(gang: GangSpec, gang_status: GangStatus | None, pod_statuses: Sequence[PodStatus]) -> bool:
    """Whether the workload continues although its attempt is over for Argo, as when Argo's watching pod was lost.

    After a member has failed, the workload ends the others itself and records
    the cause, so it is not orphaned; an elastic gang may continue instead.
    """
    ends_itself = gang.min_members is None and any(pod.phase == "Failed" for pod in pod_statuses)
    return is_gang_active(gang, gang_status, pod_statuses) and not ends_itself


def gang_output_parameters(
    gang: GangSpec,
    claim: AttemptClaim,
    input_keys: str,
    placement: Mapping[str, Any],
    node_requirements: Sequence[Mapping[str, Any]] = (),
) -> dict[str, str]:
    """Admit's additional output parameters for a gang.

    ``placement`` is the pod patch that follows from the lease; ``node_requirements`` are added to its own.
    """
    is_elastic = gang.min_members is not None
    # The nodes of members that come later are not known yet, so each pod is sent to its own once it exists.
    lease_requirements = _lease_node_requirements(() if is_elastic else claim.nodes, placement)
    requirements = ", ".join(
        json.dumps(requirement, sort_keys=True) for requirement in (*lease_requirements, *node_requirements)
    )
    tolerations = placement.get("tolerations") or []
    parameters = {
        "gang": gang_name(claim.run, claim.step, claim.attempt),
        "node-requirements": requirements,
        "input-keys": input_keys,
        "tolerations": ", ".join(json.dumps(toleration, sort_keys=True) for toleration in tolerations),
    }
    if gang.min_members is None:
        return parameters
    members = with_started_members(gang, claim).members
    gates = json.dumps({"name": MEMBER_GATE}) if claim.nodes else ""
    return {**parameters, "members": str(members), "spare": str(members - gang.min_members), "gates": gates}


def _lease_node_requirements(nodes: Collection[str], placement: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Node selector requirements of the lease; never empty, because the manifest's list must not be empty."""
    if nodes:
        hosts: dict[str, Any] = {"key": HOSTNAME_LABEL, "operator": "In", "values": sorted(set(nodes))}
    else:
        hosts = {"key": HOSTNAME_LABEL, "operator": "Exists"}
    selector = placement.get("nodeSelector") or {}
    return [hosts, *({"key": key, "operator": "In", "values": [value]} for key, value in sorted(selector.items()))]


def resolve_input_keys(store: Store, template: Mapping[str, Any]) -> str:
    """Key in ``store`` of each input artifact, as JSON, because the members of a gang fetch them themselves.

    Raises:
        UsageError: an artifact is not in ``store``.
    """
    keys: dict[str, str] = {}
    for artifact in (template.get("inputs") or {}).get("artifacts") or []:
        place = find_artifact_place(artifact)
        if place is None and artifact.get("optional"):
            continue
        key = store.from_artifact_key(place.key) if place and not place.bucket else None
        if key is None:
            raise UsageError(
                f"input artifact {artifact['name']!r} is not in {store.url}, from which the pods of a training on "
                "several nodes fetch it; have a @step write it"
            )
        keys[artifact["name"]] = key
    return json.dumps(keys, sort_keys=True)


def observe_elastic_end(
    gang: GangSpec, min_members: int, pods: Sequence[PodStatus], status: str, *, crashed: bool, host: int = 0
) -> AttemptObservation:
    """Observe the end of an elastic gang: its host ended, or fewer than ``min_members`` are left.

    ``gang`` has the number of members that were made, lost ones included. ``crashed``
    says that the training program left a crash record, and ``host`` is the rank of the
    member at which the others met last.
    """
    if status in CONCLUSIVE_ARGO_STATUSES:
        return AttemptObservation(status=status, pod_seen=bool(pods))
    ended = sorted((pod for pod in pods if pod.phase == "Failed" or (pod.reason and not pod.finished)), key=end_order)
    if all(pod.rank != host for pod in pods) and not crashed:
        return _observe_without_host(gang, host, ended, status)
    if not ended:
        return AttemptObservation(status="Error", pod_seen=bool(pods), pod_message=_NO_FAILED_POD)
    deleted_count = gang.members - len(pods)
    excess_losses = ended[max(0, gang.members - min_members - deleted_count) :]
    at_host = [pod for pod in ended if pod.rank == host]
    return observe_member_end(gang, min([*at_host, *excess_losses] or ended, key=end_order))


def _observe_without_host(gang: GangSpec, host: int, ended: Sequence[PodStatus], status: str) -> AttemptObservation:
    if all(pod.reason for pod in ended):
        return AttemptObservation(status=status, pod_reason="Deleted", member=describe_member(gang, "", host))
    if (own := next(filter(_failed_by_itself, ended), None)) is not None:
        return observe_member_end(gang, own)
    message = "its pod was deleted, and the other ranks could not rendezvous without it"
    return AttemptObservation(status="Error", pod_message=message, member=describe_member(gang, "", host))


def _failed_by_itself(pod: PodStatus) -> bool:
    """Whether a member shows that it did not fail for want of the host."""
    if pod.reason or not pod.exit_code:
        return False
    if pod.exit_code in _WRONG_CALL_EXIT_CODES:
        return True
    if pod.exit_code in EXIT_CODES:
        return False
    said = pod.termination_message.strip()
    return bool(said and not _CONNECTION_WORDS.search(said))
