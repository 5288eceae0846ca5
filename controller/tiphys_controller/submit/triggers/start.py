"""Starts or resumes the run of one object, exactly once.

The idempotency key of the run is made of trigger, bucket, key and etag. So a
second notification, a second controller, and the controller that goes on after
a crash all come to the same run and the same Workflow. The record of the
triggered run is written last: an object without it is looked at again. The time
is no part of its key either, and it outlives the run: the same content that is
uploaded again, with a later time, has had its run.
"""

from typing import NamedTuple

from tiphys.errors import UsageError, unknown_name_message
from tiphys.faults import failpoint
from tiphys.protocol.compiled_workflow import CompiledPipeline, Manifest
from tiphys.records import Event, ObjectVersion, TriggeredRunRecord, TriggerSpec, json_digest
from tiphys.records.trigger import TriggerSource
from tiphys.store import Store, append_events, claim_record, find_record
from tiphys.store.layout import TRIGGERS, triggered_run_key
from tiphys_controller.submit.idempotency import StartRequest
from tiphys_controller.submit.resume import resume_run
from tiphys_controller.submit.start import NewRun, begin_run
from tiphys_controller.submit.submitter import Submitter
from tiphys_controller.submit.triggers.catalog import Trigger

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""In the place of control characters, in listings of servers that do not encode keys (versitygw)."""


class TriggeredRun(NamedTuple):
    """The run of an object. ``is_new`` is False if another call recorded it first."""

    record: TriggeredRunRecord
    is_new: bool


def find_triggered_run(store: Store, trigger: Trigger, version: ObjectVersion) -> TriggeredRunRecord | None:
    """The record of the run that a trigger has started or resumed for an object; None if it has not."""
    return find_record(store, triggered_run_key(trigger.template, version.digest), TriggeredRunRecord)


def read_last_triggered_run(store: Store, template: str) -> TriggeredRunRecord | None:
    """The record of the object that was modified last, of all whose run a trigger has made; None without one."""
    newest = next(iter(store.list(f"{TRIGGERS}{template}/")), None)
    return newest and find_record(store, newest.key, TriggeredRunRecord)


def check_object_name(version: ObjectVersion) -> None:
    """Check that the key of an object may become the value of a parameter.

    Raises:
        UsageError: Argo would evaluate a part of it, or the storage service replaced a part of it.
    """
    if "{{" in version.key:
        raise UsageError(
            f"the key {version.key[:200]!r} holds '{{{{', which Argo would evaluate as a template; rename the object"
        )
    if _REPLACEMENT in version.key:
        raise UsageError(
            f"the key {version.key[:200]!r} holds a replacement character: the storage service does not list it as it "
            "is, so no program would find the object; rename it"
        )


def start_triggered_run(
    store: Store,
    submitter: Submitter,
    trigger: Trigger,
    pipeline: CompiledPipeline | None,
    version: ObjectVersion,
    source: TriggerSource,
) -> TriggeredRun:
    """Start or resume the run of an object, or complete what an earlier call began.

    ``pipeline`` is what `build_triggered_pipeline` returned for trigger and object; None resumes the trigger's run.

    Raises:
        UsageError: the key of the object is not valid.
        ConflictError: the run to resume still runs, or another run has the name.
        NotFoundError: there is no run to resume.
        IntegrityError: a record is damaged.
    """
    check_object_name(version)
    key = f"trigger/{trigger.template}/{version.digest}"
    if pipeline is None:
        resumed = resume_run(store, submitter, trigger.spec.resume, key=key)
        run, submission = resumed.run, resumed.submission or 0
    else:
        # A changed template does not make it another request: what has begun is completed, as it was begun.
        request = StartRequest(key, json_digest({"trigger": key}), f"a run of {trigger.template} for {version.url}")
        begun = begin_run(store, submitter, NewRun(pipeline, None, trigger.namespace), request)
        run, submission = begun.run, begun.submission
    failpoint("trigger.after_start")
    record = TriggeredRunRecord(object=version, source=source, run=run, submission=submission)
    seconds = int(version.modified.timestamp())
    claim_record(store, triggered_run_key(trigger.template, version.digest, seconds), record)
    failpoint("trigger.after_ordered_record")
    claimed = claim_record(store, triggered_run_key(trigger.template, version.digest), record)
    failpoint("trigger.after_record")
    if claimed.is_ours and submission:
        append_events(store, run, "controller", [_triggered_event(trigger, record)])
    return TriggeredRun(claimed.record, claimed.is_ours)


def build_triggered_pipeline(trigger: Trigger, template: Manifest, version: ObjectVersion) -> CompiledPipeline | None:
    """The Workflow that a WorkflowTemplate stands for, with the fields of an object as parameters.

    ``template`` is the WorkflowTemplate of the trigger as it is now. Returns None if the trigger resumes a run.

    Raises:
        UsageError: the template is not compiled, or declares no such parameter.
    """
    if trigger.spec.resume:
        return None
    return CompiledPipeline.from_manifest(_build_workflow(template, trigger.spec, version))


def _build_workflow(template: Manifest, spec: TriggerSpec, version: ObjectVersion) -> Manifest:
    inherited = template["spec"].get("workflowMetadata") or {}
    own = {field: value for field, value in template["spec"].items() if field != "workflowMetadata"}
    arguments = own.get("arguments") or {}
    declared = arguments.get("parameters") or []
    names = [parameter["name"] for parameter in declared]
    if unknown := sorted(set(spec.parameters) - set(names)):
        raise UsageError(unknown_name_message("the WorkflowTemplate", "parameter", unknown[0], names))
    parameters = [
        {"name": parameter["name"], "value": version.read_field(spec.parameters[parameter["name"]])}
        if parameter["name"] in spec.parameters
        else parameter
        for parameter in declared
    ]
    if missing := sorted(
        parameter["name"]
        for parameter in parameters
        if parameter.get("value") is None and not parameter.get("valueFrom")
    ):
        raise UsageError(
            f"parameter {missing[0]!r} of the WorkflowTemplate has no value; give it a default, or have the trigger "
            "set it"
        )
    metadata = {field: inherited[field] for field in ("labels", "annotations") if inherited.get(field)}
    return {
        "apiVersion": template["apiVersion"],
        "kind": "Workflow",
        "metadata": metadata,
        "spec": {**own, "arguments": {**arguments, "parameters": parameters}},
    }


def _triggered_event(trigger: Trigger, record: TriggeredRunRecord) -> Event:
    version = record.object
    how = "a notification named it" if record.source == "delivered" else "it was found in the bucket"
    message = f"trigger {trigger.template}: submission {record.submission} was made for {version.url} ({how})"
    data = {
        "submission": record.submission,
        "trigger": trigger.template,
        "object": version.url,
        "etag": version.etag,
        "source": record.source,
    }
    return Event(name="run.triggered", message=message, data=data)
