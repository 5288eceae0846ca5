"""An attempt of several pods: which of them decides how it ended, and that nothing of it stays behind.

Argo watches the object that makes the pods, and knows of them only that one
failed. The others are told to stop then, and exit with 75 like a preempted
program: so the cause of the attempt is that of the pod whose end began first.
A pod that was taken away leaves nothing but what the object remembers of it.

How a gang ended that goes on when it loses members: by its first member, or by one more than it can spare.

What was lost before is no cause. A pod that was taken away leaves nothing, and
the others that cannot meet without the first fail by themselves; whether that
came first nobody can tell afterwards, but for the program's own word.
"""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from tiphys.errors import UsageError
from tiphys.failures.classify import Observation
from tiphys.protocol.gang import Gang, Stage, gang_name
from tiphys.records import AttemptClaim
from tiphys.store import Store
from tiphys_plugin.cluster.interface import GangStatus, PodStatus

HOSTNAME_LABEL = "kubernetes.io/hostname"
"""Where a pod has to run is said by it."""
TOLD_BY_ARGO = ("Succeeded", "Skipped", "Omitted")
_LATEST = datetime.max.replace(tzinfo=UTC)


def as_started(gang: Gang, claim: AttemptClaim) -> Gang:
    """The gang with as many members as this attempt was given."""
    return gang if claim.members is None else gang.model_copy(update={"members": claim.members})


def observation(gang: Gang, made_by: GangStatus | None, found: Sequence[PodStatus], status: str) -> Observation:
    """What is known of the end of an attempt of several pods; ``status`` is Argo's.

    The exit code that Argo tells beside it is that of its own program, which watched, and says nothing.
    """
    if status in TOLD_BY_ARGO:
        return Observation(status=status, pod_seen=bool(found))
    remembered = made_by.first_failure if made_by else None
    if remembered and remembered.pod not in {pod.name for pod in found}:
        # A pod that fails by itself stays; this one was deleted.
        code = remembered.exit_code
        return Observation(
            status=status,
            exit_code=code,
            pod_reason="Deleted",
            pod_message=remembered.message if code is None else f"exit code {code}",
            member=called(gang, remembered.pod, _rank(made_by, remembered.pod)),
        )
    failed = [pod for pod in found if pod.phase == "Failed" or (pod.reason and not pod.finished)]
    if made_by is None:  # all went with it, and whether they still show that is a matter of moments
        failed = [pod for pod in failed if pod.reason != "Deleted"]
    if not failed:
        told = "no pod of it tells how it ended" if made_by else "what made its pods is gone, or never was"
        return Observation(status="Error", pod_seen=bool(found), pod_message=told)
    return by_end_of(gang, min(failed, key=began))


def by_end_of(gang: Gang, first: PodStatus) -> Observation:
    """The attempt ended as this pod of it did."""
    return Observation(
        status="Failed",
        exit_code=first.exit_code,
        pod_seen=True,
        pod_reason=first.reason,
        pod_message=first.message,
        member=called(gang, first.name, first.rank),
        at=first.trouble_at,
        node=first.host,
        told=first.told,
    )


def called(gang: Gang, pod: str, rank: int | None) -> str:
    """A member, as a person is told of it."""
    return f"pod {pod}" if rank is None else f"rank {rank} of {gang.members}"


def _rank(made_by: GangStatus | None, pod: str) -> int | None:
    """Of a pod that is gone; an Indexed Job puts it behind its own name."""
    found = re.match(rf"{re.escape(made_by.name)}-(\d+)-", pod) if made_by else None
    return int(found[1]) if found else None


def began(pod: PodStatus) -> tuple[datetime, int, str]:
    """Order of the ends. Kubernetes tells seconds: in the same one, who was deleted followed who was not.

    And who ended by itself may have lost its connection to one that Kubernetes says something about.
    """
    weight = 2 if pod.reason == "Deleted" else 0 if pod.reason else 1
    return pod.trouble_at or _LATEST, weight, pod.name


def all_succeeded(gang: Gang, found: Sequence[PodStatus]) -> bool:
    """Whether every member ended well; of an elastic one the first, with which all have."""
    if gang.min_members is not None:
        return any(pod.rank == 0 and pod.phase == "Succeeded" for pod in found)
    return len([pod for pod in found if pod.phase == "Succeeded"]) >= gang.members


