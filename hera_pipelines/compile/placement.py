"""Where the pod of a step may run, what it gets there, and how long it may take to leave."""

import json
from typing import Any

from hera_pipelines.compile import names
from hera_pipelines.compile.gated import GatedStep, program_container
from hera_pipelines.compile.operations import input_value
from hera_pipelines.compile.settings import SharedVolume
from tiphys.errors import UsageError
from tiphys.protocol.pipeline import Manifest
from tiphys.protocol.policy import GpuRequest

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
