"""Reduces Workflow objects to the facts that the controller needs.

A Workflow object may be a megabyte of nodes, so the watch cache keeps only its
`WorkflowView`. A Workflow names its run only if Tiphys sent it; after a bare
``argo submit`` the plugin chooses the name. So possible names are tried, and the
uid in the binding of a submission decides.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import NamedTuple

from tiphys.errors import UsageError
from tiphys.kube import Object
from tiphys.protocol.auto_resume_policy import has_auto_resume
from tiphys.protocol.compiled_workflow import read_workflow_parameters
from tiphys.protocol.fan_out import find_item
from tiphys.protocol.gang import GangBackend, GangSpec
from tiphys.protocol.operations import step_instance_name
from tiphys.protocol.phases import is_final_workflow_phase
from tiphys.protocol.step_spec import (
    DESCRIPTION_ANNOTATION,
    GENERATED_TEXT_ANNOTATION,
    PIPELINE_ANNOTATION,
    RUN_PARAMETER,
    STEP_ANNOTATION,
    STORE_ANNOTATION,
    TITLE_ANNOTATION,
)
from tiphys.records import check_run_name, make_run_name
from tiphys.records.names import MAX_RUN_NAME_CHARACTERS
from tiphys.store import Store, read_submissions
from tiphys_controller.submit.submitter import LiveWorkflow

COMPLETED_LABEL = "workflows.argoproj.io/completed"
_RUN_OUTPUT = "run-id"
_DEFERRED_MESSAGE = re.compile(r"Deferred: (?P<reason>[A-Za-z]+): (?P<message>.*)", re.DOTALL)
"""Answer of the plugin for a step that waits for GPUs."""


class GpuWait(NamedTuple):
    """A node that waits for GPUs, and the reason code."""

    node: str
    step: str
    reason: str


class WorkflowView(NamedTuple):
    """A Workflow as of its last change."""

    namespace: str
    name: str
    uid: str
    pipeline: str
    store: str
    """Store URL that it was compiled for; empty without one."""
    run: str
    """Name of its run by its parameters; empty after a bare ``argo submit``."""
    admitted_run: str
    """Name of its run by the first admit; empty before it, or if Argo has compressed or offloaded the nodes."""
    phase: str
    """Argo's phase; ``Pending`` before Argo has reconciled the Workflow."""
    message: str
    progress: str
    shutdown: str
    """``spec.shutdown``: ``Stop``, ``Terminate`` or empty."""
    finished: bool
    finished_at: datetime | None
    """When Argo finished it; None before that, or if the object has no such time."""
    narrated_annotations: frozenset[str]
    """Annotations that the controller writes: ``title``, ``description``."""
    annotations: Mapping[str, str]
    """Current text of those two annotations."""
    gangs: frozenset[GangBackend] = frozenset()
    """Kinds of objects that create the pods of its gangs."""
    auto_resume: bool = False
    plugin_failure: str = ""
    """Message of the plugin node that failed last; empty without one."""
    waits: Mapping[GpuWait, str] = MappingProxyType({})
    """Message of each wait; its numbers change with each retry."""


def build_workflow_view(workflow: Object) -> WorkflowView:
    """Build the view of a Workflow object; missing fields become empty strings."""
    metadata, spec, status = workflow["metadata"], workflow.get("spec") or {}, workflow.get("status") or {}
    annotations = metadata.get("annotations") or {}
    return WorkflowView(
        namespace=metadata["namespace"],
        name=metadata["name"],
        uid=metadata["uid"],
        pipeline=annotations.get(PIPELINE_ANNOTATION, ""),
        store=annotations.get(STORE_ANNOTATION, ""),
        run=read_workflow_parameters({"spec": spec}).get(RUN_PARAMETER, ""),
        admitted_run=_find_admitted_run(status.get("nodes") or {}),
        phase=status.get("phase") or "Pending",
        message=status.get("message") or "",
        progress=status.get("progress") or "",
        shutdown=spec.get("shutdown") or "",
        finished=is_workflow_finished(workflow),
        finished_at=_parse_finish_time(status),
        narrated_annotations=frozenset(filter(None, annotations.get(GENERATED_TEXT_ANNOTATION, "").split(","))),
        annotations={
            name.rpartition("/")[2]: annotations.get(name, "") for name in (TITLE_ANNOTATION, DESCRIPTION_ANNOTATION)
        },
        gangs=frozenset(_find_gang_backends(spec.get("templates") or [])),
        auto_resume=has_auto_resume(workflow),
        plugin_failure=_find_plugin_failure(status.get("nodes") or {}),
        waits=dict(_find_gpu_waits(metadata["name"], status.get("nodes") or {})),
    )


