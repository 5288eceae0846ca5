"""Builds the Workflow of a submission: identity, and only the tasks that run.

The recorded Workflow may come from a live object, whose owner, phase and
shutdown must not pass to the next Workflow. Values and artifact keys take the
place of references to finished tasks, so that it runs without them.
"""

import hashlib
from collections.abc import Iterable
from copy import deepcopy
from typing import NamedTuple

from tiphys.errors import UsageError
from tiphys.protocol.compiled_workflow import (
    FAN_OUT_FIELDS,
    CompiledPipeline,
    Manifest,
    find_template,
    read_workflow_parameters,
    substitute_tags,
)
from tiphys.protocol.depends import drop_known_tasks, parse_depends, tasks_in
from tiphys.protocol.operations import NOTHING_LEFT, WAKE_TEMPLATE
from tiphys.protocol.step_spec import RUN_LABEL, RUN_PARAMETER, SUBMISSION_PARAMETER
from tiphys.recording.bindings import ArtifactKey, bind_references, find_references
from tiphys_controller.plan.dag import find_reachable_templates, find_root_templates
from tiphys_controller.plan.decide import PlanDecisions
from tiphys_controller.plan.partial_fan_out import keep_items, merge_outputs

_LONGEST_NAME = 63
_HASH_DIGITS = 8
_KEPT_METADATA = ("annotations", "labels")
# Argo would select the new Workflow by these labels, take it for finished, or count it to a CronWorkflow.
_SERVER_LABELS = frozenset(
    f"workflows.argoproj.io/{name}"
    for name in (
        "completed",
        "phase",
        "workflow-archiving-status",
        "resubmitted-from-workflow",
        "cron-workflow",
        "creator",
        "creator-email",
        "creator-preferred-username",
        "actor",
        "actor-email",
        "actor-preferred-username",
        "action",
    )
)
_SERVER_SPEC = ("shutdown",)
"""The successor of a Workflow that was stopped would stop as it starts."""


class SubmissionIdentity(NamedTuple):
    """Identity of one Workflow of a run."""

    run: str
    submission: int
    name: str
    namespace: str


def workflow_name(run: str, submission: int) -> str:
    """Name of the n-th Workflow of a run, at most 63 characters, because Argo puts it into a label."""
    suffix = "" if submission == 1 else f"-{submission}"
    if len(run) + len(suffix) <= _LONGEST_NAME:
        return run + suffix
    digits = hashlib.sha256(run.encode()).hexdigest()[:_HASH_DIGITS]
    return f"{run[: _LONGEST_NAME - _HASH_DIGITS - 1 - len(suffix)].rstrip('-.')}-{digits}{suffix}"


def apply_identity(manifest: Manifest, identity: SubmissionIdentity) -> Manifest:
    """Return a copy of ``manifest`` that can be created under ``identity``."""
    spec = {name: deepcopy(value) for name, value in manifest["spec"].items() if name not in _SERVER_SPEC}
    spec["arguments"] = _own_arguments(spec.get("arguments") or {}, identity)
    top = {name: deepcopy(value) for name, value in manifest.items() if name not in ("metadata", "spec", "status")}
    return {**top, "metadata": _own_metadata(manifest.get("metadata") or {}, identity), "spec": spec}


def clear_identity(manifest: Manifest) -> Manifest:
    """Return a copy of ``manifest`` without run and submission, as compiled."""
    spec = deepcopy(manifest["spec"])
    for parameter in (spec.get("arguments") or {}).get("parameters") or []:
        if parameter["name"] in (RUN_PARAMETER, SUBMISSION_PARAMETER):
            parameter["value"] = ""
    return {**manifest, "spec": spec}


def _own_metadata(metadata: Manifest, identity: SubmissionIdentity) -> Manifest:
    kept = {name: deepcopy(metadata[name]) for name in _KEPT_METADATA if metadata.get(name)}
    labels = {name: value for name, value in kept.get("labels", {}).items() if name not in _SERVER_LABELS}
    kept["labels"] = {**labels, RUN_LABEL: identity.run}
    return {"name": identity.name, "namespace": identity.namespace, **kept}


