"""Interprets one Workflow: the counterpart of Argo's ``operator.go``.

Argo looks at all nodes again on every event. Here each node is a coroutine that
waits for its children, which gives the same order of phases and is far shorter.

A steps node: groups one after the other, the steps of a group at the same time.

A DAG node: starts each task once all that it waits for has ended.
"""

import asyncio
import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import reduce

from hera_pipelines.local.arguments import Scope, Variables, bind, fill_in, inputs_of, of_node, outputs_of
from hera_pipelines.local.dag_state import EMPTY_FAN_OUT, Graph, TaskState, expand, is_fan_out, tolerates
from hera_pipelines.local.expressions.govaluate import holds
from hera_pipelines.local.nodes import Node, NodePhase, NodeTable, Verdict, attempt_name, group_name, pod_name
from hera_pipelines.local.plugin_client import Agent
from hera_pipelines.local.pods.gang_pods import Members, gang_of, member_templates, run_members
from hera_pipelines.local.pods.pod import Pods
from hera_pipelines.local.pods.pod_files import Pod, Volumes
from hera_pipelines.local.retry import Again, GiveUp, Observation, RetryStrategy, Wait, attempt_variables
from hera_pipelines.local.shutdown import Shutdown
from hera_pipelines.local.workflow_object import Definitions
from tiphys.errors import UsageError
from tiphys.protocol.compiled_workflow import Manifest
from tiphys.protocol.quantities import seconds


async def run_steps(interpreter: "Interpreter", call: "Call", node: Node, template: Manifest) -> Verdict:
    """Run the steps ``template`` as ``node``."""
    return await _Steps(interpreter, call, node, template).run()


@dataclass
class _Steps:
    interpreter: "Interpreter"
    call: "Call"
    node: Node
    template: Manifest

    async def run(self) -> Verdict:
        scope = Scope(dict(self.interpreter.variables)) | inputs_of(self.template)
        for index, steps in enumerate(self.template["steps"]):
            if reason := self.interpreter.shutdown.reason(self.call.on_exit):
                return Verdict(NodePhase.FAILED, reason)
            name = group_name(self.node.name, index)
            group = self.interpreter.nodes.add(name, "StepGroup", "", self.call.task)
            try:
                expanded = [(step, expand(step, scope)) for step in steps]
            except UsageError as error:
                self.interpreter.nodes.mark(group, NodePhase.ERROR, str(error))
                return Verdict(NodePhase.FAILED, str(error))
            ran = await asyncio.gather(*(self._run_step(group, step, children) for step, children in expanded))
            if failure := self._failure(group, steps, ran):
                return failure
            for step, nodes in zip(steps, ran, strict=True):
                scope |= self._scope_of(group, step, nodes)
        return self._conclude(scope)

    async def _run_step(self, group: Node, step: Manifest, children: list[Manifest]) -> list[Node]:
        if not children:
            name, template = f"{group.name}.{step['name']}", step["template"]
            return [
                self.interpreter.nodes.add(
                    name, "Skipped", template, self._shown(step), NodePhase.SKIPPED, EMPTY_FAN_OUT
                )
            ]
        return await asyncio.gather(
            *(
                self.interpreter.run_child(
                    self.call, f"{group.name}.{child['name']}", child, "steps", self._shown(step)
                )
                for child in children
            )
        )

    def _failure(self, group: Node, steps: list[Manifest], ran: list[list[Node]]) -> Verdict | None:
        for step, nodes in zip(steps, ran, strict=True):
            for node in nodes:
                if node.failed and not tolerates(step, node.phase):
                    message = f"child '{node.id}' failed"
                    self.interpreter.nodes.mark(group, NodePhase.FAILED, message)
                    return Verdict(NodePhase.FAILED, message)
        self.interpreter.nodes.mark(group, NodePhase.SUCCEEDED)
        return None

    def _scope_of(self, group: Node, step: Manifest, nodes: list[Node]) -> Scope:
        template = self.interpreter.definitions.template(step["template"])
        expanded = is_fan_out(step) and nodes[0].name != f"{group.name}.{step['name']}"
        return of_node("steps", step["name"], replace(group, items=nodes) if expanded else nodes[0], template)

    def _conclude(self, scope: Scope) -> Verdict:
        try:
            return Verdict(NodePhase.SUCCEEDED, outputs=outputs_of(self.template, scope))
        except UsageError as error:
            return Verdict(NodePhase.ERROR, str(error))

    def _shown(self, step: Manifest) -> str:
        return self.call.task or str(step["name"])


