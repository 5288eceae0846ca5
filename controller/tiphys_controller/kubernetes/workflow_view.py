"""What the controller keeps of a Workflow object: a few facts, because the object may be a megabyte of nodes.

Which run and submission is a Workflow? Its uid says so, in the record that its first admit has written.

The object itself names its run only if `tiphys` has sent it: with a bare ``argo
submit`` the plugin finds a name. So the names that it may have found are tried.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from tiphys.errors import UsageError
from tiphys.kube import Object
from tiphys.protocol.auto_resume_policy import AUTO_RESUME_ANNOTATION
from tiphys.protocol.compiled_workflow import parameters_of
from tiphys.protocol.gang import Backend
from tiphys.protocol.operations import instance_of
from tiphys.protocol.step_spec import (
    DESCRIPTION_ANNOTATION,
    NARRATED_ANNOTATION,
    PIPELINE_ANNOTATION,
    RUN_PARAMETER,
    STEP_ANNOTATION,
    STORE_ANNOTATION,
    TITLE_ANNOTATION,
)
from tiphys.records import check_run, run_name
from tiphys.records.names import LONGEST_RUN_NAME
from tiphys.store import Store, submissions
from tiphys_controller.submit.submitter import LiveWorkflow

COMPLETED_LABEL = "workflows.argoproj.io/completed"
_RUN_ANSWER = "run-id"
_OVER = frozenset({"Succeeded", "Failed", "Error"})
_DEFERRED = re.compile(r"Deferred: (?P<reason>[A-Za-z]+): (?P<message>.*)", re.DOTALL)
"""What the plugin answers to a step that waits for GPUs."""


class Wait(NamedTuple):
    """A node that waits for GPUs, and for which reason."""

    node: str
    step: str
    reason: str


class SeenWorkflow(NamedTuple):
    """A Workflow as it was when it changed last."""

    namespace: str
    name: str
    uid: str
    pipeline: str
    store: str
    """URL that it was compiled for; empty if for none."""
    run: str
    """Name of its run, as far as its parameters say; empty in a bare ``argo submit``."""
    admitted_run: str
    """Name of its run, as the first admit answered it; empty before, or where Argo has packed its nodes away."""
    phase: str
    """Argo's word; ``Pending`` before Argo has looked at it."""
    message: str
    progress: str
    shutdown: str
    """``Stop`` or ``Terminate`` once somebody asked for it."""
    finished: bool
    finished_at: str
    narrated: frozenset[str]
    """Which annotations the controller keeps: ``title``, ``description``."""
    annotations: Mapping[str, str]
    """The present text of those two."""
    gangs: frozenset[Backend] = frozenset()
    """What makes the pods of its trainings on several nodes."""
    auto_resume: bool = False
    """Whether its author asked for it to be resumed by itself."""
    waits: Mapping[Wait, str] = MappingProxyType({})
    """What is told of each, with numbers that change all the time."""


def see(workflow: Object) -> SeenWorkflow:
    """The facts of a Workflow object; of what is not there, the empty text."""
    metadata, spec, status = workflow["metadata"], workflow.get("spec") or {}, workflow.get("status") or {}
    annotations = metadata.get("annotations") or {}
    return SeenWorkflow(
        namespace=metadata["namespace"],
        name=metadata["name"],
        uid=metadata["uid"],
        pipeline=annotations.get(PIPELINE_ANNOTATION, ""),
        store=annotations.get(STORE_ANNOTATION, ""),
        run=parameters_of({"spec": spec}).get(RUN_PARAMETER, ""),
        admitted_run=_admitted_run(status.get("nodes") or {}),
        phase=status.get("phase") or "Pending",
        message=status.get("message") or "",
        progress=status.get("progress") or "",
        shutdown=spec.get("shutdown") or "",
        finished=is_over(workflow),
        finished_at=status.get("finishedAt") or "",
        narrated=frozenset(filter(None, annotations.get(NARRATED_ANNOTATION, "").split(","))),
        annotations={
            name.rpartition("/")[2]: annotations.get(name, "") for name in (TITLE_ANNOTATION, DESCRIPTION_ANNOTATION)
        },
        gangs=frozenset(_gangs(spec.get("templates") or [])),
        auto_resume=bool(annotations.get(AUTO_RESUME_ANNOTATION)),
        waits=dict(_waits(metadata["name"], status.get("nodes") or {})),
    )


def live(workflow: Object) -> LiveWorkflow:
    """The Workflow as the rest of the controller knows it."""
    metadata = workflow["metadata"]
    phase = (workflow.get("status") or {}).get("phase") or "Pending"
    return LiveWorkflow(metadata["name"], metadata["namespace"], metadata["uid"], phase, not is_over(workflow))


def is_over(workflow: Object) -> bool:
    """Whether Argo has finished with it. One that Argo has not looked at yet has no status, and will run."""
    labels = workflow["metadata"].get("labels") or {}
    return labels.get(COMPLETED_LABEL) == "true" or (workflow.get("status") or {}).get("phase") in _OVER


def _gangs(templates: Sequence[Object]) -> Iterator[Backend]:
    """Read by hand: a Workflow changes each second, and few have a gang."""
    for template in templates:
        text = ((template.get("metadata") or {}).get("annotations") or {}).get(STEP_ANNOTATION) or ""
        if '"gang"' in text and (gang := json.loads(text).get("gang")):
            yield Backend(gang["backend"])


def _waits(workflow: str, nodes: Mapping[str, Object]) -> Iterator[tuple[Wait, str]]:
    for node in nodes.values():
        if node.get("type") != "Plugin" or node.get("phase") != "Pending":
            continue
        if (told := _DEFERRED.match(node.get("message") or "")) is not None:
            step = instance_of(node["name"]).removeprefix(f"{workflow}.")
            yield Wait(node["name"], step, told["reason"]), told["message"]


def _admitted_run(nodes: Mapping[str, Object]) -> str:
    for node in nodes.values():
        for parameter in (node.get("outputs") or {}).get("parameters") or []:
            if node.get("type") == "Plugin" and parameter.get("name") == _RUN_ANSWER and parameter.get("value"):
                return str(parameter["value"])
    return ""


_SUFFIX_LENGTH = 6


class Place(NamedTuple):
    """A Workflow's place among the submissions of its run."""

    run: str
    submission: int


def find_place(store: Store, workflow: SeenWorkflow) -> Place | None:
    """The place of a Workflow; None until its first admit has bound it. Costs a few small reads.

    Raises:
        StoreError: storage is out of reach.
    """
    for run in candidates(workflow):
        for submission in reversed(submissions(store, run)):
            if submission.bound and submission.bound.uid == workflow.uid:
                return Place(run, submission.claim.submission)
    return None


def candidates(workflow: SeenWorkflow) -> list[str]:
    """Names that the run may have, the likeliest first."""
    if workflow.run:
        return _valid(workflow.run)
    short = workflow.name[: LONGEST_RUN_NAME - _SUFFIX_LENGTH]
    return list(
        dict.fromkeys(
            [
                *_valid(workflow.admitted_run),
                *_valid(workflow.name),
                *[f"{one}-{workflow.uid[:5].lower()}" for one in _valid(short)],
            ]
        )
    )


def _valid(text: str) -> list[str]:
    try:
        return [check_run(run_name(text))] if text else []
    except UsageError:
        return []
