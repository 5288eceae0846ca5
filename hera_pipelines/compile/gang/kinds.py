"""The kinds of objects that create the members of a gang, with their conditions of success and failure.

A gang ends as a whole when one member ends. An elastic gang succeeds with the first
member that does, and fails when too few members are left. No object restarts a single member, because GPUs
for it must be admitted first. Argo evaluates the conditions on the JSON of
the object; each part of a failure condition counts alone.

A TrainJob of Kubeflow's trainer names a runtime and patches it. The runtime
``tiphys``, which the chart installs, holds most of the pod, because a TrainJob
can neither forbid the restart of a single member nor take variables from a
Secret. Its own deadline deletes the pods before they show why they ended, so a
step with one is refused. Source: ``pkg/apis/trainer/v1alpha1`` of trainer 2.3.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from hera_pipelines.compile.authored_step import AuthoredStep
from hera_pipelines.compile.gang.member_pod import (
    TOKEN_FIELD,
    RawPlaceholder,
    elastic_variables,
    pod_template,
    process_count_variables,
    rank_variables,
)
from hera_pipelines.compile.plugin_templates import admit_placeholder
from tiphys.errors import UsageError
from tiphys.protocol.compiled_workflow import Manifest
from tiphys.protocol.gang import GANG_SERVICE, REPLICATED_JOB, GangBackend, GangSpec
from tiphys.protocol.step_spec import STORE_SECRET

RUNTIME_NAME = "tiphys"
RUNTIME_JOB_INDEX = 0
"""Index of the members' job in the status of a TrainJob: the runtime has no other job."""

_TRAINER_CONTAINER = "node"
_PATCH_MANAGER = "tiphys.dev/compile"
_TRAINER_FIELDS = ("image", "command", "args")
_PATCHED_CONTAINER_FIELDS = ("securityContext", "volumeMounts")
_PATCHED_POD_FIELDS = (
    *("affinity", "imagePullSecrets", "nodeSelector", "securityContext", "serviceAccountName"),
    *("terminationGracePeriodSeconds", "tolerations", "volumes"),
)
_RUNTIME_FIELDS = ("restartPolicy", "containers")
_TRAINER_VARIABLES = "PET_"
"""Prefix of the variables that the trainer sets itself, and refuses to be given."""


def train_job_spec(step: AuthoredStep, template: Manifest, workflow: Manifest) -> Manifest:
    """Build the spec of the TrainJob of a step with a gang, from its run template and the ``spec`` of the Workflow.

    Raises:
        UsageError: the step uses a field that a TrainJob does not have.
    """
    assert step.settings.gang is not None
    variables = rank_variables(step, step.settings.gang.members, _JOB_SET_FIRST_HOST)
    own = [variable for variable in variables if not variable["name"].startswith(_TRAINER_VARIABLES)]
    pod = pod_template(step, template, workflow, own)
    spec, container = pod["spec"], pod["spec"]["containers"][0]
    if not spec[TOKEN_FIELD]:
        del spec[TOKEN_FIELD]  # the runtime says the same
    _check_supported_fields(spec, container)
    pod["metadata"]["annotations"]["kubectl.kubernetes.io/default-container"] = _TRAINER_CONTAINER
    trainer = {
        **{field: container[field] for field in _TRAINER_FIELDS if field in container},
        # A map by name in Kubernetes, which refuses a second variable of one name; in a pod the later one is used.
        "env": list({variable["name"]: variable for variable in container["env"]}.values()),
        "numNodes": step.settings.gang.members,
        # Without a number the trainer starts one process for each CPU.
        "numProcPerNode": int(process_count_variables(step).get("PET_NPROC_PER_NODE", 1)),
        **({"resourcesPerNode": container["resources"]} if container.get("resources") else {}),
    }
    patched = {
        "name": _TRAINER_CONTAINER,
        **{field: container[field] for field in _PATCHED_CONTAINER_FIELDS if field in container},
    }
    members = {
        "metadata": pod["metadata"],
        "spec": {**{field: spec[field] for field in _PATCHED_POD_FIELDS if field in spec}, "containers": [patched]},
    }
    job = {"name": _TRAINER_CONTAINER, "template": {"spec": {"template": members}}}
    return {
        "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": RUNTIME_NAME},
        "trainer": trainer,
        "runtimePatches": [
            {"manager": _PATCH_MANAGER, "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [job]}}}}
        ],
    }


def _check_supported_fields(spec: Manifest, container: Manifest) -> None:
    supported = {*_TRAINER_FIELDS, *_PATCHED_CONTAINER_FIELDS, "env", "envFrom", "name", "resources"}
    sources = container.get("envFrom") or []
    author_sources = [source for source in sources if source.get("secretRef", {}).get("name") != STORE_SECRET]
    unsupported = [
        *sorted(set(container) - supported),
        *sorted(set(spec) - {*_PATCHED_POD_FIELDS, *_RUNTIME_FIELDS}),
        *(["envFrom"] * len(author_sources)),
    ]
    if unsupported:
        raise UsageError(f"a TrainJob has no place for {unsupported[0]}; drop it, or use backend='jobset' or 'job'")


