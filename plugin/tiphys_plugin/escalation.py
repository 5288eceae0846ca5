"""An escalation as a patch of the pod: memory, nodes, and a word to the program.

What to change is decided in `tiphys.lineage.escalation`; here it meets the pod
that compile has made, since a merge patch replaces whole lists of it.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tiphys.errors import UsageError
from tiphys.lineage.escalation import Situation, escalate
from tiphys.protocol.environment import BATCH_SCALE
from tiphys.protocol.pipeline import Manifest, template
from tiphys.protocol.policy import Kind
from tiphys.protocol.quantity import memory_bytes, memory_quantity
from tiphys.records import Escalation
from tiphys.store import Attempt
from tiphys_plugin.gangs import HOSTNAME_LABEL
from tiphys_plugin.services import StepCall

_CONTAINER = "main"
"""Argo's name for the container of a container or script template."""
_STRONGEST_PREFERENCE = 100
_OF_ONE_POD = {"memory_ceiling_bytes": None, "on_demand_after": None, "avoid_node_after": None}


def escalated(call: StepCall, attempts: Sequence[Attempt], step_key: str) -> Escalation | None:
    """What is changed for the next attempt; None for nothing.

    No patch reaches the pods of a training on several nodes, so these are only
    told what they can find in the claim: to take a smaller batch.
    """
    spec = call.spec
    if spec.kind is not Kind.TRAIN:
        return None
    policy = spec.retry if spec.gang is None else spec.retry.model_copy(update=_OF_ONE_POD)
    base = None if policy.memory_ceiling_bytes is None else _memory_of(_resources(_pod(call)))
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
        for added in (_container(pod, escalation), _avoiding(pod, escalation), _off_spot(call, pod, given, escalation)):
            given = merged(given, added)
    return json.dumps(given, sort_keys=True) if given else patch


def merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Both patches as one; ``other`` decides where both speak of the same value."""
    result = dict(one)
    for key, value in other.items():
        before = result.get(key)
        result[key] = merged(before, value) if isinstance(before, Mapping) and isinstance(value, Mapping) else value
    return result


def _container(pod: Manifest, escalation: Escalation) -> dict[str, Any]:
    main: dict[str, Any] = {}
    if resources := _grown(_resources(pod), escalation.memory_bytes):
        main["resources"] = resources
    if escalation.batch_scale < 1:
        main["env"] = [{"name": BATCH_SCALE, "value": f"{escalation.batch_scale:g}"}]
    return {"containers": [{"name": _CONTAINER, **main}]} if main else {}


def _grown(resources: Manifest, wanted_bytes: int | None) -> Manifest:
    """Request and limit of memory, both grown alike; empty where they suffice."""
    base = _memory_of(resources)
    if wanted_bytes is None or base is None or wanted_bytes <= base:
        return {}
    grown = {}
    for side in ("requests", "limits"):
        if (memory := (resources.get(side) or {}).get("memory")) is not None:
            share = memory_bytes(memory, "resources") / base
            grown[side] = {"memory": memory_quantity(round(wanted_bytes * share))}
    return grown


def _memory_of(resources: Manifest) -> int | None:
    for side in ("limits", "requests"):
        if (memory := (resources.get(side) or {}).get("memory")) is not None:
            return memory_bytes(memory, f"resources.{side}.memory")
    return None


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
    if not escalation.on_demand or not spot:
        return {}
    asked: Mapping[str, Any] = given.get("nodeSelector") or {}
    if any(asked.get(kind.label) == kind.value for kind in spot):
        return {}  # its queue has given it GPUs of spot nodes, and these are counted there
    required = _node_affinity(pod).get("requiredDuringSchedulingIgnoredDuringExecution") or {}
    if "{{" in json.dumps(required):
        raise UsageError(
            f"step {call.spec.name!r}: it cannot be kept off spot nodes, because Argo fills in a value of its node "
            "affinity; write that out, or drop on_demand_after from Retries(…)"
        )
    elsewhere = [{"key": kind.label, "operator": "NotIn", "values": [kind.value]} for kind in spot]
    terms = [
        {**term, "matchExpressions": [*(term.get("matchExpressions") or []), *elsewhere]}
        for term in required.get("nodeSelectorTerms") or [{}]
    ]
    patch = _affinity({"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}})
    own = pod.get("nodeSelector") or {}
    # None takes a label out of the pod's own selector.
    gone = {kind.label: None for kind in spot if own.get(kind.label) == kind.value}
    return {**patch, "nodeSelector": gone} if gone else patch


def _affinity(node_affinity: Manifest) -> dict[str, Any]:
    return {"affinity": {"nodeAffinity": node_affinity}}


def _node_affinity(pod: Manifest) -> Manifest:
    found: Manifest = (pod.get("affinity") or {}).get("nodeAffinity") or {}
    return found


def _resources(pod: Manifest) -> Manifest:
    container = pod.get("container") or pod.get("script") or {}
    found: Manifest = container.get("resources") or {}
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
