"""The pod template of a gang member, its rank variables, and its text in a resource template.

The pod is the one that Argo would make of the step's template, without Argo's
own containers. Settings of the template take precedence over those of the
Workflow as in Argo's ``workflow/controller/workflowpod.go``.

Argo substitutes values in the text of a manifest before it parses the manifest. A
quote or a line break in a parameter would end its string, and the rest would be
parsed as part of the manifest. So `render_manifest` writes JSON, and each value
passes through ``toJson``, without its quotes. Argo's linter accepts expressions.

``PET_…`` variables are the defaults of torchrun's options, so ``torchrun
train.py`` needs no options. A program without torchrun reads ``RANK`` and
``WORLD_SIZE``; torchrun sets both for each of its processes.
"""

import copy
import json
import re
from collections.abc import Mapping
from typing import Any

from hera_pipelines.compile import references
from hera_pipelines.compile.authored_step import AuthoredStep, program_container
from hera_pipelines.compile.plugin_templates import admit_placeholder
from tiphys.errors import UsageError
from tiphys.protocol import environment
from tiphys.protocol.compiled_workflow import Manifest, replace_tags
from tiphys.protocol.gang import GANG_LABEL, GANG_PORT, MEMBER_LABEL, NODE_ANNOTATION, WORKFLOW_UID_LABEL
from tiphys.protocol.operations import MEMORY_OUTPUTS
from tiphys.protocol.step_spec import ATTEMPT_LABEL, RUN_LABEL, STEP_LABEL

_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
# Values that Tiphys generates, which contain nothing to escape; as plain tags they are easier to read.
_SAFE_TAGS = frozenset(
    {
        "workflow.uid",
        *(
            f"inputs.parameters.{references.admit_output_parameter(name)}"
            for name in ("attempt", "gang", "members", "outputs", "resume-from", "run-id", *MEMORY_OUTPUTS.values())
        ),
    }
)


class RawPlaceholder:
    """A placeholder for an output of admit that is JSON without quotes: a number, or the elements of a list.

    Attributes:
        marker: Text that `render_manifest` replaces by ``tag``.
        first: True for the first elements of a list with more elements. The tag then adds a comma, unless the value
            is empty.
        tag: Argo's tag or expression.
    """

    def __init__(self, output: str, *, first: bool = False) -> None:
        parameter = references.admit_output_parameter(output)
        self.marker = f"\x00{parameter}\x00"
        self.first = first
        value = f"inputs.parameters['{parameter}']"
        with_comma = f"{{{{={value} == '' ? '' : {value} + ','}}}}"
        self.tag = with_comma if first else f"{{{{inputs.parameters.{parameter}}}}}"


def render_manifest(manifest: Manifest, paths: Mapping[str, str]) -> str:
    """Render ``manifest`` as JSON in which Argo substitutes values.

    ``paths`` are those of declared artifacts, by their plain tags.

    Raises:
        UsageError: the manifest uses a value that Argo cannot substitute here.
    """
    raw_tags: dict[str, str] = {}

    def escape(part: Any) -> Any:
        match part:
            case RawPlaceholder():
                raw_tags[json.dumps(part.marker) + ("," if part.first else "")] = part.tag
                return part.marker
            case str():
                return replace_tags(part, lambda tag: _escape_tag(tag, paths))
            case dict():
                return {name: escape(value) for name, value in part.items()}
            case list():
                return [escape(value) for value in part]
        return part

    text = json.dumps(escape(manifest), indent=2, ensure_ascii=False)
    for marker, tag in raw_tags.items():
        text = text.replace(marker, tag)
    return f"{text}\n"


def _escape_tag(tag: str, paths: Mapping[str, str]) -> str:
    """Replacement of ``{{tag}}`` inside a JSON string."""
    tag = tag.strip()
    if tag in _SAFE_TAGS:
        return f"{{{{{tag}}}}}"
    if tag in paths:
        return paths[tag]
    expression = tag[1:].strip() if tag.startswith("=") else _tag_expression(tag)
    return f"{{{{=toJson(string({expression}))[1:-1]}}}}"


def _tag_expression(tag: str) -> str:
    """Convert a plain tag to expr-lang, where ``inputs.parameters.learning-rate`` would be a subtraction."""
    first, *rest = tag.split(".")
    if not rest or rest == ["parameters"] or not _IDENTIFIER.fullmatch(first):
        raise UsageError(f"{{{{{tag}}}}} cannot be handed to several pods; name one parameter, or drop it")
    return first + "".join(f".{part}" if _IDENTIFIER.fullmatch(part) else f"['{part}']" for part in rest)


