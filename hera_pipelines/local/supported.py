"""Refuses what the engine cannot do, by name, all of it at once, before anything starts.

A field that is only about where a pod is placed, who may see it or how long it
is kept means nothing here and is let pass. A field that `fields` does not list
is refused: to ignore it silently could change what the program does.

Which fields of a Workflow the local engine knows, and which mean nothing on one machine.
"""

from collections.abc import Callable, Iterator
from typing import Any

import yaml

from hera_pipelines.local.arguments import paths_as_variables, replace_every_tag, substitute, tags
from hera_pipelines.local.dag_state import Graph
from hera_pipelines.local.expressions import expr as expressions
from hera_pipelines.local.expressions import govaluate as conditions
from hera_pipelines.local.interpreter import kind_of
from hera_pipelines.local.pods.gang_pods import member_templates
from hera_pipelines.local.pods.pod_files import SOURCES, declared_paths, mentions, program_of, read_patch, texts_of
from hera_pipelines.local.retry import RetryStrategy
from tiphys.errors import UsageError
from tiphys.protocol.compiled_workflow import Manifest
from tiphys.protocol.quantities import seconds

_PLACEMENT = {
    "affinity",
    "automountServiceAccountToken",
    "nodeSelector",
    "priorityClassName",
    "schedulerName",
    "securityContext",
    "serviceAccountName",
    "tolerations",
}
_KEEPING = {"archiveLogs", "artifactGC", "artifactRepositoryRef", "metrics", "podGC", "podMetadata", "ttlStrategy"}

