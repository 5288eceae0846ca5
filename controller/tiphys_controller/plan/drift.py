"""Finds drift: what differs between the Workflow of a run and a changed one.

Two Workflows are compared field by field, each field of one drift class. Names
that Tiphys generates and values that it answers at run time are left out: they
differ between any two compilations. A step whose program, inputs or outputs
changed is in the next Workflow, with every step that depends on it; whether its
result still holds is decided by its step key, once its inputs are known.

Version drift compares installed Python packages with those that wrote the newest
checkpoint. It needs the machine that runs the programs; on a cluster the image
decides, and the manifests of new checkpoints record the versions.
"""

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from tiphys.errors import ConflictError, IntegrityError, ObjectMissingError
from tiphys.lineage.select import iter_commits
from tiphys.lineage.validity import read_manifest
from tiphys.protocol import environment
from tiphys.protocol.compiled_workflow import (
    CompiledPipeline,
    Manifest,
    find_template,
    program_source,
    read_workflow_parameters,
    substitute_tags,
)
from tiphys.protocol.drift_policy import DriftAction, DriftClass, DriftPolicy
from tiphys.protocol.fan_out import argo_text
from tiphys.protocol.operations import MEMORY_OUTPUTS
from tiphys.protocol.step_spec import CODE_VERSION_ANNOTATION
from tiphys.protocol.variables import find_variables
from tiphys.records import Record
from tiphys.store import Store, lineage_name
from tiphys_controller.plan.dag import TaskGraph, find_reachable_templates, find_template_names

SpecField = tuple[DriftClass, str]
"""Drift class and path of a field, such as (``template``, ``env.LR``)."""

_PROGRAM_KINDS = ("container", "script", "resource")
_TIPHYS_NAME = re.compile(r"tiphys-|TIPHYS_|CHECKPOINT_URI$")
# These repeat the template, the task, a gang or data, which are compared by themselves.
_EXCLUDED_SPEC_FIELDS = ("name", "template", "kind", "fan_out", "gpu", "gang", "suffixes", "data")
_COMMIT_OF_MEMBERS = re.compile(rf'^ *{{"name": "{environment.GIT_COMMIT}".*\n', re.MULTILINE)
"""A line of the object that creates the pods of a gang; `_iterate_drift` compares the commits themselves."""
_COMPILED_FIELD = re.compile(r"retryStrategy\.expression|outputs\.artifacts\.[^.]+\.s3\.key")
"""Fields that compile derives from the retry budgets and the paths, which are compared by themselves."""
CONDITION = "when"
_CONTROL_FIELDS = (CONDITION, "withItems", "withParam", "withSequence")
_WORLD_SIZE_FIELDS = ("gpus", "members")


def comparable_fields(pipeline: CompiledPipeline, name: str) -> Mapping[SpecField, str]:
    """The fields of a task as text, by class and path. Unset fields are left out."""
    body = _fill_in_defaults(pipeline.manifest, next(task for task in pipeline.tasks() if task["name"] == name))
    parameters = {
        f"workflow.parameters.{key}": value for key, value in read_workflow_parameters(pipeline.manifest).items()
    }
    known = {tag: value for tag, value in parameters.items() if not _TIPHYS_NAME.search(tag)}
    known |= _entry_inputs(pipeline.manifest, known)
    fields = [*_expression_fields(body, known), *_task_fields(substitute_tags(body, known.get))]
    fields += _step_spec_fields(pipeline, name)
    for template in _program_templates(pipeline.manifest, body):
        fields += _program_fields(template)
    fields += _admit_fields(pipeline, name, parameters)
    return {place: text for place, text in fields if text}


def _fill_in_defaults(manifest: Manifest, task: Manifest) -> Manifest:
    """The task with the parameters, too, that Argo takes from the inputs of its template."""
    templates = {template["name"]: template for template in manifest["spec"].get("templates", [])}
    template = templates.get(task.get("template"), {})
    declared = (template.get("inputs") or {}).get("parameters") or []
    arguments = task.get("arguments") or {}
    given = arguments.get("parameters") or []
    names = {parameter["name"] for parameter in given}
    defaults = [
        {"name": parameter["name"], "value": parameter.get("value", parameter.get("default"))}
        for parameter in declared
        if parameter["name"] not in names
    ]
    return {**task, "arguments": {**arguments, "parameters": [*given, *defaults]}}


