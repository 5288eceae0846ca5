"""The pod template of a member: what Argo would have made of the step's template, without Argo's own containers.

Which of two settings holds, that of the template or that of the Workflow, is
as in Argo's ``workflow/controller/workflowpod.go``.
"""

import copy
import json
from typing import Any

from hera_pipelines.compile import names
from hera_pipelines.compile.gang.text import Inside
from hera_pipelines.compile.gated import GatedStep, program_container
from hera_pipelines.compile.operations import input_value
from tiphys.protocol import environment
from tiphys.protocol.gang import GANG_LABEL, MEMBER_LABEL, NODE_ANNOTATION, WORKFLOW_UID_LABEL
from tiphys.protocol.operations import MEMORY_OUTPUTS
from tiphys.protocol.pipeline import Manifest
from tiphys.protocol.policy import ATTEMPT_LABEL, RUN_LABEL, STEP_LABEL

SCRIPT_ANNOTATION = "tiphys.dev/script"
SCRIPT_VOLUME = f"{names.RESERVED}script"
SCRIPT_FOLDER = "/tiphys/script"
_FILE = "script"

MEMBER = ("python", "-m", "tiphys.checkpoint.member", "--")
"""What fetches inputs and stores outputs in the place of Argo's executor."""

_OF_EITHER = (
    *("automountServiceAccountToken", "hostAliases", "nodeSelector", "priorityClassName", "schedulerName"),
    *("securityContext", "serviceAccountName", "tolerations"),
)
_OF_WORKFLOW = ("dnsConfig", "dnsPolicy", "hostNetwork", "imagePullSecrets")


def gang_labels(step: GatedStep) -> dict[str, str]:
    """By which the members, and what makes them, are found."""
    return {
        RUN_LABEL: input_value(names.answer("run-id")),
        STEP_LABEL: step.name,
        ATTEMPT_LABEL: input_value(names.answer("attempt")),
        GANG_LABEL: input_value(names.answer("gang")),
        WORKFLOW_UID_LABEL: "{{workflow.uid}}",
    }


def pod_template(step: GatedStep, template: Manifest, workflow: Manifest, ranks: list[Manifest]) -> Manifest:
    """Metadata and spec of each member.

    Args:
        step: The step.
        template: Its container as Argo would run it, see `hera_pipelines.compile.program`.
        workflow: ``spec`` of the Workflow.
        ranks: Variables that tell a member which one it is; the author's of the same name go before.
    """
    given = {**(workflow.get("templateDefaults") or {}), **template}
    container = _container(step, template, ranks)
    spec: Manifest = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": step.grace_seconds,
        **{field: found for field in _OF_EITHER if (found := given.get(field) or workflow.get(field)) is not None},
        **{field: workflow[field] for field in _OF_WORKFLOW if field in workflow},
        "affinity": _affinity(given.get("affinity") or workflow.get("affinity") or {}),
        "volumes": _volumes(template, workflow, container),
        "containers": [container],
    }
    own = spec.get("tolerations") or []
    spec["tolerations"] = [Inside(names.answer("tolerations"), first=bool(own)), *own]
    if "activeDeadlineSeconds" in template:
        spec["activeDeadlineSeconds"] = template["activeDeadlineSeconds"]
    return {"metadata": _metadata(step, template, workflow), "spec": {k: v for k, v in spec.items() if v != []}}


def _metadata(step: GatedStep, template: Manifest, workflow: Manifest) -> Manifest:
    both = [workflow.get("podMetadata") or {}, template.get("metadata") or {}]
    labels, annotations = (
        {key: value for one in both for key, value in (one.get(kind) or {}).items()}
        for kind in ("labels", "annotations")
    )
    if "script" in template:
        annotations[SCRIPT_ANNOTATION] = template["script"]["source"]
    return {
        "labels": {**labels, **gang_labels(step), MEMBER_LABEL: "true"},
        "annotations": {**annotations, NODE_ANNOTATION: "{{node.name}}"},
    }


def _container(step: GatedStep, template: Manifest, ranks: list[Manifest]) -> Manifest:
    container = copy.deepcopy(program_container(template))
    container["name"] = "main"
    container["env"] = [*ranks, *(container.get("env") or [])]
    for side, name in MEMORY_OUTPUTS.items():
        if name in step.admitted_memory:
            container["resources"][side]["memory"] = input_value(names.answer(name))
    if (declared := files(step)) is not None:
        container["command"] = [*MEMBER, *container["command"]]
        keys = input_value(names.answer("input-keys"))
        container["env"] += [
            {"name": environment.FILES, "value": json.dumps(declared)},
            {"name": environment.INPUT_KEYS, "value": keys},
        ]
    if "script" in template:
        # Argo's executor would write the source into the pod; here kubelet does, from an annotation of the pod.
        del container["source"]
        container["args"] = [*(container.get("args") or []), f"{SCRIPT_FOLDER}/{_FILE}"]
        mount = {"name": SCRIPT_VOLUME, "mountPath": SCRIPT_FOLDER, "readOnly": True}
        container["volumeMounts"] = [*(container.get("volumeMounts") or []), mount]
    return container


def files(step: GatedStep) -> Manifest | None:
    """The declared inputs and outputs for `tiphys.checkpoint.member`; None where it has nothing to do."""
    inputs = {artifact["name"]: artifact["path"] for artifact in step.input_artifacts}
    outputs = {f"artifacts/{artifact['name']}": artifact["path"] for artifact in step.output_artifacts}
    outputs |= {f"parameters/{one['name']}": one["valueFrom"]["path"] for one in step.output_parameters}
    gang = step.settings.gang
    is_elastic = gang is not None and gang.min_members is not None  # it tells the first that the others come to it
    return {"inputs": inputs, "outputs": outputs} if inputs or outputs or is_elastic else None


def _volumes(template: Manifest, workflow: Manifest, container: Manifest) -> list[Any]:
    mounted = {mount["name"] for mount in container.get("volumeMounts") or []}
    own = template.get("volumes") or []
    found = [*own, *(one for one in workflow.get("volumes") or [] if one["name"] in mounted and one not in own)]
    if "script" in template:
        field = {"fieldPath": f"metadata.annotations['{SCRIPT_ANNOTATION}']"}
        items = [{"path": _FILE, "fieldRef": field}]
        found.append({"name": SCRIPT_VOLUME, "downwardAPI": {"defaultMode": 0o555, "items": items}})
    return found


def _affinity(given: Manifest) -> Manifest:
    """What the author asks of nodes, and in each of its alternatives what admit asks."""
    affinity = copy.deepcopy(given)
    nodes = affinity.setdefault("nodeAffinity", {}).setdefault("requiredDuringSchedulingIgnoredDuringExecution", {})
    for term in nodes.setdefault("nodeSelectorTerms", [{}]):
        admitted = Inside(names.answer("node-requirements"))
        term["matchExpressions"] = [*(term.get("matchExpressions") or []), admitted]
    return affinity
