"""A steps node: groups one after the other, the steps of a group at the same time."""

import asyncio
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hera_pipelines.local.binding import outputs_of
from hera_pipelines.local.changes import NodePhase
from hera_pipelines.local.children import EMPTY_FAN_OUT, expand
from hera_pipelines.local.fanout import is_fan_out
from hera_pipelines.local.graph import tolerates
from hera_pipelines.local.names import group_name
from hera_pipelines.local.nodes import Node
from hera_pipelines.local.scope import Scope, inputs_of, of_node
from hera_pipelines.local.verdict import Verdict
from tiphys.errors import UsageError
from tiphys.protocol.pipeline import Manifest

if TYPE_CHECKING:
    from hera_pipelines.local.interpreter import Call, Interpreter


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
