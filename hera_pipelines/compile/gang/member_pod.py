"""The pod template of a member: what Argo would have made of the step's template, without Argo's own containers.

Which of two settings holds, that of the template or that of the Workflow, is
as in Argo's ``workflow/controller/workflowpod.go``.

A manifest as the text of a resource template, whatever its values turn out to hold.

Argo puts values into the text of a manifest before anybody parses it: a quote
or a line break in a parameter would end the string that it stands in, and what
follows would be read as part of the manifest. So each value goes through
``toJson``, without its quotes, and all strings are JSON's. An expression is also
what Argo's linter does not stumble over.

What tells a member of an Indexed Job which one it is, in the words of torchrun and of plain PyTorch.

``PET_…`` are the defaults of torchrun's own options, so ``torchrun train.py``
needs none of them. A program that is its node's only process finds ``RANK``
and ``WORLD_SIZE``; below torchrun each process gets its own of these.
"""

import copy
import json
import re
from collections.abc import Mapping
from typing import Any

from hera_pipelines.compile import references as names
from hera_pipelines.compile.gated_step import GatedStep, program_container
from hera_pipelines.compile.plugin_templates import input_value
from tiphys.errors import UsageError
from tiphys.protocol import environment
from tiphys.protocol.compiled_workflow import TAG, Manifest
from tiphys.protocol.gang import GANG_LABEL, MEMBER_LABEL, NODE_ANNOTATION, PORT, WORKFLOW_UID_LABEL
from tiphys.protocol.operations import MEMORY_OUTPUTS
from tiphys.protocol.step_spec import ATTEMPT_LABEL, RUN_LABEL, STEP_LABEL

_NAME = re.compile(r"[A-Za-z_]\w*")
# Our own names of things, in which nothing needs to be escaped; as plain tags they can be read.
_HARMLESS = frozenset(
    {
        "workflow.uid",
        *(
            f"inputs.parameters.{names.answer(name)}"
            for name in ("attempt", "gang", "members", "outputs", "resume-from", "run-id", *MEMORY_OUTPUTS.values())
        ),
    }
)


class Inside:
    """A place where the text of a parameter goes as it is: the inside of a JSON list, or a number.

    In a list, what may be empty stands alone, or ``first``: then the comma after it is written with it.
    """

    def __init__(self, parameter: str, *, first: bool = False) -> None:
        self.mark = f"\x00{parameter}\x00"
        self.first = first
        value = f"inputs.parameters['{parameter}']"
        with_comma = f"{{{{={value} == '' ? '' : {value} + ','}}}}"
        self.tag = with_comma if first else f"{{{{inputs.parameters.{parameter}}}}}"


def manifest_text(manifest: Manifest, paths: Mapping[str, str]) -> str:
    """``manifest`` as JSON that Argo can fill in. ``paths`` says where declared files lie, by their plain tags.

    Raises:
        UsageError: it uses a value that cannot be filled in.
    """
    insides: dict[str, str] = {}

    def written(part: Any) -> Any:
        match part:
            case Inside():
                insides[json.dumps(part.mark) + ("," if part.first else "")] = part.tag
                return part.mark
            case str():
                return TAG.sub(lambda tag: _safe(tag[1], paths), part)
            case dict():
                return {name: written(value) for name, value in part.items()}
            case list():
                return [written(value) for value in part]
        return part

    text = json.dumps(written(manifest), indent=2, ensure_ascii=False)
    for mark, tag in insides.items():
        text = text.replace(mark, tag)
    return f"{text}\n"


def _safe(tag: str, paths: Mapping[str, str]) -> str:
    """What stands for ``{{tag}}`` inside a JSON string."""
    tag = tag.strip()
    if tag in _HARMLESS:
        return f"{{{{{tag}}}}}"
    if tag in paths:
        return paths[tag]
    expression = tag[1:].strip() if tag.startswith("=") else _as_expression(tag)
    return f"{{{{=toJson(string({expression}))[1:-1]}}}}"


def _as_expression(tag: str) -> str:
    """The variable of a plain tag, in expr-lang: ``inputs.parameters.learning-rate`` is no subtraction there."""
    first, *rest = tag.split(".")
    if not rest or rest == ["parameters"] or not _NAME.fullmatch(first):
        raise UsageError(f"{{{{{tag}}}}} cannot be handed to several pods; name one parameter, or drop it")
    return first + "".join(f".{part}" if _NAME.fullmatch(part) else f"['{part}']" for part in rest)


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
        template: Its container as Argo would run it, see `hera_pipelines.compile.templates`.
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


_JOIN_SECONDS = 600
_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def rank_variables(step: GatedStep, members: int, first: str) -> list[Manifest]:
    """Variables of each member; ``first`` is the host name of member 0."""
    index = {"fieldRef": {"fieldPath": _INDEX}}
    texts = {
        "MASTER_ADDR": first,
        "MASTER_PORT": str(PORT),
        "WORLD_SIZE": str(members),
        "PET_MASTER_ADDR": first,
        "PET_MASTER_PORT": str(PORT),
        "PET_NNODES": str(members),
        "PET_SHUTDOWN_TIMEOUT": _time_to_save(step),
        **processes(step),
    }
    return [
        *({"name": name, "value": value} for name, value in texts.items()),
        *({"name": name, "valueFrom": index} for name in ("RANK", "NODE_RANK", "PET_NODE_RANK")),
    ]


def elastic_variables(step: GatedStep, first: str) -> list[Manifest]:
    """Variables of each member where some may be lost: who is which rank, the members agree on again each time.

    They meet at member 0. Each meeting gets a port of its own (see
    `tiphys.checkpoint.ranks.barrier`), so that nothing of one is taken for the next.
    """
    gang = step.settings.gang
    assert gang is not None
    assert gang.min_members is not None
    index = {"fieldRef": {"fieldPath": _INDEX}}
    texts = {
        "PET_NNODES": f"{gang.min_members}:{input_value(names.answer('members'))}",
        "PET_RDZV_BACKEND": "c10d",
        "PET_RDZV_ENDPOINT": f"{first}:{PORT}",
        "PET_RDZV_ID": input_value(names.answer("gang")),
        # Pods come minutes after one another where an image has to be fetched.
        "PET_RDZV_CONF": f"join_timeout={_JOIN_SECONDS},read_timeout={_JOIN_SECONDS}",
        # A member that comes late and one that is lost each cost the others one.
        "PET_MAX_RESTARTS": str(2 * (gang.members - gang.min_members)),
        "PET_SHUTDOWN_TIMEOUT": _time_to_save(step),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        environment.ELASTIC: f"{gang.min_members}:{gang.members}",
        **processes(step),
    }
    return [
        *({"name": name, "value": value} for name, value in texts.items()),
        {"name": "NODE_RANK", "valueFrom": index},
    ]


def _time_to_save(step: GatedStep) -> str:
    """Else torchrun would give the ranks 30 s between SIGTERM and SIGKILL, whatever the grace period is."""
    return str(step.grace_seconds)


def processes(step: GatedStep) -> dict[str, str]:
    """One process for each GPU of a node; without GPUs torchrun starts one."""
    gpu = step.settings.gpu
    return {"PET_NPROC_PER_NODE": str(gpu.gpus // gpu.members)} if gpu else {}
