"""Runs a DAG template: each task starts when all tasks that it depends on have ended.

Source: Argo Workflows ``workflow/controller/dag.go``.
"""

import asyncio
from dataclasses import dataclass, field
from functools import reduce
from typing import TYPE_CHECKING

from hera_pipelines.local.arguments import VariableScope, collect_outputs, input_scope, node_scope
from hera_pipelines.local.composites.dag_state import EMPTY_FAN_OUT_MESSAGE, TaskState, TemplateDag, expand_child
from hera_pipelines.local.nodes import NodeEnd, NodePhase, WorkflowNode
from tiphys.errors import UsageError
from tiphys.protocol.compiled_workflow import Manifest, is_fan_out

if TYPE_CHECKING:
    from hera_pipelines.local.interpreter import Interpreter, TemplateCall


async def run_dag(interpreter: "Interpreter", call: "TemplateCall", node: WorkflowNode, template: Manifest) -> NodeEnd:
    """Run a DAG template as ``node`` and return its final phase."""
    body = template["dag"]
    graph = TemplateDag(body["tasks"], body.get("target") or "", fail_fast=body.get("failFast") is not False)
    return await _DagRun(interpreter, call, node, template, graph).run()


@dataclass
class _DagRun:
    interpreter: "Interpreter"
    call: "TemplateCall"
    node: WorkflowNode
    template: Manifest
    graph: TemplateDag
    finished_tasks: dict[str, WorkflowNode] = field(default_factory=dict)
    """Nodes of the tasks that have ended, by task."""

    async def run(self) -> NodeEnd:
        ended = {name: asyncio.Event() for name in self.graph.needed_tasks}
        await self._run_all(ended)
        if len(self.finished_tasks) < len(self.graph.needed_tasks):
            return NodeEnd(NodePhase.FAILED, self.interpreter.shutdown.stop_reason(self.call.on_exit))
        phase = self.graph.phase({name: _task_state(task) for name, task in self.finished_tasks.items()})
        if phase is not NodePhase.SUCCEEDED:
            return NodeEnd(phase)
        try:
            return NodeEnd(phase, outputs=collect_outputs(self.template, self._scope(tuple(self.finished_tasks))))
        except UsageError as error:
            return NodeEnd(NodePhase.ERROR, str(error))

    async def _run_all(self, ended: dict[str, asyncio.Event]) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for name in self.graph.needed_tasks:
                    group.create_task(self._run_after_dependencies(name, ended))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None  # the first error ends the engine; the others are its consequences

    async def _run_after_dependencies(self, name: str, ended: dict[str, asyncio.Event]) -> None:
        for dependency in self.graph.dependencies[name]:
            await ended[dependency].wait()
        if not self.interpreter.shutdown.stop_reason(self.call.on_exit):
            self.finished_tasks[name] = await self._run_task(self._find_task(name))
        ended[name].set()

    async def _run_task(self, task: Manifest) -> WorkflowNode:
        name = task["name"]
        try:
            is_run = self.graph.should_run(
                name, {d: _task_state(self.finished_tasks[d]) for d in self.graph.dependencies[name]}
            )
            children = self._expand(task) if is_run else []
        except UsageError as error:
            return self._add_skipped_node(task, NodePhase.ERROR, str(error))
        if not is_run:
            return self._add_skipped_node(task, NodePhase.OMITTED, "omitted: depends condition not met")
        if not is_fan_out(task):
            return await self._execute(children[0], name)
        if not children:
            return self._add_skipped_node(task, NodePhase.SKIPPED, EMPTY_FAN_OUT_MESSAGE)
        return await self._run_items(task, children)

    def _expand(self, task: Manifest) -> list[Manifest]:
        scope = VariableScope(dict(self.interpreter.variables)) | self._scope(self.graph.ancestors(task["name"]))
        return expand_child(task, scope)

    async def _run_items(self, task: Manifest, items: list[Manifest]) -> WorkflowNode:
        nodes = self.interpreter.nodes
        group = nodes.add(self._node_name(task["name"]), "TaskGroup", task["template"], self.call.task_of(task["name"]))
        group.items += await asyncio.gather(*(self._execute(item, task["name"]) for item in items))
        failed = [item.phase for item in group.items if item.failed]
        nodes.set_phase(group, failed[-1] if failed else NodePhase.SUCCEEDED)
        return group

    async def _execute(self, child: Manifest, task: str) -> WorkflowNode:
        return await self.interpreter.run_child(
            self.call, self._node_name(child["name"]), child, "tasks", self.call.task_of(task)
        )

    def _add_skipped_node(self, task: Manifest, phase: NodePhase, message: str) -> WorkflowNode:
        name = task["name"]
        return self.interpreter.nodes.add(
            self._node_name(name), "Skipped", task["template"], self.call.task_of(name), phase, message
        )

    def _scope(self, names: tuple[str, ...]) -> VariableScope:
        scopes = (
            node_scope(
                "tasks",
                name,
                self.finished_tasks[name],
                self.interpreter.definition.template(self._find_task(name)["template"]),
            )
            for name in names
        )
        return reduce(VariableScope.__or__, scopes, input_scope(self.template))

    def _find_task(self, name: str) -> Manifest:
        return next(task for task in self.graph.tasks if task["name"] == name)

    def _node_name(self, task: str) -> str:
        return f"{self.node.name}.{task}"


def _task_state(node: WorkflowNode) -> TaskState:
    return TaskState(node.phase, tuple(item.phase for item in node.items))
