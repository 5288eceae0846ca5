"""Builds the pod patch of an attempt: where its pods must run, and what an escalation changes.

The ledger counts GPUs of certain nodes, so the pods must be scheduled there.
After failures, an escalation (`tiphys.failures.escalation`) changes memory,
nodes or the batch size of the next attempt. Both become one patch of the pod's
spec. It is worked out from the step's spec and the claim whenever it is needed
and never stored, so no record can bring a pod patch of its own. Argo applies it
to a single pod. A merge patch replaces whole lists, so each list of the patch
includes the entries of the compiled pod.

No patch reaches the pods of a gang. Admit returns the same values as output
parameters for the manifest that creates the pods, see
`tiphys_plugin.attempts.gangs`; the declared memory is the default of its parameter.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from tiphys.errors import UsageError
from tiphys.failures.escalation import AttemptBaseline, compute_escalation
from tiphys.protocol.compiled_workflow import Manifest, find_template
from tiphys.protocol.environment import BATCH_SCALE
from tiphys.protocol.gang import HOSTNAME_LABEL
from tiphys.protocol.operations import MEMORY_OUTPUTS
from tiphys.protocol.quantities import format_memory_quantity, parse_memory_bytes
from tiphys.protocol.step_spec import GPU_TYPE_LABEL, NodeLabelValue, StepKind
from tiphys.records import AttemptClaim, Escalation
from tiphys.store import Attempt
from tiphys_plugin.quota.flavors import Flavor
from tiphys_plugin.quota.lease import Admitted
from tiphys_plugin.quota.queue import ANY_TYPE
from tiphys_plugin.quota.queues import Queues
from tiphys_plugin.runtime.context import StepCall


def build_pod_patch(call: StepCall, claim: AttemptClaim, flavor: Flavor | None) -> dict[str, Any]:
    """Strategic merge patch for the pod of a training attempt; empty for other steps.

    If the step's author names a GPU type, the compiled step itself has the node
    selector, so that it also works in a cluster without queues.

    Args:
        call: The call of the step.
        claim: The attempt, with its nodes and its escalation.
        flavor: The flavor that the claim names; None if it names none.

    Raises:
        UsageError: tolerations or node affinity of the step have a placeholder of Argo, so nothing can be added.
    """
    patch = build_placement_patch(call, claim, flavor)
    escalation = claim.escalation
    if escalation is None or not escalation.explanation or call.spec.gang is not None:
        return patch
    pod = _pod_template(call)
    container, preferred = _container_patch(call, escalation), _avoid_nodes_patch(pod, escalation)
    for addition in (container, preferred, _leave_spot_patch(call, pod, patch, escalation)):
        patch = merge_patches(patch, addition)
    return patch


def build_placement_patch(call: StepCall, claim: AttemptClaim, flavor: Flavor | None) -> dict[str, Any]:
    """The part of `build_pod_patch` that follows from the lease; a gang takes it for its own manifest."""
    if call.spec.kind is not StepKind.TRAIN:
        return {}
    patch: dict[str, Any] = {"terminationGracePeriodSeconds": math.ceil(call.spec.grace_seconds)}
    if selector := _node_selector(claim, flavor):
        patch["nodeSelector"] = selector
    if added := [toleration.manifest() for toleration in flavor.tolerations] if flavor is not None else []:
        # A merge patch replaces the pod's list; the manifest of a gang appends to its own.
        patch["tolerations"] = added if call.spec.gang is not None else [*_step_tolerations(call), *added]
    return patch


def chosen_gpu_type(call: StepCall, lease: Admitted | None) -> str:
    """The GPU type that the ledger chose for a request without one; empty if it chose none, or a flavor."""
    if lease is None or lease.flavor is not None or call.spec.gpu is None or call.spec.gpu.gpu_type is not None:
        return ""
    return lease.pool if lease.pool != ANY_TYPE else ""


def _node_selector(claim: AttemptClaim, flavor: Flavor | None) -> dict[str, str]:
    if flavor is not None:
        selector = flavor.node_selector
    else:
        selector = {GPU_TYPE_LABEL: claim.gpu_type} if claim.gpu_type else {}
    return selector if len(claim.nodes) != 1 else {**selector, HOSTNAME_LABEL: claim.nodes[0]}


def _step_tolerations(call: StepCall) -> list[dict[str, Any]]:
    """The tolerations that Argo gives the pod (``workflow/controller/workflowpod.go``, addSchedulingConstraints)."""
    spec = call.binding.pipeline.manifest["spec"]
    levels = (
        find_template(call.binding.pipeline.manifest, f"{call.spec.name}-run"),
        spec.get("templateDefaults"),
        spec,
    )
    tolerations: list[dict[str, Any]] = next(
        (level["tolerations"] for level in levels if level and level.get("tolerations")), []
    )
    if "{{" in json.dumps(tolerations):
        raise UsageError(
            f"step {call.spec.name!r}: the tolerations of its flavor cannot be added to its own, because Argo fills "
            "in a placeholder there; write the step's tolerations without placeholders, or add them to the flavor"
        )
    return tolerations


ContainerResources = Mapping[str, Mapping[str, Any]]
"""``requests`` and ``limits`` of a container."""


def declared_resources(call: StepCall) -> ContainerResources:
    """Resources of the step's container; for a gang only the memory of a member's container."""
    manifest = call.binding.pipeline.manifest
    if call.spec.gang is None:
        run = find_template(manifest, f"{call.spec.name}-run")
        container: Manifest = run.get("container") or run.get("script") or {}
        return container.get("resources") or {}
    outputs = (find_template(manifest, f"{call.spec.name}-admit").get("outputs") or {}).get("parameters") or []
    defaults = {output["name"]: (output.get("valueFrom") or {}).get("default") for output in outputs}
    return {side: {"memory": defaults[name]} for side, name in MEMORY_OUTPUTS.items() if defaults.get(name)}


def memory_limit_bytes(resources: ContainerResources) -> int | None:
    """Memory limit of a container, or its request if it has no limit; None without both."""
    for side in ("limits", "requests"):
        if (memory := (resources.get(side) or {}).get("memory")) is not None:
            return parse_memory_bytes(memory, f"resources.{side}.memory")
    return None


def grow_memory(resources: ContainerResources, wanted_bytes: int | None) -> dict[str, dict[str, str]]:
    """Request and limit of memory, grown by the same factor; empty if the current ones suffice."""
    base = memory_limit_bytes(resources)
    if wanted_bytes is None or base is None or wanted_bytes <= base:
        return {}
    grown = {}
    for side in ("requests", "limits"):
        if (memory := (resources.get(side) or {}).get("memory")) is not None:
            share = parse_memory_bytes(memory, "resources") / base
            grown[side] = {"memory": format_memory_quantity(round(wanted_bytes * share))}
    return grown


def memory_output_parameters(call: StepCall, claim: AttemptClaim) -> dict[str, str]:
    """Admit's output parameters for the memory of a gang's pods, under the names that the compiled step uses."""
    if call.spec.gang is None or call.spec.retry.memory_ceiling_bytes is None:
        return {}
    resources = declared_resources(call)
    wanted_bytes = claim.escalation.memory_bytes if claim.escalation else None
    effective = {**resources, **grow_memory(resources, wanted_bytes)}
    return {name: str(effective[side]["memory"]) for side, name in MEMORY_OUTPUTS.items() if side in effective}


_MAIN_CONTAINER = "main"
"""Argo's name for the container of a container or script template."""
_MAX_PREFERENCE_WEIGHT = 100


