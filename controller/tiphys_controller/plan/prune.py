"""Gives a compiled Workflow its name, run and submission, and takes off what a server had put on.

The recorded Workflow may come from a live object, whose owner, phase and
shutdown must not pass to the next one.

The Workflow that is left: only the tasks that run, standing without those that are finished.
"""

import hashlib
from collections.abc import Iterable
from copy import deepcopy
from typing import NamedTuple

from tiphys.errors import UsageError
from tiphys.protocol.compiled_workflow import CompiledPipeline, Manifest, template
from tiphys.protocol.step_spec import RUN_LABEL, RUN_PARAMETER, SUBMISSION_PARAMETER
from tiphys_controller.plan import depends as conditions
from tiphys_controller.plan.bindings import ArtifactKey, bind
from tiphys_controller.plan.dag import reachable, references, roots_of
from tiphys_controller.plan.decide import Plan

_LONGEST_NAME = 63
_HASH_DIGITS = 8
_KEPT_METADATA = ("annotations", "labels")
# Argo finds a Workflow by these, takes it for finished, or counts it to a schedule.
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


class Identity(NamedTuple):
    """What tells one Workflow of a run from the others."""

    run: str
    submission: int
    name: str
    namespace: str


def workflow_name(run: str, submission: int) -> str:
    """Name of the n-th Workflow of a run, at most 63 characters: Argo puts it into a label."""
    suffix = "" if submission == 1 else f"-{submission}"
    if len(run) + len(suffix) <= _LONGEST_NAME:
        return run + suffix
    digits = hashlib.sha256(run.encode()).hexdigest()[:_HASH_DIGITS]
    return f"{run[: _LONGEST_NAME - _HASH_DIGITS - 1 - len(suffix)].rstrip('-.')}-{digits}{suffix}"


def identified(manifest: Manifest, identity: Identity) -> Manifest:
    """A copy of ``manifest`` that is ready to be created under ``identity``."""
    spec = {name: deepcopy(value) for name, value in manifest["spec"].items() if name not in _SERVER_SPEC}
    spec["arguments"] = _arguments(spec.get("arguments") or {}, identity)
    top = {name: deepcopy(value) for name, value in manifest.items() if name not in ("metadata", "spec", "status")}
    return {**top, "metadata": _metadata(manifest.get("metadata") or {}, identity), "spec": spec}


def anonymous(manifest: Manifest) -> Manifest:
    """A copy of ``manifest`` that belongs to no run yet, as compile makes it."""
    spec = deepcopy(manifest["spec"])
    for parameter in (spec.get("arguments") or {}).get("parameters") or []:
        if parameter["name"] in (RUN_PARAMETER, SUBMISSION_PARAMETER):
            parameter["value"] = ""
    return {**manifest, "spec": spec}


def _metadata(metadata: Manifest, identity: Identity) -> Manifest:
    kept = {name: deepcopy(metadata[name]) for name in _KEPT_METADATA if metadata.get(name)}
    labels = {name: value for name, value in kept.get("labels", {}).items() if name not in _SERVER_LABELS}
    kept["labels"] = {**labels, RUN_LABEL: identity.run}
    return {"name": identity.name, "namespace": identity.namespace, **kept}


def _arguments(arguments: Manifest, identity: Identity) -> Manifest:
    ours = {RUN_PARAMETER: identity.run, SUBMISSION_PARAMETER: str(identity.submission)}
    parameters = [p for p in arguments.get("parameters") or [] if p["name"] not in ours]
    return {**arguments, "parameters": [*parameters, *({"name": n, "value": v} for n, v in ours.items())]}


def prune(pipeline: CompiledPipeline, plan: Plan, artifact_key: ArtifactKey, identity: Identity) -> Manifest:
    """The pipeline without the tasks that ``plan`` skips, to be created under ``identity``.

    Values and artifact keys take the place of references to finished tasks;
    templates that nothing uses any more are dropped; the rest is as submitted.

    Raises:
        UsageError: a task that runs reads something of a skipped one that storage does not hold.
    """
    manifest = identified(pipeline.manifest, identity)
    entry = template(manifest, manifest["spec"]["entrypoint"])
    bodies = {body["name"]: body for body in entry["dag"].pop("tasks")}
    entry["dag"].pop("target", None)
    entry["dag"]["tasks"] = [_standing_alone(bodies[name], plan, artifact_key) for name in _kept(bodies, plan)]
    used = reachable(manifest, roots_of(manifest["spec"]))
    manifest["spec"]["templates"] = [one for one in manifest["spec"]["templates"] if one["name"] in used]
    return manifest


def _kept(written: Iterable[str], plan: Plan) -> list[str]:
    running = set(plan.running)
    return [name for name in written if name in running]


def _standing_alone(body: Manifest, plan: Plan, artifact_key: ArtifactKey) -> Manifest:
    name = body["name"]
    task = _without_waits(bind(body, plan.finished.get(name, {}), artifact_key), plan)
    left = [
        reference for reference in references(task) if reference.task not in plan.running and reference.task != name
    ]
    if left:
        raise UsageError(
            f"task {name} reads {left[0]}, but {left[0].task} does not run again and storage holds no such value; "
            "read an output parameter or artifact of it, or run the pipeline anew"
        )
    return task


def _without_waits(task: Manifest, plan: Plan) -> Manifest:
    facts = plan.facts
    if any(name in facts for name in task.get("dependencies") or ()):
        task["dependencies"] = [name for name in task["dependencies"] if name not in facts]
    if task.get("depends") and any(name in facts for name in conditions.tasks_in(conditions.parse(task["depends"]))):
        rest = conditions.without(task["depends"], facts)
        task["depends"] = "" if isinstance(rest, bool) else rest
    return {field: value for field, value in task.items() if value or field not in ("depends", "dependencies")}
