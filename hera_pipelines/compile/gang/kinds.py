"""The kinds of objects that can make the members of a gang, and when each has succeeded or failed.

All end as a whole when one member does, but for an elastic one, which ends with
its first member, or when too few are left. No member is started again alone,
since the next attempt begins with admission. Argo tries the conditions on the
object's JSON; of a failure condition each part counts alone.

A TrainJob of Kubeflow's trainer: it names a runtime, and says what is different from it.

Most of a pod stands in the runtime ``tiphys``, which the chart installs: a
TrainJob itself can neither forbid that a member is started again alone, nor take
variables from a Secret. Source: ``pkg/apis/trainer/v1alpha1`` of trainer 2.3.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from hera_pipelines.compile import references as names
from hera_pipelines.compile.gang.member_pod import Inside, elastic_variables, pod_template, processes, rank_variables
from hera_pipelines.compile.gated_step import GatedStep
from hera_pipelines.compile.plugin_templates import input_value
from tiphys.errors import UsageError
from tiphys.protocol.compiled_workflow import Manifest
from tiphys.protocol.gang import SERVICE, Backend, Gang
from tiphys.protocol.step_spec import STORE_SECRET

RUNTIME = "tiphys"
RUNTIME_JOB = 0
"""Place of the job of the members in the status of a TrainJob: the runtime has no other."""

_CONTAINER = "node"
_MANAGER = "tiphys.dev/compile"
_OF_TRAINER = ("image", "command", "args")
_OF_CONTAINER = ("securityContext", "volumeMounts")
_OF_POD = (
    *("affinity", "imagePullSecrets", "nodeSelector", "securityContext", "serviceAccountName"),
    *("terminationGracePeriodSeconds", "tolerations", "volumes"),
)
_IN_RUNTIME = ("restartPolicy", "containers", "activeDeadlineSeconds")


def train_job(step: GatedStep, template: Manifest, workflow: Manifest) -> Manifest:
    """Spec of the TrainJob.

    Raises:
        UsageError: the step asks for what a TrainJob cannot say.
    """
    assert step.settings.gang is not None
    pod = pod_template(step, template, workflow, [])
    spec, container = pod["spec"], pod["spec"]["containers"][0]
    _check(spec, container)
    pod["metadata"]["annotations"]["kubectl.kubernetes.io/default-container"] = _CONTAINER
    processes_per_node = processes(step).get("PET_NPROC_PER_NODE")
    trainer = {
        **{field: container[field] for field in _OF_TRAINER if field in container},
        "env": container["env"],
        "numNodes": step.settings.gang.members,
        **({"numProcPerNode": int(processes_per_node)} if processes_per_node else {}),
        **({"resourcesPerNode": container["resources"]} if container.get("resources") else {}),
    }
    patched = {"name": _CONTAINER, **{field: container[field] for field in _OF_CONTAINER if field in container}}
    members = {
        "metadata": pod["metadata"],
        "spec": {**{field: spec[field] for field in _OF_POD if field in spec}, "containers": [patched]},
    }
    job = {"name": _CONTAINER, "template": {"spec": {"template": members}}}
    deadline = {"activeDeadlineSeconds": spec["activeDeadlineSeconds"]} if "activeDeadlineSeconds" in spec else {}
    return {
        "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": RUNTIME},
        "trainer": trainer,
        "runtimePatches": [
            {"manager": _MANAGER, "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [job]}}}}
        ],
        **deadline,
    }


def _check(spec: Manifest, container: Manifest) -> None:
    known = {*_OF_TRAINER, *_OF_CONTAINER, "env", "envFrom", "name", "resources"}
    sources = container.get("envFrom") or []
    own = [source for source in sources if source.get("secretRef", {}).get("name") != STORE_SECRET]
    strange = [
        *sorted(set(container) - known),
        *sorted(set(spec) - {*_OF_POD, *_IN_RUNTIME}),
        *(["envFrom"] * len(own)),
    ]
    if strange:
        raise UsageError(f"a TrainJob has no place for {strange[0]}; drop it, or use backend='jobset' or 'job'")


_NAME = input_value(names.answer("gang"))
_JOB_OF_SET = "node"
_DEFAULT_CONTAINER = "kubectl.kubernetes.io/default-container"


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


def _indexed(step: GatedStep, template: Manifest, workflow: Manifest, first: str) -> Manifest:
    """Spec of an Indexed Job whose member 0 has the host name ``first``."""
    members = _members(step)
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
        "template": pod_template(step, template, workflow, rank_variables(step, members, first)),
    }


def _job(step: GatedStep, template: Manifest, workflow: Manifest) -> Manifest:
    """Kubernetes, ``batch/v1``. A Service of the namespace gives the host names."""
    spec = _indexed(step, template, workflow, f"{_NAME}-0.{SERVICE}")
    spec["template"]["spec"]["subdomain"] = SERVICE
    return spec


def _elastic_job(step: GatedStep, template: Manifest, workflow: Manifest) -> Manifest:
    """The same with as many members as admit says, of which some may be lost."""
    pod = pod_template(step, template, workflow, elastic_variables(step, f"{_NAME}-0.{SERVICE}"))
    pod["spec"]["subdomain"] = SERVICE
    members = Inside(names.answer("members"))
    return {
        "completionMode": "Indexed",
        "completions": members,
        "parallelism": members,
        # Who is lost is not made anew: the next attempt asks for all of them again.
        "backoffLimitPerIndex": 0,
        "maxFailedIndexes": Inside(names.answer("spare")),
        # With the first member all have ended well, and it alone stores the outputs.
        "successPolicy": {"rules": [{"succeededIndexes": "0"}]},
        "podReplacementPolicy": "Failed",
        "template": pod,
    }


def _job_set(step: GatedStep, template: Manifest, workflow: Manifest) -> Manifest:
    """JobSet, ``api/jobset/v1alpha2``. It makes a Service of its own name."""
    job = _indexed(step, template, workflow, f"{_NAME}-{_JOB_OF_SET}-0-0.{_NAME}")
    return {
        "failurePolicy": {"maxRestarts": 0},
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "replicatedJobs": [{"name": _JOB_OF_SET, "replicas": 1, "template": {"spec": job}}],
    }


def _pytorch_job(step: GatedStep, template: Manifest, workflow: Manifest) -> Manifest:
    """Kubeflow's training operator, ``pkg/apis/kubeflow.org/v1``. It tells the members who they are."""
    pod = pod_template(step, template, workflow, [])
    del pod["spec"]["restartPolicy"]
    pod["spec"]["containers"][0]["name"] = "pytorch"  # the operator demands this name
    pod["metadata"]["annotations"][_DEFAULT_CONTAINER] = "pytorch"
    replicas = {"Master": 1, "Worker": _members(step) - 1}
    per_node = processes(step).get("PET_NPROC_PER_NODE")
    return {
        "runPolicy": {"backoffLimit": 0, "cleanPodPolicy": "Running"},
        **({"nprocPerNode": per_node} if per_node else {}),
        "pytorchReplicaSpecs": {
            role: {"replicas": count, "restartPolicy": "Never", "template": pod} for role, count in replicas.items()
        },
    }


