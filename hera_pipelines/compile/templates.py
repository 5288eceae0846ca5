"""The two shapes of a gated step, as `docs/architecture.md` draws them.

Their structure ran green on Argo 4.1: skipped and adopted, retried after exit
code 75 and after a deleted pod, under stop and under terminate.

The author's own container, given its identity, its outputs' keys and its place.
"""

import copy

from hera_pipelines.compile import references as names
from hera_pipelines.compile.container import place, variables
from hera_pipelines.compile.gang import gang_template
from hera_pipelines.compile.gated_step import GatedStep, program_container
from hera_pipelines.compile.plugin_templates import (
    EXIT_CODE,
    STATUS,
    Identity,
    admit_template,
    conclude_template,
    input_value,
    item_input,
    plain_artifact,
    settle_template,
    without_empty,
)
from hera_pipelines.compile.retries import attempts_strategy, step_strategy
from tiphys.protocol.compiled_workflow import Manifest
from tiphys.protocol.operations import gang_outputs
from tiphys.protocol.step_spec import ATTEMPT_LABEL, RUN_LABEL, STEP_ANNOTATION, STEP_LABEL, STORE_SECRET

_EVERY_STEP = ("run-id", "step", "attempt", "outputs")
_CHECKPOINTS = ("lineage", "resume-from", "checkpoint-uri")
_TRAIN = ("pod-patch",)
# A training program writes its checkpoints itself. Optional, because pods may get credentials in another way, and
# first, because of two variables of one name the later one holds.
_CREDENTIALS: Manifest = {"secretRef": {"name": STORE_SECRET, "optional": True}}


def answers(step: GatedStep) -> tuple[str, ...]:
    """Names of admit's answers that the container of ``step`` takes."""
    checkpoints = _CHECKPOINTS if step.settings.checkpoints else ()
    place = (*gang_outputs(step.settings.gang), *step.admitted_memory) or _TRAIN
    return _EVERY_STEP + checkpoints + (place if step.trains else ())


def run_template(step: GatedStep, store: str) -> Manifest:
    """The author's template as Argo runs it, without its annotation and under a name of its own."""
    template = copy.deepcopy(step.program)
    template["name"] = step.names.run
    template["metadata"] = _metadata(step)
    template["inputs"] = _inputs(step)
    template["outputs"] = without_empty({"artifacts": _outputs(step)})
    container = program_container(template)
    container["env"] = [*(container.get("env") or []), *variables(step, store)]
    if step.trains:
        container["envFrom"] = [_CREDENTIALS, *(container.get("envFrom") or [])]
    if not step.trains:
        template.setdefault("retryStrategy", step_strategy(step.settings.retry))
    place(template, step)
    return without_empty(template)


def _metadata(step: GatedStep) -> Manifest:
    metadata = copy.deepcopy(step.program.get("metadata") or {})
    metadata["annotations"] = {k: v for k, v in metadata["annotations"].items() if k != STEP_ANNOTATION}
    # The label is how the plugin finds the pods of an attempt; a podSpecPatch cannot set labels.
    metadata["labels"] = {
        **(metadata.get("labels") or {}),
        RUN_LABEL: input_value(names.answer("run-id")),
        STEP_LABEL: step.name,
        ATTEMPT_LABEL: input_value(names.answer("attempt")),
    }
    return {field: value for field, value in metadata.items() if value}


def _inputs(step: GatedStep) -> Manifest:
    given = [{"name": p["name"]} for p in step.input_parameters]
    answered = [{"name": names.answer(name)} for name in answers(step)]
    inputs: Manifest = {"parameters": given + answered}
    if step.input_artifacts:
        inputs["artifacts"] = [_readable(a) for a in step.input_artifacts]
    return inputs


def _readable(artifact: Manifest) -> Manifest:
    """Argo's executor loads, as root, into files that root alone may read; a program should not have to be root."""
    mode = {} if "mode" in artifact else {"mode": 0o755, "recurseMode": True}
    return {**plain_artifact(artifact), **mode}


def _outputs(step: GatedStep) -> list[Manifest]:
    artifacts = [_keyed(step, a["name"], a["path"], f"artifacts/{a['name']}") for a in step.output_artifacts]
    parameters = [
        _keyed(step, names.parameter_artifact(p["name"]), p["valueFrom"]["path"], f"parameters/{p['name']}")
        for p in step.output_parameters
    ]
    return artifacts + parameters


def _keyed(step: GatedStep, name: str, path: str, key: str) -> Manifest:
    """An artifact at a known key. conclude looks whether it is there, so Argo need not."""
    # Argo's own retries of a step share one admit, and so one prefix; each writes below its number.
    retry = "" if step.trains else "{{retries}}/"
    return {
        "name": name,
        "path": path,
        "optional": True,
        "archive": {"none": {}},
        "s3": {"key": f"{input_value(names.answer('outputs'))}/{retry}{key}"},
    }


_NO_EXIT_CODE = "-1"
_GO_ON = {"failed": True, "error": True}


def step_templates(step: GatedStep, identity: Identity, store: str, workflow: Manifest) -> list[Manifest]:
    """All templates of one step, the wrapper first; ``workflow`` is the Workflow's ``spec``."""
    return _train_shape(step, identity, store, workflow) if step.trains else _step_shape(step, identity, store)


