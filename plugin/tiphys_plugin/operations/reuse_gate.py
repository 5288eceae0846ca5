"""reuse: what a Workflow that was submitted as it is takes over at its start.

The same rule as before a submission of `tiphys`: the inputs of a step are known if
all that it waits for is taken over, and its result counts under its step key.
"""

import time
from collections.abc import Mapping, Sequence

from tiphys.errors import UsageError
from tiphys.protocol.compiled_workflow import Manifest
from tiphys.protocol.depends import awaited_tasks
from tiphys.protocol.execute_api import ArtifactValue, ExecuteReply, NodeOutputs, ParameterValue, succeeded_reply
from tiphys.protocol.operations import reuse_output
from tiphys.recording.bindings import TaskOutputs, bind_references, collect_step_outputs
from tiphys.recording.known_inputs import find_known_inputs, workflow_parameter_values
from tiphys.recording.reusable_results import describe_reuse
from tiphys.recording.step_key import compute_step_key
from tiphys.store import read_step_attempts
from tiphys_plugin.operations import publish, reuse
from tiphys_plugin.runtime.context import StepCall

_MAX_NAMED = 10
"""Steps that the message of the node names."""
_SECONDS_OF_CALL = 10.0
_LATE = f"storage took more than {_SECONDS_OF_CALL:g} s to find the results of the steps before it"


def decide_reuse(calls: Sequence[StepCall]) -> ExecuteReply:
    """Answer the node of the gate. Each step has all its outputs in the answer, because Argo needs those, too, that an
    expression does not take (``util/template/expression_template.go``).

    Args:
        calls: One for each step that may be taken over, behind those of the steps that it waits for.

    Raises:
        NotFoundError: a result that was taken over by an earlier answer exists no longer.
        StoreError: storage did not answer.
    """
    taken: dict[str, TaskOutputs] = {}
    values, artifacts, sentences = dict[str, str](), list[ArtifactValue](), list[str]()
    tasks = {task["name"]: task for task in calls[0].binding.pipeline.tasks()} if calls else {}
    workflow_parameters = workflow_parameter_values(calls[0].binding.pipeline) if calls else {}
    deadline = time.monotonic() + _SECONDS_OF_CALL
    for call in calls:
        name = call.spec.name
        values |= {reuse_output(name): "false"} | {reuse_output(name, output): "" for output in call.spec.parameters}
        is_late = time.monotonic() > deadline
        task = tasks.get(name, {})
        lookup = reuse.ReuseLookup(None, _LATE) if is_late else _look_up(call, task, taken, workflow_parameters)
        if lookup.waiting is not None:
            return lookup.waiting
        if lookup.end is None:
            sentences += [f"{name} runs, because {lookup.damage}"] if lookup.damage else []
            continue
        sentences.append(f"{name} is {describe_reuse(reuse.take_over(call, lookup.end))}")
        taken[name] = collect_step_outputs(lookup.end)
        outputs = publish.build_outputs(call, lookup.end.outputs)
        values |= {reuse_output(name): "true"} | {
            reuse_output(name, parameter.name): parameter.value for parameter in outputs.parameters
        }
        artifacts += [
            ArtifactValue(name=reuse_output(name, artifact.name), s3=artifact.s3) for artifact in outputs.artifacts
        ]
    nothing = "" if taken else "Nothing is taken over: no other run shares a result of the same program and inputs"
    rest = len(sentences) - _MAX_NAMED
    more = f"and {rest} more, see `tiphys get {calls[0].run}`" if rest > 0 else ""
    message = "; ".join(filter(None, [nothing, *sentences[:_MAX_NAMED], more]))
    parameters = [ParameterValue(name=name, value=value) for name, value in values.items()]
    return succeeded_reply(message, NodeOutputs(parameters=parameters, artifacts=artifacts))


def _look_up(
    call: StepCall, task: Manifest, taken: Mapping[str, TaskOutputs], parameters: Mapping[str, str]
) -> reuse.ReuseLookup:
    if (record := reuse.find_reuse_record(call)) is not None:
        return reuse.ReuseLookup(reuse.read_reused_end(call, record))
    if not task or awaited_tasks(task) - taken.keys():
        return reuse.ReuseLookup(None)
    body = bind_references(task, taken, call.store.artifact_key)
    try:
        inputs = find_known_inputs(call.binding.pipeline, call.spec, body, parameters)
    except UsageError:  # Argo reports a template that is missing when it runs the task
        inputs = None
    if inputs is None:
        return reuse.ReuseLookup(None)
    key = compute_step_key(call.store, call.spec, inputs)
    return reuse.find_reusable_result(call, key.key, read_step_attempts(call.store, call.run, call.step))
