"""`PreflightSubject`: a compiled Workflow as the checks read it, with its pods and the lines of its source.

Values of workflow parameters are filled in, because images, claims and queues are often parameters.
"""

import ast
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from hera_pipelines.compile.authored_step import list_declared
from hera_pipelines.compile.references import TemplateNames
from tiphys.errors import UsageError
from tiphys.protocol.compiled_workflow import (
    CompiledPipeline,
    Manifest,
    is_fan_out,
    read_workflow_parameters,
    replace_tags,
    substitute_tags,
)
from tiphys.protocol.step_spec import StepSpec

_CONTAINER_FIELDS = ("initContainers", "containers", "sidecars")
_REPLICA_FIELDS = ("parallelism", "replicas", "numNodes")
_MAX_DEPTH = 40
_TAG = "tag-of-argo-5f0c1d"
"""Stands for a tag while a manifest is parsed; afterwards, the tag is ``{{}}``."""


@dataclass(frozen=True)
class CreatedObject:
    """The object that a ``resource`` template creates or changes."""

    action: str
    api_version: str
    kind: str
    namespace: str
    """Empty: that of the Workflow."""


@dataclass(frozen=True)
class PodTemplate:
    """Pods that one template makes."""

    template: str
    step: str
    """The step, or the template itself if it belongs to a plain task or to several steps."""
    containers: tuple[Manifest, ...]
    """Main containers first in each pod; those of init containers and sidecars follow."""
    volumes: tuple[Manifest, ...]
    members: int = 1
    """Pods of one attempt that run at the same time."""
    spread: bool = False
    """Whether each of them has a node of its own, as in a gang of Tiphys."""
    fan_out: bool = False
    """Whether pods of several items of a fan-out may run at the same time."""


@dataclass(frozen=True)
class PreflightSubject:
    """What is examined.

    Attributes:
        file: The file of the pipeline.
        pipeline: The compiled Workflow, with the values of its parameters.
        account: Service account of its pods.
        namespace: Namespace that it will be created in; empty: not known.
        run_prefix: How the names of its runs begin.
        lines: Line of the definition in ``file``, by step, task or template.
        schedule_complaint: Why the schedule of the pipeline cannot be compiled; empty: it can, or there is none.
    """

    file: Path
    pipeline: CompiledPipeline
    account: str
    namespace: str
    run_prefix: str
    lines: Mapping[str, int]
    schedule_complaint: str = ""

    @property
    def spec(self) -> Manifest:
        spec: Manifest = self.pipeline.manifest["spec"]
        return spec

    @property
    def steps(self) -> Mapping[str, StepSpec]:
        return self.pipeline.steps

    @property
    def gpu_steps(self) -> list[StepSpec]:
        return [step for step in self.steps.values() if step.gpu is not None]

    @cached_property
    def pods(self) -> tuple[PodTemplate, ...]:
        """The pods of all templates that the author wrote."""
        return tuple(_iter_pods(self))

    @cached_property
    def created_objects(self) -> list[tuple[str, str, CreatedObject]]:
        """Step, service account and object of each ``resource`` template."""
        found = []
        for template in self.spec.get("templates") or []:
            resource = template.get("resource") or {}
            document = _parse_manifest(resource.get("manifest"))
            if isinstance(document, dict) and document.get("kind"):
                account = (template.get("executor") or {}).get("serviceAccountName")
                namespace = (document.get("metadata") or {}).get("namespace")
                created = CreatedObject(
                    str(resource.get("action", "")),
                    str(document.get("apiVersion", "")),
                    str(document["kind"]),
                    str(namespace or ""),
                )
                found.append((self.step_of(template["name"]), str(account or self.executor_account), created))
        return found

    @property
    def executor_account(self) -> str:
        """Account of Argo's own containers."""
        return str((self.spec.get("executor") or {}).get("serviceAccountName") or self.account)

    @cached_property
    def _steps_by_template(self) -> Mapping[str, list[StepSpec]]:
        calls = {task["name"]: str(task.get("template", "")) for task in self.pipeline.tasks()}
        steps: dict[str, list[StepSpec]] = {}
        for name, step in self.steps.items():
            steps.setdefault(TemplateNames(name).run if step.is_gated else calls[name], []).append(step)
        return steps

    def steps_of(self, template: str) -> list[StepSpec]:
        """The steps whose program a template is: all tasks that call it, where they have no gate."""
        return self._steps_by_template.get(template, [])

    def step_of(self, template: str) -> str:
        """The step whose program a template is; the template itself for one of a plain task, or of several steps."""
        steps = self.steps_of(template)
        return steps[0].name if len(steps) == 1 else template

    def line_of(self, step: str) -> int | None:
        """Line of a step or template in the file; None if it is not known."""
        return self.lines.get(_plain_name(step))


def build_subject(
    file: Path, manifest: Manifest, account: str, namespace: str = "", schedule_complaint: str = ""
) -> PreflightSubject:
    """The subject for a compiled Workflow.

    ``account`` is that of the pods, if the Workflow names none.

    Raises:
        UsageError: Tiphys did not compile the Workflow.
    """
    values = {f"workflow.parameters.{name}": value for name, value in read_workflow_parameters(manifest).items()}
    filled = {**manifest, "spec": substitute_tags(manifest["spec"], values.get)}
    named = filled["spec"].get("serviceAccountName") or account
    pipeline = CompiledPipeline.from_manifest(filled)
    run_prefix = CompiledPipeline.from_manifest(manifest).run_name.partition("{{")[0] or pipeline.name
    lines = find_source_lines(file)
    return PreflightSubject(file, pipeline, str(named), namespace, run_prefix, lines, schedule_complaint)


