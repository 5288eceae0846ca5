"""Turns a compiled Workflow into YAML, a template or a CronWorkflow, and records its git commit.

The YAML has a fixed order of fields, because people read and diff it.

Compile is a pure function and reads no checkout; otherwise the same pipeline
would compile differently in every clone. So a caller that knows the folder of
the code calls `record_code_version` on the result.
"""

import copy
import json
import os
import re
import subprocess
from enum import StrEnum
from pathlib import Path
from typing import Any

import yaml

from hera_pipelines.compile.validate.schedules import check_schedules
from tiphys.errors import UsageError
from tiphys.protocol import environment
from tiphys.protocol.compiled_workflow import Manifest
from tiphys.protocol.step_spec import CODE_VERSION_ANNOTATION, PIPELINE_ANNOTATION
from tiphys.records.trigger import TRIGGER_ANNOTATION, TRIGGER_LABEL, TRIGGER_LABEL_VALUE

_LEADING_FIELDS = (
    *("apiVersion", "kind", "name", "generateName", "namespace", "metadata", "spec"),
    *("schedules", "timezone", "concurrencyPolicy", "entrypoint", "onExit", "parallelism"),
    *("template", "templateRef", "depends", "when", "withItems", "withParam", "arguments", "continueOn"),
    *("value", "from", "path", "labels", "annotations", "inputs", "outputs", "retryStrategy"),
    *("op", "run", "submission", "uid", "node", "step", "item", "image", "command", "args"),
)
_TRAILING_FIELDS = ("templates", "workflowSpec", "steps", "dag", "plugin", "container", "script", "source")


class _Dumper(yaml.SafeDumper):
    """A dumper with its own representers, because Hera changes those of PyYAML's classes."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002  anchors help no reader
        return True

    def write_double_quoted(self, text: str, split: bool = True) -> None:
        self.allow_unicode = False  # what cannot be seen is the reason for this style, so it is written as an escape
        super().write_double_quoted(text, split)
        self.allow_unicode = True


def _represent_text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    style = "|" if "\n" in value else "'" if value in ("y", "Y", "n", "N") else None
    if not value.replace("\n", "").replace("\t", "").isprintable():
        style = '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _represent_text)


def to_workflow_yaml(manifest: Manifest) -> str:
    """Render ``manifest`` as YAML: identity first, templates last, the same text for the same document."""
    return yaml.dump(_order_fields(manifest), Dumper=_Dumper, sort_keys=False, width=10**6, allow_unicode=True)


def _order_fields(part: Any) -> Any:
    if isinstance(part, dict):
        return {field: _order_fields(part[field]) for field in sorted(part, key=_field_position)}
    if isinstance(part, list):
        return [_order_fields(value) for value in part]
    return part


def _field_position(field: str) -> tuple[int, str]:
    if field in _LEADING_FIELDS:
        return _LEADING_FIELDS.index(field), ""
    if field in _TRAILING_FIELDS:
        return len(_LEADING_FIELDS) + 1 + _TRAILING_FIELDS.index(field), ""
    return len(_LEADING_FIELDS), field


API_VERSION = "argoproj.io/v1alpha1"


class TemplateKind(StrEnum):
    """Kinds of templates that Workflows are submitted from."""

    WORKFLOW_TEMPLATE = "WorkflowTemplate"
    CLUSTER_WORKFLOW_TEMPLATE = "ClusterWorkflowTemplate"


def workflow_template(workflow: Manifest, name: str, kind: TemplateKind = TemplateKind.WORKFLOW_TEMPLATE) -> Manifest:
    """The compiled ``workflow`` as a template, for ``argo submit --from workflowtemplate/…``.

    Raises:
        UsageError: it has a trigger, and the template would belong to no namespace.
    """
    metadata, spec = _copy_metadata_and_spec(workflow)
    spec["workflowMetadata"] = _inherited_metadata(metadata)
    has_trigger = TRIGGER_ANNOTATION in (metadata.get("annotations") or {})
    if has_trigger:
        metadata["labels"] = {**(metadata.get("labels") or {}), TRIGGER_LABEL: TRIGGER_LABEL_VALUE}
    if kind is TemplateKind.CLUSTER_WORKFLOW_TEMPLATE:
        if has_trigger:
            raise UsageError(
                f"the pipeline of {name!r} has a trigger, whose runs start in the namespace of its WorkflowTemplate; "
                "a ClusterWorkflowTemplate has none: use --as workflowtemplate"
            )
        metadata.pop("namespace", None)
    return {"apiVersion": API_VERSION, "kind": kind.value, "metadata": _named_metadata(metadata, name), "spec": spec}


_MAX_CRON_NAME = 52
"""Argo appends a time to it (``workflow/validate/validate.go``, ``maxCharsInCronWorkflowName``)."""


def cron_workflow(workflow: Manifest, name: str, cron: Manifest) -> Manifest:
    """The compiled ``workflow`` as a CronWorkflow.

    ``cron`` has the fields of a CronWorkflowSpec beside ``workflowSpec``, ``schedules`` at least. The default of
    ``concurrencyPolicy`` is ``Forbid``: while a Workflow runs, the schedule starts no other.

    Raises:
        UsageError: there is no schedule, or Argo would refuse the name, a schedule or the time zone.
    """
    if len(name) > _MAX_CRON_NAME:
        raise UsageError(
            f"CronWorkflow {name!r} has a name of {len(name)} characters, and Argo starts none with more than "
            f"{_MAX_CRON_NAME}; give it a shorter one"
        )
    if not cron.get("schedules"):
        raise UsageError(f"CronWorkflow {name!r} has no schedule; give one, such as '0 2 * * *'")
    check_schedules(cron["schedules"], cron.get("timezone"))
    metadata, spec = _copy_metadata_and_spec(workflow)
    return {
        "apiVersion": API_VERSION,
        "kind": "CronWorkflow",
        "metadata": _named_metadata(metadata, name),
        "spec": {
            "concurrencyPolicy": "Forbid",
            **cron,
            "workflowMetadata": _inherited_metadata(metadata),
            "workflowSpec": spec,
        },
    }


def _copy_metadata_and_spec(workflow: Manifest) -> tuple[Manifest, Manifest]:
    return copy.deepcopy(workflow["metadata"]), copy.deepcopy(workflow["spec"])


def _inherited_metadata(metadata: Manifest) -> Manifest:
    """Metadata that Argo copies to each Workflow, where plugin and controller read it. A trigger is the template's."""
    inherited = {
        field: {name: value for name, value in (metadata.get(field) or {}).items() if name != TRIGGER_ANNOTATION}
        for field in ("labels", "annotations")
    }
    return {field: values for field, values in inherited.items() if values}