def _entry_inputs(manifest: Manifest, parameters: Mapping[str, str]) -> dict[str, str]:
    """What the inputs of the entry DAG are, as text by tag: arguments of the Workflow, or their defaults."""
    spec = manifest["spec"]
    inputs = find_template(manifest, spec["entrypoint"]).get("inputs") or {}
    found = {}
    for kind in ("parameters", "artifacts"):
        given = {argument["name"]: argument for argument in (spec.get("arguments") or {}).get(kind) or []}
        for declared in inputs.get(kind) or []:
            source = {**declared, **given.get(declared["name"], {})}
            value = source.get("value", source.get("default")) if kind == "parameters" else source
            found[f"inputs.{kind}.{declared['name']}"] = _text(value)
    return {tag: substitute_tags(text, parameters.get) for tag, text in found.items()}


def _expression_fields(body: Manifest, known: Mapping[str, str]) -> Iterator[tuple[SpecField, str]]:
    """The values that expressions of a task use, which no tag puts into its text."""
    used = (".".join(variable.names[:3]) for variable in find_variables(body) if variable.is_expression)
    for name in used:
        if name in known:
            yield (DriftClass.PARAMETERS, name), known[name]


def code_commit(pipeline: CompiledPipeline) -> str:
    """Commit of the code that was compiled; empty if not recorded."""
    annotations = pipeline.manifest["metadata"].get("annotations") or {}
    return str(annotations.get(CODE_VERSION_ANNOTATION, ""))


def _task_fields(body: Manifest) -> Iterator[tuple[SpecField, str]]:
    arguments = body.get("arguments") or {}
    for parameter in arguments.get("parameters") or []:
        if not _TIPHYS_NAME.match(parameter["name"]):
            yield (DriftClass.PARAMETERS, parameter["name"]), _text(parameter.get("value", parameter.get("valueFrom")))
    for artifact in arguments.get("artifacts") or []:
        source = {key: value for key, value in artifact.items() if key != "name"}
        yield (DriftClass.DATA, artifact["name"]), artifact.get("from") or _text(source)
    for field in _CONTROL_FIELDS:
        yield (DriftClass.PARAMETERS, field), _text(body.get(field))


def _step_spec_fields(pipeline: CompiledPipeline, name: str) -> Iterator[tuple[SpecField, str]]:
    spec = pipeline.steps.get(name)
    if spec is None:
        return
    document = spec.model_dump(mode="json", exclude_none=True)
    gpu = document.get("gpu") or {}
    yield (DriftClass.WORLD_SIZE, "GPUs"), _text(gpu.get("gpus"))
    yield (DriftClass.WORLD_SIZE, "pods"), _text((document.get("gang") or {}).get("members"))
    for data in spec.data:
        yield (DriftClass.DATA, data.name), str(data)
    rest = {key: value for key, value in document.items() if key not in _EXCLUDED_SPEC_FIELDS}
    rest["gpu"] = {key: value for key, value in gpu.items() if key not in _WORLD_SIZE_FIELDS}
    for place, text in _flatten(rest):
        yield (DriftClass.TEMPLATE, place), text


def _program_templates(manifest: Manifest, body: Manifest) -> Iterator[Manifest]:
    used = find_reachable_templates(manifest, find_template_names(body))
    for template in manifest["spec"].get("templates", []):
        if template["name"] in used and any(kind in template for kind in _PROGRAM_KINDS):
            yield template


def _program_fields(template: Manifest) -> Iterator[tuple[SpecField, str]]:
    inputs = template.get("inputs") or {}
    for artifact in inputs.get("artifacts") or []:
        source = {key: value for key, value in artifact.items() if key not in ("name", "path", "mode", "recurseMode")}
        yield (DriftClass.DATA, artifact["name"]), _text(source)
        yield (DriftClass.TEMPLATE, f"inputs.{artifact['name']}"), artifact.get("path", "")
    for kind in _PROGRAM_KINDS:
        for place, text in _flatten(template.get(kind) or {}):
            yield (_DRIFT_BY_FIELD.get(place, DriftClass.TEMPLATE), place), _COMMIT_OF_MEMBERS.sub("", text)
    rest = {key: value for key, value in template.items() if key not in (*_PROGRAM_KINDS, "name", "inputs", "metadata")}
    for place, text in _flatten(rest):
        if not _COMPILED_FIELD.fullmatch(place):
            yield (DriftClass.TEMPLATE, place), text


