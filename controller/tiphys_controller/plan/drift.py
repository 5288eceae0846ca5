"""What a step is made of, taken apart into facts that can be compared one by one, each of one class of drift.

Names that Tiphys itself gives, and what it answers at run time, are no facts:
they differ between any two compilations, and change nothing.

What has changed between a run and what shall go on with it, and whether that may be.

Two Workflows are compared fact by fact. A step whose program, inputs or outputs
have changed is in the next Workflow, with everything that hangs on it; whether
its result still stands is decided by its step key, when its inputs are known.

Are Python and the frameworks here those that wrote the checkpoints which trainings go on from?

Only who runs the programs on this machine can know before they start; on a
cluster the image decides, and the manifests of new checkpoints tell afterwards.
"""

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from tiphys.errors import ConflictError, IntegrityError, ObjectMissingError
from tiphys.lineage.select import commits_of
from tiphys.lineage.validity import read_manifest
from tiphys.protocol.compiled_workflow import CompiledPipeline, Manifest, parameters_of
from tiphys.protocol.drift_policy import Drift, DriftAction, DriftPolicy
from tiphys.protocol.operations import MEMORY_OUTPUTS
from tiphys.protocol.step_spec import CODE_VERSION_ANNOTATION
from tiphys.records import Record
from tiphys.store import Store, lineage_of
from tiphys_controller.plan.dag import reachable, substitute, template_names

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


_NO_KEY = (Drift.WORLD_SIZE, Drift.VERSIONS)


class Difference(Record):
    """One fact that is another one than before; ``step`` is empty for what concerns all of them."""

    drift: Drift
    step: str
    place: str
    before: str
    after: str
    action: DriftAction = DriftAction.ALLOW


def differences(before: CompiledPipeline, after: CompiledPipeline, policy: DriftPolicy) -> tuple[Difference, ...]:
    """Every fact that differs, in the order of the tasks of ``after``. Tasks that only one of them has are no drift."""
    return tuple(one.model_copy(update={"action": policy.action(one.drift)}) for one in _differences(before, after))


def changed(before: CompiledPipeline, after: CompiledPipeline, found: Sequence[Difference]) -> Mapping[str, str]:
    """Steps whose results may not stand any more, by name, each with what has changed, in words."""
    reasons: dict[str, list[str]] = {}
    for name, spec in after.steps.items():
        old = before.steps.get(name)
        mine = [one for one in found if one.step == name]
        if old is None or not mine:
            continue
        program = (old.template, old.parameters, old.artifacts) != (spec.template, spec.parameters, spec.artifacts)
        inputs = any(one.drift in (Drift.PARAMETERS, Drift.DATA) for one in mine)
        if program or inputs:
            reasons[name] = list(dict.fromkeys(one.drift.value for one in mine if one.drift not in _NO_KEY))
    return {
        name: f"its {_listed(drifts)} changed; taken over if it makes no difference" for name, drifts in reasons.items()
    }


def gate(found: Sequence[Difference], run: str, forking: bool) -> None:
    """Let through what may differ.

    Raises:
        ConflictError: something may not, or only in a new run, and what to do.
    """
    refused = [one for one in found if one.action is DriftAction.REFUSE]
    if refused:
        raise ConflictError(
            f"run {run} may not go on with this: {_first(refused)}; put it back, or allow it this time with "
            f"--drift {refused[0].drift.value}=warn"
        )
    other = [one for one in found if one.action is DriftAction.FORK]
    if other and not forking:
        raise ConflictError(
            f"this would be another experiment under the name of run {run}: {_first(other)}; begin a run of its own "
            f"with `tiphys fork {run} …`, or allow it this time with --drift {other[0].drift.value}=warn"
        )


def in_words(one: Difference) -> str:
    """One difference, in a line."""
    where = f"{one.step}: " if one.step else ""
    before, after = _without_what_is_equal(one.before, one.after)
    return f"{where}{one.drift.value.replace('_', ' ')} {one.place} {_short(before)} → {_short(after)}"


def _differences(before: CompiledPipeline, after: CompiledPipeline) -> Iterator[Difference]:
    if commit(before) and commit(after) and commit(before) != commit(after):
        yield Difference(drift=Drift.CODE, step="", place="commit", before=commit(before), after=commit(after))
    common = {task["name"] for task in before.tasks()}
    for name in (task["name"] for task in after.tasks() if task["name"] in common):
        old, new = facts(before, name), facts(after, name)
        for drift, place in dict.fromkeys([*old, *new]):
            one, other = old.get((drift, place), ""), new.get((drift, place), "")
            if one != other:
                yield Difference(drift=drift, step=name, place=place, before=one, after=other)


def _first(found: Sequence[Difference]) -> str:
    others = f", and {len(found) - 1} more" if len(found) > 1 else ""
    return f"{in_words(found[0])}{others}"


def _without_what_is_equal(before: str, after: str) -> tuple[str, str]:
    """Two long lines from a few letters before their first difference on."""
    pairs = enumerate(zip(before, after, strict=False))
    equal = next((place for place, (one, other) in pairs if one != other), 0) - _LETTERS_BEFORE
    if equal <= _LETTERS_BEFORE or "\n" in before + after:
        return before, after
    return f"…{before[equal:]}", f"…{after[equal:]}"


def _short(text: str) -> str:
    lines = text.strip().splitlines()
    if not lines:
        return "nothing"
    if len(lines) > 1:
        return f"{len(lines)} lines"
    return lines[0] if len(lines[0]) <= _LONGEST else f"{lines[0][: _LONGEST - 1]}…"


def _listed(words: Sequence[str]) -> str:
    return ", ".join(words[:-1]) + (" and " if len(words) > 1 else "") + words[-1]


_LONGEST = 60
_LETTERS_BEFORE = 12


Installed = Callable[[str], str]
"""From a package, or ``python``, to its version; empty where it is not installed."""


def version_drift(
    store: Store, run: str, steps: Iterable[str], installed: Installed, policy: DriftPolicy
) -> Iterator[Difference]:
    """What is of another version than where the newest checkpoint was written; costs a listing and a read per step."""
    for step in steps:
        for package, before in _written_with(store, lineage_of(run, step)).items():
            if (after := installed(package)) != before:
                yield Difference(
                    drift=Drift.VERSIONS,
                    step=step,
                    place=package,
                    before=before,
                    after=after,
                    action=policy.action(Drift.VERSIONS),
                )


def _written_with(store: Store, lineage: str) -> dict[str, str]:
    newest = next(iter(commits_of(store, lineage)), None)
    with contextlib.suppress(IntegrityError, ObjectMissingError):  # the attempt takes an older one, and says so
        return read_manifest(store, newest).facts.versions if newest else {}
    return {}