def _step_shape(step: GatedStep, identity: Identity, store: str) -> list[Manifest]:
    groups = [[_admit(step)], [_run(step)], [_conclude(step, "run", _exit_code_of("run"))]]
    return [
        _wrapper(step, groups),
        admit_template(step, identity),
        run_template(step, store),
        conclude_template(step, identity),
    ]


def _train_shape(step: GatedStep, identity: Identity, store: str, workflow: Manifest) -> list[Manifest]:
    run = run_template(step, store)
    attempts: Manifest = {
        "name": "attempts",
        "template": step.names.attempt,
        "arguments": _handed_down(step),
        "continueOn": _GO_ON,
    }
    # A composite node has no exit code; settle saw the one of each attempt.
    groups = [[without_empty(attempts)], [_conclude(step, "attempts", _NO_EXIT_CODE)]]
    return [
        _wrapper(step, groups),
        _attempt_template(step),
        admit_template(step, identity),
        run if step.settings.gang is None else gang_template(step, run, workflow),
        settle_template(step, identity),
        conclude_template(step, identity),
    ]


def _wrapper(step: GatedStep, groups: list[list[Manifest]]) -> Manifest:
    return without_empty(
        {
            "name": step.name,
            "metadata": {"annotations": {STEP_ANNOTATION: step.spec().model_dump_json()}},
            "inputs": _wrapper_inputs(step),
            "outputs": _wrapper_outputs(step),
            "steps": groups,
        }
    )


def _wrapper_inputs(step: GatedStep) -> Manifest:
    # Only a leaf template may say where an artifact lies in the container.
    artifacts = [{k: v for k, v in a.items() if k not in ("path", "mode", "recurseMode")} for a in step.input_artifacts]
    return without_empty({"parameters": step.input_parameters + item_input(step), "artifacts": artifacts})


def _wrapper_outputs(step: GatedStep) -> Manifest:
    parameters = [
        _exported(p, valueFrom={"parameter": f"{{{{steps.conclude.outputs.parameters.{p['name']}}}}}"})
        for p in step.output_parameters
    ]
    artifacts = [
        {**_exported(a), "from": f"{{{{steps.conclude.outputs.artifacts.{a['name']}}}}}"} for a in step.output_artifacts
    ]
    return without_empty({"parameters": parameters, "artifacts": artifacts})


def _exported(output: Manifest, **fields: Manifest) -> Manifest:
    kept: Manifest = {field: output[field] for field in ("name", "globalName", "description") if field in output}
    return {**kept, **fields}


def _attempt_template(step: GatedStep) -> Manifest:
    settle: Manifest = {
        "name": "settle",
        "template": step.names.settle,
        "arguments": _observations(step, "run", _exit_code_of("run")),
    }
    inputs = without_empty(
        {
            "parameters": [{"name": p["name"]} for p in step.input_parameters] + item_input(step),
            "artifacts": [
                {field: a[field] for field in ("name", "optional") if field in a} for a in step.input_artifacts
            ],
        }
    )
    return without_empty(
        {
            "name": step.names.attempt,
            "inputs": inputs,
            "retryStrategy": attempts_strategy(step.settings.retry),
            "steps": [[_admit(step)], [_run(step)], [settle]],
        }
    )


def _admit(step: GatedStep) -> Manifest:
    return without_empty({"name": "admit", "template": step.names.admit, "arguments": _handed_down(step)})


def _run(step: GatedStep) -> Manifest:
    given = _handed_down(step, item=False)
    if step.settings.gang is not None:
        given.pop("artifacts", None)  # its pods fetch them by themselves, told by admit
    answered = [
        {"name": names.answer(name), "value": f"{{{{steps.admit.outputs.parameters.{name}}}}}"}
        for name in answers(step)
    ]
    return {
        "name": "run",
        "template": step.names.run,
        "when": "{{steps.admit.outputs.parameters.run}} == true",
        "arguments": {**given, "parameters": given.get("parameters", []) + answered},
        "continueOn": _GO_ON,
    }


def _conclude(step: GatedStep, of: str, exit_code: str) -> Manifest:
    return {
        "name": "conclude",
        "template": step.names.conclude,
        "arguments": _observations(step, of, exit_code),
    }


def _observations(step: GatedStep, of: str, exit_code: str) -> Manifest:
    seen = [{"name": STATUS, "value": f"{{{{steps.{of}.status}}}}"}, {"name": EXIT_CODE, "value": exit_code}]
    return {"parameters": seen + _items(step)}


def _exit_code_of(name: str) -> str:
    # A plain {{steps.run.exitCode}} would hang the workflow for ever where no exit code was seen.
    return f"{{{{=steps['{name}'].exitCode ?? '{_NO_EXIT_CODE}'}}}}"


def _handed_down(step: GatedStep, item: bool = True) -> Manifest:
    parameters = [{"name": p["name"], "value": input_value(p["name"])} for p in step.input_parameters]
    artifacts = [
        {"name": a["name"], "from": f"{{{{inputs.artifacts.{a['name']}}}}}"}
        | ({"optional": True} if a.get("optional") else {})
        for a in step.input_artifacts
    ]
    return without_empty({"parameters": parameters + (_items(step) if item else []), "artifacts": artifacts})


def _items(step: GatedStep) -> list[Manifest]:
    return [{"name": names.ITEM, "value": input_value(names.ITEM)}] if step.fan_out else []
