"""An escalation as a patch of the pod: memory, nodes, and a word to the program.

What to change is decided in `tiphys.failures.escalation`; here it meets the pod
that compile has made, since a merge patch replaces whole lists of it.

Where the pods of an attempt have to run, so that what the ledger counted is true.

It is written down once, as a patch of a pod's spec, in the claim of the attempt.
Argo applies it to the pod of a single one; the pods of a gang get the same by
the manifest that makes them, see `tiphys_plugin.attempts.gangs`.

How much memory the container of a training declares, and what it becomes for the next attempt.

Of a single pod the template of its container says it, and a patch of the pod
changes it. Of several pods admit answers it, into the manifest that makes them;
what was declared is the default of that answer.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from tiphys.errors import UsageError
from tiphys.failures.escalation import Situation, escalate
from tiphys.protocol.compiled_workflow import Manifest, template
from tiphys.protocol.environment import BATCH_SCALE
from tiphys.protocol.operations import MEMORY_OUTPUTS
from tiphys.protocol.quantities import memory_bytes, memory_quantity
from tiphys.protocol.step_spec import Kind, NodeKind
from tiphys.records import AttemptClaim, Escalation
from tiphys.store import Attempt
from tiphys_plugin.attempts.gangs import HOSTNAME_LABEL
from tiphys_plugin.quota.flavors import GPU_TYPE_LABEL
from tiphys_plugin.quota.lease import Admitted
from tiphys_plugin.quota.queues import ANY_TYPE
from tiphys_plugin.runtime.context import StepCall


def pod_patch(call: StepCall, lease: Admitted | None) -> str:
    """Strategic merge patch for the pod of a training attempt; empty for other steps.

    Of the type that the step's author names, the compiled step itself has the
    label, so that it lands on such a GPU where nobody declares queues, too.

    Raises:
        UsageError: tolerations of a flavor are needed and cannot be added to those of the step.
    """
    if call.spec.kind is not Kind.TRAIN:
        return ""
    patch: dict[str, object] = {"terminationGracePeriodSeconds": math.ceil(call.spec.grace_seconds)}
    if selector := _selector(call, lease):
        patch["nodeSelector"] = selector
    if added := _tolerations(lease):
        # A merge patch has its own list take the place of the other; the manifest of a gang adds to its own.
        patch["tolerations"] = added if call.spec.gang is not None else [*_own_tolerations(call), *added]
    return json.dumps(patch, sort_keys=True)


def chosen_type(patch: str) -> str | None:
    """The GPU type that `pod_patch` sends the pod to."""
    chosen: str | None = json.loads(patch or "{}").get("nodeSelector", {}).get(GPU_TYPE_LABEL)
    return chosen


def _selector(call: StepCall, lease: Admitted | None) -> dict[str, str]:
    selector: dict[str, str] = {}
    if lease is None:
        return selector
    if lease.flavor is not None:
        selector = lease.flavor.selector
    elif call.spec.gpu is not None and call.spec.gpu.gpu_type is None and lease.pool != ANY_TYPE:
        selector = {GPU_TYPE_LABEL: lease.pool}
    return selector if len(lease.nodes) != 1 else {**selector, HOSTNAME_LABEL: lease.nodes[0]}


def _tolerations(lease: Admitted | None) -> list[dict[str, Any]]:
    return (
        [one.manifest() for one in lease.flavor.tolerations] if lease is not None and lease.flavor is not None else []
    )


def _own_tolerations(call: StepCall) -> list[dict[str, Any]]:
    """Those that Argo gives the pod (``workflow/controller/workflowpod.go``, addSchedulingConstraints)."""
    spec = call.binding.pipeline.manifest["spec"]
    places = (template(call.binding.pipeline.manifest, f"{call.spec.name}-run"), spec.get("templateDefaults"), spec)
    own: list[dict[str, Any]] = next((one["tolerations"] for one in places if one and one.get("tolerations")), [])
    if "{{" in json.dumps(own):
        raise UsageError(
            f"step {call.spec.name!r}: the tolerations of its flavor cannot be added to its own, in which Argo fills "
            "in a value; write them out, or have the flavor tolerate it"
        )
    return own


Resources = Mapping[str, Mapping[str, Any]]
"""``requests`` and ``limits`` of a container."""


def declared(call: StepCall) -> Resources:
    """Resources of the step's container, or of that of each of its members: of these the memory alone."""
    manifest = call.binding.pipeline.manifest
    if call.spec.gang is None:
        run = template(manifest, f"{call.spec.name}-run")
        container: Manifest = run.get("container") or run.get("script") or {}
        return container.get("resources") or {}
    outputs = (template(manifest, f"{call.spec.name}-admit").get("outputs") or {}).get("parameters") or []
    defaults = {one["name"]: (one.get("valueFrom") or {}).get("default") for one in outputs}
    return {side: {"memory": defaults[name]} for side, name in MEMORY_OUTPUTS.items() if defaults.get(name)}


