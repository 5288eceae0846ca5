"""Interprets one Workflow: the counterpart of Argo's ``operator.go``.

Argo examines all nodes again on every event. Here each node is a coroutine that
awaits its children, which gives the same order of phases with less code.
"""

import asyncio
import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, replace
from datetime import datetime

from hera_pipelines.local import shutdown
from hera_pipelines.local.arguments import Variables, bind_arguments, fill_in_template
from hera_pipelines.local.composites.dag import run_dag
from hera_pipelines.local.composites.steps import run_steps
from hera_pipelines.local.expressions.govaluate import condition_holds
from hera_pipelines.local.nodes import NodeEnd, NodePhase, NodeTable, WorkflowNode, attempt_name, pod_name
from hera_pipelines.local.plugin_client import PluginClient
from hera_pipelines.local.pods.gang_pods import LocalGang, build_local_gang, member_templates, run_gang
from hera_pipelines.local.pods.pod import PodRunner
from hera_pipelines.local.pods.pod_files import LocalPod, WorkflowVolumes
from hera_pipelines.local.retry import (
    BackoffWait,
    NextAttempt,
    NoRetry,
    RetryObservation,
    RetryStrategy,
    attempt_variables,
)
from hera_pipelines.local.shutdown import WorkflowShutdown
from hera_pipelines.local.workflow_object import WorkflowDefinition
from tiphys.errors import UsageError
from tiphys.protocol.compiled_workflow import Manifest
from tiphys.protocol.operations import WAKE_TEMPLATE
from tiphys.protocol.quantities import parse_argo_duration_seconds

NODE_KINDS = {
    "dag": "DAG",
    "steps": "Steps",
    "container": "Pod",
    "script": "Pod",
    "plugin": "Plugin",
    "resource": "Pod",
    "suspend": "Suspend",
}
"""Supported template types, and the kind of node that each creates."""


@dataclass(frozen=True)
class TemplateCall:
    """One template to execute as one node."""

    node: str
    template: str
    arguments: Manifest
    task: str = ""
    """Task of the entry DAG that the node belongs to."""
    caller: tuple[str, str] = ("", "")
    """Variable of the calling task or step and its value, such as ``("tasks.name", "fit")``."""
    on_exit: bool = False
    slots: asyncio.Semaphore | None = None
    """Slots by the ``parallelism`` of the calling template."""
    inner_slots: asyncio.Semaphore | None = None
    """Slots by the ``parallelism`` of the called template, for its children."""

    def task_of(self, child: str) -> str:
        """Task of the entry DAG that a task or step of the called template belongs to."""
        return "" if self.on_exit else self.task or child


