"""Where the pod of a step may run, what it gets there, and how long it may take to leave.

What a gated container finds in its environment.
"""

import json
from typing import Any

from hera_pipelines.compile import references as names
from hera_pipelines.compile.gated_step import GatedStep, program_container
from hera_pipelines.compile.plugin_templates import input_value
from hera_pipelines.compile.settings import SharedVolume
from tiphys.errors import UsageError
from tiphys.protocol import environment
from tiphys.protocol.compiled_workflow import Manifest
from tiphys.protocol.step_spec import DELETE_AFTER_SECONDS, CheckpointPolicy, GpuRequest


def variables(step: GatedStep, store: str) -> list[Manifest]:
    """The variables of `tiphys.protocol.environment`, as Kubernetes wants them."""
    values = {
        environment.STORE: store,
        environment.RUN: _answer("run-id"),
        environment.STEP: _answer("step"),
        environment.ATTEMPT: _answer("attempt"),
        environment.GRACE_SECONDS: str(step.grace_seconds),
    }
    checkpoints = step.spec().checkpoints
    if checkpoints is not None:
        values |= _checkpoint_values(checkpoints, store)
        values[environment.IMAGE] = program_container(step.program).get("image", "")
    values |= _paths(step)
    return [{"name": name, "value": value} for name, value in values.items() if value]


def _checkpoint_values(policy: CheckpointPolicy, store: str) -> dict[str, str]:
    return {
        environment.LINEAGE: _answer("lineage"),
        environment.RESUME_FROM: _answer("resume-from"),
        environment.CHECKPOINT_URI: _answer("checkpoint-uri"),
        environment.CHECKPOINT_STORE: policy.store or store,
        environment.SAVE_EVERY: _every(policy),
        environment.KEEP_LAST: "all" if policy.keep_last is None else str(policy.keep_last),
        environment.METRICS: policy.metrics,
        **_rarely_set(policy),
    }


def _rarely_set(policy: CheckpointPolicy) -> dict[str, str]:
    """What few ask for, so that the Workflows of all others do not grow by it."""
    values = {
        environment.KEEP_EVERY: f"{policy.keep_every} steps" if policy.keep_every else "",
        environment.KEEP_BEST: str(policy.keep_best or ""),
        environment.ASYNCHRONOUS: "" if policy.asynchronous else "false",
        environment.WHEN_BUSY: policy.when_busy or "",
        environment.CACHE: policy.cache,
    }
    if policy.hang_after_seconds is not None:
        values[environment.HANG_AFTER_SECONDS] = f"{policy.hang_after_seconds:g}"
    if policy.delete_after_seconds != DELETE_AFTER_SECONDS:
        values[environment.DELETE_AFTER_SECONDS] = f"{policy.delete_after_seconds:g}"
    return values


def _every(policy: CheckpointPolicy) -> str:
    if policy.every_bounds:
        lowest, highest = policy.every_bounds
        return f"auto:{lowest:g}s..{highest:g}s"
    return f"{policy.every:g}{'s' if policy.every_unit == 'seconds' else ' steps'}"


def _paths(step: GatedStep) -> dict[str, str]:
    inputs = {environment.input_path_variable(a["name"]): a["path"] for a in step.input_artifacts}
    parameters = {environment.output_path_variable(p["name"]): p["valueFrom"]["path"] for p in step.output_parameters}
    artifacts = {environment.output_path_variable(a["name"]): a["path"] for a in step.output_artifacts}
    return inputs | parameters | artifacts


def _answer(name: str) -> str:
    return f"{{{{inputs.parameters.{names.answer(name)}}}}}"


GPU = "nvidia.com/gpu"
GPU_PRODUCT = "nvidia.com/gpu.product"
GPU_MEMORY_MB = "nvidia.com/gpu.memory"


def place(template: Manifest, step: GatedStep) -> None:
    """Write the step's GPUs, nodes, volume, deadline and grace period into its run template."""
    settings = step.settings
    if settings.gpu is not None:
        _request_gpus(template, step.name, settings.gpu)
    if settings.spot:
        _allow_spot(template, step)
    if settings.volume is not None:
        _mount(template, settings.volume)
    if settings.deadline_seconds is not None:
        template["activeDeadlineSeconds"] = settings.deadline_seconds
    if settings.gang is not None:
        return  # its pods are not Argo's, which alone can be patched
    if step.trains:
        # admit knows more than we do: nodes to avoid, memory to add, and the grace period.
        template["podSpecPatch"] = input_value(names.answer("pod-patch"))
    elif settings.grace_seconds is not None:
        template["podSpecPatch"] = json.dumps({"terminationGracePeriodSeconds": step.grace_seconds})


def _request_gpus(template: Manifest, step: str, gpu: GpuRequest) -> None:
    limits = program_container(template).setdefault("resources", {}).setdefault("limits", {})
    each = gpu.gpus // gpu.members
    if str(limits.setdefault(GPU, str(each))) != str(each):
        raise UsageError(
            f"step {step!r} asks for {each} GPU{'s' if each > 1 else ''} and its resources for {limits[GPU]}; "
            f"drop {GPU} from the resources"
        )
    if gpu.gpu_type is not None:
        template["nodeSelector"] = {**(template.get("nodeSelector") or {}), GPU_PRODUCT: gpu.gpu_type}
    if gpu.min_gpu_memory_mb is not None:
        # Gt is strict, and Kubernetes has no operator for "at least".
        _require(template, {"key": GPU_MEMORY_MB, "operator": "Gt", "values": [str(gpu.min_gpu_memory_mb - 1)]})


def _require(template: Manifest, expression: Manifest) -> None:
    """Add ``expression`` to every node selector term: terms are alternatives, expressions of one are not."""
    node_affinity = template.setdefault("affinity", {}).setdefault("nodeAffinity", {})
    required = node_affinity.setdefault("requiredDuringSchedulingIgnoredDuringExecution", {})
    for term in required.setdefault("nodeSelectorTerms", [{}]):
        term["matchExpressions"] = [*(term.get("matchExpressions") or []), expression]


def _allow_spot(template: Manifest, step: GatedStep) -> None:
    kinds = step.settings.spot
    tolerated: list[Any] = [
        {"key": kind.label, "operator": "Equal", "value": kind.value, "effect": "NoSchedule"}
        for kind in kinds
        if kind.tainted
    ]
    if tolerated:
        template["tolerations"] = [*(template.get("tolerations") or []), *tolerated]
    if len(kinds) == 1 and not step.leaves_spot:
        template["nodeSelector"] = {**(template.get("nodeSelector") or {}), kinds[0].label: kinds[0].value}


def _mount(template: Manifest, volume: SharedVolume) -> None:
    claim = {"name": names.CHECKPOINT_VOLUME, "persistentVolumeClaim": {"claimName": volume.claim}}
    template["volumes"] = [*(template.get("volumes") or []), claim]
    container = program_container(template)
    mount = {"name": names.CHECKPOINT_VOLUME, "mountPath": volume.mount_path}
    container["volumeMounts"] = [*(container.get("volumeMounts") or []), mount]
