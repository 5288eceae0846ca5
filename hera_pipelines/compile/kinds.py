"""A compiled Workflow as the other two objects that make Workflows."""

import copy

from tiphys.errors import UsageError
from tiphys.protocol.pipeline import Manifest

API_VERSION = "argoproj.io/v1alpha1"


def workflow_template(workflow: Manifest, name: str) -> Manifest:
    """The compiled ``workflow`` as a WorkflowTemplate, for ``argo submit --from workflowtemplate/…``."""
    metadata, spec = _parts(workflow)
    spec["workflowMetadata"] = _handed_on(metadata)
    return {
        "apiVersion": API_VERSION,
        "kind": "WorkflowTemplate",
        "metadata": _named(metadata, name),
        "spec": spec,
    }


def cron_workflow(workflow: Manifest, name: str, cron: Manifest) -> Manifest:
    """The compiled ``workflow`` as a CronWorkflow.

    Args:
        workflow: What compile made.
        name: Name of the CronWorkflow; each Workflow is named after it.
        cron: Fields of a CronWorkflowSpec beside ``workflowSpec``; ``schedules``
            at least. Without a ``concurrencyPolicy`` a run that takes longer
            than its interval is not overtaken: ``Forbid``.
    """
    if not cron.get("schedules"):
        raise UsageError(f"CronWorkflow {name!r} has no schedule; give schedules=['0 2 * * *']")
    metadata, spec = _parts(workflow)
    return {
        "apiVersion": API_VERSION,
        "kind": "CronWorkflow",
        "metadata": _named(metadata, name),
        "spec": {"concurrencyPolicy": "Forbid", **cron, "workflowMetadata": _handed_on(metadata), "workflowSpec": spec},
    }


def _parts(workflow: Manifest) -> tuple[Manifest, Manifest]:
    return copy.deepcopy(workflow["metadata"]), copy.deepcopy(workflow["spec"])


def _handed_on(metadata: Manifest) -> Manifest:
    """What each Workflow must bear, for plugin and controller look for it there."""
    return {field: metadata[field] for field in ("labels", "annotations") if metadata.get(field)}


def _named(metadata: Manifest, name: str) -> Manifest:
    kept = {field: value for field, value in metadata.items() if field not in ("name", "generateName")}
    return {"name": name, **kept}