def _parse_finish_time(status: Object) -> datetime | None:
    """The time in ``finishedAt``; None for any text that is no time with a zone, as Argo writes it."""
    try:
        finished_at = datetime.fromisoformat(str(status.get("finishedAt") or ""))
    except ValueError:
        return None
    return finished_at if finished_at.tzinfo is not None else None


def build_live_workflow(workflow: Object) -> LiveWorkflow:
    """Build the `LiveWorkflow` of a Workflow object."""
    metadata, status = workflow["metadata"], workflow.get("status") or {}
    return LiveWorkflow(
        metadata["name"],
        metadata["namespace"],
        metadata["uid"],
        status.get("phase") or "Pending",
        not is_workflow_finished(workflow),
        _parse_finish_time(status),
        stopped=bool((workflow.get("spec") or {}).get("shutdown")),
    )


def is_workflow_finished(workflow: Object) -> bool:
    """Whether Argo has finished the Workflow. A Workflow without a status has not started yet."""
    labels = workflow["metadata"].get("labels") or {}
    return labels.get(COMPLETED_LABEL) == "true" or is_final_workflow_phase((workflow.get("status") or {}).get("phase"))


def _find_gang_backends(templates: Sequence[Object]) -> Iterator[GangBackend]:
    """Backends of the gangs. The substring test avoids parsing most specs: a Workflow may change each second."""
    for template in templates:
        text = ((template.get("metadata") or {}).get("annotations") or {}).get(STEP_ANNOTATION) or ""
        if '"gang"' in text and (gang := json.loads(text).get("gang")):
            yield GangSpec.model_validate(gang).backend


def _find_gpu_waits(workflow: str, nodes: Mapping[str, Object]) -> Iterator[tuple[GpuWait, str]]:
    for node in nodes.values():
        if node.get("type") != "Plugin" or node.get("phase") != "Pending":
            continue
        if (deferred := _DEFERRED_MESSAGE.match(node.get("message") or "")) is not None:
            instance = step_instance_name(node["name"])
            item = find_item(instance)
            step = item.display_name if item else instance.removeprefix(f"{workflow}.")
            yield GpuWait(node["name"], step, deferred["reason"]), deferred["message"]


def _find_plugin_failure(nodes: Mapping[str, Object]) -> str:
    failed = [
        (node.get("finishedAt") or "", node.get("message") or "")
        for node in nodes.values()
        if node.get("type") == "Plugin" and node.get("phase") in ("Failed", "Error")
    ]
    return max(failed, default=("", ""))[1]


def _find_admitted_run(nodes: Mapping[str, Object]) -> str:
    for node in nodes.values():
        for parameter in (node.get("outputs") or {}).get("parameters") or []:
            if node.get("type") == "Plugin" and parameter.get("name") == _RUN_OUTPUT and parameter.get("value"):
                return str(parameter["value"])
    return ""


_SUFFIX_LENGTH = 6


class SubmissionRef(NamedTuple):
    """Run and number of the submission that a Workflow belongs to."""

    run: str
    submission: int


def find_submission(store: Store, workflow: WorkflowView) -> SubmissionRef | None:
    """Find the submission of a Workflow; None until it is bound. Costs a few small reads.

    Raises:
        StoreError: storage is out of reach.
    """
    for run in possible_run_names(workflow):
        for submission in reversed(read_submissions(store, run)):
            if submission.binding and submission.binding.uid == workflow.uid:
                return SubmissionRef(run, submission.claim.submission)
    return None


def possible_run_names(workflow: WorkflowView) -> list[str]:
    """Possible names of the Workflow's run, the likeliest first."""
    if workflow.run:
        return _valid_run_names(workflow.run)
    short = workflow.name[: MAX_RUN_NAME_CHARACTERS - _SUFFIX_LENGTH]
    return list(
        dict.fromkeys(
            [
                *_valid_run_names(workflow.admitted_run),
                *_valid_run_names(workflow.name),
                *[f"{name}-{workflow.uid[:5].lower()}" for name in _valid_run_names(short)],
            ]
        )
    )


def _valid_run_names(text: str) -> list[str]:
    try:
        return [check_run_name(make_run_name(text))] if text else []
    except UsageError:
        return []
