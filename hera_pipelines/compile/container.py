"""Environment, placement and lifetime of a step's container: what compile adds to the author's template.

`build_step_environment` sets the variables of `tiphys.protocol.environment`.
`apply_placement` sets GPUs, nodes, volume, deadline and grace period.
"""

import json
import re
from typing import Any

from hera_pipelines.compile import references
from hera_pipelines.compile.authored_step import AuthoredStep, program_container
from hera_pipelines.compile.plugin_templates import admit_placeholder
from hera_pipelines.compile.settings import SharedVolume
from tiphys.checkpoint.exec.options import INSTALL_OPTION
from tiphys.checkpoint.exec.runtime import runtime_command
from tiphys.checkpoint.telemetry.metrics import MetricsEndpoint
from tiphys.errors import UsageError
from tiphys.launch.__main__ import MLFLOW_OPTION
from tiphys.protocol import environment
from tiphys.protocol.compiled_workflow import Manifest
from tiphys.protocol.step_spec import DELETE_AFTER_SECONDS, GPU_RESOURCE, GPU_TYPE_LABEL, CheckpointPolicy, GpuRequest
from tiphys.records.data_version import encode_data_versions
from tiphys.records.tracking import (
    MLFLOW_EXPERIMENT_NAME,
    MLFLOW_TRACKING_URI,
    TRACKING_ID_OUTPUT,
    MlflowTracking,
    WandbTracking,
)


def build_step_environment(step: AuthoredStep, store: str) -> list[Manifest]:
    """The variables of `tiphys.protocol.environment` as ``env`` of a container; ``store`` is the run store's URL."""
    values = {
        environment.STORE: store,
        environment.RUN: admit_placeholder("run-id"),
        environment.STEP: admit_placeholder("step") if step.fan_out else step.name,
        environment.ATTEMPT: admit_placeholder("attempt"),
        environment.GRACE_SECONDS: str(step.grace_seconds),
    }
    checkpoints = step.spec().checkpoints
    if checkpoints is not None:
        values |= _checkpoint_values(checkpoints, store)
        retry, gang = step.settings.retry, step.settings.gang
        values[environment.RESTART_CAUSES] = ",".join(retry.causes_in_place())
        values[environment.SPARE] = "" if retry.spare is None else "on" if retry.spare else "off"
        if gang is not None:
            is_elastic = gang.min_members is not None
            values[environment.MEMBERS] = admit_placeholder("members") if is_elastic else str(gang.members)
        values[environment.IMAGE] = program_container(step.program).get("image", "")
    if step.settings.registration is not None:
        values[environment.REGISTRATION] = step.settings.registration.model_dump_json()
    values |= path_variables(step) | _tracking_variables(step) | data_variables(step)
    return [{"name": name, "value": value} for name, value in values.items() if value]


def _checkpoint_values(policy: CheckpointPolicy, store: str) -> dict[str, str]:
    return {
        environment.LINEAGE: admit_placeholder("lineage"),
        environment.RESUME_FROM: admit_placeholder("resume-from"),
        environment.CHECKPOINT_URI: admit_placeholder("checkpoint-uri"),
        environment.CHECKPOINT_STORE: policy.store or store,
        environment.SAVE_EVERY: _format_save_interval(policy),
        environment.KEEP_LAST: "all" if policy.keep_last is None else str(policy.keep_last),
        environment.METRICS: policy.metrics,
        **_optional_values(policy),
    }


def _optional_values(policy: CheckpointPolicy) -> dict[str, str]:
    """Variables of rarely used options: they are left out where unset, to keep other Workflows small."""
    values = {
        environment.KEEP_EVERY: f"{policy.keep_every} steps" if policy.keep_every else "",
        environment.KEEP_BEST: str(policy.keep_best or ""),
        environment.ASYNCHRONOUS: "" if policy.asynchronous else "false",
        environment.WHEN_BUSY: policy.when_busy or "",
        environment.CACHE: policy.cache,
        environment.NEAR_COPY: "" if policy.near_copy else "false",
    }
    if policy.hang_after_seconds is not None:
        values[environment.HANG_AFTER_SECONDS] = f"{policy.hang_after_seconds:g}"
    if policy.delete_after_seconds != DELETE_AFTER_SECONDS:
        values[environment.DELETE_AFTER_SECONDS] = f"{policy.delete_after_seconds:g}"
    return values


def _format_save_interval(policy: CheckpointPolicy) -> str:
    if policy.every_bounds:
        lowest, highest = policy.every_bounds
        return f"auto:{lowest:g}s..{highest:g}s"
    return f"{policy.every:g}{'s' if policy.every_unit == 'seconds' else ' steps'}"