def _admit_fields(
    pipeline: CompiledPipeline, name: str, parameters: Mapping[str, str]
) -> Iterator[tuple[SpecField, str]]:
    """Fields of the admit step: memory defaults, and workflow parameters that it passes to the step."""
    for template in pipeline.manifest["spec"].get("templates", []):
        operation = (template.get("plugin") or {}).get("tiphys") or {}
        if (operation.get("op"), operation.get("step")) == ("admit", name):
            yield from _memory_fields(template)
            for key in operation.get("inputs") or {}:
                if key in parameters and not _TIPHYS_NAME.search(key):
                    yield (DriftClass.PARAMETERS, key.removeprefix("workflow.parameters.")), parameters[key]


def _memory_fields(admit: Manifest) -> Iterator[tuple[SpecField, str]]:
    """Memory that admit answers for the pods of a gang; the declared value is the default of that output."""
    sides = {name: side for side, name in MEMORY_OUTPUTS.items()}
    for parameter in (admit.get("outputs") or {}).get("parameters") or []:
        if side := sides.get(parameter["name"]):
            declared = (parameter.get("valueFrom") or {}).get("default")
            yield (DriftClass.TEMPLATE, f"resources.{side}.memory"), _text(declared)


def _flatten(part: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Leaves of a document by path; list items with a name are keyed by it."""
    if isinstance(part, dict):
        for key, value in part.items():
            yield from _flatten(value, f"{path}.{key}" if path else key)
    elif isinstance(part, list) and all(isinstance(item, dict) and "name" in item for item in part):
        for item in part:
            if not _TIPHYS_NAME.match(item["name"]):
                yield from _flatten(
                    {key: value for key, value in item.items() if key != "name"}, f"{path}.{item['name']}"
                )
    elif part not in (None, [], {}):
        yield path, _text(part)


def _text(value: Any) -> str:
    if value is None or value in ({}, []):
        return ""
    return argo_text(value)


_DRIFT_BY_FIELD = {"image": DriftClass.IMAGE, "source": DriftClass.CODE}


_TAKEN_OVER = "; taken over if it makes no difference"
_DRIFTS_OUTSIDE_STEP_KEY = (DriftClass.WORLD_SIZE, DriftClass.VERSIONS)


class DriftFinding(Record):
    """One changed field; ``step`` is empty for a change that concerns all steps."""

    drift: DriftClass
    step: str
    place: str
    before: str
    after: str
    action: DriftAction = DriftAction.ALLOW


def find_drift(before: CompiledPipeline, after: CompiledPipeline, policy: DriftPolicy) -> tuple[DriftFinding, ...]:
    """Every changed field, in the order of the tasks of ``after``. Added and removed tasks are no drift."""
    return tuple(
        found.model_copy(update={"action": policy.action_for(found.drift)}) for found in _iterate_drift(before, after)
    )


def find_changed_steps(
    before: CompiledPipeline, after: CompiledPipeline, findings: Sequence[DriftFinding]
) -> Mapping[str, str]:
    """Steps whose results may be outdated, by name, each with what changed as a phrase."""
    reasons: dict[str, str] = {}
    changed_plain: set[str] = set()
    for name, task in TaskGraph.from_pipeline(after).tasks.items() if findings else ():
        previous, spec = before.steps.get(name), task.spec
        step_findings = [finding for finding in findings if finding.step == name]
        through = min(task.needs & changed_plain, default="")
        if spec is None:  # it keeps no result of its own, but those behind it rest on what it made
            changed_plain |= {name} if step_findings or through else set()
            continue
        if previous is None:
            continue
        program = (previous.template, previous.output_parameters, previous.artifacts) != (
            spec.template,
            spec.output_parameters,
            spec.artifacts,
        )
        inputs = any(step_finding.drift in (DriftClass.PARAMETERS, DriftClass.DATA) for step_finding in step_findings)
        if step_findings and (program or inputs):
            drifts = dict.fromkeys(
                finding.drift.value for finding in step_findings if finding.drift not in _DRIFTS_OUTSIDE_STEP_KEY
            )
            decides = any(finding.place == CONDITION for finding in step_findings)  # no result says what it would now
            reasons[name] = f"its {_join_words([*drifts])} changed" + ("" if decides else _TAKEN_OVER)
        elif through:
            reasons[name] = f"{through}, which it needs, changed{_TAKEN_OVER}"
    return reasons


def check_drift_allowed(findings: Sequence[DriftFinding], run: str, is_fork: bool) -> None:
    """Check that the drift policy allows all findings.

    Raises:
        ConflictError: a change is refused, or allowed only in a fork.
    """
    refused = [finding for finding in findings if finding.action is DriftAction.REFUSE]
    if refused:
        raise ConflictError(
            f"run {run} may not go on with this: {_summarize_drift(refused)}; revert it, or allow it this time with "
            f"--drift {refused[0].drift.value}=warn"
        )
    fork_only = [finding for finding in findings if finding.action is DriftAction.FORK]
    if fork_only and not is_fork:
        raise ConflictError(
            f"this would be another experiment under the name of run {run}: {_summarize_drift(fork_only)}; begin a "
            "run of its own "
            f"with `tiphys fork {run} …`, or allow it this time with --drift {fork_only[0].drift.value}=warn"
        )


def format_drift(finding: DriftFinding) -> str:
    """Format one finding as a line."""
    where = f"{finding.step}: " if finding.step else ""
    before, after = format_change(finding.before, finding.after)
    return f"{where}{finding.drift.value.replace('_', ' ')} {finding.place} {before} → {after}"


def format_change(before: str, after: str) -> tuple[str, str]:
    """Two values, shortened around the place where they differ."""
    before, after = _trim_equal_start(before, after)
    return _shorten_value(before), _shorten_value(after)


def _iterate_drift(before: CompiledPipeline, after: CompiledPipeline) -> Iterator[DriftFinding]:
    if code_commit(before) and code_commit(after) and code_commit(before) != code_commit(after):
        yield DriftFinding(
            drift=DriftClass.CODE, step="", place="commit", before=code_commit(before), after=code_commit(after)
        )
    common = {task["name"] for task in before.tasks()}
    for name in (task["name"] for task in after.tasks() if task["name"] in common):
        old, new = comparable_fields(before, name), comparable_fields(after, name)
        for drift, place in dict.fromkeys([*old, *new]):
            old_value, new_value = old.get((drift, place), ""), new.get((drift, place), "")
            if program_source(old_value) != program_source(new_value):
                yield DriftFinding(drift=drift, step=name, place=place, before=old_value, after=new_value)


def _summarize_drift(findings: Sequence[DriftFinding]) -> str:
    others = f", and {len(findings) - 1} more" if len(findings) > 1 else ""
    return f"{format_drift(findings[0])}{others}"


def _trim_equal_start(before: str, after: str) -> tuple[str, str]:
    """Cut the equal start of two long lines, up to a few letters before the first difference."""
    pairs = enumerate(zip(before, after, strict=False))
    equal = next((place for place, (old_value, new_value) in pairs if old_value != new_value), 0) - _LETTERS_BEFORE
    if equal <= _LETTERS_BEFORE or "\n" in before + after:
        return before, after
    return f"…{before[equal:]}", f"…{after[equal:]}"


def _shorten_value(text: str) -> str:
    lines = text.strip().splitlines()
    if not lines:
        return "nothing"
    if len(lines) > 1:
        return f"{len(lines)} lines"
    return lines[0] if len(lines[0]) <= _LONGEST_VALUE else f"{lines[0][: _LONGEST_VALUE - 1]}…"


def _join_words(words: Sequence[str]) -> str:
    return ", ".join(words[:-1]) + (" and " if len(words) > 1 else "") + words[-1]


_LONGEST_VALUE = 60
_LETTERS_BEFORE = 12


InstalledVersionLookup = Callable[[str], str]
"""Returns the version of a package, or of ``python``; empty if it is not installed."""


def find_version_drift(
    store: Store, run: str, steps: Iterable[str], installed_version: InstalledVersionLookup, policy: DriftPolicy
) -> Iterator[DriftFinding]:
    """Packages whose versions differ from those in the newest checkpoint; costs a listing and a read per step."""
    for step in steps:
        for package, before in _read_checkpoint_versions(store, lineage_name(run, step)).items():
            if (after := installed_version(package)) != before:
                yield DriftFinding(
                    drift=DriftClass.VERSIONS,
                    step=step,
                    place=package,
                    before=before,
                    after=after,
                    action=policy.action_for(DriftClass.VERSIONS),
                )


def _read_checkpoint_versions(store: Store, lineage: str) -> dict[str, str]:
    newest = next(iter_commits(store, lineage), None)
    with contextlib.suppress(IntegrityError, ObjectMissingError):  # the attempt then restores an older checkpoint
        return read_manifest(store, newest).facts.versions if newest else {}
    return {}
