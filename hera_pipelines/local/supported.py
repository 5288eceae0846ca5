"""Checks that the local engine supports a Workflow, before anything starts.

All unsupported fields are reported at once, by name. Fields about placement,
permissions and retention have no meaning on one machine and are ignored. Any field
that the sets below do not list is refused, because ignoring it could change what
the program does.
"""

from collections.abc import Callable, Iterator
from typing import Any

import yaml

from hera_pipelines.compile.container import RUNTIME_VOLUME
from hera_pipelines.local.arguments import find_tags, path_variables, replace_every_tag, substitute_variables
from hera_pipelines.local.composites.dag_state import TemplateDag
from hera_pipelines.local.expressions.expr import parse_expression
from hera_pipelines.local.expressions.govaluate import check_condition
from hera_pipelines.local.interpreter import template_type
from hera_pipelines.local.pods.gang_pods import member_templates
from hera_pipelines.local.pods.pod_files import PLACEMENT_FIELDS, VOLUME_SOURCES, parse_pod_spec_patch
from hera_pipelines.local.pods.pod_paths import container_or_script, namespace_refusal, unmentioned_paths
from hera_pipelines.local.retry import RetryStrategy
from tiphys.errors import UsageError
from tiphys.protocol.compiled_workflow import Manifest
from tiphys.protocol.quantities import parse_argo_duration_seconds
from tiphys.service.yaml_documents import UNREADABLE_YAML

_RETENTION_FIELDS = {
    "archiveLogs",
    "artifactGC",
    "artifactRepositoryRef",
    "metrics",
    "podGC",
    "podMetadata",
    "ttlStrategy",
}

SPEC_FIELDS = (
    PLACEMENT_FIELDS
    | _RETENTION_FIELDS
    | {
        "activeDeadlineSeconds",
        "arguments",
        "dnsPolicy",
        "entrypoint",
        "executor",
        "executorPlugins",
        "imagePullSecrets",
        "onExit",
        "parallelism",
        "podDisruptionBudget",
        "podPriorityClassName",
        "priority",
        "templateDefaults",
        "templates",
        "volumeClaimGC",
        "volumeClaimTemplates",
        "volumes",
        "workflowMetadata",
    }
)
TEMPLATE_FIELDS = PLACEMENT_FIELDS | {
    "activeDeadlineSeconds",
    "archiveLocation",
    "container",
    "dag",
    "executor",
    "failFast",
    "inputs",
    "metadata",
    "metrics",
    "name",
    "outputs",
    "parallelism",
    "plugin",
    "podSpecPatch",
    "priority",
    "resource",
    "retryStrategy",
    "script",
    "steps",
    "suspend",
    "timeout",
    "volumes",
}
DAG_FIELDS = {"failFast", "target", "tasks"}
CHILD_FIELDS = {"arguments", "continueOn", "name", "template", "when", "withItems", "withParam", "withSequence"}
TASK_FIELDS = CHILD_FIELDS | {"dependencies", "depends"}
CONTAINER_FIELDS = {
    "args",
    "command",
    "env",
    "envFrom",
    "image",
    "imagePullPolicy",
    "lifecycle",
    "livenessProbe",
    "name",
    "ports",
    "readinessProbe",
    "resources",
    "securityContext",
    "source",
    "startupProbe",
    "terminationMessagePath",
    "terminationMessagePolicy",
    "volumeMounts",
}
ARTIFACT_FIELDS = {
    "archive",
    "from",
    "fromExpression",
    "mode",
    "name",
    "optional",
    "path",
    "raw",
    "recurseMode",
    "s3",
}
PARAMETER_FIELDS = {"default", "description", "enum", "name", "value", "valueFrom"}
VALUE_FROM_FIELDS = {"default", "expression", "parameter", "path", "supplied"}
RETRY_FIELDS = {"affinity", "backoff", "expression", "limit", "retryPolicy"}


def unknown_fields(holder: Manifest, known: set[str], where: str) -> Iterator[str]:
    """Yield the fields of ``holder`` that have a value and are not ``known``, with the prefix ``where``."""
    for field, value in holder.items():
        if field not in known and value not in (None, {}, [], "", False):
            yield f"{where}.{field}"


def check_supported(manifest: Manifest) -> None:
    """Raise `UsageError` that names everything in ``manifest`` that the local engine does not support."""
    problems = list(dict.fromkeys(find_unsupported(manifest)))
    if problems:
        listed = "\n".join(f"  - {line}" for line in problems)
        raise UsageError(
            f"the local engine cannot run this workflow:\n{listed}\nchange these, or submit the workflow to a cluster"
        )