LAUNCHER_ARGUMENTS = ("-P", "-m", "tiphys.launch")
"""Arguments of Python for the launcher; its options, ``--`` and the program follow."""
EXEC_PROGRAM = "tiphys-exec"
_INTERPRETER = re.compile(r"(.*/)?python[\d.]*")
RUNTIME_VOLUME, _RUNTIME_FOLDER = "tiphys-runtime", "/tiphys-runtime"


def launch_program(template: Manifest, step: AuthoredStep) -> None:
    """Put the launcher in front of the program of a training, and of a step that MLflow tracks.

    `tiphys-exec` is one itself. Without ``runtime_image`` the program's own Python runs the launcher, if it has one.

    Raises:
        UsageError: the container names no command, so that the program is unknown.
    """
    is_tracked = isinstance(step.settings.tracking, MlflowTracking)
    if not (step.is_training or is_tracked):
        return
    container, image = program_container(template), step.settings.runtime_image
    command = container.get("command") or []
    if not command:
        raise UsageError(
            f"step {step.name!r} has no command, and the entry point of its image is unknown, before which the "
            f"launcher of {'MLflow' if is_tracked else 'trainings'} belongs; add command=[…]"
        )
    if image and is_tracked:
        raise UsageError(
            f"step {step.name!r} has tracking=Mlflow(…) and runtime_image={image!r}, which lacks what MLflow needs; "
            "install tiphys in the image of the step, and drop runtime_image"
        )
    is_exec = command[0].rpartition("/")[2] == EXEC_PROGRAM
    if image:
        _bring_runtime(template, container, image)
        module, rest = ("tiphys.checkpoint.exec", command[1:]) if is_exec else ("tiphys.launch", ["--", *command])
        container["command"] = [*runtime_command(_RUNTIME_FOLDER, module), *rest]
    elif is_tracked or not is_exec:
        python = command[0] if _INTERPRETER.fullmatch(command[0]) else "python"
        options = [MLFLOW_OPTION] if is_tracked else []
        container["command"] = [python, *LAUNCHER_ARGUMENTS, *options, "--", *command]


def _bring_runtime(template: Manifest, container: Manifest, image: str) -> None:
    """Have an init container copy the launcher, with a Python of its own, into the pod."""
    mount = {"name": RUNTIME_VOLUME, "mountPath": _RUNTIME_FOLDER}
    template["volumes"] = [*(template.get("volumes") or []), {"name": RUNTIME_VOLUME, "emptyDir": {}}]
    template["initContainers"] = [
        {
            "name": RUNTIME_VOLUME,
            "image": image,
            "command": ["python", "-m", "tiphys.checkpoint.exec", INSTALL_OPTION, _RUNTIME_FOLDER],
            "volumeMounts": [mount],
        },
        *(template.get("initContainers") or []),
    ]
    container["volumeMounts"] = [*(container.get("volumeMounts") or []), {**mount, "readOnly": True}]


def _tracking_variables(step: AuthoredStep) -> dict[str, str]:
    """Variables of the tracking service that the author has not set."""
    match step.settings.tracking:
        case None:
            return {}
        case MlflowTracking(uri=uri, experiment=experiment):
            values = {MLFLOW_TRACKING_URI: uri, MLFLOW_EXPERIMENT_NAME: experiment}
        case WandbTracking(project=project, entity=entity):
            run = admit_placeholder("run-id")
            values = {
                "WANDB_RUN_ID": admit_placeholder(TRACKING_ID_OUTPUT),
                "WANDB_RESUME": "allow",
                "WANDB_RUN_GROUP": run,
                "WANDB_NAME": f"{run}/{admit_placeholder('step') if step.fan_out else step.name}",
                "WANDB_PROJECT": project,
                "WANDB_ENTITY": entity,
            }
    own = {variable["name"] for variable in program_container(step.program).get("env") or []}
    return {name: value for name, value in values.items() if name not in own}


def path_variables(step: AuthoredStep) -> dict[str, str]:
    """The paths of the inputs and outputs, by the variables that `tiphys.inputs` and `tiphys.outputs` read."""
    inputs = {environment.input_path_variable(a["name"]): a["path"] for a in step.input_artifacts}
    parameters = {environment.output_path_variable(p["name"]): p["valueFrom"]["path"] for p in step.output_parameters}
    artifacts = {environment.output_path_variable(a["name"]): a["path"] for a in step.output_artifacts}
    return inputs | parameters | artifacts


