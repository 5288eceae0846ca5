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
from tiphys.protocol.policy import Kind, NodeKind
from tiphys.records import AttemptClaim, Escalation
from tiphys.store import Attempt
from tiphys_plugin import memory
from tiphys_plugin.gangs import HOSTNAME_LABEL
from tiphys_plugin.services import StepCall

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
    base = None if policy.memory_ceiling_bytes is None else memory.most_bytes(memory.declared(call))
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
    if resources := memory.grown(memory.declared(call), escalation.memory_bytes):
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