def find_unsupported(manifest: Manifest) -> Iterator[str]:
    """Yield one line for each field or value that the local engine does not support."""
    if manifest.get("kind", "Workflow") != "Workflow":
        yield f"kind {manifest['kind']}: only a Workflow can be run"
        return
    metadata = manifest.get("metadata") or {}
    if not (metadata.get("name") or metadata.get("generateName")):
        yield "metadata: there is neither a name nor a generateName"
    spec = manifest.get("spec") or {}
    templates = [t for t in spec.get("templates") or [] if isinstance(t, dict)]
    names = {t.get("name", "") for t in templates}
    yield from unknown_fields(spec, SPEC_FIELDS, "spec")
    for role in ("entrypoint", "onExit"):
        if (role == "entrypoint" or spec.get(role)) and spec.get(role) not in names:
            yield f"spec.{role}: there is no template {spec.get(role)!r}"
    yield from _check_arguments(spec)
    yield from _check_volumes(spec, "spec")
    for template in templates:
        for line in _check_template(template, names, _volume_names(spec) | _volume_names(template)):
            yield f"template {template.get('name')}: {line}"
    yield from _check_expressions(manifest)


def _check_arguments(spec: Manifest) -> Iterator[str]:
    arguments = spec.get("arguments") or {}
    for parameter in arguments.get("parameters") or []:
        if parameter.get("value") is None:
            yield f"spec.arguments.parameters.{parameter.get('name')} has no value"
    if arguments.get("artifacts"):
        yield "spec.arguments.artifacts"


def _check_volumes(holder: Manifest, where: str) -> Iterator[str]:
    for volume in holder.get("volumes") or []:
        if not any(source in volume for source in VOLUME_SOURCES):
            yield f"{where}.volumes.{volume.get('name')}: use {' or '.join(VOLUME_SOURCES)}"


def _volume_names(holder: Manifest) -> set[str]:
    claims = {claim["metadata"]["name"] for claim in holder.get("volumeClaimTemplates") or []}
    return {volume["name"] for volume in holder.get("volumes") or []} | claims


def _template_fields(template: Manifest) -> set[str]:
    """The supported fields; of init containers that which brings the launcher, because this machine has one."""
    names = [container["name"] for container in template.get("initContainers") or []]
    return TEMPLATE_FIELDS | {"initContainers"} if names == [RUNTIME_VOLUME] else TEMPLATE_FIELDS


def _check_template(template: Manifest, names: set[str], volumes: set[str]) -> Iterator[str]:
    yield from unknown_fields(template, _template_fields(template), "template")
    yield from _check_readable(template_type, template)
    yield from _check_volumes(template, "template")
    yield from _check_inputs_and_outputs(template)
    if template.get("retryStrategy") is not None:
        yield from unknown_fields(template["retryStrategy"], RETRY_FIELDS, "retryStrategy")
        yield from _check_readable(RetryStrategy.parse, template["retryStrategy"])
    if "dag" in template:
        yield from _check_dag(template["dag"], names)
    for group in template.get("steps") or []:
        for step in group:
            yield from _check_child(step, names, CHILD_FIELDS, "step")
    if "suspend" in template:
        yield from _check_suspend(template)
    yield from _check_timeouts(template)
    if len(template.get("plugin", {"one": 1})) != 1:
        yield "plugin must have exactly one key, the name of the plugin"
    if program := container_or_script(template):
        yield from _check_program(program, volumes)
        yield from _check_paths(template)
    if "resource" in template:
        yield from _check_members(template["resource"], names, volumes)
    if "{{" not in (patch := template.get("podSpecPatch") or ""):
        yield from _check_readable(parse_pod_spec_patch, patch)


def _check_members(resource: Manifest, names: set[str], volumes: set[str]) -> Iterator[str]:
    """Check the members of a gang by the first one; all have the same template."""
    try:
        first = member_templates(yaml.safe_load(replace_every_tag(resource.get("manifest") or "{}", "1")))[0]
    except (UsageError, *UNREADABLE_YAML) as error:
        yield str(error)
        return
    yield from _check_template(first, names, volumes | _volume_names(first))


def _check_suspend(template: Manifest) -> Iterator[str]:
    suspend = template["suspend"] or {}
    yield from unknown_fields(suspend, {"duration"}, "suspend")
    duration = str(suspend.get("duration", ""))
    if not duration:
        yield "suspend has no duration, and the local engine cannot resume it: set a duration"
    elif "{{" not in duration:
        yield from _check_readable(parse_argo_duration_seconds, duration)
    if any((template.get("outputs") or {}).values()):
        yield "outputs of a suspend template: the local engine cannot supply them"


def _check_timeouts(template: Manifest) -> Iterator[str]:
    has_no_program = any(kind in template for kind in ("dag", "steps", "suspend"))
    for field in ("timeout", "activeDeadlineSeconds"):
        value = str(template.get(field) or "")
        if value and has_no_program:
            yield f"{field} on a dag, steps or suspend template: set it on a container"
        elif value and "{{" not in value:
            yield from _check_readable(parse_argo_duration_seconds, value)