def data_variables(step: AuthoredStep) -> dict[str, str]:
    """The variable with the versions of the data that the step declares; empty where it declares none."""
    return {environment.DATA: encode_data_versions(step.data)} if step.data else {}


GPU_MEMORY_MB = "nvidia.com/gpu.memory"
_LOOPBACK = re.compile(r"localhost$|127\.|::1$")
METRICS_PORT = "tiphys-metrics"
"""Name of the container port at which a training serves metrics; the chart's PodMonitor looks for it."""


def apply_placement(template: Manifest, step: AuthoredStep) -> None:
    """Write the step's GPUs, nodes, volume, deadline and grace period into its run template."""
    settings = step.settings
    if settings.gpu is not None:
        _request_gpus(template, settings.gpu)
    if settings.spot:
        _allow_spot(template, step)
    if settings.volume is not None:
        _mount_volume(template, settings.volume)
    if settings.checkpoints is not None and settings.checkpoints.metrics:
        _expose_metrics(template, settings.checkpoints.metrics)
    if settings.deadline_seconds is not None:
        template["activeDeadlineSeconds"] = settings.deadline_seconds
    if settings.gang is not None:
        return  # Argo applies podSpecPatch only to pods that it creates, and others create those of a gang
    if step.is_training:
        # admit adds what is known only at run time: nodes to avoid and more memory, beside the grace period.
        template["podSpecPatch"] = admit_placeholder("pod-patch")
    elif settings.grace_seconds is not None:
        template["podSpecPatch"] = json.dumps({"terminationGracePeriodSeconds": step.grace_seconds})


def _request_gpus(template: Manifest, gpu: GpuRequest) -> None:
    resources = program_container(template).setdefault("resources", {})
    resources["limits"] = {**(resources.get("limits") or {}), gpu.resource: str(gpu.gpus_per_member)}
    if gpu.resource != GPU_RESOURCE:
        return  # what selects their nodes is known to the flavor alone, and the plugin adds it to the pod
    if gpu.gpu_type is not None:
        template["nodeSelector"] = {**(template.get("nodeSelector") or {}), GPU_TYPE_LABEL: gpu.gpu_type}
    if gpu.gpu_types:
        _require_node(template, {"key": GPU_TYPE_LABEL, "operator": "In", "values": list(gpu.gpu_types)})
    if gpu.min_gpu_memory_mb is not None:
        # Gt is strict, and Kubernetes has no operator for "at least".
        _require_node(template, {"key": GPU_MEMORY_MB, "operator": "Gt", "values": [str(gpu.min_gpu_memory_mb - 1)]})


def _require_node(template: Manifest, expression: Manifest) -> None:
    """Add ``expression`` to every node selector term: Kubernetes needs one term, with all its expressions, to match."""
    node_affinity = template.setdefault("affinity", {}).setdefault("nodeAffinity", {})
    required = node_affinity.setdefault("requiredDuringSchedulingIgnoredDuringExecution", {})
    for term in required.setdefault("nodeSelectorTerms", [{}]):
        term["matchExpressions"] = [*(term.get("matchExpressions") or []), expression]


def _allow_spot(template: Manifest, step: AuthoredStep) -> None:
    kinds = step.settings.spot
    tolerated: list[Any] = [
        {"key": kind.label, "operator": "Equal", "value": kind.value, "effect": "NoSchedule"}
        for kind in kinds
        if kind.tainted
    ]
    if tolerated:
        template["tolerations"] = [*(template.get("tolerations") or []), *tolerated]
    if len(kinds) == 1 and not step.may_leave_spot:
        template["nodeSelector"] = {**(template.get("nodeSelector") or {}), kinds[0].label: kinds[0].value}


def _expose_metrics(template: Manifest, where: str) -> None:
    """Name the port of the first process, by which a PodMonitor finds it; nothing for loopback."""
    endpoint = MetricsEndpoint.parse(where)
    if not _LOOPBACK.match(endpoint.address):
        container = program_container(template)
        container["ports"] = [*(container.get("ports") or []), {"name": METRICS_PORT, "containerPort": endpoint.port}]


def _mount_volume(template: Manifest, volume: SharedVolume) -> None:
    claim = {"name": references.CHECKPOINT_VOLUME, "persistentVolumeClaim": {"claimName": volume.claim}}
    template["volumes"] = [*(template.get("volumes") or []), claim]
    container = program_container(template)
    mount = {"name": references.CHECKPOINT_VOLUME, "mountPath": volume.mount_path}
    container["volumeMounts"] = [*(container.get("volumeMounts") or []), mount]