def _iter_pods(subject: PreflightSubject) -> Iterator[PodTemplate]:
    repeated = _find_repeated_templates(subject.spec)
    shared = subject.spec.get("volumes") or []
    for template in subject.spec.get("templates") or []:
        name = template.get("name", "")
        step, steps = subject.step_of(name), subject.steps_of(name)
        gang = steps[0].gang if steps else None
        if main := _main_containers(template):
            extra = [*(template.get("initContainers") or []), *(template.get("sidecars") or [])]
            yield PodTemplate(
                template=name,
                step=step,
                containers=(*main, *extra),
                volumes=(*shared, *(template.get("volumes") or [])),
                fan_out=name in repeated,
            )
        elif "resource" in template:
            document = _parse_manifest(template["resource"].get("manifest"))
            if specs := list(_iter_pod_specs(document)):
                members = gang.members if gang else _count_members(document)
                yield PodTemplate(
                    template=name,
                    step=step,
                    containers=tuple(
                        container
                        for spec in specs
                        for field in _CONTAINER_FIELDS
                        for container in spec.get(field) or []
                    ),
                    volumes=tuple(chain.from_iterable(spec.get("volumes") or [] for spec in specs)),
                    members=members,
                    spread=gang is not None,
                    fan_out=name in repeated,
                )


def _main_containers(template: Manifest) -> list[Manifest]:
    single = template.get("container") or template.get("script")
    if single:
        return [single]
    return list((template.get("containerSet") or {}).get("containers") or [])


def _parse_manifest(text: Any) -> Any:
    """The object of a resource template. Argo's placeholders may stand where JSON has no text."""
    if not isinstance(text, str):
        return None
    try:
        document = yaml.safe_load(replace_tags(text, lambda _: _TAG))
        return json.loads(json.dumps(document, default=str).replace(_TAG, "{{}}"))
    except (yaml.YAMLError, ValueError, TypeError, RecursionError):
        return None


def _iter_pod_specs(part: Any, depth: int = 0) -> Iterator[Manifest]:
    if depth > _MAX_DEPTH:
        return
    if isinstance(part, dict):
        containers = part.get("containers")
        if isinstance(containers, list) and containers and all(isinstance(container, dict) for container in containers):
            yield part
        for value in part.values():
            yield from _iter_pod_specs(value, depth + 1)
    elif isinstance(part, list):
        for value in part:
            yield from _iter_pod_specs(value, depth + 1)


def _count_members(part: Any, depth: int = 0) -> int:
    """Pods that an object of the author makes at the same time, by its counts of replicas; 1 if it declares none."""
    if depth > _MAX_DEPTH or not isinstance(part, dict | list):
        return 1
    if isinstance(part, list):
        return max((_count_members(value, depth + 1) for value in part), default=1)
    own: list[int] = [part[field] for field in _REPLICA_FIELDS if isinstance(part.get(field), int)]
    return max([1, *own, *(_count_members(value, depth + 1) for value in part.values())])


def _find_repeated_templates(spec: Manifest) -> set[str]:
    """Templates that a fan-out calls, directly or in a DAG or steps of its own."""
    templates = {template.get("name", ""): template for template in spec.get("templates") or []}
    open_names = [
        str(call.get("template", ""))
        for template in templates.values()
        for call in _iter_calls(template)
        if is_fan_out(call)
    ]
    found: set[str] = set()
    while open_names:
        name = open_names.pop()
        if name not in found:
            found.add(name)
            open_names += [str(call.get("template", "")) for call in _iter_calls(templates.get(name, {}))]
    return found


def _iter_calls(template: Manifest) -> Iterator[Manifest]:
    """Tasks of a DAG, or steps of a list of steps."""
    yield from list_declared(template, "dag", "tasks")
    yield from chain.from_iterable(template.get("steps") or [])


def find_source_lines(file: Path) -> Mapping[str, int]:
    """Line of the definition of each step, task or template in a pipeline file, by its plain name; empty if unknown.

    In Python, that is a function, or a call that gives a name, such as ``Train(name="fit")``.
    """
    try:
        if file.suffix in (".yaml", ".yml"):
            return _find_yaml_lines(file)
        tree = ast.parse(file.read_text())
    except (OSError, ValueError, SyntaxError, RecursionError, UsageError):
        return {}
    lines: dict[str, int] = {}
    for node in ast.walk(tree):
        for name in _defined_names(node):
            lines.setdefault(_plain_name(name), node.lineno)  # type: ignore[attr-defined]
    return lines


def _defined_names(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        yield node.name
    elif isinstance(node, ast.Call):
        for keyword in node.keywords:
            if keyword.arg == "name" and isinstance(keyword.value, ast.Constant):
                yield str(keyword.value.value)


def _find_yaml_lines(file: Path) -> Mapping[str, int]:
    from hera_pipelines.authoring.adoption import read_argo_documents  # imports Hera

    lines: dict[str, int] = {}
    for document in read_argo_documents(file):
        for name, line in document.lines.items():
            lines.setdefault(_plain_name(name), line)
        for template in document.workflow_spec.get("templates") or []:
            for call in _iter_calls(template):  # a step has the name of its task
                if line := document.lines.get(str(call.get("template")), 0):
                    lines.setdefault(_plain_name(str(call.get("name"))), line)
    return lines


def _plain_name(name: str) -> str:
    """The form that a task's name and its template's have in common: compile makes ``make-it`` of ``make_it``."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower())
