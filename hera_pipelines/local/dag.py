"""A DAG node: starts each task once all that it waits for has ended."""

import asyncio
from dataclasses import dataclass, field
from functools import reduce
from typing import TYPE_CHECKING

from hera_pipelines.local.binding import outputs_of
from hera_pipelines.local.changes import NodePhase
from hera_pipelines.local.children import EMPTY_FAN_OUT, expand
from hera_pipelines.local.fanout import is_fan_out
from hera_pipelines.local.graph import Graph, TaskState
from hera_pipelines.local.nodes import Node
from hera_pipelines.local.scope import Scope, inputs_of, of_node
from hera_pipelines.local.verdict import Verdict
from tiphys.errors import UsageError
from tiphys.protocol.pipeline import Manifest

if TYPE_CHECKING:
    from hera_pipelines.local.interpreter import Call, Interpreter


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