SCRIPT_ANNOTATION = "tiphys.dev/script"
SCRIPT_VOLUME = f"{references.RESERVED_PREFIX}script"
SCRIPT_FOLDER = "/tiphys/script"
_SCRIPT_FILE = "script"

TOKEN_FIELD = "automountServiceAccountToken"  # noqa: S105  the name of a field
_TEMPLATE_OR_WORKFLOW_FIELDS = (
    *("hostAliases", "nodeSelector", "priorityClassName", "schedulerName", "securityContext"),
    *("serviceAccountName", "tolerations"),
)
_WORKFLOW_FIELDS = ("dnsConfig", "dnsPolicy", "hostNetwork", "imagePullSecrets")


def gang_labels(step: AuthoredStep) -> dict[str, str]:
    """Labels of the members and of the object that creates them; plugin and controller select by these."""
    return {
        RUN_LABEL: admit_placeholder("run-id"),
        STEP_LABEL: step.name,
        ATTEMPT_LABEL: admit_placeholder("attempt"),
        GANG_LABEL: admit_placeholder("gang"),
        WORKFLOW_UID_LABEL: "{{workflow.uid}}",
    }


def pod_template(
    step: AuthoredStep, template: Manifest, workflow: Manifest, rank_environment: list[Manifest]
) -> Manifest:
    """Metadata and spec of each member's pod, from the run template of the step and the ``spec`` of the Workflow.

    The author's variables override those of the same name in ``rank_environment``.
    """
    settings = {**(workflow.get("templateDefaults") or {}), **template}
    container = _container(step, template, rank_environment)
    spec: Manifest = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": step.grace_seconds,
        TOKEN_FIELD: settings.get(TOKEN_FIELD, workflow[TOKEN_FIELD]),
        **{
            field: value
            for field in _TEMPLATE_OR_WORKFLOW_FIELDS
            if (value := settings.get(field) or workflow.get(field)) is not None
        },
        **{field: workflow[field] for field in _WORKFLOW_FIELDS if field in workflow},
        "affinity": _affinity(settings.get("affinity") or workflow.get("affinity") or {}),
        "volumes": _volumes(template, workflow, container),
        "initContainers": template.get("initContainers") or [],
        "containers": [container],
    }
    tolerations = spec.get("tolerations") or []
    admitted = RawPlaceholder("tolerations", first=bool(tolerations))
    spec["tolerations"] = [admitted, *tolerations]
    if "activeDeadlineSeconds" in template:
        spec["activeDeadlineSeconds"] = template["activeDeadlineSeconds"]
    return {"metadata": _metadata(step, template, workflow), "spec": {k: v for k, v in spec.items() if v != []}}


def _metadata(step: AuthoredStep, template: Manifest, workflow: Manifest) -> Manifest:
    sources = [workflow.get("podMetadata") or {}, template.get("metadata") or {}]
    labels, annotations = (
        {key: value for source in sources for key, value in (source.get(kind) or {}).items()}
        for kind in ("labels", "annotations")
    )
    if "script" in template:
        annotations[SCRIPT_ANNOTATION] = template["script"]["source"]
    return {
        "labels": {**labels, **gang_labels(step), MEMBER_LABEL: "true"},
        "annotations": {**annotations, NODE_ANNOTATION: "{{node.name}}"},
    }


def _container(step: AuthoredStep, template: Manifest, rank_environment: list[Manifest]) -> Manifest:
    container = copy.deepcopy(program_container(template))
    container["name"] = "main"
    container["env"] = [*rank_environment, *(container.get("env") or [])]
    for side, name in MEMORY_OUTPUTS.items():
        if name in step.admitted_memory:
            container["resources"][side]["memory"] = admit_placeholder(name)
    if (declared := declared_files(step)) is not None:
        keys = admit_placeholder("input-keys")
        container["env"] += [
            {"name": environment.FILES, "value": json.dumps(declared)},
            {"name": environment.INPUT_KEYS, "value": keys},
        ]
    if "script" in template:
        # In Argo's pods the executor writes the source to a file; here kubelet does, from an annotation of the pod.
        del container["source"]
        container["args"] = [*(container.get("args") or []), f"{SCRIPT_FOLDER}/{_SCRIPT_FILE}"]
        mount = {"name": SCRIPT_VOLUME, "mountPath": SCRIPT_FOLDER, "readOnly": True}
        container["volumeMounts"] = [*(container.get("volumeMounts") or []), mount]
    return container


