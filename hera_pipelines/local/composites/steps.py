"""Runs a steps template: its groups one after the other, and the steps of a group in parallel.

Source: Argo Workflows ``workflow/controller/steps.go``.
"""

import asyncio
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hera_pipelines.local.arguments import VariableScope, collect_outputs, input_scope, node_scope
from hera_pipelines.local.composites.dag_state import EMPTY_FAN_OUT_MESSAGE, expand_child, tolerates_failure
from hera_pipelines.local.nodes import NodeEnd, NodePhase, WorkflowNode, group_name
from tiphys.errors import UsageError
from tiphys.protocol.compiled_workflow import Manifest, is_fan_out

if TYPE_CHECKING:
    from hera_pipelines.local.interpreter import Interpreter, TemplateCall


async def run_steps(
    interpreter: "Interpreter", call: "TemplateCall", node: WorkflowNode, template: Manifest
) -> NodeEnd:
    """Run a steps template as ``node`` and return its final phase."""
    return await _StepsRun(interpreter, call, node, template).run()


@dataclass
class _StepsRun:
    interpreter: "Interpreter"
    call: "TemplateCall"
    node: WorkflowNode
    template: Manifest

    async def run(self) -> NodeEnd:
        scope = input_scope(self.template)
        workflow_scope = VariableScope(dict(self.interpreter.variables))
        for index, steps in enumerate(self.template["steps"]):
            if reason := self.interpreter.shutdown.stop_reason(self.call.on_exit):
                return NodeEnd(NodePhase.FAILED, reason)
            name = group_name(self.node.name, index)
            group = self.interpreter.nodes.add(name, "StepGroup", "", self.call.task)
            try:
                expanded = [(step, expand_child(step, workflow_scope | scope)) for step in steps]
            except UsageError as error:
                self.interpreter.nodes.set_phase(group, NodePhase.ERROR, str(error))
                return NodeEnd(NodePhase.FAILED, str(error))
            step_nodes = await asyncio.gather(*(self._run_step(group, step, children) for step, children in expanded))
            if failure := self._group_failure(group, steps, step_nodes):
                return failure
            for step, nodes in zip(steps, step_nodes, strict=True):
                scope |= self._step_scope(group, step, nodes)
        return self._collect_outputs(scope)

    async def _run_step(self, group: WorkflowNode, step: Manifest, children: list[Manifest]) -> list[WorkflowNode]:
        if not children:
            name, template = f"{group.name}.{step['name']}", step["template"]
            return [
                self.interpreter.nodes.add(
                    name, "Skipped", template, self.call.task_of(step["name"]), NodePhase.SKIPPED, EMPTY_FAN_OUT_MESSAGE
                )
            ]
        return await asyncio.gather(
            *(
                self.interpreter.run_child(
                    self.call, f"{group.name}.{child['name']}", child, "steps", self.call.task_of(step["name"])
                )
                for child in children
            )
        )

    def _group_failure(
        self, group: WorkflowNode, steps: list[Manifest], step_nodes: list[list[WorkflowNode]]
    ) -> NodeEnd | None:
        for step, nodes in zip(steps, step_nodes, strict=True):
            for node in nodes:
                if node.failed and not tolerates_failure(step, node.phase):
                    message = f"child '{node.id}' failed"
                    self.interpreter.nodes.set_phase(group, NodePhase.FAILED, message)
                    return NodeEnd(NodePhase.FAILED, message)
        self.interpreter.nodes.set_phase(group, NodePhase.SUCCEEDED)
        return None

    def _step_scope(self, group: WorkflowNode, step: Manifest, nodes: list[WorkflowNode]) -> VariableScope:
        template = self.interpreter.definition.template(step["template"])
        is_expanded = is_fan_out(step) and nodes[0].name != f"{group.name}.{step['name']}"
        return node_scope("steps", step["name"], replace(group, items=nodes) if is_expanded else nodes[0], template)

    def _collect_outputs(self, scope: VariableScope) -> NodeEnd:
        try:
            return NodeEnd(NodePhase.SUCCEEDED, outputs=collect_outputs(self.template, scope))
        except UsageError as error:
            return NodeEnd(NodePhase.ERROR, str(error))
