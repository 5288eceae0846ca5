"""Which commit the code of a run is from, for the facts of its checkpoints and its record.

Compile itself is a function from one document to another and looks at no
checkout, or the same pipeline would compile to something else in every clone.
So this is done to its result, by whoever knows where the code lies.

A compiled Workflow as text that people read and diff.

A compiled Workflow as the other two objects that make Workflows.
"""

import copy
import os
import subprocess
from pathlib import Path
from typing import Any

import yaml

from tiphys.errors import UsageError
from tiphys.protocol import environment
from tiphys.protocol.compiled_workflow import Manifest
from tiphys.protocol.step_spec import CODE_VERSION_ANNOTATION, PIPELINE_ANNOTATION

_FIRST = (
    *("apiVersion", "kind", "name", "generateName", "namespace", "metadata", "spec"),
    *("schedules", "timezone", "concurrencyPolicy", "entrypoint", "onExit", "parallelism"),
    *("template", "templateRef", "depends", "when", "withItems", "withParam", "arguments", "continueOn"),
    *("value", "from", "path", "labels", "annotations", "inputs", "outputs", "retryStrategy"),
    *("op", "run", "submission", "uid", "node", "step", "item", "image", "command", "args"),
)
_LAST = ("templates", "workflowSpec", "steps", "dag", "plugin", "container", "script", "source")


class _Dumper(yaml.SafeDumper):
    """Our own class, because Hera changes the representers of PyYAML's."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002  anchors help no reader
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    style = "|" if "\n" in value else "'" if value in ("y", "Y", "n", "N") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)


def to_workflow_yaml(manifest: Manifest) -> str:
    """``manifest`` as YAML: identity first, templates last, the same text for the same document."""
    return yaml.dump(_ordered(manifest), Dumper=_Dumper, sort_keys=False, width=10**6, allow_unicode=True)


def _ordered(part: Any) -> Any:
    if isinstance(part, dict):
        return {field: _ordered(part[field]) for field in sorted(part, key=_rank)}
    if isinstance(part, list):
        return [_ordered(value) for value in part]
    return part


def _rank(field: str) -> tuple[int, str]:
    if field in _FIRST:
        return _FIRST.index(field), ""
    if field in _LAST:
        return len(_FIRST) + 1 + _LAST.index(field), ""
    return len(_FIRST), field


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


_PATIENCE_SECONDS = 5.0


def commit_of(folder: Path) -> str:
    """The commit that is checked out around ``folder``, with ``-dirty`` if tracked files differ; empty if unknown."""
    commit = _git(folder, "rev-parse", "HEAD")
    if not commit:
        return ""
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return f"{commit}-dirty" if changes or changes is None else commit


def record_code_version(manifest: Manifest, commit: str) -> None:
    """Have a compiled Workflow, or CronWorkflow, tell ``commit`` to its training programs; nothing for an empty one."""
    if not commit:
        return
    for metadata in (manifest.get("metadata"), manifest["spec"].get("workflowMetadata")):
        annotations = (metadata or {}).get("annotations") or {}
        if PIPELINE_ANNOTATION in annotations:
            annotations[CODE_VERSION_ANNOTATION] = commit
    for template in manifest["spec"].get("workflowSpec", manifest["spec"]).get("templates", []):
        variables: list[dict[str, Any]] = (template.get("container") or template.get("script") or {}).get("env") or []
        names = [variable["name"] for variable in variables]
        if environment.LINEAGE in names and environment.GIT_COMMIT not in names:
            variables.append({"name": environment.GIT_COMMIT, "value": commit})


def _git(folder: Path, *arguments: str) -> str | None:
    """What git says; None without git or a checkout, or if it takes long."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=_PATIENCE_SECONDS,
            check=True,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