def declared_files(step: AuthoredStep) -> Manifest | None:
    """The declared inputs and outputs for `tiphys.launch.member_files`; None where the members do not need it."""
    inputs = {artifact["name"]: artifact["path"] for artifact in step.input_artifacts}
    spec = step.spec()
    outputs = {f"artifacts/{spec.artifact_file(output['name'])}": output["path"] for output in step.output_artifacts}
    outputs |= {
        f"parameters/{parameter['name']}": parameter["valueFrom"]["path"] for parameter in step.output_parameters
    }
    gang = step.settings.gang
    # In an elastic gang the launcher also tells torchrun which member hosts the rendezvous.
    is_elastic = gang is not None and gang.min_members is not None
    return {"inputs": inputs, "outputs": outputs} if inputs or outputs or is_elastic else None


def _volumes(template: Manifest, workflow: Manifest, container: Manifest) -> list[Any]:
    mounted = {mount["name"] for mount in container.get("volumeMounts") or []}
    volumes: list[Any] = list(template.get("volumes") or [])
    volumes += [
        volume for volume in workflow.get("volumes") or [] if volume["name"] in mounted and volume not in volumes
    ]
    if "script" in template:
        field = {"fieldPath": f"metadata.annotations['{SCRIPT_ANNOTATION}']"}
        items = [{"path": _SCRIPT_FILE, "fieldRef": field}]
        volumes.append({"name": SCRIPT_VOLUME, "downwardAPI": {"defaultMode": 0o555, "items": items}})
    return volumes


def _affinity(declared: Manifest) -> Manifest:
    """The author's affinity, with the node requirements of admit in each of its alternative terms."""
    affinity = copy.deepcopy(declared)
    nodes = affinity.setdefault("nodeAffinity", {}).setdefault("requiredDuringSchedulingIgnoredDuringExecution", {})
    for term in nodes.setdefault("nodeSelectorTerms", [{}]):
        admitted = RawPlaceholder("node-requirements")
        term["matchExpressions"] = [*(term.get("matchExpressions") or []), admitted]
    return affinity


_RENDEZVOUS_TIMEOUT_SECONDS = 600
_RENDEZVOUS_WAITS = "last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=5"
"""How long torchrun waits for more nodes than the fewest, and how many signs of life a lost node misses. One that comes
later, or stood still meanwhile, is let in by another restart."""
_INDEX_ANNOTATION = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def rank_variables(step: AuthoredStep, members: int, first_host: str) -> list[Manifest]:
    """Rank variables of each of ``members`` members; ``first_host`` is the host name of member 0."""
    index = {"fieldRef": {"fieldPath": _INDEX_ANNOTATION}}
    texts = {
        "MASTER_ADDR": first_host,
        "MASTER_PORT": str(GANG_PORT),
        "WORLD_SIZE": str(members),
        "PET_MASTER_ADDR": first_host,
        "PET_MASTER_PORT": str(GANG_PORT),
        "PET_NNODES": str(members),
        **process_count_variables(step),
    }
    return [
        *({"name": name, "value": value} for name, value in texts.items()),
        *({"name": name, "valueFrom": index} for name in ("RANK", "NODE_RANK", "PET_NODE_RANK")),
    ]


def elastic_variables(step: AuthoredStep, first_host: str) -> list[Manifest]:
    """Rank variables of each member of an elastic gang; the members agree on new ranks after each loss and growth.

    Member 0, on ``first_host``, hosts the rendezvous until it is lost. Each rendezvous gets a port
    of its own (see `tiphys.checkpoint.ranks.barrier`), so that messages of one
    cannot reach the next.
    """
    gang = step.settings.gang
    assert gang is not None
    assert gang.min_members is not None
    index = {"fieldRef": {"fieldPath": _INDEX_ANNOTATION}}
    texts = {
        "PET_NNODES": f"{gang.min_members}:{gang.members}",
        "PET_RDZV_BACKEND": "c10d",
        "PET_RDZV_ENDPOINT": f"{first_host}:{GANG_PORT}",
        "PET_RDZV_ID": admit_placeholder("gang"),
        # Pods start minutes apart where a node must pull the image first.
        "PET_RDZV_CONF": ",".join(
            (
                *(f"{name}_timeout={_RENDEZVOUS_TIMEOUT_SECONDS}" for name in ("join", "read")),
                _RENDEZVOUS_WAITS,
            )
        ),
        # Each member that is lost costs the others one restart; one that joins costs none of these.
        "PET_MAX_RESTARTS": str(2 * (gang.members - gang.min_members)),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        environment.ELASTIC: f"{gang.min_members}:{gang.members}",
        **process_count_variables(step),
    }
    return [
        *({"name": name, "value": value} for name, value in texts.items()),
        {"name": "NODE_RANK", "valueFrom": index},
    ]


def process_count_variables(step: AuthoredStep) -> dict[str, str]:
    """One process for each GPU of a node; without GPUs torchrun starts one."""
    gpu = step.settings.gpu
    return {"PET_NPROC_PER_NODE": str(gpu.gpus_per_member)} if gpu else {}