@dataclass(frozen=True)
class Interpreter:
    """Runs the templates of one workflow; holds everything that its nodes share."""

    definition: WorkflowDefinition
    nodes: NodeTable
    variables: dict[str, str | None]
    """Variables ``workflow.*``."""
    shutdown: WorkflowShutdown
    plugin_client: PluginClient
    pods: PodRunner
    pod_slots: asyncio.Semaphore | None
    """Slots by the ``parallelism`` of the workflow."""
    volumes: WorkflowVolumes
    clock: Callable[[], datetime]
    speed: float

    async def execute(self, call: TemplateCall) -> WorkflowNode:
        """Run a template to its end and return its node, which exists even if the template is invalid."""
        try:
            template = self.definition.template(call.template)
            variables = self._local_variables(call, template)
            bound = bind_arguments(template, call.arguments, variables)
            strategy = None if bound.get("retryStrategy") is None else RetryStrategy.parse(bound["retryStrategy"])
        except UsageError as error:
            return self.nodes.add(call.node, "Skipped", call.template, call.task, NodePhase.ERROR, str(error))
        if strategy is None:
            return await self._execute_once(call, bound, None)
        return await self._execute_with_retries(call, bound, variables, strategy)

    async def run_child(self, parent: TemplateCall, node: str, child: Manifest, kind: str, task: str) -> WorkflowNode:
        """Run one task or step of ``parent``, with its variables substituted; ``kind`` is ``tasks`` or ``steps``."""
        template = child["template"]
        try:
            if not condition_holds(child["when"]):
                reason = f"when '{child['when']}' evaluated false"
                return self.nodes.add(node, "Skipped", template, task, NodePhase.SKIPPED, reason)
        except UsageError as error:
            return self.nodes.add(node, "Skipped", template, task, NodePhase.ERROR, str(error))
        caller = (f"{kind}.name", child["name"])
        return await self.execute(
            TemplateCall(node, template, child["arguments"], task, caller, parent.on_exit, parent.inner_slots)
        )

    async def _execute_with_retries(
        self, call: TemplateCall, bound: Manifest, local_variables: Variables, strategy: RetryStrategy
    ) -> WorkflowNode:
        parent = self.nodes.add(call.node, "Retry", call.template, call.task)
        last: RetryObservation | None = None
        remaining: float | None = None
        while True:
            number = len(parent.attempts)
            name = attempt_name(call.node, number)
            variables = {**local_variables, **attempt_variables(number, last)}
            if NODE_KINDS[template_type(bound)] == "Pod":
                variables["pod.name"] = pod_name(self.definition.workflow_name, name, call.template)
            child = await self._execute_once(replace(call, node=name), fill_in_template(bound, variables), remaining)
            parent.attempts.append(child)
            if not child.failed:
                parent.outputs = child.outputs
                self.nodes.set_phase(parent, NodePhase.SUCCEEDED)
                return parent
            last = self._observe_attempt(parent, child, call.on_exit)
            decision = await self._decide_retry(parent, strategy, last, call.on_exit)
            if isinstance(decision, NoRetry):
                parent.outputs = child.outputs
                self.nodes.set_phase(parent, child.phase, decision.message)
                return parent
            remaining = decision.remaining_seconds

    async def _decide_retry(
        self, parent: WorkflowNode, strategy: RetryStrategy, observation: RetryObservation, on_exit: bool
    ) -> NextAttempt | NoRetry:
        try:
            decision = strategy.decide(observation)
            if isinstance(decision, BackoffWait):
                self.nodes.set_phase(parent, NodePhase.RUNNING, decision.message)
                await self.shutdown.sleep(decision.seconds / self.speed, on_exit)
                self.nodes.set_phase(parent, NodePhase.RUNNING)
                decision = strategy.decide(
                    observation._replace(has_waited=True, stop_reason=self.shutdown.stop_reason(on_exit))
                )
        except UsageError as error:
            return NoRetry(f"retryStrategy: {error}")
        assert not isinstance(decision, BackoffWait)
        return decision

    def _observe_attempt(self, parent: WorkflowNode, child: WorkflowNode, on_exit: bool) -> RetryObservation:
        ended = child.finished or self.clock()
        return RetryObservation(
            attempts=len(parent.attempts),
            phase=child.phase,
            message=child.message,
            exit_code=child.outputs.exit_code if child.outputs else None,
            duration_seconds=(ended - child.started).total_seconds(),
            elapsed_seconds=(ended - parent.attempts[0].started).total_seconds(),
            stop_reason=self.shutdown.stop_reason(on_exit),
        )

    async def _execute_once(self, call: TemplateCall, template: Manifest, seconds_left: float | None) -> WorkflowNode:
        kind = NODE_KINDS[template_type(template)]
        slots: AbstractAsyncContextManager[object] = nullcontext()
        if call.slots is not None and kind not in ("Plugin", "Suspend"):
            slots = call.slots
        async with slots:
            match kind:
                case "Pod":
                    return await self._run_pod(call, template, seconds_left)
                case "Plugin":
                    return await self._run_plugin(call, template)
                case "Suspend":
                    return await self._run_suspend(call, template)
            node = self.nodes.add(call.node, kind, call.template, call.task)
            run = run_dag if kind == "DAG" else run_steps
            inner_slots = asyncio.Semaphore(int(template["parallelism"])) if template.get("parallelism") else None
            end = await run(self, replace(call, inner_slots=inner_slots), node, template)
            return self._finish_node(node, end)

    async def _run_suspend(self, call: TemplateCall, template: Manifest) -> WorkflowNode:
        node = self.nodes.add(call.node, "Suspend", call.template, call.task)
        try:
            seconds = parse_argo_duration_seconds(str(template["suspend"]["duration"]))
        except UsageError as error:
            return self._finish_node(node, NodeEnd(NodePhase.ERROR, str(error)))
        if call.template != WAKE_TEMPLATE:  # it has Argo look for an answer, and here the answer is awaited
            await self.shutdown.sleep(seconds / self.speed, call.on_exit)
        reason = self.shutdown.stop_reason(call.on_exit)
        return self._finish_node(node, NodeEnd(NodePhase.FAILED if reason else NodePhase.SUCCEEDED, reason))

    async def _run_plugin(self, call: TemplateCall, template: Manifest) -> WorkflowNode:
        node = self.nodes.add(call.node, "Plugin", call.template, call.task, NodePhase.PENDING)
        pending: list[str] = []
        answered = asyncio.Event()

        def show_pending(message: str) -> None:
            if call.on_exit and message not in pending:  # the exit handler belongs to no task that would show it
                self.nodes.announce(message)
            pending.append(message)
            answered.set()
            self.nodes.set_phase(node, NodePhase.PENDING, message)

        execution = asyncio.ensure_future(self.plugin_client.execute(template, show_pending))
        stopped = asyncio.ensure_future(self.shutdown.wait_until_stopped(call.on_exit))
        grace_over = asyncio.ensure_future(self.shutdown.wait_until_grace_is_over())
        first_answer = asyncio.ensure_future(answered.wait())
        try:
            limit = (
                parse_argo_duration_seconds(str(template["timeout"])) / self.speed if template.get("timeout") else None
            )
            await asyncio.wait({execution, stopped, grace_over}, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            if grace_over.done():  # the call may have begun late, so a healthy plugin gets the time for an answer
                await asyncio.wait(
                    {execution, stopped, first_answer},
                    timeout=shutdown.ANSWER_SECONDS,
                    return_when=asyncio.FIRST_COMPLETED,
                )
            if execution.done() and not stopped.done():
                return self._finish_node(node, execution.result())
            reason = self.shutdown.stop_reason(call.on_exit)
            if not reason and grace_over.done():
                reason = self.shutdown.give_up_recording(pending)
            return self._finish_node(node, NodeEnd(NodePhase.FAILED, reason or f"{call.node} exceeded its timeout"))
        finally:
            for waiter in (execution, stopped, grace_over, first_answer):
                waiter.cancel()

    async def _run_pod(self, call: TemplateCall, template: Manifest, seconds_left: float | None) -> WorkflowNode:
        node = self.nodes.add(call.node, "Pod", call.template, call.task, NodePhase.PENDING)
        node.inputs = template.get("inputs") or {}

        def show_message(message: str) -> None:
            self.nodes.set_phase(node, NodePhase.RUNNING, message)

        slots: AbstractAsyncContextManager[object] = self.pod_slots or nullcontext()
        async with slots:
            if reason := self.shutdown.stop_reason(call.on_exit):
                return self._finish_node(node, NodeEnd(NodePhase.FAILED, reason))
            self.nodes.set_phase(node, NodePhase.RUNNING)
            if "resource" in template:
                end = await run_gang(
                    self.pods, self._build_gang(call, template, seconds_left), self.shutdown, show_message
                )
            else:
                end = await self.pods.run(self._build_pod(call, template, seconds_left), self.shutdown, show_message)
        return self._finish_node(node, end)

    def _build_gang(self, call: TemplateCall, template: Manifest, seconds_left: float | None) -> LocalGang:
        job = json.loads(template["resource"]["manifest"])
        pods = [self._build_pod(call, member, seconds_left) for member in member_templates(job)]
        return build_local_gang(
            job, [replace(pod, name=f"{pod.name}-{rank}", rank=rank) for rank, pod in enumerate(pods)]
        )

    def _build_pod(self, call: TemplateCall, template: Manifest, seconds_left: float | None) -> LocalPod:
        limits = [seconds_left]
        limits += [
            parse_argo_duration_seconds(str(template[field]))
            for field in ("activeDeadlineSeconds", "timeout")
            if field in template
        ]
        return LocalPod(
            name=pod_name(self.definition.workflow_name, call.node, call.template),
            namespace=str(self.variables["workflow.namespace"]),
            workflow=self.definition.workflow_name,
            workflow_uid=str(self.variables["workflow.uid"]),
            node=call.node,
            template=template,
            volumes=self.volumes.folders_for(template),
            on_exit=call.on_exit,
            timeout_seconds=min((limit for limit in limits if limit is not None), default=None),
            wants_result=self.definition.uses_results,
        )

    def _finish_node(self, node: WorkflowNode, end: NodeEnd) -> WorkflowNode:
        node.outputs = end.outputs
        node.termination_message = "\n".join(end.log_tail)
        self.nodes.set_phase(node, end.phase, end.message, end.log_tail)
        return node

    def _local_variables(self, call: TemplateCall, template: Manifest) -> dict[str, str | None]:
        variables = {**self.variables, "node.name": call.node}
        if call.caller[0]:
            variables[call.caller[0]] = call.caller[1]
        if NODE_KINDS[template_type(template)] == "Pod" and template.get("retryStrategy") is None:
            variables["pod.name"] = pod_name(self.definition.workflow_name, call.node, call.template)
        return variables


def template_type(template: Manifest) -> str:
    """Type of a template: the key that holds its body.

    Raises:
        UsageError: the template has no supported type.
    """
    for kind in NODE_KINDS:
        if kind in template:
            return kind
    raise UsageError(f"template {template.get('name')!r} is none of {', '.join(NODE_KINDS)}")
