"""What a step is made of, taken apart into facts that can be compared one by one, each of one class of drift.

Names that Tiphys itself gives, and what it answers at run time, are no facts:
they differ between any two compilations, and change nothing.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from tiphys.protocol.drift import Drift
from tiphys.protocol.operations import MEMORY_OUTPUTS
from tiphys.protocol.pipeline import CompiledPipeline, Manifest, parameters_of
from tiphys.protocol.policy import CODE_VERSION_ANNOTATION
from tiphys_controller.references import substitute
from tiphys_controller.templates import reachable, template_names

Fact = tuple[Drift, str]
"""Class and place of a fact, such as (``template``, ``env.LR``)."""

_PROGRAMS = ("container", "script", "resource")
_OURS = re.compile(r"tiphys-|TIPHYS_|CHECKPOINT_URI$")
# The spec repeats the program in a digest, and a name that the task has.
_NOT_FACTS = ("name", "template", "kind", "fan_out", "gpu", "gang")
_FAN_OUT = ("withItems", "withParam", "withSequence")
_GPUS = ("gpus", "members")


def facts(pipeline: CompiledPipeline, name: str) -> Mapping[Fact, str]:
    """Everything that a task is made of, as text by class and place. Facts that are not set are left out."""
    body = next(task for task in pipeline.tasks() if task["name"] == name)
    known = {f"workflow.parameters.{key}": value for key, value in parameters_of(pipeline.manifest).items()}
    body = substitute(body, {tag: value for tag, value in known.items() if not _OURS.search(tag)}.get)
    found = [*_of_task(body), *_of_spec(pipeline, name)]
    for template in _programs(pipeline.manifest, body):
        found += _of_program(template)
    found += _of_operations(pipeline, name, known)
    return {place: text for place, text in found if text}


def commit(pipeline: CompiledPipeline) -> str:
    """Commit of the code that was compiled; empty if nobody knew it."""
    annotations = pipeline.manifest["metadata"].get("annotations") or {}
    return str(annotations.get(CODE_VERSION_ANNOTATION, ""))


def _of_task(body: Manifest) -> Iterator[tuple[Fact, str]]:
    arguments = body.get("arguments") or {}
    for parameter in arguments.get("parameters") or []:
        if not _OURS.match(parameter["name"]):
            yield (Drift.PARAMETERS, parameter["name"]), _text(parameter.get("value", parameter.get("valueFrom")))
    for artifact in arguments.get("artifacts") or []:
        source = {key: value for key, value in artifact.items() if key != "name"}
        yield (Drift.DATA, artifact["name"]), artifact.get("from") or _text(source)
    for field in _FAN_OUT:
        yield (Drift.PARAMETERS, field), _text(body.get(field))


def _of_spec(pipeline: CompiledPipeline, name: str) -> Iterator[tuple[Fact, str]]:
    spec = pipeline.steps.get(name)
    if spec is None:
        return
    document = spec.model_dump(mode="json", exclude_none=True)
    gpu = document.get("gpu") or {}
    yield (Drift.WORLD_SIZE, "GPUs"), _text(gpu.get("gpus"))
    yield (Drift.WORLD_SIZE, "pods"), _text((document.get("gang") or {}).get("members"))
    rest = {key: value for key, value in document.items() if key not in _NOT_FACTS}
    rest["gpu"] = {key: value for key, value in gpu.items() if key not in _GPUS}
    for place, text in _flat(rest):
        yield (Drift.TEMPLATE, place), text


def _programs(manifest: Manifest, body: Manifest) -> Iterator[Manifest]:
    used = reachable(manifest, template_names(body))
    for template in manifest["spec"].get("templates", []):
        if template["name"] in used and any(kind in template for kind in _PROGRAMS):
            yield template


def _of_program(template: Manifest) -> Iterator[tuple[Fact, str]]:
    inputs = template.get("inputs") or {}
    for artifact in inputs.get("artifacts") or []:
        source = {key: value for key, value in artifact.items() if key not in ("name", "path", "mode", "recurseMode")}
        yield (Drift.DATA, artifact["name"]), _text(source)
        yield (Drift.TEMPLATE, f"inputs.{artifact['name']}"), artifact.get("path", "")
    for kind in _PROGRAMS:
        for place, text in _flat(template.get(kind) or {}):
            yield (_CLASSES.get(place, Drift.TEMPLATE), place), text
    rest = {key: value for key, value in template.items() if key not in (*_PROGRAMS, "name", "inputs", "metadata")}
    for place, text in _flat(rest):
        yield (Drift.TEMPLATE, place), text


def _of_operations(pipeline: CompiledPipeline, name: str, known: Mapping[str, str]) -> Iterator[tuple[Fact, str]]:
    """What admit is asked and answers: workflow parameters that a program uses directly are in its body."""
    for template in pipeline.manifest["spec"].get("templates", []):
        operation = (template.get("plugin") or {}).get("tiphys") or {}
        if (operation.get("op"), operation.get("step")) == ("admit", name):
            yield from _of_answers(template)
            for key in operation.get("inputs") or {}:
                if key in known and not _OURS.search(key):
                    yield (Drift.PARAMETERS, key.removeprefix("workflow.parameters.")), known[key]


def _of_answers(admit: Manifest) -> Iterator[tuple[Fact, str]]:
    """Memory of several pods is answered by admit, and what was declared is the default of that."""
    sides = {name: side for side, name in MEMORY_OUTPUTS.items()}
    for parameter in (admit.get("outputs") or {}).get("parameters") or []:
        if side := sides.get(parameter["name"]):
            declared = (parameter.get("valueFrom") or {}).get("default")
            yield (Drift.TEMPLATE, f"resources.{side}.memory"), _text(declared)


def _flat(part: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Leaves of a document by path; things in lists go by their names, where they have one."""
    if isinstance(part, dict):
        for key, value in part.items():
            yield from _flat(value, f"{path}.{key}" if path else key)
    elif isinstance(part, list) and all(isinstance(one, dict) and "name" in one for one in part):
        for one in part:
            if not _OURS.match(one["name"]):
                yield from _flat({key: value for key, value in one.items() if key != "name"}, f"{path}.{one['name']}")
    elif part not in (None, [], {}):
        yield path, _text(part)


def _text(value: Any) -> str:
    if value is None or value in ({}, []):
        return ""
    return value if isinstance(value, str) else str(value)


_CLASSES = {"image": Drift.IMAGE, "source": Drift.CODE}