_GANG_NAME = admit_placeholder("gang")
_JOB_SET_FIRST_HOST = f"{_GANG_NAME}-{REPLICATED_JOB}-0-0.{_GANG_NAME}"


class GangObjectKind(NamedTuple):
    """One kind of object: how to build it, and the conditions of Argo's ``resource`` template."""

    api_version: str
    kind: str
    build_spec: Callable[[AuthoredStep, Manifest, Manifest], Manifest]
    success: str
    """Success condition, in which ``{members}`` stands for the number of members."""
    failure: str


def _member_count(step: AuthoredStep) -> int:
    assert step.settings.gang is not None
    return step.settings.gang.members


def _indexed_job_spec(step: AuthoredStep, template: Manifest, workflow: Manifest, first_host: str) -> Manifest:
    """Spec of an Indexed Job whose member 0 has the host name ``first_host``."""
    members = _member_count(step)
    return {
        "completionMode": "Indexed",
        "completions": members,
        "parallelism": members,
        "backoffLimit": 0,
        # Otherwise the Job could create a replacement while a terminating pod still runs.
        "podReplacementPolicy": "Failed",
        # The Job fails without this policy too. The policy makes it record the first failure after the pod is gone.
        "podFailurePolicy": {
            "rules": [
                {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {"action": "FailJob", "onExitCodes": {"containerName": "main", "operator": "NotIn", "values": [0]}},
            ]
        },
        "template": pod_template(step, template, workflow, rank_variables(step, members, first_host)),
    }


def _job_spec(step: AuthoredStep, template: Manifest, workflow: Manifest) -> Manifest:
    """Kubernetes, ``batch/v1``. A Service of the namespace gives the host names."""
    spec = _indexed_job_spec(step, template, workflow, f"{_GANG_NAME}-0.{GANG_SERVICE}")
    spec["template"]["spec"]["subdomain"] = GANG_SERVICE
    return spec


def _elastic_job_spec(step: AuthoredStep, template: Manifest, workflow: Manifest) -> Manifest:
    """Spec of an Indexed Job with as many members as admit has granted, of which some may be lost."""
    pod = pod_template(step, template, workflow, elastic_variables(step, f"{_GANG_NAME}-0.{GANG_SERVICE}"))
    pod["spec"]["subdomain"] = GANG_SERVICE
    pod["spec"]["schedulingGates"] = [RawPlaceholder("gates")]
    members = RawPlaceholder("members")
    return {
        "completionMode": "Indexed",
        "completions": members,
        "parallelism": members,
        # The Job does not replace a lost member: the service has it make another one once there are GPUs for it.
        "backoffLimitPerIndex": 0,
        "maxFailedIndexes": RawPlaceholder("spare"),
        # No member ends well before one has stored the outputs, whichever that is (`tiphys.launch.member_files`).
        "successPolicy": {"rules": [{"succeededCount": 1}]},
        "podReplacementPolicy": "Failed",
        "template": pod,
    }


def _job_set_spec(step: AuthoredStep, template: Manifest, workflow: Manifest) -> Manifest:
    """JobSet, ``api/jobset/v1alpha2``. It creates a Service of the same name."""
    job = _indexed_job_spec(step, template, workflow, _JOB_SET_FIRST_HOST)
    return {
        "failurePolicy": {"maxRestarts": 0},
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "replicatedJobs": [{"name": REPLICATED_JOB, "replicas": 1, "template": {"spec": job}}],
    }


GANG_OBJECT_KINDS: Mapping[GangBackend, GangObjectKind] = {
    GangBackend.JOB: GangObjectKind("batch/v1", "Job", _job_spec, "status.succeeded == {members}", "status.failed > 0"),
    GangBackend.JOBSET: GangObjectKind(
        *("jobset.x-k8s.io/v1alpha2", "JobSet", _job_set_spec),
        success="status.terminalState == Completed",
        failure="status.terminalState == Failed",
    ),
    GangBackend.TRAINJOB: GangObjectKind(
        *("trainer.kubeflow.org/v1alpha1", "TrainJob", train_job_spec),
        success=f"status.jobsStatus.{RUNTIME_JOB_INDEX}.succeeded == 1",
        failure=f"status.jobsStatus.{RUNTIME_JOB_INDEX}.failed > 0",
    ),
}

_ELASTIC_JOB = GangObjectKind(
    *("batch/v1", "Job", _elastic_job_spec),
    # A count of pods does not show which of them ended. The Job writes its verdict as the first condition, before the
    # last pod is gone (KEP-3998, KEP-3850); otherwise a pod on a lost node delays success by minutes.
    success="status.conditions.0.type in (SuccessCriteriaMet, Complete)",
    failure="status.conditions.0.type in (FailureTarget, Failed)",
)


def select_object_kind(gang: GangSpec) -> GangObjectKind:
    """Return the kind of object that creates the members of ``gang``."""
    return GANG_OBJECT_KINDS[gang.backend] if gang.min_members is None else _ELASTIC_JOB
