"""A TrainJob of Kubeflow's trainer: it names a runtime, and says what is different from it.

Most of a pod stands in the runtime ``tiphys``, which the chart installs: a
TrainJob itself can neither forbid that a member is started again alone, nor take
variables from a Secret. Source: ``pkg/apis/trainer/v1alpha1`` of trainer 2.3.
"""

from hera_pipelines.compile.gang.pod import pod_template
from hera_pipelines.compile.gang.ranks import processes
from hera_pipelines.compile.gated import GatedStep
from tiphys.errors import UsageError
from tiphys.protocol.pipeline import Manifest
from tiphys.protocol.policy import STORE_SECRET

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