KINDS: Mapping[Backend, Kind] = {
    Backend.JOB: Kind("batch/v1", "Job", _job, "status.succeeded == {members}", "status.failed > 0"),
    Backend.JOBSET: Kind(
        *("jobset.x-k8s.io/v1alpha2", "JobSet", _job_set),
        success="status.terminalState == Completed",
        failure="status.terminalState == Failed",
    ),
    Backend.PYTORCHJOB: Kind(
        *("kubeflow.org/v1", "PyTorchJob", _pytorch_job),
        # For the operator, too, the job has succeeded once its master has.
        success="status.replicaStatuses.Master.succeeded == 1",
        failure="status.replicaStatuses.Master.failed > 0, status.replicaStatuses.Worker.failed > 0",
    ),
    Backend.TRAINJOB: Kind(
        *("trainer.kubeflow.org/v1alpha1", "TrainJob", train_job),
        success=f"status.jobsStatus.{RUNTIME_JOB}.succeeded == 1",
        failure=f"status.jobsStatus.{RUNTIME_JOB}.failed > 0",
    ),
}

_ELASTIC = Kind(
    *("batch/v1", "Job", _elastic_job),
    # A count of pods would not tell which of them. The verdict comes first among the conditions, and before its last
    # pod is gone (KEP-3998, KEP-3850): one whose node is lost would hold a success up for minutes.
    success="status.conditions.0.type in (SuccessCriteriaMet, Complete)",
    failure="status.conditions.0.type in (FailureTarget, Failed)",
)


def kind_of(gang: Gang) -> Kind:
    """The kind of object that makes the members of ``gang``."""
    return KINDS[gang.backend] if gang.min_members is None else _ELASTIC
