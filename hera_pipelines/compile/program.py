"""The author's own container, given its identity, its outputs' keys and its place."""

import copy

from hera_pipelines.compile import names
from hera_pipelines.compile.environment import variables
from hera_pipelines.compile.gated import GatedStep, program_container
from hera_pipelines.compile.operations import input_value, plain_artifact, without_empty
from hera_pipelines.compile.placement import place
from hera_pipelines.compile.retries import step_strategy
from tiphys.protocol.operations import gang_outputs
from tiphys.protocol.pipeline import Manifest
from tiphys.protocol.policy import ATTEMPT_LABEL, RUN_LABEL, STEP_ANNOTATION, STEP_LABEL, STORE_SECRET

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