async def run_dag(interpreter: "Interpreter", call: "Call", node: Node, template: Manifest) -> Verdict:
    """Run the DAG ``template`` as ``node``."""
    body = template["dag"]
    graph = Graph(body["tasks"], body.get("target") or "")
    return await _Dag(interpreter, call, node, template, graph).run()


@dataclass
class _Dag:
    interpreter: "Interpreter"
    call: "Call"
    node: Node
    template: Manifest
    graph: Graph
    tasks: dict[str, Node] = field(default_factory=dict)
    """Tasks that have ended."""

    async def run(self) -> Verdict:
        ended = {name: asyncio.Event() for name in self.graph.needed}
        await self._run_all(ended)
        if len(self.tasks) < len(self.graph.needed):
            return Verdict(NodePhase.FAILED, self.interpreter.shutdown.reason(self.call.on_exit))
        phase = self.graph.phase({name: _state(task) for name, task in self.tasks.items()})
        if phase is not NodePhase.SUCCEEDED:
            return Verdict(phase)
        try:
            return Verdict(phase, outputs=outputs_of(self.template, self._scope(tuple(self.tasks))))
        except UsageError as error:
            return Verdict(NodePhase.ERROR, str(error))

    async def _run_all(self, ended: dict[str, asyncio.Event]) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for name in self.graph.needed:
                    group.create_task(self._run_in_turn(name, ended))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None  # the first ends the engine; the others only follow from it

    async def _run_in_turn(self, name: str, ended: dict[str, asyncio.Event]) -> None:
        for dependency in self.graph.dependencies[name]:
            await ended[dependency].wait()
        if not self.interpreter.shutdown.reason(self.call.on_exit):
            self.tasks[name] = await self._run_task(self._task(name))
        ended[name].set()

    async def _run_task(self, task: Manifest) -> Node:
        name = task["name"]
        try:
            runs = self.graph.runs(name, {d: _state(self.tasks[d]) for d in self.graph.dependencies[name]})
            expanded = expand(task, self._scope(self.graph.ancestors(name))) if runs else []
        except UsageError as error:
            return self._passed_over(task, NodePhase.ERROR, str(error))
        if not runs:
            return self._passed_over(task, NodePhase.OMITTED, "omitted: depends condition not met")
        if not is_fan_out(task):
            return await self._execute(expanded[0], name)
        if not expanded:
            return self._passed_over(task, NodePhase.SKIPPED, EMPTY_FAN_OUT)
        return await self._run_items(task, expanded)

    async def _run_items(self, task: Manifest, items: list[Manifest]) -> Node:
        nodes = self.interpreter.nodes
        group = nodes.add(self._name(task["name"]), "TaskGroup", task["template"], self._shown(task["name"]))
        group.items += await asyncio.gather(*(self._execute(item, task["name"]) for item in items))
        failed = [item.phase for item in group.items if item.failed]
        nodes.mark(group, failed[-1] if failed else NodePhase.SUCCEEDED)
        return group

    async def _execute(self, child: Manifest, task: str) -> Node:
        return await self.interpreter.run_child(self.call, self._name(child["name"]), child, "tasks", self._shown(task))

    def _passed_over(self, task: Manifest, phase: NodePhase, message: str) -> Node:
        name = task["name"]
        return self.interpreter.nodes.add(
            self._name(name), "Skipped", task["template"], self._shown(name), phase, message
        )

    def _scope(self, names: tuple[str, ...]) -> Scope:
        found = (
            of_node(
                "tasks", name, self.tasks[name], self.interpreter.definitions.template(self._task(name)["template"])
            )
            for name in names
        )
        return reduce(Scope.__or__, found, Scope(dict(self.interpreter.variables)) | inputs_of(self.template))

    def _task(self, name: str) -> Manifest:
        return next(task for task in self.graph.tasks if task["name"] == name)

    def _name(self, task: str) -> str:
        return f"{self.node.name}.{task}"

    def _shown(self, task: str) -> str:
        return self.call.task or task


def _state(node: Node) -> TaskState:
    return TaskState(node.phase, tuple(item.phase for item in node.items))


KINDS = {
    "dag": "DAG",
    "steps": "Steps",
    "container": "Pod",
    "script": "Pod",
    "plugin": "Plugin",
    "resource": "Pod",
}
"""Template types that are understood, and the kind of node each makes."""