def most_bytes(resources: Resources) -> int | None:
    """What a container may use; None where nothing limits it."""
    for side in ("limits", "requests"):
        if (memory := (resources.get(side) or {}).get("memory")) is not None:
            return memory_bytes(memory, f"resources.{side}.memory")
    return None


def grown(resources: Resources, wanted_bytes: int | None) -> dict[str, dict[str, str]]:
    """Request and limit of memory, both grown alike; empty where they suffice."""
    base = most_bytes(resources)
    if wanted_bytes is None or base is None or wanted_bytes <= base:
        return {}
    more = {}
    for side in ("requests", "limits"):
        if (memory := (resources.get(side) or {}).get("memory")) is not None:
            share = memory_bytes(memory, "resources") / base
            more[side] = {"memory": memory_quantity(round(wanted_bytes * share))}
    return more


def answers(call: StepCall, claim: AttemptClaim) -> dict[str, str]:
    """What admit answers of memory for several pods, under the names that the compiled step asks for."""
    if call.spec.gang is None or call.spec.retry.memory_ceiling_bytes is None:
        return {}
    resources = declared(call)
    wanted = claim.escalation.memory_bytes if claim.escalation else None
    given = {**resources, **grown(resources, wanted)}
    return {name: str(given[side]["memory"]) for side, name in MEMORY_OUTPUTS.items() if side in given}


_CONTAINER = "main"
"""Argo's name for the container of a container or script template."""
_STRONGEST_PREFERENCE = 100
_OF_ONE_POD = {"avoid_node_after": None}
"""A preference for nodes has no place among what admit answers for several pods."""


def escalated(call: StepCall, attempts: Sequence[Attempt], step_key: str) -> Escalation | None:
    """What is changed for the next attempt; None for nothing.

    No patch reaches the pods of a training on several nodes: memory and nodes are
    answers to the manifest that makes them, and the batch they find in the claim.
    """
    spec = call.spec
    if spec.kind is not Kind.TRAIN:
        return None
    policy = spec.retry if spec.gang is None else spec.retry.model_copy(update=_OF_ONE_POD)
    base = None if policy.memory_ceiling_bytes is None else most_bytes(declared(call))
    return escalate(attempts, policy, Situation(call.binding.submission, step_key, base))


def leaves_spot(call: StepCall, attempts: Sequence[Attempt]) -> bool:
    """Whether the next attempt should get GPUs of other nodes than spot nodes, where its queue has any for it."""
    found = escalated(call, attempts, "")
    return found is not None and found.on_demand


def with_escalation(patch: str, call: StepCall, escalation: Escalation | None) -> str:
    """The pod patch ``patch``, and what ``escalation`` adds to it."""
    if escalation is None or call.spec.gang is not None:
        return patch
    given: dict[str, Any] = json.loads(patch or "{}")
    if escalation.words:
        pod = _pod(call)
        container, preferred = _container(call, escalation), _avoiding(pod, escalation)
        for added in (container, preferred, _off_spot(call, pod, given, escalation)):
            given = merged(given, added)
    return json.dumps(given, sort_keys=True) if given else patch


def spot_requirements(call: StepCall, claim: AttemptClaim) -> list[dict[str, Any]]:
    """What several pods ask of nodes, where attempts may have to leave spot nodes: then off them, else as spot=… says.

    A single pod has the latter in its node selector, from which a patch can take it.
    """
    spot, leaves = call.spec.spot, claim.escalation is not None and claim.escalation.on_demand
    if leaves and not _was_given_spot(call, json.loads(claim.pod_patch or "{}")):
        return [_off(kind) for kind in spot]
    only = spot if len(spot) == 1 else ()
    return [{"key": kind.label, "operator": "In", "values": [kind.value]} for kind in only]


def merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Both patches as one; ``other`` decides where both speak of the same value."""
    result = dict(one)
    for key, value in other.items():
        before = result.get(key)
        result[key] = merged(before, value) if isinstance(before, Mapping) and isinstance(value, Mapping) else value
    return result


def _container(call: StepCall, escalation: Escalation) -> dict[str, Any]:
    main: dict[str, Any] = {}
    if resources := grown(declared(call), escalation.memory_bytes):
        main["resources"] = resources
    if escalation.batch_scale < 1:
        main["env"] = [{"name": BATCH_SCALE, "value": f"{escalation.batch_scale:g}"}]
    return {"containers": [{"name": _CONTAINER, **main}]} if main else {}


def _avoiding(pod: Manifest, escalation: Escalation) -> dict[str, Any]:
    """A preference, not a condition: where there is no other node, the one that failed is better than none."""
    own = _node_affinity(pod).get("preferredDuringSchedulingIgnoredDuringExecution") or []
    if not escalation.avoided_nodes or "{{" in json.dumps(own):  # which is Argo's to fill in, so it stays as it is
        return {}
    elsewhere = {"key": HOSTNAME_LABEL, "operator": "NotIn", "values": list(escalation.avoided_nodes)}
    wish = {"weight": _STRONGEST_PREFERENCE, "preference": {"matchExpressions": [elsewhere]}}
    return _affinity({"preferredDuringSchedulingIgnoredDuringExecution": [*own, wish]})


def _off_spot(call: StepCall, pod: Manifest, given: Mapping[str, Any], escalation: Escalation) -> dict[str, Any]:
    spot = call.spec.spot
    if not escalation.on_demand or not spot or _was_given_spot(call, given):
        return {}
    required = _node_affinity(pod).get("requiredDuringSchedulingIgnoredDuringExecution") or {}
    if "{{" in json.dumps(required):
        raise UsageError(
            f"step {call.spec.name!r}: it cannot be kept off spot nodes, because Argo fills in a value of its node "
            "affinity; write that out, or drop on_demand_after from Retries(…)"
        )
    elsewhere = [_off(kind) for kind in spot]
    terms = [
        {**term, "matchExpressions": [*(term.get("matchExpressions") or []), *elsewhere]}
        for term in required.get("nodeSelectorTerms") or [{}]
    ]
    patch = _affinity({"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}})
    own = pod.get("nodeSelector") or {}
    # None takes a label out of the pod's own selector.
    gone = {kind.label: None for kind in spot if own.get(kind.label) == kind.value}
    return {**patch, "nodeSelector": gone} if gone else patch


def _was_given_spot(call: StepCall, given: Mapping[str, Any]) -> bool:
    """Whether its queue has given it GPUs of spot nodes, which are counted there."""
    asked: Mapping[str, Any] = given.get("nodeSelector") or {}
    return any(asked.get(kind.label) == kind.value for kind in call.spec.spot)


def _off(kind: NodeKind) -> dict[str, Any]:
    return {"key": kind.label, "operator": "NotIn", "values": [kind.value]}


def _affinity(node_affinity: Manifest) -> dict[str, Any]:
    return {"affinity": {"nodeAffinity": node_affinity}}


def _node_affinity(pod: Manifest) -> Manifest:
    found: Manifest = (pod.get("affinity") or {}).get("nodeAffinity") or {}
    return found


def _pod(call: StepCall) -> Manifest:
    """What Argo makes the pod of (``workflow/controller/workflowpod.go``, addSchedulingConstraints)."""
    manifest = call.binding.pipeline.manifest
    spec = manifest["spec"]
    run = template(manifest, f"{call.spec.name}-run")
    places = (run, spec.get("templateDefaults") or {}, spec)
    first = {
        field: next((one[field] for one in places if one.get(field)), None) for field in ("affinity", "nodeSelector")
    }
    return {**run, **first}