def plan_escalation(call: StepCall, attempts: Sequence[Attempt], step_key: str) -> Escalation | None:
    """What changes for the next attempt; None for nothing.

    No patch reaches the pods of a gang: memory and nodes are output parameters for
    the manifest that creates them, and they read the batch scale from the claim.
    That manifest has no preference for nodes, so a gang avoids nodes only where the
    ledger chooses its nodes.
    """
    spec = call.spec
    if spec.kind is not StepKind.TRAIN:
        return None
    policy = spec.retry
    if spec.gang is not None and not _ledger_chooses_nodes(call):
        policy = policy.model_copy(update={"avoid_node_after": None})
    base = None if policy.memory_ceiling_bytes is None else memory_limit_bytes(declared_resources(call))
    return compute_escalation(attempts, policy, AttemptBaseline(call.binding.submission, step_key, base))


def _ledger_chooses_nodes(call: StepCall) -> bool:
    queues = call.context.ledger.snapshot().queues if call.spec.gpu is not None else None
    return isinstance(queues, Queues) and queues.node_inventory is not None


def spot_requirements(call: StepCall, claim: AttemptClaim, flavor: Flavor | None) -> list[dict[str, Any]]:
    """Node requirements of a gang on spot nodes: excludes them after an escalation, else applies ``spot=``.

    A single pod has ``spot=`` in its node selector, from which a patch can remove it.
    """
    spot, leaves_spot = call.spec.spot, claim.escalation is not None and claim.escalation.on_demand
    if leaves_spot and not _has_spot_selector(call, _node_selector(claim, flavor)):
        return [_not_in_requirement(kind) for kind in spot]
    required_spot = spot if len(spot) == 1 else ()
    return [{"key": kind.label, "operator": "In", "values": [kind.value]} for kind in required_spot]