@dataclass(frozen=True)
class Call:
    """One template to execute as one node."""

    node: str
    template: str
    arguments: Manifest
    task: str = ""
    """Task of the entry DAG that this belongs to."""
    caller: tuple[str, str] = ("", "")
    """Variable that holds the caller's name, and the name: ``("tasks.name", "fit")``."""
    on_exit: bool = False
    slots: asyncio.Semaphore | None = None
    """``parallelism`` of the template that calls."""
    inner_slots: asyncio.Semaphore | None = None
    """``parallelism`` of the template that is called, for its children."""


@dataclass(frozen=True)
class Interpreter:
    """All that the nodes of one workflow share."""

    definitions: Definitions
    nodes: NodeTable
    variables: dict[str, str | None]
    """``workflow.*``."""
    shutdown: Shutdown
    agent: Agent
    pods: Pods
    pod_slots: asyncio.Semaphore | None
    """``parallelism`` of the workflow."""
    volumes: Volumes
    clock: Callable[[], datetime]
    speed: float

    async def execute(self, call: Call) -> Node:
        """Run a template to its end; a node is made in any case."""
        try:
            template = self.definitions.template(call.template)
            local = self._local(call, template)
            bound = bind(template, call.arguments, local)
            strategy = RetryStrategy.read(bound["retryStrategy"]) if bound.get("retryStrategy") else None
        except UsageError as error:
            return self.nodes.add(call.node, "Skipped", call.template, call.task, NodePhase.ERROR, str(error))
        if strategy is None:
            return await self._once(call, bound, None)
        return await self._retry(call, bound, local, strategy)

    async def run_child(self, parent: Call, node: str, child: Manifest, kind: str, task: str) -> Node:
        """Run one task or step, filled in, of ``parent``; ``kind`` is ``tasks`` or ``steps``."""
        template = child["template"]
        try:
            if not holds(child["when"]):
                why = f"when '{child['when']}' evaluated false"
                return self.nodes.add(node, "Skipped", template, task, NodePhase.SKIPPED, why)
        except UsageError as error:
            return self.nodes.add(node, "Skipped", template, task, NodePhase.ERROR, str(error))
        caller = (f"{kind}.name", child["name"])
        return await self.execute(
            Call(node, template, child["arguments"], task, caller, parent.on_exit, parent.inner_slots)
        )

    async def _retry(self, call: Call, bound: Manifest, local: Variables, strategy: RetryStrategy) -> Node:
        parent = self.nodes.add(call.node, "Retry", call.template, call.task)
        last: Observation | None = None
        remaining: float | None = None
        while True:
            number = len(parent.attempts)
            name = attempt_name(call.node, number)
            known = {**local, **attempt_variables(number, last)}
            if KINDS[kind_of(bound)] == "Pod":
                known["pod.name"] = pod_name(self.definitions.workflow, name, call.template)
            child = await self._once(replace(call, node=name), fill_in(bound, known), remaining)
            parent.attempts.append(child)
            if not child.failed:
                parent.outputs = child.outputs
                self.nodes.mark(parent, NodePhase.SUCCEEDED)
                return parent
            last = self._observe(parent, child, call.on_exit)
            decision = await self._decide(parent, strategy, last, call.on_exit)
            if isinstance(decision, GiveUp):
                parent.outputs = child.outputs
                self.nodes.mark(parent, child.phase, decision.message)
                return parent
            remaining = decision.seconds

    async def _decide(self, parent: Node, strategy: RetryStrategy, seen: Observation, on_exit: bool) -> Again | GiveUp:
        try:
            decision = strategy.after(seen)
            if isinstance(decision, Wait):
                self.nodes.mark(parent, NodePhase.RUNNING, decision.message)
                await self.shutdown.sleep(decision.seconds / self.speed, on_exit)
                self.nodes.mark(parent, NodePhase.RUNNING)
                decision = strategy.after(seen._replace(waited=True, stopped=self.shutdown.reason(on_exit)))
        except UsageError as error:
            return GiveUp(f"retryStrategy: {error}")
        assert not isinstance(decision, Wait)
        return decision

    def _observe(self, parent: Node, child: Node, on_exit: bool) -> Observation:
        ended = child.finished or self.clock()
        return Observation(
            attempts=len(parent.attempts),
            phase=child.phase,
            message=child.message,
            exit_code=child.outputs.exit_code if child.outputs else None,
            duration=(ended - child.started).total_seconds(),
            elapsed=(ended - parent.attempts[0].started).total_seconds(),
            stopped=self.shutdown.reason(on_exit),
        )

    async def _once(self, call: Call, template: Manifest, seconds_left: float | None) -> Node:
        kind = KINDS[kind_of(template)]
        slots: AbstractAsyncContextManager[object] = nullcontext()
        if call.slots is not None and kind != "Plugin":
            slots = call.slots
        async with slots:
            match kind:
                case "Pod":
                    return await self._run_pod(call, template, seconds_left)
                case "Plugin":
                    return await self._run_plugin(call, template)
            node = self.nodes.add(call.node, kind, call.template, call.task)
            run = run_dag if kind == "DAG" else run_steps
            own = asyncio.Semaphore(int(template["parallelism"])) if template.get("parallelism") else None
            verdict = await run(self, replace(call, inner_slots=own), node, template)
            return self._finish(node, verdict)

    async def _run_plugin(self, call: Call, template: Manifest) -> Node:
        node = self.nodes.add(call.node, "Plugin", call.template, call.task, NodePhase.PENDING)

        def waiting(message: str) -> None:
            self.nodes.mark(node, NodePhase.PENDING, message)

        asked = asyncio.ensure_future(self.agent.execute(template, waiting))
        denied = asyncio.ensure_future(self.shutdown.denied(call.on_exit))
        try:
            limit = seconds(str(template["timeout"])) / self.speed if template.get("timeout") else None
            await asyncio.wait({asked, denied}, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            if asked.done() and not denied.done():
                return self._finish(node, asked.result())
            reason = self.shutdown.reason(call.on_exit) or f"{call.node} exceeded its timeout"
            return self._finish(node, Verdict(NodePhase.FAILED, reason))
        finally:
            asked.cancel()
            denied.cancel()

    async def _run_pod(self, call: Call, template: Manifest, seconds_left: float | None) -> Node:
        node = self.nodes.add(call.node, "Pod", call.template, call.task, NodePhase.PENDING)
        slots: AbstractAsyncContextManager[object] = self.pod_slots or nullcontext()
        async with slots:
            if reason := self.shutdown.reason(call.on_exit):
                return self._finish(node, Verdict(NodePhase.FAILED, reason))
            self.nodes.mark(node, NodePhase.RUNNING)
            if "resource" in template:
                verdict = await run_members(self.pods, self._members(call, template, seconds_left), self.shutdown)
            else:
                verdict = await self.pods.run(self._pod(call, template, seconds_left), self.shutdown)
        return self._finish(node, verdict)

    def _members(self, call: Call, template: Manifest, seconds_left: float | None) -> Members:
        job = json.loads(template["resource"]["manifest"])
        pods = [self._pod(call, member, seconds_left) for member in member_templates(job)]
        return gang_of(job, [replace(pod, name=f"{pod.name}-{rank}", rank=rank) for rank, pod in enumerate(pods)])

    def _pod(self, call: Call, template: Manifest, seconds_left: float | None) -> Pod:
        limits = [seconds_left]
        limits += [seconds(str(template[field])) for field in ("activeDeadlineSeconds", "timeout") if field in template]
        return Pod(
            name=pod_name(self.definitions.workflow, call.node, call.template),
            namespace=str(self.variables["workflow.namespace"]),
            workflow=self.definitions.workflow,
            workflow_uid=str(self.variables["workflow.uid"]),
            node=call.node,
            template=template,
            volumes=self.volumes.of(template),
            on_exit=call.on_exit,
            seconds=min((limit for limit in limits if limit is not None), default=None),
            wants_result=self.definitions.uses_results,
        )

    def _finish(self, node: Node, verdict: Verdict) -> Node:
        node.outputs = verdict.outputs
        self.nodes.mark(node, verdict.phase, verdict.message, verdict.log_tail)
        return node

    def _local(self, call: Call, template: Manifest) -> dict[str, str | None]:
        variables = {**self.variables, "node.name": call.node}
        if call.caller[0]:
            variables[call.caller[0]] = call.caller[1]
        if KINDS[kind_of(template)] == "Pod" and not template.get("retryStrategy"):
            variables["pod.name"] = pod_name(self.definitions.workflow, call.node, call.template)
        return variables


def kind_of(template: Manifest) -> str:
    """Type of a template: the key that holds its body.

    Raises:
        UsageError: it has none that is understood.
    """
    for kind in KINDS:
        if kind in template:
            return kind
    raise UsageError(f"template {template.get('name')!r} is none of {', '.join(KINDS)}")