def _check_dag(dag: Manifest, names: set[str]) -> Iterator[str]:
    yield from unknown_fields(dag, DAG_FIELDS, "dag")
    for task in dag.get("tasks") or []:
        yield from _check_child(task, names, TASK_FIELDS, "task")
    yield from _check_readable(
        lambda tasks: TemplateDag(tasks, dag.get("target") or "").check(), dag.get("tasks") or []
    )


def _check_child(child: Manifest, names: set[str], known: set[str], kind: str) -> Iterator[str]:
    where = f"{kind} {child.get('name')}"
    yield from unknown_fields(child, known | {"templateRef", "inline"}, where)
    if reference := child.get("templateRef"):
        yield (
            f"{where}.templateRef: {reference.get('name')!r} is an object of a cluster; write it into the file of the "
            "Workflow, as a document of its own"
        )
    elif child.get("inline"):
        yield f"{where}.inline: write the template beside the others, under a name"
    elif child.get("template") not in names:
        yield f"{where}: there is no template {child.get('template')!r}"
    yield from _check_readable(check_condition, replace_every_tag(child.get("when") or "true", "x"))
    for artifact in (child.get("arguments") or {}).get("artifacts") or []:
        yield from _check_artifact(artifact, f"{where}.arguments.artifacts.{artifact.get('name')}")


def _check_inputs_and_outputs(template: Manifest) -> Iterator[str]:
    for side in ("inputs", "outputs"):
        declared = template.get(side) or {}
        yield from unknown_fields(declared, {"artifacts", "parameters"}, side)
        for artifact in declared.get("artifacts") or []:
            yield from _check_artifact(artifact, f"{side}.artifacts.{artifact.get('name')}")
        for parameter in declared.get("parameters") or []:
            where = f"{side}.parameters.{parameter.get('name')}"
            yield from unknown_fields(parameter, PARAMETER_FIELDS, where)
            source = parameter.get("valueFrom") or {}
            yield from unknown_fields(source, VALUE_FROM_FIELDS, f"{where}.valueFrom")
            yield from _check_expression(source.get("expression"))


def _check_artifact(artifact: Manifest, where: str) -> Iterator[str]:
    yield from unknown_fields(artifact, ARTIFACT_FIELDS, where)
    yield from unknown_fields(artifact.get("s3") or {}, {"key"}, f"{where}.s3")
    yield from _check_expression(artifact.get("fromExpression"))
    if artifact.get("s3") and set(artifact.get("archive") or {"none"}) != {"none"}:
        yield f"{where}.archive: artifacts with a key are kept without archive here; set archive: {{none: {{}}}}"


def _check_expression(text: str | None) -> Iterator[str]:
    if text:
        yield from _check_readable(parse_expression, replace_every_tag(text, "1"))


def _check_program(program: Manifest, volumes: set[str]) -> Iterator[str]:
    yield from unknown_fields(program, CONTAINER_FIELDS, "container")
    if not program.get("command"):
        yield "container has no command, and the entry point of its image is not known here: set command"
    for variable in program.get("env") or []:
        yield from unknown_fields(variable, {"name", "value"}, f"env.{variable.get('name')}")
    for source in program.get("envFrom") or []:
        yield from _check_environment_source(source)
    for mount in program.get("volumeMounts") or []:
        if mount.get("name") not in volumes:
            yield f"volumeMounts.{mount.get('name')}: there is no such volume"


def _check_environment_source(source: Manifest) -> Iterator[str]:
    """Refuse required Secrets and ConfigMaps, which do not exist here; optional ones are ignored."""
    for kind, reference in source.items():
        if isinstance(reference, dict) and not reference.get("optional"):
            yield (
                f"container.envFrom.{kind}.{reference.get('name')}: it does not exist here; "
                "make it optional, or set the variables with env"
            )


def _check_paths(template: Manifest) -> Iterator[str]:
    """Yield declared paths that can neither be mounted on this machine nor be replaced in a text of the program."""
    for description, path in unmentioned_paths(substitute_variables(template, path_variables(template))):
        if reason := namespace_refusal():
            yield (
                f"{description}: its path {path} occurs in no command, argument, variable or source, so the local "
                f"engine cannot redirect it where it has no mount namespace ({reason}); pass the path as an argument "
                "or in a variable"
            )


def _check_expressions(document: Any) -> Iterator[str]:
    """Yield an error for every invalid ``{{=…}}`` expression."""
    match document:
        case str():
            for tag in find_tags(document):
                if tag.startswith("="):
                    yield from _check_readable(parse_expression, tag[1:])
        case dict():
            for value in document.values():
                yield from _check_expressions(value)
        case list():
            for value in document:
                yield from _check_expressions(value)


def _check_readable(reader: Callable[[Any], object], value: Any) -> Iterator[str]:
    try:
        reader(value)
    except UsageError as error:
        yield str(error)