def merge_patches(base: Mapping[str, Any], override: Mapping[str, Any]) -> dict[str, Any]:
    """Both patches as one; for a value in both, ``override`` wins."""
    result = dict(base)
    for key, value in override.items():
        base_value = result.get(key)
        result[key] = (
            merge_patches(base_value, value)
            if isinstance(base_value, Mapping) and isinstance(value, Mapping)
            else value
        )
    return result


def _container_patch(call: StepCall, escalation: Escalation) -> dict[str, Any]:
    main: dict[str, Any] = {}
    if resources := grow_memory(declared_resources(call), escalation.memory_bytes):
        main["resources"] = resources
    if escalation.batch_scale < 1:
        main["env"] = [{"name": BATCH_SCALE, "value": f"{escalation.batch_scale:g}"}]
    return {"containers": [{"name": _MAIN_CONTAINER, **main}]} if main else {}


def _avoid_nodes_patch(pod: Manifest, escalation: Escalation) -> dict[str, Any]:
    """A preference, not a requirement: if no other node is free, the node of the failure is better than none."""
    pod_preferences = _node_affinity(pod).get("preferredDuringSchedulingIgnoredDuringExecution") or []
    if not escalation.avoided_nodes or "{{" in json.dumps(
        pod_preferences
    ):  # Argo fills in the placeholder, so the list stays
        return {}
    elsewhere = {"key": HOSTNAME_LABEL, "operator": "NotIn", "values": list(escalation.avoided_nodes)}
    preference = {"weight": _MAX_PREFERENCE_WEIGHT, "preference": {"matchExpressions": [elsewhere]}}
    return _affinity_patch({"preferredDuringSchedulingIgnoredDuringExecution": [*pod_preferences, preference]})


def _leave_spot_patch(
    call: StepCall, pod: Manifest, pod_patch: Mapping[str, Any], escalation: Escalation
) -> dict[str, Any]:
    spot = call.spec.spot
    if not escalation.on_demand or not spot or _has_spot_selector(call, pod_patch.get("nodeSelector") or {}):
        return {}
    required = _node_affinity(pod).get("requiredDuringSchedulingIgnoredDuringExecution") or {}
    if "{{" in json.dumps(required):
        raise UsageError(
            f"step {call.spec.name!r}: it cannot be kept off spot nodes, because Argo fills in a placeholder of its "
            "node affinity; write the affinity without placeholders, or drop on_demand_after from Retries(…)"
        )
    elsewhere = [_not_in_requirement(kind) for kind in spot]
    terms = [
        {**term, "matchExpressions": [*(term.get("matchExpressions") or []), *elsewhere]}
        for term in required.get("nodeSelectorTerms") or [{}]
    ]
    patch = _affinity_patch({"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}})
    own = pod.get("nodeSelector") or {}
    # In a merge patch, None removes a label from the pod's own selector.
    removed = {kind.label: None for kind in spot if own.get(kind.label) == kind.value}
    return {**patch, "nodeSelector": removed} if removed else patch


def _has_spot_selector(call: StepCall, selector: Mapping[str, str]) -> bool:
    """Whether the ledger granted the attempt GPUs of spot nodes, so that its pods must run there."""
    return any(selector.get(kind.label) == kind.value for kind in call.spec.spot)


def _not_in_requirement(kind: NodeLabelValue) -> dict[str, Any]:
    return {"key": kind.label, "operator": "NotIn", "values": [kind.value]}


def _affinity_patch(node_affinity: Manifest) -> dict[str, Any]:
    return {"affinity": {"nodeAffinity": node_affinity}}


def _node_affinity(pod: Manifest) -> Manifest:
    affinity: Manifest = (pod.get("affinity") or {}).get("nodeAffinity") or {}
    return affinity


def _pod_template(call: StepCall) -> Manifest:
    """The pod's template with Argo's defaults (``workflow/controller/workflowpod.go``, addSchedulingConstraints)."""
    manifest = call.binding.pipeline.manifest
    spec = manifest["spec"]
    run = find_template(manifest, f"{call.spec.name}-run")
    levels = (run, spec.get("templateDefaults") or {}, spec)
    effective = {
        field: next((level[field] for level in levels if level.get(field)), None)
        for field in ("affinity", "nodeSelector")
    }
    return {**run, **effective}
