"""Records the steps without a gate for the calls that need their ends: finalize, and the admit of a step behind."""

from collections.abc import Mapping, Sequence
from typing import Any

import structlog

from tiphys.protocol.depends import awaited_tasks
from tiphys.protocol.execute_api import ExecuteReply, failed_reply, pending_reply
from tiphys.protocol.fan_out import parse_argo_item_name
from tiphys.protocol.phases import is_final_workflow_phase
from tiphys.protocol.workflow_nodes import are_nodes_offloaded, find_step_nodes, read_nodes
from tiphys.recording import RecordedSteps, RunBinding, WorkflowRecorder
from tiphys.recording.node_outputs import HashObjects
from tiphys.records import AttemptEnd, Cause, task_name
from tiphys.records.names import LOCAL_CLUSTER_PREFIX
from tiphys.store import ObjectInfo
from tiphys_plugin.runtime.background import HashingProgress
from tiphys_plugin.runtime.context import PluginContext, StepCall

_log = structlog.get_logger()
_LONGEST_WAIT_SECONDS = 20.0
"""Argo stores the end of a node a moment after it has told the plugin of what follows from it."""
_RETRY_SECONDS = 1.0
_SECONDS_OF_CALL = 10.0
"""Argo gives up on a call after 30 s."""


def record_workflow(context: PluginContext, binding: RunBinding) -> RecordedSteps | ExecuteReply:
    """Record all steps without a gate of a Workflow that is over; a Pending reply while that is not possible yet.

    What cannot be recorded, because the Workflow is gone or a database has its nodes, is left to others.
    """
    recorder = _recorder(context, binding)
    if not recorder.specs:
        return RecordedSteps({})
    workflow = _read_workflow(context, binding)
    wait_key = f"finalize {binding.uid}"
    if workflow is None:
        return RecordedSteps({})
    nodes = read_nodes(workflow)
    root = next((node for node in nodes if node["name"] == binding.workflow), {})
    is_over = is_final_workflow_phase(root.get("phase"))
    if not is_over and not context.wait_tracker.is_overdue(wait_key, context.clock(), _LONGEST_WAIT_SECONDS):
        return pending_reply("Argo has not stored the end of the last step yet", _RETRY_SECONDS)
    recorded = recorder.record(workflow, nodes, _hasher(context), _SECONDS_OF_CALL)
    if recorded.waiting:
        return pending_reply(f"Verifying the outputs of {', '.join(recorded.waiting[:3])}", _RETRY_SECONDS)
    context.wait_tracker.clear(wait_key)
    return recorded


def record_steps_before(call: StepCall) -> ExecuteReply | None:
    """Record the steps without a gate that the task of a gated step waits for; None once they are recorded.

    So nothing begins behind an output that is missing or damaged, and the hashes of what the step takes belong to its
    key. The reply is Pending until then, for a bounded time: a result that exists may not be found afterwards. It
    refuses the step where one before it has no result although Argo saw it succeed.
    """
    recorder = _recorder(call.context, call.binding)
    before = _tasks_before(call) & recorder.specs.keys()
    if not before or call.step in recorder.released:
        return None
    wait_key = f"producers {call.binding.uid}/{call.step}"
    if (workflow := _read_workflow(call.context, call.binding)) is not None:
        nodes = read_nodes(workflow)
        recorded = recorder.record(workflow, nodes, _hasher(call.context), _SECONDS_OF_CALL)
        if recorded.waiting:
            return pending_reply(f"Verifying the outputs of {', '.join(recorded.waiting[:3])}", _RETRY_SECONDS)
        refuted = next((step for step in sorted(recorded.refuted) if task_name(step) in before), None)
        if refuted is not None:
            name = instance_display_name(recorded.names[refuted])
            return failed_reply(format_verdict(call.context, name, recorded.ends[refuted]))
        tasks = {name: recorder.specs[name].fan_out for name in before}
        started = [node for node in find_step_nodes(call.binding.workflow, nodes, tasks) if node.has_started]
        names = set(recorded.names.values())
        if all(node.instance.removeprefix(f"{call.binding.workflow}.") in names for node in started):
            call.context.wait_tracker.clear(wait_key)
            recorder.released.add(call.step)
            return None
        if not call.context.wait_tracker.is_overdue(wait_key, call.context.clock(), _LONGEST_WAIT_SECONDS):
            return pending_reply("The steps before it are not recorded yet", _RETRY_SECONDS)
    _log.warning("steps.unrecorded", run=call.run, before=call.step, steps=sorted(before))
    recorder.released.add(call.step)
    return None


def _tasks_before(call: StepCall) -> frozenset[str]:
    """Tasks that the task of a step waits for."""
    tasks = {task["name"]: task for task in call.binding.pipeline.tasks()}
    return awaited_tasks(tasks.get(call.spec.name, {}))


def format_verdict(context: PluginContext, name: str, end: AttemptEnd, retries: str = "") -> str:
    """The verdict on a failed step, and how the run goes on; ``retries`` says why no retry follows."""
    is_local = context.cluster.name.startswith(LOCAL_CLUSTER_PREFIX)
    hint = "" if is_local else " (`argo retry` cannot change this verdict)"
    return (
        f"{name} failed in attempt {end.attempt} by {describe_cause(end.cause)}: {end.message}{retries}. "
        f"When the cause is gone: `tiphys resume {end.run}`, or `tiphys resume {end.run} FILE` with a changed "
        f"pipeline file{hint}"
    )


def describe_cause(cause: Cause | None) -> str:
    """The display name of a cause."""
    return (cause or Cause.UNKNOWN).display_name


def instance_display_name(name: str) -> str:
    """The name for people of a step or item by its name within the Workflow: ``sweep(2:0.1)`` → ``sweep[2]``."""
    item = parse_argo_item_name(name)
    return item.display_name if item else name


def _read_workflow(context: PluginContext, binding: RunBinding) -> dict[str, Any] | None:
    """The live Workflow with its nodes; None if it is gone, or a database has the nodes."""
    workflow = context.cluster.workflow(binding.namespace, binding.workflow)
    if workflow is None or workflow["metadata"].get("uid") != binding.uid:
        return None
    return None if are_nodes_offloaded(workflow) else workflow


def _recorder(context: PluginContext, binding: RunBinding) -> WorkflowRecorder:
    def count(end: AttemptEnd) -> None:
        context.metrics.attempts_ended.labels(cause=end.cause.value if end.cause else end.outcome.value).inc()

    return context.recorders.get(
        binding.uid,
        lambda: WorkflowRecorder(context.store, binding, context.settings.parameter_max_bytes, count),
    )


def _hasher(context: PluginContext) -> HashObjects:
    def hash_objects(job: str, objects: Sequence[ObjectInfo]) -> Mapping[str, str] | None:
        hashes = context.hasher.hash_objects(job, objects, context.settings.verify_inline_seconds)
        return None if isinstance(hashes, HashingProgress) else hashes

    return hash_objects
