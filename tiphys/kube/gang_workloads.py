"""Objects that make the pods of a gang: which kinds there are, whether they still make any, and how they failed."""

import re
from collections.abc import Mapping

from tiphys.kube.resources import JOB_SETS, JOBS, PYTORCH_JOBS, TRAIN_JOBS, Resource
from tiphys.kube.transport import Object
from tiphys.protocol.gang import Backend, FirstFailure, Stage

RESOURCES: Mapping[Backend, Resource] = {
    Backend.JOB: JOBS,
    Backend.JOBSET: JOB_SETS,
    Backend.PYTORCHJOB: PYTORCH_JOBS,
    Backend.TRAINJOB: TRAIN_JOBS,
}

_OVER = frozenset({"Complete", "Completed", "Succeeded", "Failed"})
_ENDING = _OVER | {"FailureTarget", "SuccessCriteriaMet"}
_FAILED = ("FailureTarget", "Failed")
# Kubernetes, ``pkg/controller/job/pod_failure_policy.go``.
_BY_EXIT_CODE = re.compile(r"Container \S+ for pod [^/\s]+/(\S+) failed with exit code (\d+) ")
_BY_CONDITION = re.compile(r"Pod [^/\s]+/(\S+) has condition (\S+) ")


def stage_of(found: Object) -> Stage:
    """What an object's conditions say."""
    true = _true_conditions(found)
    if true.keys() & _OVER:
        return Stage.OVER
    return Stage.ENDING if true.keys() & _ENDING or found["metadata"].get("deletionTimestamp") else Stage.ACTIVE


def first_failure(found: Object) -> FirstFailure | None:
    """Which pod a Job says it failed for; None where it does not."""
    true = _true_conditions(found)
    for message in (true[one] for one in _FAILED if one in true):
        if match := _BY_EXIT_CODE.search(message):
            return FirstFailure(match[1], int(match[2]), message)
        if match := _BY_CONDITION.search(message):
            return FirstFailure(match[1], None, message)
    return None


def is_elastic(found: Object) -> bool:
    """Whether it goes on when it loses a member."""
    return (found.get("spec") or {}).get("backoffLimitPerIndex") is not None


def remaining(found: Object) -> int | None:
    """Members of an elastic Job that are not lost for good; None for what is not elastic.

    A Job counts an index as failed once its pod has ended (``podReplacementPolicy: Failed``).
    """
    if not is_elastic(found):
        return None
    lost = str((found.get("status") or {}).get("failedIndexes") or "")
    return int(found["spec"]["completions"]) - sum(map(_length, filter(None, lost.split(","))))


def _length(interval: str) -> int:
    """Numbers in ``3`` or ``3-5``, as Kubernetes writes indexes."""
    first, _, last = interval.partition("-")
    return int(last or first) - int(first) + 1


def _true_conditions(found: Object) -> dict[str, str]:
    """Message of each condition that holds, by its type."""
    conditions = (found.get("status") or {}).get("conditions") or []
    return {one["type"]: str(one.get("message") or "") for one in conditions if one.get("status") == "True"}
