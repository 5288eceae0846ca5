"""The Workflow that is left: only the tasks that run, standing without those that are finished."""

from collections.abc import Iterable

from tiphys.errors import UsageError
from tiphys.protocol.pipeline import CompiledPipeline, Manifest, template
from tiphys_controller import conditions
from tiphys_controller.binding import ArtifactKey, bind
from tiphys_controller.identity import Identity, identified
from tiphys_controller.plan import Plan
from tiphys_controller.references import references
from tiphys_controller.templates import reachable, roots_of


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