def _named_metadata(metadata: Manifest, name: str) -> Manifest:
    unnamed = {field: value for field, value in metadata.items() if field not in ("name", "generateName")}
    return {"name": name, **unnamed}


_GIT_TIMEOUT_SECONDS = 5.0
_LINEAGE_OF_MEMBERS = re.compile(rf'^( *)\{{\s*"name": "{environment.LINEAGE}"', re.MULTILINE)
"""Where the variables of a training begin in the text of the object that creates its pods."""


def read_git_commit(folder: Path) -> str:
    """Commit of the checkout that contains ``folder``, with ``-dirty`` if tracked files differ; empty if unknown."""
    commit = _run_git(folder, "rev-parse", "HEAD")
    if not commit:
        return ""
    changes = _run_git(folder, "status", "--porcelain", "--untracked-files=no")
    return f"{commit}-dirty" if changes or changes is None else commit


def record_code_version(manifest: Manifest, commit: str) -> None:
    """Write ``commit`` into a compiled Workflow or CronWorkflow, for its record and its training programs.

    An empty ``commit`` changes nothing.
    """
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
        text = (template.get("resource") or {}).get("manifest") or ""
        if f'"{environment.GIT_COMMIT}"' not in text and (found := _LINEAGE_OF_MEMBERS.search(text)):
            variable = json.dumps({"name": environment.GIT_COMMIT, "value": commit})
            template["resource"]["manifest"] = f"{text[: found.start()]}{found[1]}{variable},\n{text[found.start() :]}"


def _run_git(folder: Path, *arguments: str) -> str | None:
    """Output of git; None without git or a checkout, or after the timeout."""
    try:
        completed = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=_GIT_TIMEOUT_SECONDS,
            check=True,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return completed.stdout.strip()
