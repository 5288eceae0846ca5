"""Objects that create the pods of a gang: their kinds, phases and failures.

The backends report their state through conditions with different names;
this module maps them to `GangPhase` and `FirstFailure`.
"""

import re
from collections.abc import Mapping

from tiphys.kube.resources import JOB_SETS, JOBS, TRAIN_JOBS, Resource
from tiphys.kube.transport import Object
from tiphys.protocol.gang import REPLICATED_JOB, FirstFailure, GangBackend, GangPhase

GANG_RESOURCES: Mapping[GangBackend, Resource] = {
    GangBackend.JOB: JOBS,
    GangBackend.JOBSET: JOB_SETS,
    GangBackend.TRAINJOB: TRAIN_JOBS,
}

_SUCCESS_CONDITIONS = frozenset({"Complete", "Completed"})
_FINISHED_CONDITIONS = _SUCCESS_CONDITIONS | {"Failed"}
_ENDING_CONDITIONS = _FINISHED_CONDITIONS | {"FailureTarget", "SuccessCriteriaMet"}
_FAILURE_CONDITIONS = ("FailureTarget", "Failed")
# Kubernetes, ``pkg/controller/job/pod_failure_policy.go``.
_EXIT_CODE_MESSAGE = re.compile(r"Container \S+ for pod [^/\s]+/(\S+) failed with exit code (\d+) ")
_CONDITION_MESSAGE = re.compile(r"Pod [^/\s]+/(\S+) has condition (\S+) ")


def members_job_name(backend: GangBackend, name: str) -> str | None:
    """Name of the Job that a JobSet, also that of a TrainJob, makes for the members; None for a Job.

    Only that Job records which pod failed first. JobSet, ``pkg/util/placement``: GenJobName.
    """
    return f"{name}-{REPLICATED_JOB}-0" if backend is not GangBackend.JOB else None


def gang_phase(gang_object: Object) -> GangPhase:
    """Phase of a gang, from the conditions of its object."""
    conditions = _true_conditions(gang_object)
    if conditions.keys() & _FINISHED_CONDITIONS:
        return GangPhase.FINISHED
    return (
        GangPhase.ENDING
        if conditions.keys() & _ENDING_CONDITIONS or gang_object["metadata"].get("deletionTimestamp")
        else GangPhase.ACTIVE
    )


def is_gang_complete(gang_object: Object) -> bool:
    """Whether the controller of a gang says that it succeeded. This outlives the pods, which go with their nodes."""
    return bool(_true_conditions(gang_object).keys() & _SUCCESS_CONDITIONS)


def find_first_failure(gang_object: Object) -> FirstFailure | None:
    """The pod that a Job names as the reason of its failure; None if it names none."""
    conditions = _true_conditions(gang_object)
    for message in (conditions[kind] for kind in _FAILURE_CONDITIONS if kind in conditions):
        if match := _EXIT_CODE_MESSAGE.search(message):
            return FirstFailure(match[1], int(match[2]), message)
        if match := _CONDITION_MESSAGE.search(message):
            return FirstFailure(match[1], None, message)
    return None


def is_elastic_job(gang_object: Object) -> bool:
    """Whether the object is a Job that continues after the loss of a member."""
    return (gang_object.get("spec") or {}).get("backoffLimitPerIndex") is not None


def count_remaining_members(gang_object: Object) -> int | None:
    """Members of an elastic Job that have not failed; None for any other object.

    A Job counts an index as failed once its pod has ended (``podReplacementPolicy: Failed``).
    """
    if not is_elastic_job(gang_object):
        return None
    failed = str((gang_object.get("status") or {}).get("failedIndexes") or "")
    return int(gang_object["spec"]["completions"]) - sum(map(_interval_length, filter(None, failed.split(","))))


def has_waiting_pods(gang_object: Object) -> bool:
    """Whether a Job has pods that are not ready."""
    status = gang_object.get("status") or {}
    return int(status.get("active") or 0) > int(status.get("ready") or 0)


def _interval_length(interval: str) -> int:
    """Number of indexes in ``3`` or ``3-5``, the notation of Kubernetes."""
    first, _, last = interval.partition("-")
    return int(last or first) - int(first) + 1


def _true_conditions(gang_object: Object) -> dict[str, str]:
    """Messages of the conditions with status True, by type."""
    conditions = (gang_object.get("status") or {}).get("conditions") or []
    return {
        condition["type"]: str(condition.get("message") or "")
        for condition in conditions
        if condition.get("status") == "True"
    }
