"""The resource template of a step of several pods."""

from hera_pipelines.compile import names
from hera_pipelines.compile.gang.kinds import kind_of
from hera_pipelines.compile.gang.pod import gang_labels
from hera_pipelines.compile.gang.text import manifest_text
from hera_pipelines.compile.gated import GatedStep
from hera_pipelines.compile.operations import input_value, without_empty
from tiphys.errors import UsageError
from tiphys.protocol.pipeline import Manifest

_KEPT = ("name", "inputs", "synchronization", "timeout", "priority")


def gang_template(step: GatedStep, template: Manifest, workflow: Manifest) -> Manifest:
    """``template``, which would run the step as one pod, as one that creates the object that runs it as several.

    Args:
        step: A step with a gang.
        template: Its run template.
        workflow: ``spec`` of the Workflow.

    Raises:
        UsageError: a value is used that cannot be handed to several pods.
    """
    assert step.settings.gang is not None
    kind = kind_of(step.settings.gang)
    metadata = {"name": input_value(names.answer("gang")), "labels": gang_labels(step)}
    head = {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": metadata}
    try:
        text = manifest_text({**head, "spec": kind.spec(step, template, workflow)}, _paths(template))
    except UsageError as error:
        raise UsageError(f"step {step.name!r}: {error}") from error
    members = step.settings.gang.members
    made = {
        **{field: template[field] for field in _KEPT if field in template},
        "resource": {
            # Not create: Argo makes its pod again that is lost without a word, and the new one finds what there is.
            "action": "apply",
            # With the Workflow goes what it made.
            "setOwnerReference": True,
            "successCondition": kind.success.format(members=members),
            "failureCondition": kind.failure,
            "manifest": text,
        },
    }
    # What they read is fetched by the members themselves; Argo would load it into a pod of its own.
    made["inputs"] = {"parameters": template["inputs"]["parameters"]}
    return without_empty(made)


def _paths(template: Manifest) -> dict[str, str]:
    """Plain tags that stand for a declared path."""
    return {
        f"{side}.artifacts.{artifact['name']}.path": artifact["path"]
        for side in ("inputs", "outputs")
        for artifact in (template.get(side) or {}).get("artifacts") or []
        if artifact.get("path")
    }