def goes_on(gang: Gang, made_by: GangStatus | None, found: Sequence[PodStatus]) -> bool:
    """Whether what makes the pods may make more of them, or waits for those that live."""
    if gang.min_members is not None:
        return made_by is not None and made_by.stage is Stage.ACTIVE
    ended = [pod for pod in found if pod.finished]
    return made_by is not None and made_by.stage is Stage.ACTIVE and len(ended) < gang.members


def is_forgotten(gang: Gang, made_by: GangStatus | None, found: Sequence[PodStatus]) -> bool:
    """Whether it goes on for nobody, since its attempt is over for Argo: the pod that watched it was lost, perhaps.

    Where a member has failed, it will end the others by itself, and remember why; an elastic one may not.
    """
    ends_itself = gang.min_members is None and any(pod.phase == "Failed" for pod in found)
    return goes_on(gang, made_by, found) and not ends_itself


def answers(gang: Gang, claim: AttemptClaim, input_keys: str, more: Sequence[Mapping[str, Any]] = ()) -> dict[str, str]:
    """What admit answers for a step of several pods beside the rest; ``more`` is asked of nodes beside the lease."""
    requirements = ", ".join(json.dumps(one, sort_keys=True) for one in (*_requirements(claim), *more))
    tolerations = json.loads(claim.pod_patch or "{}").get("tolerations") or []
    answered = {
        "gang": gang_name(claim.run, claim.step, claim.attempt),
        "node-requirements": requirements,
        "input-keys": input_keys,
        "tolerations": ", ".join(json.dumps(one, sort_keys=True) for one in tolerations),
    }
    if gang.min_members is None:
        return answered
    members = as_started(gang, claim).members
    return {**answered, "members": str(members), "spare": str(members - gang.min_members)}


def _requirements(claim: AttemptClaim) -> list[dict[str, Any]]:
    """Node selector requirements; the first is always there, because the list must not be empty."""
    if claim.nodes:
        hosts: dict[str, Any] = {"key": HOSTNAME_LABEL, "operator": "In", "values": sorted(set(claim.nodes))}
    else:
        hosts = {"key": HOSTNAME_LABEL, "operator": "Exists"}
    chosen = json.loads(claim.pod_patch or "{}").get("nodeSelector") or {}
    return [hosts, *({"key": key, "operator": "In", "values": [value]} for key, value in sorted(chosen.items()))]


def input_keys(store: Store, template: Mapping[str, Any]) -> str:
    """Key in ``store`` of each input artifact, as JSON: the members fetch them by themselves.

    Raises:
        UsageError: one lies elsewhere.
    """
    keys: dict[str, str] = {}
    for artifact in (template.get("inputs") or {}).get("artifacts") or []:
        s3 = artifact.get("s3") or {}
        if not s3 and artifact.get("optional"):
            continue
        key = None if s3.get("bucket") else store.from_artifact_key(s3.get("key") or "")
        if key is None:
            raise UsageError(
                f"input artifact {artifact['name']!r} does not lie in {store.url}, from where the pods of a training "
                "on several nodes fetch it by themselves; have a @step write it"
            )
        keys[artifact["name"]] = key
    return json.dumps(keys, sort_keys=True)


def elastic_observation(
    gang: Gang, fewest: int, found: Sequence[PodStatus], status: str, *, crashed: bool
) -> Observation:
    """What is known of the end; ``gang`` has as many members as were started, and needs ``fewest``.

    ``crashed``: the training program itself has left word that it failed.
    """
    if status in TOLD_BY_ARGO:
        return Observation(status=status, pod_seen=bool(found))
    ended = sorted((pod for pod in found if pod.phase == "Failed" or (pod.reason and not pod.finished)), key=began)
    if all(pod.rank != 0 for pod in found) and not crashed:
        return _without_the_first(gang, ended, status)
    if not ended:
        return Observation(status="Error", pod_seen=bool(found), pod_message="no pod of it tells how it ended")
    taken_away = gang.members - len(found)
    one_too_many = ended[max(0, gang.members - fewest - taken_away) :][:1]
    first = [pod for pod in ended if pod.rank == 0]
    return by_end_of(gang, min([*first, *one_too_many] or ended, key=began))


def _without_the_first(gang: Gang, ended: Sequence[PodStatus], status: str) -> Observation:
    if all(pod.reason for pod in ended):
        return Observation(status=status, pod_reason="Deleted", member=called(gang, "", 0))
    why = "its pod was taken away, and the others could not meet without it"
    return Observation(status="Error", pod_message=why, member=called(gang, "", 0))
