"""The kinds of objects that can make the members of a gang, and when each has succeeded or failed.

All end as a whole when one member does: no member is started again alone, since
the next attempt begins with admission. Argo tries the conditions on the object's
JSON; of a failure condition each part counts alone.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from hera_pipelines.compile import names
from hera_pipelines.compile.gang.pod import pod_template
from hera_pipelines.compile.gang.ranks import rank_variables
from hera_pipelines.compile.gated import GatedStep
from hera_pipelines.compile.operations import input_value
from tiphys.protocol.gang import SERVICE, Backend
from tiphys.protocol.pipeline import Manifest

_NAME = input_value(names.answer("gang"))


class Kind(NamedTuple):
    """One kind of object."""

    api_version: str
    kind: str
    spec: Callable[[GatedStep, Manifest, Manifest], Manifest]
    success: str
    """``{members}`` stands for their number."""
    failure: str


def _members(step: GatedStep) -> int:
    assert step.settings.gang is not None
    return step.settings.gang.members


def _indexed_job(step: GatedStep, template: Manifest, workflow: Manifest, first: str) -> Manifest:
    members = _members(step)
    pod = pod_template(step, template, workflow, rank_variables(step, members, first))
    return {
        "completionMode": "Indexed",
        "completions": members,
        "parallelism": members,
        "backoffLimit": 0,
        # Without it a pod that is being ended would count as gone, and have a successor beside it.
        "podReplacementPolicy": "Failed",
        # It changes nothing about what happens; but who failed first stays written in the Job when the pod is gone.
        "podFailurePolicy": {
            "rules": [
                {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {"action": "FailJob", "onExitCodes": {"containerName": "main", "operator": "NotIn", "values": [0]}},
            ]
        },
        "template": pod,
    }


def _job(step: GatedStep, template: Manifest, workflow: Manifest) -> Manifest:
    spec = _indexed_job(step, template, workflow, f"{_NAME}-0.{SERVICE}")
    spec["template"]["spec"]["subdomain"] = SERVICE
    return spec


KINDS: Mapping[Backend, Kind] = {
    Backend.JOB: Kind("batch/v1", "Job", _job, "status.succeeded == {members}", "status.failed > 0"),
}