SPEC = (
    _PLACEMENT
    | _KEEPING
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
TEMPLATE = _PLACEMENT | {
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
    "timeout",
    "volumes",
}
DAG = {"failFast", "target", "tasks"}
CHILD = {"arguments", "continueOn", "name", "template", "when", "withItems", "withParam", "withSequence"}
TASK = CHILD | {"dependencies", "depends"}
CONTAINER = {
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
ARTIFACT = {"archive", "from", "mode", "name", "optional", "path", "raw", "recurseMode", "s3"}
PARAMETER = {"default", "description", "enum", "name", "value", "valueFrom"}
VALUE_FROM = {"default", "expression", "parameter", "path", "supplied"}
RETRY = {"affinity", "backoff", "expression", "limit", "retryPolicy"}


def unknown(holder: Manifest, known: set[str], where: str) -> Iterator[str]:
    """The fields of ``holder`` that have a value and are not ``known``."""
    for field, value in holder.items():
        if field not in known and value not in (None, {}, [], "", False):
            yield f"{where}.{field}"


def check(manifest: Manifest) -> None:
    """Raise `UsageError` naming everything in ``manifest`` that cannot be run here."""
    found = list(dict.fromkeys(refusals(manifest)))
    if found:
        listed = "\n".join(f"  - {line}" for line in found)
        raise UsageError(
            f"the local engine cannot run this workflow:\n{listed}\nchange these, or submit the workflow to a cluster"
        )


def refusals(manifest: Manifest) -> Iterator[str]:
    """One line for each thing that cannot be run here."""
    if manifest.get("kind", "Workflow") != "Workflow":
        yield f"kind {manifest['kind']}: only a Workflow can be run"
        return
    metadata = manifest.get("metadata") or {}
    if not (metadata.get("name") or metadata.get("generateName")):
        yield "metadata: there is neither a name nor a generateName"
    spec = manifest.get("spec") or {}
    templates = [t for t in spec.get("templates") or [] if isinstance(t, dict)]
    names = {t.get("name", "") for t in templates}
    yield from unknown(spec, SPEC, "spec")
    for role in ("entrypoint", "onExit"):
        if (role == "entrypoint" or spec.get(role)) and spec.get(role) not in names:
            yield f"spec.{role}: there is no template {spec.get(role)!r}"
    yield from _arguments(spec)
    yield from _volumes(spec, "spec")
    for template in templates:
        for line in _template(template, names, _volume_names(spec) | _volume_names(template)):
            yield f"template {template.get('name')}: {line}"
    yield from _expressions(manifest)


def _arguments(spec: Manifest) -> Iterator[str]:
    arguments = spec.get("arguments") or {}
    for parameter in arguments.get("parameters") or []:
        if parameter.get("value") is None:
            yield f"spec.arguments.parameters.{parameter.get('name')} has no value"
    if arguments.get("artifacts"):
        yield "spec.arguments.artifacts"


def _volumes(holder: Manifest, where: str) -> Iterator[str]:
    for volume in holder.get("volumes") or []:
        if not any(source in volume for source in SOURCES):
            yield f"{where}.volumes.{volume.get('name')}: use {' or '.join(SOURCES)}"


def _volume_names(holder: Manifest) -> set[str]:
    claims = {claim["metadata"]["name"] for claim in holder.get("volumeClaimTemplates") or []}
    return {volume["name"] for volume in holder.get("volumes") or []} | claims


def _template(template: Manifest, names: set[str], volumes: set[str]) -> Iterator[str]:
    yield from unknown(template, TEMPLATE, "template")
    yield from _refusal(kind_of, template)
    yield from _volumes(template, "template")
    yield from _inputs_and_outputs(template)
    if template.get("retryStrategy"):
        yield from unknown(template["retryStrategy"], RETRY, "retryStrategy")
        yield from _refusal(RetryStrategy.read, template["retryStrategy"])
    if "dag" in template:
        yield from _dag(template["dag"], names)
    for group in template.get("steps") or []:
        for step in group:
            yield from _child(step, names, CHILD, "step")
    yield from _times(template)
    if len(template.get("plugin", {"one": 1})) != 1:
        yield "plugin must have exactly one key, the name of the plugin"
    if program := program_of(template):
        yield from _program(program, volumes)
        yield from _paths(template)
    if "resource" in template:
        yield from _members(template["resource"], names, volumes)
    if "{{" not in (patch := template.get("podSpecPatch") or ""):
        yield from _refusal(read_patch, patch)


def _members(resource: Manifest, names: set[str], volumes: set[str]) -> Iterator[str]:
    """Of a training on several nodes; all of them are alike."""
    try:
        first = member_templates(yaml.safe_load(replace_every_tag(resource.get("manifest") or "{}", "1")))[0]
    except (UsageError, yaml.YAMLError) as error:
        yield str(error)
        return
    yield from _template(first, names, volumes | _volume_names(first))


def _times(template: Manifest) -> Iterator[str]:
    composite = "dag" in template or "steps" in template
    for field in ("timeout", "activeDeadlineSeconds"):
        value = str(template.get(field) or "")
        if value and composite:
            yield f"{field} on a dag or steps template: set it on its containers"
        elif value and "{{" not in value:
            yield from _refusal(seconds, value)


def _dag(dag: Manifest, names: set[str]) -> Iterator[str]:
    yield from unknown(dag, DAG, "dag")
    for task in dag.get("tasks") or []:
        yield from _child(task, names, TASK, "task")
    yield from _refusal(lambda tasks: Graph(tasks, dag.get("target") or "").check(), dag.get("tasks") or [])


def _child(child: Manifest, names: set[str], known: set[str], kind: str) -> Iterator[str]:
    where = f"{kind} {child.get('name')}"
    yield from unknown(child, known, where)
    if child.get("template") not in names:
        yield f"{where}: there is no template {child.get('template')!r}"
    yield from _refusal(conditions.check, replace_every_tag(child.get("when") or "true", "x"))
    for artifact in (child.get("arguments") or {}).get("artifacts") or []:
        yield from _artifact(artifact, f"{where}.arguments.artifacts.{artifact.get('name')}")


def _inputs_and_outputs(template: Manifest) -> Iterator[str]:
    for side in ("inputs", "outputs"):
        declared = template.get(side) or {}
        yield from unknown(declared, {"artifacts", "parameters"}, side)
        for artifact in declared.get("artifacts") or []:
            yield from _artifact(artifact, f"{side}.artifacts.{artifact.get('name')}")
        for parameter in declared.get("parameters") or []:
            where = f"{side}.parameters.{parameter.get('name')}"
            yield from unknown(parameter, PARAMETER, where)
            yield from unknown(parameter.get("valueFrom") or {}, VALUE_FROM, f"{where}.valueFrom")


def _artifact(artifact: Manifest, where: str) -> Iterator[str]:
    yield from unknown(artifact, ARTIFACT, where)
    yield from unknown(artifact.get("s3") or {}, {"key"}, f"{where}.s3")
    if artifact.get("s3") and set(artifact.get("archive") or {"none"}) != {"none"}:
        yield f"{where}.archive: artifacts with a key are kept without archive here; set archive: {{none: {{}}}}"


def _program(program: Manifest, volumes: set[str]) -> Iterator[str]:
    yield from unknown(program, CONTAINER, "container")
    if not program.get("command"):
        yield "container has no command, and the entry point of its image is not known here: set command"
    for variable in program.get("env") or []:
        yield from unknown(variable, {"name", "value"}, f"env.{variable.get('name')}")
    for source in program.get("envFrom") or []:
        yield from _absent_source(source)
    for mount in program.get("volumeMounts") or []:
        if mount.get("name") not in volumes:
            yield f"volumeMounts.{mount.get('name')}: there is no such volume"


def _absent_source(source: Manifest) -> Iterator[str]:
    """There are no Secrets and no ConfigMaps here; a container that can do without starts without."""
    for kind, reference in source.items():
        if isinstance(reference, dict) and not reference.get("optional"):
            yield (
                f"container.envFrom.{kind}.{reference.get('name')}: there is none here; "
                "make it optional, or set the variables with env"
            )


def _paths(template: Manifest) -> Iterator[str]:
    """Declared paths that the program cannot have learnt from its texts."""
    texts = texts_of(substitute(template, paths_as_variables(template)))
    for what, path in declared_paths(template):
        if not any(mentions(text, path) for text in texts):
            yield (
                f"{what}: its path {path} stands in no command, argument, variable or source, so the program "
                "cannot be told where it lies here; pass it as an argument or in a variable"
            )


def _expressions(document: Any) -> Iterator[str]:
    """Every ``{{=…}}`` that cannot be read."""
    match document:
        case str():
            for tag in tags(document):
                if tag.startswith("="):
                    yield from _refusal(expressions.parse, tag[1:])
        case dict():
            for value in document.values():
                yield from _expressions(value)
        case list():
            for value in document:
                yield from _expressions(value)


def _refusal(reader: Callable[[Any], object], value: Any) -> Iterator[str]:
    try:
        reader(value)
    except UsageError as error:
        yield str(error)