def _own_arguments(arguments: Manifest, identity: SubmissionIdentity) -> Manifest:
    tiphys_parameters = {RUN_PARAMETER: identity.run, SUBMISSION_PARAMETER: str(identity.submission)}
    parameters = [p for p in arguments.get("parameters") or [] if p["name"] not in tiphys_parameters]
    return {**arguments, "parameters": [*parameters, *({"name": n, "value": v} for n, v in tiphys_parameters.items())]}


def prune_workflow(
    pipeline: CompiledPipeline, plan: PlanDecisions, artifact_key: ArtifactKey, identity: SubmissionIdentity
) -> Manifest:
    """Build the Workflow without the tasks that ``plan`` skips, to be created under ``identity``.

    Values and artifact keys take the place of references to finished tasks;
    unused templates are dropped; the rest is as submitted.

    Raises:
        UsageError: a task that runs reads a value of a skipped task that storage does not hold.
    """
    manifest = apply_identity(pipeline.manifest, identity)
    entry = find_template(manifest, manifest["spec"]["entrypoint"])
    bodies = {body["name"]: body for body in entry["dag"].pop("tasks")}
    # The plan has followed the target already, and Argo refuses one that names a task that is gone.
    entry["dag"].pop("target", None)
    parameters = {
        f"workflow.parameters.{name}": value for name, value in read_workflow_parameters(pipeline.manifest).items()
    }
    kept = {task.name: task.kept_items for task in plan.tasks if task.kept_items is not None}
    entry["dag"]["tasks"] = tasks = []
    for name in _running_names(bodies, plan):
        task = _bind_finished_tasks(bodies[name], plan, artifact_key)
        if name in kept:
            # Items are kept by their positions, so those that a parameter holds must stand in the task first.
            source = {field: task[field] for field in FAN_OUT_FIELDS if field in task}
            task = keep_items({**task, **substitute_tags(source, parameters.get)}, kept[name])
        tasks.append(merge_outputs(task, plan.partial_outputs))
    if not tasks:  # of a run that begins with nothing left to do; Argo refuses a DAG without tasks
        tasks.append({"name": NOTHING_LEFT, "template": WAKE_TEMPLATE})
    # Each template counts towards the size that Argo can store, also one that nothing calls any more.
    used = find_reachable_templates(manifest, find_root_templates(manifest["spec"]))
    manifest["spec"]["templates"] = [template for template in manifest["spec"]["templates"] if template["name"] in used]
    return manifest


def _running_names(written: Iterable[str], plan: PlanDecisions) -> list[str]:
    running = set(plan.running_tasks)
    return [name for name in written if name in running]


def _bind_finished_tasks(body: Manifest, plan: PlanDecisions, artifact_key: ArtifactKey) -> Manifest:
    name = body["name"]
    task = _drop_finished_dependencies(bind_references(body, plan.finished_outputs.get(name, {}), artifact_key), plan)
    unbound = [
        reference
        for reference in find_references(task)
        if reference.task not in plan.running_tasks and reference.task != name
    ]
    if unbound:
        raise UsageError(
            f"task {name} reads {unbound[0]}, but {unbound[0].task} does not run again and storage holds no such "
            "value; read an output parameter or artifact of it, or start a new run"
        )
    return task


def _drop_finished_dependencies(task: Manifest, plan: PlanDecisions) -> Manifest:
    known_results = plan.known_results
    if any(name in known_results for name in task.get("dependencies") or ()):
        task["dependencies"] = [name for name in task["dependencies"] if name not in known_results]
    if task.get("depends") and any(name in known_results for name in tasks_in(parse_depends(task["depends"]))):
        # A bool is true: of a condition that finished tasks alone make false, the plan has skipped the task.
        rest = drop_known_tasks(task["depends"], known_results)
        task["depends"] = "" if isinstance(rest, bool) else rest
    return {field: value for field, value in task.items() if value or field not in ("depends", "dependencies")}
